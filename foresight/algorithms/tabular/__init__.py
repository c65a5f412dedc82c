"""Dynamic programming, temporal differences and Monte Carlo on tables."""

"""Dynamic programming on explicit models."""

"""Policies of robots that imitate demonstrations. One file per method."""

"""Environments: control, tabular, games and text."""

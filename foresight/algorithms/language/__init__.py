"""Policies whose actions are tokens."""

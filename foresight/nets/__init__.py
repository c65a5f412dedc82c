"""Modules that know shapes and what flows, not algorithms."""

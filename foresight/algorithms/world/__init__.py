"""Agents that learn a model of their environment and practice inside it."""

"""Explicit MDPs: grid worlds, toy-text, and Sutton & Barto's examples."""

from __future__ import annotations

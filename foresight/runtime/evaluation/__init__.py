"""Evaluation, matches, recordings and model error."""

from __future__ import annotations

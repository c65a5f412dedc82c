"""Thinking at query time: more samples, searches over thoughts, critique and revision, each at a counted budget."""

from __future__ import annotations

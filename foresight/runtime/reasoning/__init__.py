"""Thinking at query time as files: tables, curves, trees, and reports of faithfulness."""

from __future__ import annotations

"""Two-player zero-sum games with perfect information."""

from __future__ import annotations

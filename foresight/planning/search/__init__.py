"""Monte Carlo tree search over any model."""

from __future__ import annotations

"""What a run reports while it trains: metrics, progress, warnings, profile."""

from __future__ import annotations

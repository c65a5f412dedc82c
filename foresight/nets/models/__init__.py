"""Networks and learned models for search."""

from __future__ import annotations

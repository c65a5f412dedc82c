"""Dynamic programming over explicit MDPs."""

from __future__ import annotations

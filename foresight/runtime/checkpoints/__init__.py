"""Checkpoints: a State as safetensors and JSON."""

from __future__ import annotations

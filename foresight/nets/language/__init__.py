"""Causal language models: loading, caches, adapters, heads."""

from __future__ import annotations

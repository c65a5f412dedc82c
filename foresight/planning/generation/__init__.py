"""Sampling from language models: batching, caches, speculation, servers."""

from __future__ import annotations

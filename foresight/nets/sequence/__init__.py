"""Sequence models: transformers and recurrent networks whose memory is an explicit carry."""

from __future__ import annotations

"""Learned models that search plans with."""

from __future__ import annotations

"""Actors and learners in several processes or on several machines."""

from __future__ import annotations

"""Control environments: Gymnasium, EnvPool, Atari and our own compiled ones."""

from __future__ import annotations

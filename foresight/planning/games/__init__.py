"""Opponents, exact solvers and exhaustive proofs for games."""

from __future__ import annotations

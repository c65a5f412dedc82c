"""What turns experience into gradient steps: optimizers, micro-batches, targets, corpora."""

from __future__ import annotations

"""Shapes that must agree: a loss that broadcasts has the wrong value and a plausible size."""

from __future__ import annotations

from torch import Tensor


def same(**tensors: Tensor | float | None) -> None:
    """Refuse to broadcast: `[B]` against `[B, 1]` would silently give `[B, B]`. Numbers and scalars fit any shape.

    Raises ValueError with the shapes by name.
    """
    shapes = {name: tuple(x.shape) for name, x in tensors.items() if isinstance(x, Tensor) and x.dim()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"All of these must have one shape, but they have {shapes}.")

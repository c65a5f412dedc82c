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


def same_steps(**tensors: Tensor | None) -> None:
    """The same for what is given for each step: all have one shape `[B, T]`, and a scalar does not fit.

    Raises ValueError with the shapes by name.
    """
    shapes = {name: tuple(x.shape) for name, x in tensors.items() if x is not None}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise ValueError(f"All of these must have one shape [B, T], but they have {shapes}.")

"""What autograd keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch


def kept(function: Callable[[], object]) -> int:
    """The bytes that autograd holds after `function`, counted once a storage."""
    held: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function()
    return sum(held.values())

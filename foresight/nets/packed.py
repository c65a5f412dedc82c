"""Weights in the order in which oneDNN multiplies by them, for sampling on a CPU: the same products, sooner.

A plain weight is put in order anew at every product, which is most of the work where few rows are decoded: a product of
1 to 16 rows in bfloat16 takes half the time with a packed one, one of 64 rows a tenth less.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import Tensor, nn

PACK = 24  # tokens that are written one after another from which on it pays to pack the weights first
ABLE = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextlib.contextmanager
def packed(kind: torch.dtype | None, rows: int, *modules: nn.Module) -> Iterator[None]:
    """Within it the linear layers of `modules` multiply by packed copies of their weights as they are now, in `kind`.

    `rows` is how many they are multiplied by at once, as far as that is known. With `kind` None (the type of the
    weights), away from CPUs and where torch has no such products, nothing changes. What is computed with a gradient
    does not see the copies.
    """
    able = ABLE and kind is torch.bfloat16
    layers = dict.fromkeys(part for module in modules for part in module.modules() if able and _whole(part))
    taken = [layer for layer in layers if "forward" not in vars(layer)]  # those that nobody has packed around this
    try:
        with torch.no_grad():
            for layer in taken:
                weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.to(kind), rows)
                bias = None if layer.bias is None else layer.bias.to(kind)
                layer.forward = functools.partial(_multiply, layer, weight, bias)  # type: ignore[method-assign]
        yield
    finally:
        for layer in taken:
            vars(layer).pop("forward", None)


def _whole(part: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether this is a linear layer whose weight is here, and not one part of it (FSDP)."""
    return type(part) is nn.Linear and type(part.weight) is nn.Parameter and part.weight.device.type == "cpu"


def _multiply(layer: nn.Linear, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return nn.Linear.forward(layer, x)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(weight.dtype), weight, bias, "none", [], "")
    return result

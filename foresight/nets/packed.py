"""Weights in the order in which oneDNN multiplies by them, for sampling on a CPU: the same products, sooner.

A plain weight is put in order anew at every product, which is most of the work where few rows are decoded: a product of
1 to 16 rows in bfloat16 takes half the time with a packed one, one of 64 rows a tenth less.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def packed(kind: torch.dtype | None, rows: int, *modules: nn.Module) -> Iterator[None]:
    """Within it the linear layers of `modules` multiply by packed copies of their weights as they are now, in `kind`.

    `rows` is how many they are multiplied by at once, as far as that is known. With `kind` None (the type of the
    weights), away from CPUs and where torch has no such products, nothing changes. What is computed with a gradient
    does not see the copies.
    """
    layers = {part: None for module in modules for part in module.modules() if type(part) is nn.Linear}
    able = kind is torch.bfloat16 and torch.backends.mkldnn.is_available()
    taken = [layer for layer in layers if able and layer.weight.device.type == "cpu" and "forward" not in vars(layer)]
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


def _multiply(layer: nn.Linear, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return nn.Linear.forward(layer, x)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(weight.dtype), weight, bias, "none", [], "")
    return result

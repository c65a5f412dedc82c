"""Several MLPs over the same inputs, fast for small networks, which are bound by calls, not by arithmetic.

On a CPU a layer of 64x64 takes less time than its call. `StackedMLP` therefore keeps all weights in one flat
parameter (the optimizer and the gradient clip see one tensor), and is a single autograd node of any depth. What it
computes is `plain`; `ops.fused.mlp` is its fast twin. Under autocast to bfloat16 large layers compute in it, and small
ones, which are no faster in it, in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foresight import errors
from foresight.data.trajectory import Tree
from foresight.nets.mlp import ACTIVATIONS, SQRT2
from foresight.ops.fused import mlp as fused_mlp
from foresight.ops.fused.mlp import Member, Place

FEW_ROWS = 64  # with at most so many rows a whole forward pass is faster as a compiled loop, of large layers too


class StackedMLP(nn.Module):
    """One MLP for each entry of `outputs`, over the same inputs: `[..., inputs]` to `[..., outputs[i]]` each.

    Each has `hidden` layers with orthogonal weights of gain √2, and a linear output layer of gain `gains[i]`; all
    biases start at 0. The weights live in `flat` `[parameters]`; `layers()` returns them layer by layer. With `twice`
    gradients can be differentiated again: plain autograd, which is slower.
    Raises UserError for an unknown activation.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: Sequence[int],
        gains: Sequence[float],
        activation: str = "tanh",
        twice: bool = False,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise errors.unknown("activation", activation, ACTIVATIONS)
        self.activation, self._compiled, self._twice = activation, activation in ("tanh", "relu"), twice
        self.sizes = [[inputs, *hidden, size] for size in outputs]
        count = sum(a * b + b for sizes in self.sizes for a, b in itertools.pairwise(sizes))
        self.flat = nn.Parameter(torch.zeros(count))
        self._views: tuple[int, list[Member]] | None = None
        self._memory: tuple[Tensor, list[Place]] | None = None
        for mlp, gain in zip(self.layers(), gains, strict=True):
            for i, (weight, _) in enumerate(mlp):
                nn.init.orthogonal_(weight, SQRT2 if i < len(mlp) - 1 else gain)

    def layers(self) -> list[list[tuple[Tensor, Tensor]]]:
        """`(weight [out, in], bias [out])` of every layer of every MLP: views of `flat`, without gradient."""
        return _split(self.flat.detach(), self.sizes)

    def last_layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Weight and bias of the last layer of MLP `index`, as views without gradient."""
        return self.layers()[index][-1]

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        """The output of every MLP."""
        return self._run(x, range(len(self.sizes)))

    def single(self, index: int, x: Tensor) -> Tensor:
        """The output of MLP `index`."""
        return self._run(x, [index])[0]

    def frozen(self, x: Tensor) -> Sequence[Tensor]:
        """`forward` with frozen weights: the gradient flows to `x` only, which halves the backward pass."""
        return self._run(x, range(len(self.sizes)), frozen=True)

    def vjp(self, x: Tensor) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], None]] | None:
        """`forward` over rows `[N, inputs]` without autograd: the outputs, and the backward pass.

        The latter takes the gradients of the outputs and writes that of the weights to `flat.grad`, in memory that
        the next call overwrites. None for an unsupported device, activation or dtype: use autograd.
        """
        if not self._fast(x):
            return None
        layers = self._layers()
        with torch.no_grad():
            activations = fused_mlp.forward(x, layers, self.activation, _kind())

        def back(grads: Sequence[Tensor]) -> None:
            result, places = self._gradient()
            with torch.no_grad():
                kept = [passed[:-1] for passed in activations]
                fused_mlp.backward(grads, x, kept, layers, places, self.activation, False)
            self.flat.grad = result

        return [outputs[-1] for outputs in activations], back

    def small_members(self, x: Tree) -> list[Member] | None:
        """`members`; None where a layer is large."""
        found = self.members(x)
        return None if found is None or any(mlp.large for mlp in found) else found

    def members(self, x: Tree) -> list[Member] | None:
        """Its MLPs for compiled loops over rows such as `x`; None where products are oneDNN's, or `vjp` is None."""
        if not isinstance(x, Tensor) or not self._fast(x) or fused_mlp.by_onednn(self._layers(), _kind()):
            return None
        return self._layers()

    def _run(self, x: Tensor, chosen: Sequence[int], frozen: bool = False) -> Sequence[Tensor]:
        if x.dim() != 2:
            shape = x.shape[:-1]
            return [y.view(*shape, y.shape[-1]) for y in self._run(x.reshape(-1, x.shape[-1]), chosen, frozen)]
        if not self._fast(x) or (self._twice and torch.is_grad_enabled()):
            parts = _split(self.flat.detach() if frozen else self.flat, self.sizes)
            return [plain(x, parts[i], self.activation).to(self.flat.dtype) for i in chosen]
        layers = [self._layers()[i] for i in chosen]
        if not torch.is_grad_enabled():
            if x.shape[0] <= FEW_ROWS:
                return fused_mlp.outputs(x, layers, self.activation)
            return [passed[-1] for passed in fused_mlp.forward(x, layers, self.activation, _kind(), keep=False)]
        weights = self.flat.detach() if frozen else self.flat
        return _Node.apply(x, weights, self, layers, chosen)  # type: ignore[no-untyped-call]  # torch's

    def _fast(self, x: Tensor) -> bool:
        flat = self._parameters["flat"]  # attribute look-up of a module costs as much as a small product
        assert flat is not None
        return (
            self._compiled
            and x.is_cpu
            and flat.is_cpu
            and x.dtype == flat.dtype == torch.float32
            and (not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") == torch.bfloat16)
        )

    def _layers(self) -> list[Member]:
        flat = self._parameters["flat"]
        assert flat is not None
        if self._views is None or self._views[0] != flat.data_ptr():  # the parameter has moved in memory
            self._views = flat.data_ptr(), _members(flat.detach(), self.sizes)
        return self._views[1]

    def _gradient(self) -> tuple[Tensor, list[Place]]:
        """A buffer for the gradient of `flat`, and its views; every call returns the same buffer."""
        if self._memory is None:
            memory = torch.empty_like(self.flat, requires_grad=False)
            self._memory = memory, _places(memory, self.sizes)
        return self._memory

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": None, "_memory": None}  # a copy has weights of its own


class _Node(torch.autograd.Function):
    """All layers of all MLPs as one node; the gradient equals autograd's, but cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flat: Tensor, module: StackedMLP, layers: Any, chosen: Any) -> tuple[Tensor, ...]:
        ctx.module, ctx.layers, ctx.chosen = module, layers, chosen
        activations = fused_mlp.forward(x, layers, module.activation, _kind())
        outputs = tuple(a.pop() for a in activations)  # an output kept here would keep its own graph alive
        ctx.activations = activations
        ctx.save_for_backward(x, flat)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, _ = ctx.saved_tensors  # raises if a weight was changed in between
        module, layers = ctx.module, ctx.layers
        inputs, weights = ctx.needs_input_grad[:2]
        result, places = module._gradient()
        if weights and len(ctx.chosen) < len(module.sizes):
            result.zero_()
        chosen_places = [places[i] for i in ctx.chosen] if weights else None
        into = fused_mlp.backward(grads, x, ctx.activations, layers, chosen_places, module.activation, inputs)
        return into if inputs else None, result.clone() if weights else None, None, None, None


def _kind() -> torch.dtype:
    """The dtype of products in this context."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32


def _split(flat: Tensor, mlps: Sequence[Sequence[int]]) -> list[list[tuple[Tensor, Tensor]]]:
    result, at = [], 0
    for sizes in mlps:
        layers = []
        for a, b in itertools.pairwise(sizes):
            layers.append((flat[at : at + a * b].view(b, a), flat[at + a * b : at + a * b + b]))
            at += a * b + b
        result.append(layers)
    return result


def _places(flat: Tensor, mlps: Sequence[Sequence[int]]) -> list[Place]:
    counts = [sum(a * b + b for a, b in itertools.pairwise(sizes)) for sizes in mlps]
    return [Place(part.numpy(), mlp) for part, mlp in zip(flat.split(counts), _split(flat, mlps), strict=True)]


def _members(flat: Tensor, mlps: Sequence[Sequence[int]]) -> list[Member]:
    return [Member.of(place, sizes) for place, sizes in zip(_places(flat, mlps), mlps, strict=True)]


def plain(x: Tensor, layers: Sequence[tuple[Tensor, Tensor]], activation: str) -> Tensor:
    """One MLP, in plain torch."""
    for weight, bias in layers[:-1]:
        x = ACTIVATIONS[activation](nn.functional.linear(x, weight, bias))
    return nn.functional.linear(x, *layers[-1])

"""MLPs side by side, made for speed: small networks are bound by the number of calls, not by arithmetic.

On a CPU a layer of 64x64 costs less than the machinery around it. `StackedMLP` therefore keeps all weights in one flat
parameter (the optimizer and the gradient clip see one tensor), is one node for autograd whatever its depth, uses
numpy where that is the faster of the two (for tanh, and for some products with few rows or columns), and leaves large
layers to oneDNN, by the operator that torch has for its compiled graphs: on some processors it takes half the time of
the library behind `torch.mm`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foresight import errors
from foresight.nets.mlp import ACTIVATIONS, SQRT2

FEW_COLUMNS = 8  # of a product, up to which torch takes several times as long as it needs
FEW_ROWS = 64  # rows up to which all of numpy is faster than torch
LARGE = 2**15  # weights of a layer from which oneDNN pays in spite of 10 µs more a call
LARGE_GRADIENT = 2**23  # the same for multiplications of a product that makes the gradient of weights
ONEDNN = torch.backends.mkldnn.is_available()


class Layer(NamedTuple):
    """One layer as views of the flat parameter, for torch and for numpy; `_t` is transposed, `[in, out]`."""

    weight: Tensor
    weight_t: Tensor
    bias: Tensor
    array_t: np.ndarray
    offset: np.ndarray


class StackedMLP(nn.Module):
    """One MLP for each entry of `outputs`, all over the same inputs: `[..., inputs]` to `[..., outputs[i]]` each.

    Each has `hidden` layers with orthogonal weights of gain √2, and a linear output layer of gain `gains[i]`; all
    biases start at 0. The weights live in `flat` `[parameters]`; `layers()` shows them layer by layer. With `twice`
    gradients can be differentiated again, at the price of speed: they are autograd's then.
    Raises UserError for an activation that does not exist.
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
        self._views: tuple[int, list[list[Layer]]] | None = None
        self._memory: tuple[Tensor, list[list[tuple[Tensor, Tensor]]]] | None = None
        for tower, gain in zip(self.layers(), gains, strict=True):
            for i, (weight, _) in enumerate(tower):
                nn.init.orthogonal_(weight, SQRT2 if i < len(tower) - 1 else gain)

    def layers(self) -> list[list[tuple[Tensor, Tensor]]]:
        """`(weight [out, in], bias [out])` of every layer of every tower: views of `flat`, without gradient."""
        return _split(self.flat.detach(), self.sizes)

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        """What every tower says."""
        return self._run(x, range(len(self.sizes)))

    def only(self, index: int, x: Tensor) -> Tensor:
        """What tower `index` says."""
        return self._run(x, [index])[0]

    def frozen(self, x: Tensor) -> Sequence[Tensor]:
        """What every tower says, where the gradient goes to `x` alone: half of the work of a backward pass."""
        return self._run(x, range(len(self.sizes)), frozen=True)

    def vjp(self, x: Tensor) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], None]] | None:
        """`forward` over rows `[N, inputs]` without autograd: what the towers say, and the way back.

        The latter takes the gradients of what they said and leaves that of the weights in `flat.grad`, in memory
        that the next call overwrites. None where only autograd can do it (another device, activation or dtype).
        """
        if not self._fast(x):
            return None
        layers = self._layers()
        with torch.no_grad():
            activations = [_through(x, tower, self.activation) for tower in layers]

        def back(grads: Sequence[Tensor]) -> None:
            result, places = self._gradient()
            with torch.no_grad():
                for i, grad in enumerate(grads):
                    _back(grad, x, activations[i], layers[i], places[i], self.activation, False)
            self.flat.grad = result

        return [tower[-1] for tower in activations], back

    def _run(self, x: Tensor, chosen: Sequence[int], frozen: bool = False) -> Sequence[Tensor]:
        if x.dim() != 2:
            shape = x.shape[:-1]
            return [y.view(*shape, y.shape[-1]) for y in self._run(x.reshape(-1, x.shape[-1]), chosen, frozen)]
        if not self._fast(x) or (self._twice and torch.is_grad_enabled()):
            parts = _split(self.flat.detach() if frozen else self.flat, self.sizes)
            return [_plain(x, parts[i], self.activation) for i in chosen]
        layers = self._layers()
        if not torch.is_grad_enabled():
            if x.shape[0] <= FEW_ROWS:
                array = x.numpy()
                return [torch.from_numpy(_few(array, layers[i], self.activation)) for i in chosen]
            return [_through(x, layers[i], self.activation)[-1] for i in chosen]
        return _Node.apply(x, self.flat.detach() if frozen else self.flat, self, layers, chosen)

    def _fast(self, x: Tensor) -> bool:
        flat = self._parameters["flat"]  # looking up an attribute of a module costs as much as a small product
        assert flat is not None
        return (
            self._compiled
            and x.is_cpu
            and flat.is_cpu
            and x.dtype == flat.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
        )

    def _layers(self) -> list[list[Layer]]:
        flat = self._parameters["flat"]
        assert flat is not None
        if self._views is None or self._views[0] != flat.data_ptr():  # the parameter has moved in memory
            self._views = flat.data_ptr(), _layers(flat.detach(), self.sizes)
        return self._views[1]

    def _gradient(self) -> tuple[Tensor, list[list[tuple[Tensor, Tensor]]]]:
        """Memory for a gradient of `flat`, and its views; every call hands out the same."""
        if self._memory is None:
            memory = torch.empty_like(self.flat, requires_grad=False)
            self._memory = memory, _split(memory, self.sizes)
        return self._memory

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": None, "_memory": None}  # a copy has weights of its own


class _Node(torch.autograd.Function):
    """All layers of all towers as one node; the derivative is autograd's, but cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flat: Tensor, towers: StackedMLP, layers: Any, chosen: Any) -> tuple[Tensor, ...]:
        ctx.towers, ctx.layers, ctx.chosen = towers, layers, chosen
        activations = [_through(x, layers[i], towers.activation) for i in chosen]
        outputs = tuple(a.pop() for a in activations)  # kept here they would hold their own graph alive for ever
        ctx.activations = activations
        ctx.save_for_backward(x, flat)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, _ = ctx.saved_tensors  # raises if a weight was changed since
        towers, layers = ctx.towers, ctx.layers
        inputs, weights = ctx.needs_input_grad[:2]
        result, places = towers._gradient()
        if weights and len(ctx.chosen) < len(towers.sizes):
            result.zero_()
        into: Tensor | None = None
        for i, grad, activations in zip(ctx.chosen, grads, ctx.activations, strict=True):
            place = places[i] if weights else None
            grad = _back(grad, x, activations, layers[i], place, towers.activation, inputs)
            into = grad if into is None else into + grad
        return into if inputs else None, result.clone() if weights else None, None, None, None


def _split(flat: Tensor, towers: Sequence[Sequence[int]]) -> list[list[tuple[Tensor, Tensor]]]:
    result, at = [], 0
    for sizes in towers:
        layers = []
        for a, b in itertools.pairwise(sizes):
            layers.append((flat[at : at + a * b].view(b, a), flat[at + a * b : at + a * b + b]))
            at += a * b + b
        result.append(layers)
    return result


def _layers(flat: Tensor, towers: Sequence[Sequence[int]]) -> list[list[Layer]]:
    return [[Layer(w, w.t(), b, w.numpy().T, b.numpy()) for w, b in tower] for tower in _split(flat, towers)]


def _plain(x: Tensor, layers: Sequence[tuple[Tensor, Tensor]], activation: str) -> Tensor:
    """One tower, in torch alone."""
    for weight, bias in layers[:-1]:
        x = ACTIVATIONS[activation](nn.functional.linear(x, weight, bias))
    return nn.functional.linear(x, *layers[-1])


def _few(x: np.ndarray, layers: Sequence[Layer], activation: str) -> np.ndarray:
    """One tower over few rows, in numpy alone."""
    last = len(layers) - 1
    for i, layer in enumerate(layers):
        x = np.dot(x, layer.array_t)
        x += layer.offset
        if i < last:
            np.tanh(x, out=x) if activation == "tanh" else np.maximum(x, 0, out=x)
    return x


def _through(x: Tensor, layers: Sequence[Layer], activation: str) -> list[Tensor]:
    """The output of every layer of one tower. Each row's bits do not depend on the other rows."""
    outputs, last = [], len(layers) - 1
    for i, layer in enumerate(layers):
        if large := _large(layer.weight):
            x = linear(x, layer.weight, layer.bias, "relu" if i < last and activation == "relu" else "none")
        else:
            x = torch.addmm(layer.bias, x, layer.weight_t)
        if i < last:
            if activation == "tanh":
                array = x.numpy()
                np.tanh(array, out=array)
            elif not large:
                x.relu_()
        outputs.append(x)
    return outputs


def _back(
    grad: Tensor,
    x: Tensor,
    activations: Sequence[Tensor],
    layers: Sequence[Layer],
    places: Sequence[tuple[Tensor, Tensor]] | None,
    activation: str,
    inputs: bool,
) -> Tensor:
    """Write the gradient of one tower's weights to `places`, if any; returns that of its inputs if they want one."""
    for i in reversed(range(len(layers))):
        if i < len(layers) - 1:  # in place: it is the scratch written below, one layer up
            if activation == "tanh":
                torch.ops.aten.tanh_backward.grad_input(grad, activations[i], grad_input=grad)
            else:
                torch.ops.aten.threshold_backward.grad_input(grad, activations[i], 0, grad_input=grad)
        below = activations[i - 1] if i else x
        if places is not None:
            weight, bias = places[i]
            torch.sum(grad, 0, out=bias)
            _product(grad.t(), below, weight)
        if i or inputs:
            if _large(layers[i].weight):
                grad = linear(grad, layers[i].weight_t)
            else:
                into = _scratch(i % 2, below) if i else torch.empty_like(below)
                grad = _product(grad, layers[i].weight, into)
    return grad


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """`a @ b`, in numpy where it is narrow and small (and numpy stays on one thread)."""
    if min(out.shape) <= FEW_COLUMNS and a.numel() * b.shape[1] <= 2**18:
        np.dot(a.numpy(), b.numpy(), out=out.numpy())
        return out
    if a.numel() * b.shape[1] >= LARGE_GRADIENT and ONEDNN:
        return out.copy_(linear(a, b.t()))
    return torch.mm(a, b, out=out)


def _large(weight: Tensor) -> bool:
    return weight.numel() >= LARGE and ONEDNN


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none") -> Tensor:
    """A linear layer, and what follows it ("relu"), by oneDNN; without autograd."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "")
    return result


_kept = threading.local()


def _scratch(slot: int, like: Tensor) -> Tensor:
    """Memory of the shape of `like` that the next call may overwrite: fresh pages cost more than the product."""
    held = getattr(_kept, f"slot{slot}", None)
    if held is None or held.numel() < like.numel():
        held = torch.empty(like.numel())
        setattr(_kept, f"slot{slot}", held)
    return held[: like.numel()].view(like.shape)

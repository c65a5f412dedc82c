"""Weights packed in oneDNN's layout, for sampling on a CPU: the same products, faster.

A plain weight is reordered at every product, which is most of the work when few rows are decoded: a product of 1 to 16
rows in bfloat16 takes half the time with a packed weight, one of 64 rows a tenth less. Half of a decoding step is the
overhead of small operations, so layers of known models are fused: projections with the same input are one product,
queries and keys are rotated together, in a step of decoding by the loop that attends (`fused_attention`), and what is
between two products is one loop (`ops.fused.decoder`).

A single row needs no packing: all layers of a known model are then one compiled loop over plain weights in bfloat16
(`nets.language.fused_token`), for one token or a few; only prompts are read by the products of torch. These copies are
kept until a weight changes or several rows are decoded, as one answer after the other is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from foresight.nets.language.cache import DecodeStep, Extension, Level
from foresight.nets.language.checkpointing import SILU

if TYPE_CHECKING:
    from foresight.nets.language.fused_token import Layers

T = TypeVar("T")
FEW = 8  # tokens of one row that the compiled loops take at once
PACK = 8  # steps of decoding from which packing the weights pays
KIND = torch.bfloat16  # the dtype of packed weights
ABLE = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
USUAL = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")  # layers of transformers
LINEAR = (*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))
TOGETHER = (3, 1, 2, 1)  # so many of these have the same input
Product = Callable[[Tensor], Tensor]
Products = tuple[Product, ...]  # of a layer: queries, keys and values; out; gate and up; down
COPIES: WeakKeyDictionary[nn.Module, tuple[Any, Any]] = WeakKeyDictionary()  # of weights, for a single row


@contextlib.contextmanager
def packed(kind: torch.dtype | None, rows: int, *modules: nn.Module) -> Iterator[None]:
    """A context in which the linear layers of `modules` use packed copies of their present weights, in dtype `kind`.

    `rows` is the expected number of rows a product; 1 also for a few tokens of a single row. With `kind` None (the
    dtype of the weights), on accelerators and where torch lacks these products, nothing changes. Computations with a
    gradient use the plain weights.
    """
    able = ABLE and kind is KIND
    parts: dict[Any, None] = dict.fromkeys(part for module in modules if able for part in module.modules())
    layers = [part for part in parts if _usual(part)]
    inside = {part for layer in layers for part in layer.modules()}
    linear = [part for part in parts if _whole(part) and part not in inside]
    stacks = [part for part in parts if rows == 1 and _stack(part)]
    single = {*linear, *stacks} if rows == 1 else set()
    for part in parts:
        if part not in single:
            COPIES.pop(part, None)
    forward = {
        part: vars(part).get("forward") for part in (*layers, *linear, *stacks)
    }  # `checkpointing.recompute` sets one, too
    taken: list[Any] = [
        part for part, own in forward.items() if not isinstance(own, functools.partial)
    ]  # not yet packed
    try:
        with torch.no_grad():
            known: dict[Any, Products] = {}  # of the layers of stacks
            for part in reversed(taken):  # stacks before their layers
                part.forward = _linear(part, rows) if _whole(part) else _fused(part, rows, known)
        yield
    finally:
        for part in taken:
            vars(part).pop("forward", None)
            if own := forward[part]:
                part.forward = own


def _whole(part: Any) -> TypeGuard[nn.Linear]:
    """Whether this is a linear layer with its whole weight on the CPU: not sharded by FSDP."""
    return type(part) is nn.Linear and type(part.weight) is nn.Parameter and part.weight.device.type == "cpu"


def _usual(part: nn.Module) -> bool:
    """Whether `_run` can compute this layer: a known kind with plain weights and SiLU, no adapters, no experts."""
    if type(part).__name__ not in USUAL or type(part.get_submodule("mlp.act_fn")).__name__ not in SILU:
        return False
    return all(_whole(part.get_submodule(name)) for name in LINEAR)


def _stack(part: nn.Module) -> bool:
    """Whether `_tokens` can compute this model without its head: known layers only.

    Biases may be those of queries, keys and values.
    """
    layers = getattr(part, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(part, "rotary_emb") or not hasattr(part, "norm"):
        return False
    ready = all(_usual(layer) and not isinstance(vars(layer).get("forward"), functools.partial) for layer in layers)
    shapes = {tuple((name, weight.shape) for name, weight in layer.named_parameters()) for layer in layers}
    plain = ready and all(layer.get_submodule(name).bias is None for layer in layers for name in LINEAR[3:])
    return plain and len(shapes) == 1


def _kept(part: nn.Module, make: Callable[[Any], T]) -> T:
    """What `make` makes of a module's weights: what it made before, while they are the same."""
    marks = [_mark(weight.detach()) for weight in part.parameters()]
    before, made = COPIES.get(part, (None, None))
    if before != marks:
        made = None
        COPIES.pop(part, None)  # its memory is free before the new copy takes some
        made = make(part)
        COPIES[part] = marks, made
    return cast(T, made)


def _mark(weight: Tensor) -> tuple[Any, ...]:
    """What differs once a weight has changed: torch's count of changes, and some values.

    Torch does not count changes of `weight.data`, nor those of fused optimizers (`training.language.adamw` does).
    """
    changes = None if weight.is_inference() else weight._version
    return weight.data_ptr(), changes, *weight.flatten()[:: max(1, weight.numel() // 8)].tolist()


def _joined(*layers: nn.Linear, into: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The concatenated weights and biases of linear layers, in bfloat16."""
    shape = sum(layer.out_features for layer in layers), layers[0].in_features
    weight = torch.empty(shape, dtype=KIND) if into is None else into
    for into, layer in zip(weight.split([layer.out_features for layer in layers]), layers, strict=True):
        into.copy_(layer.weight)
    biases = [layer.bias.to(KIND) for layer in layers if layer.bias is not None]
    return weight, torch.cat(biases) if biases else None


def _product(rows: int, *layers: nn.Linear) -> Product:
    """x ↦ the concatenated outputs `[..., O]` of linear layers, in bfloat16."""
    weight, bias = _joined(*layers)
    weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def multiply(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(KIND), weight, bias, "none", [], "")
        return result

    return multiply


def _plain(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return functional.linear(x.to(KIND), weight, bias)


def _linear(layer: nn.Linear, rows: int) -> functools.partial[Tensor]:
    return functools.partial(_multiply, layer, _kept(layer, _one) if rows == 1 else _product(rows, layer))


def _one(layer: nn.Linear) -> Product:
    """x ↦ its output: of few rows by a compiled loop in float32, of more by torch in bfloat16."""
    from foresight.nets.language import fused_token  # late: numba is slow to import

    weight, bias = _joined(layer, into=fused_token.empty(layer.out_features, layer.in_features))
    held = fused_token.bits(weight), fused_token.floats(bias)

    def multiply(x: Tensor) -> Tensor:
        if x.numel() > FEW * x.shape[-1]:
            return _plain(weight, bias, x)
        return fused_token.linear(*held, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    return multiply


def _multiply(layer: nn.Linear, product: Product, x: Tensor) -> Tensor:
    return nn.Linear.forward(layer, x) if torch.is_grad_enabled() else product(x)


def _groups(layer: Any) -> list[list[nn.Linear]]:
    """The linear layers of a layer, those with the same input together."""
    found = iter(layer.get_submodule(name) for name in LINEAR)
    return [list(itertools.islice(found, count)) for count in TOGETHER]


def _products(layer: Any, rows: int) -> Products:
    return tuple(_product(rows, *group) for group in _groups(layer))


def _fused(part: Any, rows: int, known: dict[Any, Products]) -> functools.partial[Any]:
    """The forward pass of a layer or a stack, which adds the products of its layers to the `known` ones."""
    if not _usual(part):
        copies, products = _kept(part, _copied)
        known |= zip(part.layers, products, strict=True)
        return functools.partial(_tokens, part, part.forward, copies, _Buffers())
    from transformers import AttentionInterface

    attention = AttentionInterface()[part.self_attn.config._attn_implementation]
    return functools.partial(_run, part, part.forward, attention, known.get(part) or _products(part, rows))


def _normed(norm: Any, hidden: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """hidden + branch, and its norm."""
    from foresight.nets.language.fused_token import floats  # late: numba is slow to import
    from foresight.ops.fused import decoder

    return decoder.normed(hidden, floats(norm.weight), norm.variance_epsilon, branch)


def _run(
    layer: Any,
    plain: Callable[..., Tensor],
    attention: Callable[..., tuple[Tensor, Any]],
    products: Products,
    hidden: Tensor,  # [B, T, D]
    *,
    position_embeddings: tuple[Tensor, Tensor],
    **kwargs: Any,
) -> Tensor:
    """One layer as in transformers: pre-norm attention, then a pre-norm gated MLP."""
    from foresight.ops.fused import decoder  # late: numba is slow to import

    if torch.is_grad_enabled() or not decoder.able(hidden):
        return plain(hidden, position_embeddings=position_embeddings, **kwargs)
    attend, (project, out, widen, narrow) = layer.self_attn, products
    shape = hidden.shape[:-1]
    heads = project(_normed(layer.input_layernorm, hidden)[1]).view(*shape, -1, attend.head_dim)
    mixed = _step(attend, heads, *position_embeddings, kwargs.get("tree"))
    if mixed is None:
        query, key, value = _rotated(attend, heads, *position_embeddings)
        mixed, _ = attention(attend, query, key, value, scaling=attend.scaling, **kwargs)
    hidden, fed = _normed(layer.post_attention_layernorm, hidden, out(mixed.reshape(*shape, -1)))
    return hidden.add_(narrow(decoder.gated(widen(fed))))


def _rotated(attend: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[B, heads, T, D]` of what is projected, `[B, T, all heads, D]`."""
    size = attend.head_dim
    rotated, value = heads.tensor_split([-attend.v_proj.out_features // size], 2)  # queries and keys; values
    if hasattr(attend, "q_norm"):
        query, key = rotated.tensor_split([attend.q_proj.out_features // size], 2)
        rotated = torch.cat([attend.q_norm(query), attend.k_norm(key)], 2)
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = sin.chunk(2, -1)
    rotated = torch.addcmul(rotated * cos, rotated.roll(size // 2, -1), torch.cat([-first, second], -1)).to(value.dtype)
    query, key = rotated.tensor_split([attend.q_proj.out_features // size], 2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _step(attend: Any, heads: Tensor, cos: Tensor, sin: Tensor, tree: Any) -> Tensor | None:
    """What rows attend to in a step of decoding, `[B, H, D]`; None if torch computes it."""
    if not isinstance(tree, DecodeStep) or tree.level.keys[0].dtype is not KIND:
        return None
    from foresight.nets.language import fused_attention  # late: numba is slow to import

    if not fused_attention.able(heads, tree, attend.layer_idx):
        return None
    return fused_attention.turn_and_attend(heads[:, 0], cos[:, 0], sin[:, 0], attend, tree, attend.layer_idx)


def _copied(stack: Any) -> tuple[Layers, list[Products]]:
    """The weights of all layers in bfloat16, for `_tokens`, and the products of each layer by the same memory."""
    from foresight.nets.language.fused_token import Layers, bits, empty, floats

    def norms(name: str) -> Any:
        return floats(torch.stack([layer.get_submodule(name).weight for layer in stack.layers]))

    first, count = stack.layers[0], len(stack.layers)
    weights = [empty(count, sum(part.out_features for part in group), group[0].in_features) for group in _groups(first)]
    joined = [
        [_joined(*group, into=weight[n]) for group, weight in zip(_groups(layer), weights, strict=True)]
        for n, layer in enumerate(stack.layers)
    ]
    biases = [row[0][1] for row in joined if row[0][1] is not None]
    nothing = np.empty((count, 0), np.float32)
    within = hasattr(first.self_attn, "q_norm")
    heads, out, gates, down = map(bits, weights)
    layers = Layers(
        norms("input_layernorm"), heads, floats(torch.stack(biases)) if biases else nothing,
        norms("self_attn.q_norm") if within else nothing, norms("self_attn.k_norm") if within else nothing,
        out, norms("post_attention_layernorm"), gates, down, floats(stack.norm.weight),
        np.float32(first.input_layernorm.variance_epsilon), np.float32(first.self_attn.scaling),
    )  # fmt: skip
    return layers, [tuple(functools.partial(_plain, *pair) for pair in row) for row in joined]


class _Buffers:
    """The addresses of the keys and values of a row, which are in the same tensors at most steps."""

    def __init__(self) -> None:
        self.held: list[list[Tensor]] = []  # they must live as long as their addresses
        self.found: tuple[Any, Any] = ((), ())

    def of(self, level: Level) -> tuple[Any, Any]:
        """The addresses of the keys `[N]` and of the values `[N]` of a level."""
        if not self.held or self.held[0][0] is not level.keys[0]:
            self.held = [list(level.keys), list(level.values)]
            keys, values = (np.array([x.data_ptr() for x in xs], np.int64) for xs in self.held)
            self.found = keys, values
        return self.found


def _tokens(stack: Any, plain: Callable[..., Any], layers: Layers, buffers: _Buffers, **inputs: Any) -> Any:
    """A model without its head, which computes few tokens of one row by compiled loops, and everything else plainly."""
    x, place = inputs["inputs_embeds"], _place(inputs.get("tree"))
    if len(x) > 1 or x.shape[1] > FEW or torch.is_grad_enabled() or place is None:
        return plain(**inputs)
    from foresight.nets.language import fused_token

    level: Level = inputs["tree"].level
    cos, sin = stack.rotary_emb(x, inputs["position_ids"])
    x = fused_token.layers(layers, x[0], cos[0], sin[0], *buffers.of(level), level.keys[0].shape[2], place)
    return SimpleNamespace(last_hidden_state=x[None])


def _place(tree: Any) -> int | None:
    """Where new tokens are written, if they attend to one buffer of bfloat16, and to all that precedes them there."""
    if isinstance(tree, DecodeStep) and not tree.levels and tree.blocked is None:
        place = tree.stop - 1
    elif isinstance(tree, Extension) and not tree.above:
        place = tree.place
    else:
        return None
    held = tree.level.keys[0], tree.level.values[0]
    return place if all(x.dtype is KIND and x.is_contiguous() for x in held) else None

"""Weights packed in oneDNN's layout, for sampling on a CPU: the same products, faster.

A plain weight is reordered at every product, which is most of the work when few rows are decoded: a product of 1 to 16
rows in bfloat16 takes half the time with a packed weight, one of 64 rows a tenth less. Half of a decoding step is the
overhead of small operations, so layers of known models are fused: projections with the same input are one product, and
queries and keys are rotated together.

A single row needs no packing: all layers of a known model are then compiled loops over plain weights in bfloat16
(`nets.language.fused_token`), and only prompts are read by the products of torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from foresight.nets.language.cache import DecodeStep, Level

PACK = 24  # new tokens from which packing the weights pays
KIND = torch.bfloat16  # the dtype of packed weights
ABLE = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
USUAL = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")  # layers of transformers
LINEAR = (*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))
Product = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def packed(kind: torch.dtype | None, rows: int, *modules: nn.Module) -> Iterator[None]:
    """A context in which the linear layers of `modules` use packed copies of their present weights, in dtype `kind`.

    `rows` is the expected number of rows a product. With `kind` None (the dtype of the weights), on accelerators and
    where torch lacks these products, nothing changes. Computations with a gradient use the plain weights.
    """
    able = ABLE and kind is KIND
    parts = dict.fromkeys(part for module in modules if able for part in module.modules())
    layers = [part for part in parts if _usual(part)]
    inside = {part for layer in layers for part in layer.modules()}
    linear = [part for part in parts if _whole(part) and part not in inside]
    stacks = [part for part in parts if rows == 1 and _stack(part)]  # after their layers, whose weights they use
    forward = {
        part: vars(part).get("forward") for part in (*layers, *linear, *stacks)
    }  # `checkpointing.recompute` sets one, too
    taken = [part for part, own in forward.items() if not isinstance(own, functools.partial)]  # not yet packed
    try:
        with torch.no_grad():
            for part in taken:
                part.forward = _linear(part, rows) if _whole(part) else _fused(part, rows)
        yield
    finally:
        for part in taken:
            vars(part).pop("forward", None)
            if own := forward[part]:
                part.forward = own


def _whole(part: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether this is a linear layer with its whole weight on the CPU: not sharded by FSDP."""
    return type(part) is nn.Linear and type(part.weight) is nn.Parameter and part.weight.device.type == "cpu"


def _usual(part: nn.Module) -> bool:
    """Whether `_run` can compute this layer: a known kind with plain weights, no adapters, no experts."""
    if type(part).__name__ not in USUAL:
        return False
    return all(_whole(part.get_submodule(name)) for name in LINEAR)


def _stack(part: nn.Module) -> bool:
    """Whether `_token` can compute this model without its head: known layers only, with a gate of SiLU."""
    layers, config = getattr(part, "layers", None), getattr(part, "config", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(part, "rotary_emb") or not hasattr(part, "norm"):
        return False
    ready = all(_usual(layer) and not isinstance(vars(layer).get("forward"), functools.partial) for layer in layers)
    return ready and len(layers) > 0 and getattr(config, "hidden_act", "") == "silu"


def _joined(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The concatenated weights and biases of linear layers, in bfloat16."""
    weight = torch.empty(sum(layer.out_features for layer in layers), layers[0].in_features, dtype=KIND)
    for into, layer in zip(weight.split([layer.out_features for layer in layers]), layers, strict=True):
        into.copy_(layer.weight)
    biases = [layer.bias.to(KIND) for layer in layers if layer.bias is not None]
    return weight, torch.cat(biases) if biases else None


def _product(rows: int, *layers: nn.Linear) -> Product:
    """x ↦ the concatenated outputs `[..., O]` of linear layers, in bfloat16."""
    weight, bias = _joined(*layers)
    if rows == 1:  # the loops over one row read the same memory
        return functools.partial(_plain, weight, bias)
    weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def multiply(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(KIND), weight, bias, "none", [], "")
        return result

    return multiply


def _plain(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return functional.linear(x.to(KIND), weight, bias)


def _linear(layer: nn.Linear, rows: int) -> functools.partial[Tensor]:
    return functools.partial(_multiply, layer, _one(layer) if rows == 1 else _product(rows, layer))


def _one(layer: nn.Linear) -> Product:
    """x ↦ its output: of one row by a compiled loop in float32, of more by torch in bfloat16."""
    from foresight.nets.language import fused_token  # late: numba is slow to import

    weight, bias = _joined(layer)
    held = fused_token.bits(weight), fused_token.floats(bias)

    def multiply(x: Tensor) -> Tensor:
        if x.numel() != x.shape[-1]:
            return _plain(weight, bias, x)
        return fused_token.linear(*held, x.reshape(-1)).view(*x.shape[:-1], -1)

    return multiply


def _multiply(layer: nn.Linear, product: Product, x: Tensor) -> Tensor:
    return nn.Linear.forward(layer, x) if torch.is_grad_enabled() else product(x)


def _fused(part: Any, rows: int) -> functools.partial[Any]:
    return _layer(part, rows) if _usual(part) else _layers(part)


def _layer(layer: Any, rows: int) -> functools.partial[Tensor]:
    attend, feed = layer.self_attn, layer.mlp
    products = (
        _product(rows, attend.q_proj, attend.k_proj, attend.v_proj),
        _product(rows, attend.o_proj),
        _product(rows, feed.gate_proj, feed.up_proj),
        _product(rows, feed.down_proj),
    )
    from transformers import AttentionInterface

    attention = AttentionInterface()[attend.config._attn_implementation]
    return functools.partial(_run, layer, layer.forward, attention, products)


def _run(
    layer: Any,
    plain: Callable[..., Tensor],
    attention: Callable[..., tuple[Tensor, Any]],
    products: tuple[Product, Product, Product, Product],
    hidden: Tensor,  # [B, T, D]
    *,
    position_embeddings: tuple[Tensor, Tensor],
    **kwargs: Any,
) -> Tensor:
    """One layer as in transformers: pre-norm attention, then a pre-norm gated MLP."""
    if torch.is_grad_enabled():
        return plain(hidden, position_embeddings=position_embeddings, **kwargs)
    attend, (project, out, widen, narrow) = layer.self_attn, products
    size, shape = attend.head_dim, hidden.shape[:-1]
    heads = project(layer.input_layernorm(hidden)).view(*shape, -1, size)
    rotated, value = heads.tensor_split([-attend.v_proj.out_features // size], 2)  # queries and keys; values
    if hasattr(attend, "q_norm"):
        query, key = rotated.tensor_split([attend.q_proj.out_features // size], 2)
        rotated = torch.cat([attend.q_norm(query), attend.k_norm(key)], 2)
    cos, sin = (x[:, :, None] for x in position_embeddings)
    first, second = sin.chunk(2, -1)
    rotated = torch.addcmul(rotated * cos, rotated.roll(size // 2, -1), torch.cat([-first, second], -1)).to(value.dtype)
    query, key = rotated.tensor_split([attend.q_proj.out_features // size], 2)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mixed, _ = attention(attend, query, key, value, scaling=attend.scaling, **kwargs)
    hidden = hidden + out(mixed.reshape(*shape, -1))
    gate, up = widen(layer.post_attention_layernorm(hidden)).chunk(2, -1)
    return hidden.add_(narrow(layer.mlp.act_fn(gate) * up))


def _layers(stack: Any) -> functools.partial[Any]:
    parts = [_part(layer, layer.forward.args[-1]) for layer in stack.layers]
    return functools.partial(_token, stack, stack.forward, parts, _Buffers())


def _part(layer: Any, products: Sequence[functools.partial[Tensor]]) -> Any:
    """A layer for `_token`, over the weights of its `_layer`."""
    from foresight.nets.language.fused_token import Layer, bits, floats

    attend, before, between = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
    heads, out, gates, narrow = (bits(product.args[0]) for product in products)
    query, key, value = np.split(heads, np.cumsum([attend.q_proj.out_features, attend.k_proj.out_features]))
    gate, up = np.split(gates, 2)
    inside = [getattr(attend, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (floats(None if norm is None else norm.weight) for norm in inside)
    return Layer(
        floats(before.weight), query, key, value, floats(products[0].args[1]), query_norm, key_norm, out,
        floats(between.weight), gate, up, narrow, np.float32(before.variance_epsilon), np.float32(attend.scaling),
    )  # fmt: skip


class _Buffers:
    """The bits of the keys and values of a row, which are in the same tensors at most steps."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.keys: list[Any] = []
        self.values: list[Any] = []

    def follow(self, level: Level) -> None:
        """Point to the tensors of a level."""
        if self.first is not level.keys[0]:
            self.first = level.keys[0]
            self.keys, self.values = ([x.view(torch.uint16).numpy() for x in xs] for xs in (level.keys, level.values))


def _token(stack: Any, plain: Callable[..., Any], parts: Any, buffers: _Buffers, **inputs: Any) -> Any:
    """A model without its head, which computes one token of one row by compiled loops, and everything else plainly."""
    x, tree = inputs["inputs_embeds"], inputs.get("tree")
    if x.shape[:2] != (1, 1) or torch.is_grad_enabled() or not _alone(tree):
        return plain(**inputs)
    from foresight.nets.language import fused_token

    step = cast(DecodeStep, tree)
    cos, sin = stack.rotary_emb(x, inputs["position_ids"])
    buffers.follow(step.level)
    x = fused_token.layers(parts, x[0, 0], cos[0, 0], sin[0, 0], buffers.keys, buffers.values, step.stop - 1)
    return SimpleNamespace(last_hidden_state=stack.norm(x[None, None]))


def _alone(tree: Any) -> bool:
    """Whether a decoding step attends to one buffer of bfloat16, and to all that precedes it there."""
    if not isinstance(tree, DecodeStep) or tree.levels or tree.blocked is not None:
        return False
    return all(x.dtype is KIND and x.is_contiguous() for x in (tree.level.keys[0], tree.level.values[0]))

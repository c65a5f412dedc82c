"""Weights packed in oneDNN's layout, for sampling on a CPU: the same products, faster.

A plain weight is reordered at every product, which is most of the work when few rows are decoded: a product of 1 to 16
rows in bfloat16 takes half the time with a packed weight, one of 64 rows a tenth less. Half of a decoding step is the
overhead of small operations, so layers of known models are fused: projections with the same input are one product, and
queries and keys are rotated together.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

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
    forward = {
        part: vars(part).get("forward") for part in (*layers, *linear)
    }  # `checkpointing.recompute` sets one, too
    taken = [part for part, own in forward.items() if not isinstance(own, functools.partial)]  # not yet packed
    try:
        with torch.no_grad():
            for part in taken:
                part.forward = _linear(part, rows) if _whole(part) else _layer(part, rows)
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


def _product(rows: int, *layers: nn.Linear) -> Product:
    """x ↦ the concatenated outputs `[..., O]` of linear layers, in bfloat16."""
    weight = torch.cat([layer.weight.to(KIND) for layer in layers])
    weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    biases = [layer.bias.to(KIND) for layer in layers if layer.bias is not None]
    bias = torch.cat(biases) if biases else None

    def multiply(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(KIND), weight, bias, "none", [], "")
        return result

    return multiply


def _linear(layer: nn.Linear, rows: int) -> functools.partial[Tensor]:
    return functools.partial(_multiply, layer, _product(rows, layer))


def _multiply(layer: nn.Linear, product: Product, x: Tensor) -> Tensor:
    return nn.Linear.forward(layer, x) if torch.is_grad_enabled() else product(x)


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

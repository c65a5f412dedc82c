"""The attention weights of a transformers model: its layers call our attention (`nets.sequence.attention`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foresight.errors import UserError
from foresight.nets.language.tree_attention import check_plain
from foresight.nets.sequence.attention import KnockOut, attend_eager, recorded

ATTENTION = "foresight_recorded"  # the name of `recorded_attention` in transformers


def recorded_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, T, D]
    key: Tensor,  # [B, KV, S, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """`attend_eager` in the form of transformers: `[B, T, H, D]` and the weights.

    Raises UserError for attention sinks and soft caps.
    """
    check_plain(kwargs)
    allowed = attention_mask
    if allowed is not None and allowed.dtype != torch.bool:
        allowed = allowed > torch.finfo(allowed.dtype).min / 2
    mixed, weights = attend_eager(query, key, value, allowed, dropout, scaling)
    return mixed.transpose(1, 2).contiguous(), weights


@torch.no_grad()
def read(module: Any, tokens: Tensor, knock_outs: Sequence[KnockOut] = ()) -> tuple[list[Tensor], Tensor]:
    """The weights `[B, heads, T, T]` of each layer of a transformers model, and its logits `[B, T, V]`.

    A model without a head gives its last hidden states. A model that does not take other attention functions must have
    been loaded with its own eager attention, and nothing can be knocked out of it, nor of one with a soft cap or
    sinks, with which rows sum to less than 1. Raises UserError otherwise, and for a model of an encoder and a decoder.
    """
    if getattr(module.config, "is_encoder_decoder", False):
        raise UserError(f"{type(module).__name__} has an encoder and a decoder: give a model of one stack.")
    _register()
    own = module.config._attn_implementation
    module.set_attn_implementation(ATTENTION)
    try:
        with recorded(knock_outs) as weights:
            output = module(input_ids=tokens, use_cache=False)
    except UserError:  # a soft cap or sinks, which its own attention has
        if knock_outs:
            raise
        weights = []
    finally:
        module.set_attn_implementation(own)
    if not weights:
        output = _own_weights(module, tokens, knock_outs)
        weights = [layer for layer in output.attentions if layer is not None]
    found = getattr(output, "logits", None)
    return weights, output.last_hidden_state if found is None else found


def _own_weights(module: Any, tokens: Tensor, knock_outs: Sequence[KnockOut]) -> Any:
    kind, own = type(module).__name__, module.config._attn_implementation
    output = module(input_ids=tokens, use_cache=False, output_attentions=True) if own == "eager" else None
    if output is None or not any(layer is not None for layer in getattr(output, "attentions", None) or ()):
        raise UserError(
            f"The attention of {kind} ({own}) gives no weights. Load it with "
            f"{kind}.from_pretrained(NAME, attn_implementation='eager'); a model without attention has none."
        )
    if knock_outs:
        raise UserError(
            f"Nothing can be knocked out of {kind}: its attention cannot be exchanged. Its weights can be drawn."
        )
    return output


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(ATTENTION, recorded_attention)
    AttentionMaskInterface.register(ATTENTION, eager_mask)

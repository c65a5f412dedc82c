"""Recorded attention is the attention that runs, and a knocked-out link is a link that never was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foresight.errors import UserError
from foresight.nets.language import decoder
from foresight.nets.models.lewm import Block
from foresight.nets.sequence import memory
from foresight.nets.sequence.action_tokens import Tokens
from foresight.nets.sequence.attention import KnockOut, attend, attend_eager, dropout, is_recording, recorded
from foresight.nets.sequence.transformer import Transformer, TransformerConfig
from tests.nets.sequence import test_vla
from tests.sabotage import returns, sabotaged_by

HERE = "foresight.nets.sequence.attention"
Function = Callable[..., Any]


def scrambled(net: nn.Module) -> nn.Module:
    """Away from uniform attention."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
    return net.eval()


def memories(kind: str) -> tuple[nn.Module, tuple[Any, ...]]:
    net = memory.make(memory.Shape(kind, 8, layers=2, heads=2, window=4), 5)
    return net, (torch.randn(2, 7, 5), net.initial(2))


def networks() -> dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]]:
    shape = TransformerConfig(layers=2, dim=16, heads=4, kv_heads=2)
    config = decoder.DecoderConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=0
    )
    return {
        "transformer": lambda: (Transformer(shape), (torch.randn(2, 7, 16),)),
        "gtrxl": lambda: memories("gtrxl"),
        "window": lambda: memories("transformer"),
        "decoder": lambda: (decoder.Decoder(config), (torch.arange(7)[None],)),
        "vla": lambda: (test_vla.network(), (test_vla.seen(),)),
        "lewm": lambda: (Block(shape), (torch.randn(2, 7, 16), torch.randn(2, 7, 16))),
    }


def output(result: Any) -> Tensor:
    if isinstance(result, Tokens):
        return result.tokens.logits
    return result if isinstance(result, Tensor) else result.logits if hasattr(result, "logits") else result[0]


def doubled(original: Function) -> Function:
    """What is recorded is not what the output is made of."""
    return lambda scores: original(scores) * (2 if is_recording() else 1)


@pytest.mark.parametrize("name", networks())
@sabotaged_by(f"{HERE}.softmax", doubled)
def test_recorded_weights_are_those_that_made_the_output(name: str) -> None:
    """The output is that of the fused kernel, and rows sum to 1. No weight is in the future."""
    torch.manual_seed(0)
    net, inputs = networks()[name]()
    scrambled(net)
    with torch.no_grad():
        fused = output(net(*inputs))
        with recorded() as weights:
            written_out = output(net(*inputs))
    torch.testing.assert_close(written_out, fused, rtol=1e-4, atol=1e-5)
    assert len(weights) == (1 if name == "lewm" else 2)
    for layer in weights:
        torch.testing.assert_close(layer.sum(-1), torch.ones(layer.shape[:-1]))
        steps, keys = layer.shape[-2:]
        assert name == "vla" or not layer[..., keys - steps :].triu(1).any()
        assert layer[..., -1, -3:].std() > 1e-3  # not uniform


def ignored(original: Function) -> Function:
    """Links stay."""
    return lambda knock_outs=(): original(())


def zeroed(original: Function) -> Function:
    """The weight becomes 0 after the softmax, so that the row loses it."""

    def mutant(scores: Tensor) -> Tensor:
        weights = scores.softmax(-1).clone()
        weights[..., 1, 3, 2] = 0.0
        return weights

    return mutant


@sabotaged_by(f"{HERE}.recorded", ignored)
@sabotaged_by(f"{HERE}.softmax", zeroed)
def test_a_link_that_is_knocked_out_is_a_masked_one() -> None:
    query, key, value = (torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    allowed = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 3, 5, 5).clone()
    allowed[:, 1, 3, 2] = False
    scores = (query @ key.mT / math.sqrt(4)).masked_fill(~allowed, -math.inf)
    with recorded([KnockOut(0, head=1, query=3, key=2)]) as weights:
        found = attend(query, key, value, None)
    torch.testing.assert_close(found, scores.softmax(-1) @ value)
    assert not weights[0][:, 1, 3, 2].any()
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 3, 5))


@sabotaged_by(f"{HERE}.recorded", ignored)
def test_a_head_that_is_knocked_out_adds_nothing() -> None:
    """Only head 1 of layer 1 (the second call), and nothing else."""
    query, key, value = (torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    before = attend(query, key, value, None)
    with recorded([KnockOut(1, head=1)]) as weights:
        first, second = (attend(query, key, value, None) for _ in range(2))
    torch.testing.assert_close(first, before)
    assert not second[:, 1].any() and not weights[1][:, 1].any()
    torch.testing.assert_close(second[:, [0, 2]], before[:, [0, 2]])
    with recorded([KnockOut(0, query=0, key=0)]) as weights:  # the only link of the first query
        assert not attend(query, key, value, None)[:, :, 0].any()
    assert not weights[0][:, :, 0].any() and torch.isfinite(weights[0]).all()


@sabotaged_by(f"{HERE}.dropout", lambda f: lambda x, rate: f(x, rate / 2), returns(lambda y: y * 0.9))
def test_dropout_keeps_the_mean_and_its_share() -> None:
    """Within four standard errors; neighbors, which are drawn together, are independent; no rate is no change."""
    torch.manual_seed(0)
    count, rate = 200_001, 0.3
    found = dropout(torch.ones(count), rate)
    zero = (found == 0).float()
    spread = 4 * math.sqrt(rate * (1 - rate) / count)
    assert abs(zero.mean() - rate) < spread and abs((zero[1:] * zero[:-1]).mean() - rate**2) < spread
    assert abs(found.mean() - 1) < spread / (1 - rate)
    x = torch.randn(3)
    assert dropout(x, 0.0) is x


def test_nothing_is_recorded_outside() -> None:
    x = torch.randn(1, 2, 3, 4)
    with recorded() as outer:
        with recorded() as inner:
            attend(x, x, x, None)
        assert is_recording() and len(inner) == 1 and not outer
    attend_eager(x, x, x, None)
    assert not is_recording() and not outer


def test_what_a_layer_does_not_have_cannot_be_knocked_out() -> None:
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(UserError, match=r"no head 2.*has 2"), recorded([KnockOut(0, head=2)]):
        attend(x, x, x, None)
    with pytest.raises(UserError, match="no key 3"), recorded([KnockOut(0, key=3)]):
        attend(x, x, x, None)

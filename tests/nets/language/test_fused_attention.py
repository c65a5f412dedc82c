"""Attention of a decoding step as one loop: softmax(q kᵀ) v of each row over its own tokens, and those above it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from foresight.nets.language import fused_attention
from foresight.nets.language.cache import DecodeStep, Level, RowMap
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.packed import ABLE, packed
from foresight.nets.language.tree_attention import tree_attention
from tests import tiny_language
from tests.nets.language.test_packed import decoder
from tests.sabotage import change, sabotaged_by

OWNER = torch.tensor([0, 0, 0, 1, 2, 2])  # the prompt of each row
LENGTHS = torch.tensor([5, 2, 4])  # of the prompts
PLACES = torch.tensor([6, 0, 3, 3, 9, 1])  # of the new tokens
SHARED, GROUP = 2, 3  # heads of keys and values, and queries of each


def _level(rows: int, width: int, size: int, kind: torch.dtype, generator: torch.Generator, **options: Any) -> Level:
    def drawn() -> Tensor:  # as a model makes them: not contiguous
        return torch.randn(rows, width, SHARED, size, generator=generator).transpose(1, 2).to(kind)

    return Level([drawn()], [drawn()], **options)


def _step(size: int, kind: torch.dtype, padded: Tensor | None = None) -> tuple[DecodeStep, Tensor]:
    """A step of six rows of three prompts, which share a prefix; and the queries."""
    generator = torch.Generator().manual_seed(size)
    blocked = torch.arange(5) >= LENGTHS[:, None] if padded is None else padded
    prompts = _level(3, 5, size, kind, generator, blocked=blocked, row_map=RowMap.of(OWNER, 3))
    levels = [_level(1, 7, size, kind, generator), prompts]
    query = torch.randn(6, SHARED * GROUP, 1, size, generator=generator).to(kind)
    own = _level(6, 12, size, kind, generator)
    return DecodeStep(levels, Level([own.keys[0].contiguous()], [own.values[0].contiguous()]), PLACES), query


def _tree(step: DecodeStep, query: Tensor, scale: float = 0.3) -> Tensor:
    new = step.level.keys[0][torch.arange(6), :, step.places], step.level.values[0][torch.arange(6), :, step.places]
    key, value = (x[:, :, None] for x in new)  # what is written again is what is there
    return tree_attention(SimpleNamespace(layer_idx=0), query, key, value, None, scale, step)[0]  # type: ignore[arg-type]


def _by_hand(step: DecodeStep, query: Tensor, scale: float = 0.3) -> Tensor:
    found = torch.empty(6, SHARED * GROUP, query.shape[-1], dtype=torch.float64)
    held = [(level.keys[0], level.values[0]) for level in (*step.levels, step.level)]
    for row in range(6):
        prompt, count = OWNER[row], PLACES[row] + 1
        for head in range(SHARED * GROUP):
            group = head // GROUP
            keys, values = (
                torch.cat([one[0, group], two[prompt, group, : LENGTHS[prompt]], three[row, group, :count]])
                for one, two, three in zip(*held, strict=True)
            )
            weights = (scale * keys.double() @ query[row, head, 0].double()).softmax(0)
            found[row, head] = weights @ values.double()
    return found


@pytest.mark.parametrize("size", [8, 20, 64])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@sabotaged_by(
    "foresight.nets.language.cache._reach",
    lambda f: lambda step: f(step)._replace(parents=f(step).parents.flip(0)),
    lambda f: lambda step: f(step)._replace(counts=f(step).counts - 1),
)
@sabotaged_by("foresight.nets.language.fused_attention.attend", change("query", lambda query: query.flip(1)))
@torch.no_grad()
def test_each_row_attends_to_its_own_tokens_and_to_those_above(size: int, kind: torch.dtype) -> None:
    step, query = _step(size, kind)
    assert fused_attention.able(query, step, 0)
    exact = {"rtol": 1e-5, "atol": 1e-5} if kind == torch.float32 else {"rtol": 0.01, "atol": 0.02}
    torch.testing.assert_close(_tree(step, query)[:, 0].double(), _by_hand(step, query), **exact)


@pytest.mark.parametrize(("kind", "threads"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2)])
@torch.no_grad()
def test_it_is_what_torch_computes(kind: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step, query = _step(16, kind)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = _tree(step, query)
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(fused_attention, "able", lambda *args: False)
    expected = _tree(step, query)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    exact = 1e-6 if kind == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, rtol=0, atol=exact)


def test_torch_computes_everything_else() -> None:
    step, query = _step(8, torch.float32)
    assert not fused_attention.able(query, step, 0)  # with a gradient
    with torch.no_grad():
        assert fused_attention.able(query, step, 0)
        mixed, _ = _step(8, torch.float32)
        mixed.levels[0].keys[0] = mixed.levels[0].keys[0].bfloat16()
        assert not fused_attention.able(query, mixed, 0)
        half, _ = _step(8, torch.float16)
        assert not fused_attention.able(query, half, 0)
        inside = torch.zeros(3, 5, dtype=torch.bool)
        inside[1, 0] = True
        step, query = _step(8, torch.float32, inside)
        assert step.reach is None and not fused_attention.able(query, step, 0)
        torch.testing.assert_close(_tree(step, query).isfinite().all(), torch.tensor(True))


@torch.no_grad()
def test_torch_reads_many_shared_tokens() -> None:
    """What one row has to itself is not shared, however long."""
    step, query = _step(8, torch.float32)
    assert step.reach is not None
    assert step.reach.shared == pytest.approx(7 + LENGTHS[OWNER].float().mean().item())
    assert step.reach.own == pytest.approx(PLACES.float().mean().item() + 1)
    generator = torch.Generator().manual_seed(0)
    long = [_level(1, fused_attention.FEW // 6 + 20, 8, torch.float32, generator)]
    assert not fused_attention.able(query, DecodeStep(long, step.level, PLACES), 0)
    own = [_level(6, fused_attention.FEW // 6 + 20, 8, torch.float32, generator)]
    assert fused_attention.able(query, DecodeStep(own, step.level, PLACES), 0)


@pytest.mark.skipif(not ABLE, reason="this processor has no packed products")
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])  # the second normalizes queries and keys
@sabotaged_by(
    "foresight.nets.language.fused_attention.turn_and_attend",
    change("sin", lambda x: -x),
    change("heads", lambda heads: heads.flip(1)),
    change("layer", lambda layer: 0),
)
@torch.no_grad()
def test_decoded_rows_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several lengths, token by token, with weights that bfloat16 holds exactly."""
    module, ids = decoder(family), torch.randint(42, (4, 12), generator=torch.Generator().manual_seed(1))
    for name, weight in module.named_parameters():
        weight.copy_((weight * 20 if "q_proj" in name else weight).bfloat16())  # so that positions matter
    expected = module(ids).logits
    model, starts = LanguageModel(module, tiny_language.model().tokenizer, torch.bfloat16), torch.tensor([4, 1, 2, 6])
    monkeypatch.setattr("foresight.nets.language.packed._rotated", None)  # not for decoding
    with model.precision():
        _, cache = model(ids[:, :6], torch.full((4,), 6))
        held = cache.levels[0]
        room = Level(*([functional.pad(x.bfloat16(), (0, 0, 0, 9)) for x in xs] for xs in (held.keys, held.values)))
        empty = type(cache)([], cache.positions - 6)
        with packed(torch.bfloat16, 4, module):
            for step in range(6):
                places = starts + step
                hidden = model.step(ids[torch.arange(4), places], empty, room, places)
                found = model.logits(hidden).float()
                torch.testing.assert_close(
                    found, expected[torch.arange(4), places], rtol=0, atol=0.05 * expected.std().item()
                )

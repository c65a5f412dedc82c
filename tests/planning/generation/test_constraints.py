"""Answers from a list and texts that stop: exact over tokens, whatever their edges are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foresight.errors import UserError
from foresight.planning.generation import constraints, decoding
from tests import tiny_language
from tests.sabotage import change, sabotaged_by

PROMPTS = [[3, 4, 5, 6, 7], [3, 4, 9], [3, 4, 5, 8]]
CHOICES = ["1", "12", "123", "7 a", "yes"]


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _texts(model, batch):
    rows, lengths = batch.completion.flatten(0, 1).tolist(), batch.length.flatten().tolist()
    return [model.decode(row[:n]) for row, n in zip(rows, lengths, strict=True)]


def _probability(model, prompt: list[int], answers: list[str]) -> torch.Tensor:
    """The chance of each answer, written out: a product of conditional chances over the tokens that can continue."""
    rows = [[*model.tokenizer.encode(a), model.stop_ids[0]] for a in answers]
    chances = []
    for row in rows:
        chance = 1.0
        for t, token in enumerate(row):
            allowed = sorted({other[t] for other in rows if other[:t] == row[:t] and len(other) > t})
            with torch.no_grad():
                logits = model.module(torch.tensor([prompt + row[:t]]), tree=_plain()).logits[0, -1]
            weights = logits[allowed].double().softmax(-1)
            chance *= float(weights[allowed.index(token)])
        chances.append(chance)
    return torch.tensor(chances, dtype=torch.float64)


def _plain():
    from foresight.nets.language.cache import Prefill

    return Prefill([], 2)


@sabotaged_by("foresight.planning.generation.constraints.mask_logits", change("logits", lambda x: 2 * x))
@sabotaged_by("foresight.planning.generation.sampling.choose", change("uniform", lambda u: u.square()))
def test_each_choice_has_exactly_its_chance():
    model = tiny_language.model()
    draws = 600
    batch = decoding.generate(model, PROMPTS[:1], draws, 6, 1.0, _seeded(), choices=CHOICES)
    texts = _texts(model, batch)
    assert set(texts) <= set(CHOICES) and batch.stopped.all()
    exact = _probability(model, PROMPTS[0], CHOICES)
    assert math.isclose(float(exact.sum()), 1, rel_tol=1e-6)
    counts = torch.tensor([texts.count(choice) for choice in CHOICES])
    spread = (draws * exact * (1 - exact)).sqrt()
    assert ((counts - draws * exact).abs() <= 3.5 * spread + 1).all(), (counts, draws * exact)
    for text, row, n in zip(texts, batch.logprob[0], batch.length[0], strict=True):
        torch.testing.assert_close(row[:n].sum().exp().double(), exact[CHOICES.index(text)], atol=1e-5, rtol=1e-3)


def halved(original):
    return lambda logits, tokens, *rest: (0.5 * original(logits, tokens, *rest)[0], None)


@sabotaged_by("foresight.planning.generation.decoding.token_logprob", halved)
def test_the_models_own_probability_is_not_that_of_the_choice():
    model = tiny_language.model()
    batch = decoding.generate(model, PROMPTS, 4, 6, 1.0, _seeded(), choices=CHOICES, slots=5)
    exact = torch.zeros(batch.completion.shape)
    for p, prompt in enumerate(PROMPTS):
        for g in range(4):
            row = batch.completion[p, g, : batch.length[p, g]].tolist()
            with torch.no_grad():
                logits = model.module(torch.tensor([prompt + row]), tree=_plain()).logits[0, len(prompt) - 1 : -1]
            exact[p, g, : len(row)] = logits.log_softmax(-1)[range(len(row)), row]
    torch.testing.assert_close(batch.model_logprob, exact, atol=1e-5, rtol=0)
    assert (batch.logprob.sum(-1) > batch.model_logprob.sum(-1)).all()


def test_every_prompt_may_have_answers_of_its_own():
    model = tiny_language.model()
    lists = [["yes", "no"], ["1"], ["a b", "a c", "a"]]
    for temperature in (0.0, 1.0):
        batch = decoding.generate(model, PROMPTS, 6, 6, temperature, _seeded(), choices=lists, slots=4)
        texts = _texts(model, batch)
        for p, answers in enumerate(lists):
            assert set(texts[6 * p : 6 * p + 6]) <= set(answers)


def test_any_token_that_ends_an_answer_ends_a_choice():
    """A model with two of them ends its turns with the one of the higher id."""
    model = tiny_language.model()
    ends = model.tokenizer.convert_tokens_to_ids("W")
    model.stop_ids = [*model.stop_ids, ends]
    tries = constraints.tries(model, ["1", "12"], 1)
    after = tries[0][model.tokenizer.encode("1")[0]]
    assert {*model.stop_ids} <= set(after) and constraints.depth(tries[0]) == 3
    batch = decoding.generate(model, PROMPTS[:1], 200, 6, 1.0, _seeded(), choices=["1", "12"])
    last = {row[n - 1] for row, n in zip(batch.completion[0].tolist(), batch.length[0].tolist(), strict=True)}
    assert last <= set(model.stop_ids) and ends in last


def test_lists_that_make_no_sense_are_refused():
    model = tiny_language.model()
    with pytest.raises(UserError, match="longest choice has 4 tokens"):
        decoding.generate(model, PROMPTS, 1, 3, choices=CHOICES)
    with pytest.raises(UserError, match="empty"):
        decoding.generate(model, PROMPTS, 1, 3, choices=[])
    with pytest.raises(UserError, match="2 lists of choices for 3 prompts"):
        decoding.generate(model, PROMPTS, 1, 3, choices=[["1"], ["2"]])
    with pytest.raises(UserError, match="longest choice has 3001 tokens"):
        decoding.generate(model, PROMPTS, 1, 6, choices=["1" * 3000, "12"])
    model.stop_ids = []
    with pytest.raises(UserError, match="no end token"):
        decoding.generate(model, PROMPTS, 1, 6, choices=CHOICES)


# ---- stop texts -----------------------------------------------------------------------------------------------------


def _first_end(model, row: list[int], stop: list[str]) -> int:
    """After how many tokens the text first holds one of `stop`, by decoding every beginning again."""
    for n in range(1, len(row) + 1):
        if any(text in model.tokenizer.decode(row[:n], skip_special_tokens=False) for text in stop):
            return n
    return len(row)


@sabotaged_by("foresight.planning.generation.constraints.stops_at", change("tokens", lambda t: t[:-1]))
@pytest.mark.parametrize("stop", [["ab", "c2", " d", "zz"], ["9x", "q", "k1"], ["1"]])
def test_a_row_ends_where_its_text_first_holds_a_stop_text(stop):
    model = tiny_language.model()
    with torch.no_grad():  # flatter, so that every pair of characters comes up
        model.module.get_output_embeddings().weight.mul_(0.2)
    free = decoding.generate(model, PROMPTS, 40, 30, 1.0, _seeded())
    held = decoding.generate(model, PROMPTS, 40, 30, 1.0, _seeded(), stop=stop, slots=16)
    ended = 0
    for p in range(3):
        for g in range(40):
            row = free.completion[p, g, : free.length[p, g]].tolist()
            n = _first_end(model, row, stop)
            assert held.completion[p, g, : held.length[p, g]].tolist() == row[:n]
            assert held.stopped[p, g] == (n < len(row) or bool(free.stopped[p, g]) or _holds(model, row, stop))
            ended += n < len(row)
    assert ended >= 3  # the case is not trivial


def _holds(model, row, stop):
    return any(text in model.tokenizer.decode(row, skip_special_tokens=False) for text in stop)


def _merging() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose tokens overlap stop texts in every way, and split characters into bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("<", "/"), ("c", "<"), ("/", "a"), ("Ã", "©")]
    vocabulary = {x: i for i, x in enumerate([*letters, *("".join(pair) for pair in merges)])}
    table = Tokenizer(models.BPE(vocabulary, merges))
    table.pre_tokenizer, table.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=table, eos_token=letters[0])


class _Holder:
    tokenizer = _merging()


PIECES = st.lists(st.integers(0, len(_Holder.tokenizer) - 1), max_size=6)


@sabotaged_by("foresight.planning.generation.constraints.stops_at", change("tokens", lambda t: t[-2:]))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(head=PIECES, text=st.sampled_from(["</abc", "abc<", "é", "c</é", "bc", "日本"]), tail=PIECES)
def test_the_window_is_wide_enough_for_any_way_to_cut_a_stop_text(head, text, tail):
    table = _Holder.tokenizer
    # In single bytes: the longest way to write it. And in the tokens that the tokenizer takes.
    single = [
        table.convert_tokens_to_ids(x) for x in table.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)[0][0]
    ]
    for written in (single, table.encode(text)):
        row = [*head, *written, *tail]
        seen = [n for n in range(1, len(row) + 1) if constraints.stops_at(_Holder, row[:n], [text])]
        exact = [n for n in range(1, len(row) + 1) if text in table.decode(row[:n])]
        assert bool(seen) == bool(exact)
        assert not exact or seen[0] == exact[0]

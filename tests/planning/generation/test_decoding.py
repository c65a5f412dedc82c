"""Decoding samples exactly the model's distribution, however rows are batched."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from foresight.data.text import TokenBatch
from foresight.errors import UserError
from foresight.nets.language import pretrained
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation import cache_allocator, decoding, sampling
from foresight.planning.generation.continuous_batching import ContinuousBatchScheduler
from tests import tiny_language
from tests.sabotage import change, flip_sign, sabotaged_by, scaled

PROMPTS = [[3, 4, 5, 6, 7], [3, 4, 9], [3, 4, 5, 8]]


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@sabotaged_by("foresight.nets.language.model.LanguageModel.logits", flip_sign)
def test_greedy_decoding_equals_that_of_transformers():
    module = AutoModelForCausalLM.from_pretrained(tiny_language.folder(), dtype=torch.float32)
    batch = decoding.generate(tiny_language.model(), PROMPTS, 1, 8, temperature=0.0)
    for p, prompt in enumerate(PROMPTS):
        expected = module.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
        expected = expected[len(prompt) :].tolist()
        assert batch.completion[p, 0, : batch.length[p, 0]].tolist() == expected


def test_rows_end_at_their_stop_token_and_only_there():
    model = tiny_language.model()
    model.stop_ids = [0, 5, 9, 14, 20]
    batch = decoding.generate(model, PROMPTS, 16, 12, 1.0, _seeded())
    stops = torch.isin(batch.completion, torch.tensor(model.stop_ids)) & batch.mask
    assert 0.2 < batch.stopped.float().mean() < 1  # the case is not trivial
    assert torch.equal(stops.sum(-1), batch.stopped.long())
    last = batch.completion.gather(-1, batch.length[..., None] - 1)[..., 0]
    assert torch.equal(torch.isin(last, torch.tensor(model.stop_ids)), batch.stopped)
    assert (batch.length[~batch.stopped] == 12).all()
    assert (batch.completion[~batch.mask] == 0).all()


@sabotaged_by("foresight.planning.generation.cache_allocator.CacheAllocator.keep", change("live", lambda x: x.roll(1)))
def test_dropping_finished_rows_changes_no_other_row(monkeypatch):
    """Finished rows leave the batch.

    Wrong: answers depend on the other rows of the batch (verl 6280).
    Invariant: the same generator gives the same tokens, whether finished rows are kept or dropped.
    """
    model = tiny_language.model()
    model.stop_ids = [0, 5, 9, 14, 20, 21, 22]
    dropped = decoding.generate(model, PROMPTS, 8, 12, 1.0, _seeded())
    monkeypatch.setattr(ContinuousBatchScheduler, "drop", lambda self: None)
    carried = decoding.generate(model, PROMPTS, 8, 12, 1.0, _seeded())
    assert int(dropped.length.min()) < int(dropped.length.max())
    assert torch.equal(dropped.completion, carried.completion)
    assert torch.equal(dropped.length, carried.length)
    torch.testing.assert_close(dropped.logprob, carried.logprob, atol=1e-5, rtol=0)


def test_a_single_prompt_gives_what_it_gives_in_a_batch():
    model = tiny_language.model()
    together = decoding.generate(model, PROMPTS, 1, 6, 0.0)
    for p, prompt in enumerate(PROMPTS):
        alone = decoding.generate(model, [prompt], 1, 6, 0.0)
        n = int(alone.length[0, 0])
        assert together.completion[p, 0, :n].tolist() == alone.completion[0, 0, :n].tolist()


@sabotaged_by("foresight.planning.generation.sampling.choose", change("uniform", lambda u: u.square()))
def test_one_uniform_number_gives_exactly_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -torch.inf]]).expand(20_000, -1)
    token, logprob = sampling.choose(logits, torch.rand(20_000, generator=_seeded()), 1.0)
    expected = logits[0].double().softmax(-1) * 20_000
    counts = token.bincount(minlength=5)
    assert counts[4] == 0
    assert chisquare(counts[:4].numpy(), expected[:4].numpy()).pvalue > 0.01
    torch.testing.assert_close(logprob, logits[0].log_softmax(-1)[token])


@sabotaged_by("foresight.planning.generation.sampling.choose", change("uniform", lambda u: 1 - u))
def test_draws_at_both_ends_stay_inside_the_vocabulary():
    """Uniform random numbers close to 0 and close to 1.

    Wrong: rounding in a cumulative sum gives an id beyond the last one (NeMo 237).
    Invariant: 0 ≤ token < V, and a token of probability 0 is never sampled.
    """
    logits = torch.tensor([[5.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
    token, _ = sampling.choose(logits, torch.tensor([0.0, 1 - 1e-7]), 1.0)
    assert token.tolist() == [0, 2]


@sabotaged_by("foresight.ops.tokens.token_logprob", scaled(0.5))
def test_equal_seeds_give_equal_text_and_other_seeds_other_text():
    model = tiny_language.model()
    a, b, c = (decoding.generate(model, PROMPTS, 4, 8, 1.0, _seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(a.completion, b.completion)
    assert a.completion.shape != c.completion.shape or not torch.equal(a.completion, c.completion)
    torch.testing.assert_close(model.logprob(a)[0].detach(), a.logprob, atol=1e-5, rtol=0)


def test_a_prompt_that_leaves_no_room_is_an_error():
    with pytest.raises(UserError, match="context of 64"):
        decoding.generate(tiny_language.model(), [[1] * 60], 1, 5)


# ---- continuous batching: whatever the slots, every row is what it would be alone -----------------------------------

SLOW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PROMPT = st.lists(st.integers(1, 39), min_size=1, max_size=9)
CASES = {
    "prompts": st.lists(PROMPT, min_size=1, max_size=7),
    "shared": st.lists(st.integers(1, 39), max_size=4),
    "group": st.integers(1, 4),
    "slots": st.integers(1, 9),
    "seed": st.integers(0, 3),
}


def _model(stops: int = 8):
    """A tiny model in which about every fourth token ends a row."""
    model = tiny_language.model()
    model.stop_ids = [0, *range(40 - stops, 40)]
    return model


def _same(one: TokenBatch, other: TokenBatch) -> None:
    assert torch.equal(one.length, other.length)
    assert torch.equal(one.completion, other.completion)
    assert torch.equal(one.stopped, other.stopped)
    torch.testing.assert_close(one.logprob, other.logprob, atol=1e-5, rtol=0)
    torch.testing.assert_close(one.model_logprob, other.model_logprob, atol=1e-5, rtol=0)


def always_the_first_place(original):
    return lambda owner, rows: original(torch.zeros_like(owner), rows)


def one_place_late(original):
    def assign(self, slot, prompt):
        original(self, slot, prompt)
        self.filled[slot] = 1  # so that the row sees what stood in its slot before

    return assign


def seen_by_all(original):
    def init(self, *args):
        original(self, *args)
        self.blocked, self.places = None, self.places.max().expand(len(self.places))

    return init


@sabotaged_by("foresight.nets.language.cache.RowMap.of", always_the_first_place)
@sabotaged_by("foresight.nets.language.cache.DecodeStep.__init__", seen_by_all)
@SLOW
@given(**CASES)
def test_greedy_rows_in_slots_are_what_they_are_one_by_one(prompts, shared, group, slots, seed):
    model = _model()
    rows = [shared + prompt for prompt in prompts]
    together = decoding.generate(model, rows, group, 10, 0.0, slots=slots)
    for p, row in enumerate(rows):
        alone = decoding.generate(model, [row], 1, 10, 0.0, slots=1)
        n = int(alone.length[0, 0])
        for g in range(group):
            assert together.completion[p, g, : together.length[p, g]].tolist() == alone.completion[0, 0, :n].tolist()
            torch.testing.assert_close(together.logprob[p, g, :n], alone.logprob[0, 0, :n], atol=1e-5, rtol=0)
            assert together.stopped[p, g] == alone.stopped[0, 0]


@sabotaged_by("foresight.planning.generation.cache_allocator._rows", change("rows", lambda rows: rows.flip(0)))
@sabotaged_by("foresight.planning.generation.cache_allocator.CacheAllocator.assign", one_place_late)
def test_sampled_rows_do_not_depend_on_the_slots():
    model = _model()
    prompts = [[1, 2, 3, *range(4, 4 + n)] for n in (1, 7, 2, 5, 3, 1, 4)]
    whole = decoding.generate(model, prompts, 3, 12, 0.8, _seeded(), slots=64)
    assert whole.length.min() < 4 and whole.length.max() == 12  # short rows and long ones
    for slots in (1, 2, 5, 20):
        _same(decoding.generate(model, prompts, 3, 12, 0.8, _seeded(), slots=slots), whole)


def test_a_single_slot_is_one_buffer_as_compiled_loops_need_it(monkeypatch):
    model, levels, step = tiny_language.model(), list[int](), LanguageModel.step

    def watched(self, tokens, cache, *rest):
        levels.append(len(cache.levels))
        return step(self, tokens, cache, *rest)

    monkeypatch.setattr(LanguageModel, "step", watched)
    prompts = [[3, 1, 4, *rest] for rest in ([1, 5], [9], [2, 6, 5])]
    one = decoding.generate(model, prompts, 2, 6, 1.0, _seeded(), slots=1)
    assert set(levels) == {0}
    levels.clear()
    _same(one, decoding.generate(model, prompts, 2, 6, 1.0, _seeded(), slots=4))
    assert set(levels) == {2}


def test_short_rows_do_not_wait_for_long_ones(monkeypatch):
    """With continuous batching the steps are about tokens / slots; in batches every row waits for its longest peer."""
    model, steps = _model(12), []
    original = type(model).step

    def counted(self, tokens, *args):
        steps.append(len(tokens))
        return original(self, tokens, *args)

    monkeypatch.setattr(type(model), "step", counted)
    prompts = [[1 + i % 30, 2 + i % 7] for i in range(40)]
    batch = decoding.generate(model, prompts, 1, 24, 1.0, _seeded(), slots=8)
    stepped = int((batch.length - 1).sum())  # the first token of a row comes from its prompt
    waiting = sum(int(batch.length[i : i + 8].max()) - 1 for i in range(0, 40, 8))
    assert len(steps) < 0.75 * waiting
    assert sum(steps) < 1.35 * stepped


def test_a_prompt_is_computed_once_a_group_and_the_shared_prefix_once_in_all(monkeypatch):
    model, read = _model(), []
    original = type(model).forward

    def counted(self, tokens, lengths, cache=None):
        read.append(int(lengths.sum()))
        return original(self, tokens, lengths, cache)

    monkeypatch.setattr(type(model), "forward", counted)
    prompts = [[1, 2, 3, 4, *range(5, 5 + n)] for n in (1, 7, 2, 5, 3)]
    decoding.generate(model, prompts, 6, 10, 1.0, _seeded(), slots=4)
    assert sum(read) == 4 + sum(len(prompt) - 4 for prompt in prompts)
    assert len(read) > 2  # not all at once


def test_a_long_prompt_list_is_read_in_chunks(monkeypatch):
    monkeypatch.setattr(cache_allocator, "READ", 6)
    model = _model()
    whole = decoding.generate(model, PROMPTS, 2, 6, 0.0)
    monkeypatch.undo()
    _same(whole, decoding.generate(model, PROMPTS, 2, 6, 0.0))


def mixed_up(original):
    """What one row remembers becomes another's."""

    def grow(self, places):
        original(self, places)
        for x in self.slot_level.keys:
            x.copy_(x.roll(1, 0))

    return grow


@sabotaged_by("foresight.planning.generation.cache_allocator.CacheAllocator._grow", mixed_up)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_log_probabilities_are_those_of_a_full_forward_pass(precision):
    model = pretrained.load(tiny_language.folder(), precision=precision)
    model.stop_ids = [0, 30, 31, 32]
    batch = decoding.generate(model, PROMPTS, 5, 12, 0.7, _seeded(), top_k=9, slots=4)
    plain = AutoModelForCausalLM.from_pretrained(tiny_language.folder(), dtype=torch.float32)
    for p, prompt in enumerate(PROMPTS):
        for g in range(5):
            n = int(batch.length[p, g])
            row = torch.tensor([prompt + batch.completion[p, g, :n].tolist()])
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                logits = plain(row).logits[0, len(prompt) - 1 : -1].float()
            taken, tolerance = row[0, len(prompt) :, None], 1e-5 if precision == "float32" else 0.15
            known = logits.log_softmax(-1).gather(-1, taken)[:, 0]
            torch.testing.assert_close(batch.model_logprob[p, g, :n], known, atol=tolerance, rtol=0)
            if precision == "float32":
                table = logits / 0.7
                table = table.masked_fill(table < table.topk(9).values[:, -1:], -torch.inf).log_softmax(-1)
                sampled = table.gather(-1, taken)[:, 0]
                torch.testing.assert_close(batch.logprob[p, g, :n], sampled, atol=1e-5, rtol=0)


def test_an_update_is_sampled_from_at_once_and_nothing_is_copied():
    model = _model()
    before = decoding.generate(model, PROMPTS, 2, 8, 0.0)
    places = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=_seeded(5)))
    after = decoding.generate(model, PROMPTS, 2, 8, 0.0)
    assert not torch.equal(before.completion, after.completion)
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == places
    _same(after, decoding.generate(copy.deepcopy(model), PROMPTS, 2, 8, 0.0))


# ---- truncated distributions ----------------------------------------------------------------------------------------


def _truncation(probabilities: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The definition, slowly: the k likeliest, of them the fewest that reach p, and their probabilities scaled to 1."""
    order = sorted(range(len(probabilities)), key=lambda i: -float(probabilities[i]))
    order = order[: top_k or len(order)]
    whole, gathered, kept = sum(float(probabilities[i]) for i in order), 0.0, []
    for i in order:
        if gathered >= top_p * whole:
            break
        kept.append(i)
        gathered += float(probabilities[i])
    exact = torch.zeros(len(probabilities), dtype=torch.float64)
    exact[kept] = probabilities[kept] / gathered
    return exact


def one_more(original):
    return lambda scaled, top_k, top_p: original(scaled, top_k and top_k + 1, min(1.0, top_p + 0.2))


@sabotaged_by("foresight.planning.generation.sampling._truncated", one_more)
@sabotaged_by("foresight.planning.generation.sampling.invert", change("uniform", lambda u: u.square()))
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 3, 1.0), (1.0, 0, 0.7), (0.6, 0, 0.8), (1.7, 4, 0.8)]
)
def test_samples_have_exactly_the_truncated_distribution(temperature, top_k, top_p):
    """Sampling from the most likely tokens only, by top-k or top-p.

    Wrong: the recorded probability is that in the whole vocabulary, so every ratio is biased by the mass that was kept
    (TRL 6789, 7269: a mean ratio of 0.896 at top_p 0.8).
    Invariant: p(a) = π(a) [a is kept] / Σ_kept π, which is also the recorded probability.
    """
    logits = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.9, -0.2, -torch.inf])
    exact = _truncation((logits.double() / temperature).softmax(-1), top_k, top_p)
    draws = 30_000
    uniform = (torch.arange(draws) + 0.5) / draws  # a grid: the counts are exact to one
    token, logprob = sampling.choose(logits.expand(draws, -1), uniform, temperature, top_k, top_p)
    counts = token.bincount(minlength=7).double()
    assert (counts - draws * exact).abs().max() <= 2.5
    torch.testing.assert_close(logprob.double().exp(), exact[token], atol=1e-5, rtol=0)


def test_the_likeliest_of_one_is_greedy():
    logits = torch.randn(50, 30, generator=_seeded())
    token, logprob = sampling.choose(logits, torch.rand(50, generator=_seeded()), 1.0, top_k=1)
    assert torch.equal(token, logits.argmax(-1)) and (logprob == 0).all()


def test_a_nucleus_wider_than_the_first_look_is_found(monkeypatch):
    logits = torch.randn(4, 300, generator=_seeded()) * 0.1  # nearly uniform
    wide = sampling._truncated(logits, 0, 0.9)
    monkeypatch.setattr(sampling, "NUCLEUS", 16)
    narrow = sampling._truncated(logits, 0, 0.9)
    assert (wide[0].isfinite().sum(-1) > 200).all()
    for a, b in zip(wide, narrow, strict=True):
        assert torch.equal(a[:, :200], b[:, :200])


@SLOW
@given(seed=st.integers(0, 99), width=st.integers(1, 400), zeros=st.floats(0, 0.99))
def test_inverting_is_searching_a_running_sum(seed, width, zeros):
    generator = _seeded(seed)
    weights = torch.rand(64, width, generator=generator) * (torch.rand(64, width, generator=generator) >= zeros)
    weights[:, seed % width] += 0.5  # something is left
    uniform = torch.cat([torch.rand(62, generator=generator), torch.tensor([0.0, 1 - 2**-24])])
    place, total = sampling.invert(weights, uniform)
    assert (weights.gather(-1, place[:, None]) > 0).all()
    sums = weights.double().cumsum(-1)
    torch.testing.assert_close(total.double(), sums[:, -1], atol=1e-3, rtol=1e-6)
    reached = sums.gather(-1, place[:, None])[:, 0] / sums[:, -1]
    before = reached - weights.double().gather(-1, place[:, None])[:, 0] / sums[:, -1]
    assert (before <= uniform + 1e-5).all() and (reached >= uniform - 1e-5).all()


@sabotaged_by("foresight.planning.generation.sampling._truncated", one_more)
def test_generated_rows_stay_in_the_nucleus():
    """A token sampled from a truncated distribution has two log-probabilities.

    Wrong: the learner, whose distribution is not truncated, uses the wrong one (vLLM 42259).
    Invariant: log p(a) of the sampler ≥ log π(a) of the model, and the latter equals that of the learner's forward
    pass.
    """
    model = _model(0)
    batch = decoding.generate(model, PROMPTS, 8, 6, 1.0, _seeded(), top_k=2, slots=5)
    exact = model.logprob(batch)[0]
    torch.testing.assert_close(batch.model_logprob, exact.detach(), atol=1e-5, rtol=0)
    assert (batch.logprob >= batch.model_logprob - 1e-6).all()
    distinct = {tuple(row) for row in batch.completion[0].tolist()}
    assert len(distinct) > 1
    assert all(len({row[0] for row in rows.tolist()}) <= 2 for rows in batch.completion)


def test_settings_that_make_no_sense_are_refused():
    model = tiny_language.model()
    for fields in (
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"stop": "x"},
        {"stop": [""]},
        {"slots": 0},
        {"slots": -1},
    ):
        with pytest.raises(UserError, match=next(iter(fields)).removesuffix("_")):
            decoding.generate(model, PROMPTS, 1, 2, **fields)
    for group, limit, temperature in ((0, 2, 1.0), (1, 0, 1.0), (1, 2, -1.0), (1, 2, float("nan"))):
        with pytest.raises(UserError, match="at least"):
            decoding.generate(model, PROMPTS, group, limit, temperature)
    with pytest.raises(UserError, match="nothing to complete"):
        decoding.generate(model, [], 1, 2)
    with pytest.raises(UserError, match="nothing to complete"):
        decoding.generate(model, [[]], 1, 2)


@pytest.mark.parametrize(("count", "expected"), [(4, None), (16, torch.bfloat16)])
def test_weights_are_packed_for_many_steps_of_decoding(monkeypatch: pytest.MonkeyPatch, count: int, expected: object):
    """Six tokens an answer, in four slots: of four answers 6 steps, of sixteen 24."""
    model, asked = copy.copy(tiny_language.model()), list[object]()
    model.autocast, used = torch.bfloat16, decoding.packed
    monkeypatch.setattr(decoding, "packed", lambda kind, *rest: [asked.append(kind), used(kind, *rest)][1])
    decoding.generate(model, [PROMPTS[0]] * count, 1, 6, slots=4)
    assert asked == [expected]

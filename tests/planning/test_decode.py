"""Decoding samples exactly the model's distribution, however rows are batched."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from foresight.errors import UserError
from foresight.planning import decode
from tests import tiny_language
from tests.sabotage import change, flip_sign, sabotaged_by, scaled

PROMPTS = [[3, 4, 5, 6, 7], [3, 4, 9], [3, 4, 5, 8]]


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@sabotaged_by("foresight.nets.language.LanguageModel.logits", flip_sign)
def test_greedy_decoding_equals_that_of_transformers():
    module = AutoModelForCausalLM.from_pretrained(tiny_language.folder(), dtype=torch.float32)
    batch = decode.generate(tiny_language.model(), PROMPTS, 1, 8, temperature=0.0)
    for p, prompt in enumerate(PROMPTS):
        expected = module.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
        expected = expected[len(prompt) :].tolist()
        assert batch.completion[p, 0, : batch.length[p, 0]].tolist() == expected


@sabotaged_by("foresight.planning.decode.choose", change("temperature", lambda t: 2 * t))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_sampler_and_the_learner_agree_on_the_probability(temperature):
    model = tiny_language.model()
    batch = decode.generate(model, PROMPTS, 6, 12, temperature, _seeded())
    logprob, _ = model.logprob(batch, temperature)
    torch.testing.assert_close(logprob.detach(), batch.logprob, atol=2e-5, rtol=0)


def test_rows_end_at_their_stop_token_and_only_there():
    model = tiny_language.model()
    model.stop_ids = [0, 5, 9, 14, 20]
    batch = decode.generate(model, PROMPTS, 16, 12, 1.0, _seeded())
    stops = torch.isin(batch.completion, torch.tensor(model.stop_ids)) & batch.mask
    assert 0.2 < batch.stopped.float().mean() < 1  # the case is not trivial
    assert torch.equal(stops.sum(-1), batch.stopped.long())
    last = batch.completion.gather(-1, batch.length[..., None] - 1)[..., 0]
    assert torch.equal(torch.isin(last, torch.tensor(model.stop_ids)), batch.stopped)
    assert (batch.length[~batch.stopped] == 12).all()
    assert (batch.completion[~batch.mask] == 0).all()


def test_dropping_ended_rows_changes_no_other_row(monkeypatch):
    model = tiny_language.model()
    model.stop_ids = [0, 5, 9, 14, 20, 21, 22]
    dropped = decode.generate(model, PROMPTS, 8, 12, 1.0, _seeded())
    monkeypatch.setattr(decode._Live, "drop", lambda self, stopped: None)
    carried = decode.generate(model, PROMPTS, 8, 12, 1.0, _seeded())
    assert int(dropped.length.min()) < int(dropped.length.max())
    assert torch.equal(dropped.completion, carried.completion)
    assert torch.equal(dropped.length, carried.length)
    torch.testing.assert_close(dropped.logprob, carried.logprob, atol=1e-5, rtol=0)


def test_a_prompt_alone_gives_what_it_gives_in_a_batch():
    model = tiny_language.model()
    together = decode.generate(model, PROMPTS, 1, 6, 0.0)
    for p, prompt in enumerate(PROMPTS):
        alone = decode.generate(model, [prompt], 1, 6, 0.0)
        n = int(alone.length[0, 0])
        assert together.completion[p, 0, :n].tolist() == alone.completion[0, 0, :n].tolist()


@sabotaged_by("foresight.planning.decode.choose", change("uniform", lambda u: u.square()))
def test_one_uniform_number_gives_exactly_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -torch.inf]]).expand(20_000, -1)
    token, logprob = decode.choose(logits, torch.rand(20_000, generator=_seeded()), 1.0)
    expected = logits[0].double().softmax(-1) * 20_000
    counts = token.bincount(minlength=5)
    assert counts[4] == 0
    assert chisquare(counts[:4].numpy(), expected[:4].numpy()).pvalue > 0.01
    torch.testing.assert_close(logprob, logits[0].log_softmax(-1)[token])


@sabotaged_by("foresight.planning.decode.choose", change("uniform", lambda u: 1 - u))
def test_draws_at_both_ends_stay_inside_the_vocabulary():
    logits = torch.tensor([[5.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
    token, _ = decode.choose(logits, torch.tensor([0.0, 1 - 1e-7]), 1.0)
    assert token.tolist() == [0, 2]


@sabotaged_by("foresight.ops.tokens.token_logprob", scaled(0.5))
def test_equal_seeds_give_equal_text_and_other_seeds_other_text():
    model = tiny_language.model()
    a, b, c = (decode.generate(model, PROMPTS, 4, 8, 1.0, _seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(a.completion, b.completion)
    assert a.completion.shape != c.completion.shape or not torch.equal(a.completion, c.completion)
    torch.testing.assert_close(model.logprob(a)[0].detach(), a.logprob, atol=1e-5, rtol=0)


def test_a_prompt_that_leaves_no_room_is_an_error():
    with pytest.raises(UserError, match="context of 64"):
        decode.generate(tiny_language.model(), [[1] * 60], 1, 5)

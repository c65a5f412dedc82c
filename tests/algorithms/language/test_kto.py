"""KTO: the paper's equation, pairs as two labeled answers, and where it converges."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from foresight.algorithms.language import kto
from foresight.data import forms
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.training.options import build_config
from tests import tiny_language
from tests.algorithms.language.supervised_runs import (
    LABELED,
    PAIRS,
    PROMPT,
    answer_logprobs,
    build,
    gradient,
    row_logprob,
    same_gradients,
)
from tests.sabotage import change, flip_sign, sabotaged_by, scaled


def moved(state) -> LanguageModel:
    """Move the policy away from its reference; returns a copy."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in state.policy.parameters():
            weight.mul_(1 + 0.1 * torch.randn_like(weight))
    return copy.deepcopy(state.policy)


@sabotaged_by("foresight.ops.preference.kto", flip_sign, change("reference_point", lambda z: 0 * z))
@sabotaged_by("foresight.algorithms.language.kto.mismatched", scaled(0.5))
@pytest.mark.parametrize("micro_tokens", [1, 10_000])
def test_kto_is_the_papers_equation_8(micro_tokens):
    state = build(kto, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7, micro_tokens=micro_tokens)
    rows, model = kto._corpus(state, LABELED), moved(state)
    caught, metrics = gradient(kto, state, rows.batch(range(8)), LABELED)
    answers = [group[0] for group in rows.completions]

    def ratio(prompt, answer):
        with torch.no_grad():
            reference = row_logprob(state.reference, prompt, answer).sum()
        return row_logprob(model, prompt, answer).sum() - reference

    others = [ratio(prompt, answers[(i + 1) % 8]).item() for i, prompt in enumerate(rows.prompts)]
    point = max(0.0, sum(others) / 8)
    assert point > 0, "the case is trivial"
    total = torch.zeros(())
    for row, prompt, answer in zip(LABELED, rows.prompts, answers, strict=True):
        gain = 0.3 * (ratio(prompt, answer) - point)
        value = 1.2 * torch.sigmoid(gain) if row.columns["label"] else 0.7 * torch.sigmoid(-gain)
        total = total + ((1.2 if row.columns["label"] else 0.7) - value) / 8
    total.backward()
    assert math.isclose(metrics["loss"], total.item(), rel_tol=1e-5)
    assert math.isclose(metrics["reference_point"], point, rel_tol=1e-4)
    same_gradients(caught, model.parameters())


@sabotaged_by("foresight.algorithms.language.kto.labeled", lambda f: lambda rows: f(rows)[::-1])
def test_kto_takes_pairs_for_two_answers_each():
    state = build(kto)
    rows = kto._corpus(state, PAIRS)
    assert [row.columns["label"] for row in rows.examples] == [True, False] * 6
    assert [row.columns["completion"] for row in rows.examples[:4]] == ["0", "ab", "2", "abab"]
    assert len(kto.labeled(LABELED)) == len(LABELED)


@pytest.mark.parametrize(("fields", "message"), [({"beta": 0.0}, "beta is 0"), ({"batch_size": 1}, "at least 2")])
def test_a_kto_without_a_reference_point_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        build(kto, **fields)


def _labeled(labels: str) -> list[Example]:
    """Rows of the answers 2 and 3, labeled good (+) or bad (-) as often as there are signs for each: "+-:++"."""
    return [
        Example(PROMPT, columns={"prompt": PROMPT, "completion": answer, "label": sign == "+"})
        for answer, signs in zip("23", labels.split(":"), strict=True)
        for sign in signs
    ]


@sabotaged_by("foresight.ops.preference.kto", change("undesirable_weight", lambda w: 1.0))
def test_an_answer_with_contradictory_labels_rests_at_the_reference():
    """Good once and bad twice, at twice the weight for good: gains and losses cancel wherever r is."""
    rows = _labeled("+--:--+")
    config = build_config(
        kto.Config,
        tiny_language.folder(),
        batch_size=6,
        precision="float32",
        desirable_weight=1.0,
        undesirable_weight=0.5,
    )
    state = kto.build(config)
    batch = kto._corpus(state, rows).batch(range(6))
    assert kto.update(state, batch, rows)["grad_norm"] < 1e-6


@sabotaged_by("foresight.ops.preference.kto", change("desirable", lambda d: ~d))
def test_kto_goes_with_the_majority_as_far_as_it_can():
    """Contradictory labels: the paper's proposition is that the answer which most call good wins, and its loss is least
    where that one is certain; half of them would be enough for a log-likelihood to stop at a share.
    """
    rows = _labeled("++-:+--")
    config = build_config(
        kto.Config,
        tiny_language.folder(),
        steps=60,
        batch_size=6,
        learning_rate=2e-2,
        precision="float32",
        anneal_lr=False,
    )
    state = kto.build(config)
    before = answer_logprobs(state)
    *_, (_, _, state) = kto.train(config, TextTask("t", rows, [], None), state)
    after = answer_logprobs(state)
    assert after["2"] > math.log(0.9) > before["2"] and after["3"] < before["3"] - 2


def test_a_pair_beside_its_chosen_conversation_keeps_both_answers():
    """The columns of ultrafeedback_binarized."""
    asked, good, bad = (
        {"role": role, "content": text} for role, text in (("user", PROMPT), ("assistant", "2"), ("assistant", "ab"))
    )
    row = {"prompt": PROMPT, "chosen": [asked, good], "rejected": [asked, bad], "messages": [asked, good]}
    _, (checked,) = forms.check([row], "f")
    state = build(kto)
    rows = kto._corpus(state, [Example(checked["prompt"], columns=checked)])
    assert [state.policy.tokenizer.decode(group[0]) for group in rows.completions] == ["2<eos>", "ab<eos>"]


@pytest.mark.parametrize("max_tokens", [40, 1024])
def test_an_answer_to_another_prompt_is_cut_to_its_room(max_tokens):
    state = build(kto, max_tokens=max_tokens)
    limit = min(max_tokens, state.policy.context)
    texts = [("1" * (limit - 4), "2"), ("3", "45" * (limit // 2 - 2))]
    rows = kto._corpus(state, [Example(prompt, columns={"completion": text}) for prompt, text in texts])
    model, answers = moved(state), [group[0] for group in rows.completions]
    found = kto.mismatched(state, rows.batch(range(2)))
    for i, other in enumerate((answers[1][:4], answers[0])):
        with torch.no_grad():
            mine, reference = (row_logprob(x, rows.prompts[i], other).sum() for x in (model, state.reference))
        assert math.isclose(found[i].item(), (mine - reference).item(), rel_tol=1e-3, abs_tol=1e-4)


@pytest.mark.parametrize("batch_size", [2, 7, 16])
def test_held_out_pairs_are_compared_with_other_prompts(monkeypatch, batch_size):
    state, used = build(kto, batch_size=batch_size), list[int]()

    def to_own_prompt(state, batch):
        prompts = batch.prompts()
        same = torch.tensor([a == b for a, b in zip(prompts, [*prompts[1:], prompts[0]], strict=True)])
        used.append(int((~same).sum()))
        return 1000.0 * same

    monkeypatch.setattr(kto, "mismatched", to_own_prompt)
    assert set(kto.assess(state, PAIRS)[1]) == {0.5}, "the reference point is 0"
    assert sum(used) >= 11
    assert set(kto.assess(state, _labeled("+-:+"))[1]) == {0.5}, "one prompt has no other"

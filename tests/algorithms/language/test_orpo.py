"""ORPO: the paper's equation, and where its two terms balance."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from foresight.algorithms.language import orpo
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.training.options import build_config
from tests import tiny_language
from tests.algorithms.language.supervised_runs import (
    PAIRS,
    PROMPT,
    answer_logprobs,
    build,
    gradient,
    row_logprob,
    same_gradients,
)
from tests.sabotage import flip_sign, sabotaged_by, scaled


@sabotaged_by("foresight.ops.preference.odds_ratio", flip_sign, scaled(0.5))
@sabotaged_by("foresight.algorithms.language.orpo.mean_logprob", lambda f: lambda s, b: f(s, b) * b.length)
@pytest.mark.parametrize("micro_tokens", [1, 10_000])
def test_orpo_is_the_papers_equation_6(micro_tokens):
    state = build(orpo, odds_ratio_coef=0.4, micro_tokens=micro_tokens)
    rows, model = orpo._corpus(state, PAIRS), copy.deepcopy(state.policy)
    caught, metrics = gradient(orpo, state, rows.batch(range(6)))
    total = torch.zeros(())
    for prompt, answers in zip(rows.prompts, rows.completions, strict=True):
        p, q = (row_logprob(model, prompt, answer).mean().exp() for answer in answers)
        ratio = (p / (1 - p)) / (q / (1 - q))
        total = total + (-torch.log(p) - 0.4 * torch.log(torch.sigmoid(torch.log(ratio)))) / 6
    total.backward()
    assert math.isclose(metrics["loss"], total.item(), rel_tol=1e-5)
    same_gradients(caught, model.parameters())


def test_a_negative_weight_of_the_odds_is_refused():
    with pytest.raises(UserError, match="odds_ratio_coef is -1"):
        build(orpo, odds_ratio_coef=-1.0)


def _orpo_rest(wins: float, coef: float) -> float:
    """The share of the answer that is chosen in `wins` of the pairs, by bisection: its end costs nothing at rest.

    P is the root of the share p, the mean over two tokens, of which the second is certain. With 1 - p for the other
    answer, J(p) is minimal where its derivative, taken here by differences, is 0.
    """

    def objective(p: float) -> float:
        roots = [math.sqrt(p), math.sqrt(1 - p)]
        odds = [x / (1 - x) for x in roots]
        losses = [-math.log(roots[i]) + coef * math.log(1 + odds[1 - i] / odds[i]) for i in range(2)]
        return wins * losses[0] + (1 - wins) * losses[1]

    low, high = 1e-6, 1 - 1e-6
    for _ in range(200):  # golden section would do it too; the objective has one minimum
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if objective(a) < objective(b) else (a, high)
    return low


@sabotaged_by("foresight.ops.preference.odds_ratio", scaled(0.0), scaled(3.0))
def test_orpo_rests_where_its_two_terms_balance():
    """Three of four pairs choose 2 over 3: SFT alone would give 2 three quarters, the odds ratio gives it less here."""
    pairs = [("2", "3"), ("2", "3"), ("2", "3"), ("3", "2")]
    rows = [Example(PROMPT, columns={"prompt": PROMPT, "chosen": c, "rejected": r}) for c, r in pairs]
    config = build_config(
        orpo.Config,
        tiny_language.folder(),
        steps=120,
        batch_size=4,
        learning_rate=2e-2,
        precision="float32",
        odds_ratio_coef=1.0,
    )
    *_, (_, _, state) = orpo.train(config, TextTask("t", rows, [], None))
    share = answer_logprobs(state)
    total = math.exp(share["2"]) + math.exp(share["3"])
    assert total > 0.97
    wanted = _orpo_rest(0.75, 1.0)
    assert abs(wanted - 0.75) > 0.02, "the case does not tell the terms apart"
    assert abs(math.exp(share["2"]) / total - wanted) < 0.005  # with three times the odds it rests 0.009 away

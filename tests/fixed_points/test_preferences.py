"""Where KTO and ORPO come to rest, as whole algorithms on a small model, against what their equations say."""

from __future__ import annotations

import math

import torch

from foresight.algorithms.language import kto, orpo
from foresight.envs.text.task import Example, TextTask
from foresight.training.options import build_config
from tests import tiny_language
from tests.sabotage import change, sabotaged_by, scaled

PROMPT = "1?"


def _shares(state) -> dict[str, float]:
    """How likely the policy makes the answers 2 and 3, each with its end."""
    tokens = [state.policy.tokenizer.encode(x)[0] for x in "23"]
    prompt = state.policy.encode(PROMPT)
    found = {}
    for token, name in zip(tokens, "23", strict=True):
        hidden = state.policy(torch.tensor([[*prompt, token]]), torch.tensor([len(prompt) + 1]))[0]
        logits = state.policy.logits(hidden)[0].log_softmax(-1)
        end = state.policy.tokenizer.eos_token_id
        found[name] = (logits[len(prompt) - 1, token] + logits[len(prompt), end]).item()
    return found


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
        steps=250,
        batch_size=4,
        learning_rate=1e-2,
        precision="float32",
        odds_ratio_coef=1.0,
    )
    *_, (_, _, state) = orpo.train(config, TextTask("t", rows, [], None))
    share = _shares(state)
    total = math.exp(share["2"]) + math.exp(share["3"])
    assert total > 0.97
    wanted = _orpo_rest(0.75, 1.0)
    assert abs(wanted - 0.75) > 0.02, "the case does not tell the terms apart"
    assert abs(math.exp(share["2"]) / total - wanted) < 0.01


def _judged(labels: str) -> list[Example]:
    """Rows of the answers 2 and 3, judged good (+) or bad (-) as often as there are signs for each: "+-:++"."""
    return [
        Example(PROMPT, columns={"prompt": PROMPT, "completion": answer, "label": sign == "+"})
        for answer, signs in zip("23", labels.split(":"), strict=True)
        for sign in signs
    ]


@sabotaged_by("foresight.ops.preference.kto", change("undesirable_weight", lambda w: 1.0))
def test_an_answer_that_is_judged_both_ways_rests_at_the_reference():
    """Good once and bad twice, at twice the weight for good: gains and losses cancel wherever r is."""
    rows = _judged("+--:--+")
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
    rows = _judged("++-:+--")
    config = build_config(
        kto.Config,
        tiny_language.folder(),
        steps=120,
        batch_size=6,
        learning_rate=1e-2,
        precision="float32",
        anneal_lr=False,
    )
    state = kto.build(config)
    before = _shares(state)
    *_, (_, _, state) = kto.train(config, TextTask("t", rows, [], None), state)
    after = _shares(state)
    assert after["2"] > math.log(0.9) > before["2"] and after["3"] < before["3"] - 2

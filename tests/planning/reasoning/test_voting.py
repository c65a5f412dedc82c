"""Votes: their laws, what counts as one answer, early stops, and the unbiased pass@k."""

from __future__ import annotations

import itertools
import math

import pytest

from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.planning.generation.scripted import Scripted
from foresight.planning.reasoning import methods
from foresight.planning.reasoning.mind import Mind
from foresight.planning.reasoning.voting import pass_at_k, tally
from tests.sabotage import sabotaged_by, scaled

QUESTIONS = [Example(f"What is half of {n}?", str(n / 2)) for n in range(1, 6)]
TASK = TextTask("halves", QUESTIONS, QUESTIONS, lambda e, c: [float(a.answer in b) for a, b in zip(e, c, strict=True)])


def halves(text, draw):
    """One of three forms of the right answer, or the same wrong one in two of six samples."""
    n = int(text.removesuffix("?").split()[-1])
    return draw.choice([f"It is {n}/2.", f"so {n / 2}", f"{2 * n}/4", f"{n / 2}", "It is 99.", "99"])


def _think(name, verifier=None, seed=0, budget=None, **options):
    mind = Mind(Scripted(halves), 16, verifier=verifier)
    mind.generator.manual_seed(seed)
    return methods.run(name, mind, TASK, QUESTIONS, budget, **options)


@sabotaged_by(
    "foresight.planning.reasoning.voting.pass_at_k", scaled(0.9), lambda f: lambda n, c, k: 1 - (1 - c / n) ** k
)
def test_pass_at_k_is_the_share_of_all_draws_with_a_right_one():
    for n, right in itertools.product(range(1, 8), range(8)):
        for k in range(1, n + 1):
            draws = list(itertools.combinations([i < right for i in range(n)], k))
            if right <= n:
                assert math.isclose(pass_at_k(n, right, k), sum(map(any, draws)) / len(draws))
    with pytest.raises(UserError, match="from 1 to the number of samples"):
        pass_at_k(3, 1, 4)


@sabotaged_by("foresight.envs.text.exact.canonical", lambda f: lambda text: text.strip())
def test_three_forms_of_an_answer_are_one_vote():
    results = _think("self_consistency", n=64)
    assert [len(result.answer.candidates) for result in results] == [2] * 5
    assert all("99" not in result.answer.text for result in results)


def forgets_weights(original):
    return lambda answers, weights=None: original(answers)


def test_a_vote_weighted_by_a_constant_is_the_majority():
    weighted = _think("self_consistency", lambda e, t: [0.25] * len(t), n=24, weighted=True)
    plain = _think("self_consistency", n=24)
    assert [r.answer.text for r in weighted] == [r.answer.text for r in plain]


@sabotaged_by("foresight.planning.reasoning.voting.tally", forgets_weights)
def test_a_vote_weighted_by_a_sharp_verifier_is_not():
    def likes_nines(examples, texts):
        return [1.0 if "99" in text else 0.01 for text in texts]

    results = _think("self_consistency", likes_nines, n=24, weighted=True)
    assert all("99" in result.answer.text for result in results)
    assert all("99" in result.answer.text for result in _think("best_of_n", likes_nines, n=24))


def test_an_empty_answer_has_no_vote_and_ties_go_to_the_first():
    assert tally(["", "b", "a", "a", "b", ""]) == [("b", 2.0), ("a", 2.0)]


@sabotaged_by("foresight.planning.reasoning.voting._decided", lambda f: lambda votes, left, confidence: False)
def test_an_early_stop_draws_fewer_and_elects_the_same():
    early, full = _think("self_consistency", n=64, early=0.95), _think("self_consistency", n=64)
    assert sum(r.charge.sampled_tokens for r in early) < sum(r.charge.sampled_tokens for r in full)
    assert [r.answer.text[-2:] == "99" for r in early] == [r.answer.text[-2:] == "99" for r in full]


def test_the_same_seed_thinks_the_same():
    one, again, other = (_think("self_consistency", n=8, seed=seed) for seed in (1, 1, 2))
    assert [r.answer.candidates for r in one] == [r.answer.candidates for r in again]
    assert [r.answer.candidates for r in one] != [r.answer.candidates for r in other]


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("majority", {}, "Unknown method 'majority'"),
        ("self_consistency", {"m": 3}, "Unknown option of self_consistency 'm'"),
        ("self_consistency", {"n": 2.5}, "must be int, not 2.5"),
        ("best_of_n", {}, "needs a verifier"),
        ("self_consistency", {"weighted": True}, "needs a verifier for a weighted vote"),
        ("graph_of_thoughts", {}, "needs a plan"),
        ("deep_think", {}, "no chat template"),
        ("tree_of_thoughts", {}, "no chat template"),
        ("self_consistency", {"budget": 15}, "below one answer of up to 16"),
    ],
)
def test_bad_requests(name, options, match):
    with pytest.raises(UserError, match=match):
        _think(name, **options)

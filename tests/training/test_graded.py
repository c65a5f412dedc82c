"""Which pairs are made of graded answers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from foresight.envs.text.make import make
from foresight.envs.text.task import Example
from foresight.errors import UserError
from foresight.training import graded
from tests.sabotage import sabotaged_by

ANSWERS = {"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.0, "e": 0.0, "cut": 1.0, "unscored": float("nan"), " ": 0.0}


def _rollout():
    whole = [text != "cut" for text in ANSWERS]
    rewards = torch.tensor([list(ANSWERS.values())])
    return graded.Graded([Example("1+1?")], list(ANSWERS), torch.tensor([whole]), rewards)


@sabotaged_by("foresight.training.graded._pairs", lambda f: lambda group: ((b, a) for a, b in f(group)))
@pytest.mark.parametrize("most", [1, 3, 5, 8, 100])
def test_pairs_are_different_and_every_good_answer_comes_before_any_again(most):
    rows = graded.preferences(_rollout(), most)
    pairs = [(row["chosen"], row["rejected"]) for row in rows]
    assert len(pairs) == len(set(pairs)) == min(most, 8)  # a and b over c, d and e; c over d and e
    for row in rows:
        assert row["prompt"] == "1+1?"
        assert row["chosen_reward"] == ANSWERS[row["chosen"]] > ANSWERS[row["rejected"]] == row["rejected_reward"]
    assert sorted(chosen for chosen, _ in pairs[:3]) == ["a", "b", "c"][: len(pairs)]
    if most >= 8:
        assert Counter(chosen for chosen, _ in pairs) == {"a": 3, "b": 3, "c": 2}


def test_steps_are_labeled_by_the_exact_verifier():
    task = make("chains", terms=3, largest=9, size=20, held_out=5)
    few = list(task.train)[:2]
    answers = []
    for example in few:
        first, second = example.columns["steps"]
        total = second.rpartition("=")[2]
        wrong = f"{first}\n{second.rpartition('=')[0]}={int(total) + 1}\n#{int(total) + 1}"
        answers += [f"{first}\n{second}\n#{total}", wrong]
    stopped = torch.tensor([[True, True], [True, False]])
    rows = graded.make("steps", graded.Graded(few, answers, stopped, torch.zeros(2, 2)), task, 4)
    assert [row["labels"] for row in rows] == [[True] * 3, [True, False, False], [True] * 3]
    assert all("\n".join(row["completions"]) in answers and "delimiter" not in row for row in rows)
    with pytest.raises(UserError, match="no exact verifier"):
        graded.make("steps", graded.Graded(few, answers, stopped, torch.zeros(2, 2)), make("addition"), 4)


def test_steps_have_the_delimiter_of_their_task():
    task = make("countdown", traces="steps", size=20, held_out=5)
    example = task.train[0]
    found = graded.Graded([example], [example.columns["completion"]], torch.tensor([[True]]), torch.zeros(1, 1))
    row = graded.make("steps", found, task, 4)[0]
    assert row["delimiter"] == "," and len(row["completions"]) > 1 and all(row["labels"])
    assert row["delimiter"].join(row["completions"]) == example.columns["completion"]

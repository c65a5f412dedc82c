"""GRPO finds a known optimum: a random model that is rewarded for digits ends up writing digits."""

from __future__ import annotations

import pytest

from foresight.algorithms.language import grpo
from foresight.envs.text import Example, TextTask
from tests import tiny_language
from tests.sabotage import flip_sign, sabotaged_by


def _share_of_digits(examples, completions):
    return [sum(c.isdigit() for c in text) / 6 for text in completions]


def _greedy(state: grpo.State, task: TextTask) -> float:
    completions, _, _ = grpo.act(state, task.test)
    return sum(task.grade(task.test, completions)) / len(completions)


@sabotaged_by("foresight.ops.advantage.group_scaled", flip_sign)
@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_learns_to_write_digits(seed):
    task = TextTask(
        "digits", [Example(f"{i}?") for i in range(8)], [Example(f"{i}?") for i in "abcd"], _share_of_digits
    )
    config = grpo.Config(
        tiny_language.folder(), steps=50, seed=seed, max_new_tokens=6, learning_rate=1e-2, precision="float32"
    )
    untrained = _greedy(grpo.build(config), task)
    *_, (_, _, state) = grpo.train(config, task)
    trained = _greedy(state, task)
    assert untrained < 0.5
    assert trained >= 0.95

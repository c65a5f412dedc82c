"""Every member of GRPO's family finds a known optimum: rewarded for digits, a random model ends up writing digits."""

from __future__ import annotations

import pytest

from foresight.algorithms.language import cispo, dapo, dr_grpo, grpo, gspo, rloo
from foresight.envs.text.task import Example, TextTask
from foresight.training.options import build_config
from tests import tiny_language
from tests.sabotage import flip_sign, sabotaged_by


def _share_of_digits(examples, completions):
    return [sum(c.isdigit() for c in text) / 6 for text in completions]


def _greedy(module, state, task: TextTask) -> float:
    completions, _, _ = module.act(state, task.test)
    return sum(task.grade(task.test, completions)) / len(completions)


def _learn(module, seed: int) -> None:
    task = TextTask(
        "digits", [Example(f"{i}?") for i in range(8)], [Example(f"{i}?") for i in "abcd"], _share_of_digits
    )
    # No completion ends by itself, and near the optimum hardly a group differs.
    extra = {"overlong_filter": False, "overlong_penalty": 0.0, "max_batches": 2} if module is dapo else {}
    config = build_config(
        module.Config,
        tiny_language.folder(),
        steps=20,
        seed=seed,
        max_new_tokens=6,
        learning_rate=1e-2,
        precision="float32",
        **extra,
    )
    untrained = _greedy(module, module.build(config), task)
    *_, (_, _, state) = module.train(config, task)
    trained = _greedy(module, state, task)
    assert untrained < 0.5
    assert trained >= 0.95


@sabotaged_by("foresight.ops.advantage.group_scaled", flip_sign)
@pytest.mark.parametrize("module", [grpo, dapo, cispo, gspo], ids=["grpo", "dapo", "cispo", "gspo"])
def test_it_learns_to_write_digits(module):
    _learn(module, 0)


@sabotaged_by("foresight.ops.advantage._centered", lambda f: lambda r: (-f(r)[0], f(r)[1]))
@pytest.mark.parametrize("module", [dr_grpo, rloo], ids=["dr_grpo", "rloo"])
def test_it_learns_without_scaling_its_advantages(module):
    _learn(module, 1)

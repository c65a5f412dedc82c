"""SFT, DPO, KTO, ORPO and reward models: each loss as its paper writes it, row by row through the untouched model."""

from __future__ import annotations

import copy

import pytest
import torch

from foresight.algorithms.language import dpo, kto, orpo, reward_model, sft
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.training.options import build_config
from tests import tiny_language
from tests.algorithms.language.supervised_runs import LABELED, PAIRS, SHOWN
from tests.sabotage import sabotaged_by

# ---- what they share


CASES = [(sft, SHOWN), (dpo, PAIRS), (kto, LABELED[:5] * 2), (orpo, PAIRS), (reward_model, PAIRS)]
supervised = pytest.mark.parametrize(("module", "rows"), CASES, ids=["sft", "dpo", "kto", "orpo", "reward_model"])


@supervised
def test_a_mid_run_state_continues_bit_for_bit(module, rows):
    task = TextTask("t", rows[:5], rows[5:], None)
    config = build_config(
        module.Config, tiny_language.folder(), steps=4, batch_size=4, learning_rate=1e-3, precision="float32"
    )
    *_, (_, _, whole) = module.train(config, task)
    halfway = next(state for step, _, state in module.train(config, task) if step == 2)
    *_, (_, _, resumed) = module.train(config, task, copy.deepcopy(halfway))
    weights = [
        (state.scorer if module is reward_model else state.policy).state_dict().values() for state in (whole, resumed)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@sabotaged_by("foresight.training.microbatch.step", lambda f: lambda o, p, rate, *a: f(o, p, -rate, *a))
@supervised
def test_it_learns_what_it_is_shown(module, rows):
    """Held-out rows: right answers are digits, wrong ones are letters. Those of KTO are the ones that it learned."""
    task = TextTask("t", rows[:5], rows[5:], None)
    config = build_config(
        module.Config,
        tiny_language.folder(),
        steps=25,
        batch_size=5,
        learning_rate=3e-3,
        precision="float32",
        anneal_lr=False,
    )
    state = module.build(config)
    metric, before = module.assess(state, task.test)
    with torch.random.fork_rng():
        *_, (_, _, state) = module.train(config, task, state)
    after = module.assess(state, task.test)[1]
    assert after[0] > before[0] + (0.5 if metric == "logprob" else -0.01)
    assert metric == "logprob" or set(after) == {1.0}


@supervised
def test_data_of_another_form_is_refused(module, rows):
    task = TextTask("t", [Example("1?", columns={"prompt": "1?"})], [], None)
    with pytest.raises(UserError, match="needs rows of the form"):
        next(module.train(build_config(module.Config, tiny_language.folder(), precision="float32"), task))
    grader = lambda examples, completions: [0.0] * len(completions)  # noqa: E731
    graded = TextTask("t", task.train, [], grader)
    with pytest.raises(UserError, match="give --data FILE"):
        next(module.train(build_config(module.Config, tiny_language.folder(), precision="float32"), graded))
    written = TextTask("t", rows, [], grader)  # a task that writes its own rows needs no file
    config = build_config(module.Config, tiny_language.folder(), steps=1, batch_size=2, precision="float32")
    assert [step for step, *_ in module.train(config, written)][-1] == 1

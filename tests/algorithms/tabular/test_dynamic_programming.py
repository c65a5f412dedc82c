"""What the three algorithms of dynamic programming share: yields, stops, resume, pictures, mistakes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from foresight.algorithms.tabular import (
    policy_iteration,
    soft_value_iteration,
    truncated_policy_iteration,
    value_iteration,
)
from foresight.envs.tabular import grid
from foresight.errors import UserError
from foresight.planning.dynamic import bellman
from tests.small_mdps import small_mdp

CASES: list[tuple[Any, dict[str, Any]]] = [
    (value_iteration, {}),
    (policy_iteration, {}),
    (policy_iteration, {"evaluation": "sweeps", "tolerance": 1e-4}),
    (truncated_policy_iteration, {"evaluation_sweeps": 3}),
    (truncated_policy_iteration, {"evaluation_sweeps": 3, "span_bounds": True}),
]
each = pytest.mark.parametrize(
    ("module", "fields"),
    CASES,
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else x.__name__.split(".")[-1],
)


def tensors(state: Any) -> dict[str, Any]:
    return {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name != "config"}


def equal(a: Any, b: Any) -> bool:
    pairs = [(x, tensors(b)[key]) for key, x in tensors(a).items()]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@each
def test_every_sweep_is_yielded_and_counted(module: Any, fields: dict[str, Any]) -> None:
    config = module.Config(gamma=0.9, **fields)
    steps = [(step, dict(metrics), state) for step, metrics, state in module.train(config, small_mdp(1, 40))]
    assert [step for step, _, _ in steps] == list(range(1, len(steps) + 1)) and len(steps) >= 4
    assert all(state.step == steps[-1][0] for _, _, state in steps)  # one State, changed in place
    for _, metrics, _ in steps:
        assert "value" in metrics and all(type(x) is float for x in metrics.values())
    assert set(module.METRICS) <= set().union(*(metrics for _, metrics, _ in steps))


@each
def test_every_other_sweep_changes_nothing_but_the_yields(module: Any, fields: dict[str, Any]) -> None:
    mdp = small_mdp(2, 40)
    *_, (_, _, whole) = module.train(module.Config(gamma=0.9, **fields), mdp)
    steps = list(module.train(module.Config(gamma=0.9, yield_every=5, **fields), mdp))
    assert [step % 5 for step, _, _ in steps[:-1]] == [0] * (len(steps) - 1)
    assert equal(whole, steps[-1][2])


@each
def test_a_run_resumed_from_any_sweep_equals_the_uninterrupted_one(module: Any, fields: dict[str, Any]) -> None:
    mdp, config = small_mdp(3, 60, 4, 3), module.Config(gamma=0.9, **fields)
    saved = [(copy.deepcopy(state), dict(metrics)) for _, metrics, state in module.train(config, mdp)]
    for i in sorted({0, 1, 2, 3, len(saved) // 2, len(saved) - 2}):
        resumed = [(copy.deepcopy(s), dict(m)) for _, m, s in module.train(config, mdp, copy.deepcopy(saved[i][0]))]
        assert [m for _, m in resumed] == [m for _, m in saved[i + 1 :]]
        assert equal(resumed[-1][0], saved[-1][0])


@each
def test_it_stops_when_done_and_at_its_limit(module: Any, fields: dict[str, Any]) -> None:
    mdp, config = small_mdp(4, 40), module.Config(gamma=0.9, **fields)
    *_, (_, _, state) = module.train(config, mdp)
    assert list(module.train(config, mdp, state)) == []  # converged: nothing left to do
    short = list(module.train(module.Config(gamma=0.9, steps=3, **fields), mdp))
    assert [step for step, _, _ in short] == [1, 2, 3]


@each
def test_it_learns_what_the_random_policy_does_not_know(module: Any, fields: dict[str, Any]) -> None:
    mdp = grid.make("GridWorld8x8")
    baseline = bellman.expected_return(mdp, mdp.uniform(), 0.99)
    *_, (_, _, state) = module.train(module.Config(gamma=0.99, **fields), mdp)
    states = torch.arange(mdp.states)
    policy, extras, carry = module.act(state, states)
    assert extras == {} and carry is None and torch.equal(policy, state.policy)
    reached = bellman.expected_return(mdp, policy, 0.99)
    assert baseline < -0.9 and reached == pytest.approx(0.133917, abs=1e-5)
    env = mdp.sample(64)  # and it gets there when it is really walked
    obs, total, count = env.reset(seed=0), 0.0, 0
    for _ in range(200):
        feedback = env.step(module.act(state, obs)[0])
        obs = feedback.obs
        total += sum(feedback.info["episode_return"])
        count += len(feedback.info["episode_return"])
    expected = bellman.expected_return(mdp, policy, 1.0)
    assert count > 300 and total / count == pytest.approx(expected, abs=0.12)


@each
def test_picture(module: Any, fields: dict[str, Any]) -> None:
    mdp = grid.make("GridWorld4x4")
    gamma = 1.0 if fields.get("evaluation") != "sweeps" and not fields.get("span_bounds") else 0.999
    *_, (_, _, state) = module.train(module.Config(gamma=gamma, **fields), mdp)
    lines = module.picture(state, mdp).splitlines()
    assert lines[0].split() == ["value", "policy"] and len(lines) == 5
    assert lines[1].split()[4:] == ["G", "←", "←", "↓←"]
    assert lines[2].split()[4:] == ["↑", "↑←", "↑→↓←", "↓"]


def test_mistakes_are_reported() -> None:
    mdp = grid.make("GridWorld4x4")
    with pytest.raises(UserError, match=r"Unknown evaluation 'exakt'\. Did you mean 'exact'"):
        next(policy_iteration.train(policy_iteration.Config(evaluation="exakt"), mdp))
    with pytest.raises(UserError, match="span_bounds needs gamma < 1"):
        next(truncated_policy_iteration.train(truncated_policy_iteration.Config(gamma=1.0, span_bounds=True), mdp))
    with pytest.raises(UserError, match="evaluation_sweeps must be"):
        next(truncated_policy_iteration.train(truncated_policy_iteration.Config(evaluation_sweeps=-1), mdp))
    with pytest.raises(UserError, match="gamma must be between"):
        next(value_iteration.train(value_iteration.Config(gamma=2.0), mdp))


@pytest.mark.parametrize(("module", "fields"), [case for case in CASES if "span_bounds" not in case[1]])
def test_without_discount_the_goal_is_reached(module: Any, fields: dict[str, Any]) -> None:
    """Every action is as good as any other: from each cell a random walk reaches the goal as well."""
    mdp = grid.make("GridWorld", picture="S...\n....\n...G", step_reward=0.0)
    *_, (_, _, state) = module.train(module.Config(gamma=1.0, **fields), mdp)
    assert bellman.expected_return(mdp, state.policy, 1.0, horizon=12) == pytest.approx(1.0)


@pytest.mark.parametrize("module", [value_iteration, truncated_policy_iteration, soft_value_iteration])
def test_values_that_never_settle_without_discount_are_refused(module: Any) -> None:
    mdp = grid.make("GridWorld", picture="S...\n....\n...G", step_reward=0.1)
    with pytest.raises(UserError, match=r"gamma = 1 on GridWorld.*Use gamma < 1"):
        list(module.train(module.Config(gamma=1.0), mdp))
    list(module.train(module.Config(gamma=0.9), mdp))

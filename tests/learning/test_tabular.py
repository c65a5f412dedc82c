"""Algorithms on tables learn what dynamic programming knows exactly, in seconds, from experience alone."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foresight.algorithms.tabular import (
    double_q_learning,
    expected_sarsa,
    mc_basic,
    mc_epsilon_greedy,
    mc_exploring_starts,
    monte_carlo_prediction,
    n_step_sarsa,
    q_learning,
    sarsa,
    soft_value_iteration,
    td_lambda,
    td_prediction,
)
from foresight.envs.tabular import grid
from foresight.planning.dynamic import bellman
from foresight.runtime.checkpoints import checkpoint
from tests.sabotage import change, sabotaged_by
from tests.small_mdps import last, small_mdp

pytestmark = pytest.mark.learning
CONTROL: list[tuple[Any, dict[str, Any]]] = [
    (sarsa, {"steps": 60_000}),
    (expected_sarsa, {"steps": 60_000}),
    (q_learning, {"steps": 60_000}),
    (double_q_learning, {"steps": 60_000}),
    (n_step_sarsa, {"steps": 60_000, "n_steps": 3}),
    (mc_basic, {"episodes_per_pair": 30}),
    (mc_exploring_starts, {"steps": 4_000}),
    (mc_epsilon_greedy, {"steps": 4_000, "alpha": 0.05}),
]
PREDICTION: list[tuple[Any, dict[str, Any]]] = [
    (td_prediction, {"steps": 100_000, "alpha": 1.0, "alpha_power": 0.8}),
    (td_prediction, {"steps": 100_000, "alpha": 1.0, "alpha_power": 0.8, "n_steps": 4}),
    (td_lambda, {"steps": 100_000, "alpha": 1.0, "alpha_power": 0.8, "trace_lambda": 0.5}),
    (monte_carlo_prediction, {"steps": 8_000}),
    (monte_carlo_prediction, {"steps": 8_000, "first_visit": False}),
]


def name(x: Any) -> str:
    return "-".join(map(str, x.values())) if isinstance(x, dict) else x.__name__.split(".")[-1]


@sabotaged_by("foresight.envs.tabular.mdp.assemble", change("reward", lambda r: -r, "rewards_negated"))
@pytest.mark.parametrize(("module", "fields"), CONTROL, ids=name)
def test_control_finds_the_goal(module: Any, fields: dict[str, Any]) -> None:
    """The 4 × 4 grid with a wall of traps: a random policy is worth little, the best one 0.9⁵ = 0.59."""
    mdp = grid.make("GridWorld", picture="S.../.TT./..../...G", step_reward=0.0)
    best = 0.9**5
    baseline = bellman.expected_return(mdp, mdp.uniform(), 0.9)
    assert baseline < 0.0
    state = last(module, mdp, gamma=0.9, **fields)
    policy, extras, carry = module.act(state, torch.arange(mdp.states))
    assert extras == {} and carry is None and torch.equal(policy, state.policy)
    reached = bellman.expected_return(mdp, policy, 0.9)
    assert reached == pytest.approx(best, abs=1e-9), f"{reached} from {baseline}"


@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.9 * gamma))
@pytest.mark.parametrize(("module", "fields"), PREDICTION, ids=name)
def test_prediction_finds_the_values(module: Any, fields: dict[str, Any]) -> None:
    mdp, gamma = small_mdp(3, 8), 0.8
    state = last(module, mdp, gamma=gamma, **fields)
    exact = bellman.policy_value(mdp, mdp.uniform(), gamma)
    assert float(exact.abs().max()) > 0.5  # what an untrained table is wrong by
    assert float((state.values - exact).abs().max()) < 0.1
    assert module.measure(state, mdp)[1] == pytest.approx(float((state.values - exact).square().mean() ** 0.5))


@sabotaged_by("foresight.training.tabular.Tables.__init__", change("gamma", lambda gamma: 0.9 * gamma))
def test_q_learning_reaches_the_exact_values() -> None:
    """Watkins & Dayan (1992): steps 1/m^0.7 and every pair visited for ever."""
    mdp = small_mdp(5, 8, 3, 2, ending=0.2)
    exact = torch.zeros(8, dtype=torch.float64)
    for _ in range(200):
        exact = bellman.action_values(mdp, 0.8, exact).amax(1)
    for module in (q_learning, double_q_learning):
        state = last(
            module, mdp, gamma=0.8, steps=600_000, yield_every=600_000, epsilon=1.0, alpha=1.0, alpha_power=0.7
        )
        assert float((state.values - exact).abs().max()) < 0.1


def explores_little(state: Any) -> Any:
    state.config = dataclasses.replace(state.config, epsilon=0.02)
    return state


@sabotaged_by("foresight.training.tabular.control", change("state", explores_little))
def test_the_cliff() -> None:
    """S&B example 6.6, 12 runs: Sarsa keeps away from the edge, Q-learning pays for its exploration there."""
    mdp = grid.make("CliffWalking-v1")
    known = {sarsa: (-25, 3), q_learning: (-51, 6), expected_sarsa: (-21, 2)}
    for module, (value, error) in known.items():
        fields = {"gamma": 1.0, "alpha": 0.5, "epsilon": 0.1, "episodes": 500, "yield_every": 0, "steps": 10**9}
        runs = [[m["return"] for _, m, _ in module.train(module.Config(seed=i, **fields), mdp)] for i in range(12)]
        assert np.array(runs)[:, -100:].mean() == pytest.approx(value, abs=error)
    assert bellman.expected_return(mdp, last(q_learning, mdp, **fields).policy, 1.0, 100) == pytest.approx(-13)


ALL = [
    *CONTROL,
    *PREDICTION,
    (soft_value_iteration, {"entropy_temperature": 0.1}),
]


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit: tensors, arrays, generators, and an ActorState of these."""
    if isinstance(one, torch.Tensor | np.ndarray):
        return bool((one == other).all())
    if isinstance(one, np.random.Generator):
        return bool(one.bit_generator.state == other.bit_generator.state)
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other)


@pytest.mark.parametrize(("module", "fields"), ALL, ids=name)
def test_a_run_resumed_from_a_checkpoint_equals_the_uninterrupted_one(
    module: Any, fields: dict[str, Any], tmp_path: Path
) -> None:
    mdp = small_mdp(3, 10)
    size = {"steps": 12} if module in (mc_basic, soft_value_iteration) else {"steps": 170}
    if hasattr(module.Config(), "yield_every"):
        size["yield_every"] = 1 if module is soft_value_iteration else 17  # in the middle of episodes
    config = module.Config(
        **{"gamma": 0.9, **fields, **size, **({"max_episode_steps": 20} if module is mc_basic else {})}
    )
    steps = [(step, dict(metrics), copy.deepcopy(state)) for step, metrics, state in module.train(config, mdp)]
    for i in {0, len(steps) // 2}:
        checkpoint.save(tmp_path / str(i), steps[i][2], steps[i][0])
        state = module.build(config, mdp.spaces)
        checkpoint.restore(checkpoint.latest(tmp_path / str(i)), state)
        resumed = [(step, dict(metrics)) for step, metrics, state in module.train(config, mdp, state)]
        assert resumed == [(step, metrics) for step, metrics, _ in steps[i + 1 :]]
        for field in dataclasses.fields(state):
            assert same(getattr(state, field.name), getattr(steps[-1][2], field.name)), field.name


@pytest.mark.parametrize(("module", "fields"), ALL, ids=name)
def test_pictures_and_metrics(module: Any, fields: dict[str, Any]) -> None:
    mdp = grid.make("GridWorld4x4")
    small = {"steps": 3} if module in (mc_basic, soft_value_iteration) else {"steps": 300}
    *_, (_, metrics, state) = module.train(module.Config(**{"gamma": 0.9, **fields, **small}), mdp)
    lines = module.picture(state, mdp).splitlines()
    assert lines[0].split() == ["value", "policy"] and len(lines) == 5
    assert set(module.METRICS) <= set(metrics) and all(type(x) is float for x in metrics.values())
    explored, _, _ = module.act(state, torch.arange(mdp.states), explore=True)
    assert explored.shape == (16,) and int(explored.max()) < 4
    assert state.values.shape == (16,) and len(state.policy) == 16

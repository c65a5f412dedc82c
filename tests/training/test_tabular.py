"""Tabular TD and Monte Carlo: what is drawn, and the compiled loops compared with their definition."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from foresight.algorithms.tabular import (
    double_q_learning,
    expected_sarsa,
    mc_epsilon_greedy,
    mc_exploring_starts,
    monte_carlo_prediction,
    n_step_sarsa,
    q_learning,
    sarsa,
    td_lambda,
    td_prediction,
)
from foresight.envs.base import Spaces
from foresight.envs.tabular import grid
from foresight.envs.tabular.mdp import MDP, from_table
from foresight.errors import UserError
from foresight.planning.dynamic import bellman
from foresight.training import tabular
from tests.sabotage import change, flip_sign, sabotaged_by, scaled
from tests.small_mdps import small_mdp
from tests.training import plain_tabular

LEARNERS: list[tuple[Any, dict[str, Any]]] = [
    (sarsa, {}),
    (expected_sarsa, {}),
    (q_learning, {"alpha": 0.9, "alpha_power": 0.7}),
    (double_q_learning, {}),
    (n_step_sarsa, {"n_steps": 1}),
    (n_step_sarsa, {"n_steps": 5}),
    (td_prediction, {}),
    (td_prediction, {"n_steps": 3, "alpha_power": 0.5}),
    (td_lambda, {}),
    (td_lambda, {"replacing": True, "trace_lambda": 0.5}),
]


def name(x: Any) -> str:
    return "-".join(map(str, x.values())) if isinstance(x, dict) else x.__name__.split(".")[-1]


def table(state: Any) -> torch.Tensor:
    return state.q if hasattr(state, "q") else state.v


def run(module: Any, mdp: MDP, compiled: bool, **fields: Any) -> tuple[list[Any], torch.Tensor]:
    """What a run yields, and its table; `compiled` False is the definition in `tests.training.plain_tabular`."""
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            plain_tabular.replace(patch, module)
        steps = [(step, dict(m), copy.deepcopy(s)) for step, m, s in module.train(module.Config(**fields), mdp)]
    return [(step, metrics) for step, metrics, _ in steps], table(steps[-1][2])


def limited(seed: int, limit: int | None) -> MDP:
    """A random MDP with a time limit, and with actions that are forbidden in some states."""
    mdp = dataclasses.replace(small_mdp(seed, 10, 3, 2, ending=0.1), time_limit=limit)
    mdp.reward[::3, 1] = -torch.inf
    return mdp


@sabotaged_by("foresight.ops.targets.moved", scaled(1.001), flip_sign)
@sabotaged_by(
    "foresight.training.tabular.control",
    change("act_and_update", lambda f: (q_learning if f is not q_learning.act_and_update else sarsa).act_and_update),
)
@pytest.mark.parametrize(("module", "fields"), LEARNERS[:6], ids=name)
@pytest.mark.parametrize("limit", [None, 4])
def test_the_compiled_loop_is_the_definition(module: Any, fields: dict[str, Any], limit: int | None) -> None:
    mdp = limited(3, limit)
    common = {"steps": 240, "yield_every": 100, "gamma": 0.9, "alpha": 0.3, "epsilon": 0.2, "seed": 5, **fields}
    agree(run(module, mdp, True, **common), run(module, mdp, False, **common))


@sabotaged_by("foresight.training.tabular.cumulative", change("policy", lambda p: p.roll(1, 1) * torch.arange(3)))
@pytest.mark.parametrize(("module", "fields"), LEARNERS[6:], ids=name)
@pytest.mark.parametrize("limit", [None, 4])
def test_the_compiled_prediction_is_the_definition(module: Any, fields: dict[str, Any], limit: int | None) -> None:
    common = {"steps": 240, "yield_every": 100, "gamma": 0.9, "alpha": 0.3, "seed": 5, **fields}
    agree(*(run(module, limited(3, limit), compiled, **common) for compiled in (True, False)))


@pytest.mark.parametrize("module", [monte_carlo_prediction, mc_epsilon_greedy, mc_exploring_starts], ids=name)
@sabotaged_by("foresight.ops.targets.moved", scaled(1.001))
def test_compiled_episodes_are_the_definition(module: Any) -> None:
    common = {"steps": 60, "gamma": 0.9, "alpha": 0.5, "alpha_power": 0.5, "max_episode_steps": 30, "seed": 5}
    one, other = (run(module, small_mdp(3, 10), compiled, **common) for compiled in (True, False))
    agree(one, other)
    # and the compiled rule is the definition
    config, generator = module.Config(alpha=0.5, alpha_power=0.5), np.random.default_rng(0)
    index, target = torch.from_numpy(generator.integers(0, 6, 50)), torch.from_numpy(generator.normal(size=50))
    values, counts = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.int64)
    twin, twin_counts = values.clone(), counts.clone()
    errors = tabular.move_all(values, counts, index, target, config)
    assert plain_tabular.move(twin, twin_counts, (index,), target, config) == pytest.approx(errors)
    torch.testing.assert_close(values, twin)
    assert torch.equal(counts, twin_counts)


def agree(one: tuple[list[Any], torch.Tensor], other: tuple[list[Any], torch.Tensor]) -> None:
    assert [step for step, _ in one[0]] == [step for step, _ in other[0]]
    for (_, a), (_, b) in zip(one[0], other[0], strict=True):
        assert a == pytest.approx(b, abs=1e-9)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("module", "fields"), LEARNERS, ids=name)
def test_where_the_yields_fall_changes_nothing(module: Any, fields: dict[str, Any]) -> None:
    mdp, common = small_mdp(4, 10), {"steps": 150, "gamma": 0.9, **fields}
    whole = run(module, mdp, True, yield_every=150, **common)[1]
    for every in (1, 7, 0):
        assert torch.equal(run(module, mdp, True, yield_every=every, **common)[1], whole)


@pytest.mark.parametrize("every", [0, 1, 1_000])
def test_the_number_of_episodes_is_kept(every: int) -> None:
    for module in (sarsa, td_prediction):
        steps, _ = run(module, small_mdp(4, 10), True, yield_every=every, steps=10**6, episodes=7, gamma=0.9)
        assert steps[-1][1]["episodes"] == 7
    steps, _ = run(sarsa, small_mdp(4, 10), True, yield_every=every, steps=20, episodes=7_000, gamma=0.9)
    assert steps[-1][0] == 20


def test_zero_yields_at_the_end_of_each_episode() -> None:
    mdp = small_mdp(4, 10)
    steps, _ = run(q_learning, mdp, True, yield_every=0, steps=10**6, episodes=20, gamma=0.9)
    assert [metrics["episodes"] for _, metrics in steps] == list(range(1, 21))
    lengths = np.diff([0, *(step for step, _ in steps)])
    assert lengths.tolist() == [metrics["length"] for _, metrics in steps]


@sabotaged_by(
    "foresight.training.tabular.Tables.__init__",
    change("env", lambda env: dataclasses.replace(env, prob=env.prob.sort(2)[0], start=env.start.sort()[0])),
)
def test_outcomes_are_drawn_by_their_probabilities() -> None:
    mdp = small_mdp(5, 6, 2, 3, ending=0.3)
    tables, rng = tabular.Tables(mdp, 0.9), np.random.default_rng(0)
    first = torch.tensor([[2, 1]]).expand(4_000, 2)
    batch = tabular.episodes(tables, mdp.uniform(), 4_000, 2, rng, first)
    s, ended, cut = batch.obs[0], batch.discount[0] == 0, batch.cut[0] == 1
    begins = torch.cat([torch.tensor([True]), cut[:-1]])
    found = np.append(np.bincount(s[~begins], minlength=6), int((begins & ended).sum())) / 4_000
    expected = np.zeros(7)  # the states that follow, then the end
    for k in range(3):
        going = float(mdp.discount[2, 1, k])
        expected[int(mdp.next_state[2, 1, k]) if going else 6] += float(mdp.prob[2, 1, k])
    np.testing.assert_allclose(found, expected, atol=0.03)
    batch = tabular.episodes(tables, mdp.uniform(), 4_000, 1, rng)
    np.testing.assert_allclose(np.bincount(batch.obs[0], minlength=6) / 4_000, mdp.start, atol=0.03)


def test_compiled_episodes_have_the_value_of_their_policy() -> None:
    mdp = small_mdp(6, 8)
    batch = tabular.episodes(tabular.Tables(mdp, 0.9), mdp.uniform(), 20_000, 1_000, np.random.default_rng(0))
    assert int(batch.cut.sum()) == 20_000 and batch.shape[0] == 1
    from foresight.ops import targets

    returns = targets.monte_carlo(batch.reward, batch.discount, batch.cut)[0]
    begins = torch.cat([torch.tensor([True]), batch.cut[0, :-1] == 1])
    exact = bellman.expected_return(mdp, mdp.uniform(), 0.9)
    assert float(returns[begins].mean()) == pytest.approx(exact, abs=4 * float(returns[begins].std()) / 20_000**0.5)


@sabotaged_by("foresight.training.tabular.first_visits", change("cut", torch.zeros_like, "one_episode"))
def test_first_visits() -> None:
    index = torch.tensor([3, 1, 3, 3, 1, 2, 1])
    cut = torch.tensor([0.0, 0, 1, 0, 0, 0, 1])
    assert tabular.first_visits(index, cut).tolist() == [True, True, False, True, True, True, False]


def test_policies_to_predict() -> None:
    mdp = grid.make("GridWorld4x4")
    best = tabular.policy_table(mdp, "optimal", 0.9)
    assert best[6].tolist() == [0.25] * 4 and best[1].tolist() == [0, 0, 0, 1]  # state 6 is as far from both corners
    given = torch.full((16, 4), 0.25)
    assert torch.equal(tabular.policy_table(mdp, "uniform", 0.9, given), given.double())
    with pytest.raises(UserError, match=r"table of probabilities \[16, 4\]"):
        tabular.policy_table(mdp, "uniform", 0.9, torch.ones(16, 4))
    with pytest.raises(UserError, match="Unknown policy 'uniforn'"):
        tabular.policy_table(mdp, "uniforn", 0.9)


def test_the_best_policy_does_not_depend_on_the_scale_of_rewards() -> None:
    options: dict[str, Any] = {"picture": "G.../..../..../...G", "slip": 0.2}
    small, large = (grid.make("GridWorld", step_reward=-x, goal_reward=0.0, **options) for x in (1.0, 1e9))
    expected = tabular.policy_table(small, "optimal", 0.99)
    assert torch.equal(tabular.policy_table(large, "optimal", 0.99), expected) and (expected == 0.5).any()


def test_without_discount_a_policy_that_never_ends_is_no_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabular, "SWEEPS", 1_000)
    reported = "gamma = 1 on {}: a policy that never ends an episode is best"
    with pytest.raises(UserError, match=reported.format("GridWorld8x8")):
        tabular.policy_table(grid.make("GridWorld8x8", step_reward=0.1), "optimal", 1.0)
    end = {a: [(1.0, 2, 0.0, True)] for a in (0, 1)}  # rewards 2 and 0 in turns: no sweep raises both values
    turns = {0: {0: [(1.0, 1, 2.0, False)], 1: end[1]}, 1: {0: [(1.0, 0, 0.0, False)], 1: end[1]}, 2: end}
    with pytest.raises(UserError, match=reported.format("Turns")):
        tabular.policy_table(from_table("Turns", turns, np.array([1.0, 0, 0])), "optimal", 1.0)
    waits = grid.make("GridWorld8x8", step_reward=0.0, goal_reward=0.0)  # never to end is worth 0, as the goal is
    assert tabular.policy_table(waits, "optimal", 1.0).sum() == pytest.approx(waits.states)


def test_mistakes_are_reported() -> None:
    endless = grid.make("RandomMDP")
    with pytest.raises(UserError, match="gamma = 1 on RandomMDP: it never ends"):
        next(q_learning.train(q_learning.Config(gamma=1.0), endless))
    assert bellman.require_ending(endless, 0.99) is None
    half = grid.gridworld("S.G/###/..#")  # two cells lead nowhere
    with pytest.raises(UserError, match="no end is reachable from 2 of its 5 states"):
        tabular.Tables(half, 1.0)
    with pytest.raises(UserError, match="gamma must be between 0 and 1"):
        tabular.Tables(half, 1.5)
    box = gymnasium.spaces.Box(-1.0, 1.0, (4,))
    two = gymnasium.spaces.Discrete(2)
    for module in (q_learning, td_prediction, td_lambda, mc_exploring_starts, monte_carlo_prediction):
        with pytest.raises(UserError, match="the observations here are Box"):
            module.build(module.Config(), Spaces(box, two))
        with pytest.raises(UserError, match="the actions here are Box"):
            module.build(module.Config(), Spaces(two, box))
    for fields in ({"alpha": 1.5}, {"epsilon": -0.1}, {"alpha_power": 2.0}, {"gamma": -1.0}):
        (field,) = fields
        with pytest.raises(UserError, match=f"{field} must be between 0 and 1"):
            next(q_learning.train(q_learning.Config(**fields), grid.make("GridWorld4x4")))
    with pytest.raises(UserError, match="n_steps must be at least 1, not 0"):
        next(n_step_sarsa.train(n_step_sarsa.Config(n_steps=0), grid.make("GridWorld4x4")))
    with pytest.raises(UserError, match="needs an MDP"):
        tabular.Tables(gymnasium.make("CartPole-v1"), 0.9)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"CartPole-v1 has no transition table"):
        grid.make("CartPole-v1")

"""The compiled sweep, the tensor sweep and the definition are one; exact values; mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foresight.envs.tabular import grid
from foresight.envs.tabular.mdp import MDP, random_mdp
from foresight.errors import UserError
from foresight.planning.dynamic import bellman, kernels
from tests.sabotage import change, sabotaged_by
from tests.small_mdps import backup, small_mdp


def start(mdp: MDP) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(mdp.states, dtype=torch.float64), torch.zeros(mdp.states, dtype=torch.int64)


def never_compare_again(x: np.ndarray) -> np.ndarray:
    """A deadline that is far away once a state has been compared."""
    x[x > -np.inf] = np.inf
    return x


@sabotaged_by("foresight.planning.dynamic.kernels.improve", change("deadline", never_compare_again))
@given(st.integers(0, 10_000), st.integers(2, 25), st.integers(1, 4), st.sampled_from([0.0, 0.3]))
def test_compiled_and_tensor_sweeps_are_the_definition(seed: int, states: int, actions: int, ending: float) -> None:
    mdp = small_mdp(seed, states + 8, actions + 1, 3, ending)
    compiled, tensors = bellman.Sweeps(mdp, 0.9), bellman.Sweeps(mdp, 0.9, compiled=False)
    assert compiled.compiled and not tensors.compiled
    a = b = start(mdp)
    expected = np.zeros(mdp.states)
    for _ in range(15):
        (*a, da), (*b, db) = compiled.improve(*a), tensors.improve(*b)
        q = backup(mdp, 0.9, expected)
        expected = q.max(1)
        np.testing.assert_allclose(a[0], expected, atol=1e-12)
        np.testing.assert_allclose(b[0], expected, atol=1e-12)
        assert torch.equal(a[1], b[1]) and a[1].tolist() == q.argmax(1).tolist()
        assert da.switched == db.switched
        assert (da.low, da.high) == pytest.approx((db.low, db.high), abs=1e-11)
    for policy in (a[1], mdp.uniform()):
        va, da = compiled.evaluate(a[0], policy)
        vb, db = tensors.evaluate(a[0], policy)
        np.testing.assert_allclose(va, vb, atol=1e-12)
        assert (da.low, da.high) == pytest.approx((db.low, db.high), abs=1e-11)
    # Back to improvements, after rows of another width.
    np.testing.assert_allclose(compiled.improve(va, a[1])[0], tensors.improve(va, a[1])[0], atol=1e-12)


def plain(mdp: MDP, gamma: float, sweeps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compiled sweeps that compare all actions in all states every time: a new machine knows nothing."""
    values, policy = start(mdp)
    for _ in range(sweeps):
        values, policy, _ = bellman.Sweeps(mdp, gamma).improve(values, policy)
    return values, policy


@sabotaged_by("foresight.planning.dynamic.kernels.improve", change("deadline", never_compare_again))
@pytest.mark.parametrize("ending", [0.0, 0.2])
def test_action_elimination_changes_no_bit_but_saves_most_comparisons(ending: float) -> None:
    mdp = small_mdp(3, 2_000, 4, 5, ending)
    machine, (values, policy) = bellman.Sweeps(mdp, 0.99), start(mdp)
    compared = 0
    for _ in range(150):
        compared += machine.undecided(values)
        values, policy, _ = machine.improve(values, policy)
    expected, chosen = plain(mdp, 0.99, 150)
    assert torch.equal(values, expected) and torch.equal(policy, chosen)
    assert compared < 0.2 * 150 * mdp.states


def test_threads_change_no_bit() -> None:
    mdp = random_mdp(20_000, 3, 4, seed=1)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        machine, (values, policy) = bellman.Sweeps(mdp, 0.95), start(mdp)
        for _ in range(20):
            values, policy, change_ = machine.improve(values, policy, sweeps=3)
            values, after = machine.evaluate(values, policy, sweeps=3)
        results.append((values, policy, change_, after))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0][:2], other[:2], strict=True))
        assert other[2:] == results[0][2:]
    assert mdp.next_state.numel() >= kernels.SMALL  # so threads really took part


@sabotaged_by("foresight.planning.dynamic.kernels.improve", change("sweeps", lambda count: max(1, count - 1)))
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("ending", [0.0, 0.1])
def test_several_sweeps_in_one_call_are_those_of_several_calls(threads: int, ending: float) -> None:
    torch.set_num_threads(threads)
    mdp = small_mdp(3, 2_000, 4, 5, ending)
    assert mdp.next_state.numel() >= kernels.SMALL
    one, many, (values, policy) = bellman.Sweeps(mdp, 0.95), bellman.Sweeps(mdp, 0.95), start(mdp)
    expected, chosen = values, policy
    for count in (1, 2, 7, 20):
        for _ in range(count):
            expected, chosen, last = one.improve(expected, chosen)
        given_values, before = values, values.clone()
        values, policy, change_ = many.improve(values, policy, count)
        assert torch.equal(values, expected) and torch.equal(policy, chosen)
        assert change_ == last._replace(sweeps=count)
        assert torch.equal(given_values, before)
        for _ in range(count):
            expected, last = one.evaluate(expected, chosen)
        values, change_ = many.evaluate(values, policy, count)
        assert torch.equal(values, expected) and change_ == last._replace(sweeps=count)


def test_sweeps_end_at_a_tolerance_and_soon_enough_to_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    mdp = small_mdp(7, 60, 3, 3)
    machine, (values, policy) = bellman.Sweeps(mdp, 0.9), start(mdp)
    count, change_ = 0, bellman.Change(-1.0, 1.0, 0)
    while change_.norm >= 1e-3:
        values, policy, change_ = machine.improve(values, policy)
        count += 1
    at_once, _, last = bellman.Sweeps(mdp, 0.9).improve(*start(mdp), 1_000, 1e-3)
    assert torch.equal(at_once, values) and last == change_._replace(sweeps=count)
    assert 1 < bellman.Sweeps(mdp, 0.9).evaluate(values, policy, 1_000, 1e-6)[1].sweeps < 1_000
    monkeypatch.setattr(kernels, "OUTCOMES", 10 * mdp.next_state.numel())
    assert bellman.Sweeps(mdp, 0.9).improve(*start(mdp), 1_000, 1e-3)[2].sweeps == 10
    monkeypatch.setattr(kernels, "OUTCOMES", 1)
    assert bellman.Sweeps(mdp, 0.9).improve(*start(mdp), 1_000, 1e-3)[2].sweeps == 1


@pytest.mark.parametrize("name", ["improve", "evaluate"])
def test_an_interrupted_call_leaves_no_gaps_of_other_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mdp = small_mdp(8, 400, 4, 3)
    machine = bellman.Sweeps(mdp, 0.99)
    values, policy, _ = machine.improve(*start(mdp))
    original = getattr(kernels, name)

    def interrupted(*arguments: Any) -> None:
        original(*arguments)
        raise KeyboardInterrupt  # Python raises it when the call returns

    with monkeypatch.context() as patch:
        patch.setattr(kernels, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(machine, name)(values, policy, 1_000)
    expected, chosen, _ = bellman.Sweeps(mdp, 0.99).improve(values, policy.clone())
    found, actions, _ = machine.improve(values, policy)
    assert torch.equal(found, expected) and torch.equal(actions, chosen)


def test_a_policy_is_evaluated_where_changes_are_not_finite() -> None:
    """Its actions are compared with no others, whatever the clock: an action that is not allowed has reward -inf."""
    mdp = small_mdp(9, 300, 3, 3)
    reward = mdp.reward.clone()
    reward[::2, 0] = -torch.inf
    machine = bellman.Sweeps(dataclasses.replace(mdp, reward=reward), 0.9)
    values, policy = start(mdp)
    for _ in range(4):
        values, change_ = machine.evaluate(values, policy, 3)
        assert change_.switched == 0
    assert not torch.isfinite(values[::2]).any()


def test_the_unrolled_and_the_general_loop_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    mdp = random_mdp(6_000, 3, 4, seed=2)
    values, policy = start(mdp)
    values = torch.randn(mdp.states, dtype=torch.float64)
    unrolled, _, _ = bellman.Sweeps(mdp, 0.9).improve(values, policy)
    monkeypatch.setattr(kernels, "UNROLLED", 0)
    general, _, _ = bellman.Sweeps(mdp, 0.9).improve(values, policy)
    assert torch.equal(unrolled, general)


def test_sweeps_notice_values_and_policies_that_are_not_their_own() -> None:
    """Jumping to other values, and back, is as if the machine were new."""
    mdp = small_mdp(5, 200, 4, 3, 0.1)
    machine = bellman.Sweeps(mdp, 0.9)
    values, policy = start(mdp)
    for _ in range(30):
        values, policy, _ = machine.improve(values, policy)
    for jump in (values + torch.randn(mdp.states, dtype=torch.float64), torch.zeros_like(values), values.clone()):
        got, chosen, _ = machine.improve(jump, policy)
        expected, fresh, _ = bellman.Sweeps(mdp, 0.9).improve(jump, policy.clone())
        assert torch.equal(got, expected) and torch.equal(chosen, fresh)
    other = torch.randint(0, 4, (mdp.states,))
    got, _ = machine.evaluate(values, other)
    np.testing.assert_allclose(got, backup(mdp, 0.9, values.numpy())[np.arange(mdp.states), other], atol=1e-12)


def test_a_policy_that_was_given_is_not_changed() -> None:
    mdp = small_mdp(6, 50, 4, 3)
    values, policy = start(mdp)
    before = policy.clone()
    new, chosen, delta = bellman.Sweeps(mdp, 0.9).improve(values, policy)
    assert torch.equal(policy, before) and not torch.equal(chosen, before) and delta.switched > 0
    assert float(values.abs().max()) == 0 and float(new.abs().max()) > 0


def test_greedy_keeps_an_action_that_is_as_good() -> None:
    mdp = grid.make("GridWorld4x4")
    values = bellman.policy_value(mdp, bellman.greedy(mdp, 1.0, -_distance(mdp))[1], 1.0)
    optimal = bellman.optimal_actions(mdp, 1.0, values)
    assert optimal[5].tolist() == [True, False, False, True]  # up and left (S&B figure 4.1)
    for action in (0, 3):
        keep = torch.full((mdp.states,), action)
        assert int(bellman.greedy(mdp, 1.0, values, keep)[1][5]) == action
    assert int(bellman.greedy(mdp, 1.0, values, torch.ones(16, dtype=torch.int64))[1][5]) == 0  # right is worse


def _distance(mdp: MDP) -> torch.Tensor:
    row, column = torch.arange(16) // 4, torch.arange(16) % 4
    return torch.minimum(row + column, 6 - row - column).double()


@sabotaged_by("foresight.planning.dynamic.bellman.policy_value", change("gamma", lambda g: 0.9 * g, "less_gamma"))
@pytest.mark.parametrize("states", [40, bellman.DIRECT + 1])
def test_policy_value_solves_its_equation(states: int) -> None:
    mdp = small_mdp(7, states, 3, 3, 0.05)
    for policy in (torch.randint(0, 3, (states,)), mdp.uniform()):
        values = bellman.policy_value(mdp, policy, 0.95)
        again, _ = bellman.Sweeps(mdp, 0.95, compiled=False).evaluate(values, policy)
        np.testing.assert_allclose(again, values, atol=1e-10)


def test_greedy_in_blocks_is_greedy_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mdp = small_mdp(8, 100, 3, 2)
    values = torch.randn(100, dtype=torch.float64)
    whole = bellman.greedy(mdp, 0.9, values)
    monkeypatch.setattr(bellman, "_blocks", lambda mdp: (slice(s, s + 7) for s in range(0, 100, 7)))
    parts = bellman.greedy(mdp, 0.9, values)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


def test_expected_return_by_hand() -> None:
    """A corridor of three cells: two steps of reward 1 and γ² 10, or what fits into the horizon."""
    mdp = grid.make("GridWorld", picture="S..G", step_reward=1.0, goal_reward=10.0)
    right = torch.ones(mdp.states, dtype=torch.int64)
    assert bellman.expected_return(mdp, right) == pytest.approx(13.0)
    assert bellman.expected_return(mdp, right, gamma=0.5) == pytest.approx(1 + 0.5 + 0.25 * 11)
    assert bellman.expected_return(mdp, right, horizon=2) == pytest.approx(2.0)
    assert bellman.optimal_return(mdp, horizon=3) == pytest.approx(13.0)
    assert bellman.optimal_return(mdp, horizon=20) == pytest.approx(30.0)  # dawdle, and enter the goal at the last
    assert bellman.evaluate(mdp, right, 1.0) == {"value": pytest.approx(13.0)}
    limited = grid.make("GridWorld", picture="S..G", step_reward=1.0, goal_reward=10.0, time_limit=2)
    assert bellman.evaluate(limited, right, 0.5) == {"value": pytest.approx(4.25), "return": pytest.approx(2.0)}


def test_an_action_that_is_not_allowed_is_never_taken() -> None:
    mdp = small_mdp(9, 30, 3, 2, 0.1)
    mdp.reward[:, 0] = -torch.inf
    for compiled in (True, False):
        machine, (values, policy) = bellman.Sweeps(mdp, 0.9, compiled=compiled), start(mdp)
        for _ in range(10):
            values, policy, _ = machine.improve(values, policy)
        assert values.isfinite().all() and int(policy.min()) > 0
    assert mdp.uniform()[0].tolist() == [0.0, 0.5, 0.5]
    assert bellman.policy_value(mdp, mdp.uniform(), 0.9).isfinite().all()


def test_mistakes_are_reported() -> None:
    mdp = grid.make("GridWorld4x4")
    with pytest.raises(UserError, match="never ends the episode"):
        bellman.policy_value(mdp, torch.zeros(16, dtype=torch.int64), 1.0)  # always up
    with pytest.raises(UserError, match="gamma must be between 0 and 1"):
        bellman.Sweeps(mdp, 1.5)


@sabotaged_by("foresight.planning.dynamic.bellman.unbounded", change("change", torch.abs))
def test_without_discount_values_rise_forever_where_never_ending_earns_reward() -> None:
    for reward, found in ((0.1, True), (0.0, False), (-0.04, False)):
        mdp = grid.make("GridWorld8x8", step_reward=reward)
        sweeps, values = bellman.Sweeps(mdp, 1.0), torch.zeros(mdp.states, dtype=torch.float64)
        policy = torch.zeros(mdp.states, dtype=torch.int64)
        for _ in range(5):
            before = values
            values, policy, _ = sweeps.improve(values, policy)
        assert bellman.unbounded(mdp, policy, values - before, 1e-9) == found

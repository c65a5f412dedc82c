"""The environments of Sutton & Barto: values from the book or from exact arithmetic."""

from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest
import torch

from foresight.algorithms.tabular import policy_iteration
from foresight.envs.tabular import grid, sutton_barto
from foresight.envs.tabular.mdp import MDP
from foresight.errors import UserError
from foresight.planning.dynamic import bellman
from tests.sabotage import change, returns, sabotaged_by


def optimum(mdp: MDP) -> float:
    *_, (_, _, state) = policy_iteration.train(policy_iteration.Config(gamma=1.0), mdp)
    return bellman.start_value(mdp, state.values)


@sabotaged_by(
    "foresight.envs.tabular.sutton_barto.random_walk",
    change("right", lambda r: r + 0.5),
    change("left", lambda r: r - 0.5),
)
def test_random_walks_have_values_on_a_line() -> None:
    for name, low, high in (("RandomWalk5", 0.0, 1.0), ("RandomWalk19", -1.0, 1.0)):
        mdp = grid.make(name)
        values = bellman.policy_value(mdp, mdp.uniform(), 1.0)
        np.testing.assert_allclose(values[1:-1], np.linspace(low, high, mdp.states)[1:-1], atol=1e-12)
        assert bellman.start_value(mdp, values) == pytest.approx((low + high) / 2)
    assert grid.make("RandomWalk5", states=7).states == 9
    with pytest.raises(UserError, match="a random walk needs at least 2"):
        grid.make("RandomWalk5", states=1)


@sabotaged_by("foresight.envs.tabular.sutton_barto.windy_grid", change("wind", lambda w: w[::-1], "wind_reversed"))
def test_windy_grid_world() -> None:
    assert optimum(grid.make("WindyGridWorld")) == pytest.approx(-15)
    assert optimum(grid.make("WindyGridWorld", king=True)) == pytest.approx(-7)
    assert optimum(grid.make("WindyGridWorld", king=True, stay=True)) == pytest.approx(-7)
    mdp = grid.make("WindyGridWorld", king=True, stochastic=True)
    assert mdp.actions == 8 and mdp.next_state.shape[2] == 3
    assert -15 < optimum(mdp) < -7
    plain = grid.make("WindyGridWorld")
    at = lambda r, c: r * 10 + c  # noqa: E731
    assert int(plain.next_state[at(3, 6), 1, 0]) == at(1, 7)  # right, two cells up: the wind of where one was
    assert int(plain.next_state[at(0, 4), 2, 0]) == at(0, 4)  # down, and blown back up
    assert float(plain.discount[at(3, 6), 1, 0]) == 1 and float(plain.discount[at(4, 8), 3, 0]) == 0
    for name, value in (("height", 3), ("wind", [0] * 7)):
        with pytest.raises(UserError, match="A windy grid needs a height of at least 4 and a wind of at least 8"):
            grid.make("WindyGridWorld", **{name: value})


@sabotaged_by("foresight.envs.tabular.mdp.from_table", change("start", lambda x: np.roll(x, 1), "starts_elsewhere"))
def test_short_corridor() -> None:
    """Example 13.1: without telling cells apart 2 - √2 is best; ε-greedy gets -44 and -82."""
    mdp = grid.make("ShortCorridor")

    def value(right: float) -> float:
        return bellman.expected_return(mdp, torch.tensor([[1 - right, right]] * 4).double())

    best = 2 - 2**0.5
    assert value(best) == pytest.approx(-11.65685, abs=1e-5)
    assert max(value(best - 0.01), value(best + 0.01)) < value(best)
    assert value(0.05) == pytest.approx(-82.1, abs=0.1) and value(0.95) == pytest.approx(-44.2, abs=0.1)
    assert optimum(mdp) == pytest.approx(-3)


@sabotaged_by("foresight.envs.tabular.sutton_barto._dealer", returns(lambda p: p * 0.9))
def test_blackjack_is_solved_exactly() -> None:
    try:
        assert optimum(grid.make("Blackjack-v1")) == pytest.approx(-0.043113, abs=1e-6)
        assert optimum(grid.make("Blackjack-v1", sab=False)) == pytest.approx(-0.046556, abs=1e-6)
    except UserError:  # probabilities that do not add up to 1 are refused
        raise AssertionError from None


@sabotaged_by("foresight.envs.tabular.sutton_barto.blackjack", change("sab", lambda sab: not sab))
def test_policies_of_blackjack() -> None:
    mdp = grid.make("Blackjack-v1")
    for limit, expected in ((20, -0.350111), (17, -0.075852)):
        policy = torch.tensor([[1.0, 0.0]]).double().repeat(mdp.states, 1)  # naturals stick
        for total, dealer, ace in itertools.product(range(4, limit), range(1, 11), (0, 1)):
            policy[sutton_barto.blackjack_state(total, dealer, ace)] = torch.tensor([0.0, 1.0]).double()
        assert bellman.expected_return(mdp, policy) == pytest.approx(expected, abs=1e-6)
        if limit == 20:  # example 5.4: -0.27726 by Monte Carlo
            values = bellman.policy_value(mdp, policy, 1.0)
            assert float(values[sutton_barto.blackjack_state(13, 2, 1)]) == pytest.approx(-0.27720, abs=1e-5)


def test_the_best_policy_of_blackjack_is_that_of_the_book() -> None:
    """Figure 5.2: hard sums stick at 17 against 7 to 10 and the ace, at 13 against 2 and 3, at 12 against 4 to 6; soft
    sums at 19 against 9, 10 and the ace, else at 18."""
    mdp = grid.make("Blackjack-v1")
    *_, (_, _, state) = policy_iteration.train(policy_iteration.Config(gamma=1.0), mdp)
    for dealer in range(1, 11):
        hard = 17 if dealer in (1, 7, 8, 9, 10) else 13 if dealer in (2, 3) else 12
        soft = 19 if dealer in (1, 9, 10) else 18
        for total, (ace, limit) in itertools.product(range(12, 22), ((0, hard), (1, soft))):
            action = int(state.policy[sutton_barto.blackjack_state(total, dealer, ace)])
            assert action == (sutton_barto.STICK if total >= limit else sutton_barto.HIT), (total, dealer, ace)


def test_the_table_of_blackjack_is_the_game_of_gymnasium() -> None:
    """The frequencies of Gymnasium's own hands, from one state, against the table."""
    env = gymnasium.make("Blackjack-v1", sab=True)
    mdp = grid.make("Blackjack-v1")
    game = env.unwrapped
    env.reset(seed=0)
    found: dict[tuple[int, float], float] = {}
    count = 4_000
    for _ in range(count):
        game.player, game.dealer = [1, 5], [10, int(min(10, game.np_random.integers(1, 14)))]
        (total, dealer, ace), reward, terminated, _, _ = game.step(1)
        s = mdp.states - 1 if terminated else sutton_barto.blackjack_state(total, dealer, ace)
        found[s, reward] = found.get((s, reward), 0.0) + 1 / count
    here = sutton_barto.blackjack_state(16, 10, 1)
    for k in range(mdp.next_state.shape[2]):
        if (p := float(mdp.prob[here, 1, k])) > 0:
            key = (int(mdp.next_state[here, 1, k]), 0.0)
            assert found.pop(key, 0.0) == pytest.approx(p, abs=0.03)
    assert not found


@pytest.mark.parametrize("name", sutton_barto.ENVS)
def test_every_name_makes_a_valid_mdp(name: str) -> None:
    mdp = grid.make(name)
    assert mdp.name == name and name in grid.names() and mdp.layout is not None
    assert mdp.absorbing().sum() >= 1
    with pytest.raises(UserError, match="cannot be made with the options"):
        grid.make(name, sugar=2)

"""CEM and MPPI on a linear-quadratic problem, whose optimal first action the Riccati equation gives."""

from __future__ import annotations

import pytest
import torch

from foresight.planning.continuous import cem
from tests.sabotage import change, sabotaged_by

A, B = torch.tensor([[1.0, 0.1], [0.0, 1.0]]), torch.tensor([[0.0], [0.1]])
Q, R, H = torch.diag(torch.tensor([1.0, 0.1])), 0.1, 15
START = 0.25 * torch.tensor([[0.5, 0.0], [-0.2, 0.4], [0.3, -0.3]])


def _score(sequences: torch.Tensor, start: torch.Tensor = START) -> torch.Tensor:
    batch, count, horizon, _ = sequences.shape
    state = start[:batch].unsqueeze(1).expand(-1, count, -1)
    total = torch.zeros(batch, count)
    for t in range(horizon):
        action = sequences[:, :, t]
        total -= (state @ Q * state).sum(-1) + R * action.square().sum(-1)
        state = state @ A.T + action @ B.T
    return total - (state @ Q * state).sum(-1)


def _step(state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The true system, one step of M of them."""
    reward = -(state @ Q * state).sum(-1) - R * action.square().sum(-1)
    return state @ A.T + action @ B.T, reward, torch.ones(len(state))


def _gains() -> list[torch.Tensor]:
    """The optimal gains of the problem of H steps, the first one first."""
    value, gains = Q, []
    for _ in range(H):
        gains.append(torch.linalg.solve(R * torch.eye(1) + B.T @ value @ B, B.T @ value @ A))
        value = Q + A.T @ value @ (A - B @ gains[-1])
    return gains[::-1]


def _riccati() -> torch.Tensor:
    """The optimal first actions `[3, 1]`."""
    return -START @ _gains()[0].T


@sabotaged_by("foresight.planning.continuous.cem.best", change("returns", torch.neg))
def test_cem_finds_the_optimal_first_action() -> None:
    plan = cem.cem(_score, cem.initial(3, H, 1), 500, 50, 30, torch.Generator().manual_seed(0))
    torch.testing.assert_close(plan.mean[:, 0], _riccati(), atol=1e-3, rtol=0)


@sabotaged_by("foresight.planning.continuous.cem.best", change("returns", torch.neg))
def test_the_best_sequence_of_all_iterations_is_found() -> None:
    scored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def score(sequences: torch.Tensor) -> torch.Tensor:
        scored.append((sequences, _score(sequences)))
        return scored[-1][1]

    found = cem.best_scored(score, cem.initial(3, H, 1), 20, 15, 3, torch.Generator().manual_seed(0))
    sequences, returns = (torch.cat(x, 1) for x in zip(*scored, strict=True))
    assert returns.shape == (3, 60)
    torch.testing.assert_close(found, sequences[torch.arange(3), returns.argmax(1)])


@sabotaged_by("foresight.planning.continuous.cem.best", change("returns", torch.neg))
def test_mppi_finds_the_optimal_first_action() -> None:
    generator = torch.Generator().manual_seed(0)
    plan, elites, weight = cem.mppi(_score, cem.initial(3, H, 1), 500, 50, 30, generator, 5.0, (0.0, 2.0))
    torch.testing.assert_close(plan.mean[:, 0], _riccati(), atol=1e-3, rtol=0)
    assert elites.shape == (3, 50, H, 1)
    torch.testing.assert_close(weight.sum(1), torch.ones(3))


@sabotaged_by("foresight.planning.continuous.cem.shifted", change("plan", lambda p: cem.Plan(0 * p.mean, p.std)))
def test_a_warm_start_needs_fewer_iterations() -> None:
    """Receding: two steps of the true system, planned with few iterations from the rest of a plan that was found."""
    generator = torch.Generator().manual_seed(0)
    plan, _, _ = cem.mppi(_score, cem.initial(3, H, 1), 500, 50, 30, generator, 5.0, (0.0, 2.0))
    state = START @ (A - B @ _gains()[0]).T
    warm = cem.shifted(plan, 0.05)
    plan, _, _ = cem.mppi(lambda s: _score(s, state), warm, 200, 20, 4, generator, 5.0, (0.01, 2.0))
    torch.testing.assert_close(plan.mean[:, 0], -state @ _gains()[0].T, atol=0.03, rtol=0)


@sabotaged_by("foresight.planning.continuous.cem.lookahead", change("value", lambda f: lambda s: 0 * f(s)))
@sabotaged_by("foresight.planning.continuous.cem.lookahead", change("gamma", lambda g: 0.9))
def test_looking_ahead_with_the_true_system_is_its_cost() -> None:
    sequences = cem.sample(cem.initial(3, H, 1), 20, torch.Generator().manual_seed(0))
    found = cem.lookahead(_step, START, sequences, 1.0, lambda state: -(state @ Q * state).sum(-1))
    torch.testing.assert_close(found, _score(sequences))


def never_ends(step):
    return lambda state, action: (*step(state, action)[:2], torch.ones(len(action)))


def _counting(state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards 1, 2, 3, ...; a positive action ends the episode."""
    return state + 1, state, (action[:, 0] <= 0).float()


@sabotaged_by("foresight.planning.continuous.cem.lookahead", change("step", never_ends))
@sabotaged_by("tests.planning.continuous.test_cem._counting", never_ends)
def test_looking_ahead_stops_at_a_termination() -> None:
    """γ 0.1, one row per case: 1 + 0.2 + 0.03 + 0.001 · 9 without an end; ends after the first and the last step."""
    sequences = torch.tensor([[-1.0, -1, -1], [1, -1, -1], [-1, -1, 1]]).view(1, 3, 3, 1)
    found = cem.lookahead(_counting, torch.ones(1), sequences, 0.1, lambda state: torch.full_like(state, 9.0))
    torch.testing.assert_close(found, torch.tensor([[1.239, 1.0, 1.23]]))
    found = cem.lookahead(_counting, torch.ones(1), sequences, 0.1)
    torch.testing.assert_close(found, torch.tensor([[1.23, 1.0, 1.23]]))


@sabotaged_by("foresight.planning.continuous.cem.chosen", change("weight", torch.ones_like))
def test_an_elite_is_chosen_in_proportion_to_its_weight() -> None:
    elites = torch.arange(3.0).view(1, 3, 1, 1).expand(10_000, 3, 2, 1)
    weight = torch.tensor([[0.5, 0.3, 0.2]]).expand(10_000, 3)
    drawn = cem.chosen(elites, weight, torch.Generator().manual_seed(0))
    assert drawn.shape == (10_000, 2, 1)
    share = drawn[:, 0, 0].long().bincount() / 10_000
    torch.testing.assert_close(share, weight[0], atol=0.02, rtol=0)


def test_a_warm_start_is_the_rest_of_the_plan() -> None:
    plan = cem.Plan(torch.arange(6.0).view(1, 3, 2), torch.full((1, 3, 2), 0.1))
    mean, std = cem.shifted(plan, 2.0)
    assert mean.tolist() == [[[2, 3], [4, 5], [0, 0]]] and (std == 2).all()


def test_mppi_keeps_a_proposal_that_is_better_than_every_candidate() -> None:
    generator = torch.Generator().manual_seed(0)
    best = cem.cem(_score, cem.initial(3, H, 1), 500, 50, 30, generator).mean.unsqueeze(1)
    flat = cem.Plan(torch.ones(3, H, 1), torch.full((3, H, 1), 0.01))
    plan, elites, _ = cem.mppi(_score, flat, 20, 5, 1, generator, 1000.0, proposals=best)
    assert torch.equal(elites[:, :1], best)
    torch.testing.assert_close(plan.mean, best[:, 0], atol=1e-3, rtol=0)


def test_one_iteration_with_one_elite_is_random_shooting() -> None:
    plan = cem.initial(3, H, 1)
    sequences = cem.sample(plan, 64, torch.Generator().manual_seed(5))
    found = cem.cem(_score, plan, 64, 1, 1, torch.Generator().manual_seed(5))
    chosen = sequences[torch.arange(3), _score(sequences).argmax(1)]
    assert torch.equal(found.mean, chosen) and (found.std == 0).all()


@pytest.mark.parametrize("actions", [1, 3])
def test_actions_are_within_bounds(actions: int) -> None:
    drawn = cem.sample(cem.initial(2, 4, actions, std=5.0), 100, torch.Generator().manual_seed(0))
    assert drawn.shape == (2, 100, 4, actions) and drawn.abs().max() == 1

"""CEM and MPPI on a linear-quadratic problem, whose optimal first action the Riccati equation gives."""

from __future__ import annotations

import pytest
import torch

from foresight.planning.continuous import cem
from tests.sabotage import change, sabotaged_by

A, B = torch.tensor([[1.0, 0.1], [0.0, 1.0]]), torch.tensor([[0.0], [0.1]])
Q, R, H = torch.diag(torch.tensor([1.0, 0.1])), 0.1, 15
START = 0.25 * torch.tensor([[0.5, 0.0], [-0.2, 0.4], [0.3, -0.3]])


def _score(sequences: torch.Tensor) -> torch.Tensor:
    batch, count, horizon, _ = sequences.shape
    state = START[:batch].unsqueeze(1).expand(-1, count, -1)
    total = torch.zeros(batch, count)
    for t in range(horizon):
        action = sequences[:, :, t]
        total -= (state @ Q * state).sum(-1) + R * action.square().sum(-1)
        state = state @ A.T + action @ B.T
    return total - (state @ Q * state).sum(-1)


def _riccati() -> torch.Tensor:
    """The optimal first actions `[3, 1]` of the problem of H steps."""
    value = Q
    for _ in range(H):
        gain = torch.linalg.solve(R * torch.eye(1) + B.T @ value @ B, B.T @ value @ A)
        value = Q + A.T @ value @ (A - B @ gain)
    return -START @ gain.T


@sabotaged_by("foresight.planning.continuous.cem.best", change("returns", torch.neg))
def test_cem_finds_the_optimal_first_action() -> None:
    plan = cem.cem(_score, cem.initial(3, H, 1), 500, 50, 30, torch.Generator().manual_seed(0))
    torch.testing.assert_close(plan.mean[:, 0], _riccati(), atol=0.03, rtol=0)


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

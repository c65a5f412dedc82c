"""What MuZero and its heirs share: weights of the steps, the share that is searched again, the temperature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foresight.data.trajectory import Trajectory
from foresight.errors import UserError
from foresight.planning import unroll
from tests.sabotage import change, flip_sign, sabotaged_by, scaled


@sabotaged_by("foresight.planning.unroll.summed", change("unroll", lambda k: 1), scaled(0.5))
def test_each_unrolled_step_counts_one_over_k() -> None:
    """Terms of K + 1 steps: the first in full. Of K steps (rewards): none in full. Means over the batch."""
    whole = [torch.tensor([1.0, 3.0]), torch.tensor([10.0, 10.0]), torch.tensor([20.0, 40.0])]
    found = unroll.summed({"value": whole, "reward": whole[1:]}, 2)
    assert {name: x.item() for name, x in found.items()} == {"value": 22.0, "reward": 20.0}


@sabotaged_by("foresight.planning.unroll.policies", flip_sign)
@pytest.mark.parametrize(("share", "pieces"), [(0.0, 0), (0.5, 2), (0.6, 2), (1.0, 4)])
def test_a_share_of_the_pieces_is_searched_again(share: float, pieces: int) -> None:
    state = SimpleNamespace(config=SimpleNamespace(reanalyze=share, unroll_steps=2))
    obs = torch.arange(20.0).view(4, 5, 1)
    zeros, weights = torch.zeros(4, 5), -torch.ones(4, 5, 1)
    batch = Trajectory(obs, zeros, zeros, zeros, zeros, extras={"weights": weights})
    found = unroll.policies(state, batch, lambda _, seen: {"weights": 100 + seen}, ("weights",))["weights"]
    assert found.shape == (4, 3, 1)
    assert torch.equal(found[:pieces], 100 + obs[:pieces, :3]) and (found[pieces:] == -1).all()
    assert share == 0.0 or found[0, 1] == 101


def test_the_temperature_falls_at_half_and_three_quarters() -> None:
    def at(step: int) -> float:
        config = SimpleNamespace(steps=100, temperatures=(1.0, 0.5, 0.25))
        return unroll.heat(SimpleNamespace(config=config, step=step))

    assert [at(step) for step in (0, 49, 50, 74, 75, 99, 130)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    state: Any = SimpleNamespace(updates=7, optimizer=torch.optim.Adam([weight]))
    with pytest.raises(UserError, match="not finite after 7 updates"):
        unroll.descend(state, weight.sum() * torch.nan)
    assert weight.item() == 1.0

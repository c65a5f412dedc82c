"""Scales of observations and actions: exact at the bounds, and constant dimensions survive."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.errors import UserError
from foresight.nets.imitation import ActionCode, MeanStd, MinMax, NormalizedObs
from tests.sabotage import returns, sabotaged_by, scaled

VALUES = torch.tensor([[0.1, 7.0, -3.3], [0.9, 7.0, 12.7], [0.35, 7.0, 0.0]])


@sabotaged_by("foresight.nets.imitation.MinMax.decode", scaled(1.000001))
@sabotaged_by("foresight.nets.imitation.MinMax.encode", returns(lambda y: y + 0.001))
def test_min_max_then_clip_is_exact() -> None:
    scale = MinMax(3)
    scale.fit(VALUES)
    y = scale.encode(VALUES)
    assert y.min() == -1 and y.max() == 1 and (y[:, 1] == 0).all()
    back = scale.decode(y)
    assert torch.equal(back[:, 1], VALUES[:, 1])  # constant
    assert torch.equal(back[:2], VALUES[:2])  # the bounds
    torch.testing.assert_close(back, VALUES)
    outside = scale.encode(torch.tensor([[-5.0, 8, 99]]))
    assert outside.tolist() == [[-1, 0, 1]] and torch.equal(
        scale.decode(torch.tensor([[-3.0, 2, 4]]))[0], torch.tensor([0.1, 7, 12.7])
    )
    still = MinMax(1)
    still.fit(torch.tensor([[1e-9], [0], [-1e-9]]))
    assert still.encode(torch.tensor([[1e-3]])).item() == 0  # rounding is constant too
    loaded = MinMax(3)
    loaded.load_state_dict(scale.state_dict())
    assert torch.equal(loaded.encode(VALUES), y)


def _unclipped(original):
    return lambda self, action: 2 * (action - self.low) / (self.high - self.low) - 1


@sabotaged_by("foresight.nets.imitation.ActionCode.encode", _unclipped)
def test_actions_outside_the_bounds_are_clipped_to_them() -> None:
    """As the environment does: in the code, in the action that comes back, and in the loss."""
    code = ActionCode(gs.Box(np.array([0, -2], np.float32), np.array([10, 2], np.float32)))
    outside, bounds = torch.tensor([[-5.0, 99.0], [2.5, -2.1]]), torch.tensor([[0.0, 2.0], [2.5, -2.0]])
    assert code.encode(outside).tolist() == [[-1, 1], [-0.5, -1]]
    torch.testing.assert_close(code.to_env(code.encode(outside)), bounds)
    y = torch.tensor([0.3, -0.7])
    torch.testing.assert_close(code.loss(y, outside), code.loss(y, bounds))


def test_actions_without_a_choice_are_refused() -> None:
    with pytest.raises(UserError, match="has a dim with equal bounds, so there is nothing to choose: leave it out"):
        ActionCode(gs.Box(np.array([0, -1], np.float32), np.array([0, 1], np.float32)))


@sabotaged_by("foresight.nets.imitation.MeanStd.decode", scaled(1.01))
def test_mean_and_deviation_are_those_of_the_data() -> None:
    scale = MeanStd(3)
    scale.fit(VALUES)
    y = scale.encode(VALUES)
    torch.testing.assert_close(y.mean(0), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.std(0, correction=0), torch.tensor([1.0, 0, 1]))
    torch.testing.assert_close(scale.decode(y), VALUES)


def test_what_reads_other_observations_is_named() -> None:
    vector, mission = gs.Box(-1, 1, (3,), np.float32), gs.Box(0, 255, (8,), np.uint8)
    for space, reader in (
        (gs.Dict({"state": vector}), "behavior_cloning"), (gs.Dict({"state": vector, "mission": mission}), "vla")
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"Imitate with: {reader}$"):
            NormalizedObs(space)

"""What MuZero and its variants share: step weights, reanalysis, temperature, learning rate, model errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foresight.data.trajectory import Trajectory
from foresight.errors import UserError
from foresight.nets.outputs import Categorical
from foresight.training import muzero_targets
from foresight.training.options import ModelTraining
from tests.sabotage import change, flip_sign, sabotaged_by, scaled


@sabotaged_by("foresight.training.muzero_targets.summed", change("unroll", lambda k: 1), scaled(0.5))
def test_each_unrolled_step_counts_one_over_k() -> None:
    """Terms of K + 1 steps: the first in full. Of K steps (rewards): none in full. Means over the batch."""
    whole = torch.tensor([[1.0, 10.0, 20.0], [3.0, 10.0, 40.0]])
    found = muzero_targets.summed({"value": whole, "reward": whole[:, 1:]}, 2)
    assert {name: x.item() for name, x in found.items()} == {"value": 22.0, "reward": 20.0}


@sabotaged_by("foresight.training.muzero_targets.policy_targets", flip_sign)
@pytest.mark.parametrize(("share", "fresh"), [(0.0, 0), (0.5, 2), (0.6, 2), (1.0, 4)])
def test_a_share_of_the_sequences_is_reanalyzed(share: float, fresh: int) -> None:
    state = SimpleNamespace(config=SimpleNamespace(reanalyze=share, unroll_steps=2, training=ModelTraining()))
    obs = torch.arange(20.0).view(4, 5, 1)
    zeros, weights = torch.zeros(4, 5), -torch.ones(4, 5, 1)
    batch = Trajectory(obs, zeros, zeros, zeros, zeros, extras={"weights": weights})

    def reanalyze(_: Any, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weights": 100 + obs}

    found = muzero_targets.policy_targets(state, batch, reanalyze, ("weights",))["weights"]
    assert found.shape == (4, 3, 1)
    assert torch.equal(found[:fresh], 100 + obs[:fresh, :3]) and (found[fresh:] == -1).all()
    assert share == 0.0 or found[0, 1] == 101


def test_the_temperature_falls_at_half_and_three_quarters() -> None:
    def at(step: int) -> float:
        config = SimpleNamespace(steps=100, temperatures=(1.0, 0.5, 0.25))
        return muzero_targets.temperature(SimpleNamespace(config=config, step=step))

    assert [at(step) for step in (0, 49, 50, 74, 75, 99, 130)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_the_rate_falls_evenly_to_its_share_and_no_further() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    training = ModelTraining(learning_rate=0.1, learning_rate_decay=0.01, max_grad_norm=1.0, target_every=1000)
    config = SimpleNamespace(steps=100, training=training)
    state: Any = SimpleNamespace(config=config, updates=0, optimizer=torch.optim.Adam([weight]))

    def at(step: int) -> float:
        state.step = step
        muzero_targets.descend(state, weight.sum())
        return float(state.optimizer.param_groups[0]["lr"])

    assert [at(step) for step in (0, 50, 100, 130)] == pytest.approx([0.1, 0.01, 0.001, 0.001])


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    state: Any = SimpleNamespace(updates=7, optimizer=torch.optim.Adam([weight]))
    with pytest.raises(UserError, match="not finite after 7 updates"):
        muzero_targets.descend(state, weight.sum() * torch.nan)
    assert weight.item() == 1.0


def test_a_mask_that_allows_nothing_allows_all_but_in_a_game() -> None:
    obs = {"x": torch.zeros(2, 1), "action_mask": torch.tensor([[0, 0, 0], [0, 1, 0]], dtype=torch.int8)}
    for game, first in ((None, [True] * 3), (object(), [False] * 3)):
        state: Any = SimpleNamespace(game=game, generator=torch.Generator())
        _, legal = muzero_targets.observe(state, obs)
        assert legal is not None and legal.tolist() == [first, [False, True, False]]


@sabotaged_by("foresight.ops.latent.unroll_masks", change("discount", torch.ones_like))
def test_a_lost_life_is_absorbing_although_the_game_continues() -> None:
    """Rewards 1 to 5, no value, γ = 0.1: 1.2 and 2 with the life of the first two steps; then all is 0 and known."""
    state: Any = SimpleNamespace(
        config=SimpleNamespace(unroll_steps=3, n_steps=2, gamma=0.1),
        target=SimpleNamespace(root=lambda obs: (None, torch.zeros(len(obs)), None)),
    )
    reward, zeros = torch.tensor([[1.0, 2, 3, 4, 5]]), torch.zeros(1, 5)
    discount = torch.tensor([[1.0, 0, 1, 1, 1]])
    extras = {"next_obs": torch.zeros(1, 5, 1)}
    batch = Trajectory(torch.zeros(1, 5, 1), zeros, reward, discount, zeros, zeros + 1, extras=extras)
    alive, known, value = muzero_targets.targets(state, batch, 2)
    assert alive.tolist() == [[1, 1, 0, 0]] and known.tolist() == [[1, 1, 1, 1]]
    torch.testing.assert_close(value, torch.tensor([[1.2, 2, 0, 0]]))


class Counting:
    """The env counts by one, this model by `stride`; values are counts, rewards 0, logits (count, 0)."""

    def __init__(self, stride: float) -> None:
        self.stride = stride

    def root(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.stack([obs[:, 0], torch.zeros(len(obs))], -1), obs[:, 0], obs

    def step(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, value, state = self.root(state + self.stride * action.unsqueeze(-1))
        return state, torch.zeros(len(state)), torch.ones(len(state)), logits, value


def counts() -> tuple[Trajectory, torch.Tensor]:
    """Two envs that count to six; the second is truncated after step 2 and resets to 0."""
    obs = torch.tensor([[0.0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]]).unsqueeze(-1)
    after = torch.tensor([[1.0, 2, 3, 4, 5, 6], [1, 2, 3, 1, 2, 3]]).unsqueeze(-1)
    ones, cut = torch.ones(2, 6), torch.zeros(2, 6)
    cut[1, 2] = 1.0
    return Trajectory(obs, ones, 0.5 * ones, ones, cut, ones), after


@sabotaged_by("foresight.ops.latent.unroll_masks", change("cut", torch.zeros_like))
@sabotaged_by("foresight.training.muzero_targets.model_errors", change("actions", lambda a: 0.5 * a))
def test_errors_of_a_model_by_depth() -> None:
    """Counting by two is wrong by k after k steps; counting by one is right, except that it predicts no reward."""
    batch, after = counts()
    for stride in (1.0, 2.0):
        found = muzero_targets.model_errors(Counting(stride), batch, batch.action, after, 3, Categorical)
        wrong = (stride - 1) * torch.arange(4.0)
        torch.testing.assert_close(found["value"], wrong)
        torch.testing.assert_close(found["reward"], torch.tensor([0.0, 0.5, 0.5, 0.5]))
        assert found["policy"][0] == 0 and ((found["policy"][1:] > 0) == (wrong[1:] > 0)).all()


def test_a_model_with_chance_gets_the_real_outcome() -> None:
    class Dice(Counting):
        def follow(
            self, state: torch.Tensor, action: Any, obs: Any, next_obs: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            return self.step(next_obs, torch.zeros(len(state)))

    batch, after = counts()
    found = muzero_targets.model_errors(Dice(2.0), batch, batch.action, after, 3, Categorical)
    assert found["value"].tolist() == [0, 0, 0, 0]

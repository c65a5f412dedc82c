"""The return of replayed rows against its definition, written out."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium.spaces as gs
import pytest
import torch

from foresight.data.trajectory import Trajectory
from foresight.errors import UserError
from foresight.nets.outputs import Categorical
from foresight.training import imagination
from tests.sabotage import change, drop, sabotaged_by


@sabotaged_by("foresight.training.imagination.returns.lambda_return", drop("mask"))
@sabotaged_by("foresight.training.imagination.returns.lambda_return", change("next_value", lambda x: x.roll(1, 1)))
def test_replayed_returns_bootstrap_from_imagined_ones_up_to_final_observations() -> None:
    torch.manual_seed(0)
    reward, imagined, lam = torch.randn(2, 5), torch.randn(2, 5), 0.8
    discount = torch.full((2, 5), 0.9)
    cut = torch.zeros(2, 5)
    cut[1, 2], reward[1, 2] = 1, 0  # row 2 is a final observation, at a time limit
    batch = Trajectory(torch.zeros(2, 5), torch.zeros(2, 5), reward, discount, cut)
    found, known = imagination.replayed_return(batch, imagined, lam)
    assert known.tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 1, 0]]

    def literal(row: int, t: int) -> float:
        if t == 4 or cut[row, t]:
            return float("nan")
        ends = t + 1 == 4 or bool(cut[row, t + 1])
        after = imagined[row, t + 1]
        mixed = after if ends else (1 - lam) * after + lam * literal(row, t + 1)
        return float(reward[row, t] + discount[row, t] * mixed)

    expected = torch.tensor([[literal(row, t) for t in range(5)] for row in range(2)])
    torch.testing.assert_close(found[known > 0], expected[known > 0])


@sabotaged_by("foresight.training.imagination.saturated", change("bins", lambda bins: 2 * bins))
def test_the_share_beyond_the_bins_is_the_mean_over_kinds_of_targets() -> None:
    bins = torch.tensor([-2.0, 0.0, 2.0])
    found = imagination.saturated(bins, torch.tensor([2.0, 2.1, -2.1, -2.0]), torch.tensor([[3.0, 0.0]]))
    assert found == 0.5
    assert imagination.saturated(bins, bins) == 0


class Steady:
    """A model in which nothing changes, and which continues with probability 0.5; with γ = 0.9 inside, or not."""

    def __init__(self, discounted: bool) -> None:
        self.discounted, self.discount = discounted, 0.5 * (0.9 if discounted else 1.0)

    def imagine(self, state, policy, horizon, generator):
        nothing, discount = torch.zeros(2, horizon), torch.full((2, horizon), self.discount)
        return Trajectory(nothing, nothing, nothing, discount, nothing), torch.zeros(2, horizon + 1, 1)


@sabotaged_by("foresight.training.imagination.rollout", change("gamma", lambda gamma: 1.0))
def test_a_rollout_is_discounted_once() -> None:
    for discounted in (True, False):
        steps, features = imagination.rollout(Steady(discounted), {}, None, 3, 0.9, torch.Generator())
        torch.testing.assert_close(steps.discount, torch.full((2, 3), 0.45))
        assert features.shape == (2, 4, 1)


class Two:
    """Two moves by action 1 earn 1 and end; action 0 earns 0.1 and ends. The model is exact."""

    discounted = False

    def begin(self, state):
        return state

    def features(self, state):
        return state

    def advance(self, state, action, generator):
        place = state + action[:, 1:]
        right, over = action[:, 1], place[:, 0] == 2
        return place, torch.where(right > 0, over.float(), 0.1), right * ~over


class Leaning:
    """An actor that prefers action 0, and a critic that knows nothing."""

    def __call__(self, features):
        return Categorical(torch.tensor([1.0, 0.0]).expand(len(features), 2))

    def action_features(self, action):
        return torch.eye(2)[action]


def nothing(features):
    return SimpleNamespace(mean=lambda: torch.zeros(len(features)))


@sabotaged_by("foresight.training.imagination.searched", change("simulations", lambda n: 0))
@sabotaged_by("foresight.planning.search.mcts.search", change("model", lambda model: _blind(model)))
def test_a_search_in_the_true_model_finds_the_best_action() -> None:
    places = torch.tensor([[0.0], [1.0]])

    def best(gamma: float, simulations: int, discounted: bool = False) -> list[int]:
        model = Two()
        model.discounted = discounted
        inside = imagination.Inside(model, Leaning(), nothing, gamma, torch.Generator())
        return imagination.searched(inside, places, simulations, explore=False).tolist()

    assert best(0.9, 256) == [1, 1]  # 0.9 · 1 is more than 0.1
    assert best(0.05, 256) == [0, 1]  # 0.05 · 1 is less
    assert best(0.05, 256, discounted=True) == [1, 1]  # γ is in the continuation already
    assert best(0.9, 0) == [0, 0]  # the actor's


def _blind(model):
    """Every step earns nothing."""
    step = model.step
    model.step = lambda state, action: (lambda found: (found[0], 0 * found[1], *found[2:]))(step(state, action))
    return model


def test_a_search_explores_in_proportion_to_visits() -> None:
    inside = imagination.Inside(Two(), Leaning(), nothing, 0.9, torch.Generator().manual_seed(0))
    drawn = imagination.searched(inside, torch.zeros(400, 1), 128, explore=True).float().mean()
    assert 0.4 < drawn < 0.8  # 79 of 128 visits


def test_only_discrete_actions_are_searched() -> None:
    box = gs.Box(-1, 1, (1,))
    imagination.require_searchable(8, gs.Discrete(2))
    imagination.require_searchable(0, box)
    with pytest.raises(UserError, match="search_simulations is 8, but only Discrete actions are searched, not Box"):
        imagination.require_searchable(8, box)


def _laprop(device: str) -> imagination.LaProp:
    """The optimizer of a weight whose gradient is its value, before its first step."""
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    weight.grad = weight.detach().clone()
    return imagination.LaProp([weight], 0.1)


@sabotaged_by("foresight.training.imagination.LaProp.load_state_dict", lambda f: torch.optim.Optimizer.load_state_dict)
def test_on_a_gpu_the_optimizer_counts_there_also_after_a_checkpoint_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count on the CPU would be a constant of a CUDA graph: the learning rate would stay that of its recording."""
    saved, loaded = _laprop("cpu"), _laprop("meta")
    saved.step()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.is_meta))
    loaded.load_state_dict(saved.state_dict())
    loaded.step()
    assert [state["step"].device.type for state in loaded.state.values()] == ["meta"]

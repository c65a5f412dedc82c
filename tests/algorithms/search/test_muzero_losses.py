"""The losses of MuZero and its variants compared with values by hand, and reanalysis compared with acting.

Two sequences of six steps, γ = 0.1: one terminates after step 2, the other is truncated after step 1. With K = 4:

    alive  1 1 1 0 0   1 1 0 0 0       (a step of the episode)
    known  1 1 1 1 1   1 1 0 0 0       (that, or absorbing)

New scalar heads give all 41 bins equal probability, so each step costs ln 41 for any target.
"""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foresight.algorithms.search import efficientzero, muzero, sampled_muzero, stochastic_muzero
from foresight.data.trajectory import Trajectory
from foresight.nets.models.muzero import CategoricalScalar
from foresight.training import muzero_targets, optim
from tests.algorithms.search.muzero_runs import ALL, DISCRETE, name, sequences, small
from tests.sabotage import change, sabotaged_by

BINS = math.log(41)


def prepared(module: ModuleType, **fields: Any) -> tuple[Any, Trajectory]:
    """A State whose policy prefers the second action 3 to 1, or N(0, 1) before tanh; and the sequences."""
    _, _, state = small(
        module, gamma=0.1, n_steps=2, unroll_steps=4, reanalyze=0.0, support=20,
        **({"samples": 2} if module is sampled_muzero else {}), **fields,
    )  # fmt: skip
    batch = sequences(module, state)
    torch.nn.init.zeros_(state.network.policy.weight)
    if module is sampled_muzero:
        drawn = torch.tensor([0.0, 0.5]).view(1, 1, 2, 1).expand(2, 6, 2, 1)
        extras = {**batch.extras, "actions": drawn, "taken": torch.zeros(2, 6, 1)}
        batch = batch.replace(obs=batch.obs[..., :3], extras={**extras, "next_obs": extras["next_obs"][..., :3]})
    else:
        state.network.policy.bias.data = torch.tensor([0.0, math.log(3.0)])
    first, second = [1.0, 0.0], [0.0, 1.0]
    weights = torch.tensor([[first, second, first, second, second, second], [first, second] + [first] * 4])
    return state, batch.replace(extras={**batch.extras, "weights": weights})


@pytest.mark.parametrize("module", ALL, ids=name)
@sabotaged_by("foresight.ops.latent.unroll_masks", change("discount", torch.ones_like), change("cut", torch.zeros_like))
@sabotaged_by("foresight.training.muzero_targets.summed", change("unroll", lambda k: 1))
def test_each_step_counts_as_it_should(module: ModuleType) -> None:
    """The first step once, the K others 1 / K each; rewards of K steps; nothing where `known` is 0."""
    state, batch = prepared(module)
    terms = {key: float(term.detach()) for key, term in module.loss(state, batch).items()}
    assert terms["value_loss"] == pytest.approx(BINS * ((1 + 4 / 4) + (1 + 1 / 4)) / 2, rel=1e-5)
    reward = terms["prefix_loss" if module is efficientzero else "reward_loss"]
    assert reward == pytest.approx(BINS * (4 / 4 + 2 / 4) / 2, rel=1e-5)
    if module is stochastic_muzero:
        assert terms["after_loss"] == pytest.approx(BINS * (4 / 4 + 2 / 4) / 2, rel=1e-5)


@pytest.mark.parametrize("module", ALL, ids=name)
@sabotaged_by("foresight.training.muzero_targets.policy_targets", lambda f: _late(f))
def test_each_step_has_its_own_policy_target(module: ModuleType) -> None:
    """-ln p of the action that the search chose at that step: steps 0, 1, 2 of one sequence and 0, 1 of the other."""
    state, batch = prepared(module)
    term = float(module.loss(state, batch)["policy_loss"].detach())
    first, second = math.log(4.0), math.log(4.0 / 3.0)
    if module is sampled_muzero:  # the densities of tanh(u), u ~ N(0, 1), at 0 and at ½
        u, constant = math.atanh(0.5), 0.5 * math.log(2 * math.pi)
        first, second = constant, constant + u * u / 2 + math.log(1 - 0.25)
    one, other = first + (second + first) / 4, first + second / 4
    assert term == pytest.approx((one + other) / 2, rel=1e-4)


def _late(policies: Any) -> Any:
    """Targets of the next step."""
    return lambda *args: {key: x.roll(-1, 1) for key, x in policies(*args).items()}


@pytest.mark.parametrize("module", ALL, ids=name)
@sabotaged_by("foresight.training.muzero_targets.targets", change("n", lambda n: 1))
def test_values_and_rewards_have_the_right_targets(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards 1 2 3 and 4 5: returns of two steps read 1.2, 2.3, 3 and 4.5, 5; prefixes are reset after three."""
    state, batch = prepared(module, **({"lstm_horizon": 3} if module is efficientzero else {}))
    seen: list[Tensor] = []
    loss = CategoricalScalar.loss

    def noted(self: CategoricalScalar, x: Tensor, target: Tensor) -> Tensor:
        seen.append(target)
        return loss(self, x, target)

    monkeypatch.setattr(CategoricalScalar, "loss", noted)
    module.loss(state, batch)
    value, reward = seen[:2]
    close = {"atol": 1e-5, "rtol": 0}
    torch.testing.assert_close(value, torch.tensor([[1.2, 2.3, 3, 0, 0], [4.5, 5, 0, 0, 0]]), **close)
    if module is efficientzero:  # what is left of a prefix after the end of an episode is what it had come to
        torch.testing.assert_close(reward, torch.tensor([[1.0, 3, 6, 0], [4, 9, 9, 0]]), **close)
        return
    torch.testing.assert_close(reward, torch.tensor([[1.0, 2, 3, 0], [4, 5, 0, 0]]), **close)
    if module is stochastic_muzero:
        torch.testing.assert_close(seen[2], value[:, :4])


class Line(torch.nn.Module):
    """A model whose state is a number that no action changes; its value's loss is that number."""

    def __init__(self, kind: ModuleType) -> None:
        super().__init__()
        self.dict, self.eye = kind is efficientzero, torch.eye(2)
        nothing = SimpleNamespace(loss=lambda x, _: 0 * x.sum(-1))
        self.value = SimpleNamespace(loss=lambda x, _: x.sum(-1))
        self.reward = self.prefix = self.after_value = nothing

    def represent(self, obs: Tensor) -> Any:
        return {"latent": obs[..., :1], "h": 0 * obs[..., :1]} if self.dict else obs[..., :1]

    def advance(self, state: Any, action: Tensor) -> Any:
        return dict(state) if self.dict else (state, state)

    def policy(self, x: Tensor) -> Tensor:
        return torch.zeros(*x.shape[:-1], 2)

    def same(self, x: Any, *_: Any) -> Any:
        return x

    head = after = act = reset_prefix = project = predictor = same

    def chance(self, after: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        return after, after

    def encode_outcome(self, obs: Tensor, next_obs: Tensor, learning: bool) -> Tensor:
        return next_obs[..., :2]

    def outcome(self, x: Tensor) -> Tensor:
        return torch.zeros(*x.shape[:-1], 2)


@pytest.mark.parametrize("module", DISCRETE, ids=name)
@sabotaged_by("foresight.ops.latent.scale_gradient", change("factor", lambda _: 1.0))
def test_what_comes_back_through_the_dynamics_is_halved(module: ModuleType) -> None:
    """Two heads at ½ each: 1 + ½ (1 + ½). EfficientZero halves what a state's own heads send, too: 1 + ½ (½ + ¼)."""
    _, _, state = small(module, n_steps=2, unroll_steps=2, reanalyze=0.0)
    line, ones = Line(module), torch.ones(1, 4)
    obs = torch.rand(1, 4, 4, requires_grad=True)
    whole = torch.zeros(1, 4, dtype=torch.int64)
    extras = {"weights": torch.full((1, 4, 2), 0.5), "next_obs": torch.rand(1, 4, 4), "born": whole}
    batch = Trajectory(obs, whole, ones, ones, 0 * ones, ones, extras=extras)
    state.network = line
    module.loss(state, batch)["value_loss"].backward()
    assert obs.grad is not None
    assert obs.grad[0, :, 0].tolist() == [1.375 if module is efficientzero else 1.75, 0, 0, 0]


@pytest.mark.parametrize("module", ALL, ids=name)
@sabotaged_by("foresight.training.optim.track", lambda f: lambda target, network, *_: None)
def test_reanalysis_with_the_same_weights_is_acting(module: ModuleType) -> None:
    """With an up-to-date target network a new search finds what exploring found, from equal random numbers."""
    _, env, state = small(module, simulations=8, unroll_steps=2, n_steps=1, reanalyze=1.0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # a network that prefers something
        for p in state.network.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    optim.track(state.target, state.network)
    seen = torch.stack([env.reset(seed) for seed in range(3)], 1)  # [4, 3, ...]
    names = ("weights", "actions") if module is sampled_muzero else ("weights",)
    state.generator.manual_seed(7)
    _, acted, _ = module.act(state, seen.flatten(0, 1), explore=True)
    ones, nothing = torch.ones(4, 3), {key: torch.zeros_like(acted[key]).unflatten(0, (4, 3)) for key in names}
    batch = Trajectory(seen, torch.zeros(4, 3), ones, ones, 0 * ones, ones, extras=nothing)
    state.generator.manual_seed(7)
    again = muzero_targets.policy_targets(state, batch, module.reanalyze, names)
    for key in names:
        assert acted[key].std() > 0.01
        torch.testing.assert_close(again[key].flatten(0, 1), acted[key], atol=1e-6, rtol=0)


@pytest.mark.parametrize("module", [muzero, efficientzero, stochastic_muzero], ids=name)
@sabotaged_by("foresight.planning.search.selection.dirichlet", lambda f: lambda logits, *_: logits)
def test_reanalysis_also_tries_what_the_prior_excludes(module: ModuleType) -> None:
    """Otherwise a prior near 0 would be the target of the next prior. Only noise: half the visits; none: 0."""
    weights, obs = [], torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    for fraction in (1.0, 0.0):
        _, _, state = small(module, simulations=8, reanalyze=1.0, dirichlet_fraction=fraction)
        with torch.no_grad():
            state.target.policy.bias.copy_(torch.tensor([0.0, 30.0]))
        weights.append(module.reanalyze(state, obs)["weights"][:, 0].mean().item())
    assert weights[0] == pytest.approx(0.5, abs=0.15) and weights[1] == 0

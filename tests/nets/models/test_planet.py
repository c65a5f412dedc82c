"""PlaNet's state-space model: sequences in parts, resets, its losses by hand, rewards of plans."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from gymnasium import spaces as gs

from foresight.data.sequences import Arrival, arrivals
from foresight.data.trajectory import Trajectory
from foresight.nets.models import planet
from foresight.nets.models.planet import GaussianRSSM
from foresight.nets.models.world_model import obs_model
from foresight.nets.outputs import Normal
from tests.nets.models import test_storm
from tests.sabotage import change, sabotaged_by, shift


def _model(**options) -> GaussianRSSM:
    torch.manual_seed(0)
    box = gs.Box(-1, 1, (3,))
    return GaussianRSSM(obs_model(box, 8, 1, 2), 2, deter=16, stoch=4, hidden=8, units=8, layers=1, **options)


@pytest.fixture
def means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are their means: sequences in parts see the same noise, none."""
    monkeypatch.setattr(planet, "_noise", lambda *shape, like, generator: torch.zeros(shape))


def _sequences(steps: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    obs = torch.randn(4, steps, 3, generator=generator)
    action = torch.randn(4, steps, 2, generator=generator).clamp(-1, 1)
    cut = torch.zeros(4, steps)
    cut[0, 2], cut[1, 0], cut[2, steps - 1] = 1, 1, 1
    return obs, action, cut


@sabotaged_by("foresight.nets.models.planet.GaussianRSSM.observe", shift("action"))
@torch.no_grad()
def test_a_sequence_in_parts_is_the_whole_sequence(means: None) -> None:
    model, generator = _model(), torch.Generator()
    obs, action, cut = _sequences()
    whole = model.observe(model.initial(4), obs, action, cut, generator)
    carry, parts = model.initial(4), []
    for a, b in ((0, 3), (3, 4), (4, 7)):
        found = model.observe(carry, obs[:, a:b], action[:, a:b], cut[:, a:b], generator)
        carry = model.carry({name: x[:, -1] for name, x in found.items()}, action[:, b - 1])
        carry = {name: x * (1 - cut[:, b - 1 : b]) for name, x in carry.items()}
        parts.append(found)
    for name, value in whole.items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts], 1), value, atol=1e-5, rtol=0)


@sabotaged_by("foresight.nets.models.planet._noise", lambda f: lambda *shape, like, generator: torch.randn(shape))
@torch.no_grad()
def test_without_a_generator_latents_are_the_mode() -> None:
    model, before = _model(), torch.random.get_rng_state()
    obs, action, cut = _sequences()
    found = model.observe(model.initial(4), obs, action, cut, None)
    assert torch.equal(found["stoch"], found["mean"]) and torch.equal(before, torch.random.get_rng_state())
    latest = model.latest(obs, action, cut, None)
    assert all(torch.equal(x, found[name][:, -1]) for name, x in latest.items())


@sabotaged_by("foresight.nets.models.planet.GaussianRSSM.observe", change("cut", torch.zeros_like))
@torch.no_grad()
def test_after_a_cut_the_past_is_irrelevant(means: None) -> None:
    model, generator = _model(), torch.Generator()
    obs, action, cut = _sequences()
    found = model.observe(model.initial(4), obs, action, cut, generator)
    again = model.observe(model.initial(1), obs[:1, 3:], action[:1, 3:], cut[:1, 3:], generator)
    torch.testing.assert_close(found["deter"][:1, 3:], again["deter"])
    torch.testing.assert_close(found["stoch"][:1, 3:], again["stoch"])


def _batch() -> tuple[Trajectory, Arrival]:
    obs, action, cut = _sequences()
    reward = torch.randn(cut.shape, generator=torch.Generator().manual_seed(2)) * (1 - cut)
    batch = Trajectory(obs, action, reward, 1 - cut, cut)
    return batch, arrivals(batch)


@sabotaged_by("foresight.nets.outputs.Normal.kl", lambda kl: lambda self, other: kl(other, self))
@sabotaged_by("foresight.data.sequences.arrivals", lambda f: lambda b: Arrival(b.reward, b.discount, 1 - b.cut))
def test_the_terms_are_those_of_the_definition() -> None:
    model = _model(free_nats=0.0)
    batch, arrival = _batch()
    terms, state = model.loss(model.initial(4), batch, arrival, torch.Generator().manual_seed(3))
    reward = model.reward(model.features(state))
    for b in range(4):
        for t in range(7):
            known = t > 0 and batch.cut[b, t - 1] == 0
            error = (reward[b, t] - batch.reward[b, t - 1]) ** 2 / 2 if known else torch.tensor(0.0)
            torch.testing.assert_close(terms["reward"][b, t], error)
    prior = model.prior(state["deter"])
    q = torch.distributions.Normal(state["mean"], state["std"])
    p = torch.distributions.Normal(prior.location, prior.std)
    torch.testing.assert_close(terms["divergence"], torch.distributions.kl_divergence(q, p).sum(-1))
    symlog = batch.obs.sign() * batch.obs.abs().log1p()
    error = (model.decoder(model.features(state)) - symlog).square().sum(-1) / 2
    torch.testing.assert_close(terms["reconstruction"], error)


def test_below_the_free_nats_the_divergence_has_no_gradient() -> None:
    batch, arrival = _batch()
    for free, trained in ((1e3, False), (0.0, True)):
        model = _model(free_nats=free)
        terms, _ = model.loss(model.initial(4), batch, arrival, torch.Generator().manual_seed(3))
        terms["divergence"].sum().backward()
        gradient = model.prior_layers[0].weight.grad
        assert bool(gradient.abs().sum() > 0) == trained


class _Fixed:
    """A policy that plays given actions."""

    def __init__(self, actions: torch.Tensor) -> None:
        self.actions = list(actions.unbind(1))

    def __call__(self, features: torch.Tensor) -> Normal:
        action = self.actions.pop(0)
        return Normal(action, torch.zeros_like(action))

    def action_features(self, action: torch.Tensor) -> torch.Tensor:
        return action


@sabotaged_by("foresight.nets.models.planet.GaussianRSSM.rewards", shift("actions"))
@torch.no_grad()
def test_rewards_of_a_plan_are_those_of_imagination_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    model, generator = _model(), torch.Generator().manual_seed(0)
    state = {"deter": torch.randn(5, 16, generator=generator), "stoch": torch.randn(5, 4, generator=generator)}
    actions = torch.randn(5, 3, 2, generator=generator)
    planned = model.rewards(state, actions)
    monkeypatch.setattr(Normal, "sample", lambda self, generator=None: self.location)
    steps, states = model.imagine(state, _Fixed(actions), 3, generator)
    torch.testing.assert_close(planned, steps.reward)
    assert steps.obs.shape == (5, 3, 20) and states.shape == (5, 4, 20)
    assert (steps.discount == 1).all() and torch.equal(steps.action, actions)
    torch.testing.assert_close(planned[:, 1:2], model.rewards(_after(model, state, actions), actions[:, 1:2]))


def _after(model: GaussianRSSM, state: planet.State, actions: torch.Tensor) -> planet.State:
    deter = model._advance(state["deter"], state["stoch"], actions[:, 0])
    return {"deter": deter, "stoch": model.prior(deter).location}


@torch.no_grad()
def test_the_standard_deviation_has_a_minimum() -> None:
    model = _model(min_std=0.5)
    assert (model.prior(100 * torch.randn(50, 16)).std >= 0.5).all()


class Given:
    """The policy that takes given actions."""

    def __init__(self, action: torch.Tensor) -> None:
        self.action = action

    def __call__(self, features: torch.Tensor) -> Given:
        return self

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        return self.action

    def action_features(self, action: torch.Tensor) -> torch.Tensor:
        return action


@sabotaged_by("foresight.nets.models.planet.GaussianRSSM.advance", change("action", lambda x: -x))
@torch.no_grad()
def test_a_step_of_the_model_is_a_step_of_imagination() -> None:
    model, generator = _model(), torch.Generator().manual_seed(0)
    state = {"deter": torch.randn(6, 16, generator=generator), "stoch": torch.randn(6, 4, generator=generator)}
    action = torch.randn(6, 2, generator=generator).clamp(-1, 1)
    steps, states = model.imagine(state, Given(action), 1, torch.Generator().manual_seed(5))
    after, reward, continuation = model.advance(state, action, torch.Generator().manual_seed(5))
    assert torch.equal(model.features(after), states[:, -1]) and torch.equal(reward, steps.reward[:, 0])
    assert torch.equal(continuation, torch.ones(6)) and model.decode(after).shape == (6, model.obs.flat.size)


@sabotaged_by("foresight.data.sequences.arrivals", lambda f: lambda batch: Arrival(*(x.roll(1, 1) for x in f(batch))))
@sabotaged_by("foresight.nets.models.planet.GaussianRSSM.rewards", change("actions", lambda x: 1 - x))
def test_it_learns_the_reward_of_a_known_process() -> None:
    """Of every state and action of the chain, from the first observation and what the model makes of the next ones."""
    model, generator = _of_chain(arrivals), torch.Generator().manual_seed(1)
    first, nothing = torch.tensor([1.0, -1.0, -1.0]).expand(2, 1, 3), torch.zeros(2, 1, 2)
    with torch.no_grad():
        found = model.observe(model.initial(2), first, nothing, nothing[..., 0], generator)
        state = {"deter": found["deter"][:, 0], "stoch": found["mean"][:, 0]}
        predicted = model.rewards(state, torch.eye(2).unsqueeze(1).expand(-1, 3, -1))
    truth = torch.tensor([[1.0, 0.0, -1.0]]) * torch.tensor([[1.0], [2.0]])
    torch.testing.assert_close(predicted, truth, atol=0.15, rtol=0)


@functools.cache
def _of_chain(arrivals: Callable[[Trajectory], Arrival]) -> GaussianRSSM:
    """A model of the chain; `arrivals` are an argument so that mutants of it have models of their own."""
    model, generator = _model(free_nats=0.1), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    batch = test_storm.chain(384, 0).map(lambda x: x.view(64, 6, *x.shape[2:]))
    arrival = arrivals(batch)
    test_storm.assert_earned_before(batch, arrival)
    for step in range(150):
        terms, _ = model.loss(model.initial(64), batch, arrival, generator)
        optimizer.zero_grad()
        (10 * terms["reward"].mean() + terms["reconstruction"].mean() + terms["divergence"].mean()).backward()
        optimizer.param_groups[0]["lr"] = 2e-2 if step < 112 else 4e-3
        optimizer.step()
    return model


def test_only_some_rows_are_reconstructed() -> None:
    obs, action, cut = _sequences()
    batch = Trajectory(obs, action, torch.zeros(4, 7), torch.ones(4, 7), cut)
    model = _model(decoded=2)
    terms, _ = model.loss(model.initial(4), batch, arrivals(batch), torch.Generator())
    assert ((terms["reconstruction"] > 0).sum(1) == 2).all()

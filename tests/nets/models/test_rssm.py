"""The recurrent state-space model: sequences in parts, resets, gradients of the KL terms, and a small known process."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from gymnasium import spaces as gs

from foresight.data.sequences import Arrival, arrivals
from foresight.data.trajectory import Trajectory
from foresight.nets.models import rssm
from foresight.nets.models.rssm import RSSM
from foresight.nets.models.world_model import decodes, obs_model
from foresight.ops import latent
from tests.nets.models import test_storm
from tests.sabotage import change, sabotaged_by, shift

BOX = gs.Box(-1, 1, (3,))


def _model(seed: int = 0) -> RSSM:
    torch.manual_seed(seed)
    return RSSM(obs_model(BOX, 8, 1, 2), 2, deter=16, hidden=8, groups=3, classes=4, blocks=2, units=8)


def _sequences(steps: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    obs = torch.randn(4, steps, 3, generator=generator)
    action = torch.randn(4, steps, 2, generator=generator).clamp(-1, 1)
    cut = torch.zeros(4, steps)
    cut[0, 2], cut[1, 0], cut[2, steps - 1] = 1, 1, 1
    return obs, action, cut


def _carry(model: RSSM, found: dict[str, torch.Tensor], action: torch.Tensor, cut: torch.Tensor) -> rssm.State:
    keep = 1 - cut[:, -1:]
    return {
        "deter": found["deter"][:, -1] * keep,
        "stoch": found["stoch"][:, -1] * keep,
        "action": action[:, -1] * keep,
    }


@sabotaged_by("foresight.nets.models.rssm.RSSM.observe", shift("action"))
@torch.no_grad()
def test_a_sequence_in_parts_is_the_whole_sequence() -> None:
    model = _model()
    obs, action, cut = _sequences()
    whole = model.observe(model.initial(4), obs, action, cut, None)
    carry, parts = model.initial(4), []
    for a, b in ((0, 3), (3, 4), (4, 7)):
        found = model.observe(carry, obs[:, a:b], action[:, a:b], cut[:, a:b], None)
        carry = _carry(model, found, action[:, a:b], cut[:, a:b])
        parts.append(found)
    for name, value in whole.items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts], 1), value, atol=1e-5, rtol=0)


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


@sabotaged_by("foresight.nets.models.world_model.compiled_step", lambda f: lambda step, backend: step)
@torch.no_grad()
def test_compiled_imagination_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rssm, "compiled", lambda *tensors: False)  # as on an accelerator
    model, graphs = _model(), []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    obs, action, cut = _sequences()
    start, found = model.latest(obs, action, cut, None), []
    for model.backend in (None, backend):
        found.append(model.imagine(start, Given(action[:, 0]), 4, torch.Generator().manual_seed(0))[1])
    assert 1 <= len(graphs) <= 2  # the first states may have other strides
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)


@sabotaged_by("foresight.nets.models.rssm.RSSM.advance", change("action", lambda x: -x))
@torch.no_grad()
def test_a_step_of_the_model_is_a_step_of_imagination() -> None:
    model = _model()
    obs, action, cut = _sequences()
    found = model.observe(model.initial(4), obs, action, cut, None)
    state = {name: found[name][:, -1] for name in ("deter", "stoch")}
    steps, states = model.imagine(state, Given(action[:, -1]), 1, torch.Generator().manual_seed(5))
    after, reward, continuation = model.advance(state, action[:, -1], torch.Generator().manual_seed(5))
    torch.testing.assert_close(model.features(after), states[:, -1])
    torch.testing.assert_close(reward, steps.reward[:, 0])
    torch.testing.assert_close(continuation, steps.discount[:, 0])
    torch.testing.assert_close(model.decode(after), model.obs.picture(model.decoder(states[:, -1])))


@sabotaged_by("foresight.nets.models.rssm.RSSM.observe", change("cut", torch.zeros_like))
@torch.no_grad()
def test_after_a_cut_the_past_is_irrelevant() -> None:
    model = _model()
    obs, action, cut = _sequences()
    found = model.observe(model.initial(4), obs, action, cut, None)
    again = model.observe(model.initial(1), obs[:1, 3:], action[:1, 3:], cut[:1, 3:], None)
    torch.testing.assert_close(found["deter"][:1, 3:], again["deter"])
    torch.testing.assert_close(found["stoch"][:1, 3:], again["stoch"])


class Seldom:
    """Bounded actions that depend on the features and on the generator."""

    def __call__(self, features: torch.Tensor) -> Seldom:
        self.features = features
        return self

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        return (self.features[:, :2] + torch.rand(len(self.features), 2, generator=generator)).tanh()

    def action_features(self, action: torch.Tensor) -> torch.Tensor:
        return action


@sabotaged_by("foresight.ops.fused.latent.gated", change("before", torch.zeros_like))
def test_the_compiled_recurrence_is_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """States, samples, the gradients of all weights and of the first state, and imagination."""
    model = _model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    obs, action, cut = _sequences()
    carry = {name: torch.rand_like(x).requires_grad_() for name, x in model.initial(4).items()}
    found = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(rssm, "compiled", lambda *tensors: False)
        states = model.observe(carry, obs, action, cut, torch.Generator().manual_seed(2))
        weights = torch.Generator().manual_seed(3)
        loss = sum((x * torch.randn(x.shape, generator=weights)).sum() for x in states.values())
        of = {**carry, **{n: p for n, p in model.named_parameters() if n.split(".")[0] not in HEADS}}
        gradients = dict(zip(of, torch.autograd.grad(loss, list(of.values())), strict=True))
        with torch.no_grad():
            first = {name: states[name][:, -1] for name in ("deter", "stoch")}
            steps, features = model.imagine(first, Seldom(), 5, torch.Generator().manual_seed(4))
        rolled = {"features": features, "action": steps.action, "reward": steps.reward, "discount": steps.discount}
        found.append({**states, **gradients, **rolled})
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-5, msg=name)


HEADS = ("decoder", "reward", "continues", "prior_layers", "prior_logits")


@sabotaged_by("foresight.data.sequences.arrivals", lambda f: lambda batch: Arrival(*(x.roll(1, 1) for x in f(batch))))
@sabotaged_by("foresight.nets.models.rssm.RSSM.advance", change("action", lambda a: 1 - a))
def test_it_learns_reward_and_continuation_of_a_known_process() -> None:
    """The mean of 64 samples of what each action leads to."""
    model, shown, none = _of_chain(arrivals), 2 * torch.eye(3) - 1, torch.zeros(128, 1)
    actions = torch.eye(2).repeat_interleave(64, 0)
    with torch.no_grad():
        carry = model.initial(128)
        for state in range(3):
            seen = model.observe(carry, shown[state].expand(128, 1, 3), torch.zeros(128, 1, 2), none, None)
            carry = model.carry({name: x[:, 0] for name, x in seen.items()}, actions)
            _, *predicted = model.advance(carry, actions, torch.Generator().manual_seed(0))
            reward, continuation = (x.view(2, 64).mean(1) for x in predicted)
            torch.testing.assert_close(reward, (1.0 - state) * torch.tensor([1.0, 2.0]), atol=0.2, rtol=0)
            torch.testing.assert_close(continuation, torch.full((2,), 0.45 if state == 2 else 0.9), atol=0.12, rtol=0)


@functools.cache
def _of_chain(arrivals: Callable[[Trajectory], Arrival]) -> RSSM:
    """A model of the chain; `arrivals` are an argument so that mutants of it have models of their own."""
    model, generator = _model(), torch.Generator().manual_seed(0)
    model.free_nats = 0.1
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = test_storm.chain(768, 0).map(lambda x: x.view(128, 6, *x.shape[2:]))
    arrival = arrivals(batch)
    test_storm.assert_earned_before(batch, arrival)
    for step in range(200):
        terms, _ = model.loss(model.initial(128), batch, arrival, generator)
        optimizer.zero_grad()
        sum(term.mean() for term in terms.values()).backward()
        optimizer.param_groups[0]["lr"] = 1e-2 if step < 150 else 2e-3
        optimizer.step()
    return model


@sabotaged_by("foresight.ops.latent.redundancy", change("x", lambda x: x.detach() + 0 * x))
def test_without_a_decoder_the_features_are_trained_to_agree_with_the_encoding() -> None:
    """The gradient reaches the encoder through the posterior only: the encoding that is compared has none."""
    torch.manual_seed(0)
    space = obs_model(BOX, 8, 1, 2)
    model = RSSM(space, 2, deter=16, hidden=8, groups=3, classes=4, blocks=2, units=8, decoder=False)
    obs, action, cut = _sequences()
    batch = Trajectory(obs, action, torch.zeros(4, 7), torch.ones(4, 7), cut)
    terms, state = model.loss(model.initial(4), batch, arrivals(batch), torch.Generator().manual_seed(3))
    assert "reconstruction" not in terms and terms["redundancy"].shape == (4, 7)
    expected = latent.redundancy(model.projection(model.features(state)), space(obs))
    torch.testing.assert_close(terms["redundancy"], expected.expand(4, 7))
    parts = [*space.parameters(), model.projection.weight]
    terms, _ = model.loss(model.initial(4), batch, arrivals(batch), torch.Generator().manual_seed(3))
    given = torch.autograd.grad(terms["redundancy"].mean(), parts, allow_unused=True)
    assert all(g is not None and g.any() for g in given)
    with torch.no_grad():
        model.post_obs.weight.zero_()  # no posterior sees the encoding
    terms, _ = model.loss(model.initial(4), batch, arrivals(batch), torch.Generator().manual_seed(3))
    blind = torch.autograd.grad(terms["redundancy"].mean(), list(space.parameters()), allow_unused=True)
    assert not any(g is not None and g.any() for g in blind)
    assert not decodes(model) and decodes(_model())

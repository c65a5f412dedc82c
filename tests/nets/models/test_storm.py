"""STORM's world model: caches, resets, gradients of the KL terms, and what it predicts of a small known process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.data.sequences import Arrival, arrivals
from foresight.data.trajectory import Trajectory
from foresight.nets.models.storm import STORM, CausalTransformer, RecurrentSequence
from foresight.nets.models.world_model import obs_model
from foresight.nets.outputs import Categorical
from tests.sabotage import change, sabotaged_by, shift, swap

BOX = gs.Box(-1, 1, (3,))
SEQUENCES = {"transformer": lambda size: CausalTransformer(size, 2, 2), "lstm": lambda size: RecurrentSequence(size, 2)}
BOTH = pytest.mark.parametrize("kind", list(SEQUENCES))


def _model(kind: str = "transformer", context: int = 3, scale: float = 5.0, **options: int) -> STORM:
    torch.manual_seed(0)
    sequence = SEQUENCES[kind](16)
    model = STORM(obs_model(BOX, 8, 1, 2), 2, sequence, groups=3, classes=4, context=context, units=8, **options)
    with torch.no_grad():
        for parameter in sequence.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)  # far from the start, where attention is nearly uniform
    return model


def _sequences(steps: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    obs = torch.randn(4, steps, 3, generator=generator)
    action = torch.randn(4, steps, 2, generator=generator).clamp(-1, 1)
    cut = torch.zeros(4, steps)
    cut[0, 2], cut[1, 0], cut[2, steps - 1] = 1, 1, 1
    return obs, action, cut


def _carried(model: STORM, found: dict[str, Tensor], action: Tensor, cut: Tensor) -> dict[str, Tensor]:
    carry = model.carry({name: x[:, -1] for name, x in found.items()}, action[:, -1])
    over = cut[:, -1] > 0
    return {name: x.masked_fill(over.view(-1, *[1] * (x.dim() - 1)), 0) for name, x in carry.items()}


class Uniform:
    """A policy over two actions, and a record of what it saw."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, features: Tensor) -> Categorical:
        self.seen.append(features)
        return Categorical(torch.zeros(len(features), 2))

    def action_features(self, action: Tensor) -> Tensor:
        return torch.eye(2)[action]


def _unpositioned(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A reset is forgotten."""
    return lambda start, length: original(torch.zeros_like(start), length)


@sabotaged_by("foresight.nets.sequence.transformer._same_episode", _unpositioned)
@torch.no_grad()
def test_tokens_read_in_parts_with_the_cache_are_the_whole_sequence_across_resets() -> None:
    net = _model().sequence.net
    x, start = torch.randn(4, 9, 16, generator=torch.Generator().manual_seed(2)), torch.zeros(4, 9)
    start[0, 3], start[1, 1], start[1, 6], start[2, 0], start[3, 4] = 1, 1, 1, 1, 1
    whole, _ = net.features(x, start=start)
    for slots in (None, 9):
        cache, parts = net.empty_cache(4, slots), []
        for a, b in ((0, 3), (3, 4), (4, 5), (5, 9)):
            out, cache = net.features(x[:, a:b], cache, start=start[:, a:b])
            parts.append(out)
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)
    alone, _ = net.features(x[:1, 3:])  # what a reset leaves is an episode of its own, positions included
    torch.testing.assert_close(whole[:1, 3:], alone, atol=1e-5, rtol=0)


@sabotaged_by("foresight.nets.models.storm.STORM.observe", shift("action"))
@BOTH
@torch.no_grad()
def test_a_sequence_in_parts_is_the_whole_sequence(kind: str) -> None:
    model = _model(kind, context=6)  # no part needs more
    obs, action, cut = _sequences()
    whole = model.observe(model.initial(4), obs, action, cut, None)
    carry, parts = model.initial(4), []
    for a, b in ((0, 3), (3, 4), (4, 7)):
        found = model.observe(carry, obs[:, a:b], action[:, a:b], cut[:, a:b], None)
        carry = _carried(model, found, action[:, a:b], cut[:, a:b])
        parts.append(found)
    assert whole["deter"].std() > 0.2
    for name in ("deter", "stoch", "filled"):
        torch.testing.assert_close(torch.cat([part[name] for part in parts], 1), whole[name], atol=1e-5, rtol=0)


@sabotaged_by("foresight.nets.models.storm.STORM.observe", change("cut", torch.zeros_like))
@BOTH
@torch.no_grad()
def test_after_a_cut_the_past_is_irrelevant(kind: str) -> None:
    model = _model(kind)
    obs, action, cut = _sequences()
    found = model.observe(model.initial(4), obs, action, cut, None)
    again = model.observe(model.initial(1), obs[:1, 3:], action[:1, 3:], cut[:1, 3:], None)
    for name in ("deter", "stoch", "filled"):
        torch.testing.assert_close(found[name][:1, 3:], again[name], atol=1e-5, rtol=0)
    assert (found["deter"][0, 3] == 0).all() and not found["filled"][0, 3].any()


def _forgetful(original: Callable[..., object]) -> Callable[..., object]:
    """The cache is not filled with the context."""
    return lambda self, x, filled, horizon: original(self, x, torch.zeros_like(filled), horizon)


@sabotaged_by("foresight.nets.models.storm.CausalTransformer.prefill", _forgetful)
@torch.no_grad()
def test_a_rollout_with_the_cache_is_what_the_whole_sequence_gives() -> None:
    model, policy, generator = _model(), Uniform(), torch.Generator().manual_seed(0)
    _check_rollout(model, policy, generator)


@torch.no_grad()
def test_a_rollout_of_the_lstm_is_what_the_whole_sequence_gives() -> None:
    _check_rollout(_model("lstm"), Uniform(), torch.Generator().manual_seed(0))


def _check_rollout(model: STORM, policy: Uniform, generator: torch.Generator) -> None:
    obs, action, cut = _sequences(4)
    start = model.latest(obs, action, cut, None)
    assert start["filled"].sum(1).tolist() == [0, 2, 3, 3]
    steps, states = model.imagine(start, policy, 5, generator)
    stoch = states[..., :12]
    for row in range(4):  # each row alone: the filled part of its context, and what it imagined
        taken = torch.cat([stoch[row, :5], policy.action_features(steps.action[row])], -1)
        tokens = torch.cat([start["context"][row][start["filled"][row]], taken])
        h = model.sequence.read(model.mixer(tokens[None]), torch.zeros(1, len(tokens)))[0, -5:]
        torch.testing.assert_close(steps.obs[row, 1:, 12:], h[:-1], atol=1e-5, rtol=0)
        torch.testing.assert_close(states[row, -1, 12:], h[-1], atol=1e-5, rtol=0)
        torch.testing.assert_close(steps.discount[row], model.continues(h).squeeze(-1).sigmoid())
        torch.testing.assert_close(steps.reward[row], model.reward(h).mean())
    found = model.observe(model.initial(4), obs, action, cut, None)
    torch.testing.assert_close(steps.obs[:, 0], model.features(found)[:, -1], atol=1e-5, rtol=0)


@sabotaged_by("foresight.nets.models.world_model.compiled_step", lambda f: lambda step, backend: step)
@torch.no_grad()
def test_compiled_imagination_is_the_same() -> None:
    model, graphs = _model(), []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    start = model.latest(*_sequences(4), None)
    found = []
    for model.backend in (None, backend):
        steps, features = model.imagine(start, Uniform(), 5, torch.Generator().manual_seed(0))
        found.append((features, steps.reward, steps.discount))
    assert 1 <= len(graphs) <= 3  # the cache grows: its length becomes a variable
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)


class Scripted(Uniform):
    """A policy that takes `actions` `[N, H]` in order and draws nothing."""

    def __init__(self, actions: Tensor) -> None:
        super().__init__()
        self.rest = list(actions.unbind(1))

    def __call__(self, features: Tensor) -> Scripted:
        return self

    def sample(self, generator: torch.Generator) -> Tensor:
        return self.rest.pop(0)


def _unfilled(original: Callable[..., object]) -> Callable[..., object]:
    """The context is not read."""
    return lambda self, state: original(self, {**state, "filled": torch.zeros_like(state["filled"])})


@sabotaged_by("foresight.nets.models.storm.STORM.begin", _unfilled)
@BOTH
@torch.no_grad()
def test_steps_taken_one_by_one_are_those_of_imagination(kind: str) -> None:
    model = _model(kind, window=8)
    obs, action, cut = _sequences(4)
    found = model.observe(model.initial(4), obs, action, cut, None)
    actions = torch.randint(2, (4, 5), generator=torch.Generator().manual_seed(2))
    one, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    steps, states = model.imagine(model.latest(obs, action, cut, None), Scripted(actions), 5, one)
    ahead = states[:, 1:]
    now = model.begin({name: x[:, -1] for name, x in found.items()})
    for t in range(5):
        now, reward, continuation = model.advance(now, torch.eye(2)[actions[:, t]], other)
        torch.testing.assert_close(model.features(now), ahead[:, t], atol=1e-5, rtol=0)
        torch.testing.assert_close(reward, steps.reward[:, t], atol=1e-5, rtol=0)
        torch.testing.assert_close(continuation, steps.discount[:, t], atol=1e-5, rtol=0)
    assert model.decode(now).shape == (4, 3)


@sabotaged_by("foresight.nets.models.storm.CausalTransformer.window", change("slots", lambda n: n + 1))
@torch.no_grad()
def test_a_token_leaves_the_window_when_it_is_full() -> None:
    net = CausalTransformer(16, 1, 2)  # one layer: what is in the window has not read what is not
    x = torch.randn(3, 12, 16, generator=torch.Generator().manual_seed(2))
    filled = torch.tensor([[False] * 3, [False, True, True], [True] * 3])
    window = net.window(net.prefill(x[:, :3], filled, 0)[1], 4)
    for t in range(3, 12):
        h, window = net.slide(x[:, t], window)
        for row, first in ((0, 3), (1, 1), (2, 0)):
            seen = x[row : row + 1, max(first, t - 4) : t + 1]
            torch.testing.assert_close(h[row], net.read(seen, torch.zeros(seen.shape[:2]))[0, -1])


@sabotaged_by("foresight.ops.latent.balanced_kl", swap("posterior", "prior"))
def test_dynamics_train_the_prior_and_representation_the_posterior() -> None:
    generator = torch.Generator().manual_seed(3)
    model = _model()
    obs, action, cut = _sequences()
    batch = Trajectory(obs, action, torch.zeros(4, 7), torch.ones(4, 7), cut)
    for name, trained in (("dynamics", model.prior_logits), ("representation", None)):
        model.free_nats = 0.0
        terms, state = model.loss(model.initial(4), batch, arrivals(batch), generator)
        grads = torch.autograd.grad(
            terms[name].sum(), [model.prior_logits.weight, state["posterior"]], allow_unused=True, retain_graph=True
        )
        assert (grads[0] is not None) == (trained is not None)
        newest = 0 if grads[1] is None else grads[1][:, -1].abs().sum()  # others are also inputs of the transformer
        assert (newest == 0) == (trained is not None)
        assert terms[name][0, 3] == 0 and terms[name][0, 0] == 0 and terms[name][0, 1] > 0  # the first of an episode
        model.free_nats = 100.0
        floor, _ = model.loss(model.initial(4), batch, arrivals(batch), generator)
        assert floor[name][0, 1] == 100
        stopped = torch.autograd.grad(floor[name].sum(), list(model.parameters()), allow_unused=True)
        assert all(g is None or not g.any() for g in stopped)


def test_dropout_is_drawn_from_the_generator_and_only_in_training() -> None:
    model = _model()
    model.sequence = CausalTransformer(16, 2, 2, dropout=0.5)
    obs, action, cut = _sequences()
    batch = Trajectory(obs, action, torch.zeros(4, 7), torch.ones(4, 7), cut)
    before = torch.random.get_rng_state()
    found = [
        model.loss(model.initial(4), batch, arrivals(batch), torch.Generator().manual_seed(s))[1] for s in (0, 0, 1)
    ]
    assert torch.equal(found[0]["deter"], found[1]["deter"]) and not torch.equal(found[0]["deter"], found[2]["deter"])
    seen = [model.observe(model.initial(4), obs, action, cut, None)["deter"] for _ in range(2)]
    assert torch.equal(*seen) and torch.equal(before, torch.random.get_rng_state())


def test_transformer_and_lstm_have_equally_many_weights() -> None:
    count = [sum(p.numel() for p in SEQUENCES[kind](64).parameters() if p.ndim == 2) for kind in SEQUENCES]
    assert count[0] == count[1] == 2 * 8 * 64**2


def chain(rows: int, seed: int) -> Trajectory:
    """A process of three states, shown as signs: 0 → 1 → 2 → 0 or (0.5) the end; leaving 0, 1, 2 earns 1, 0, -1.

    With action 1 the reward is doubled. Rows as `data.sequences` stores them: the final observation has no action.
    """
    generator = torch.Generator().manual_seed(seed)
    shown = 2 * torch.eye(3) - 1
    steps, reward, discount, cut, acts = [], [], [], [], []
    state = 0
    for _ in range(rows):
        final = state == 3
        action = int(torch.randint(2, (1,), generator=generator))
        steps.append(-torch.ones(3) if final else shown[state])
        ends = state == 2 and float(torch.rand(1, generator=generator)) < 0.5
        reward.append(0.0 if final else (1.0 - state) * (1 + action))
        discount.append(0.0 if final or ends else 0.9)
        cut.append(float(final))
        acts.append(torch.eye(2)[action])
        state = 0 if final else 3 if ends else (state + 1) % 3
    columns = [torch.tensor(x).unsqueeze(0) for x in (reward, discount, cut)]
    return Trajectory(torch.stack(steps).unsqueeze(0), torch.stack(acts).unsqueeze(0), *columns)


@sabotaged_by("foresight.data.sequences.arrivals", lambda f: lambda batch: _late(f(batch)))
@sabotaged_by("foresight.nets.models.storm.STORM.carry", change("action", lambda a: 1 - a))
@BOTH
def test_it_learns_reward_and_continuation_of_a_known_process(kind: str) -> None:
    model = _of_chain(kind, arrivals)
    shown, none = 2 * torch.eye(3) - 1, torch.zeros(2, 1)
    with torch.no_grad():
        carry = model.initial(2)
        for state in range(3):
            seen = model.observe(carry, shown[state].expand(2, 1, 3), none.unsqueeze(-1).expand(2, 1, 2), none, None)
            carry = model.carry({name: x[:, 0] for name, x in seen.items()}, torch.eye(2))
            after = model.observe(carry, shown[0].expand(2, 1, 3), none.unsqueeze(-1).expand(2, 1, 2), none, None)
            reward = model.reward(after["deter"]).mean()[:, 0]
            torch.testing.assert_close(reward, (1.0 - state) * torch.tensor([1.0, 2.0]), atol=0.15, rtol=0)
            continued = model.continues(after["deter"]).sigmoid().flatten()
            torch.testing.assert_close(continued, torch.full((2,), 0.45 if state == 2 else 0.9), atol=0.1, rtol=0)


def assert_earned_before(batch: Trajectory, found: Arrival) -> None:
    """What arrives at a row is what the row before it earned, but for the first of an episode."""
    known = 1 - batch.cut[:, :-1]
    assert torch.equal(found.known[:, 1:], known)
    assert torch.equal(found.reward[:, 1:], batch.reward[:, :-1] * known) and batch.reward.any()


@functools.cache
def _of_chain(kind: str, arrivals: Callable[[Trajectory], Arrival]) -> STORM:
    """A model of the chain; `arrivals` are an argument so that mutants of it have models of their own."""
    model, generator = _model(kind, scale=1.0, layers=1), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    whole = chain(1024, 0)
    batch = dataclasses.replace(
        whole, **{f.name: v.view(64, 16, *v.shape[2:]) for f in dataclasses.fields(whole)
                  if isinstance(v := getattr(whole, f.name), Tensor)},
    )  # fmt: skip
    arrival = arrivals(batch)
    assert_earned_before(batch, arrival)
    for step in range(250):
        terms, _ = model.loss(model.initial(64), batch, arrival, generator)
        loss = sum(terms[name].mean() for name in terms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-2 if step < 180 else 2e-3
        optimizer.step()
    return model


def _late(found):
    return type(found)(*(torch.roll(x, 1, 1) for x in found))

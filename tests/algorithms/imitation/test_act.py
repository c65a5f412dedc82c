"""ACT as a program: ensembling as in the paper's algorithm, the latent, padding, acting, resuming, and mistakes."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.imitation import act
from foresight.errors import UserError
from foresight.training import offline
from tests.algorithms.imitation.lines import ENV, SIGHTS, SPACES, line, seen
from tests.algorithms.small_runs import last
from tests.algorithms.states import forgets, restored, weights
from tests.sabotage import change, returns, sabotaged_by, scaled

CONFIG = act.Config(
    steps=3, data=("d",), chunk=4, action_steps=2, dim=8, heads=2, hidden=16, posterior_layers=1, encoder_layers=1,
    latent=2, batch_size=8,
)  # fmt: skip


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line as the data, and a yield after two updates."""
    monkeypatch.setattr(offline, "read", lambda *_: line())
    monkeypatch.setattr(act, "REPORT", 2)


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in ("policy", "optimizer", "sampler")])
def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    before = torch.random.get_rng_state()
    whole = last(act, CONFIG, ENV)
    stopped = next(state for _, _, state in act.train(CONFIG, ENV))
    resumed = last(act, CONFIG, ENV, restored(act, stopped, ENV))
    assert stopped.step == 2 and resumed.step == 3 and torch.equal(weights(resumed), weights(whole))
    assert torch.equal(before, torch.random.get_rng_state())


@sabotaged_by("foresight.algorithms.imitation.act.ensembled", change("m", lambda m: -m))
@sabotaged_by("foresight.algorithms.imitation.act.ensembled", change("count", torch.zeros_like))
@sabotaged_by("foresight.algorithms.imitation.act.reset_carry", lambda f: lambda carry, cut: carry)
def test_the_ensemble_is_the_weighted_mean_of_all_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 2 with a buffer of all chunks; the second row starts a new episode after step 2."""
    generator = torch.Generator().manual_seed(0)
    chunks = torch.randn(7, 2, 4, 2, generator=generator)
    made = iter(chunks)
    monkeypatch.setattr(act, "predict", lambda state, obs: next(made))
    state, carry = act.build(dataclasses.replace(CONFIG, ensemble=0.5), SPACES), None
    for t in range(7):
        action, _, carry = act.act(state, torch.zeros(2, 2), carry)
        for row, began in ((0, 0), (1, 3 if t > 2 else 0)):
            predictions = [chunks[s, row, t - s] for s in range(max(began, t - 3), t + 1)]  # the oldest first
            w = [math.exp(-0.5 * i) for i in range(len(predictions))]
            expected = sum(x * y for x, y in zip(w, predictions, strict=True)) / sum(w)
            torch.testing.assert_close(action[row], expected)
        carry = act.reset_carry(carry, torch.tensor([0.0, float(t == 2)]))


def test_without_an_ensemble_chunks_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that count from the time observed: action t is t, and a chunk is predicted every two steps."""
    asked = []

    def count(state, obs):
        asked.append(len(obs))
        return (obs[:, :1] + torch.arange(4.0)).unsqueeze(-1).expand(-1, -1, 2)

    monkeypatch.setattr(act, "predict", count)
    state, carry = act.build(dataclasses.replace(CONFIG, ensemble=None), SPACES), None
    for t in range(5):
        action, _, carry = act.act(state, torch.full((3, 2), float(t)), carry)
        assert (action == t).all()
    assert asked == [3, 3, 3]


@sabotaged_by("foresight.nets.sequence.chunker.ActionChunker.posterior", change("real", torch.ones_like))
def test_padding_changes_nothing() -> None:
    """What stands after the end of an episode is invisible to the loss, and so to the gradient."""
    found = []
    for filler in (0.0, 9.0):
        state = act.build(dataclasses.replace(CONFIG, dropout=0.0), SPACES)
        action = torch.ones(2, 4, 2)
        action[:, 2:] = filler
        real = torch.tensor([[1.0, 1, 0, 0]] * 2)
        found.append(act.update(state, torch.ones(2, 2), action, real)["loss"])
        found.append(weights(state))
    assert found[0] == found[2] and torch.equal(found[1], found[3])


@sabotaged_by("foresight.nets.imitation.MeanStd.encode", scaled(2.0))
def test_it_learns_the_line() -> None:
    """Action t is 2 t, the second dimension constant: better than the mean by far, and the constant exact."""
    config = dataclasses.replace(
        CONFIG, steps=80, learning_rate=1e-2, batch_size=32, dim=16, dropout=0.0, ensemble=None, latent=1
    )
    state = last(act, config, ENV)
    obs = torch.tensor([[0.0, 1], [2.0, 1]])
    expected = 2 * (obs[:, :1] + torch.arange(4))
    chunk = act.predict(state, obs)
    assert (chunk[..., 0] - expected).abs().mean() < 1 and (chunk[..., 1] - 3).abs().max() < 0.3


@pytest.mark.parametrize("kind", SIGHTS)
@sabotaged_by("foresight.nets.sequence.vit.pixels", returns(lambda x: 0 * x))
def test_pictures_are_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the network reads depends on the picture, whose encoder is trained; a constant vector is 0."""
    data = dataclasses.replace(line(), obs=seen(kind, line().obs))
    monkeypatch.setattr(offline, "read", lambda *_: data)
    env = SimpleNamespace(spaces=SPACES._replace(obs=SIGHTS[kind]))
    config = dataclasses.replace(CONFIG, images="vit:12", steps=2, ensemble=None)
    state = last(act, config, env)
    before = act.build(config, env.spaces).policy.inputs.seen.nets[0].encoder.embed.weight
    assert not torch.equal(before, state.policy.inputs.seen.nets[0].encoder.embed.weight)
    obs = seen(kind, torch.tensor([[0.0, 1], [5.0, 1]]))
    features = state.policy.inputs(obs)
    assert (features[0] - features[1]).abs().max() > 0.01 and (features[:, 64:] == 0).all()
    action, _, carry = act.act(state, obs)
    assert torch.equal(action, act.predict(state, obs)[:, 0])
    assert torch.equal(act.act(state, obs, carry)[0], act.predict(state, obs)[:, 1])


def test_a_chunk_may_be_shorter_than_action_steps_where_all_predictions_are_averaged() -> None:
    config = dataclasses.replace(CONFIG, chunk=4, action_steps=8, ensemble=0.01)
    action = act.act(act.build(config, SPACES), torch.zeros(3, 2))[0]
    assert action.shape == (3, *SPACES.action.shape)


def test_a_chunk_may_be_one_action() -> None:
    state = last(act, dataclasses.replace(CONFIG, steps=1, chunk=1), ENV)
    assert act.predict(state, torch.zeros(3, 2)).shape == (3, 1, *SPACES.action.shape)


def test_mistakes_are_named() -> None:
    for fields, message in (
        ({"chunk": 8}, "chunk 8 is longer than every episode of the data: the longest has 6 steps"),
        ({"ensemble": None, "action_steps": 5}, "action_steps must be between 1 and 4, not 5"),
        ({"heads": 3}, "dim must be an even multiple of heads, 3, not 8"),
    ):
        with pytest.raises(UserError, match=message):
            last(act, dataclasses.replace(CONFIG, **fields), ENV)
    mission = gs.Dict({"mission": gs.Box(0, 255, (8,), np.uint8)})
    for spaces, message in (
        (SPACES._replace(action=gs.Discrete(2)), "acts in a Box with one dim.*Imitate with: behavior_cloning"),
        (SPACES._replace(action=gs.Discrete(2), obs=mission), "acts in a Box with one dim.*Imitate with: vla"),
        (SPACES._replace(obs=mission), "does not read the instruction 'mission'.*Imitate it with: vla"),
    ):
        with pytest.raises(UserError, match=message):
            act.build(CONFIG, spaces)

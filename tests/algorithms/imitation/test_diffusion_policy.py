"""Diffusion policy as a program: two modes stay two, chunks start at T_o - 1, acting, resuming, and mistakes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.imitation import diffusion_policy as dp
from foresight.errors import UserError
from foresight.ops.generative import diffusion
from foresight.training import offline
from tests.algorithms.imitation.lines import ENV, SIGHTS, SPACES, TWO_MODES, line, seen, two_modes
from tests.algorithms.small_runs import last
from tests.algorithms.states import forgets, restored, weights
from tests.sabotage import change, sabotaged_by, scaled

CONFIG = dp.Config(
    steps=3, data=("d",), horizon=4, action_steps=2, widths=(8, 16), groups=4, kernel=3, embedding=8, dim=8, layers=1,
    heads=2, batch_size=8, diffusion_steps=10, denoising_steps=5, lr_warmup=5,
)  # fmt: skip


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line as the data, and a yield after two updates."""
    monkeypatch.setattr(offline, "read", lambda *_: line())
    monkeypatch.setattr(dp, "REPORT", 2)


@pytest.mark.parametrize("denoiser", dp.DENOISERS)
@sabotaged_by("tests.algorithms.states.restored",
              *[forgets(name) for name in ("policy", "average", "optimizer", "sampler")])  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_one(denoiser: str) -> None:
    config = dataclasses.replace(CONFIG, denoiser=denoiser)
    before = torch.random.get_rng_state()
    whole = last(dp, config, ENV)
    stopped = next(state for _, _, state in dp.train(config, ENV))
    resumed = last(dp, config, ENV, restored(dp, stopped, ENV))
    assert stopped.step == 2 and resumed.step == 3 and torch.equal(weights(resumed), weights(whole))
    assert torch.equal(before, torch.random.get_rng_state())


@sabotaged_by("foresight.ops.generative.diffusion.predict_clean", change("noise", torch.zeros_like))
@sabotaged_by("foresight.ops.generative.diffusion.add_noise", change("noise", torch.zeros_like))
def test_two_modes_stay_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the demonstrations act -1 and half 1: so do the samples, and whole chunks keep to one of them."""
    monkeypatch.setattr(offline, "read", lambda *_: two_modes())
    state = _of_two_modes(diffusion.add_noise)
    state.generator.manual_seed(CONFIG.seed + 1)
    chunks = dp.sample(state, torch.zeros(200, 1, 1)).squeeze(-1)
    assert (chunks.abs() > 0.8).float().mean() > 0.9
    high = (chunks > 0).float()
    assert 0.3 < high.mean() < 0.7 and (high.mean(1) - 0.5).abs().mean() > 0.45


@functools.cache
def _of_two_modes(add_noise: Callable[..., torch.Tensor]) -> dp.State:
    """A trained policy; `add_noise` is an argument so that its mutant has a policy of its own, which soon shows."""
    config = dataclasses.replace(
        CONFIG, steps=250, learning_rate=1e-2, batch_size=64, obs_steps=1, action_steps=4, widths=(16,), embedding=16,
        diffusion_steps=20, denoising_steps=20,
    )  # fmt: skip
    for step, metrics, state in dp.train(config, SimpleNamespace(spaces=TWO_MODES)):  # noqa: B007
        assert step != 40 or metrics["loss"] < 0.6  # 1 where no noise can be seen
    return state


@pytest.mark.parametrize("kind", SIGHTS)
@sabotaged_by("foresight.algorithms.imitation.diffusion_policy.remembered",
              lambda f: lambda past, obs, steps: f(past, obs, 0 * steps))  # fmt: skip
def test_every_step_of_pictures_is_encoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The condition of T_o steps depends on the older picture, the encoder is trained, and a vector is scaled."""
    data = dataclasses.replace(line(), obs=seen(kind, line().obs))
    monkeypatch.setattr(offline, "read", lambda *_: data)
    env = SimpleNamespace(spaces=SPACES._replace(obs=SIGHTS[kind]))
    config = dataclasses.replace(CONFIG, denoiser="mlp", images="vit:12", steps=2, action_steps=1)
    state = last(dp, config, env)
    before = dp.build(config, env.spaces).policy.seen.nets[0].encoder.embed.weight
    assert not torch.equal(before, state.policy.seen.nets[0].encoder.embed.weight)
    steps = [seen(kind, torch.full((3, 2), float(t))) for t in (0, 1)]
    found = []
    for first in steps:
        _, _, carry = dp.act(state, first)
        _, _, carry = dp.act(state, steps[1], carry)
        found.append(state.average.condition(carry["obs"]))
    assert found[0].shape == (3, 2, 64 + 2 * (kind == "dict"))
    same = (found[0] == found[1]).all(-1)
    assert same[:, 1].all() and not same[:, 0].any() and (found[0][..., 64:] == 0).all()  # constant in the data


def _widened(original):
    """No division by zero, but a constant dimension gets a range."""

    def fit(self, values):
        original(self, values)
        self.high.copy_(torch.maximum(self.high, self.low + 1))

    return fit


@sabotaged_by("foresight.nets.imitation.MinMax.fit", _widened)
def test_constant_dimensions_survive_and_actions_stay_in_the_data() -> None:
    state = last(dp, dataclasses.replace(CONFIG, steps=2), ENV)
    chunk = dp.sample(state, line().obs[:2].view(1, 2, 2))
    assert (chunk[..., 1] == 3).all() and chunk[..., 0].min() >= 0 and chunk[..., 0].max() <= 10
    assert state.average.actions.low.tolist() == [0, 3] and state.average.actions.high.tolist() == [10, 3]


@sabotaged_by("foresight.algorithms.imitation.diffusion_policy.taken",
              lambda f: lambda chunk, obs_steps, action_steps: f(chunk, 1, action_steps))  # fmt: skip
@sabotaged_by("foresight.algorithms.imitation.diffusion_policy.reset_carry", lambda f: lambda carry, cut: carry)
def test_chunks_are_taken_from_the_newest_observation_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks that count from the oldest observation's step on, action t is t: also after a reset."""
    seen = []

    def count(state, obs):
        seen.append(obs.clone())
        oldest = obs[:, -1, 0] - 2  # three observations are read
        return (oldest[:, None] + torch.arange(6.0)).unsqueeze(-1).expand(-1, -1, 2)

    monkeypatch.setattr(dp, "sample", count)
    config = dataclasses.replace(CONFIG, obs_steps=3, horizon=6, action_steps=2)
    state, carry, time = dp.build(config, SPACES), None, torch.tensor([0.0, 0])
    for t in range(7):
        action, _, carry = dp.act(state, time[:, None].expand(2, 2), carry)
        assert action[:, 0].tolist() == time.tolist()
        cut = torch.tensor([0.0, float(t == 2)])
        carry, time = dp.reset_carry(carry, cut), (time + 1) * (1 - cut)
    assert [len(obs) for obs in seen] == [2, 2, 1, 1, 1, 1]  # the second row is reset after step 2
    assert seen[1][..., 0].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert seen[2][..., 0].tolist() == [[0, 0, 0]]  # a new episode has no past


@sabotaged_by("foresight.data.episodes.Episodes.around",
              lambda f: lambda self, start, offsets: f(self, start, [k + (k > 0) for k in offsets]))  # fmt: skip
def test_a_chunk_begins_with_the_oldest_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the data, action t is 2 t and observation t is t, so the first action is twice the oldest observation."""
    pairs = []
    monkeypatch.setattr(dp, "update", lambda state, obs, action: pairs.append((obs, action)) or _stepped(state))
    last(dp, dataclasses.replace(CONFIG, steps=3), ENV)
    for obs, action in pairs:
        assert obs.shape == (8, 2, 2) and action.shape == (8, 4, 2)
        inside = (obs[:, 1, 0] > obs[:, 0, 0]) & (action[:, -1, 0] < 10)  # no end of an episode is repeated
        assert torch.equal(action[:, 0, 0], 2 * obs[:, 0, 0]) and inside.any()
        assert torch.equal(action[inside][:, :, 0], 2 * (obs[inside][:, :1, 0] + torch.arange(4)))


def _stepped(state):
    state.step += 1
    return {"loss": 0.0}


@sabotaged_by("foresight.algorithms.imitation.diffusion_policy.update", scaled(2.0))
def test_the_loss_is_that_of_predicting_no_noise_for_a_silent_network() -> None:
    """A network that always predicts 0 has the loss E ε² = 1."""
    state = dp.build(CONFIG, SPACES)
    for parameter in state.policy.net.out[-1].parameters():
        parameter.data.zero_()
    state.policy.fit(line())
    metrics = dp.update(state, torch.zeros(2_000, 2, 2), torch.zeros(2_000, 4, 2))
    assert metrics["loss"] == pytest.approx(1, abs=0.04)


@sabotaged_by("foresight.training.optim.track", lambda f: lambda target, source, rate: f(target, source, 1.0))
def test_the_average_is_what_acts() -> None:
    state = last(dp, CONFIG, ENV)
    assert not torch.allclose(weights(state)[:500], torch.cat([p.flatten() for p in state.average.parameters()])[:500])
    generator = state.generator.get_state()
    first = dp.sample(state, torch.ones(1, 2, 2))
    state.generator.set_state(generator)
    for parameter in state.policy.parameters():
        parameter.data.zero_()
    assert torch.equal(first, dp.sample(state, torch.ones(1, 2, 2)))


@sabotaged_by("foresight.ops.generative.diffusion.levels", lambda f: lambda steps, used: f(steps, 5))
@sabotaged_by("foresight.ops.generative.diffusion.step_back", change("eta", lambda eta: 0.0))
def test_eta_1_on_all_levels_draws_the_noise_of_ddpm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ho et al. 2020, algorithm 2, written out with the same noise."""
    state = dp.build(dataclasses.replace(CONFIG, eta=1.0, denoising_steps=10), SPACES)
    a, net = diffusion.squared_cosine(10), state.average.net.eval()
    beta = 1 - a[1:] / a[:-1]
    obs = torch.rand(3, 2, 2)
    found = dp.sample(state, obs)
    generator = torch.Generator().manual_seed(CONFIG.seed + 1)
    x = torch.randn(3, 4, 2, generator=generator)
    with torch.no_grad():
        for k in range(10, 0, -1):
            noise = net(x, torch.full((3,), k), state.average.condition(obs))
            clean = ((x - (1 - a[k]).sqrt() * noise) / a[k].sqrt()).clamp(-1, 1)
            b = beta[k - 1]
            mean = (a[k - 1].sqrt() * b * clean + (1 - b).sqrt() * (1 - a[k - 1]) * x) / (1 - a[k])
            z = torch.randn(3, 4, 2, generator=generator) if k > 1 else 0
            x = mean + (b * (1 - a[k - 1]) / (1 - a[k])).sqrt() * z
    torch.testing.assert_close(found, x, atol=1e-4, rtol=1e-4)


def test_mistakes_are_named() -> None:
    for fields, message in (
        ({"horizon": 2}, r"horizon must be at least obs_steps - 1 \+ action_steps = 3, not 2"),
        ({"horizon": 5}, "horizon must be a multiple of 2"),
        ({"widths": (6,)}, "widths must be multiples of groups, 4"),
        ({"kernel": 4}, "kernel must be odd"),
        ({"denoising_steps": 11}, "denoising_steps must be between 1 and 10, not 11"),
        ({"kernel": -1}, "kernel must be at least 1"),
        ({"embedding": 1}, "embedding must be at least 2"),
        ({"dim": 1}, "dim must be at least 2"),
        ({"denoiser": "mpl"}, "Did you mean 'mlp'"),
        ({"horizon": 8}, "horizon 8 is longer than every episode of the data: the longest has 6 steps"),
    ):
        with pytest.raises(UserError, match=message):
            last(dp, dataclasses.replace(CONFIG, **fields), ENV)
    with pytest.raises(UserError, match="acts in a Box with one dim"):
        dp.build(CONFIG, SPACES._replace(action=gs.Discrete(2)))

"""DreamerV3 as a program: settings, observations, resuming, what it learns, and mistakes."""

from __future__ import annotations

import dataclasses

import gymnasium.spaces as gs
import numpy as np
import pytest
import torch

from foresight.algorithms.world import dreamer
from foresight.data.sequences import Arrival
from foresight.envs.base import Spaces
from foresight.errors import NotFinite, UserError
from foresight.nets.sequence.vit import ViT
from foresight.runtime.monitoring.health import Health
from tests.algorithms.policy.small_envs import Bandit, choice, hidden_choice, sides
from tests.algorithms.small_runs import last
from tests.algorithms.states import assert_seeds_decide, continued, forgets, halfway_and_end, restored, weights
from tests.algorithms.world.world_runs import DREAMER, near, reward_of, taught, watch_rows
from tests.sabotage import change, flip_sign, sabotaged_by


def test_it_counts_steps_and_reports_its_metrics() -> None:
    config = dataclasses.replace(DREAMER, steps=1_500, train_ratio=0.2)
    seen = list(dreamer.train(config, choice()))
    assert [step for step, _, _ in seen] == [1024, 1504]
    for step, metrics, state in seen:
        assert state.step in (step, 1504)
        assert set(dreamer.METRICS) <= set(metrics) and all(isinstance(x, float) for x in metrics.values())
    assert state.gradient_steps == int(0.2 * (1504 - 32) / 64)  # of the rollouts after learning_starts


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    assert_seeds_decide(dreamer, DREAMER, choice)


FIELDS = (
    "model", "actor", "critic", "slow_critic", "spread", "optimizer", "replay", "generator", "inner", "sampler", "due",
)  # fmt: skip


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in FIELDS])
def test_a_loaded_run_continues_as_the_one_in_memory() -> None:
    config = dataclasses.replace(DREAMER, train_ratio=6.7)  # a fraction of an update is due where it stops
    halfway, whole = halfway_and_end(dreamer, config, near, 224, _spread)
    resumed = continued(dreamer, restored(dreamer, halfway, near()), near(), 224)
    assert whole.step == resumed.step == 224
    assert torch.equal(weights(whole), weights(resumed))
    assert whole.episodes == resumed.episodes


def _spread(state: dreamer.State) -> None:
    state.spread.estimate.fill_(2.0)  # above its minimum of 1, where it would not matter


def _late(found: Arrival) -> Arrival:
    return Arrival(*(torch.roll(x, 1, 1) for x in found))


@sabotaged_by("foresight.training.imagination.actor_loss", flip_sign)
@sabotaged_by("foresight.data.sequences.arrivals", lambda f: lambda batch: _late(f(batch)))
def test_it_learns_the_right_action(monkeypatch: pytest.MonkeyPatch) -> None:
    env, config = choice(2), dataclasses.replace(DREAMER, steps=1_000, train_ratio=24.0)
    state = dreamer.build(config, env.spaces)
    random = reward_of(dreamer, state, choice(2, 900), explore=True).mean()
    assert 0.4 < random < 0.6
    state = taught(dreamer, config, env, monkeypatch, state, watch_rows, worst=0.2)
    assert reward_of(dreamer, state, env).mean() == 1
    assert torch.equal(dreamer.act(state, env.reset(0))[0], dreamer.act(state, env.reset(0))[0])


def test_it_learns_without_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    env, config = choice(2), dataclasses.replace(DREAMER, steps=1_500, train_ratio=12.0, decoder=False)
    state = taught(dreamer, config, env, monkeypatch)
    assert reward_of(dreamer, state, env).mean() == 1


def test_continuous_actions_are_learned_in_units_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    env, config = near(), dataclasses.replace(DREAMER, steps=1_000, train_ratio=16.0)
    state = dreamer.build(config, env.spaces)
    drawn = dreamer.act(state, near(16_000).reset(0), explore=True)[0]
    torch.testing.assert_close(drawn.mean(0), torch.tensor([0.0, 2.0]), atol=0.05, rtol=0)  # uniform at first
    torch.testing.assert_close(drawn.std(0), torch.full((2,), 4 / 12**0.5), atol=0.03, rtol=0)
    state = taught(dreamer, config, env, monkeypatch, state)
    assert reward_of(dreamer, state, env).mean() > 0.85  # of random ones: -1.3


def pictures() -> Bandit:
    """Which half of an image is bright is the action to take."""
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    images[0, :, :, :4], images[1, :, :, 4:] = 255, 255
    spaces = Spaces(gs.Box(0, 255, (1, 8, 8), np.uint8), gs.Discrete(2))
    return Bandit(spaces, 2, lambda c: images[c], lambda c, a: a == c)


def test_pixels_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    env = pictures()
    state = taught(dreamer, dataclasses.replace(DREAMER, steps=1_000, train_ratio=16.0), env, monkeypatch)
    assert reward_of(dreamer, state, env).mean() == 1


def test_a_vision_transformer_is_trained_as_the_encoder() -> None:
    config = dataclasses.replace(DREAMER, images="vit:4")
    before, after = dreamer.build(config, pictures().spaces), last(dreamer, config, pictures())
    assert isinstance(after.model.obs.network, ViT) and len(after.model.obs.network.blocks) == 4
    pairs = zip(before.model.obs.network.parameters(), after.model.obs.network.parameters(), strict=True)
    assert all((a - b).abs().max() > 1e-4 for a, b in pairs)


def test_it_imagines_from_the_last_rows_only_where_that_is_asked() -> None:
    states = [last(dreamer, dataclasses.replace(DREAMER, imagined_last=n), choice()) for n in (0, 4, 2)]
    assert torch.equal(weights(states[0]), weights(states[1]))  # all 4 of a sequence
    assert not torch.equal(weights(states[0]), weights(states[2]))


def test_latents_are_refreshed_where_sequences_were_trained_on() -> None:
    state = last(dreamer, dataclasses.replace(DREAMER, train_ratio=1e-9), choice())
    streams = state.replay.streams
    before = [stream.storage.extras["deter"].clone() for stream in streams]
    torch.manual_seed(0)
    with torch.no_grad():
        for p in state.model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    carry, batch, arrival = dreamer.sample(state)
    dreamer.update(state, carry, batch, arrival)
    key = batch.extras["key"]
    changed = [(a != stream.storage.extras["deter"]).any(-1)[0] for a, stream in zip(before, streams, strict=True)]
    touched = [torch.zeros(len(x), dtype=torch.bool) for x in changed]
    for one in key.flatten().tolist():
        touched[one // 250][one % 250] = True
    for a, b in zip(changed, touched, strict=True):
        assert torch.equal(a, b)


@sabotaged_by("foresight.training.imagination.reach_weights", change("first", torch.ones_like))
def test_what_is_imagined_after_a_termination_has_no_weight() -> None:
    """Final observations are states of the model too, but nothing is decided there."""
    state = last(dreamer, DREAMER, choice())
    carry, batch, arrival = dreamer.sample(state)
    for module in (state.actor, state.critic):
        module.requires_grad_(True)
    over = arrival._replace(known=torch.ones_like(arrival.known), discount=torch.zeros_like(arrival.discount))
    before = weights(dataclasses.replace(state, model=None, critic=None, slow_critic=None))
    state.optimizer.state.clear()  # no momentum
    dreamer.update(state, carry, batch.replace(cut=torch.ones_like(batch.cut)), over)
    after = weights(dataclasses.replace(state, model=None, critic=None, slow_critic=None))
    assert torch.equal(before, after)


IMAGE = gs.Box(0, 255, (1, 8, 8), np.uint8)


def test_rewards_beyond_the_bins_are_counted() -> None:
    state = last(dreamer, DREAMER, choice())
    carry, batch, arrival = dreamer.sample(state)
    assert dreamer.update(state, carry, batch, arrival)["saturated"] == 0
    huge = arrival._replace(reward=torch.full_like(arrival.reward, 1e9))
    share = dreamer.update(state, carry, batch, huge)["saturated"]
    assert share == 0.5  # all of the rewards, none of the returns
    assert "50.0% of the two-hot targets" in Health().check(1, {"saturated": share})[0]


def test_a_term_that_is_not_finite_is_named_and_changes_no_weight() -> None:
    state = last(dreamer, DREAMER, choice())
    carry, batch, arrival = dreamer.sample(state)
    before = weights(state)
    bad = arrival._replace(reward=torch.full_like(arrival.reward, torch.nan))
    with pytest.raises(NotFinite, match="The loss term reward became NaN"):
        dreamer.update(state, carry, batch, bad)
    assert torch.equal(weights(state), before)


MISTAKES = [
    ({"num_envs": 4}, "num_envs is 4, but the environment has num_envs 8"),
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"gamma": 1.5}, "gamma must be between 0 and 1"),
    ({"train_ratio": 0.0}, "train_ratio must be above 0, not 0.0"),
    ({"train_ratio": -1.0}, "train_ratio must be above 0, not -1.0"),
    ({"imagined_last": 5}, "imagined_last 5 is more than sequence_length 4"),
    ({"imagined_last": 1}, "Set imagined_last to at least 2, or to 0"),
    ({"unimix": 1.0}, "unimix is a share from 0 to below 1"),
    ({"blocks": 5}, "deter 32 is no multiple of blocks 5"),
    ({"replay_size": 32}, "replay_size 32 is too small"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_named(options, message) -> None:
    with pytest.raises(UserError, match=message):
        next(dreamer.train(dataclasses.replace(DREAMER, **options), choice()))


def test_spaces_that_are_not_supported_are_named() -> None:
    box = gs.Box(-1, 1, (3,), np.float32)
    for spaces, message in (
        (Spaces(box, gs.Box(-np.inf, np.inf, (2,), np.float32)), "bounded Box actions"),
        (sides().spaces, "images of 8, 16, 32, 64 or 128 pixels, not 36 x 36"),
        (hidden_choice().spaces, "action_mask"),
        (Spaces(gs.Box(0, 1, (8, 8, 3), np.float32), gs.Discrete(2)), "one image .* or numbers in one dim, .*flatten"),
        (Spaces(gs.Dict({"view": IMAGE, "speed": box}), gs.Discrete(2)), "in a Dict, as view.*FilterObservation"),
    ):
        with pytest.raises(UserError, match=message):
            dreamer.build(DREAMER, spaces)

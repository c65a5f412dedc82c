"""STORM as a program: settings, observations, resuming, what it learns, other world models, and mistakes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pytest
import torch

from foresight.algorithms.world import dreamer, storm
from foresight.data.sequences import Arrival, arrivals
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.nets import precision
from foresight.nets.models.latent_actor import action_width
from foresight.nets.models.planet import GaussianRSSM
from foresight.nets.models.rssm import RSSM
from foresight.nets.models.storm import STORM, CausalTransformer
from foresight.nets.models.world_model import TwoHotMLP, obs_model
from foresight.training import imagination
from tests.algorithms.policy.small_envs import Bandit, choice, hidden_choice, sides
from tests.algorithms.small_runs import last
from tests.algorithms.states import assert_seeds_decide, continued, forgets, halfway_and_end, restored, weights
from tests.algorithms.world.world_runs import DREAMER, near, reward_of, taught, watch_rows
from tests.kept import kept
from tests.sabotage import change, flip_sign, sabotaged_by

CONFIG = storm.Config(
    steps=160, num_envs=8, rollout_steps=4, learning_starts=64, train_every=8, batch_size=16, sequence_length=4,
    replay_size=2_000, learning_rate=1e-2, agent_learning_rate=1e-2, imagined_batch=64, context=1, horizon=2,
    entropy_coef=3e-2, width=16, sequence_layers=1, heads=2, groups=4, classes=4, units=16, layers=1, depth=2,
)  # fmt: skip

BOTH = pytest.mark.parametrize(("module", "config"), [(dreamer, DREAMER), (storm, CONFIG)], ids=["dreamer", "storm"])


def test_it_counts_steps_and_reports_its_metrics() -> None:
    config = dataclasses.replace(CONFIG, steps=1_500, train_every=300)
    seen = list(storm.train(config, choice()))
    assert [step for step, _, _ in seen] == [1024, 1504]
    for step, metrics, state in seen:
        assert state.step in (step, 1504)
        assert set(storm.METRICS) <= set(metrics) and all(isinstance(x, float) for x in metrics.values())
    assert state.gradient_steps == (1504 - 32) // 300  # of the rollouts after learning_starts


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    assert_seeds_decide(storm, CONFIG, choice)


FIELDS = (
    "model", "actor", "critic", "slow_critic", "spread", "optimizer", "agent_optimizer", "replay", "generator",
    "inner", "sampler", "due",
)  # fmt: skip


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in FIELDS])
def test_a_loaded_run_continues_as_the_one_in_memory() -> None:
    config = dataclasses.replace(CONFIG, train_every=45, contrastive_coef=1.0)  # steps are due where it stops
    halfway, whole = halfway_and_end(storm, config, near, 224, _spread)
    assert halfway.due
    resumed = continued(storm, restored(storm, halfway, near()), near(), 224)
    assert whole.step == resumed.step == 224
    assert torch.equal(weights(whole), weights(resumed))
    assert whole.episodes == resumed.episodes


def _spread(state: Any) -> None:
    state.spread.estimate.fill_(2.0)  # above its minimum of 1, where it would not matter


def _late(found: Arrival) -> Arrival:
    return Arrival(*(torch.roll(x, 1, 1) for x in found))


@sabotaged_by("foresight.training.imagination.actor_loss", flip_sign)
@sabotaged_by("foresight.data.sequences.arrivals", lambda f: lambda batch: _late(f(batch)))
def test_it_learns_the_right_action(monkeypatch: pytest.MonkeyPatch) -> None:
    env, config = choice(3), dataclasses.replace(CONFIG, steps=1_000, train_every=4, dropout=0.0)
    state = storm.build(config, env.spaces)
    random = reward_of(storm, state, choice(3, 900), explore=True).mean()
    assert 0.25 < random < 0.42
    state = taught(storm, config, env, monkeypatch, state, watch_rows, worst=0.15)
    assert reward_of(storm, state, env).mean() == 1
    assert torch.equal(storm.act(state, env.reset(0))[0], storm.act(state, env.reset(0))[0])


def test_it_learns_with_an_lstm(monkeypatch: pytest.MonkeyPatch) -> None:
    env = choice(3)
    config = dataclasses.replace(CONFIG, steps=1_500, train_every=4, sequence_model="lstm")
    state = taught(storm, config, env, monkeypatch)
    assert reward_of(storm, state, env).mean() == 1


def test_continuous_actions_are_learned_in_units_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    env, config = near(), dataclasses.replace(CONFIG, steps=1_500, train_every=4)
    state = taught(storm, config, env, monkeypatch)
    assert reward_of(storm, state, env).mean() > 0.8  # of random ones: -1.3


def test_pixels_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    images[0, :, :, :4], images[1, :, :, 4:] = 255, 255
    spaces = Spaces(gs.Box(0, 255, (1, 8, 8), np.uint8), gs.Discrete(2))
    env = Bandit(spaces, 2, lambda c: images[c], lambda c, a: a == c)
    state = taught(storm, dataclasses.replace(CONFIG, steps=1_500, train_every=4), env, monkeypatch)
    assert reward_of(storm, state, env).mean() == 1


def test_the_critic_learns_real_returns_where_the_model_imagines_none(monkeypatch) -> None:
    """Right actions of one-step episodes earn 1, a third of the random ones: what the model misses is in the replay."""
    free = STORM.imagine
    monkeypatch.setattr(STORM, "imagine", lambda *args: _without_reward(*free(*args)))
    values = []
    for coef in (0.0, 3.0):
        config = dataclasses.replace(
            CONFIG, imagined_last=4, replay_value_coef=coef, entropy_coef=1.0, steps=384, train_every=4
        )
        state, env = last(storm, config, choice(3)), choice(3)
        nothing = torch.zeros(env.num_envs, 1, 3)
        found = state.model.observe(
            state.model.initial(env.num_envs), env.reset(0).unsqueeze(1), nothing, nothing[..., 0], None
        )
        values.append(state.critic(state.model.features(found)).mean().mean().item())
    assert abs(values[0]) < 0.02 < 0.1 < values[1] < 0.33


def _without_reward(steps: Trajectory, features: torch.Tensor) -> tuple[Trajectory, torch.Tensor]:
    return steps.replace(reward=torch.zeros_like(steps.reward)), features


@sabotaged_by("foresight.training.imagination.reach_weights", change("first", torch.ones_like))
def test_what_is_imagined_after_a_termination_has_no_weight() -> None:
    """Final observations are states of the model too, but nothing is decided there."""
    state = last(storm, CONFIG, choice())
    contexts, arrival = storm.sample(state, 32, 2)
    over = arrival._replace(known=torch.ones_like(arrival.known), discount=torch.zeros_like(arrival.discount))
    state.agent_optimizer.state.clear()  # no momentum
    before = copy.deepcopy(state.actor.state_dict())
    found = state.model.observe(state.model.initial(32), contexts.obs, contexts.action, contexts.cut, state.generator)
    ended = contexts.replace(cut=torch.ones_like(contexts.cut))
    storm.update_agent(state, found, ended, over)
    # nor where the row before is not in the sequence, so that it is not known how the episode ended
    storm.update_agent(state, found, ended, over._replace(known=torch.zeros_like(over.known)))
    assert all(torch.equal(before[name], value) for name, value in state.actor.state_dict().items())


def storms_model(state: Any, env: Any) -> STORM:
    return STORM(
        obs_model(env.spaces.obs, 16, 1, 2), action_width(env.spaces.action), CausalTransformer(16, 1, 2), 4, 4,
        context=1, units=16, layers=1,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "kept"), [("storm", {"action"}), ("planet", {"deter", "stoch", "action"})])
def test_dreamer_learns_with_the_world_model_of(name: str, kept: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the model is another: actor, critic and optimizer are built for its features, as `build` would."""
    env, config = choice(2), dataclasses.replace(DREAMER, steps=1_000, train_ratio=24.0 if name == "storm" else 12.0)
    torch.manual_seed(0)
    state = dreamer.build(config, env.spaces)
    state.model = storms_model(state, env) if name == "storm" else planets_model(obs_model(env.spaces.obs, 16, 1, 2))
    _fit(state, config)
    parameters = [p for m in (state.model, state.actor, state.critic) for p in m.parameters()]
    state.optimizer = imagination.LaProp(parameters, config.learning_rate, warmup=config.lr_warmup)
    state = taught(dreamer, config, env, monkeypatch, state)
    assert set(state.replay.streams[0].storage.extras) == kept
    assert reward_of(dreamer, state, env).mean() == 1


@pytest.mark.parametrize("name", ["dreamer", "planet"])
def test_storm_learns_with_the_world_model_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env, config = choice(2), dataclasses.replace(CONFIG, steps=1_200, train_every=4)
    torch.manual_seed(0)
    state = storm.build(config, env.spaces)
    obs = obs_model(env.spaces.obs, 16, 1, 2)
    state.model = RSSM(obs, 2, 32, 16, 4, 4, 2, units=16) if name == "dreamer" else planets_model(obs)
    _fit(state, config)
    state.optimizer = torch.optim.Adam(state.model.parameters(), lr=config.learning_rate, fused=True)
    agent = [*state.actor.parameters(), *state.critic.parameters()]
    state.agent_optimizer = torch.optim.Adam(agent, lr=config.agent_learning_rate, fused=True)
    state = taught(storm, config, env, monkeypatch, state)
    assert reward_of(storm, state, env).mean() == 1


def planets_model(obs: Any) -> GaussianRSSM:
    return GaussianRSSM(obs, 2, deter=32, stoch=8, hidden=16, units=16, layers=1)


def _fit(state: Any, config: Any) -> None:
    kind = type(state.actor)
    state.actor = kind(gs.Discrete(2), state.model.size, config.units, config.layers)
    state.critic = TwoHotMLP(state.model.size, config.units, config.layers)
    state.slow_critic = copy.deepcopy(state.critic).requires_grad_(False)


@BOTH
def test_a_search_in_the_model_corrects_the_actor(module: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = choice(3)
    state = module.build(dataclasses.replace(config, search_simulations=16, learning_starts=0), env.spaces)
    state.actor.net[-1].bias.data[2] = 1.0
    kind, advance = type(state.model), type(state.model).advance
    monkeypatch.setattr(kind, "advance", lambda self, s, a, g: (advance(self, s, a, g)[0], a[:, 0], 0 * a[:, 0]))
    obs = env.reset(0)
    action, _, carry = module.act(state, obs)
    assert action.tolist() == [0] * 8
    assert set(module.act(state, obs, carry, explore=True)[0].tolist()) <= {0, 1, 2}
    state.config = dataclasses.replace(state.config, search_simulations=0)
    assert module.act(state, obs)[0].tolist() == [2] * 8


def of_pixels(module: Any, config: Any) -> dict[str, torch.Tensor]:
    """The terms of a model's loss on random images."""
    state = module.build(config, Spaces(gs.Box(0, 255, (3, 32, 32), np.uint8), gs.Discrete(2)))
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (2, 4, 3, 32, 32), dtype=torch.uint8, generator=generator)
    batch = Trajectory(images, torch.eye(2).expand(2, 2, 2).repeat(1, 2, 1), *torch.zeros(3, 2, 4))
    with precision.autocast(config.precision, state.inner.device):
        return state.model.loss(state.model.initial(2), batch, arrivals(batch), state.inner)[0]


@sabotaged_by("foresight.nets.models.world_model.recompute", lambda f: lambda model: None)
@BOTH
def test_gradient_checkpointing_keeps_less_for_the_same_loss(module: Any, config: Any) -> None:
    sizes, losses = [], []
    for checkpointing in (False, True):
        wanted = dataclasses.replace(config, gradient_checkpointing=checkpointing)
        sizes.append(kept(lambda wanted=wanted: losses.append(of_pixels(module, wanted))))
    torch.testing.assert_close(losses[1], losses[0])
    assert sizes[1] < 0.5 * sizes[0]


@sabotaged_by("foresight.nets.precision.dtype", lambda f: lambda precision, device: None)
@BOTH
def test_losses_in_bfloat16_are_float32(module: Any, config: Any) -> None:
    wide, narrow = (of_pixels(module, dataclasses.replace(config, precision=x)) for x in ("float32", "bfloat16"))
    for name, term in narrow.items():
        assert term.dtype == torch.float32, name
        torch.testing.assert_close(term.mean(), wide[name].mean(), rtol=0.02, atol=0)
    assert not torch.equal(narrow["reconstruction"], wide["reconstruction"])


@sabotaged_by("foresight.nets.precision.dtype", lambda f: lambda precision, device: None)
@BOTH
def test_an_update_in_bfloat16_is_that_of_float32_but_for_rounding(module: Any, config: Any) -> None:
    late = {"train_ratio": 1e-3} if module is dreamer else {"train_every": 1_000, "dropout": 0.0}
    before = last(module, dataclasses.replace(config, steps=96, **late), near())
    before.critic.net[-1].bias.data += torch.linspace(-1, 1, 255)  # it predicts more than 0
    found = []
    for name in ("float32", "bfloat16"):
        state = copy.deepcopy(before)
        state.config = dataclasses.replace(config, precision=name)
        found.append(module.update(state, *module.sample(state)) if module is dreamer else module.update(state))
        assert all(p.dtype == torch.float32 and p.isfinite().all() for p in state.model.parameters())
    assert found[0] != found[1]
    assert found[1] == {name: pytest.approx(value, rel=0.1, abs=0.02) for name, value in found[0].items()}


def test_steps_of_imagination_are_compiled_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    env, config = choice(), dataclasses.replace(CONFIG, compile=True)
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert storm.build(config, env.spaces).model.backend == "inductor"
    assert storm.build(CONFIG, env.spaces).model.backend is None
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler on a CPU: install g\+\+, or leave out --compile"):
        storm.build(config, env.spaces)


MISTAKES = [
    ({"num_envs": 4}, "num_envs is 4, but the environment has num_envs 8"),
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"gamma": 1.5}, "gamma must be between 0 and 1"),
    ({"sequence_model": "lstn"}, "Did you mean 'lstm'"),
    ({"replay_size": 16}, "replay_size 16 is too small"),
    ({"replay_value_coef": 0.3}, "Set imagined_last to at least 2"),
    ({"context": 5}, "context 5 is more than sequence_length 4"),
    ({"imagined_last": 5}, "imagined_last 5 is more than sequence_length 4"),
    ({"precision": "float16"}, "Unknown precision 'float16'"),
    ({"gradient_checkpointing": True}, "these observations are numbers"),
    ({"heads": 3}, "width must be an even multiple of heads, 3, not 16"),
    ({"sequence_length": 1, "context": 1}, "sequence_length must be at least 2, not 1"),
    ({"unimix": 1.0}, "unimix is a share from 0 to below 1"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_named(options, message) -> None:
    with pytest.raises(UserError, match=message):
        next(storm.train(dataclasses.replace(CONFIG, **options), choice()))


def test_spaces_that_are_not_supported_are_named() -> None:
    box = gs.Box(-1, 1, (3,), np.float32)
    for spaces, message in (
        (Spaces(box, gs.Box(-np.inf, np.inf, (2,), np.float32)), "bounded Box actions"),
        (sides().spaces, "images of 8, 16, 32, 64 or 128 pixels, not 36 x 36"),
        (hidden_choice().spaces, "action_mask"),
    ):
        with pytest.raises(UserError, match=message):
            storm.build(CONFIG, spaces)

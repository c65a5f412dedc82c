"""SAC and discrete SAC as programs: settings, observations, resuming, and mistakes."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.policy import sac, sac_discrete
from foresight.envs.base import Spaces
from foresight.errors import UserError
from tests.algorithms.policy.small_envs import Bandit, choice, hidden_choice, sides
from tests.algorithms.states import forgets, restored, weights
from tests.sabotage import sabotaged_by

COMMON = {"steps": 800, "num_envs": 8, "learning_starts": 64, "train_every": 8, "batch_size": 32, "replay_size": 4_000}
SAC = sac.Config(**COMMON, hidden=(16,), learning_rate=5e-3, entropy_temperature=0.1)
DISCRETE = sac_discrete.Config(**COMMON, hidden=(16,), learning_rate=5e-3, entropy_temperature=0.1)


def aim(contexts: int = 4) -> Bandit:
    """The right action is where the context says, in world units; a random policy earns about -1."""
    goals = torch.stack([torch.linspace(-1, 1, contexts), torch.linspace(1, 3, contexts)], -1)
    space = gs.Box(np.array([-2, 0], np.float32), np.array([2, 4], np.float32))
    spaces = Spaces(gs.Box(0, 1, (contexts,), np.float32), space)
    return Bandit(spaces, contexts, lambda c: torch.eye(contexts)[c], lambda c, a: -(a - goals[c]).square().sum(-1))


CASES = [(sac, SAC, aim), (sac_discrete, DISCRETE, choice)]
BOTH = pytest.mark.parametrize(("module", "config", "make"), CASES, ids=["sac", "discrete"])


def _last(module, config, env, state=None):
    *_, (_, _, state) = module.train(config, env, state)
    return state


@BOTH
def test_it_counts_steps_and_says_what_it_saw(module, config, make) -> None:
    seen = list(module.train(dataclasses.replace(config, steps=1_500), make()))
    assert [step for step, _, _ in seen] == [1000, 1504]
    for step, metrics, state in seen:
        assert state.step in (step, 1504)
        assert set(metrics) == {"critic_loss", "q", "alpha", "entropy", "return", "length"} >= set(module.METRICS)
        assert all(isinstance(x, float) for x in metrics.values())


@BOTH
def test_equal_seeds_give_equal_runs_and_others_do_not(module, config, make) -> None:
    runs = [weights(_last(module, dataclasses.replace(config, seed=seed), make())) for seed in (3, 3, 4)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    before = torch.random.get_rng_state()
    _last(module, config, make())
    assert torch.equal(before, torch.random.get_rng_state())


FIELDS = (
    "actor", "critics", "log_alpha", "actor_optimizer", "critic_optimizer", "alpha_optimizer", "replay",
    "generator", "sampler",
)  # fmt: skip


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in FIELDS])
@BOTH
def test_a_resumed_run_is_the_uninterrupted_one(module, config, make) -> None:
    _resumes(module, config, make)


@sabotaged_by("tests.algorithms.states.restored", forgets("inner"))
def test_what_updates_draw_is_resumed_too() -> None:
    _resumes(sac, SAC, aim)


def _resumes(module, config, make) -> None:
    halfway = _last(module, config, make())
    longer, ends = dataclasses.replace(config, steps=1_200), []
    for state in (copy.deepcopy(halfway), restored(module, halfway, make())):
        state.config = longer
        ends.append(_last(module, longer, make(), state))
    assert ends[0].step == ends[1].step == 1200
    assert torch.equal(weights(ends[0]), weights(ends[1]))
    assert ends[0].episodes == ends[1].episodes


@sabotaged_by("foresight.nets.critics.Critics.frozen", lambda f: lambda *a: [-q for q in f(*a)])
@sabotaged_by("foresight.nets.critics.SquashedActor.inward", lambda f: lambda self, action: -f(self, action))
def test_sac_learns_where_to_aim() -> None:
    env = aim()
    state = sac.build(SAC, env.spaces)
    obs = env.reset(0)
    drawn = torch.stack([env._reward(env._context, sac.act(state, obs, explore=True)[0]) for _ in range(200)])
    assert drawn.mean() < -2  # a random policy: uniform over the bounds before learning starts
    state = _last(sac, dataclasses.replace(SAC, steps=6_000), env, state)
    obs = env.reset(0)
    action, extras, carry = sac.act(state, obs)
    assert env._reward(env._context, action).min() > -0.2 and extras == {} and carry is None
    assert torch.equal(action, sac.act(state, obs)[0])


@sabotaged_by("foresight.ops.value.squared_loss", lambda f: lambda *a: -f(*a))
def test_discrete_sac_learns_what_to_choose() -> None:
    env = choice()
    state = _last(sac_discrete, dataclasses.replace(DISCRETE, steps=5_000, target_entropy=0.3), env)
    obs = env.reset(0)
    action, extras, carry = sac_discrete.act(state, obs)
    assert (action == env._context).all() and extras == {} and carry is None


def test_first_actions_are_uniform() -> None:
    state = sac.build(SAC, aim().spaces)
    obs = torch.eye(4)[torch.zeros(20_000, dtype=torch.int64)]
    drawn = sac.act(state, obs, explore=True)[0]
    torch.testing.assert_close(drawn.mean(0), torch.tensor([0.0, 2.0]), atol=0.05, rtol=0)
    torch.testing.assert_close(drawn.std(0), torch.full((2,), 4 / 12**0.5), atol=0.03, rtol=0)
    discrete = sac_discrete.build(DISCRETE, choice().spaces)
    counts = sac_discrete.act(discrete, obs, explore=True)[0].bincount(minlength=4)
    assert (counts - 5000).abs().max() < 5 * 5000**0.5


def test_masked_actions_are_never_taken() -> None:
    env = hidden_choice()
    for _, metrics, state in sac_discrete.train(DISCRETE, env):  # noqa: B007
        assert metrics["return"] == 1
    assert metrics["entropy"] == 0
    assert sac_discrete.act(state, env.reset(0))[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_pixels_are_learned() -> None:
    def near(c: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return -((a[:, 0] - (2.0 * c - 1) / 2).square())

    options = {"steps": 1_200, "learning_rate": 1e-3, "hidden": (32,), "entropy_temperature": 0.05}
    env = sides(gs.Box(-1, 1, (1,), np.float32), near)
    state = _last(sac, dataclasses.replace(SAC, **options), env)
    assert near(env._context, sac.act(state, env.reset(0))[0]).min() > -0.15
    env = sides()
    state = _last(sac_discrete, dataclasses.replace(DISCRETE, **options), env)
    assert (sac_discrete.act(state, env.reset(0))[0] == env._context).all()


MISTAKES = [
    ({"num_envs": 4}, "num_envs is 4, but the environment has num_envs 8"),
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"gamma": 1.5}, "gamma must be between 0 and 1"),
    ({"entropy_temperature": 0.0}, "alpha, the temperature, must be above 0"),
    ({"replay_size": 10}, "replay_size 10 is too small"),
]


@BOTH
@pytest.mark.parametrize(("options", "says"), MISTAKES)
def test_mistakes_are_named(module, config, make, options, says) -> None:
    with pytest.raises(UserError, match=says):
        next(module.train(dataclasses.replace(config, **options), make()))


def test_actions_of_the_wrong_kind_are_named() -> None:
    with pytest.raises(UserError, match=r"real numbers.*takes Discrete.*sac_discrete"):
        sac.build(SAC, choice().spaces)
    with pytest.raises(UserError, match=r"Discrete actions.*takes Box.*Use sac or ppo"):
        sac_discrete.build(DISCRETE, aim().spaces)

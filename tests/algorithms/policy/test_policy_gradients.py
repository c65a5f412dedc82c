"""REINFORCE, QAC, A2C, Off-PAC, TRPO and PPG as programs: counting, resuming, every kind of space, and mistakes."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.runtime.checkpoints import checkpoint
from tests.algorithms.policy.small_envs import Bandit, Clock, choice
from tests.algorithms.states import weights
from tests.sabotage import sabotaged_by

SMALL: dict[str, dict[str, Any]] = {
    "reinforce": {"steps": 64, "value_steps": 2},
    "qac": {"steps": 512, "rollout_steps": 8},
    "a2c": {"steps": 512, "rollout_steps": 8},
    "off_policy_ac": {"steps": 512, "rollout_steps": 8},
    "trpo": {"steps": 512, "num_envs": 8, "rollout_steps": 8, "value_epochs": 2, "value_batch": 16},
    "ppg": {"steps": 512, "rollout_steps": 8, "policy_iterations": 3, "auxiliary_minibatches": 2, "minibatches": 2},
}
CONTINUOUS = ("reinforce", "a2c", "trpo", "ppg")
every = pytest.mark.parametrize("name", SMALL)


def _module(name: str) -> Any:
    return importlib.import_module(f"foresight.algorithms.policy.{name}")


def _config(name: str, **options: Any) -> Any:
    return _module(name).Config(**{"hidden": (16,), **SMALL[name], **options})


def _last(name: str, config: Any, env: Any, state: Any = None) -> Any:
    *_, (_, _, state) = _module(name).train(config, env, state)
    return state


@every
def test_it_counts_steps_and_reports_its_metrics(name):
    config = _config(name)
    seen = list(_module(name).train(config, choice()))
    stride = 8 if name == "reinforce" else 64  # episodes of one step each
    assert [step for step, _, _ in seen] == list(range(stride, config.steps + 1, stride))
    assert seen[-1][2].step == config.steps
    watched: set[str] = set()
    for _, metrics, _ in seen:
        assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
        watched |= set(metrics)
    assert set(_module(name).METRICS) <= watched
    assert list(_module(name).train(config, choice(), seen[-1][2])) == []  # nothing left to do


@every
def test_equal_seeds_give_equal_runs_and_others_do_not(name):
    before = torch.random.get_rng_state()
    runs = [weights(_last(name, _config(name, seed=seed), choice())) for seed in (3, 3, 4)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert torch.equal(before, torch.random.get_rng_state())  # the caller's generator is left alone


def _restored(state: Any, folder: Any, name: str) -> Any:
    fresh = _module(name).build(state.config, choice().spaces)
    checkpoint.restore(checkpoint.save(folder, state, state.step), fresh)
    return fresh


def _forgets_its_generator(original: Any) -> Any:
    def mutant(*arguments: Any) -> Any:
        state = original(*arguments)
        state.generator.manual_seed(1)
        return state

    return mutant


@sabotaged_by("tests.algorithms.policy.test_policy_gradients._restored", _forgets_its_generator)
@every
def test_a_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    """Through a checkpoint on the disk, where PPG is in the middle of a policy phase."""
    config, halfway = _config(name), None
    for step, _, state in _module(name).train(config, choice()):
        if step == config.steps // 2:
            halfway = _restored(state, tmp_path, name)
            assert name != "ppg" or state.remembered
    resumed = _last(name, config, choice(), halfway)
    assert resumed.step == config.steps
    assert torch.equal(weights(resumed), weights(state))
    assert resumed.episodes == state.episodes


@every
def test_without_explore_it_is_the_mode(name):
    state, obs = _module(name).build(_config(name), choice().spaces), torch.eye(4)
    action, extras, carry = _module(name).act(state, obs)
    assert extras == {} and carry is None
    assert all(torch.equal(_module(name).act(state, obs)[0], action) for _ in range(5))
    drawn = torch.stack([_module(name).act(state, obs, explore=True)[0] for _ in range(20)])
    assert (drawn != action).any()


def _contexts(actions: gs.Space, reward: Any) -> Bandit:
    spaces = Spaces(gs.Box(-1, 1, (1,), np.float32), actions)
    return Bandit(spaces, 2, lambda c: (2.0 * c - 1).unsqueeze(-1), reward)


def _continuous() -> Bandit:
    return _contexts(gs.Box(-2, 2, (2,), np.float32), lambda c, a: 1 - (a - (2.0 * c - 1)[:, None]).square().mean(-1))


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_actions_are_learned(name):
    faster = {
        "reinforce": {"steps": 2_500, "learning_rate": 0.02},
        "a2c": {"steps": 6_000, "learning_rate": 0.01},
        "trpo": {"steps": 6_000, "rollout_steps": 32, "target_kl": 0.1, "value_learning_rate": 0.01},
        "ppg": {
            "steps": 4_000,
            "rollout_steps": 16,
            "learning_rate": 0.01,
            "entropy_coef": 0.0,
            "auxiliary_epochs": 1,
        },
    }[name]
    env = _continuous()
    state = _last(name, _config(name, **faster), env)
    action, _, _ = _module(name).act(state, env.reset(0))
    assert env._reward(env._context, action).mean() > 0.8


@pytest.mark.parametrize("name", CONTINUOUS)
def test_several_choices_at_once_are_taken(name):
    env = _contexts(gs.MultiDiscrete([2, 3]), lambda c, a: (a == torch.stack([c, c + 1], -1)).all(-1))
    state, obs = _last(name, _config(name), env), env.reset(0)
    actions = torch.stack([_module(name).act(state, obs, explore=True)[0] for _ in range(20)])
    assert actions.shape == (20, 8, 2) and (actions >= 0).all() and (actions < torch.tensor([2, 3])).all()
    assert all(len(choices.unique()) > 1 for choices in actions.unbind(-1))


@every
def test_masked_actions_are_never_taken(name):
    """The context is hidden and both other actions are forbidden: only the mask tells what is right."""
    spaces = Spaces(gs.Dict({"x": gs.Box(0, 1, (1,), np.float32), "action_mask": gs.MultiBinary(3)}), gs.Discrete(3))
    env = Bandit(
        spaces,
        3,
        lambda c: {"x": torch.zeros(8, 1), "action_mask": torch.eye(3, dtype=torch.int8)[c]},
        lambda c, a: a == c,
    )
    for _, metrics, state in _module(name).train(_config(name), env):  # noqa: B007
        assert metrics["return"] == 1
    assert _module(name).act(state, env.reset(0))[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


@every
def test_pixels_are_seen(name):
    images = torch.zeros(2, 1, 36, 36, dtype=torch.uint8)
    images[0, :, :, :18], images[1, :, :, 18:] = 255, 255
    spaces = Spaces(gs.Box(0, 255, (1, 36, 36), np.uint8), gs.Discrete(2))
    env = Bandit(spaces, 2, lambda c: images[c], lambda c, a: a == c)
    state = _last(name, _config(name, steps=8, images="nature"), env)
    assert _module(name).act(state, env.reset(0))[0].shape == (8,)
    left, right = state.network.policy(images).logits.detach()
    assert (left - right).abs().max() > 1e-4


MISTAKES = [
    *[(name, {"num_envs": 4}, "num_envs is 4, but the environment has num_envs 8") for name in SMALL],
    *[(name, {"rollout_steps": 0}, "rollout_steps must be at least 1") for name in SMALL if name != "reinforce"],
    *[(name, {"activation": "tahn"}, "Did you mean 'tanh'") for name in SMALL],
    ("reinforce", {"form": "reward_togo"}, "Did you mean 'reward_to_go'"),
    ("reinforce", {"max_episode_steps": 0}, "max_episode_steps must be at least 1"),
    ("off_policy_ac", {"epsilon": 1.5}, "epsilon must be between 0 and 1"),
    ("off_policy_ac", {"max_ratio": 0.5}, "max_ratio must be at least 1"),
    ("trpo", {"target_kl": 0.0}, "target_kl, the size of the trust region"),
    ("trpo", {"damping": -0.1}, "damping must be at least 0"),
    ("trpo", {"backtrack_factor": 1.0}, "backtrack_factor must be between 0 and 1"),
    ("ppg", {"minibatches": 65}, "minibatches is 65, but"),
    ("ppg", {"auxiliary_epochs": -1}, "auxiliary_epochs must be at least 0"),
]


@pytest.mark.parametrize(("name", "options", "message"), MISTAKES)
def test_mistakes_are_named(name, options, message):
    with pytest.raises(UserError, match=message):
        next(_module(name).train(_config(name, **options), choice()))


@pytest.mark.parametrize("name", ["qac", "off_policy_ac"])
def test_spaces_that_cannot_be_are_named(name):
    with pytest.raises(UserError, match=r"needs Discrete (ones|actions), not Box"):
        _module(name).build(_config(name), _continuous().spaces)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_an_action_space_without_a_policy_is_named(name):
    with pytest.raises(UserError, match="Unsupported action space Text"):
        _module(name).build(_config(name), Spaces(gs.Box(0, 1, (2,), np.float32), gs.Text(3)))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a2c", {"decay": 1.0}, "decay is a share from 0 to below 1, not 1.0"),
        ("off_policy_ac", {"replay_ratio": -1}, "replay_ratio must be at least 0, not -1"),
        ("reinforce", {"num_envs": 1, "form": "trajectory", "normalize_advantage": True}, "One episode has one weight"),
    ],
)
def test_settings_out_of_range_are_named(name, options, message):
    with pytest.raises(UserError, match=message):
        _module(name).build(_config(name, **options), choice().spaces)


@pytest.mark.parametrize("name", ["a2c", "trpo"])
def test_normalizers_learn_in_training_only(name):
    state = _last(name, _config(name, normalize_obs=True, normalize_reward=True), choice())
    normalizer, scaler = state.network.normalizer, state.reward_scaler
    assert normalizer.moments.count == 512 and scaler.moments.count == 512
    before = copy.deepcopy(normalizer.state_dict())
    _module(name).act(state, torch.eye(4), explore=True)
    assert all(torch.equal(before[k], v) for k, v in normalizer.state_dict().items())


@pytest.mark.parametrize("envs", [1, 2])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a2c", {}), ("off_policy_ac", {}), ("qac", {}), ("trpo", {}), ("ppg", {"minibatches": 2}),
        ("ppo", {"minibatches": 1}), ("ppo", {"minibatches": 1, "target_kl": 1.0}),
        ("ppo", {"minibatches": 2, "normalize_advantage": False}),
        ("ppo", {"minibatches": 2, "normalize_advantage": False, "target_kl": 1.0}),
        ("ppo", {"minibatches": 2, "normalize_advantage": False, "memory": "gru", "memory_size": 4}),
        ("impala", {"rollouts_per_update": 1, "popart_rate": 0.1}),
    ],
)  # fmt: skip
def test_rows_that_only_reset_are_no_experience(name, options, envs):
    """A rollout is one row of each environment: fewer real ones than minibatches, or none."""
    module = importlib.import_module(f"foresight.algorithms.policy.{name}")
    options = {key: min(value, envs) if key == "minibatches" else value for key, value in options.items()}
    config = module.Config(steps=40, num_envs=envs, rollout_steps=1, hidden=(4,), **options)
    seen = list(module.train(config, Clock(num_envs=envs, lost=True)))
    for _, metrics, _ in seen:
        metrics.pop("explained_variance", None)  # all targets are equal
        assert all(math.isfinite(value) for value in metrics.values())
    step, _, state = seen[-1]
    assert step == 40 and weights(state).isfinite().all()


def test_configs_are_frozen():
    for name in SMALL:
        with pytest.raises(dataclasses.FrozenInstanceError):
            _config(name).steps = 1

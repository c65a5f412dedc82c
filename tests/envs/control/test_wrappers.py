"""Pictures in Gymnasium's order, with colors and in stacks: what environments return and what runs train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from foresight.envs.make import make
from foresight.errors import UserError
from foresight.runtime import run
from tests.envs.image_env import LENGTH
from tests.sabotage import sabotaged_by


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (36, 40, 3)),
        ({"gray": True}, (36, 40)),
        ({"image_size": 12}, (12, 12, 3)),
        ({"image_size": 12, "gray": True, "frame_stack": 3}, (3, 12, 12)),
        ({"frame_stack": 2}, (2, 36, 40, 3)),
    ],
)
def test_the_space_has_the_shape_of_the_images(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    env = make("ColorChoice-v0", num_envs=2, **options)
    seen = [env.reset(0)]
    for _ in range(LENGTH + 1):
        feedback = env.step(torch.zeros(2, dtype=torch.int64))
        seen += [feedback.obs, feedback.final_obs]
    assert env.spaces.obs.shape == shape and env.spaces.obs.dtype == np.uint8
    assert all(obs.shape == (2, *shape) and obs.dtype == torch.uint8 for obs in seen)


@sabotaged_by("foresight.envs.control.wrappers.area", lambda f: lambda *sizes: f(*sizes)[::-1].copy())
def test_a_new_pixel_is_the_mean_over_its_area() -> None:
    whole = make("ColorChoice-v0", num_envs=3).reset(1)
    small = make("ColorChoice-v0", num_envs=3, image_size=18).reset(1)
    expected = whole.float().view(3, 18, 2, 40, 3).mean(2)[:, :, 19:21]  # two rows; around the middle columns are equal
    assert torch.equal(small[:, :, 9].float(), expected.mean(2).round())
    gray = make("ColorChoice-v0", num_envs=3, gray=True).reset(1)
    assert torch.equal(gray, (whole.float() @ torch.tensor([0.299, 0.587, 0.114])).round().to(torch.uint8))
    assert set(gray.unique().tolist()) == {10, 60}  # red and green are equally bright


def test_other_environments_have_no_images() -> None:
    with pytest.raises(UserError, match=r"image_size and gray need image observations .*; 'CartPole-v1' has Box"):
        make("CartPole-v1", num_envs=1, gray=True)
    with pytest.raises(UserError, match="image_size must be a whole number of at least 1, not 0"):
        make("ColorChoice-v0", num_envs=1, image_size=0)


SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"num_envs": 2, "rollout_steps": 8, "minibatches": 2, "steps": 64},
    "dqn": {"num_envs": 2, "replay_size": 100, "learning_starts": 16, "batch_size": 8, "steps": 48},
    "sac": {"num_envs": 2, "replay_size": 100, "learning_starts": 16, "batch_size": 8, "hidden": (8,), "steps": 48},
}


@pytest.mark.parametrize(
    ("options", "channels"), [({}, 3), ({"frame_stack": 2}, 6), ({"frame_stack": 2, "gray": True}, 2)]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_runs_train_on_images(name: str, options: dict[str, Any], channels: int, tmp_path: Path) -> None:
    options = {**options, **({"discrete": False} if name == "sac" else {})}
    done = run.train(
        name, env="ColorChoice-v0", env_options=options, out=tmp_path / "run", show=False, evaluation_episodes=2,
        **SETTINGS[name],
    )  # fmt: skip
    agent = done.load()
    obs = agent.env.reset(0)[0].numpy()
    assert agent.spaces.obs.contains(obs) and agent.spaces.action.contains(np.asarray(agent.act(obs)))
    first = [m for m in _modules(agent.state) if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (8, 8)]
    assert first and all(m.in_channels == channels for m in first)


def _modules(state: Any) -> list[torch.nn.Module]:
    return [m for part in vars(state).values() if isinstance(part, torch.nn.Module) for m in part.modules()]


@pytest.mark.parametrize("options", [{}, {"image_size": 64, "gray": True, "frame_stack": 2, "action_repeat": 2}])
def test_the_race_car_is_seen(options: dict[str, Any]) -> None:
    pytest.importorskip("Box2D")
    assert gymnasium.spec("CarRacing-v3").id == "CarRacing-v3"
    from foresight.algorithms.policy import ppo

    env = make("CarRacing-v3", num_envs=1, **options)
    state = ppo.build(ppo.Config(num_envs=1), env.spaces)
    obs = env.reset(0)
    assert obs.shape == ((1, 2, 64, 64) if options else (1, 96, 96, 3)) and obs.float().std() > 10
    action, _, _ = ppo.act(state, obs, explore=True)
    assert torch.isfinite(env.step(action).reward).all()
    env.close()

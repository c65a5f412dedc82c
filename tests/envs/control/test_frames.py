"""Rendered frames as observations: what they show, which engine draws them, and errors that say what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foresight.envs.control import frames
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.runtime import imagined, run
from foresight.runtime.evaluation import open_loop
from tests.sabotage import sabotaged_by

PENDULUM: dict[str, Any] = {"num_envs": 2, "time_limit": 3}


@sabotaged_by("foresight.envs.control.wrappers.area", lambda f: lambda *sizes: f(*sizes)[::-1].copy())
def test_the_frame_is_what_is_observed() -> None:
    env = make("Pendulum-v1", pixels=16, **PENDULUM)
    state = make("Pendulum-v1", engine="gymnasium", **PENDULUM)
    assert env.spaces.obs.shape == (16, 16, 3) and env.spaces.obs.dtype == np.uint8
    assert env.spaces.continuing and env.spaces.simulator is None
    seen, below = env.reset(3), state.reset(3)
    for _ in range(4):  # over the end of an episode
        assert seen.shape == (2, 16, 16, 3) and seen.dtype == torch.uint8
        up, down = [(255 - half.float().mean(-1)).sum((1, 2)) for half in seen.split(8, 1)]
        assert torch.equal(up > down, below[:, 0] > 0)  # the pole is above its joint: its cosine
        feedback, other = env.step(torch.ones(2, 1)), state.step(torch.ones(2, 1))
        assert torch.equal(feedback.reward, other.reward) and torch.equal(feedback.cut, other.cut)
        seen, below = feedback.obs, other.obs
        if other.cut.any():
            assert not torch.equal(feedback.final_obs, seen)
    env.close()


def test_frames_are_gray_and_stacked_and_drawn_once_for_a_repeated_action() -> None:
    env = make("Pendulum-v1", num_envs=1, pixels=16, gray=True, frame_stack=3, action_repeat=2)
    assert env.reset(0).shape == (1, 3, 16, 16)
    assert env.spaces.obs.shape == (3, 16, 16)
    assert make("Pendulum-v1", num_envs=1, pixels=16, render=True, engine="gymnasium").reset(0).shape == (1, 16, 16, 3)


def test_mujoco_is_drawn_without_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert frames.options("HalfCheetah-v5", 24) == {"render_mode": "rgb_array", "width": 24, "height": 24}
    assert frames.os.environ.pop("MUJOCO_GL") == "egl"
    assert frames.options("HalfCheetah-v5", None) == frames.options("Pendulum-v1", 24) == {"render_mode": "rgb_array"}


class _Declared:
    """What EnvPool declares of an environment of MuJoCo."""


_Declared.__module__ = "envpool.mujoco.dmc"


def test_what_cannot_be_drawn_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    frames._broken.cache_clear()
    failed = subprocess.CompletedProcess([], 134, "", "terminate called\n  what():  failed to initialize EGL\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(
        UserError, match=r"'CartpoleSwingup-v1' cannot be drawn: .*initialize EGL.*libegl1.*MUJOCO_GL=egl"
    ):
        frames.require_pool("CartpoleSwingup-v1", _Declared())
    frames._broken.cache_clear()
    failed.returncode = 0
    frames.require_pool("CartpoleSwingup-v1", _Declared())
    frames._broken.cache_clear()

    def broken() -> Any:
        raise AttributeError("no glGetError")

    with pytest.raises(UserError, match=r"'HalfCheetah-v5' cannot be drawn: no glGetError.*libosmesa6"):
        frames.rendered(broken, "HalfCheetah-v5", 16)


def test_images_of_envpool_have_their_colors_last() -> None:
    class Engine:
        def reset(self, *rows: Any) -> Any:
            return np.arange(24, dtype=np.uint8).reshape(1, 3, 2, 4), {"rows": rows}

        def step(self, actions: Any, *rows: Any) -> Any:
            return (self.reset()[0], *[np.zeros(1)] * 3, {"rows": rows})

        def close(self) -> None: ...

    pool = frames.PixelPool(Engine())
    obs, info = pool.reset(1)
    assert obs.shape == (1, 2, 4, 3) and obs[0, 0, 0].tolist() == [0, 8, 16] and info == {"rows": (1,)}
    obs, *_, info = pool.step(None, 2)
    assert obs.shape == (1, 2, 4, 3) and info == {"rows": (2,)}


def test_values_that_a_constructor_refuses_are_named() -> None:
    for kind in ("control", "tabular"):
        with pytest.raises(UserError, match=r"'FrozenLake-v1' does not take these options: map_name=9x9 \(KeyError"):
            make("FrozenLake-v1", kind, map_name="9x9")


def test_pixels_that_make_no_sense_are_refused() -> None:
    for name, options, message in (
        ("Pendulum-v1", {"pixels": 0}, "pixels must be a whole number of at least 1, not 0"),
        ("Pendulum-v1", {"pixels": 16, "image_size": 16}, "leave out image_size"),
        ("Pendulum-v1", {"pixels": 16, "engine": "native"}, "no pixels and no render; use engine='gymnasium'"),
        ("CartPole-v1", {"pixels": 16, "engine": "envpool"}, "draws only MuJoCo's environments, not 'CartPole-v1'"),
        ("Glide-v0", {"pixels": 16}, "'Glide-v0' is not drawn from its state: leave out pixels"),
        ("ALE/Pong-v5", {"pixels": 16}, "observes images already: leave out pixels, .* image_size"),
        ("FrozenLake-v1", {"pixels": 16, "nonsense": 1}, "does not take these options: nonsense"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            make(name, num_envs=1, **options)


RUNS: dict[str, dict[str, Any]] = {
    "planet": {
        "env_options": {"pixels": 32, "time_limit": 20}, "seed_episodes": 1, "updates": 1, "batch_size": 2,
        "sequence_length": 6, "replay_size": 100, "candidates": 4, "elites": 2, "iterations": 1, "horizon": 2,
        "deter": 8, "stoch": 4, "hidden": 8, "units": 8, "layers": 1, "depth": 1, "patch": 8, "decoded": 2, "steps": 40,
    },
    "tdmpc2": {
        "env_options": {"pixels": 40, "gray": True, "frame_stack": 3, "time_limit": 8}, "learning_starts": 8,
        "batch_size": 2, "replay_size": 100, "candidates": 4, "proposals": 1, "elites": 2, "iterations": 1,
        "latent_size": 8, "hidden": 8, "channels": 2, "steps": 10,
    },
    "dreamer": {
        "env_options": {"pixels": 32, "time_limit": 8}, "learning_starts": 8, "batch_size": 2, "sequence_length": 4,
        "replay_size": 100, "train_ratio": 4, "deter": 16, "hidden": 8, "groups": 2, "classes": 4, "blocks": 1,
        "units": 8, "layers": 1, "depth": 1, "patch": 8, "decoded": 2, "steps": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_world_models_learn_continuous_actions_from_frames(name: str, tmp_path: Path) -> None:
    done = run.train(name, env="Pendulum-v1", out=tmp_path / name, evaluation_episodes=1, show=False, **RUNS[name])
    assert done.evaluation is not None and np.isfinite(done.evaluation.mean)
    if name == "planet":
        inside = imagined.make(done.path, 2, horizon=3)
        assert inside.reset(0).shape == (2, 32, 32, 3)
        feedback = inside.step(torch.ones(2, 1))
        assert feedback.obs.dtype == torch.uint8 and feedback.obs.shape == (2, 32, 32, 3)
        agent = done.load()
        found = open_loop.observe_and_predict(agent.module, agent.state, agent.env, 0, horizon=4, count=1)
        assert found.images and np.isfinite(found.errors()["observation"]).all()

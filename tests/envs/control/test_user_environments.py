"""Environments of a user's own: what they report under names that mean something else here, and what they lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.envs.base import EnvError
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.runtime import run


class Bare(gymnasium.Env):  # type: ignore[type-arg]
    """Its constructor takes nothing."""

    observation_space: Any = gs.Box(0.0, 9.0, (1,), np.float32)
    action_space: Any = gs.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.full(1, self.time, np.float32), 1.0, self.time == 8, False, {}


class Lives(Bare):
    """Reports lives that were lost, as a number."""

    def step(self, action: Any) -> Any:
        *seen, _ = super().step(action)
        return *seen, {"life_lost": float(self.time > 3)}


class Final(Bare):
    """Reports `final_obs` and `final_info` itself, at resets and at steps, and is truncated after 3 steps."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0], {"final_obs": np.full(1, 7, np.float32), "final_info": 1}

    def step(self, action: Any) -> Any:
        obs, reward, *_ = super().step(action)
        return obs, reward, False, self.time == 3, {"final_obs": 5}


class Large(Bare):
    """An observation or a reward beyond float32, in the second environment, at step 2."""

    observation_space = gs.Box(-np.inf, np.inf, (1,), np.float64)

    def __init__(self, what: str, number: float) -> None:
        self.what, self.number = what, number

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.bad = seed == 11 if seed is not None else False
        return super().reset(seed=seed)[0].astype(np.float64), {}

    def step(self, action: Any) -> Any:
        super().step(action)
        now = self.bad and self.time == 2
        obs = np.array([self.number if now and self.what == "obs" else 0.0])
        return obs, self.number if now and self.what == "reward" else 1.0, False, False, {}


class Sized(Bare):
    """Its constructor takes a size and no render_mode."""

    def __init__(self, size: int = 3) -> None:
        self.size = size


class Whole(Bare):
    """Its actions are whole numbers in a box."""

    action_space = gs.Box(0, 10, (2,), np.int64)


class Half(Bare):
    """Its actions have half precision."""

    action_space = gs.Box(-1, 1, (2,), np.float16)


for kind in (Bare, Lives, Final, Large, Sized, Whole, Half):
    gymnasium.register(f"User{kind.__name__}-v0", lambda made=kind, **options: made(**options))


def _steps(name: str, count: int, **options: Any) -> list[Any]:
    env = make(name, num_envs=2, **options)
    env.reset(10)
    return [env.step(torch.zeros(2, dtype=torch.int64)) for _ in range(count)]


@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "partial"])
def test_a_life_that_an_environment_reports_ends_nothing(autoreset: str) -> None:
    found = _steps("UserLives-v0", 8, autoreset=autoreset)
    assert [x.discount[0].item() for x in found] == [1.0] * 7 + [0.0]


@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "partial"])
@pytest.mark.parametrize("engine", ["gymnasium", "async"])
def test_the_final_observation_is_the_last_of_the_episode(autoreset: str, engine: str) -> None:
    found = _steps("UserFinal-v0", 3, autoreset=autoreset, engine=engine)
    assert found[-1].cut.tolist() == [1.0, 1.0] and found[-1].final_obs.flatten().tolist() == [3.0, 3.0]


@pytest.mark.parametrize(("what", "words"), [("obs", "observation has"), ("reward", "reward is")])
def test_numbers_beyond_float32_are_found(what: str, words: str) -> None:
    with pytest.raises(EnvError, match=rf"env 1 at step 2 of its episode: its {words} 1e\+39, which is too large"):
        _steps("UserLarge-v0", 3, what=what, number=1e39)
    (last, *_) = _steps("UserLarge-v0", 2, what=what, number=1e38)[::-1]
    assert max(last.obs.max().item(), last.reward.max().item()) == pytest.approx(1e38)


def test_an_infinite_observation_stays_one() -> None:
    assert _steps("UserLarge-v0", 2, what="obs", number=float("inf"))[-1].obs.flatten().tolist() == [0.0, float("inf")]


@pytest.mark.parametrize(
    ("name", "options"), [("UserBare-v0", {}), ("UserSized-v0", {}), ("UserSized-v0", {"size": 4})]
)
def test_an_environment_without_render_mode_cannot_be_drawn(name: str, options: dict[str, Any]) -> None:
    for drawn in ({"render": True}, {"pixels": 64}):
        with pytest.raises(UserError, match=f"'{name}' cannot be drawn"):
            make(name, **options, **drawn)


def test_options_of_a_constructor_without_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="'UserBare-v0' does not take these options: size=5"):
        make("UserBare-v0", size=5)


def test_whole_numbers_in_a_box_are_no_actions() -> None:
    with pytest.raises(UserError, match=r"action space Box\(0, 10, \(2,\), int64\); .* Box of floating-point numbers"):
        make("UserWhole-v0")


def test_a_loaded_policy_acts_in_the_dtype_of_the_environment(tmp_path: Path) -> None:
    made = run.train("ppo", env="UserHalf-v0", steps=32, out=tmp_path / "a", show=False, evaluation_episodes=1)
    action = run.load(made.path).act(np.zeros(1, np.float32), explore=True)
    assert Half.action_space.contains(action)

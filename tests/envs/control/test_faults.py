"""Environments that break their spaces: the message names the environment, its index and the step."""

from __future__ import annotations

import os
import re
import signal
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.policy import a2c, impala, off_policy_ac, ppg, ppo, qac, reinforce, sac, sac_discrete, trpo
from foresight.algorithms.search import efficientzero, gumbel_muzero, muzero, sampled_muzero, stochastic_muzero
from foresight.algorithms.value import dqn, rainbow
from foresight.algorithms.world import dreamer, storm, tdmpc2
from foresight.envs.base import EnvError, Spaces
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.runtime.triggers import Interruption
from foresight.training.options import build_config, field_types
from tests.sabotage import sabotaged_by


class Broken(gymnasium.Env):  # type: ignore[type-arg]
    """Fails in the way `how` at step `at` of its episode `when` (0: as it begins), in the env seeded with `who`."""

    def __init__(self, how: str, parts: bool = False, when: int = 2, at: int = 3, who: int = 12) -> None:
        plain = gs.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = gs.Dict({"a": plain, "b": plain}) if parts else plain
        self.action_space = gs.Discrete(2)
        self.how, self.parts, self.when, self.at, self.who = how, parts, when, at, who
        self.episodes, self.steps, self.bad = 0, 0, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.bad, self.episodes = seed == self.who, 0
        self.episodes, self.steps = self.episodes + 1, 0
        return self.see(self.wrong()), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        seen = self.see(self.wrong())
        if self.now() and self.how == "last":
            return self.see(np.array([0, np.nan], np.float32)), 0.0, True, False, {}
        reward = float("nan") if self.now() and self.how == "reward" else 1.0
        return seen, reward, False, self.steps == 5, {}

    def now(self) -> bool:
        return self.bad and self.episodes == self.when and self.steps == self.at

    def wrong(self) -> Any:
        if self.now() and self.how == "raise":
            raise RuntimeError("the motor burned")
        if self.now() and self.how == "exit":
            os._exit(1)
        wrong: dict[str, Any] = {
            "nan": np.array([np.nan, 0], np.float32), "shape": np.zeros(3, np.float32),
            "dtype": np.array(["a", "b"]), "complex": np.zeros(2, np.complex64),
        }  # fmt: skip
        return wrong.get(self.how) if self.now() else None

    def see(self, wrong: Any = None) -> Any:
        plain = np.zeros(2, np.float32)
        seen = plain if wrong is None else wrong
        return {"a": plain, "b": seen} if self.parts else seen


class BrokenArm(Broken):
    """The same with real numbers for actions."""

    def __init__(self, how: str, when: int = 2, at: int = 3) -> None:
        super().__init__(how, when=when, at=at)
        self.action_space = gs.Box(-1.0, 1.0, (1,), np.float32)


gymnasium.register("Broken-v0", lambda **options: Broken(**options))
gymnasium.register("BrokenArm-v0", lambda **options: BrokenArm(**options))
WORDS = {
    "raise": "its step raised RuntimeError: the motor burned",
    "nan": "its observation has a NaN",
    "last": "its observation has a NaN",
    "reward": "its reward is nan",
    "shape": r"its observation has the shape \(3,\), but it declares \(2,\)",
    "dtype": "its observation has the dtype <U1, but it declares float32",
    "complex": "its observation has the dtype complex64, but it declares float32",
}


def _run(env: Any) -> None:
    env.reset(10)
    for _ in range(20):
        env.step(torch.zeros(4, dtype=torch.int64))


@sabotaged_by("foresight.envs.control.faults.nonfinite_env", lambda f: lambda obs, reward: None)
@pytest.mark.parametrize("how", ["nan", "last", "reward"])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "partial"])
def test_values_that_are_nan_are_found(how: str, autoreset: str) -> None:
    _says(how, autoreset=autoreset)


@pytest.mark.parametrize("how", ["raise", "shape", "dtype", "complex"])
@pytest.mark.parametrize("parts", [False, True], ids=["plain", "parts"])
def test_what_raised_is_found(how: str, parts: bool) -> None:
    _says(how, " .part 'b'." if parts and how != "raise" else "", parts=parts)


def test_in_another_process_too() -> None:
    _says("raise", engine="async")


@sabotaged_by("foresight.envs.control.faults.nonfinite_env", lambda f: lambda obs, reward: None)
@pytest.mark.parametrize("when", [1, 2], ids=["first", "later"])
def test_a_reset_to_nan_is_found(when: int) -> None:
    _says("nan", at=0, when=when, autoreset="partial")


@pytest.mark.parametrize("how", ["raise", "shape", "dtype", "complex"])
@pytest.mark.parametrize("parts", [False, True], ids=["plain", "parts"])
@pytest.mark.parametrize("when", [1, 2], ids=["first", "later"])
def test_a_reset_that_fails_is_found(how: str, parts: bool, when: int) -> None:
    _says(how, " .part 'b'." if parts and how != "raise" else "", at=0, parts=parts, when=when, autoreset="partial")


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_first_reset_in_another_process_too(how: str) -> None:
    _says(how, at=0, when=1, engine="async")


@pytest.mark.parametrize("who", [10, 12], ids=["first", "later"])
@pytest.mark.parametrize("at", [0, 3], ids=["reset", "step"])
def test_processes_are_closed_after_one_of_them_was_killed(who: int, at: int) -> None:
    env = make("Broken-v0", num_envs=4, engine="async", how="exit", when=1, at=at, who=who)
    processes = env._built.processes
    with pytest.raises(EnvError, match=r"Environment 'Broken-v0'.* raised EOFError\.$"):
        _run(env)
    _closes(env)
    assert not any(process.is_alive() for process in processes)


def test_processes_are_closed_after_one_of_them_was_killed_between_two_steps() -> None:
    env = make("Broken-v0", num_envs=4, engine="async", how="none")
    env.reset(10)
    env._engine.processes[0].kill()
    env._engine.processes[0].join()
    _closes(env)


@pytest.mark.parametrize("engine", ["gymnasium", "async"])
def test_what_was_built_is_closed_without_a_reset(engine: str) -> None:
    env = make("Broken-v0", num_envs=2, engine=engine, how="none")
    built = env._built
    env.close()
    assert built.closed


def test_processes_leave_the_signals_of_the_user_to_their_parent() -> None:
    reported: list[str] = []
    with Interruption(reported.append):
        env = make("Broken-v0", num_envs=2, engine="async", how="none")
        env.reset(10)
        for process in env._engine.processes * 2:
            os.kill(process.pid, signal.SIGINT)
            os.kill(process.pid, signal.SIGTERM)  # as a scheduler does, to all processes of a job
        assert env.step(torch.zeros(2, dtype=torch.int64)).reward.tolist() == [1, 1]
        last = env._engine.processes[-1]
        last.kill()
        last.join(10)
        _closes(env)
        os.kill(os.getpid(), signal.SIGINT)
    assert len(reported) == 1


def _closes(env: Any) -> None:
    """Close it in a thread, so that a close that never ends fails the test."""
    failed: list[BaseException] = []

    def close() -> None:
        try:
            env.close()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and not failed, failed


def _says(how: str, more: str = "", at: int = 3, **options: Any) -> None:
    env = make("Broken-v0", num_envs=4, how=how, at=at, **{"engine": "gymnasium", **options})
    try:
        reported = ""
        try:
            _run(env)
        except EnvError as error:
            reported = str(error)
        words = WORDS[how] if at else WORDS[how].replace("its step", "its reset")
        wanted = f"Environment 'Broken-v0', env 2 at step {at} of its episode: {words}{more}"
        assert re.match(wanted, reported), reported
    finally:
        env.close()


BOOTSTRAPPING = [a2c, impala, off_policy_ac, ppg, ppo, qac, reinforce, sac, sac_discrete, trpo, dqn, rainbow]
SEARCHING = [muzero, gumbel_muzero, sampled_muzero, stochastic_muzero, efficientzero]
IMAGINING = [dreamer, storm, tdmpc2]


@pytest.mark.parametrize("module", BOOTSTRAPPING + SEARCHING + IMAGINING, ids=lambda m: m.__name__.rpartition(".")[2])
def test_a_discount_of_1_needs_an_end(module: Any) -> None:
    """HalfCheetah never terminates: a value that bootstraps at its time limit is infinite."""
    box = module in (sac, sampled_muzero, tdmpc2)
    action = gs.Box(-1.0, 1.0, (2,), np.float32) if box else gs.Discrete(2)
    obs = gs.Box(-1.0, 1.0, (3,), np.float32)
    small = {"replay_size": 1_000} if "replay_size" in field_types(module.Config) else {}
    config = build_config(module.Config, gamma=1.0, **small)
    with pytest.raises(UserError, match=r"gamma is 1, but this environment never terminates .* Set gamma below 1"):
        module.build(config, Spaces(obs, action, continuing=True))
    assert module.build(config, Spaces(obs, action)).config.gamma == 1  # an episodic one


@pytest.mark.parametrize(
    ("name", "options", "continuing"),
    [
        ("Pendulum-v1", {}, True),
        ("Pendulum-v1", {"visible": [0, 1], "frame_stack": 2}, True),
        ("CartPole-v1", {}, False),
        ("MountainCar-v0", {"engine": "gymnasium"}, False),
        ("Glide-v0", {}, True),
        ("ErrandPoints-v0", {}, True),
        ("TwoRoutes-v0", {}, False),
        ("CheetahRun-v1", {"engine": "envpool"}, True),
        ("CheetahRun-v1", {"flatten": True, "action_repeat": 2}, True),
        ("LqrLqr21-v1", {"engine": "envpool"}, False),
        ("LunarLander-v3", {"engine": "envpool"}, False),
    ],
)
def test_which_environments_have_no_end(name: str, options: dict[str, Any], continuing: bool) -> None:
    env = make(name, num_envs=1, **options)
    assert env.spaces.continuing is continuing
    env.close()


@pytest.mark.parametrize("module", [dqn, rainbow, sac_discrete, qac], ids=lambda m: m.__name__.rpartition(".")[2])
def test_real_numbers_for_actions_are_refused(module: Any) -> None:
    spaces = Spaces(gs.Box(-1.0, 1.0, (3,), np.float32), gs.Box(-1.0, 1.0, (2,), np.float32))
    with pytest.raises(UserError, match=r"takes Box.*(sac|ppo)|Discrete (ones|actions), not Box.*ppo"):
        module.build(module.Config(), spaces)

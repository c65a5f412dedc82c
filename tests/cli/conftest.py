"""Algorithms of a few lines, which the command line takes by their path: one that acts and one that answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foresight.cli.main import main

PUSH = '''"""Push: always push right. Kept: nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

KIND = "control"
UNIT = "env steps"
METRICS = ("return",)


@dataclass(frozen=True)
class Config:
    """Two numbers that matter, and some that do not."""

    steps: int = 300  # env steps, chosen by hand
    seed: int = 0
    learning_rate: float = 0.5
    """Nothing is learned with it (Table 3)."""
    # How wide nothing is.
    hidden: tuple[int, ...] = (64, 64)
    anneal: bool = True
    limit: float | None = 2.0


@dataclass
class State:
    step: int = 0


def build(config, spaces, device="cpu"):
    return State()


def act(state, obs, carry=None, explore=False):
    return torch.ones(len(obs), dtype=torch.int64), {}, carry


def update(state, batch):
    return {}


def train(config, env, state=None, device="cpu"):
    state = state or build(config, env.spaces, device)
    while state.step < config.steps:
        state.step += 100
        yield state.step, {"return": float(state.step), "loss": config.learning_rate}, state
'''
PRESETS = """
CartPole-v1: {env: CartPole-v1, learning_rate: 0.25, limit: 3.0, source: "made up"}
"""
SUM = '''"""Sum: it could always add. Kept: the sum."""

from __future__ import annotations

import re
from dataclasses import dataclass

KIND = "text"
UNIT = "updates"
METRICS = ("reward",)


@dataclass(frozen=True)
class Config:
    """Numbers."""

    steps: int = 2
    seed: int = 0
    max_new_tokens: int = 8


@dataclass
class State:
    config: Config
    step: int = 0


def build(config, spaces, device="cpu"):
    return State(config)


def act(state, obs, carry=None, explore=False):
    questions = [one if isinstance(one, str) else one.question for one in obs]
    sums = [str(sum(int(n) for n in re.findall(r"[0-9]+", q))) for q in questions]
    return [f"It is {answer}."[: state.config.max_new_tokens] for answer in sums], {}, carry


def update(state, batch):
    return {}


def train(config, env, state=None, device="cpu"):
    state = state or build(config, env, device)
    while state.step < config.steps:
        state.step += 1
        sample = {"prompt": "1 + 1", "completion": "It is 2.", "reward": 1.0}
        yield state.step, {"reward": 1.0, "samples": [sample]}, state
'''


class Result:
    """What a command left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        """stdout, which must be one JSON document."""
        return json.loads(self.out)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`call("train", "ppo", ...)` as the console script would."""

    def run(*words: object) -> Result:
        capsys.readouterr()
        code = main([str(word) for word in words])
        reported = capsys.readouterr()
        return Result(code, reported.out, reported.err)

    return run


@pytest.fixture
def push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An algorithm for control, with a preset; the working directory is a temporary one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "push.py").write_text(PUSH)
    (tmp_path / "push.yaml").write_text(PRESETS)
    return tmp_path / "push.py"


@pytest.fixture
def adder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An algorithm for text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adder.py").write_text(SUM)
    return tmp_path / "adder.py"

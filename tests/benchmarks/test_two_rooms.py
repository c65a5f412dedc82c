"""Agents on LeWorldModel's offline data: the data are the same, and each agent trains on them and acts."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from foresight.algorithms.world import lewm, tdmpc2
from foresight.envs.make import make

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "two_rooms.py"
made = runpy.run_path(str(FILE))


def small(preset: str, seed: int) -> tuple[Any, dict[str, Any]]:
    config, options = lewm_config(preset, seed)
    return dataclasses.replace(config, data_steps=16 * 60, num_envs=16, candidates=8, elites=2, iterations=1), options


lewm_config = made["lewm_config"]
made["cell"].__globals__["lewm_config"] = small


def test_the_data_are_those_of_lewm() -> None:
    config, options = small("TwoRoom", 3)
    env = make("TwoRoom-v0", num_envs=16, **options)
    model = lewm.build(config, env.spaces).model
    data = lewm.gather(config, env, model)
    found = made["recorded"](config, made["Stacked"](make("TwoRoom-v0", num_envs=16, **options), 2), lambda a: {})
    steps = found.trajectory
    assert torch.equal(steps.obs[:, :, 0, ::2, ::2], data.image) and torch.equal(steps.action, data.action)
    assert steps.obs.shape[2:] == (2, 64, 64, 3) and torch.equal(steps.obs[:, :, :, 1::2], steps.obs[:, :, :, ::2])
    assert steps.cut.sum() >= 16  # of the time limit of 50 steps


@pytest.mark.parametrize("agent", made["AGENTS"])
def test_each_agent_trains_and_acts(agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full, few = tdmpc2.Config, {"candidates": 8, "proposals": 2, "elites": 2, "iterations": 1}
    monkeypatch.setattr(tdmpc2, "Config", lambda **given: full(**{**given, **few}))
    found = made["cell"]("TwoRoom", agent, 0, updates=2, episodes=16)
    assert 0 <= found["success"] <= 1 and found["updates"] == 2 and found["data_steps"] == 960
    assert (found["rewarded_steps"] is None) == (agent == "LeWorldModel")
    document = made["document"]([found])
    assert document["success"] == {"TwoRoom": {agent: found["success"], "random": found["random"]}}

"""TD-MPC2 and DreamerV3 on the offline data of LeWorldModel, and the rate at which each reaches goals: two rooms.

python benchmarks/two_rooms.py                          # runs what is missing in results/two-rooms.json
python benchmarks/two_rooms.py --presets TwoRoom --agents TD-MPC2 --seeds 0 1 2 --limit 25

The data of a seed are those of `lewm` with its preset: 32,768 steps of random behavior in `TwoRoom-v0`. LeWorldModel
reads images and actions alone. The others need a reward, so they also get that of the environment: 1 where the random
behavior happened to reach its goal. They see the image and the goal as a stack of two images (TD-MPC2, whose encoder
needs 39 pixels, with every pixel doubled). Nothing is gathered afterwards: TD-MPC2 plans with what it learned, and
DreamerV3 acts by the actor that it trained in imagination. `lewm` is trained here too, with its preset. All are
evaluated in the same 100 episodes.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "two-rooms.json"
PRESETS = ("TwoRoom", "TwoRoom-other-room")
AGENTS = ("LeWorldModel", "TD-MPC2", "DreamerV3")
UPDATES = 1_500  # of each, as lewm's preset
EPISODES, EVALUATION_ENVS = 100, 16


class Stacked:
    """An environment of `image` and `goal` as one observation `[2, side, side, 3]`, every pixel `zoom` times."""

    def __init__(self, env: Any, zoom: int) -> None:
        import numpy as np
        from gymnasium import spaces as gs

        from foresight.envs.base import Spaces

        height, width, channels = env.spaces.obs["image"].shape
        shape = (2, height * zoom, width * zoom, channels)
        self.env, self.zoom, self.num_envs = env, zoom, env.num_envs
        self.spaces = Spaces(gs.Box(0, 255, shape, np.uint8), env.spaces.action)

    def seen(self, obs: dict[str, Tensor]) -> Tensor:
        """The observation of two images."""
        both = torch.stack([obs["image"], obs["goal"]], 1)
        return both.repeat_interleave(self.zoom, 2).repeat_interleave(self.zoom, 3)

    def reset(self, seed: int) -> Tensor:
        """See `Env`."""
        return self.seen(self.env.reset(seed))

    def step(self, action: Tensor) -> Any:
        """See `Env`."""
        feedback = self.env.step(action)
        obs = self.seen(feedback.obs)
        same = feedback.final_obs is feedback.obs
        return feedback._replace(obs=obs, final_obs=obs if same else self.seen(feedback.final_obs))

    def close(self) -> None:
        """See `Env`."""
        self.env.close()


def lewm_config(preset: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """The Config of lewm's preset, and the options of its environment."""
    from foresight.algorithms.world import lewm
    from foresight.runtime import catalog
    from foresight.runtime.config import config_fields
    from foresight.training.options import build_config

    found = catalog.presets("lewm")[preset]
    fields = config_fields.fields("lewm", {**found, "seed": seed})
    return build_config(lewm.Config, **fields), dict(found.get("env_options") or {})


def recorded(config: Any, env: Stacked, width: Any) -> Any:
    """The Rollout of lewm's random behavior, see `lewm.gather`; `width` maps actions to what a replay stores beside."""
    from foresight.envs import collect
    from foresight.envs.base import Episodes

    generator = torch.Generator().manual_seed(config.seed)
    action = torch.zeros(env.num_envs, *env.spaces.action.shape)
    first = True

    def choose(obs: Tensor, carry: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
        nonlocal action, first
        fresh = torch.rand(env.num_envs, 1, generator=generator) * config.hold < 1
        drawn = 2 * torch.rand(action.shape, generator=generator) - 1
        action = torch.where(fresh | first, drawn, action)
        first = False
        return action, width(action), carry

    steps = config.data_steps // env.num_envs
    return collect.segment(env, env.reset(config.seed), choose, steps, torch.device("cpu"), Episodes(), terminal=True)


def tdmpc2(config: Any, env: Stacked, updates: int) -> tuple[Any, Any, float]:
    """The module and the trained State of TD-MPC2, and the mean reward of the data."""
    from foresight.algorithms.world import tdmpc2
    from foresight.envs import collect

    own = tdmpc2.Config(
        seed=config.seed, num_envs=env.num_envs, batch_size=128, replay_size=2 * config.data_steps, latent_size=64,
        hidden=128, channels=16, candidates=128, proposals=16, elites=16, iterations=4, horizon=5, gamma=0.95,
    )  # fmt: skip
    state = tdmpc2.build(own, env.spaces)
    data = recorded(config, env, lambda action: {})
    collect.add_sequences(state.replay, data)
    state.step = own.learning_starts
    for _ in range(updates):
        tdmpc2.update(state, tdmpc2.sample(state))
    return tdmpc2, state, float(data.trajectory.reward.mean())


def dreamer(config: Any, env: Stacked, updates: int) -> tuple[Any, Any, float]:
    """The module and the trained State of DreamerV3, and the mean reward of the data."""
    from foresight.algorithms.world import dreamer
    from foresight.envs import collect

    own = dreamer.Config(
        seed=config.seed, num_envs=env.num_envs, batch_size=16, sequence_length=32, imagined_last=8,
        replay_size=2 * config.data_steps, learning_rate=4e-4, lr_warmup=100, gamma=0.95, deter=256, hidden=128,
        groups=16, classes=16, blocks=1, units=128, layers=2, depth=8, patch=4, decoded=8,
    )  # fmt: skip
    state = dreamer.build(own, env.spaces)
    carry = state.model.initial(env.num_envs)
    kept = {name: carry[name] for name in state.model.kept}
    data = recorded(config, env, lambda action: {**kept, "action": state.actor.action_features(action)})
    collect.add_sequences(state.replay, data)
    state.step = own.learning_starts
    for _ in range(updates):
        dreamer.update(state, *dreamer.sample(state))
    return dreamer, state, float(data.trajectory.reward.mean())


def lewm(config: Any, env: Any, updates: int) -> tuple[Any, Any, float]:
    """The module and the trained State of LeWorldModel, which reads no reward."""
    from foresight.algorithms.world import lewm

    state = lewm.build(config, env.spaces)
    data = lewm.gather(config, env, state.model)
    for _ in range(updates):
        lewm.update(state, *lewm.sample(state, data))
    return lewm, state, math.nan


ZOOMS = {"LeWorldModel": 0, "TD-MPC2": 2, "DreamerV3": 1}  # 0: the environment as it is
TRAIN = {"LeWorldModel": lewm, "TD-MPC2": tdmpc2, "DreamerV3": dreamer}


def cell(preset: str, agent: str, seed: int, updates: int = UPDATES, episodes: int = EPISODES) -> dict[str, Any]:
    """Train one agent on the data, and let it reach goals."""
    from foresight.envs.make import make
    from foresight.runtime.evaluation import returns

    torch.set_num_threads(1)
    began = time.perf_counter()
    config, options = lewm_config(preset, seed)

    def made(count: int) -> Any:
        env = make("TwoRoom-v0", num_envs=count, **options)
        return Stacked(env, ZOOMS[agent]) if ZOOMS[agent] else env

    start = time.process_time()
    module, state, reward = TRAIN[agent](config, made(config.num_envs), updates)
    seconds = time.process_time() - start
    env = made(EVALUATION_ENVS)

    def act(obs: Any, carry: Any) -> Any:
        with torch.no_grad():
            action, _, carry = module.act(state, obs, carry, explore=False)
        return action, carry

    success = returns.evaluate(env, act, episodes, seed, module.reset_carry).mean
    random = returns.evaluate(env, returns.random_policy(env, seed), episodes, seed, None).mean
    return {
        "preset": preset, "agent": agent, "seed": seed, "success": round(float(success), 4),
        "random": round(float(random), 4), "updates": updates, "data_steps": config.data_steps,
        "rewarded_steps": None if math.isnan(reward) else round(reward * config.data_steps),
        "training_cpu_seconds": round(seconds, 1), "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def load() -> list[dict[str, Any]]:
    """The cells so far."""
    return list(json.loads(FILE.read_text(encoding="utf-8"))["cells"]) if FILE.is_file() else []


def key(found: dict[str, Any]) -> tuple[str, str, int]:
    """The identity of a cell."""
    return found["preset"], found["agent"], found["seed"]


def document(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The result: success rates by preset and agent, means over seeds."""
    from foresight.runtime import bench

    success: dict[str, dict[str, float]] = {}
    for preset in PRESETS:
        for agent in AGENTS:
            if mine := [c for c in cells if (c["preset"], c["agent"]) == (preset, agent)]:
                place = success.setdefault(preset, {})
                place[agent] = round(statistics.fmean(c["success"] for c in mine), 4)
                place["random"] = round(statistics.fmean(c["random"] for c in cells if c["preset"] == preset), 4)
    seeds = sorted({c["seed"] for c in cells})
    return {
        "what": "TD-MPC2 and DreamerV3 on the offline data of LeWorldModel: rates of reached goals in two rooms",
        "command": shlex.join(["python", "benchmarks/two_rooms.py", "--seeds", *map(str, seeds)]),
        "seeds": seeds,
        "success": success,
        "seconds": round(sum(c["seconds"] for c in cells), 1),
        "versions": bench.versions(),
        "machine": bench.machine(),
        "cells": sorted(cells, key=key),
    }


def main() -> None:
    """Run the cells that are missing; write the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--agents", nargs="+", choices=AGENTS, default=list(AGENTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--limit", type=float, default=math.inf, help="minutes after which no cell begins")
    given = parser.parse_args()

    from foresight.runtime.checkpoints import checkpoint

    began = time.monotonic()
    for one in [(p, a, s) for s in given.seeds for p in given.presets for a in given.agents]:
        if one in map(key, load()):
            continue
        if time.monotonic() - began > 60 * given.limit:
            break
        found = cell(*one)
        checkpoint.write_atomic(FILE, json.dumps(document([*load(), found]), indent=1) + "\n")
        print(found, flush=True)


if __name__ == "__main__":
    main()

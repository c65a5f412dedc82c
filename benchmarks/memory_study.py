"""Memory against length: GTrXL, a transformer, GRU, LSTM and no memory, under PPO and at equal parameters.

python benchmarks/memory_study.py --seeds 0          # what is missing of results/memory.json; stopped, it goes on
python benchmarks/memory_study.py --draw             # docs/media/memory.png and docs/memory.md from it

A cell is one training of one memory on one world at one length with one seed: the same budget of env steps, the same
settings, and a width chosen so that all memories have as many parameters as the GRU. A run stops early once
the mean return of the last 100 episodes was at least 0.96 (1 is perfect) after three updates in a row; how many steps
that took is part of the result. Every cell is then measured greedily on 200 episodes of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE, PICTURE, PAGE = (
    ROOT / "results" / "memory.json",
    ROOT / "docs" / "media" / "memory.png",
    ROOT / "docs" / "memory.md",
)
KINDS = ("gru", "lstm", "gtrxl", "transformer", "none")
LENGTHS = {"TMazePassive-v0": (10, 25, 50, 100), "RepeatFirst-v0": (16, 32, 64)}
STEPS = {"TMazePassive-v0": 300_000, "RepeatFirst-v0": 200_000}
TITLES = {"TMazePassive-v0": "Passive T-maze: the right arm", "RepeatFirst-v0": "Repeat-first: the right suit"}
PARAMETERS = 16_000  # of encoder, memory and heads together
EPISODES = 200


def settings(world: str, length: int, kind: str, seed: int, steps: int) -> Any:
    """The Config of a cell. A segment holds two episodes, so that starts stand within sequences."""
    from foresight.algorithms.policy import ppo

    return ppo.Config(
        steps=steps,
        seed=seed,
        num_envs=64,
        unroll_steps=max(32, min(128, 2 * (length + 1))),
        epochs=4,
        minibatches=4,
        learning_rate=2e-3,
        anneal=True,
        gamma=0.99,
        gae_lambda=0.95,
        entropy_coef=0.003,
        hidden=(32,),
        memory=None if kind == "none" else kind,
        memory_heads=2,
        memory_window=length + 1,
    )


def sized(config: Any, spaces: Any) -> tuple[Any, int]:
    """The Config with the width at which the network has PARAMETERS parameters, as nearly as widths allow."""
    from foresight.algorithms.policy import ppo

    def count(config: Any) -> int:
        return sum(p.numel() for p in ppo.build(config, spaces).network.parameters())

    if config.memory is None:  # two trunks of two layers
        options = [dataclasses.replace(config, hidden=(n, n)) for n in range(16, 160, 4)]
    else:
        options = [dataclasses.replace(config, memory_size=n) for n in range(8, 100, 4)]
    best = min(options, key=lambda c: abs(count(c) - PARAMETERS))
    return best, count(best)


def cell(world: str, length: int, kind: str, seed: int, steps: int) -> dict[str, Any]:
    """Train and measure one."""
    from foresight.algorithms.policy import ppo
    from foresight.envs.make import make

    began, spent = time.perf_counter(), time.process_time()
    config = settings(world, length, kind, seed, steps)
    env = make(world, num_envs=config.num_envs, length=length)
    config, parameters = sized(config, env.spaces)
    good, state = 0, ppo.build(config, env.spaces)
    curve: list[list[float]] = []
    for step, metrics, _ in ppo.train(config, env, state):
        curve.append([step, round(metrics.get("return", float("nan")), 3)])
        good = good + 1 if metrics.get("return", -1.0) >= 0.96 else 0
        if good == 3:
            break
    success = measure(ppo, state, world, length)
    thin = curve[:: max(1, len(curve) // 40)]
    return {
        "world": world,
        "length": length,
        "memory": kind,
        "seed": seed,
        "success": success,
        "steps": state.step,
        "solved_early": good == 3,
        "parameters": parameters,
        "width": config.memory_size if config.memory else config.hidden[0],
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - spent, 1),
        "curve": thin,
    }


def measure(ppo: Any, state: Any, world: str, length: int) -> float:
    """Share of greedy episodes that end in the right arm; for repeat-first the share of right answers."""
    from foresight.envs.make import make

    env = make(world, num_envs=EPISODES, length=length)
    obs, carry, right, steps = env.reset(10_000_019), None, 0.0, 0
    while True:
        action, _, carry = ppo.act(state, obs, carry)
        feedback = env.step(action)
        obs, steps = feedback.obs, steps + 1
        right += (feedback.reward > 0).float().mean().item()
        if feedback.cut.all():  # all episodes are equally long
            return round(right if world == "TMazePassive-v0" else right / steps, 4)


def ceiling(world: str, length: int) -> float:
    """The best success without memory: a guess, but repeat-first shows the answer at the first of its steps."""
    return 0.5 if world == "TMazePassive-v0" else (1 + (length - 1) / 4) / length


def load() -> dict[str, Any]:
    """The result so far."""
    if FILE.is_file():
        return dict(json.loads(FILE.read_text(encoding="utf-8")))
    return {"what": "success of memories against length, under PPO", "cells": []}


def key(found: dict[str, Any]) -> tuple[Any, ...]:
    """What a cell is of."""
    return found["world"], found["length"], found["memory"], found["seed"]


def run(seeds: list[int], worlds: list[str], budget: float) -> None:
    """Fill in the cells that are missing, shortest first, until `budget` seconds are spent."""
    from foresight.runtime import bench

    began = time.perf_counter()
    wanted = [
        (world, length, kind, seed)
        for seed in seeds
        for place in range(max(len(LENGTHS[world]) for world in worlds))
        for world in worlds
        for length in LENGTHS[world][place : place + 1]
        for kind in KINDS
    ]
    for world, length, kind, seed in wanted:
        result = load()
        if (world, length, kind, seed) in {key(found) for found in result["cells"]}:
            continue
        if time.perf_counter() - began > budget:
            break
        found = cell(world, length, kind, seed, STEPS[world])
        print(json.dumps({name: value for name, value in found.items() if name != "curve"}), flush=True)
        cells = sorted([*load()["cells"], found], key=key)
        result = {
            "what": result["what"],
            "command": "python benchmarks/memory_study.py --seeds "
            + " ".join(str(s) for s in sorted({c["seed"] for c in cells})),
            "seeds": sorted({c["seed"] for c in cells}),
            "steps": STEPS,
            "episodes": EPISODES,
            "seconds": round(sum(c["seconds"] for c in cells), 1),
            "versions": bench.versions(),
            "machine": bench.machine(),
            "cells": cells,
        }
        waiting = FILE.with_suffix(".new")
        waiting.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        waiting.replace(FILE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--worlds", nargs="+", choices=tuple(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no new cell is begun")
    parser.add_argument("--draw", action="store_true", help="only draw the picture and write the page")
    arguments = parser.parse_args()
    if not arguments.draw:
        import torch

        torch.set_num_threads(1)
        run(arguments.seeds, arguments.worlds, arguments.budget)
    sys.path.insert(0, str(Path(__file__).parent))
    from _memory_page import publish

    publish(load(), PICTURE, PAGE, KINDS, LENGTHS, ceiling, TITLES)


if __name__ == "__main__":
    main()

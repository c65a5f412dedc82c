"""Memory against length: GTrXL, a transformer, GRU, LSTM and no memory, under PPO and at equal parameters.

python benchmarks/memory_study.py                    # what is missing of results/memory.json, then the page
python benchmarks/memory_study.py --worlds TMazePassive-v0 --lengths 20 30 --kinds gru gtrxl --seeds 1 2
python benchmarks/memory_study.py --draw             # docs/media/memory.png and docs/memory.md from what there is

A cell is one training of one memory on one world at one length with one seed: the same budget of env steps (but for the
control without memory, see `World.control`), the same settings, and a width chosen so that all memories have about as
many parameters. A run stops early once the mean return
of the last 100 episodes was good (`World.good`) after three updates in a row; how many steps that took is part of the
result. Every cell is then measured greedily on 200 episodes of its own.

Several of these processes may work at once: each claims a cell before it trains it, and claims of a process that ends,
however it ends, are void. Stopped, the study goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "memory.json"
PICTURE, PAGE = ROOT / "docs" / "media" / "memory.png", ROOT / "docs" / "memory.md"
LOCKS = ROOT / "runs" / "memory"
KINDS = ("gru", "lstm", "gtrxl", "transformer", "none")
EPISODES = 200
TUNED = {"world": "TMazePassive-v0", "length": 25, "kinds": ("gru", "gtrxl"), "seed": 0}  # where settings were chosen


@dataclasses.dataclass(frozen=True)
class World:
    """A world of the study, at several lengths."""

    title: str
    lengths: tuple[int, ...]
    steps: int  # env steps of a cell at most
    # Fields of the Config of a cell without memory. In the T-maze it learns to walk, and then nothing tells it which
    # way to turn: it needs longer than the others, and must not forget to turn at all before it has got there.
    control: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ceiling: Callable[[int], float] | None = None  # the best success without memory at a length, where it is known
    good: float = 0.96  # mean return of 100 episodes at which a run may stop
    parameters: int = 16_000  # of encoder, memory and heads together
    graded: bool = False  # whether each step is right or wrong, `length` of them, instead of the whole episode
    preset: str | None = None  # of PPO, where the settings are not the study's own
    sight: int | None = None  # env steps that attention sees; None: the length and one more


ENVS = {
    "TMazePassive-v0": World(
        "Passive T-maze: the right arm",
        (10, 20, 25, 30),
        300_000,
        control={"steps": 1_000_000, "entropy_coef": 0.01},
        ceiling=lambda length: 0.5,
    ),
    "RepeatFirst-v0": World(
        "Repeat-first: the right suit",
        (16, 32, 64),
        200_000,
        ceiling=lambda length: (1 + (length - 1) / 4) / length,  # a guess, but the first of its steps shows the answer
        graded=True,
    ),
    "CartPole-v1-positions": World(
        "CartPole without velocities: the share of steps that it stands",
        (500,),  # the time limit; what must be remembered is the step before
        100_000,
        good=480.0,
        graded=True,
        preset="CartPole-v1-positions",
    ),
    "MiniGrid-Memory": World(
        "MiniGrid-Memory: the right object",
        (7,),  # the size of the maze
        1_000_000,
        ceiling=lambda length: 0.5,
        good=0.93,
        parameters=50_000,  # most of them encode what is seen
        sight=64,
    ),
}


def make(name: str, length: int, num_envs: int) -> Any:
    """The batch of worlds `name` at `length`."""
    from foresight.envs.make import make

    if name == "CartPole-v1-positions":
        return make("CartPole-v1", num_envs=num_envs, visible=[0, 2], time_limit=length)
    if name == "MiniGrid-Memory":
        return make(f"MiniGrid-MemoryS{length}-v0", num_envs=num_envs)
    return make(name, num_envs=num_envs, length=length)


def settings(name: str, length: int, kind: str, seed: int) -> Any:
    """The Config of a cell, but for its width."""
    from foresight.algorithms.policy import ppo
    from foresight.runtime import catalog
    from foresight.runtime.config.config_fields import fields

    env = ENVS[name]
    if env.preset:
        config = ppo.Config(**fields("ppo", catalog.presets("ppo")[env.preset]))
        window = config.memory_window
    else:  # a segment holds two episodes, so that starts stand within sequences
        window = env.sight or length + 1
        unroll = max(32, min(128, 2 * window))
        config = ppo.Config(num_envs=64, rollout_steps=unroll, learning_rate=2e-3, entropy_coef=0.003)
    config = dataclasses.replace(
        config,
        steps=env.steps,
        seed=seed,
        hidden=(32,),
        memory=None if kind == "none" else kind,
        memory_heads=2,
        memory_window=window,
    )
    return dataclasses.replace(config, **env.control) if kind == "none" else config


def sized(config: Any, spaces: Any, parameters: int) -> tuple[Any, int]:
    """The Config with the width at which the network has `parameters`, as nearly as widths allow, and how many."""
    from foresight.algorithms.policy import ppo

    def count(config: Any) -> int:
        return sum(p.numel() for p in ppo.build(config, spaces).network.parameters())

    if config.memory is None:  # two trunks of two layers
        options = [dataclasses.replace(config, hidden=(n, n)) for n in range(16, 160, 4)]
    else:
        options = [dataclasses.replace(config, memory_size=n) for n in range(8, 100, 4)]
    best = min(options, key=lambda c: abs(count(c) - parameters))
    return best, count(best)


def cell(name: str, length: int, kind: str, seed: int) -> dict[str, Any]:
    """Train and measure one."""
    from foresight.algorithms.policy import ppo

    began, spent = time.perf_counter(), time.process_time()
    world, config = ENVS[name], settings(name, length, kind, seed)
    env = make(name, length, config.num_envs)
    config, parameters = sized(config, env.spaces, world.parameters)
    good, state = 0, ppo.build(config, env.spaces)
    curve: list[list[float]] = []
    for step, metrics, _ in ppo.train(config, env, state):
        curve.append([step, round(metrics.get("return", float("nan")), 3)])
        good = good + 1 if metrics.get("return", -1e9) >= world.good else 0
        if good == 3:
            break
    success = measure(ppo, state, name, length)
    thin = curve[:: max(1, len(curve) // 40)]
    return {
        "world": name,
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


def measure(ppo: Any, state: Any, name: str, length: int) -> float:
    """Share of greedy episodes that end well, or of their steps where each is right or wrong; see `World.graded`."""
    import torch

    env = make(name, length, EPISODES)
    obs, carry, right, running = env.reset(10_000_019), None, 0.0, torch.ones(EPISODES)
    while running.any():
        action, _, carry = ppo.act(state, obs, carry)
        feedback = env.step(action)
        obs, carry = feedback.obs, ppo.reset_carry(carry, feedback.cut)
        right += ((feedback.reward > 0) * running).sum().item()
        running = running * (1 - feedback.cut)  # the first episode of each world counts
    return round(right / EPISODES / (length if ENVS[name].graded else 1), 4)


def load() -> dict[str, Any]:
    """The result so far."""
    if FILE.is_file():
        return dict(json.loads(FILE.read_text(encoding="utf-8")))
    return {"what": "success of memories against length, under PPO", "cells": []}


def key(found: dict[str, Any]) -> tuple[Any, ...]:
    """What a cell is of."""
    return found["world"], found["length"], found["memory"], found["seed"]


@contextlib.contextmanager
def locked(name: str, wait: bool = True) -> Iterator[bool]:
    """Hold the lock `name` among processes, and say whether it was free. The system frees it if a process dies."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    with (LOCKS / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        yield free


def run(wanted: list[tuple[Any, ...]], budget: float) -> int:
    """Train the cells that are missing and that nobody else trains, until `budget` seconds are spent.

    Returns how many failed; their errors are printed, and the study goes on.
    """
    began, failed = time.perf_counter(), 0
    for one in wanted:
        if time.perf_counter() - began > budget:
            break
        with locked("-".join(str(part) for part in one), wait=False) as mine:
            if not mine or one in {key(found) for found in load()["cells"]}:
                continue
            try:
                found = cell(*one)
            except Exception:
                traceback.print_exc()
                failed += 1
                continue
            print(json.dumps({name: value for name, value in found.items() if name != "curve"}), flush=True)
            with locked("result"):
                add(found)
    return failed


def add(found: dict[str, Any]) -> None:
    """Write the result with one more cell."""
    from foresight.runtime import bench
    from foresight.runtime.checkpoints import checkpoint

    result = load()
    cells = sorted([*result["cells"], found], key=key)
    seeds = sorted({c["seed"] for c in cells})
    result = {
        "what": result["what"],
        "command": "python benchmarks/memory_study.py --seeds " + " ".join(str(seed) for seed in seeds),
        "seeds": shared(cells),
        "steps": {name: env.steps for name, env in ENVS.items()},
        "episodes": EPISODES,
        "success": means(cells),
        "seconds": round(sum(c["seconds"] for c in cells), 1),
        "versions": bench.versions(),
        "machine": bench.machine(),
        "cells": cells,
    }
    checkpoint.write_whole(FILE, json.dumps(result, indent=1) + "\n")


def shared(cells: list[dict[str, Any]]) -> list[int]:
    """The seeds that everything which was run has had."""
    by_place: dict[tuple[Any, ...], set[int]] = {}
    for c in cells:
        by_place.setdefault(key(c)[:3], set()).add(c["seed"])
    return sorted(set.intersection(*by_place.values()))


def means(cells: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean success over the seeds that count, by world, length and memory."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for c in cells:
        if c["seed"] != TUNED["seed"]:
            found.setdefault((c["world"], c["length"], c["memory"]), []).append(c["success"])
    table: dict[str, dict[str, dict[str, float]]] = {}
    for (name, length, kind), values in found.items():
        table.setdefault(name, {}).setdefault(str(length), {})[kind] = statistics.fmean(values)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seed 0 is not counted: see TUNED")
    parser.add_argument("--worlds", nargs="+", choices=tuple(ENVS), default=list(ENVS))
    parser.add_argument("--lengths", type=int, nargs="+", help="only these (default: every length of a world)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no new cell is begun")
    parser.add_argument("--draw", action="store_true", help="only draw the picture and write the page")
    arguments = parser.parse_args()
    failed = 0
    if not arguments.draw:
        import torch

        torch.set_num_threads(1)
        wanted = [  # a seed of everything before the next, the shortest first
            (name, length, kind, seed)
            for seed in arguments.seeds
            for place in range(max(len(env.lengths) for env in ENVS.values()))
            for name in arguments.worlds
            for length in ENVS[name].lengths[place : place + 1]
            if arguments.lengths is None or length in arguments.lengths
            for kind in arguments.kinds
        ]
        failed = run(wanted, arguments.budget)
    sys.path.insert(0, str(Path(__file__).parent))
    from _memory_page import publish

    from foresight.runtime.checkpoints import checkpoint

    with locked("result"):
        result = load()
        if result["cells"]:  # written before there were means
            known = {"success": means(result["cells"]), "seeds": shared(result["cells"])}
            checkpoint.write_whole(FILE, json.dumps({**result, **known}, indent=1) + "\n")
        publish(result, PICTURE, PAGE, KINDS, ENVS, TUNED)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

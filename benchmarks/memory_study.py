"""Success of memories by length: GTrXL, a transformer, GRU, LSTM and no memory, with PPO and equal parameters.

python benchmarks/memory_study.py                    # runs what is missing in results/memory.json, then the page
python benchmarks/memory_study.py --envs TMazePassive-v0 --lengths 20 30 --kinds gru gtrxl --seeds 1 2
python benchmarks/memory_study.py --draw             # only docs/media/memory.png and docs/memory.md

A cell is a training run of one memory in one environment at one length with one seed. All cells have the same budget of
env steps (except the control without memory, see `Env.control`), the same settings, and a width at which all memories
have about equally many parameters. A run stops early once the mean return of the last 100 episodes was at least
`Env.good` after three consecutive updates; the number of steps until then is part of the result. Each cell is then
evaluated greedily on 200 new episodes.

Several processes may run at once: each locks a cell before it trains it, and the locks of a process end with it. A
stopped study resumes when it is started again.
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
TUNED = {"env": "TMazePassive-v0", "length": 25, "kinds": ("gru", "gtrxl"), "seed": 0}  # where settings were chosen


@dataclasses.dataclass(frozen=True)
class Env:
    """An environment of the study, at several lengths."""

    title: str
    lengths: tuple[int, ...]
    steps: int  # maximum env steps of a cell
    # Config fields of a cell without memory. In the T-maze it first learns to walk, and the observation at the junction
    # does not show which way to turn: it needs more steps than the others, and more entropy, to turn at all.
    control: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ceiling: Callable[[int], float] | None = None  # the best success without memory at a length, if known
    good: float = 0.96  # mean return of 100 episodes at which a run may stop
    parameters: int = 16_000  # of encoder, memory and heads together
    graded: bool = False  # whether each of the `length` steps is scored, instead of the episode
    preset: str | None = None  # a preset of PPO to use instead of the settings of the study
    sight: int | None = None  # env steps that attention sees; None: length + 1


ENVS = {
    "TMazePassive-v0": Env(
        "Passive T-maze: success rate",
        (10, 20, 25, 30),
        300_000,
        control={"steps": 1_000_000, "entropy_coef": 0.01},
        ceiling=lambda length: 0.5,
    ),
    "RepeatFirst-v0": Env(
        "Repeat-first: share of correct suits",
        (16, 32, 64),
        200_000,
        ceiling=lambda length: (1 + (length - 1) / 4) / length,  # a guess, but the first of its steps shows the answer
        graded=True,
    ),
    "CartPole-v1-positions": Env(
        "CartPole without velocities: share of the time limit survived",
        (500,),  # the time limit; only the previous step must be remembered
        100_000,
        good=480.0,
        graded=True,
        preset="CartPole-v1-positions",
    ),
    "MiniGrid-Memory": Env(
        "MiniGrid-Memory: success rate",
        (7,),  # the size of the maze
        1_000_000,
        ceiling=lambda length: 0.5,
        good=0.93,
        parameters=50_000,  # most of them in the encoder
        sight=64,
    ),
}


def make(name: str, length: int, num_envs: int) -> Any:
    """The vectorized environment `name` at `length`."""
    from foresight.envs.make import make

    if name == "CartPole-v1-positions":
        return make("CartPole-v1", num_envs=num_envs, visible=[0, 2], time_limit=length)
    if name == "MiniGrid-Memory":
        return make(f"MiniGrid-MemoryS{length}-v0", num_envs=num_envs)
    return make(name, num_envs=num_envs, length=length)


def settings(name: str, length: int, kind: str, seed: int) -> Any:
    """The Config of a cell, except its width."""
    from foresight.algorithms.policy import ppo
    from foresight.runtime import catalog
    from foresight.runtime.config.config_fields import fields

    env = ENVS[name]
    if env.preset:
        config = ppo.Config(**fields("ppo", catalog.presets("ppo")[env.preset]))
        window = config.memory_window
    else:  # a segment holds two episodes, so that sequences contain episode starts
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
    """The Config with the width at which the network has about `parameters` parameters, and their exact number."""
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
    """Train and evaluate one cell."""
    from foresight.algorithms.policy import ppo

    began, spent = time.perf_counter(), time.process_time()
    spec, config = ENVS[name], settings(name, length, kind, seed)
    env = make(name, length, config.num_envs)
    config, parameters = sized(config, env.spaces, spec.parameters)
    good, state = 0, ppo.build(config, env.spaces)
    curve: list[list[float]] = []
    for step, metrics, _ in ppo.train(config, env, state):
        curve.append([step, round(metrics.get("return", float("nan")), 3)])
        good = good + 1 if metrics.get("return", -1e9) >= spec.good else 0
        if good == 3:
            break
    success = measure(ppo, state, name, length)
    thin = curve[:: max(1, len(curve) // 40)]
    return {
        "env": name,
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
    """The success rate of greedy episodes or, if `Env.graded`, of their steps."""
    import torch

    env = make(name, length, EPISODES)
    obs, carry, right, running = env.reset(10_000_019), None, 0.0, torch.ones(EPISODES)
    while running.any():
        action, _, carry = ppo.act(state, obs, carry)
        feedback = env.step(action)
        obs, carry = feedback.obs, ppo.reset_carry(carry, feedback.cut)
        right += ((feedback.reward > 0) * running).sum().item()
        running = running * (1 - feedback.cut)  # the first episode of each environment counts
    return round(right / EPISODES / (length if ENVS[name].graded else 1), 4)


def load() -> dict[str, Any]:
    """The result so far."""
    if not FILE.is_file():
        return {"what": "success rate of PPO by kind of memory and length", "cells": []}
    result = dict(json.loads(FILE.read_text(encoding="utf-8")))
    for found in result["cells"]:
        if "world" in found:  # the former name
            found["env"] = found.pop("world")
    return result


def key(found: dict[str, Any]) -> tuple[Any, ...]:
    """The identity of a cell."""
    return found["env"], found["length"], found["memory"], found["seed"]


@contextlib.contextmanager
def locked(name: str, wait: bool = True) -> Iterator[bool]:
    """Try to hold the lock `name` among processes; yields whether it was free. It is released if the process dies."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    with (LOCKS / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        yield free


def run(wanted: list[tuple[Any, ...]], budget: float) -> int:
    """Train the missing cells that no other process trains, until `budget` seconds are spent.

    Returns the number of failed cells; their errors are printed, and the study continues.
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
    checkpoint.write_atomic(FILE, json.dumps(result, indent=1) + "\n")


def shared(cells: list[dict[str, Any]]) -> list[int]:
    """The seeds with which every combination that was run was run."""
    by_place: dict[tuple[Any, ...], set[int]] = {}
    for c in cells:
        by_place.setdefault(key(c)[:3], set()).add(c["seed"])
    return sorted(set.intersection(*by_place.values()))


def means(cells: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean success over the seeds that count, by environment, length and memory."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for c in cells:
        if c["seed"] != TUNED["seed"]:
            found.setdefault((c["env"], c["length"], c["memory"]), []).append(c["success"])
    table: dict[str, dict[str, dict[str, float]]] = {}
    for (name, length, kind), values in found.items():
        table.setdefault(name, {}).setdefault(str(length), {})[kind] = statistics.fmean(values)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seed 0 is not counted: see TUNED")
    parser.add_argument("--envs", nargs="+", choices=tuple(ENVS), default=list(ENVS))
    parser.add_argument("--lengths", type=int, nargs="+", help="only these (default: all lengths of each)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no new cell is started")
    parser.add_argument("--draw", action="store_true", help="only draw the picture and write the page")
    arguments = parser.parse_args()
    failed = 0
    if not arguments.draw:
        import torch

        torch.set_num_threads(1)
        wanted = [  # all cells of a seed before the next seed, the shortest first
            (name, length, kind, seed)
            for seed in arguments.seeds
            for place in range(max(len(env.lengths) for env in ENVS.values()))
            for name in arguments.envs
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
        if result["cells"]:  # also adds the means to a file of a former version
            known = {"success": means(result["cells"]), "seeds": shared(result["cells"])}
            checkpoint.write_atomic(FILE, json.dumps({**result, **known}, indent=1) + "\n")
        publish(result, PICTURE, PAGE, KINDS, ENVS, TUNED)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

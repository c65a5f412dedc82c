"""The planner of trained PlaNet runs against random shooting in the same model: results/planners.json.

python benchmarks/planners.py                                    # every run of `foresight reproduce world`
python benchmarks/planners.py CartpoleSwingup-v1 --episodes 10

Both plan with the weights of the same run, from the same starts. Random shooting takes the best of as many random
sequences as CEM scores in all its iterations. `cem_by_best` acts by the best sequence that CEM scored, too, not by its
last mean (`act_best`). Figures are means over seeds. What the file has with as many episodes stays in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "planners.json"
RUNS = ROOT / "runs" / "reproduce"
TASKS = ("CartpoleSwingup-v1", "BallInCupCatch-v1", "Pendulum-v1")
PLANNERS = ("cem", "random_shooting", "cem_by_best")
EPISODES = 10  # of an evaluation


def compared(run: Path, episodes: int) -> dict[str, Any]:
    """Returns of the planners with the model of `run`."""
    from foresight.runtime import run as runs

    agent = runs.load(run)
    config = agent.state.config
    shooting = dataclasses.replace(config, iterations=1, elites=1, candidates=config.candidates * config.iterations)
    found: dict[str, Any] = {"run": run.name, "gradient_steps": agent.state.gradient_steps, "env_steps": agent.step}
    by_best = dataclasses.replace(config, act_best=True)
    for name, settings in zip(PLANNERS, (config, shooting, by_best), strict=True):
        agent.state.config = settings
        began = time.monotonic()
        result = agent.evaluate(episodes)
        found[name] = result.mean
        found[f"{name}_returns"] = list(result.values)
        found[f"{name}_seconds"] = round(time.monotonic() - began, 1)
    found["random"] = runs.Run(run).summary["baseline"]["mean"]
    agent.close()
    return found


def combined(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The rows of a task by seed, and their means."""
    shared = [name for name in (*PLANNERS, "random") if all(name in row for row in runs.values())]
    found: dict[str, Any] = {name: statistics.fmean(row[name] for row in runs.values()) for name in shared}
    found["cem_minus_random_shooting"] = found["cem"] - found["random_shooting"]
    for name in set(shared) & {"cem", "cem_by_best"}:
        found[f"{name}_is_better"] = found[name] > found["random_shooting"]
    return {**found, "runs": runs}


def kept(known: dict[str, Any], episodes: int) -> dict[str, dict[str, Any]]:
    """By task, the rows by seed of a result that have as many `episodes`."""
    rows = {name: row["runs"] for name, row in known.items() if isinstance(row, dict) and "runs" in row}
    equal = {
        name: {seed: run for seed, run in runs.items() if len(run["cem_returns"]) == episodes}
        for name, runs in rows.items()
    }
    return {name: runs for name, runs in equal.items() if runs}


def command(tasks: Iterable[str], episodes: int, seeds: Iterable[int]) -> str:
    """What makes the whole file, which holds these `tasks` and `seeds`."""
    named = sorted(tasks, key=lambda task: TASKS.index(task) if task in TASKS else len(TASKS))
    parts = [] if tuple(named) == TASKS else named
    parts += [] if episodes == EPISODES else ["--episodes", str(episodes)]
    return shlex.join(["python", "benchmarks/planners.py", *parts, "--seeds", *map(str, seeds)])


def main() -> None:
    """Compare the planners of every trained run, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()

    import torch

    from foresight.runtime import bench
    from foresight.runtime.checkpoints import checkpoint

    torch.set_num_threads(1)
    known = json.loads(FILE.read_text()) if FILE.is_file() else {"seconds": 0.0}
    rows = kept(known, given.episodes)
    began = time.monotonic()
    for task, seed in itertools.product(given.tasks, given.seeds):
        run = RUNS / f"planet-{task}-{seed}"
        if str(seed) in rows.get(task, {}):
            continue
        if not (run / "summary.json").is_file():
            print(f"{run} has not ended: foresight reproduce world --only planet-{task}", file=sys.stderr)
            continue
        found = rows.setdefault(task, {})[str(seed)] = compared(run, given.episodes)
        print(task, {name: value for name, value in found.items() if not isinstance(value, list)}, flush=True)
        seeds = sorted(set.intersection(*({int(seed) for seed in runs} for runs in rows.values())))
        document = {
            "what": "PlaNet: planning by CEM and by random shooting in the same learned model",
            "command": command(rows, given.episodes, seeds),
            "seeds": seeds,
            "episodes": given.episodes,
            **{name: combined(runs) for name, runs in rows.items()},
            "versions": bench.versions(),
            "machine": bench.machine(),
            "seconds": round(known["seconds"] + time.monotonic() - began, 1),
        }
        checkpoint.write_atomic(FILE, json.dumps(document, indent=2) + "\n")
    if not rows:
        sys.exit("Nothing is measured: there is no run.")


if __name__ == "__main__":
    main()

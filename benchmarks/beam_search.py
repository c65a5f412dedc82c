"""Trajectory Transformer: returns of the beam, of rollouts sampled from the same model, and of the data, in results/.

python benchmarks/beam_search.py                   # every seed of `foresight reproduce sequence`

Sampled: one rollout, whose first action is taken. Best rollout: of as many as the beam has continuations, whole and
without pruning, the one with the highest predicted return.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "reproduce"
NAME = "trajectory_transformer-Pendulum-v1"


def main() -> None:
    """Evaluate every seed, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=8)
    given = parser.parse_args()

    import torch

    from foresight.runtime import bench
    from foresight.runtime import run as loading
    from foresight.runtime.checkpoints import checkpoint
    from foresight.training import offline

    torch.set_num_threads(1)
    began = time.monotonic()
    runs = [run for run in sorted(RUNS.glob(f"{NAME}-?")) if (run / "summary.json").is_file()]
    if not runs:
        sys.exit(f"There is no run: foresight reproduce sequence --only {NAME}")
    returns: dict[str, dict[str, float]] = {"beam": {}, "best_rollout": {}, "sampled": {}}
    data = 0.0
    for run in runs:
        agent = loading.load(run)
        config = agent.config
        data = float(offline.read(config.data, agent.spaces.obs, agent.spaces.action).returns.mean())
        width = config.beam_width * config.branches
        plans = {
            "beam": {},
            "best_rollout": {"branches": 1, "beam_width": width},
            "sampled": {"branches": 1, "beam_width": 1},
        }
        for name, changed in plans.items():
            agent.state.config = dataclasses.replace(config, **changed)
            returns[name][run.name[-1]] = agent.evaluate(given.episodes).mean
        agent.close()
        print(run.name, returns, data, flush=True)
    means = {name: statistics.fmean(each.values()) for name, each in returns.items()}
    document = {
        "what": "trajectory_transformer on Pendulum-v1: returns of the beam, of sampled rollouts and of the data",
        "command": shlex.join(["python", "benchmarks/beam_search.py", *sys.argv[1:]]),
        "seeds": [int(seed) for seed in returns["beam"]],
        "episodes": given.episodes,
        **means,
        "data": data,
        "beam_over_sampled": means["beam"] - means["sampled"],
        "beam_over_best_rollout": means["beam"] - means["best_rollout"],
        "sampled_over_data": means["sampled"] - data,
        "each": returns,
        "versions": bench.versions(),
        "machine": bench.machine(),
        "seconds": round(time.monotonic() - began, 1),
    }
    checkpoint.write_atomic(
        ROOT / "results" / "trajectory_transformer-beam.json", json.dumps(document, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()

"""Decision Transformer: the returns achieved for returns asked for: results/decision_transformer-asked_returns.json.

python benchmarks/asked_returns.py                    # every seed of `foresight reproduce sequence`
python benchmarks/asked_returns.py --episodes 50
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
FILE = ROOT / "results" / "decision_transformer-asked_returns.json"
RUNS = ROOT / "runs" / "reproduce"
ASKED = (25, 50, 100, 150, 200, 300, 400, 500)


def curve(run: Path, episodes: int) -> list[float]:
    """The mean return of `run` for each of the returns asked for."""
    from foresight.runtime import run as runs

    agent, found = runs.load(run), []
    for asked in ASKED:
        agent.state.config = dataclasses.replace(agent.config, target_return=float(asked))
        found.append(agent.evaluate(episodes).mean)
    agent.close()
    return found


def main() -> None:
    """Measure every seed, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=32)
    given = parser.parse_args()

    import torch
    from scipy import stats

    from foresight.runtime import bench
    from foresight.runtime.checkpoints import checkpoint

    torch.set_num_threads(1)
    began = time.monotonic()
    runs = [run for run in sorted(RUNS.glob("decision_transformer-CartPole-v1-?")) if (run / "summary.json").is_file()]
    if not runs:
        sys.exit("There is no run: foresight reproduce sequence --only decision_transformer-CartPole-v1")
    curves = {}
    for run in runs:
        curves[run.name[-1]] = curve(run, given.episodes)
        print(run.name, dict(zip(ASKED, curves[run.name[-1]], strict=True)), flush=True)
    ranks = [float(stats.spearmanr(ASKED, achieved).statistic) for achieved in curves.values()]
    document = {
        "what": "decision_transformer on CartPole-v1: the return asked for and the mean return achieved",
        "command": shlex.join(["python", "benchmarks/asked_returns.py", *sys.argv[1:]]),
        "seeds": [int(seed) for seed in curves],
        "episodes": given.episodes,
        "asked": list(ASKED),
        "achieved": curves,
        "spearman": statistics.fmean(ranks),
        "least_spearman": min(ranks),
        "versions": bench.versions(),
        "machine": bench.machine(),
        "seconds": round(time.monotonic() - began, 1),
    }
    checkpoint.write_atomic(FILE, json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Decision Transformer: the returns achieved for returns asked for, in results/.

python benchmarks/asked_returns.py CartPole-v1                # every seed of `foresight reproduce sequence`
python benchmarks/asked_returns.py Hopper-v5 --episodes 50

A model can only imitate what is in its data: `spearman` is the rank correlation over the asked returns that at least 5%
of the episodes reach, up to `data_95`, `spearman_beyond` over all, those included that few or none reach.
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
ASKED = {
    "CartPole-v1": (25, 50, 100, 150, 200, 300, 400, 500),
    "LunarLander-v3": (-400, -200, -100, 0, 100, 200, 250),
    "Hopper-v5": (50, 250, 500, 1_000, 1_500, 2_000, 2_500, 3_000),
}


def reached(run: Path) -> float:
    """The return that 5% of the episodes of a run's data reach."""
    import torch

    from foresight.runtime import run as runs
    from foresight.training import offline

    agent = runs.load(run)
    spaces = agent.state.net.obs_space, agent.state.net.action_space
    found = float(torch.quantile(offline.read(agent.config.data, *spaces).returns, 0.95))
    agent.close()
    return found


def curve(run: Path, asked: tuple[int, ...], episodes: int) -> list[float]:
    """The mean return of `run` for each of the returns asked for."""
    from foresight.runtime import run as runs

    agent, found = runs.load(run), []
    for one in asked:
        agent.state.config = dataclasses.replace(agent.config, target_return=float(one))
        found.append(agent.evaluate(episodes).mean)
    agent.close()
    return found


def curves(name: str, asked: tuple[int, ...], episodes: int) -> dict[str, list[float]]:
    """`curve` of every seed of the row `name`."""
    runs = [run for run in sorted(RUNS.glob(f"{name}-?")) if (run / "summary.json").is_file()]
    if not runs:
        sys.exit(f"There is no run: foresight reproduce sequence --only {name}")
    found = {}
    for run in runs:
        found[run.name[-1]] = curve(run, asked, episodes)
        print(run.name, dict(zip(asked, found[run.name[-1]], strict=True)), flush=True)
    return found


def main() -> None:
    """Measure every seed, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(ASKED))
    parser.add_argument("--episodes", type=int, default=32)
    given = parser.parse_args()

    import torch
    from scipy import stats

    from foresight.runtime import bench
    from foresight.runtime.checkpoints import checkpoint

    torch.set_num_threads(1)
    began = time.monotonic()
    task, asked = given.task, ASKED[given.task]
    found = curves(f"decision_transformer-{task}", asked, given.episodes)
    # Without the token the return asked for is not read: the ends of the curve are enough to see that it is flat.
    constant = curves(f"decision_transformer-{task}-constant", (asked[0], asked[-1]), given.episodes)
    high = reached(RUNS / f"decision_transformer-{task}-{min(found)}")
    inside = sum(one <= high for one in asked)
    ranks = [float(stats.spearmanr(asked[:inside], achieved[:inside]).statistic) for achieved in found.values()]
    beyond = [float(stats.spearmanr(asked, achieved).statistic) for achieved in found.values()]
    document = {
        "what": f"decision_transformer on {task}: the return asked for and the mean return achieved",
        "command": shlex.join(["python", "benchmarks/asked_returns.py", *sys.argv[1:]]),
        "seeds": [int(seed) for seed in found],
        "episodes": given.episodes,
        "asked": list(asked),
        "achieved": found,
        "spearman": statistics.fmean(ranks),
        "least_spearman": min(ranks),
        "spearman_beyond": statistics.fmean(beyond),
        "data_95": round(high, 1),
        "constant_token": constant,
        "constant_difference": max(abs(ends[1] - ends[0]) for ends in constant.values()),
        "versions": bench.versions(),
        "machine": bench.machine(),
        "seconds": round(time.monotonic() - began, 1),
    }
    file = ROOT / "results" / f"decision_transformer-asked_returns-{task}.json"
    checkpoint.write_atomic(file, json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()

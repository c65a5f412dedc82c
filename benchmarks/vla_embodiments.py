"""One VLA of two embodiments compared with one of each, in the environment of each: results/vla-embodiments.json.

python benchmarks/vla_embodiments.py                    # 200 episodes of each run of `foresight reproduce sequence`
python benchmarks/vla_embodiments.py --runs runs        # of the runs runs/vla-RT-X-0, runs/vla-RT-X-Reach-0, ...

Seeds of episodes are far from those of training.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "vla-embodiments.json"
ENVS = {"reach": "MetaWorld/Reach-v3", "babyai": "BabyAI-GoToLocal-v0"}
NAMES = {"vla-RT-X": ("reach", "babyai"), "vla-RT-X-Reach": ("reach",), "vla-RT-X-BabyAI": ("babyai",)}


def main() -> None:
    """Evaluate every run, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "reproduce", help="the folder of the runs")
    given = parser.parse_args()

    import torch

    from foresight.runtime import bench
    from foresight.runtime import run as runs

    torch.set_num_threads(1)
    began, seeds = time.monotonic(), set[int]()
    document: dict[str, dict[str, Any]] = {}
    for name, each in NAMES.items():
        rows = {}
        for folder in sorted(given.runs.glob(f"{name}-?")):
            if not (folder / "summary.json").is_file():
                continue
            agent = runs.load(folder)
            seed = agent.settings.seed
            rows[str(seed)] = {one: agent.evaluate(given.episodes, seed, env=ENVS[one]).mean for one in each}
            agent.close()
            print(folder.name, rows[str(seed)], flush=True)
        if rows:
            document[name] = {one: statistics.fmean(row[one] for row in rows.values()) for one in each}
            document[name]["each_seed"] = rows
            seeds |= {int(seed) for seed in rows}
    if not seeds:
        sys.exit("There is no run: foresight reproduce sequence --only vla-RT-X vla-RT-X-Reach vla-RT-X-BabyAI")
    header = {
        "what": "one VLA of two embodiments, and one of each: success in each environment",
        "command": shlex.join(["python", "benchmarks/vla_embodiments.py", *sys.argv[1:]]),
        "episodes": given.episodes,
    }
    bench.record(FILE, {**header, **document, "seeds": sorted(seeds)}, began)


if __name__ == "__main__":
    main()

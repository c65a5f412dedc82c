"""A VLA and its fine-tuned versions on what they were not trained on: results/vla-axes.json.

python benchmarks/vla_axes.py                    # 200 episodes of each, of every run of `foresight reproduce sequence`
python benchmarks/vla_axes.py --episodes 50
python benchmarks/vla_axes.py --only ppo-BabyAI-VLA    # after another training of it; others of as many episodes stay
python benchmarks/vla_axes.py --more             # seeds that the file has and that have no run here stay, too

Seeds of episodes are far from those of training. Actions are drawn, as in training.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "vla-axes.json"
RUNS = ROOT / "runs" / "reproduce"
SEED = 20_000_003
EPISODES = 200
NAMES = ("vla-BabyAI", "vla-BabyAI-weak", "ppo-BabyAI-VLA", "episode_grpo-BabyAI")
LEVELS = {
    "go": "BabyAI-GoToLocal-v0",
    "pick": "BabyAI-PickupDist-v0",
    "both": "BabyAI-GoToLocal-v0,BabyAI-PickupDist-v0",
}
AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "go": ("go", {"pairs": "train"}),
    "pick": ("pick", {"pairs": "train"}),
    "floor": ("both", {"pairs": "train", "floor": True}),
    "noise": ("both", {"pairs": "train", "noise": 16.0}),
    "held_out": ("both", {"pairs": "held_out"}),
    "paraphrase": ("both", {"pairs": "train", "paraphrase": True}),
    "moved": ("both", {"pairs": "train", "moved": True}),
}


def success(agent: Any, axis: str, episodes: int) -> float:
    """The share of episodes that succeed."""
    from foresight.envs.make import make
    from foresight.runtime.evaluation import returns

    level, options = AXES[axis]
    env = make(LEVELS[level], num_envs=20, camera=6, **options)

    def act(obs: Any, carry: Any) -> tuple[Any, Any]:
        action, _, carry = agent.module.act(agent.state, obs, carry, explore=True)
        return action, carry

    try:
        return returns.evaluate(env, act, episodes, SEED, None).mean
    finally:
        env.close()


def kept(known: Mapping[str, Any], episodes: int) -> dict[str, Any]:
    """The runs in a result that have as many `episodes`."""
    return {name: known[name] for name in NAMES if name in known and known.get("episodes") == episodes}


def command(found: Iterable[str], episodes: int) -> str:
    """What makes the whole file: the runs `found` in it if some are missing."""
    parts = [] if episodes == EPISODES else ["--episodes", str(episodes)]
    parts += [] if set(found) == set(NAMES) else ["--only", *(name for name in NAMES if name in set(found))]
    return shlex.join(["python", "benchmarks/vla_axes.py", *parts])


def main() -> None:
    """Measure every run, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--more", action="store_true", help="keep the seeds of the file that have no run here")
    given = parser.parse_args()

    import torch

    from foresight.runtime import bench
    from foresight.runtime import run as runs

    torch.set_num_threads(1)
    began = time.monotonic()
    known = kept(json.loads(FILE.read_text()) if FILE.is_file() else {}, given.episodes)
    found: dict[str, Any] = {name: row for name, row in known.items() if name not in given.only}
    measured = False
    for name in given.only:
        folders = [run for run in sorted(RUNS.glob(f"{name}-?")) if (run / "summary.json").is_file()]
        rows: dict[str, dict[str, float]] = known[name]["each_seed"] if given.more and name in known else {}
        for folder in folders:
            agent = runs.load(folder)
            rows[folder.name[-1]] = {axis: success(agent, axis, given.episodes) for axis in AXES}
            agent.close()
            print(folder.name, rows[folder.name[-1]], flush=True)
        if rows:
            found[name] = {axis: statistics.fmean(row[axis] for row in rows.values()) for axis in AXES}
            found[name]["each_seed"] = dict(sorted(rows.items()))
            measured = True
    if not measured:
        sys.exit("There is no run: foresight reproduce sequence --only vla-BabyAI")
    document = {
        "what": "VLA on BabyAI: success by axis, drawn actions",
        "command": command(found, given.episodes),
        "seeds": sorted({int(seed) for row in found.values() for seed in row["each_seed"]}),
        "episodes": given.episodes,
        **found,
    }
    bench.record(FILE, document, began)


if __name__ == "__main__":
    main()

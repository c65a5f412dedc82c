"""Train a preset over seeds and write what was reached as one JSON in results/; stopped, it goes on where it was.

python benchmarks/reproduce.py ppo CartPole-v1 --seeds 0 1 2 3 4
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def one(name: str, preset: str, seed: int, out: Path, episodes: int | None, steps: int | None) -> dict[str, Any]:
    """The summary of one seed: read, resumed or made."""
    from foresight.runtime import run

    if (out / "summary.json").is_file():
        return run.Run(out).summary
    if (out / "config.yaml").is_file():
        return run.resume(out).summary
    return run.train(name, preset=preset, seed=seed, out=out, evaluation_episodes=episodes, steps=steps).summary


def collect(name: str, preset: str, summaries: list[dict[str, Any]], command: str) -> dict[str, Any]:
    """One result of several seeds: their means, what they share, and each seed's own figures."""
    import numpy as np

    from foresight.runtime.plot import interval, iqm

    means = [summary["evaluation"]["mean"] for summary in summaries]
    low, high = interval(np.array(means)[:, None]) if len(means) > 1 else ([None], [None])
    first = summaries[0]
    return {
        "what": f"{name} on {preset}",
        "command": command,
        "seeds": [summary["seed"] for summary in summaries],
        "steps": first["steps"],
        "unit": first["unit"],
        "metric": first["evaluation"]["metric"],
        "episodes": first["evaluation"]["n"],
        "iqm": float(iqm(np.array(means))),
        "interval_95": [None if x[0] is None else float(x[0]) for x in (low, high)],
        "worst": min(means),
        "baseline": statistics.fmean(summary["baseline"]["mean"] for summary in summaries),
        "seconds": [summary["seconds"] for summary in summaries],
        "runs": [{key: summary[key] for key in ("seed", "evaluation", "baseline", "seconds")} for summary in summaries],
        "versions": first["versions"],
        "machine": first["machine"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("preset")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--episodes", type=int, help="evaluation episodes of each seed (default: the preset's)")
    parser.add_argument("--steps", type=int, help="steps of each seed (default: the preset's)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "reproduce")
    arguments = parser.parse_args()
    name, preset = arguments.name, arguments.preset
    label = f"{name}-{preset}".replace("/", "-")
    outs = [arguments.runs / f"{label}-{seed}" for seed in arguments.seeds]
    summaries = [
        one(name, preset, seed, out, arguments.episodes, arguments.steps)
        for seed, out in zip(arguments.seeds, outs, strict=True)
    ]
    command = "python benchmarks/reproduce.py " + shlex.join(sys.argv[1:])
    result = collect(name, preset, summaries, command)
    file = ROOT / "results" / f"{label}.json"
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    shown = {key: result[key] for key in ("what", "metric", "iqm", "worst", "baseline", "seconds")}
    print(json.dumps(shown))


if __name__ == "__main__":
    main()

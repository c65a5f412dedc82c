"""Train a preset with several seeds and write the result as one JSON in results/; a stopped run resumes.

python benchmarks/reproduce.py ppo CartPole-v1 --seeds 0 1 2 3 4
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from foresight.runtime.results.reproduce import collect, one

ROOT = Path(__file__).resolve().parents[1]


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

"""What a tool is worth: SmolLM2 before and after training, with its tool, without it, and with a single search.

python benchmarks/tools.py                   # every seed of `foresight reproduce agents`

- calculator: `without_tool` offers no tool, so the model has to multiply by itself;
- search: `one_search` ends the conversation after two turns, so at most one search has an answer, and `found` does not
  ask for the evidence. Where the founder was born takes two searches.
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
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "reproduce"
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "calculator": {"without_tool": {"without": ["calculate"]}},
    "search": {"one_search": {"turns": 2}},
}


def main() -> None:
    """Evaluate every seed, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100)
    given = parser.parse_args()

    import torch

    from foresight.runtime import bench, environments
    from foresight.runtime import run as runs
    from foresight.runtime.checkpoints import checkpoint

    torch.set_num_threads(1)
    began = time.monotonic()
    document: dict[str, Any] = {
        "what": "SmolLM2 with tools: held-out outcome before and after SFT, and with less than the tools",
        "command": shlex.join(["python", "benchmarks/tools.py", *sys.argv[1:]]),
        "episodes": given.episodes,
    }
    seeds: set[int] = set()
    for task, less in OPTIONS.items():
        rows: dict[str, list[float]] = {}
        for folder in sorted(RUNS.glob(f"sft-smollm2-{task}-?")):
            run = runs.Run(folder)
            if run.baseline is None:
                continue
            rows.setdefault("untrained", []).append(run.baseline.mean)
            agent = runs.load(folder)
            options = dict(agent.settings.env_options)
            for name, fewer in {"trained": {}, **less}.items():
                agent.settings = dataclasses.replace(agent.settings, env_options={**options, **fewer})
                agent.env = environments.single(agent.settings)
                found = agent.evaluate(given.episodes)
                rows.setdefault(name, []).append(found.mean)
                for part in ("calls", "found"):
                    if part in found.extra_metrics:
                        rows.setdefault(f"{name}_{part}", []).append(found.extra_metrics[part])
            agent.close()
            seeds.add(int(folder.name[-1]))
            print(folder.name, {name: values[-1] for name, values in rows.items()}, flush=True)
        if rows:
            document[task] = {name: statistics.fmean(values) for name, values in rows.items()}
            document[task]["each_seed"] = rows
    if not seeds:
        sys.exit("There is no run: foresight reproduce agents --only sft-smollm2-calculator sft-smollm2-search")
    document |= {
        "seeds": sorted(seeds),
        "versions": bench.versions(),
        "machine": bench.machine(),
        "seconds": round(time.monotonic() - began, 1),
    }
    checkpoint.write_atomic(ROOT / "results" / "tools.json", json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()

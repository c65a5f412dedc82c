"""The three-layer stack: learned layers, each replaced by its script, each left out, failures: results/stack.json.

python benchmarks/stack.py                    # 200 errands of each row
python benchmarks/stack.py --episodes 20

The layers are the runs of `foresight reproduce agents` (tdmpc2-Glide-v0, vla-ErrandPoints-v0, sft-smollm2-errands), or
of --cognition, --semantic and --control. All rows have the same errands, new instructions in new layouts, unless the
row names a split.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "stack.json"
RUNS = ROOT / "runs" / "reproduce"
TRAINED = {
    "cognition": "sft-smollm2-errands-0", "semantic": "vla-ErrandPoints-v0-0", "control": "tdmpc2-Glide-v0-0",
}  # fmt: skip
SEED = 10_000  # of the first errand
PLAN = {"iterations": 2, "candidates": 32, "elites": 8}  # of TD-MPC2, a quarter of the arithmetic of its preset
FAILURES = 0.5  # probability of a failure, in the rows with failures


def rows() -> dict[str, dict[str, Any]]:
    """The rows by name: what differs from learned layers on held-out errands without failures."""
    found: dict[str, dict[str, Any]] = {"learned": {}}
    found |= {f"{kind}_script": {kind: "script"} for kind in TRAINED}
    found |= {f"{kind}_none": {kind: "none"} for kind in TRAINED}
    found["script"] = dict.fromkeys(TRAINED, "script")
    found |= {f"script_without_{kind}": {**found["script"], kind: "none"} for kind in TRAINED}
    found["learned_failures"] = {"failures": FAILURES}
    found["cognition_none_failures"] = {"failures": FAILURES, "cognition": "none"}
    found["script_failures"] = {**found["script"], "failures": FAILURES}
    found |= {f"learned_{split}": {"split": split} for split in ("train", "instructions", "layouts")}
    return found


def main() -> None:
    """Measure every row, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--rows", nargs="+", choices=rows(), default=list(rows()))
    for kind, name in TRAINED.items():
        parser.add_argument(f"--{kind}", default=str(RUNS / name))
    given = parser.parse_args()

    import torch

    from foresight.agents import stack
    from foresight.envs.control.errands.rules import Errand
    from foresight.runtime import bench
    from foresight.runtime import run as runs

    torch.set_num_threads(1)
    began = time.monotonic()
    layers = {kind: {name: stack.layer(kind, name) for name in ("script", "none")} for kind in TRAINED}
    for kind in ("cognition", "semantic"):
        layers[kind]["learned"] = stack.layer(kind, getattr(given, kind))
    agent = runs.load(given.control)
    agent.state.config = dataclasses.replace(agent.state.config, **PLAN)  # type: ignore[attr-defined]
    layers["control"]["learned"] = stack.agent_control(agent)
    found = {}
    for name in given.rows:
        options = {"split": "held_out", "failures": 0.0} | rows()[name]
        start = time.monotonic()
        one = stack.Stack(**{kind: layers[kind][options.get(kind, "learned")] for kind in TRAINED})
        errands = [Errand(SEED + i, options["split"], options["failures"]) for i in range(given.episodes)]
        found[name] = {**stack.summary(stack.run(one, errands)), "seconds": round(time.monotonic() - start, 1)}
        print(name, found[name], flush=True)
    document = {
        "what": "Errands by three layers: success on held-out instructions in held-out layouts",
        "command": shlex.join(["python", "benchmarks/stack.py", *sys.argv[1:]]),
        "seeds": [0],
        "episodes": given.episodes,
        "failures": FAILURES,
        "plan": PLAN,
        **found,
    }
    bench.record(FILE, document, began)


if __name__ == "__main__":
    main()

"""The three-layer stack: learned layers, each replaced by its script, each left out, failures: results/stack.json.

python benchmarks/stack.py                    # 200 errands of each row
python benchmarks/stack.py --episodes 20
python benchmarks/stack.py --rows learned --keep   # one row anew; the others of as many errands stay

The layers are the runs of `foresight reproduce agents` (tdmpc2-Glide-v0, vla-ErrandPoints-v0, sft-smollm2-errands), or
of --cognition, --semantic and --control. All rows have the same errands, new instructions in new layouts, unless the
row names a split.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE, PAGE = ROOT / "results" / "stack.json", ROOT / "docs" / "stack.md"
MARK = "<!-- figures -->"  # on the page, before and after what `page` writes
RUNS = ROOT / "runs" / "reproduce"
TRAINED = {
    "cognition": "sft-smollm2-errands-0", "semantic": "vla-ErrandPoints-v0-0", "control": "tdmpc2-Glide-v0-0",
}  # fmt: skip
EPISODES = 200
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


def kept(before: Mapping[str, Any], episodes: int) -> dict[str, Any]:
    """The rows of a result that have as many errands."""
    return {name: before[name] for name in rows() if name in before and before[name]["episodes"] == episodes}


def command(given: Mapping[str, Any], found: Iterable[str]) -> str:
    """What makes the whole file: the options `given`, and the rows `found` in it if some are missing."""
    parts = [] if given["episodes"] == EPISODES else ["--episodes", str(given["episodes"])]
    parts += [] if set(found) == set(rows()) else ["--rows", *(name for name in rows() if name in set(found))]
    for kind, name in TRAINED.items():
        parts += [] if given[kind] == str(RUNS / name) else [f"--{kind}", given[kind]]
    return shlex.join(["python", "benchmarks/stack.py", *parts])


def page(result: Mapping[str, Any]) -> str:
    """The page, with the tables of the result between its two marks."""
    before, _, after = PAGE.read_text(encoding="utf-8").split(MARK)
    return MARK.join([before, "\n" + "\n".join(tables(result)) + "\n", after])


def tables(result: Mapping[str, Any]) -> list[str]:
    """Two tables in Markdown: success by layer, and after failures."""

    def success(name: str) -> str:
        return f"{result[name]['success']:.0%}" if name in result else "–"

    titles = {"train": "training instructions and layouts", "instructions": "new instructions, training layouts",
              "layouts": "training instructions, new layouts"}  # fmt: skip
    lines = [
        f"Success in {result['episodes']} errands with new instructions in new layouts:",
        "",
        f"| layer | the other two learned ({success('learned')} with three learned): it is a script | left out "
        f"| the other two scripts ({success('script')} with three scripts): left out |",
        "|---|---|---|---|",
    ]
    for kind in TRAINED:
        cells = (success(f"{kind}_script"), success(f"{kind}_none"), success(f"script_without_{kind}"))
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += ["", "| three learned layers on | success |", "|---|---|"]
    lines += [f"| {title} | {success(f'learned_{split}')} |" for split, title in titles.items()]
    lines += ["", f"With injected failures (`--failures {result['failures']:g}`):", ""]
    lines += ["| layers | success | errands with a failure | of these, success | plans an errand |"]
    lines += ["|---|---|---|---|---|"]
    names = {"learned": "learned", "cognition_none": "learned, without cognition", "script": "scripts"}
    for name, title in names.items():
        if (row := result.get(f"{name}_failures")) is not None:
            counted = (f"{row['success']:.0%}", row["with_failures"], f"{row['recovered'] or 0:.0%}", row["plans"])
            lines.append(f"| {title} | {' | '.join(map(str, counted))} |")
    return lines


def write_page() -> None:
    """Write the page, if there are figures."""
    if FILE.is_file():
        PAGE.write_text(page(json.loads(FILE.read_text(encoding="utf-8"))), encoding="utf-8")


def main() -> None:
    """Measure every row, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--rows", nargs="+", choices=rows(), default=list(rows()))
    parser.add_argument("--keep", action="store_true", help="keep the other rows of the file, if of as many errands")
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
    agent.state.config = dataclasses.replace(agent.state.config, **PLAN)
    layers["control"]["learned"] = stack.agent_control(agent)
    before = json.loads(FILE.read_text(encoding="utf-8")) if given.keep and FILE.is_file() else {}
    found = kept(before, given.episodes)
    for name in given.rows:
        options: dict[str, Any] = {"split": "held_out", "failures": 0.0} | rows()[name]
        start = time.monotonic()
        one = stack.Stack(**{kind: layers[kind][options.get(kind, "learned")] for kind in TRAINED})
        errands = [Errand(SEED + i, options["split"], options["failures"]) for i in range(given.episodes)]
        found[name] = {**stack.summary(stack.run(one, errands)), "seconds": round(time.monotonic() - start, 1)}
        print(name, found[name], flush=True)
        document = {
            "what": "Errands by three layers: success on held-out instructions in held-out layouts",
            "command": command(vars(given), found),
            "seeds": [0],
            "episodes": given.episodes,
            "failures": FAILURES,
            "plan": PLAN,
            **found,
        }
        bench.record(FILE, document, began)  # after every row: a stopped run keeps what it measured


if __name__ == "__main__":
    main()

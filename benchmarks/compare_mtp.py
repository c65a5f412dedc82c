"""GRPO, PPO with a critic, and the multi-token critic at equal sampled tokens: accuracy by tokens, and peak memory.

python benchmarks/compare_mtp.py --seeds 0 1 2       # runs what is missing, each in its own process; resumes
python benchmarks/compare_mtp.py --seeds 1           # adds a seed to the file, if the other options are equal
python benchmarks/compare_mtp.py --draw              # only the picture, and the section of docs/mtp_critic.md

All three are trained on `addition` from the same model with 64 completions per update, the same learning rate (annealed
to 0) and number of updates; everything else is from their presets: GRPO's completions have at most 12 tokens, the
others' 16, and PPO takes two steps per update. The length of a completion depends on the policy, so the x axis is the
number of sampled tokens, and figures are read where the run with the fewest tokens ends. `--arms` also takes variants
of the multi-token critic. Runs are under runs/mtp-comparison; a stopped one is resumed.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import _language  # noqa: E402

FILE, PICTURE, PAGE = (
    ROOT / "results" / "mtp-comparison.json",
    ROOT / "docs" / "media" / "mtp-comparison.png",
    ROOT / "docs" / "mtp_critic.md",
)
HEADING = "## Compared with GRPO and PPO"
COMPLETIONS = 64  # per update, in all arms
ARMS = {
    "grpo": ["grpo"],
    "rlhf_ppo": ["rlhf_ppo", "--value-learning-rate", "2e-5"],
    "mtp_critic": ["mtp_critic"],
    "mtp_critic, one head": ["mtp_critic", "--predict-tokens", "1"],
    "mtp_critic, values detached": ["mtp_critic", "--detach-value"],
    "mtp_critic, TD(0.95)": ["mtp_critic", "--td-lambda", "0.95"],
}
MAIN = ("grpo", "rlhf_ppo", "mtp_critic")


def folder(runs: Path, arm: str, seed: int) -> Path:
    """The run directory of an arm and a seed."""
    return runs / f"{arm.replace(', ', '-').replace(' ', '-').replace('(', '').replace(')', '')}-{seed}"


def arguments_of(arm: str, seed: int, updates: int, every: int, extra: list[str]) -> list[str]:
    """Of `foresight train`, for an arm and a seed."""
    return [
        ARMS[arm][0], "--preset", "smollm2-addition", "--seed", str(seed), "--steps", str(updates),
        "--learning-rate", "2e-5", "--anneal-lr", "--evaluate-every", str(every), *ARMS[arm][1:], *extra,
    ]  # fmt: skip


def curve(out: Path) -> dict[str, Any]:
    """Metrics of a finished run: sampled tokens and accuracy at each evaluation, also before the first update."""
    from foresight.runtime.monitoring.log import read

    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    tokens, points = 0.0, [[0, summary["baseline"]["mean"]]]
    for row in read(out):
        tokens += COMPLETIONS * row.get("length", 0.0)
        found = next(
            (value for key, value in row.items() if key == f"evaluation/{summary['evaluation']['metric']}"), None
        )
        if found is not None:
            points.append([round(tokens), found])
    return {
        "curve": points,
        "tokens": round(tokens),
        "peak_gib": summary["peak_gib"],
        "minutes": round(summary["seconds"] / 60, 2),
        "command": summary["command"],
        "n": summary["evaluation"]["n"],
    }


def at(run: dict[str, Any], tokens: float) -> float:
    """The accuracy of a run after `tokens` sampled tokens, linearly interpolated between evaluations."""
    x, y = zip(*run["curve"], strict=True)
    return float(np.interp(tokens, x, y))


def command(arguments: argparse.Namespace, extra: list[str], seeds: Iterable[int]) -> str:
    """What makes the whole file: the options `arguments`, and the `seeds` in it."""
    options = ["--updates", str(arguments.updates), "--every", str(arguments.every), *extra]
    if tuple(arguments.arms) != MAIN:
        options += ["--arms", *arguments.arms]
    return shlex.join(["python", "benchmarks/compare_mtp.py", *options, "--seeds", *map(str, seeds)])


def kept(arguments: argparse.Namespace, extra: list[str]) -> dict[str, dict[str, Any]]:
    """The runs of the file by arm and seed, if it was made with the same options; else none."""
    if not FILE.is_file():
        return {}
    result: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return result["runs"] if result["command"] == command(arguments, extra, result["seeds"]) else {}


def collect(cells: dict[str, dict[str, Any]], made_by: Callable[[list[int]], str]) -> dict[str, Any]:
    """The result of finished runs, by arm and seed; `made_by` is the command for some seeds."""
    from foresight.runtime import bench

    seeds = sorted({int(seed) for done in cells.values() for seed in done})
    budget = min(run["tokens"] for done in cells.values() for run in done.values())
    figures: dict[str, Any] = {}
    for arm, done in cells.items():
        name = arm.replace(",", "").replace(" ", "_")
        figures[f"{name}_accuracy"] = round(float(np.mean([at(run, budget) for run in done.values()])), 4)
        figures[f"{name}_half_way"] = round(float(np.mean([at(run, budget / 2) for run in done.values()])), 4)
        figures[f"{name}_peak_gib"] = max(run["peak_gib"] for run in done.values())
    firsts = [run["curve"][0][1] for done in cells.values() for run in done.values()]
    return {
        "what": "GRPO, PPO and the multi-token critic with equal numbers of sampled tokens",
        "command": made_by(seeds),
        "seeds": seeds,
        "tokens": budget,
        "baseline": round(float(np.mean(firsts)), 4),
        **figures,
        "seconds": round(sum(60 * run["minutes"] for done in cells.values() for run in done.values()), 1),
        "versions": bench.versions(),
        "machine": bench.machine(),
        "runs": cells,
    }


def draw(result: dict[str, Any]) -> None:
    """Draw the accuracy by tokens (mean over seeds, each seed as a thin line) and the peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=(2.2, 1), layout="constrained")
    x = np.linspace(0, result["tokens"], 200)
    for i, (arm, done) in enumerate(result["runs"].items()):
        rows = np.array([[at(run, t) for t in x] for run in done.values()])
        for row in rows:
            left.plot(x / 1000, row, color=f"C{i}", alpha=0.25, linewidth=0.8)
        left.plot(x / 1000, rows.mean(0), color=f"C{i}", label=f"{arm} ({len(rows)})")
        right.barh(i, max(run["peak_gib"] for run in done.values()), color=f"C{i}")
    left.axhline(result["baseline"], color="0.6", linewidth=0.8, linestyle=":")
    left.set(xlabel="thousand sampled tokens", ylabel="greedy accuracy, held out", ylim=(0, 1))
    left.legend(title="mean (seeds)", frameon=False, loc="lower right")
    right.set(xlabel="peak memory of the process, GiB", yticks=range(len(result["runs"])), yticklabels=result["runs"])
    right.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=150)
    plt.close(figure)


def write(result: dict[str, Any]) -> None:
    """Rewrite the page from the heading of the section to the end."""
    lines = [
        HEADING,
        "",
        f"Made by `{result['command']}`, figures in [results](../results/{FILE.name}): accuracy on held-out prompts "
        f"after {result['tokens']:,} sampled tokens and after half of them, mean over seeds {result['seeds']}, from "
        f"{result['baseline']:.0%} before training; the peak memory of the whole process. "
        "Completions per update, learning rate and updates are equal, the rest is of the presets: GRPO's answers have "
        "at most 12 tokens, the others' 16, and PPO takes two steps per update.",
        "",
        "| | half way | at the end | each seed | peak GiB | minutes a seed |",
        "|---|---|---|---|---|---|",
    ]
    for arm, done in result["runs"].items():
        ends = [at(run, result["tokens"]) for run in done.values()]
        half = float(np.mean([at(run, result["tokens"] / 2) for run in done.values()]))
        minutes = float(np.mean([run["minutes"] for run in done.values()]))
        peak = max(run["peak_gib"] for run in done.values())
        each = ", ".join(f"{end:.0%}" for end in ends)
        lines.append(f"| {arm} | {half:.0%} | {np.mean(ends):.0%} | {each} | {peak:.2f} | {minutes:.1f} |")
    lines += ["", "![accuracy by sampled tokens, and memory](media/mtp-comparison.png)"]
    page = PAGE.read_text(encoding="utf-8").partition(HEADING)[0].rstrip()
    PAGE.write_text(page + "\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(MAIN))
    parser.add_argument("--updates", type=int, default=64)
    parser.add_argument("--every", type=int, default=8, help="updates between evaluations")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "mtp-comparison")
    parser.add_argument("--draw", action="store_true", help="only draw the picture and write the section")
    arguments, extra = parser.parse_known_args()  # unknown arguments are passed to `foresight train`
    if not arguments.draw:
        cells = kept(arguments, extra)
        for seed in arguments.seeds:
            for arm in arguments.arms:
                if str(seed) in cells.get(arm, {}):
                    continue
                out = folder(arguments.runs, arm, seed)
                _language.train(out, arguments_of(arm, seed, arguments.updates, arguments.every, extra))
                cells.setdefault(arm, {})[str(seed)] = curve(out)
                result = collect(cells, functools.partial(command, arguments, extra))
                FILE.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                print(
                    json.dumps({k: v for k, v in result.items() if k not in ("runs", "versions", "machine")}),
                    flush=True,
                )
    result = json.loads(FILE.read_text(encoding="utf-8"))
    draw(result)
    write(result)


if __name__ == "__main__":
    main()

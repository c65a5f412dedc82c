"""GRPO and its family: their differences, read from the code, and their curves side by side.

python benchmarks/grpo_family.py --seeds 0 1 2       # runs what is missing, each in its own process; resumes
python benchmarks/grpo_family.py --page              # only docs/grpo_family.md and, from existing results, the picture

Each is trained on `addition` by its preset from the same model. The runs are those of `foresight reproduce language`,
under runs/reproduce: finished ones are read, and stopped ones are resumed. The x axis is seconds of training, by which
the rows of the suite are measured.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import _language  # noqa: E402

FILE, PICTURE, PAGE = (
    ROOT / "results" / "grpo-family.json",
    ROOT / "docs" / "media" / "grpo-family.png",
    ROOT / "docs" / "grpo_family.md",
)
FAMILY = ("grpo", "dr_grpo", "dapo", "rloo", "cispo", "gspo")
SLOTS = {  # the functions of `ops` that fill each slot
    "ratio": ("ratio", "sequence_ratio"),
    "clip": ("clipped_surrogate", "clipped_weight", "reinforce"),
    "advantage": ("scaled", "group_scaled", "group_centered", "leave_one_out"),
    "aggregation": ("per_token", "per_sequence", "per_budget"),
    "KL": ("kl.k1", "kl.k2", "kl.k3", "kl.penalty", "penalized"),
}
SHORT = {  # details of shapes that the table leaves out
    "advantage[..., None].expand_as(rho)": "advantage",
    "advantage[..., None].expand_as(logprob)": "advantage",
    "logprob if old is None else old": "old",
    "*flat": "logprob, old, mask",
    "max(1, int(mask.any(-1).sum()))": "completions",
    "mask[..., 0].numel() * config.max_new_tokens": "completions * max_new_tokens",
    "state.reference, batch, config.kl_coef, config.temperature, config.tuning.micro_tokens": "reference",
    "config.": "",
}
PRESET = "smollm2-addition"
PLAIN = "dr_grpo"  # the shortest one, with which the others are compared
SHOWN = {
    "reward": "accuracy: sampled (line),\ngreedy on held-out prompts (dots)",
    "length": "tokens per answer",
    "entropy": "entropy, nats",
}
HEAD = """# The GRPO family

A group of answers to one question is its own baseline. Five slots, each a function of `ops`, define an algorithm: the
importance ratio, its clip, the advantage, the aggregation over tokens, and the KL to a reference. This page is
generated from the code by `python benchmarks/grpo_family.py --page`.

## The five slots
"""


def source(name: str) -> Path:
    """The file of an algorithm."""
    return ROOT / "foresight" / "algorithms" / "language" / f"{name}.py"


def parts(name: str) -> list[ast.FunctionDef]:
    """The functions `loss` and `update` of an algorithm, without their docstrings."""
    found = [node for node in ast.parse(source(name).read_text(encoding="utf-8")).body
             if isinstance(node, ast.FunctionDef) and node.name in ("loss", "update")]  # fmt: skip
    for node in found:
        node.body = node.body[1:]
    return found


def slots(name: str) -> dict[str, str]:
    """The calls that fill each slot, as in the code but without details of shapes.

    A ratio that is only used for a metric is left out; a KL is marked as in the reward or in the loss.
    """
    found = dict.fromkeys(SLOTS, "–")
    for function in parts(name):
        for given in (node for node in ast.walk(function) if isinstance(node, ast.Assign)):
            if ast.unparse(given.value) in SLOTS["aggregation"]:  # passed on, to weight each minibatch
                found["aggregation"] = f"`{ast.unparse(given.value)}(mask)`"
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            slot = next((slot for slot, known in SLOTS.items() if ast.unparse(call.func) in known), None)
            if slot is None or (slot == "ratio" and not _in_loss(function, "rho")):
                continue
            text = ast.unparse(call)
            for long, short in SHORT.items():
                text = text.replace(long, short)
            place = {"loss": " in the loss", "update": " in the reward"}[function.name] if slot == "KL" else ""
            both = slot == "KL" and found[slot] != "–"
            found[slot] = f"{found[slot]}, or `{text}`{place}" if both else f"`{text}`{place}"
    return found


def _in_loss(function: ast.FunctionDef, name: str) -> bool:
    """Whether a variable is used in `terms`, whose sum is the loss."""
    made = [node.value for node in ast.walk(function) if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == "terms" for target in node.targets)]  # fmt: skip
    return any(isinstance(part, ast.Name) and part.id == name for value in made for part in ast.walk(value))


def difference(name: str, other: str = PLAIN) -> list[str]:
    """The diff of `loss` and `update` from those of another algorithm."""
    before, after = ([line for node in parts(one) for line in ast.unparse(node).splitlines()] for one in (other, name))
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return [line for line in lines if not line.startswith("@@")]


def page(result: dict[str, Any] | None) -> str:
    """The page: slots, differences and, where there are results, the figures."""
    lines = [HEAD.rstrip(), "", f"| | {' | '.join(SLOTS)} |", "|---|" + "---|" * len(SLOTS)]
    for name in FAMILY:
        lines.append(f"| [`{name}`]({name}.md) | {' | '.join(slots(name).values())} |")
    lines += [
        "",
        "The KL coefficient is 0 by default. DAPO and GSPO clip asymmetrically; CISPO clips the weight of a token and",
        "so drops no token. DAPO also samples until the rewards of every group differ",
        "(`planning.generation.rollout.sample_until`).",
        "",
        "With one gradient step per rollout (`epochs` and `minibatches` 1, as in all presets), ratios are 1: clips",
        "have no effect, and GSPO's gradient equals GRPO's. The papers of DAPO and CISPO take 16 gradient steps per",
        "rollout, that of GSPO takes 4, each on a part of the rollout: `--minibatches 16`. A minibatch consists of",
        "whole groups, shuffled once per rollout, and has its own denominator; `--epochs 2` makes two passes. Ratios",
        "are relative to the policy before the first step. `rloo` has no ratio, so it takes one step.",
        "",
        f"## Differences from `{PLAIN}`, line by line",
        "",
        f"The lines of `loss` and `update` that differ from those of `{PLAIN}`, the shortest algorithm of the family.",
        "",
    ]
    for name in FAMILY:
        if name != PLAIN:
            lines += [f"### {name}", "", "```diff", *difference(name), "```", ""]
    lines += ["## Results", ""]
    if result is None:
        lines.append("Not run yet: `python benchmarks/grpo_family.py --seeds 0 1 2`.")
        return "\n".join(lines) + "\n"
    lines += [
        f"Made by `{result['command']}`, figures in [results](../results/{FILE.name}): greedy accuracy on held-out "
        "prompts before training and, for each seed, after it; length and entropy of the last update, mean over seeds.",
        "",
        "| | before | after, each seed | updates | minutes per seed | length | entropy |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, done in result["runs"].items():
        runs = list(done.values())
        ends = ", ".join(f"{run['accuracy'][-1][1]:.0%}" for run in runs)
        mean = {key: sum(run[key][-1][1] for run in runs) / len(runs) for key in ("length", "entropy")}
        minutes = sum(run["seconds"] for run in runs) / 60 / len(runs)
        lines.append(
            f"| `{name}` | {runs[0]['accuracy'][0][1]:.0%} | {ends} | {runs[0]['updates']} | {minutes:.1f} | "
            f"{mean['length']:.1f} | {mean['entropy']:.2f} |"
        )
    lines += ["", f"![accuracy, length and entropy by seconds of training](media/{PICTURE.name})"]
    return "\n".join(lines) + "\n"


def curves(out: Path) -> dict[str, Any]:
    """Of a finished run: `[seconds, value]` of its evaluations (also before training) and of its metrics."""
    from foresight.runtime.monitoring.log import read

    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    measured = f"evaluation/{summary['evaluation']['metric']}"
    rows = read(out)
    found = {
        name: [[round(row["seconds"], 1), row[key]] for row in rows if key in row]
        for name, key in (("accuracy", measured), ("reward", "reward"), ("length", "length"), ("entropy", "entropy"))
    }
    found["accuracy"].insert(0, [0.0, summary["baseline"]["mean"]])
    return {
        **found,
        "updates": summary["steps"],
        "seconds": summary["seconds"],
        "peak_gib": summary["peak_gib"],
        "n": summary["evaluation"]["n"],
        "command": summary["command"],
    }


def folder(runs: Path, name: str, seed: int) -> Path:
    """The run directory of an algorithm and a seed, as `foresight reproduce` names it."""
    return runs / f"{name}-{PRESET}-{seed}"


def collect(runs: Path, names: list[str], seeds: list[int], command: str) -> dict[str, Any]:
    """The result of all finished runs."""
    from foresight.runtime import bench

    places = {name: {str(seed): folder(runs, name, seed) for seed in seeds} for name in names}
    cells = {
        name: {seed: curves(out) for seed, out in outs.items() if (out / "summary.json").is_file()}
        for name, outs in places.items()
    }
    cells = {name: done for name, done in cells.items() if done}
    return {
        "what": "GRPO and its variants on addition",
        "command": command,
        "seeds": seeds,
        "seconds": round(sum(run["seconds"] for done in cells.values() for run in done.values()), 1),
        "versions": bench.versions(),
        "machine": bench.machine(),
        "runs": cells,
    }


def draw(result: dict[str, Any], picture: Path) -> None:
    """Draw accuracy, length and entropy by seconds of training, with a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(1, len(SHOWN), figsize=(12, 3.4), layout="constrained")
    for axes, (key, label) in zip(places, SHOWN.items(), strict=True):
        for i, (name, done) in enumerate(result["runs"].items()):
            for place, run in enumerate(done.values()):
                x, y = zip(*run[key], strict=True)
                axes.plot(x, y, color=f"C{i}", linewidth=1, alpha=0.8, label=name if place == 0 else None)
                if key == "reward":
                    axes.plot(*zip(*run["accuracy"], strict=True), "o", color=f"C{i}", markersize=4)
        axes.set(xlabel="seconds of training", ylabel=label)
        axes.spines[["top", "right"]].set_visible(False)
    places[0].set_ylim(0, 1)
    places[0].legend(frameon=False, loc="lower right")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", choices=FAMILY, default=list(FAMILY))
    parser.add_argument("--every", type=int, default=8, help="updates between evaluations")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "reproduce")
    parser.add_argument("--page", action="store_true", help="only write the page and draw the picture")
    arguments, extra = parser.parse_known_args()  # unknown arguments are passed to `foresight train`
    if not arguments.page:
        command = "python benchmarks/grpo_family.py " + shlex.join(sys.argv[1:])
        for seed in arguments.seeds:
            for name in arguments.algorithms:
                given = ["--preset", PRESET, "--seed", str(seed), "--evaluate-every", str(arguments.every)]
                _language.train(folder(arguments.runs, name, seed), [name, *given, *extra])
                result = collect(arguments.runs, arguments.algorithms, arguments.seeds, command.strip())
                FILE.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else None
    if known is not None:
        draw(known, PICTURE)
    PAGE.write_text(page(known), encoding="utf-8")


if __name__ == "__main__":
    main()

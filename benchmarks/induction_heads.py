"""Induction heads: what layer 2 of an attention-only model looks at: results/induction-heads.json, and a page.

python benchmarks/induction_heads.py                    # every seed of `foresight reproduce sequence`
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "induction-heads.json"
RUNS = ROOT / "runs" / "reproduce"
PICTURE = ROOT / "docs" / "media" / "induction-heads.png"
TEXTS = 50  # held out


def inside(maps: Any, length: int) -> range:
    """The queries whose letter has occurred before, and whose next letter is a copy too: token 0 begins the text."""
    return range(length + 1, len(maps.tokens) - 1)


def mass(weights: Any, queries: Sequence[int], length: int, offset: int) -> float:
    """The mean weight, over heads and queries, of the tokens `offset` after all former occurrences."""
    mean = weights.mean(0)
    rows = [[q - times * length + offset for times in range(1, (q - 1) // length + 1)] for q in queries]
    return statistics.fmean(
        sum(float(mean[q, k]) for k in keys if 1 <= k <= q) for q, keys in zip(queries, rows, strict=True)
    )


def copied_loss(maps: Any, output: Any, queries: Sequence[int]) -> float:
    """Nats per letter that could be copied."""
    logps = output.log_softmax(-1)
    return statistics.fmean(-float(logps[q, maps.targets[q]]) for q in queries)


def measure(run: Path) -> tuple[dict[str, float], Any]:
    """The figures of one run, and the maps of a text."""
    from foresight.nets.sequence.attention import KnockOut
    from foresight.runtime import run as runs
    from foresight.runtime.attention import sources

    agent, rows, maps = runs.load(run), [], None
    for example in list(agent.env.test)[:TEXTS]:
        length = len(example.answer)
        maps = sources.of_text(agent.state.policy, example.prompt + example.answer)
        queries = inside(maps, length)
        first, second = maps.weights
        links = [
            KnockOut(1, None, q, q - times * length + 1) for q in queries for times in range(1, (q - 1) // length + 1)
        ]
        rows.append(
            {
                "next_after_former": mass(second, queries, length, 1),
                "uniform": statistics.fmean((q // length) / (q + 1) for q in queries),
                "previous_in_layer_1": statistics.fmean(float(first.mean(0)[q, q - 1]) for q in queries),
                "loss": copied_loss(maps, maps.output, queries),
                "loss_without_these_links": copied_loss(maps, maps.again(links)[1], queries),
                "loss_without_layer_2": copied_loss(maps, maps.again([KnockOut(1)])[1], queries),
                "loss_without_layer_1": copied_loss(maps, maps.again([KnockOut(0)])[1], queries),
            }
        )
    agent.close()
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}, maps


def main() -> None:
    """Measure every seed; write the JSON, a page beside each run, and the picture of the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    import torch

    from foresight.runtime import bench
    from foresight.runtime.attention import draw

    torch.set_num_threads(1)
    began = time.monotonic()
    runs = [run for run in sorted(RUNS.glob("pretrain-repeats-?")) if (run / "summary.json").is_file()]
    if not runs:
        sys.exit("There is no run: foresight reproduce sequence --only pretrain-repeats")
    found = {}
    for run in runs:
        found[run.name[-1]], maps = measure(run)
        draw.save(maps, run / "media" / "attention.html")
        if run == runs[0]:
            draw.save(maps, PICTURE)
        print(run.name, found[run.name[-1]], flush=True)
    names = list(next(iter(found.values())))
    document = {
        "what": "a model of two attention layers on repeated random letters: the weight of layer 2 at the letters that "
        "followed the former occurrences, and the loss of copied letters without these links",
        "command": shlex.join(["python", "benchmarks/induction_heads.py", *sys.argv[1:]]),
        "seeds": [int(seed) for seed in found],
        "by_seed": found,
        **{name: statistics.fmean(one[name] for one in found.values()) for name in names},
        "least_mass": min(one["next_after_former"] for one in found.values()),
        "knocking_out_raises_the_loss": all(one["loss_without_these_links"] > one["loss"] for one in found.values()),
    }
    bench.record(FILE, document, began)


if __name__ == "__main__":
    main()

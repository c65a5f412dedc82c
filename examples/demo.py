"""What `make demo` prints after training: held-out answers before and after, the reward curve, and the export.

python examples/demo.py RUN [--picture FILE.png]
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from foresight.envs.text.make import make
from foresight.envs.text.task import Example, TextTask
from foresight.nets.language import pretrained
from foresight.planning.generation.decoding import generate
from foresight.runtime import machine
from foresight.runtime.monitoring import progress
from foresight.runtime.results import plot
from foresight.runtime.run import Run


def answers(model_name: str, examples: Sequence[Example], max_new_tokens: int) -> list[str]:
    """Greedy completions of a model, which is loaded, used and freed."""
    model = pretrained.load(model_name)
    batch = generate(model, [model.encode(e.prompt) for e in examples], 1, max_new_tokens, temperature=0.0)
    rows = zip(batch.completion[:, 0].tolist(), batch.length[:, 0].tolist(), strict=True)
    texts = [model.decode(row[:n]) for row, n in rows]
    del model
    gc.collect()
    return texts


def table(task: TextTask, before: Sequence[str], after: Sequence[str], rows: int = 12) -> Table:
    """The first held-out questions with both answers, each marked right or wrong."""
    shown = Table(title=f"{rows} of {len(task.test)} held-out questions, greedy decoding")
    for column in ("question", "before training", "after training"):
        shown.add_column(column, overflow="fold")
    marks = [
        ["[green]✓[/]" if mark >= 1 else "[red]✗[/]" for mark in task.grade(task.test, texts)]
        for texts in (before, after)
    ]
    for example, b, a, right_b, right_a in list(zip(task.test, before, after, *marks, strict=True))[:rows]:
        shown.add_row(example.question, f"{right_b} {' '.join(b.split())}", f"{right_a} {' '.join(a.split())}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the run directory of `foresight train grpo`")
    parser.add_argument("--picture", help="where to write the reward curve (default: RUN/media/reward.png)")
    arguments = parser.parse_args()

    run, console = Run(arguments.run), Console()
    export = run.path / "export"
    task = make(run.settings.env, **run.settings.env_options)
    with console.status("answering the held-out questions with both models"):
        before = answers(run.config.model, task.test, run.config.max_new_tokens)
        after = answers(str(export), task.test, run.config.max_new_tokens)
    console.print(table(task, before, after))

    rewards = [row["reward"] for row in run.metrics() if "reward" in row]
    console.print(progress.curve(rewards, title="mean reward of sampled answers, by update"), highlight=False)
    picture = Path(arguments.picture or run.path / "media" / "reward.png")
    plot.before_after(run.path, picture, "reward")

    shares = [sum(task.grade(task.test, texts)) / len(task.test) for texts in (before, after)]
    summary, peak = run.summary, machine.peak_gib()
    console.print(
        f"Greedy accuracy on held-out questions: [bold]{shares[0]:.0%} before, {shares[1]:.0%} after[/] "
        f"{summary['steps']} updates in {summary['seconds']:.0f} s of training.\n"
        f"Reward curve: {picture}\n"
        f"Hugging Face checkpoint (loads with transformers alone): {export}\n"
        f"Talk to it: foresight play {run.path}",
        highlight=False,
    )
    if "peak_gib" in summary:
        peak = max(peak, summary["peak_gib"])
        console.print(f"Peak resident memory: {peak:.2f} GiB", highlight=False)


if __name__ == "__main__":
    main()

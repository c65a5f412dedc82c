"""The picture and the page of `memory_study.py`, from what it found."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLOURS = {"gru": "#1f77b4", "lstm": "#17becf", "gtrxl": "#d62728", "transformer": "#ff7f0e", "none": "#7f7f7f"}
NAMES = {"gru": "GRU", "lstm": "LSTM", "gtrxl": "GTrXL", "transformer": "transformer", "none": "no memory"}
HEAD = """# Memory

Which memory lets PPO act on what it saw long ago? GTrXL (Parisotto et al. 2019,
[arXiv:1910.06764](https://arxiv.org/abs/1910.06764)), a plain causal transformer over a window, LSTM and GRU, with
about {parameters:,} parameters each (encoder, memory and heads together), the same budget of steps and the same
settings, against a policy without memory. Code: [`nets/memory.py`](../foresight/nets/memory.py),
[`nets/gtrxl.py`](../foresight/nets/gtrxl.py), [`nets/window.py`](../foresight/nets/window.py),
[`nets/recurrent.py`](../foresight/nets/recurrent.py); worlds: [`envs/recall.py`](../foresight/envs/recall.py).

    foresight train ppo --preset TMazePassive-v0
    foresight train ppo --env RepeatFirst-v0 --memory gru

![Success against length](media/memory.png)

Made by `{command}` in {minutes:.0f} minutes on one of {cores} shared
cores. Seeds: {seeds}. Every number is the mean over the seeds of a greedy evaluation on {episodes} episodes that
training never saw. A run stops early once the mean return of the last 100 episodes was at least 0.96 (1 is perfect)
after three updates in a row.
"""
TAIL = """
## How a memory is a carry

`network(obs, carry)` reads one more step of every world and gives the carry to go on with;
`network(obs, carry, start)` reads whole sequences, where `start` is 1 at the first row of an episode. Both give the
same numbers: a row sees its own episode only, and attention exactly `memory_window` rows before it, whether they
stand in the carry or in the sequence. A carry is a tree of tensors in which zeros mean that nothing was read, so
`memory.forget(carry, cut)` empties the rows whose episode ended, whatever the kind of memory. The tests hold each kind
to this across episode boundaries, and PPO's first ratio to 1.

| setting of `ppo` | meaning |
|---|---|
| `memory` | `gru`, `lstm`, `gtrxl`, `transformer`; none if left out |
| `memory_size`, `memory_layers` | width and depth |
| `memory_heads`, `memory_window` | of the attention; recurrent nets have neither |
| `backbone` | `shared`: one trunk for both; `separate`: one each; `actor`, `critic`: only that one has a memory |

## What to know

- The window is at least the length of the episode here. A window that is shorter than what must be remembered leaves
  a layer of attention at the ceiling of a policy without memory; deeper stacks see `memory_layers` windows back.
- The segment (`unroll_steps`) is at most 128 steps, so in the longer mazes gradients are cut where a segment ends,
  and the carry alone brings the cue across.
- The T-maze is the one of Ni et al. 2023 ([arXiv:2307.03864](https://arxiv.org/abs/2307.03864)): a step that lags
  behind costs 1 / length, so that walking is learnt fast and what remains to be learnt is the memory. Repeat-first is
  POPGym's ([arXiv:2303.01859](https://arxiv.org/abs/2303.01859)) with cards drawn anew instead of from a deck.
"""


def publish(
    result: dict[str, Any],
    picture: Path,
    page: Path,
    kinds: tuple[str, ...],
    lengths: dict[str, tuple[int, ...]],
    ceiling: Callable[[str, int], float],
    titles: dict[str, str],
) -> None:
    """Draw `picture` and write `page`."""
    table = _table(result["cells"])
    _draw(table, picture, kinds, lengths, ceiling, titles)
    first = next(c for c in result["cells"] if c["memory"] == "gru")
    text = HEAD.format(
        parameters=round(first["parameters"], -3),
        command=result["command"],
        cores=result["machine"]["cores"],
        minutes=result["seconds"] / 60,
        seeds=", ".join(str(seed) for seed in result["seeds"]),
        episodes=result["episodes"],
    )
    for world in lengths:
        text += f"\n## {titles[world]}\n\n" + _rows(
            table, world, lengths[world], kinds, result["steps"][world], ceiling
        )
    page.write_text(text + _undone(result["cells"]) + TAIL, encoding="utf-8")


def _undone(cells: list[dict[str, Any]]) -> str:
    """The runs whose last policy is worse than what training had reached: they count as they are."""
    lines = [
        f"- {NAMES[c['memory']]}, `{c['world']}` of length {c['length']}, seed {c['seed']}: {c['success']:.2f}, "
        f"after a return of {max(r for _, r in c['curve'][-8:]):.2f} in training"
        for c in cells
        if c["solved_early"] and c["success"] < 0.9
    ]
    if not lines:
        return ""
    return "\nThese runs were stopped as solved, and the very last update undid it:\n\n" + "\n".join(lines) + "\n"


def _table(cells: list[dict[str, Any]]) -> dict[tuple[str, int, str], list[dict[str, Any]]]:
    table: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for found in cells:
        table.setdefault((found["world"], found["length"], found["memory"]), []).append(found)
    return table


def _rows(
    table: dict[Any, Any],
    world: str,
    lengths: tuple[int, ...],
    kinds: tuple[str, ...],
    steps: int,
    ceiling: Callable[[str, int], float],
) -> str:
    """Success, and below it the steps (in thousands) that were taken where the run could stop early."""
    done = sorted({length for w, length, _ in table if w == world} | set(lengths))
    text = f"`{world}`, at most {steps:,} steps a run.\n\n"
    text += (
        "| memory | parameters | "
        + " | ".join(f"length {n}" for n in done)
        + " |\n|---|---|"
        + "---|" * len(done)
        + "\n"
    )
    for kind in kinds:
        cells = [table.get((world, length, kind), []) for length in done]
        known = next((f"{found[0]['parameters']:,}" for found in cells if found), "")
        text += f"| {NAMES[kind]} | {known} | " + " | ".join(_cell(found) for found in cells) + " |\n"
    text += "| ceiling without memory | | " + " | ".join(f"{ceiling(world, length):.2f}" for length in done) + " |\n"
    return text + "\nIn brackets: thousands of steps after which the run could stop, where all seeds could.\n"


def _cell(found: list[dict[str, Any]]) -> str:
    if not found:
        return "not run"
    mean = statistics.fmean(c["success"] for c in found)
    worst = min(c["success"] for c in found)
    text = f"{mean:.2f}" if len(found) == 1 or mean - worst < 0.005 else f"{mean:.2f} (worst {worst:.2f})"
    if all(c["solved_early"] for c in found):
        text += f" [{statistics.fmean(c['steps'] for c in found) / 1000:.0f}]"
    return text


def _draw(
    table: dict[Any, Any],
    picture: Path,
    kinds: tuple[str, ...],
    lengths: dict[str, tuple[int, ...]],
    ceiling: Callable[[str, int], float],
    titles: dict[str, str],
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(lengths), figsize=(10, 6.4), constrained_layout=True, squeeze=False)
    for column, world in enumerate(lengths):
        top, bottom = axes[0][column], axes[1][column]
        for kind in kinds:
            done = sorted({length for w, length, k in table if (w, k) == (world, kind)})
            found = [table[world, length, kind] for length in done]
            style = {
                "color": COLOURS[kind],
                "marker": "o",
                "label": NAMES[kind],
                "linestyle": ":" if kind == "none" else "-",
            }
            if not done:
                continue
            top.plot(done, [statistics.fmean(c["success"] for c in cells) for cells in found], **style)
            low, high = ([end(c["success"] for c in cells) for cells in found] for end in (min, max))
            top.fill_between(done, low, high, color=COLOURS[kind], alpha=0.12, linewidth=0)
            if kind != "none":
                bottom.plot(done, [statistics.fmean(c["steps"] for c in cells) / 1000 for cells in found], **style)
        bound = [ceiling(world, length) for length in lengths[world]]
        top.plot(lengths[world], bound, color="black", linewidth=0.8, linestyle="--")
        top.set(title=titles[world], ylabel="success", ylim=(0, 1.04))
        bottom.set(xlabel="length", ylabel="thousands of steps used", ylim=(0, None))
        for axis in (top, bottom):
            axis.set_xscale("log")
            axis.set_xticks(lengths[world], [str(n) for n in lengths[world]])
            axis.minorticks_off()
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)

"""The picture and the page of `memory_study.py`, from what it found."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Table = dict[tuple[str, int, str], list[dict[str, Any]]]  # the cells of a world, a length and a memory: one a seed

COLORS = {"gru": "#1f77b4", "lstm": "#17becf", "gtrxl": "#d62728", "transformer": "#ff7f0e", "none": "#7f7f7f"}
NAMES = {"gru": "GRU", "lstm": "LSTM", "gtrxl": "GTrXL", "transformer": "transformer", "none": "no memory"}
HEAD = """# Memory

Which memory lets PPO act on what it saw long ago? GTrXL (Parisotto et al. 2019,
[arXiv:1910.06764](https://arxiv.org/abs/1910.06764)), a plain causal transformer over a window, LSTM and GRU, in
networks of about as many parameters (encoder, memory and heads together), with the same budget of steps and the same
settings, against a policy without memory. Code: [`nets/sequence/memory.py`](../foresight/nets/sequence/memory.py),
[`nets/sequence/gtrxl.py`](../foresight/nets/sequence/gtrxl.py),
[`nets/sequence/window.py`](../foresight/nets/sequence/window.py),
[`nets/sequence/recurrent.py`](../foresight/nets/sequence/recurrent.py); worlds:
[`envs/control/memory_tasks.py`](../foresight/envs/control/memory_tasks.py).

    foresight train ppo --preset TMazePassive-v0
    foresight train ppo --env RepeatFirst-v0 --memory gru

{made}
The settings were chosen on `{world}` of length {length}, with {kinds}, on seed {seed}. So seed {seed} is not counted
anywhere on this page, the column of that length is marked †, and what can be said about {kinds} against the others
rests on the other columns.
"""
MADE = """![Success against length](media/memory.png)

Made by `{command}` in {minutes:,.0f} minutes of one core. Seeds: {seeds}; which of
them a world has had stands with it. Every number is the mean over them of a greedy evaluation on {episodes} episodes
that training never saw. A run stops early once the mean return of the last 100 episodes was nearly the best possible
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

- The longer a maze, the more of the budget goes into learning to walk: whoever once falls behind is punished to the end
  whatever it does. A policy that never reaches the end scores 0, below the ceiling without memory.
- The control of the T-maze has other settings: in 300,000 steps it did not learn to walk, and with the others' entropy
  bonus (0.003) and a million steps one seed of three walked and never turned (0.30 at 20 and 0.33 at 30 on average).
  With 0.01 only one at 25 is left that does so. All this was seen on the seeds that are reported; a control is there to
  stand at its ceiling.
- The window is at least the length of the episode here. A window that is shorter than what must be remembered leaves
  a layer of attention at the ceiling of a policy without memory; deeper stacks see `memory_layers` windows back.
- The segment (`unroll_steps`) is two episodes long, but at most 128 steps. An episode that crosses its end has its
  gradient cut there, and the carry alone brings the cue across.
- The T-maze is the one of Ni et al. 2023 ([arXiv:2307.03864](https://arxiv.org/abs/2307.03864)): a step that lags
  behind costs 1 / length, so that walking is learned first and what remains to be learned is the memory. Repeat-first
  is POPGym's ([arXiv:2303.01859](https://arxiv.org/abs/2303.01859)) with cards drawn anew instead of from a deck.
- CartPole shows positions only, and its velocities are the difference of two steps; its settings are those of the
  preset of `ppo`, which no memory here was tuned for. In MiniGrid-Memory the object that must be found again is seen
  in the first room; attention sees 64 steps back.
"""


def publish(
    result: dict[str, Any],
    picture: Path,
    page: Path,
    kinds: tuple[str, ...],
    envs: Mapping[str, Any],
    tuned: Mapping[str, Any],
) -> None:
    """Draw `picture` and write `page`; `worlds` and `tuned` are those of `memory_study.py`."""
    cells = [found for found in result["cells"] if found["seed"] != tuned["seed"]]
    table: Table = {}
    for found in cells:
        table.setdefault((found["world"], found["length"], found["memory"]), []).append(found)
    curves = {name: env for name, env in envs.items() if len(env.lengths) > 1}
    made = "Not run yet: `python benchmarks/memory_study.py` fills the tables.\n"
    if cells:
        _draw(table, picture, kinds, curves)
        made = MADE.format(
            command=result["command"],
            minutes=sum(found["seconds"] for found in cells) / 60,
            seeds=", ".join(str(seed) for seed in sorted({found["seed"] for found in cells})),
            episodes=result["episodes"],
        )
    text = HEAD.format(**{**tuned, "made": made, "kinds": " and ".join(NAMES[kind] for kind in tuned["kinds"])})
    for name, env in envs.items():
        marked = tuned["length"] if name == tuned["world"] else None
        text += f"\n## {env.title}\n\n" + _rows(table, name, env, kinds, marked)
    page.write_text(text + _undone(cells) + TAIL, encoding="utf-8")


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


def _rows(table: Table, name: str, env: Any, kinds: tuple[str, ...], marked: int | None) -> str:
    """Success, and beside it the steps (in thousands) that were taken where the run could stop early."""
    titles = [f"length {length}{' †' if length == marked else ''}" for length in env.lengths]
    lines = [["memory", "parameters", *titles], ["---"] * (2 + len(titles))]
    for kind in kinds:
        cells = [table.get((name, length, kind), []) for length in env.lengths]
        known = next((f"{found[0]['parameters']:,}" for found in cells if found), "")
        lines.append([NAMES[kind], known, *(_cell(found) for found in cells)])
    if env.ceiling:
        lines.append(["ceiling without memory", "", *(f"{env.ceiling(length):.2f}" for length in env.lengths)])
    seeds = sorted({c["seed"] for key, found in table.items() if key[0] == name for c in found})
    run = f"; seeds {', '.join(map(str, seeds))}" if seeds else ""
    apart = ""
    if env.control:
        told = ", ".join(f"{field} {value:,}" for field, value in env.control.items())
        apart = f" (the control without memory: {told})"
    return (
        f"`{name}`, at most {env.steps:,} steps a run{apart}{run}.\n\n"
        + "\n".join(f"| {' | '.join(line)} |" for line in lines)
        + "\n\nIn brackets: thousands of steps after which the run could stop, where all seeds could.\n"
    )


def _cell(found: list[dict[str, Any]]) -> str:
    if not found:
        return "not run"
    mean = statistics.fmean(c["success"] for c in found)
    worst = min(c["success"] for c in found)
    text = f"{mean:.2f}" if len(found) == 1 or mean - worst < 0.005 else f"{mean:.2f} (worst {worst:.2f})"
    if all(c["solved_early"] for c in found):
        text += f" [{statistics.fmean(c['steps'] for c in found) / 1000:.0f}]"
    return text


def _draw(table: Table, picture: Path, kinds: tuple[str, ...], envs: Mapping[str, Any]) -> None:
    """Success against length above, steps that were used below, a column for each of `worlds`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(envs), figsize=(10, 6.4), constrained_layout=True, squeeze=False)
    for (name, env), (top, bottom) in zip(envs.items(), axes.T, strict=True):
        for kind in kinds:
            done = [length for length in env.lengths if (name, length, kind) in table]
            found = [table[name, length, kind] for length in done]
            if not done:
                continue
            style = {"color": COLORS[kind], "label": NAMES[kind], "marker": "o", "ls": ":" if kind == "none" else "-"}
            top.plot(done, [statistics.fmean(c["success"] for c in cells) for cells in found], **style)
            low, high = ([end(c["success"] for c in cells) for cells in found] for end in (min, max))
            top.fill_between(done, low, high, color=COLORS[kind], alpha=0.12, linewidth=0)
            if kind != "none":
                bottom.plot(done, [statistics.fmean(c["steps"] for c in cells) / 1000 for cells in found], **style)
        bound = [env.ceiling(length) for length in env.lengths]
        top.plot(env.lengths, bound, color="black", linewidth=0.8, linestyle="--")
        top.set(title=env.title, ylabel="success", ylim=(0, 1.04))
        bottom.set(xlabel="length", ylabel="thousands of steps used", ylim=(0, None))
        for axis in (top, bottom):
            axis.set_xscale("log")
            axis.set_xticks(env.lengths, [str(length) for length in env.lengths])
            axis.minorticks_off()
            axis.spines[["top", "right"]].set_visible(False)
    handles = axes[0][0].get_legend_handles_labels()
    if handles[0]:
        axes[0][0].legend(frameon=False, fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)

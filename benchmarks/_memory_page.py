"""The picture and the page of `memory_study.py`, from its results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Table = dict[tuple[str, int, str], list[dict[str, Any]]]  # the cells of an env, a length and a memory: one per seed

COLORS = {"gru": "#1f77b4", "lstm": "#17becf", "gtrxl": "#d62728", "transformer": "#ff7f0e", "none": "#7f7f7f"}
NAMES = {"gru": "GRU", "lstm": "LSTM", "gtrxl": "GTrXL", "transformer": "transformer", "none": "no memory"}
HEAD = """# Memory

Which memory lets PPO act on old observations? This study compares GTrXL (Parisotto et al. 2019,
[arXiv:1910.06764](https://arxiv.org/abs/1910.06764)), a plain causal transformer over a window, LSTM and GRU with a
policy without memory. The networks have about the same size (encoder, memory and heads together), the same step budget
and the same settings. Code: [`nets/sequence/memory.py`](../foresight/nets/sequence/memory.py),
[`nets/sequence/gtrxl.py`](../foresight/nets/sequence/gtrxl.py),
[`nets/sequence/window.py`](../foresight/nets/sequence/window.py),
[`nets/sequence/recurrent.py`](../foresight/nets/sequence/recurrent.py); environments:
[`envs/control/memory_tasks.py`](../foresight/envs/control/memory_tasks.py).

    foresight train ppo --preset TMazePassive-v0
    foresight train ppo --env RepeatFirst-v0 --memory gru

{made}
The settings were tuned on `{env}` of length {length} with {kinds} on seed {seed}. This page excludes seed {seed} and
marks the column of that length with †; compare {kinds} by the other columns.
"""
MADE = """![Success rate by length](media/memory.png)

Made by `{command}` in {minutes:,.0f} minutes on one core. Seeds: {seeds}; each table
lists its own. Every value is the mean over seeds of a greedy evaluation on {episodes} new episodes. A run stops early
when the mean return of the last 100 episodes is nearly optimal after three consecutive updates.
"""
TAIL = """
## Memory as a carry

`network(obs, carry)` processes one step of every environment and returns the next carry; `network(obs, carry, start)`
processes sequences, where `start` is 1 at the first step of an episode. The results are the same: a step depends only
on its own episode, and attention covers the `memory_window` steps before it, in the carry or in the sequence. A carry
is a tree of tensors in which zeros mean empty, so `memory.reset_carry(carry, cut)` resets the rows whose episode ended,
for any kind of memory. Tests check each kind across episode boundaries, and that PPO's first ratio is 1.

| setting of `ppo` | meaning |
|---|---|
| `memory` | `gru`, `lstm`, `gtrxl` or `transformer`; by default no memory, and then `backbone` is `shared` |
| `memory_size`, `memory_layers` | width and depth |
| `memory_heads`, `memory_window` | heads and window of the attention; not used by recurrent nets |
| `backbone` | `shared`: one trunk for actor and critic; `separate`: one each; `actor`, `critic`: memory in one only |

## What to know

- In longer mazes, more of the budget goes into learning to walk down the corridor: an agent that falls behind is
  penalized until the end. A policy that never reaches the junction gets 0, which is below the ceiling without memory.
- The policy without memory has its own settings in the T-maze, because it should reach its ceiling. In 300,000 steps
  it did not learn to walk down the corridor. In a million steps with the entropy coefficient of the others (0.003),
  one seed of three reached the junction but never turned (0.30 at length 20 and 0.33 at length 30 on average). With
  0.01, this happens for one seed at length 25 only. These settings were chosen on the reported seeds.
- The window is at least as long as the episode. If the window is shorter than the distance to the cue, one attention
  layer cannot exceed the ceiling without memory; deeper stacks see `memory_layers` windows back.
- A segment (`rollout_steps`) is two episodes long, but at most 128 steps. The gradient is cut at the end of a segment;
  beyond it, only the carry transports the cue.
- The T-maze is that of Ni et al. 2023 ([arXiv:2307.03864](https://arxiv.org/abs/2307.03864)): each step by which the
  agent falls behind costs 1 / length, so walking is learned before memory. Repeat-first is that of POPGym
  ([arXiv:2303.01859](https://arxiv.org/abs/2303.01859)), with cards drawn with replacement instead of from a deck.
- CartPole shows only positions; velocities are differences of two steps. The settings are those of the `ppo` preset and
  were not tuned for any memory. In MiniGrid-Memory the object to remember is in the first room; attention sees 64 steps
  back.
"""


def publish(
    result: dict[str, Any],
    picture: Path,
    page: Path,
    kinds: tuple[str, ...],
    envs: Mapping[str, Any],
    tuned: Mapping[str, Any],
) -> None:
    """Draw `picture` and write `page`; `envs` and `tuned` are those of `memory_study.py`."""
    cells = [found for found in result["cells"] if found["seed"] != tuned["seed"]]
    table: Table = {}
    for found in cells:
        table.setdefault((found["env"], found["length"], found["memory"]), []).append(found)
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
        marked = tuned["length"] if name == tuned["env"] else None
        text += f"\n## {env.title}\n\n" + _rows(table, name, env, kinds, marked)
    page.write_text(text + _undone(cells) + TAIL, encoding="utf-8")


def _undone(cells: list[dict[str, Any]]) -> str:
    """The runs whose last policy is worse than the policy before it; they are not excluded."""
    lines = [
        f"- {NAMES[c['memory']]}, `{c['env']}` of length {c['length']}, seed {c['seed']}: {c['success']:.2f}, "
        f"after a return of {max(r for _, r in c['curve'][-8:]):.2f} in training"
        for c in cells
        if c["solved_early"] and c["success"] < 0.9
    ]
    if not lines:
        return ""
    return (
        "\nThese runs stopped early as solved, but their last update made the policy worse:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def _rows(table: Table, name: str, env: Any, kinds: tuple[str, ...], marked: int | None) -> str:
    """Success, and the steps (in thousands) where all seeds could stop early."""
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
    control = ""
    if env.control:
        fields = ", ".join(f"{field} {value:,}" for field, value in env.control.items())
        control = f" (without memory: {fields})"
    return (
        f"`{name}`, at most {env.steps:,} steps per run{control}{run}.\n\n"
        + "\n".join(f"| {' | '.join(line)} |" for line in lines)
        + "\n\nIn brackets: thousands of steps until the run stopped early, if all seeds did.\n"
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
    """Success by length (top) and steps used (bottom), a column for each of `envs`."""
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

"""Draws an MDP: values and greedy arrows as text or as an RGB image."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
from torch import Tensor

COLORS = {"#": "dim", "G": "bold green", "T": "red"}
ENDS = "GT"  # cells that end the episode: drawn without a value and an arrow


@dataclasses.dataclass(frozen=True)
class Layout:
    """The cells of states on a grid, for drawing.

    `cells` are rows of equal length, one character per cell (`#` wall, `G` goal, `T` trap, `S` start, `.` free);
    `position` `[S]` is the flat index of a state's cell, or -1 for a state that is not shown.
    """

    cells: tuple[str, ...]
    position: np.ndarray
    caption: str = ""


class Table(Protocol):
    """The part of `envs.tabular.mdp.MDP` that is drawn: S states, A actions."""

    @property
    def name(self) -> str:
        """The name, for the title."""

    @property
    def layout(self) -> Layout | None:
        """The cells of its states, or None."""

    @property
    def states(self) -> int:
        """S."""

    @property
    def actions(self) -> int:
        """A."""

    @property
    def start(self) -> Tensor:
        """`[S]`: the initial state distribution."""

    @property
    def action_names(self) -> tuple[str, ...]:
        """The names of its actions, or empty."""

    @property
    def arrows(self) -> tuple[str, ...]:
        """One glyph per action."""


def text(mdp: Table, values: Tensor, policy: Tensor, markup: bool = False) -> str:
    """The value grid and the arrow grid side by side; a table of the likeliest start states without a layout.

    `values` `[S]`; `policy` `[S]` actions, or `[S, A]` true or positive where an action may be taken: all of them
    are drawn. With `markup`, rich tags color the cells.
    """
    shown = _shown(policy, mdp)
    if mdp.layout is None:
        return _table(mdp, values, shown)
    state_at = _state_at(mdp)
    numbers, arrows = [], []
    for r, line in enumerate(mdp.layout.cells):
        for c, cell in enumerate(line):
            s = state_at[r, c]
            if s < 0 or cell in ENDS:
                numbers.append("█" * 3 if cell == "#" else cell)
                arrows.append("█" * 3 if cell == "#" else cell)
            else:
                numbers.append(_number(float(values[s])))
                arrows.append("".join(np.asarray(mdp.arrows)[shown[s]]))
    width = len(mdp.layout.cells[0])
    left = _align(numbers, width)
    right = _align(arrows, width)
    if markup:
        left, right = (_color(part, mdp.layout.cells) for part in (left, right))
    rows = [" ".join(a) + "    " + " ".join(b) for a, b in zip(left, right, strict=True)]
    span = sum(max(len(cell) for cell in column) + 1 for column in zip(*_align(numbers, width), strict=True))
    title = "value".ljust(span + 3) + "policy"
    return "\n".join([title, *rows, *([mdp.layout.caption] if mdp.layout.caption else [])])


def image(
    mdp: Table, values: Tensor | None = None, policy: Tensor | None = None, here: int | None = None, title: str = ""
) -> np.ndarray | None:
    """The grid as `[height, width, 3]` uint8: values as colors and numbers, arrows, and the agent at state `here`.

    None without a layout.
    """
    if mdp.layout is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    state_at = _state_at(mdp)
    height, width = state_at.shape
    figure = Figure(figsize=(max(0.8 * width, 2.4), 0.8 * height + 0.4), dpi=80)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, height * 0.8 / (0.8 * height + 0.4)))
    cells = np.array([list(line) for line in mdp.layout.cells])
    field = np.full(state_at.shape, np.nan)
    free = (state_at >= 0) & ~np.isin(cells, list(ENDS))
    if values is not None:
        field[free] = values.cpu().numpy()[state_at[free]]
    low, high = (np.nanmin(field), np.nanmax(field)) if np.isfinite(field).any() else (0.0, 1.0)
    axes.imshow(field, cmap="viridis", vmin=low, vmax=high if high > low else low + 1.0)
    for kind, color in {"#": "0.25", "G": "#2ca02c", "T": "#d62728"}.items():
        for r, c in np.argwhere(cells == kind):
            axes.add_patch(_square(c, r, color))
    shown = None if policy is None else _shown(policy, mdp)
    for r, c in np.argwhere(free):
        s = int(state_at[r, c])
        # White on the dark half of viridis, black on the light half.
        ink = "black" if values is None or field[r, c] > (low + high) / 2 else "white"
        if values is not None:
            axes.text(c, r + 0.3, _number(field[r, c]), ha="center", va="center", fontsize=8, color=ink)
        if shown is not None:
            glyphs = "".join(np.asarray(mdp.arrows)[shown[s]])
            axes.text(c, r - 0.12, glyphs, ha="center", va="center", fontsize=15 - 2 * len(glyphs), color=ink)
    if here is not None and (state_at == here).any():
        r, c = np.argwhere(state_at == here)[0]
        axes.plot(c, r, "o", markersize=16, color="#ff7f0e", markeredgecolor="black")
    axes.set_xticks(np.arange(width + 1) - 0.5, [])
    axes.set_yticks(np.arange(height + 1) - 0.5, [])
    axes.grid(color="white", linewidth=1)
    axes.tick_params(length=0)
    figure.text(0.02, 1.0 - 0.2 / (0.8 * height + 0.4), title or mdp.name, va="center", fontsize=10)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def _square(column: int, row: int, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, color=color)


def _shown(policy: Tensor, mdp: Table) -> np.ndarray:
    table = policy.cpu().numpy()
    return np.arange(mdp.actions) == table[:, None] if table.ndim == 1 else table > 0


def _state_at(mdp: Table) -> np.ndarray:
    assert mdp.layout is not None
    cells = mdp.layout.cells
    grid = np.full(len(cells) * len(cells[0]), -1)
    seen = np.flatnonzero(mdp.layout.position >= 0)
    grid[mdp.layout.position[seen]] = seen
    return grid.reshape(len(cells), len(cells[0]))


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"


def _align(cells: list[str], width: int) -> list[list[str]]:
    lines = [cells[i : i + width] for i in range(0, len(cells), width)]
    wide = [max(len(line[c]) for line in lines) for c in range(width)]
    return [[cell.rjust(wide[c]) for c, cell in enumerate(line)] for line in lines]


def _color(lines: list[list[str]], cells: tuple[str, ...]) -> list[list[str]]:
    def tag(text: str, kind: str) -> str:
        return f"[{COLORS[kind]}]{text}[/]" if kind in COLORS else text

    return [[tag(x, k) for x, k in zip(line, kinds, strict=True)] for line, kinds in zip(lines, cells, strict=True)]


def _table(mdp: Table, values: Tensor, shown: np.ndarray, rows: int = 10) -> str:
    likeliest = mdp.start.cpu().argsort(descending=True, stable=True)[:rows].tolist()
    names = np.asarray(mdp.action_names or [str(a) for a in range(mdp.actions)])
    lines = [f"{s:>9}  {_number(float(values[s])):>9}  {' '.join(names[shown[s]])}" for s in likeliest]
    more = [f"... and {mdp.states - rows:,} more states"] if mdp.states > rows else []
    return "\n".join([f"{'state':>9}  {'value':>9}  policy", *lines, *more])

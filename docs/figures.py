"""Write what the interactive figures of the course need from the library: their data, and their still pictures.

python docs/figures.py

docs/assets/figures/data.js: the episodes of a random walk, and the positions of two games. docs/media/figures/NAME.svg:
what is shown without JavaScript, and in the notebooks. The figures compute with docs/assets/figures/NAME.js, which the
tests compare with the library.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foresight.algorithms.tabular import td_prediction, value_iteration
from foresight.envs.games.make import make
from foresight.envs.tabular import grid, sutton_barto
from foresight.ops import policy
from foresight.planning.search.mcts import PUCT, search
from foresight.planning.search.rules import Rules
from foresight.planning.search.tree import Tree

DOCS = Path(__file__).parent
DATA = DOCS / "assets" / "figures" / "data.js"
MEDIA = DOCS / "media" / "figures"
GRID = (".....", ".##T.", "..#..", ".T...", "...#G")  # as in grid.js
WALK = {"gamma": 1.0, "initial": 0.5, "steps": 2**40, "episodes": 100}
RUNS = 100  # the seeds of the walk
GAMES = {"win": ("X to move, a win in one", (4, 1, 0, 2)), "draw": ("O to move, an edge draws", (0, 4, 8))}
GRAY, ONE, TWO, GOOD, BAD = "#808890", "#3f78d0", "#b8660f", "#2f9e4f", "#d9534a"  # readable on light and dark pages


def walk(seed: int) -> str:
    """The moves of the random walk of 5 states in 100 episodes, four to a hexadecimal digit; 1 is a step right."""
    config = td_prediction.Config(**WALK, seed=seed, yield_every=1)  # type: ignore[arg-type]
    moves, place, ended = "", 3, 0
    for _, _, state in td_prediction.train(config, sutton_barto.random_walk(5, 0.0, 1.0)):
        if state.actor.episodes > ended:
            moves, place, ended = moves + ("1" if place == 5 else "0"), 3, state.actor.episodes
        else:
            moves, place = moves + ("1" if state.actor.state > place else "0"), state.actor.state
    return "".join(f"{int(moves[i : i + 4].ljust(4, '0'), 2):x}" for i in range(0, len(moves), 4))


def know_nothing(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Equal priors, value 0."""
    return torch.zeros(len(positions), 9), torch.zeros(len(positions))


def position(moves: tuple[int, ...]) -> Tensor:
    """The position of tic-tac-toe after some moves, `[1, ...]`."""
    game = make("tic_tac_toe")
    at = game.start(1)
    for move in moves:
        at = game.step(at, torch.tensor([move])).position
    return at


def table(moves: tuple[int, ...]) -> dict[str, Any]:
    """All positions after `moves` by the rules: their cells, and `[action, next, reward, discount]` of each move."""
    game = make("tic_tac_toe")
    rules = Rules(game, know_nothing)
    found: dict[str, int] = {}
    waiting, outcomes = [position(moves)], [[]]
    found[cells(game.picture(waiting[0]))] = 0
    finished = {0: False}
    for number, at in enumerate(waiting):  # grows
        for action in () if finished[number] else game.legal(at)[0].nonzero().flatten().tolist():
            after, reward, discount, _, _ = rules.step(at, torch.tensor([action]))
            name = cells(game.picture(after))
            if name not in found:
                found[name] = len(waiting)
                finished[len(waiting)] = float(discount) == 0
                waiting.append(after)
                outcomes.append([])
            outcomes[number].append([action, found[name], int(reward), int(discount)])
    return {"cells": list(found), "moves": outcomes}


def cells(picture: str) -> str:
    """The nine cells of a picture in row order: "XO......."."""
    return "".join("".join(line.split()[1:]) for line in picture.splitlines()[1:])


def data() -> str:
    """The text of data.js."""
    found = {
        "walk": [walk(seed) for seed in range(RUNS)],
        "games": {name: {"title": title, **table(moves)} for name, (title, moves) in GAMES.items()},
    }
    head = "// Written by docs/figures.py from the library: episodes of a random walk, positions of two games.\n"
    start = "globalThis.foresight = globalThis.foresight || {};\n"
    return f"{head}{start}foresight.data = {json.dumps(found, separators=(',', ':'))};\n"


# --- still pictures


def text(x: float, y: float, words: str, color: str = GRAY, anchor: str = "middle", size: int = 12) -> str:
    """Words at a point."""
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}" font-size="{size}">{words}</text>'


def line(points: list[tuple[float, float]], color: str, dashes: str = "") -> str:
    """A line through points."""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"/>'


def drawing(width: int, height: int, parts: list[str]) -> str:
    """The text of an SVG file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join([f'{head} font-family="sans-serif">', *parts, "</svg>"]) + "\n"


def axes(x: tuple[float, float], y: tuple[float, float], labels: tuple[str, str]) -> tuple[list[str], Any]:
    """Axes of a chart of 420 by 260, and the place of a point."""

    def at(a: float, b: float) -> tuple[float, float]:
        return 50 + (a - x[0]) / (x[1] - x[0]) * 355, 215 - (b - y[0]) / (y[1] - y[0]) * 200

    parts = [line([at(x[0], y[1]), at(x[0], y[0]), at(x[1], y[0])], GRAY), text(228, 252, labels[0])]
    parts += [text(at(value, y[0])[0], 232, f"{value:g}") for value in x]
    parts += [text(44, at(x[0], value)[1] + 4, f"{value:g}", anchor="end") for value in y]
    return [*parts, text(60, 24, labels[1], anchor="start")], at


def grid_picture() -> str:
    """Optimal values and actions of the grid."""
    mdp = grid.gridworld(GRID, slip=0.2, step_reward=-0.04)
    *_, (_, _, state) = value_iteration.train(value_iteration.Config(gamma=0.9), mdp)
    assert mdp.layout is not None
    place = {int(cell): s for s, cell in enumerate(mdp.layout.position)}
    parts = []
    for cell, sign in enumerate("".join(GRID)):
        x, y = cell % 5 * 64, cell // 5 * 64
        fill = GRAY if sign == "#" else "none"
        parts.append(f'<rect x="{x + 1}" y="{y + 1}" width="62" height="62" fill="{fill}" stroke="{GRAY}"/>')
        if sign in "GT":
            parts.append(text(x + 32, y + 40, "★" if sign == "G" else "✖", GOOD if sign == "G" else BAD, size=24))
        if sign == ".":
            value, action = float(state.values[place[cell]]), int(state.policy[place[cell]])
            parts += [text(x + 32, y + 30, "↑→↓←"[action], size=20), text(x + 32, y + 53, f"{value:.2f}")]
    return drawing(320, 320, parts)


def walk_picture() -> str:
    """The error of TD(0) and Monte Carlo over the episodes: means over the runs."""
    parts, at = axes((0, 100), (0, 0.25), ("episodes", "RMS error"))
    mdp = sutton_barto.random_walk(5, 0.0, 1.0)
    for name, n, alpha, color in (("TD(0), α = 0.1", 1, 0.1, ONE), ("Monte Carlo, α = 0.02", 512, 0.02, TWO)):
        total = torch.zeros(100, dtype=torch.float64)
        for seed in range(RUNS):
            config = td_prediction.Config(**WALK, n_steps=n, alpha=alpha, seed=seed, yield_every=0)  # type: ignore[arg-type]
            total += torch.tensor([metrics["rms_error"] for _, metrics, _ in td_prediction.train(config, mdp)])
        mean = (total / RUNS).tolist()
        parts.append(line([at(k + 1, error) for k, error in enumerate(mean)], color))
        parts.append(text(400, 30 if n == 1 else 48, name, color, "end"))
    return drawing(420, 260, parts)


def clip_picture() -> str:
    """PPO's clipped objective over the ratio, of a good action and of a bad one."""
    parts, at = axes((0, 2), (-2, 2), ("ratio ρ", "objective"))
    ratio = torch.linspace(0, 2, 21)
    for advantage, color in ((1.0, ONE), (-1.0, TWO)):
        found = -policy.clipped_surrogate(ratio, torch.full_like(ratio, advantage), 0.2)
        parts.append(line([at(x, y) for x, y in zip(ratio.tolist(), found.tolist(), strict=True)], color))
        parts.append(text(400, 85 if advantage > 0 else 150, f"A = {advantage:+.0f}".replace("-", "−"), color, "end"))
    parts += [line([at(x, -2), at(x, 2)], GRAY, "3 4") for x in (0.8, 1.2)]
    return drawing(420, 260, parts)


def tree_picture() -> str:
    """The tree of the first position after 20 simulations; the width of a box is its share of the visits."""
    game = make("tic_tac_toe")
    rule = PUCT(c_init=1.25, c_base=math.inf, normalize="none", first_play="zero")
    tree = search(Rules(game, know_nothing), position(GAMES["win"][1]), 20, rule).tree
    names = [f"{'abc'[action % 3]}{action // 3 + 1}" for action in range(9)]
    return drawing(640, 124, boxes(tree, names, 0, 0.0, 640.0, 0))


def boxes(tree: Tree, names: list[str], node: int, x: float, room: float, depth: int) -> list[str]:
    """A node and what is below it, in `room` pixels from `x`."""
    visits, action = int(tree.visits[0, node]), int(tree.action[0, node])
    q = float(tree.reward[0, node] + tree.discount[0, node] * tree.value[0, node])
    color = GRAY if abs(q) < 0.05 else GOOD if q > 0 else BAD
    frame = (
        f'<rect x="{x + 1:.1f}" y="{depth * 30 + 1}" width="{room - 2:.1f}" height="27" fill="none" stroke="{color}"/>'
    )
    label = f"root, {visits} visits" if depth == 0 else f"{names[action]} {visits}"
    parts = [frame, *([text(round(x + room / 2, 1), depth * 30 + 19, label)] if room > 30 else [])]
    for child in tree.children[0, node].tolist():
        if child >= 0:
            share = room * int(tree.visits[0, child]) / visits
            parts += boxes(tree, names, child, x, share, depth + 1)
            x += share
    return parts


PICTURES = {"grid": grid_picture, "walk": walk_picture, "clip": clip_picture, "tree": tree_picture}

if __name__ == "__main__":
    DATA.write_text(data(), encoding="utf-8")
    MEDIA.mkdir(parents=True, exist_ok=True)
    for name, made in PICTURES.items():
        (MEDIA / f"{name}.svg").write_text(made(), encoding="utf-8")

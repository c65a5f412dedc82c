"""Search trees as dicts, JSON, Graphviz, and as a figure of the principal lines.

`names` turns an action into its name ("e4", "column 3"); the default is its number. Nothing is written to disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from foresight.planning.search.tree import Tree

if TYPE_CHECKING:  # slow to import, and most searches are not drawn
    from matplotlib.figure import Figure

Names = Callable[[int], str]


def as_dict(tree: Tree, row: int = 0, least: int = 1, names: Names = str) -> dict[str, Any]:
    """Row `row` as nested dicts: `action, prior, visits, value, reward, discount, terminal, children`.

    Children with fewer than `least` visits are left out; the others are sorted by visits, most first. `value` is for
    the player to move at the node, `q` (not at the root) for the player who moved there: reward + discount · value.
    """
    built: dict[int, dict[str, Any]] = {}
    for node in range(tree.size):  # parents come before their children
        visits, parent = int(tree.visits[row, node]), int(tree.parent[row, node])
        if node > 0 and (visits < max(least, 1) or parent not in built):
            continue
        own: dict[str, Any] = {"visits": visits, "value": float(tree.value[row, node])}
        if node > 0:
            action = int(tree.action[row, node])
            reward, discount = float(tree.reward[row, node]), float(tree.discount[row, node])
            own = {
                "action": names(action), "prior": float(tree.prior[row, parent, action]), **own,
                "q": reward + discount * own["value"], "reward": reward, "discount": discount,
                "terminal": discount == 0,
            }  # fmt: skip
            built[parent]["children"].append(own)
        own["children"] = []
        built[node] = own
    for own in built.values():
        own["children"].sort(key=lambda child: -child["visits"])
    return built[0]


def as_json(tree: Tree, row: int = 0, least: int = 1, names: Names = str) -> str:
    """`as_dict` as JSON text."""
    return json.dumps(as_dict(tree, row, least, names), allow_nan=False)


def as_dot(tree: Tree, row: int = 0, least: int = 1, names: Names = str) -> str:
    """Row `row` in Graphviz DOT (`dot -Tsvg`). Terminal nodes have double borders."""
    lines = ["digraph search {", '  node [shape=box, fontname="sans-serif"];']
    todo: list[tuple[str, dict[str, Any]]] = [("n", as_dict(tree, row, least, names))]
    while todo:
        label, node = todo.pop(0)
        border = ", peripheries=2" if node.get("terminal") else ""
        lines.append(f'  {label} [label="N {node["visits"]}\\nV {node["value"]:+.3f}"{border}];')
        for i, child in enumerate(node["children"]):
            below = f"{label}_{i}"
            name = str(child["action"]).replace('"', "'")
            lines.append(f'  {label} -> {below} [label="{name}\\nP {child["prior"]:.2f} Q {child["q"]:+.3f}"];')
            todo.append((below, child))
    return "\n".join([*lines, "}"])


def principal_line(tree: Tree, row: int = 0, first: int | None = None) -> list[tuple[int, int, float]]:
    """`(action, visits, q)` of the most visited actions from the root down; `first` fixes the first action.

    q is for the player who took the action. Ties go to the lower action.
    """
    line: list[tuple[int, int, float]] = []
    node = 0
    while True:
        children = tree.children[row, node].tolist()
        counts = [int(tree.visits[row, child]) if child >= 0 else 0 for child in children]
        action = first if first is not None and node == 0 else max(range(len(counts)), key=lambda a: (counts[a], -a))
        if counts[action] == 0:
            return line
        node = children[action]
        q = tree.reward[row, node] + tree.discount[row, node] * tree.value[row, node]
        line.append((action, counts[action], float(q)))


def picture(tree: Tree, row: int = 0, lines: int = 4, depth: int = 8, names: Names = str) -> Figure:
    """A matplotlib Figure of the principal lines of the `lines` most visited root actions.

    Each box is an action: the line width is its share of the visits, the color its value for the player who took it.
    Save it with `figure.savefig(...)`.
    """
    from matplotlib.figure import Figure

    counts = tree.child_visits()[row].tolist()
    chosen = [a for a in sorted(range(len(counts)), key=lambda a: -counts[a])[:lines] if counts[a] > 0]
    found = [principal_line(tree, row, action)[:depth] for action in chosen]
    width = max((len(line) for line in found), default=1)
    figure = Figure(figsize=(1.5 * width + 1.5, 0.9 * max(len(found), 1) + 0.8), layout="constrained")
    axes = figure.subplots()
    values = [q for line in found for _, _, q in line] or [0.0]
    low, high = min(values), max(values)
    total = max(int(tree.visits[row, 0]), 1)
    for y, line in enumerate(found):
        for x, (action, visits, q) in enumerate(line):
            share = (q - low) / (high - low) if high > low else 0.5
            color = (0.9 - 0.6 * share, 0.4 + 0.5 * share, 0.45)
            axes.plot([x, x + 1], [-y, -y], color="0.6", linewidth=0.5 + 8 * visits / total, zorder=1)
            text = f"{names(action)}\nN {visits}\nQ {q:+.2f}"
            axes.text(x + 1, -y, text, ha="center", va="center", fontsize=8, bbox={"fc": color, "ec": "0.3"})
    axes.set_title(f"N {total}, V {float(tree.value[row, 0]):+.3f}", fontsize=9)
    axes.set_xlim(-0.2, width + 0.6)
    axes.set_ylim(-max(len(found), 1) + 0.4, 0.6)
    axes.axis("off")
    return figure

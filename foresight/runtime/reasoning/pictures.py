"""A thought tree as a page (HTML) and as a picture, and curves of accuracy against tokens."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foresight.planning.reasoning.tree import ThoughtTree
from foresight.runtime.checkpoints import checkpoint

STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; max-width: 70em }
details { margin-left: 1.2em; border-left: 1px solid #ccc; padding-left: .6em }
summary { cursor: pointer } pre { display: inline; white-space: pre-wrap }
.chosen > summary { background: #e6f4ea } .pruned > summary { color: #999 }
.score { color: #666; font-size: 12px } .kind { color: #36c; font-size: 12px }
"""
MOST = 400  # nodes of a picture: more than can be seen
WIDEST = 60.0  # inches of a picture, 7,200 pixels: Matplotlib draws fewer than 65,536
TICKS = 50  # numbers below a picture


def page(tree: ThoughtTree, title: str, path: Path) -> Path:
    """Write the tree as one HTML file without scripts: nodes fold, the way to the answer is green and open."""
    below: dict[int, list[int]] = {}
    for i, node in enumerate(tree.nodes):
        if node.parents:
            below.setdefault(node.parents[0], []).append(i)

    def head(i: int) -> str:
        node = tree.nodes[i]
        marks = " ".join(name for name, on in (("chosen", node.chosen), ("pruned", not node.kept)) if on)
        score = "" if node.score is None else f' <span class="score">{node.score:.3g}</span>'
        others = "".join(f' <span class="kind">from {parent}</span>' for parent in node.parents[1:])
        line = (
            f'<span class="kind">{i} {html.escape(node.kind)}</span>{others}{score} <pre>{html.escape(node.text)}</pre>'
        )
        return f'<details class="{marks}"{" open" if node.chosen else ""}><summary>{line}</summary>'

    blocks = list[str]()
    ahead: list[int | None] = [0]  # None ends a block: no recursion, which a deep tree would exceed
    while ahead:
        one = ahead.pop()
        blocks.append("</details>\n" if one is None else head(one))
        if one is not None:
            ahead += [None, *reversed(below.get(one, ()))]
    text = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    checkpoint.write_atomic(path, f"{text}<h1>{html.escape(title)}</h1>\n{''.join(blocks)}")
    return path


def picture(tree: ThoughtTree, title: str, path: Path) -> Path:
    """Draw the tree: a column for each depth, color for the score, thick lines on the way to the answer."""
    from matplotlib.figure import Figure

    depth = tree.depth()
    nodes = range(min(len(tree.nodes), MOST))
    count: dict[int, int] = {}
    place: dict[int, tuple[float, float]] = {}
    sizes = Counter(depth[i] for i in nodes)
    for i in nodes:
        d = depth[i]
        count[d] = count.get(d, 0) + 1
        place[i] = (float(d), (count[d] - (sizes[d] + 1) / 2) / max(sizes.values()))
    figure = Figure(figsize=(min(2 + 1.6 * len(sizes), WIDEST), 5), layout="constrained")
    axes = figure.add_subplot()
    for i in nodes:
        for parent in tree.nodes[i].parents:
            (x0, y0), (x1, y1) = place[parent], place[i]
            chosen = tree.nodes[i].chosen and tree.nodes[parent].chosen
            axes.plot([x0, x1], [y0, y1], color="green" if chosen else "lightgray", lw=2 if chosen else 0.6, zorder=1)
    plain = [place[i] for i in nodes if tree.nodes[i].score is None]
    scored = [(*place[i], score) for i in nodes if (score := tree.nodes[i].score) is not None]
    axes.scatter([x for x, _ in plain], [y for _, y in plain], s=20, color="gray", zorder=2)
    if scored:
        x, y, color = (list(values) for values in zip(*scored, strict=True))
        points = axes.scatter(x, y, s=28, c=color, cmap="viridis", zorder=3)
        figure.colorbar(points, ax=axes, label="score")
    more = "" if len(tree.nodes) <= MOST else f" (the first {MOST} of {len(tree.nodes):,} thoughts)"
    axes.set_title(title + more, fontsize=10)
    axes.set_xlabel("thoughts from the question")
    axes.set_yticks([])
    axes.set_xticks(sorted(sizes)[:: 1 + len(sizes) // TICKS])
    figure.savefig(path, dpi=120)
    return path


def curves(rows: Sequence[dict[str, Any]], title: str, path: Path) -> Path:
    """Draw accuracy against the sampled tokens of a question, a line for each method; greedy is a dashed line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = sorted((row for row in rows if row["method"] == name), key=lambda row: row["sampled_tokens"])
        x, y = [row["sampled_tokens"] for row in mine], [row["accuracy"] for row in mine]
        if name == "greedy":
            axes.axhline(y[0], color="gray", ls="--", label="greedy")
        else:
            axes.errorbar(x, y, yerr=[row["standard_error"] for row in mine], marker="o", ms=4, capsize=2, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("sampled tokens per question")
    axes.set_ylabel("accuracy")
    if all(0 <= row["accuracy"] <= 1 for row in rows):  # a reward function may have another scale
        axes.set_ylim(0, 1)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return path

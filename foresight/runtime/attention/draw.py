"""Attention drawn: tokens across, layers up, links as weights; or over the image of a vision transformer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresight.errors import UserError
from foresight.runtime.attention import page, reductions
from foresight.runtime.attention.maps import Maps
from foresight.runtime.results import plot

FAINT = 0.02  # smaller weights are not drawn as links
ALL, CHOSEN = "#4477aa", "#cc5500"  # links of all queries, and of the chosen one
SUFFIXES = (*plot.FORMATS, ".html", ".json")


def save(
    maps: Maps,
    out: str | Path,
    view: str | int = "mean",
    query: int = -1,
    without_first: bool = False,
    effects: Sequence[tuple[str, dict[str, Any]]] = (),
    heads: list[list[float]] | None = None,
) -> None:
    """Write a picture (.png, .svg, .pdf), a self-contained page (.html) or all numbers (.json).

    `effects` are what was knocked out and its effect, `heads` the effect of each head; both are in the page and the
    numbers. Raises UserError for another suffix, and as `Maps.view`.
    """
    suffix = Path(out).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"Cannot write '{out}': the name must end in one of {', '.join(SUFFIXES)}.")
    if suffix in plot.FORMATS:
        figure = (
            picture(maps, view, without_first) if maps.image is not None else links(maps, view, query, without_first)
        )
        plot.save(figure, out)
        return
    maps.view(view, without_first)  # raises
    more = {"knock_outs": [{"links": name, **effect} for name, effect in effects], "each_head": heads}
    text = (
        page.html(maps, view, query, without_first, more)
        if suffix == ".html"
        else json.dumps({**maps.document(view, without_first), **more}, ensure_ascii=False) + "\n"
    )
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {out}: {error.strerror or error}. Choose another --out.") from error


def links(maps: Maps, view: str | int = "mean", query: int = -1, without_first: bool = False) -> Any:
    """A figure: all links, those of the query in orange; and the weights of the query by token (x) and layer (y)."""
    from matplotlib.collections import LineCollection

    layers = maps.view(view, without_first)
    columns, queries = len(maps.tokens), layers[0].shape[0]
    first = columns - queries  # queries are the last tokens
    chosen = range(queries)[query] if -queries <= query < queries else queries - 1
    figure, (left, right) = _figure(columns, len(layers))
    if view == "received":
        layers_of_query = layers
        left.remove()
    else:
        strongest = max(float(layer.max()) for layer in layers) or 1.0
        segments, colors = [], []
        for level, layer in enumerate(layers):
            for q, k in (layer > FAINT * strongest).nonzero().tolist():
                segments.append([(k, level), (first + q, level + 1)])
                color = CHOSEN if q == chosen else ALL
                colors.append((*_rgb(color), float(layer[q, k]) / strongest * (1.0 if q == chosen else 0.6)))
        left.add_collection(LineCollection(segments, colors=colors, linewidths=1.4))
        dots = np.array([(x, y) for y in range(len(layers) + 1) for x in range(columns)])
        left.scatter(dots[:, 0], dots[:, 1], s=6, color="0.35", zorder=3)
        left.set(xlim=(-0.7, columns - 0.3), ylim=(-0.3, len(layers) + 0.3), ylabel="after layer")
        left.set_title(f"{view if isinstance(view, str) else f'head {view}'}: links of all tokens", fontsize=9)
        layers_of_query = [layer[chosen][None] for layer in layers]
        left.set_yticks(_few(range(len(layers) + 1)))
        _label(left, maps.tokens)
    cells = torch.cat(layers_of_query).numpy()
    drawn = right.imshow(cells, origin="lower", aspect="auto", cmap="Blues", vmin=0)
    figure.colorbar(drawn, ax=right, fraction=0.04)
    what = "received on average" if view == "received" else f"where “{maps.tokens[first + chosen].strip()}” looks"
    right.set_title(what, fontsize=9)
    right.set(ylabel="layer", yticks=_few(range(len(layers))))
    _label(right, maps.tokens)
    figure.suptitle(maps.title, fontsize=10, parse_math=False)
    return figure


def picture(maps: Maps, view: str | int = "mean", without_first: bool = False) -> Any:
    """A figure: the image, and over it each layer's weights, of the class token or else those that patches receive."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    assert maps.image is not None
    heats = over_image(maps, view, without_first)
    count = len(heats) + 1
    columns = min(count, 7)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(1.9 * columns, 2.1 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    color = maps.image[-3:] if len(maps.image) % 3 == 0 else maps.image[-1:]
    shown = color.permute(1, 2, 0).squeeze(-1).numpy()
    for axes in panels:
        axes.axis("off")
    panels[0].imshow(shown, cmap="gray")
    panels[0].set_title("image", fontsize=9)
    for i, (axes, heat) in enumerate(zip(panels[1:], heats, strict=False)):
        axes.imshow(shown, cmap="gray")
        axes.imshow(
            heat.numpy(),
            cmap="inferno",
            alpha=0.65,
            vmin=0,
            extent=(-0.5, shown.shape[1] - 0.5, shown.shape[0] - 0.5, -0.5),
        )
        axes.set_title(f"layer {i}", fontsize=9)
    figure.suptitle(f"{maps.title}: {view if isinstance(view, str) else f'head {view}'}", fontsize=10, parse_math=False)
    return figure


def over_image(maps: Maps, view: str | int = "mean", without_first: bool = False) -> list[Tensor]:
    """The weights of each layer as `[rows, columns]` of patches: of the class token, or else what patches receive."""
    heats = []
    for layer, grid in zip(maps.view(view, without_first), maps.grids, strict=True):
        row = layer[0] if maps.skipped or len(layer) == 1 else reductions.received(layer)
        heats.append(row[maps.skipped :].view(grid))
    return heats


def _figure(columns: int, layers: int) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = min(30.0, max(5.0, 0.32 * columns + 1.5))
    height = 1.4 + layers * max(0.22, min(1.2, 5 / layers))  # inches
    figure = Figure(figsize=(2 * width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, 2)


def _label(axes: Any, tokens: Sequence[str]) -> None:
    axes.set_xticks(range(len(tokens)))
    axes.set_xticklabels(
        [repr(t)[1:-1].replace(" ", "·") or "∅" for t in tokens], rotation=60, ha="right", fontsize=8, parse_math=False
    )
    axes.spines[["top", "right"]].set_visible(False)


def _few(numbers: range) -> list[int]:
    """At most about ten of the numbers."""
    return list(numbers)[:: max(1, math.ceil(len(numbers) / 10))]


def _rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))

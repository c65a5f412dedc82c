"""Attention on the page: of a language model on a typed text, or of a run's network in its environment.

A request is stateless: what is read, the view, and the links that are removed. The last passes and the last model are
kept in memory. Weights are whole numbers: ten-thousandths, which are shorter than floats in JSON.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from foresight.errors import UserError, unknown
from foresight.runtime import catalog, run
from foresight.runtime.attention import draw, sources
from foresight.runtime.attention.maps import VIEWS, Maps
from foresight.studio import dreams
from foresight.studio.encode import whole
from foresight.studio.runs import Library

UNITS = 10_000
LONGEST = 160  # tokens of a text on the page: all links of all layers are sent
KEPT = 4  # passes in memory
MOST_CUTS = 64
STEPS = 20
OPTIONS = {
    "memory": ("gtrxl", "transformer"), "images": ("vit", "swin"), "sequence_model": ("transformer",),
    "denoiser": ("transformer",),
}  # fmt: skip


class Readers:
    """The transformers of a library's runs, and the language model `model`."""

    def __init__(self, library: Library, model: str) -> None:
        self._library, self._model = library, model
        self._lock = threading.Lock()
        self._policies: dict[str, Any] = {}
        self._maps: dict[tuple[Any, ...], Maps] = {}

    def names(self) -> list[dict[str, Any]]:
        """Id and name of everything that can be read, and whether it reads a text or acts in an environment."""
        found = [{"id": self._model, "name": Path(self._model).name, "text": True, "images": False}]
        for row in self._library.table():
            options, entry = row["options"], catalog.algorithms().get(row["algorithm"])
            attends = any(options.get(name) in OPTIONS[name] for name in OPTIONS) or bool(entry and entry.attends)
            text = row["kind"] == "text" and row["algorithm"] != "reward_model"
            if (attends or text) and self._library.saved(row["id"]):
                name = f"{row['name']}: {row['algorithm']} on {row['env']}"
                images = options.get("images") in OPTIONS["images"]
                found.append({"id": row["id"], "name": name, "text": text, "images": images})
        return found

    def read(self, document: dict[str, Any]) -> dict[str, Any]:
        """A pass: its tokens, the weights of every layer in `view`, and the likeliest outputs after each token.

        `source`, and `text` or `steps`, `seed` and `images`; `view` and `without_first` as `Maps.view`.
        """
        view, without_first = str(document.get("view", "mean")), bool(document.get("without_first", False))
        with self._lock:
            maps = self._read(document)
            found: dict[str, Any] = {
                "title": maps.title,
                "tokens": list(maps.tokens),
                "queries": maps.weights[0].shape[-2],
                "heads": [len(layer) for layer in maps.weights],
                "views": [name for name in VIEWS if name != "rollout" or _rolls(maps)],
                "view": view,
                "units": UNITS,
                "unit": "nats" if maps.probabilities else "of its norm",
                "outputs": [maps.likeliest(row) for row in maps.output] if maps.probabilities else [],
            }
            if maps.image is None:
                layers = maps.view(view, without_first)
                return {**found, "layers": [_units(layer) for layer in layers]}
            heats = draw.over_image(maps, view, without_first)
            image = maps.image[-3:] if len(maps.image) % 3 == 0 else maps.image[-1:]
            return {
                **found,
                "image": dreams.png(image),
                "heats": [{"columns": heat.shape[1], "cells": _units(heat)} for heat in heats],
            }

    def change(self, document: dict[str, Any]) -> dict[str, Any]:
        """How the output of `query` changes without the links in `cuts`, as `Maps.effect`."""
        cuts, query = document.get("cuts", []), whole(document, "query", -1)
        if not isinstance(cuts, list) or len(cuts) > MOST_CUTS or not all(isinstance(cut, str) for cut in cuts):
            raise UserError(f"cuts must be a list of at most {MOST_CUTS} texts, such as 3.0 or 3.0:-1,4.")
        with self._lock:
            maps = self._read(document)
            return maps.effect([maps.knock_out(cut) for cut in cuts], _within(maps, query))

    def heads(self, document: dict[str, Any]) -> list[float]:
        """How the output of `query` changes without each head of `layer`: one pass for each."""
        layer, query = whole(document, "layer", 0), whole(document, "query", -1)
        with self._lock:
            maps = self._read(document)
            if not 0 <= layer < len(maps.weights):
                raise UserError(f"There is no layer {layer}: count from 0 to {len(maps.weights) - 1}.")
            row = _within(maps, query)
            cuts = [maps.knock_out(f"{layer}.{head}") for head in range(len(maps.weights[layer]))]
            return [float(maps.effect([cut], row)["change"]) for cut in cuts]

    def _read(self, document: dict[str, Any]) -> Maps:
        source, text = document.get("source", self._model), document.get("text", "")
        steps, seed = whole(document, "steps", STEPS, 1, LONGEST), whole(document, "seed", 0, 0)
        images = bool(document.get("images", False))
        if not isinstance(source, str) or not isinstance(text, str):
            raise UserError("Give source (an id) and text.")
        known = {one["id"]: one for one in self.names()}
        if source not in known:
            raise unknown("source", source[:80], known)
        key = (source, text) if known[source]["text"] else (source, steps, seed, images)
        if source != self._model:
            key = (*key, self._library.saved(source))  # a run that trains has a new checkpoint now and then
        if key not in self._maps:
            found = self._of_text(source, text) if known[source]["text"] else self._of_run(source, steps, seed, images)
            self._maps = {**dict(list(self._maps.items())[1 - KEPT :]), key: found}
        return self._maps[key]

    def _of_text(self, source: str, text: str) -> Maps:
        from foresight.nets.language import pretrained
        from foresight.nets.language.model import LanguageModel
        from foresight.nets.language.tokenizer import ids_of

        stamp = "" if source == self._model else self._library.saved(source)
        if self._policies.get("of") != (source, stamp):
            self._policies = {}  # a model may be large: one at a time
            policy: Any = None
            if source == self._model:
                policy = pretrained.load(source, precision="float32", eager=True)
            else:
                agent = run.load(self._library.path(source))
                policy = getattr(agent.state, "policy", None)
                agent.close()
                if not isinstance(policy, LanguageModel):
                    raise UserError("The model of this run completes no text: choose another run.")
            self._policies = {"of": (source, stamp), "policy": policy}
        policy = self._policies["policy"]
        if len(ids_of(policy.tokenizer, text)) > LONGEST:
            raise UserError(f"The text has more than {LONGEST} tokens. For a longer one: foresight attention --text")
        return sources.of_text(policy, text)

    def _of_run(self, source: str, steps: int, seed: int, images: bool) -> Maps:
        agent = run.load(self._library.path(source))
        try:
            found = sources.of_run(agent, steps, seed, images)
        finally:
            agent.close()
        return found


def _units(weights: Tensor) -> list[int]:
    found: list[int] = (weights * UNITS).round().int().flatten().tolist()
    return found


def _rolls(maps: Maps) -> bool:
    count = len(maps.tokens)
    return all(layer.shape[-2:] == (count, count) for layer in maps.weights)


def _within(maps: Maps, query: int) -> int:
    """The row of the output for a query; a network with one output has only the last."""
    rows = len(maps.output)
    if rows == 1:
        return 0
    if not -rows <= query < rows:
        raise UserError(f"There is no token {query}: count from 0 to {rows - 1}, or -1 for the last.")
    return query

"""`Maps`: the attention of one pass of a network, reductions of it, and the effect of links on the output."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from foresight.errors import UserError
from foresight.nets.sequence.attention import KnockOut
from foresight.runtime.attention import reductions

VIEWS = ("mean", "max", "rollout", "received")
CUT = re.compile(r"(\d+)(?:\.(\d+))?(?::(-?\d+)?(?:,(-?\d+))?)?")
Pass = Callable[[Sequence[KnockOut]], tuple[list[Tensor], Tensor]]


@dataclasses.dataclass(frozen=True)
class Maps:
    """The attention of one pass over S tokens, of which the last T are queries (usually all: T = S).

    - `weights`: of each layer, `[heads, T, S]`; rows sum to 1, with attention sinks to less;
    - `output` `[T, ...]`: logits where `probabilities`, otherwise features;
    - `names`: of the outputs with the index that they have, such as words or actions;
    - `targets` `[T]`: the right output of each query, -1 where there is none; or None;
    - `image` `[C, H, W]` bytes and `grids`, the (rows, columns) of patches at each layer: of a vision transformer.
      `skipped` tokens, a class token, are before the patches;
    - `again`: the weights and the output of the same pass without some links.
    """

    title: str
    tokens: tuple[str, ...]
    weights: tuple[Tensor, ...]
    output: Tensor
    again: Pass = dataclasses.field(repr=False)
    probabilities: bool = False
    names: Callable[[int], str] = str
    targets: Tensor | None = None
    image: Tensor | None = None
    grids: tuple[tuple[int, int], ...] = ()
    skipped: int = 0

    @property
    def heads(self) -> int:
        """Heads of the first layer."""
        return len(self.weights[0])

    def view(self, name: str | int = "mean", without_first: bool = False) -> list[Tensor]:
        """The weights `[T, S]` of each layer: "mean" or "max" of the heads, one head, or "rollout" (of the mean).

        "received" is what each key gets on average, `[1, S]`. `without_first` leaves out the first token. Raises
        UserError for another name, a head that does not exist, and a rollout where queries are not the keys.
        """
        name = int(name) if isinstance(name, str) and name.isdecimal() else name
        if isinstance(name, int):
            fewest = min(len(layer) for layer in self.weights)
            if not 0 <= name < fewest:
                raise UserError(f"There is no head {name} in every layer. Choose one from 0 to {fewest - 1}.")
            found = [layer[name] for layer in self.weights]
        elif name == "max":
            found = [layer.amax(0) for layer in self.weights]
        elif name in VIEWS:
            found = [layer.mean(0) for layer in self.weights]
        else:
            raise UserError(f"Unknown view '{name}'. Choose one of {', '.join(VIEWS)}, or the number of a head.")
        if name == "rollout":
            if any(layer.shape != (len(self.tokens), len(self.tokens)) for layer in found):
                raise UserError("A rollout needs layers over the same tokens. Choose the view mean, max or received.")
            found = reductions.rollout(found)
        if without_first:
            found = [reductions.without_first(layer) for layer in found]
        return [reductions.received(layer)[None] for layer in found] if name == "received" else found

    def knock_out(self, text: str) -> KnockOut:
        """`LAYER`, `LAYER.HEAD`, and with `:QUERY`, `:,KEY` or `:QUERY,KEY` only these links; all count from 0.

        Negative tokens count from the end. Raises UserError for another form, and for what does not exist.
        """
        found = CUT.fullmatch(text)
        if found is None:
            raise UserError(
                f"Cannot read the knock-out '{text}'. Write LAYER.HEAD, or LAYER.HEAD:QUERY,KEY for one link, "
                "such as 3.0:-1,4; without .HEAD it is all heads of the layer."
            )
        layer, head, query, key = (None if part is None else int(part) for part in found.groups())
        assert layer is not None
        if layer >= len(self.weights):
            raise UserError(f"There is no layer {layer} to knock out: count from 0 to {len(self.weights) - 1}.")
        heads, queries, keys = self.weights[layer].shape
        query, key = (i if i is None or i >= 0 else n + i for i, n in ((query, queries), (key, keys)))
        for what, index, count in (("head", head, heads), ("query", query, queries), ("key", key, keys)):
            if index is not None and not 0 <= index < count:
                raise UserError(f"Layer {layer} has no {what} {index} to knock out: count from 0 to {count - 1}.")
        return KnockOut(layer, head, query, key)

    def row(self, output: Tensor, query: int = -1) -> Tensor:
        """The row of a query in an output `[T, ...]`; the only row where there is one for all, as of an image.

        Raises UserError for a query that does not exist.
        """
        queries = self.weights[0].shape[-2]
        if not -queries <= query < queries:
            raise UserError(
                f"There is no query {query}: choose one from 0 to {queries - 1}, or, from the end, -1 to -{queries}."
            )
        return output[query] if len(output) > 1 else output[0]

    def effect(self, knock_outs: Sequence[KnockOut], query: int = -1) -> dict[str, Any]:
        """What removing links changes in the output of a query.

        `change`: KL divergence in nats of the probabilities, or the relative change of the features, |Δ| / |output|;
        `before`, `after`: the likeliest outputs; `loss_before`, `loss_after`: the mean nats of the targets, if any.
        Raises UserError as `row`.
        """
        before, output = self.row(self.output, query), self.again(knock_outs)[1]
        after = self.row(output, query)
        found: dict[str, Any] = {"change": self._change(after, before)}
        if self.probabilities:
            found |= {"before": self.likeliest(before), "after": self.likeliest(after)}
        if self.targets is not None and (self.targets >= 0).any():
            found |= {"loss_before": self._loss(self.output), "loss_after": self._loss(output)}
        return found

    def each_head(self, query: int = -1) -> list[list[float]]:
        """`change` without each head of each layer: one pass for each. Raises UserError as `row`."""
        before = self.row(self.output, query)
        return [
            [self._change(self.row(self.again([KnockOut(i, head)])[1], query), before) for head in range(len(layer))]
            for i, layer in enumerate(self.weights)
        ]

    def likeliest(self, output: Tensor, count: int = 5) -> list[tuple[str, float]]:
        """The `count` likeliest outputs of logits `[N]` and their probabilities."""
        best = output.float().softmax(-1).topk(min(count, output.shape[-1]))
        return [(self.names(i), p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def document(self, view: str | int = "mean", without_first: bool = False) -> dict[str, Any]:
        """Everything as JSON: the view and the weights of all heads."""
        rounded = [[[round(x, 5) for x in row] for row in layer.tolist()] for layer in self.view(view, without_first)]
        return {
            "title": self.title,
            "tokens": list(self.tokens),
            "queries": self.weights[0].shape[-2],
            "view": view,
            "layers": rounded,
            "heads": [[[[round(x, 5) for x in row] for row in head] for head in one.tolist()] for one in self.weights],
            **({"output": self.likeliest(self.output[-1])} if self.probabilities else {}),
            **({"grids": [list(grid) for grid in self.grids]} if self.grids else {}),
        }

    def _change(self, output: Tensor, before: Tensor) -> float:
        output, before = output.float(), before.float()
        if self.probabilities:
            old, new = before.log_softmax(-1), output.log_softmax(-1)
            return max(0.0, float((old.exp() * (old - new)).sum()))
        return float((output - before).norm() / before.norm().clamp(min=1e-12))

    def _loss(self, output: Tensor) -> float:
        assert self.targets is not None
        rows = self.targets >= 0
        logps = output[rows].float().log_softmax(-1)
        found = -logps.gather(-1, self.targets[rows].unsqueeze(-1)).mean().item()
        return found if math.isfinite(found) else math.inf

"""`Replay`: a ring of experience, sampled uniformly as rows or as sequences, and saved with the checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from foresight.data.trajectory import Trajectory, Tree, tree_map
from foresight.errors import UserError

_FIELDS = tuple(f.name for f in dataclasses.fields(Trajectory))


class Replay:
    """The last `capacity` rows of each of B streams, in memory that is allocated once, at the first `add`.

    A stream is one world of a batch: its rows follow each other in time, so a sample of length T is a piece
    of that world's life. Episodes may end inside a piece: `cut` says where. Dtypes stay as they came: uint8
    frames stay uint8.

    `rows` `[B, capacity, ...]` are the rows as a Trajectory, None before the first `add`.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: rows kept per stream. Raises UserError if it is below 1."""
        if capacity < 1:
            raise UserError(f"A replay needs room for at least 1 row per world, not {capacity}.")
        self.capacity = capacity
        self.rows: Trajectory | None = None
        self._write = 0  # where the next row goes
        self._size = 0  # rows per stream

    def __len__(self) -> int:
        """How many rows are held, over all streams."""
        return 0 if self.rows is None else self._size * self.rows.shape[0]

    def add(self, rows: Trajectory | dict[str, Any]) -> None:
        """Append rows: a Trajectory `[B, T]`, or a dict of its fields `[B, ...]` for one step.

        Every `add` gives the same fields and shapes. Raises UserError if it does not.
        """
        if isinstance(rows, dict):
            steps = 1
            unknown = set(rows) - set(_FIELDS)
            if unknown:
                raise UserError(f"Replay rows have unknown fields {sorted(unknown)}; valid: {', '.join(_FIELDS)}.")
            fields = {key: tree_map(lambda x: x.unsqueeze(1), value) for key, value in rows.items()}
        else:
            steps = rows.shape[1]
            fields = {key: getattr(rows, key) for key in _FIELDS}
        if self.rows is None:
            self.rows = Trajectory(**tree_map(self._room, fields))
        kept = min(steps, self.capacity)  # of a longer piece only the end survives
        skipped = steps - kept
        first = min(kept, self.capacity - self._write)
        pieces = [(self._write, skipped, first)]
        if kept > first:
            pieces.append((0, skipped + first, kept - first))
        for key in _FIELDS:
            _write(key, getattr(self.rows, key), fields.get(key), pieces)
        self._write = (self._write + kept) % self.capacity
        self._size = min(self._size + kept, self.capacity)

    def sample(self, n: int, length: int = 1, generator: torch.Generator | None = None) -> Trajectory:
        """`n` pieces of `length` rows, uniform over all that are held, with replacement: `[n, length]`.

        A piece never joins the newest row to the oldest. `extras["key"]` `[n, length]` int64 names each row (for
        priorities). Raises UserError if fewer than `length` rows per world are held.
        """
        if self.rows is None or self._size < length:
            raise UserError(f"Cannot sample pieces of {length} rows: {self._size} rows per world are held so far.")
        streams = self.rows.shape[0]
        choices = self._size - length + 1
        pick = torch.randint(streams * choices, (n,), generator=generator)
        stream, start = pick // choices, pick % choices
        oldest = self._write if self._size == self.capacity else 0
        column = (oldest + start.unsqueeze(1) + torch.arange(length)) % self.capacity  # [n, length]
        key = stream.unsqueeze(1) * self.capacity + column
        flat = key.flatten()
        batch = self.rows.map(lambda x: x.flatten(0, 1).index_select(0, flat).unflatten(0, (n, length)))
        return batch.replace(extras={**batch.extras, "key": key})

    def state_dict(self) -> dict[str, Any]:
        """The rows that are held (views, so that saving does not double memory) and where the next one goes."""
        held = None
        if self.rows is not None:
            held = {key: tree_map(lambda x: x[:, : self._size], getattr(self.rows, key)) for key in _FIELDS}
            held = {key: value for key, value in held.items() if value is not None}
        return {"capacity": self.capacity, "write": self._write, "size": self._size, "rows": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold exactly what `state_dict` held. Raises UserError if the capacity differs."""
        if state["capacity"] != self.capacity:
            raise UserError(
                f"The checkpoint's replay keeps {state['capacity']} rows per world, this one {self.capacity}: "
                "resume with the same capacity."
            )
        self._write, self._size, self.rows = state["write"], state["size"], None
        if state["rows"] is not None:
            self.rows = Trajectory(**tree_map(self._room, state["rows"]))
            for key in _FIELDS:
                _write(key, getattr(self.rows, key), state["rows"].get(key), [(0, 0, self._size)])

    def _room(self, like: Tensor) -> Tensor:
        """Memory `[B, capacity, ...]` for what looks like `like` `[B, T, ...]`."""
        return torch.zeros(like.shape[0], self.capacity, *like.shape[2:], dtype=like.dtype, device=like.device)


def _write(name: str, target: Tree, source: Tree, pieces: list[tuple[int, int, int]]) -> None:
    """Copy `(to, from, rows)` pieces along the time dim."""
    if isinstance(target, dict) and (target or source):
        if not isinstance(source, dict) or set(source) != set(target):
            raise UserError(f"Replay rows changed: '{name}' had the parts {sorted(target)} at the first add.")
        for key in target:
            _write(f"{name}.{key}", target[key], source[key], pieces)
        return
    if target is None or isinstance(target, dict):
        if source is not None and not isinstance(source, dict):
            raise UserError(f"Replay rows changed: '{name}' was not there at the first add.")
        return
    if source is None or source.shape[0] != target.shape[0] or source.shape[2:] != target.shape[2:]:
        found = "nothing" if source is None else tuple(source.shape)
        raise UserError(f"Replay rows changed: '{name}' was {tuple(target.shape)} at the first add, now {found}.")
    for to, start, count in pieces:
        target[:, to : to + count] = source[:, start : start + count]

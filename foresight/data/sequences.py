"""`Sequences`: a replay of whole sequences in which every episode of T actions has T + 1 rows.

The last row of an episode holds the final observation and no action: `mask` 0 and `cut` 1. So a world model sees what
every action led to, also where the environment was reset in the same step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foresight.data import trees
from foresight.data.replay import Replay
from foresight.data.trajectory import Trajectory, Tree, tree_map
from foresight.errors import UserError

CHUNK = 16_384  # rows of a chunk at most: they are read into memory together


class Arrival(NamedTuple):
    """What led to each row of sequences `[B, T]`: the reward and the discount of the step before.

    `known` is 0 at the first row of an episode and of a sequence; reward and discount are 0 there.
    """

    reward: Tensor
    discount: Tensor
    known: Tensor


def arrivals(batch: Trajectory) -> Arrival:
    """What led to each row of `batch` `[B, T]`."""
    reward, discount, known = (pad(x[:, :-1], (1, 0)) for x in (batch.reward, batch.discount, 1 - batch.cut))
    return Arrival(reward * known, discount * known, known)


@dataclasses.dataclass
class Chunk:
    """The rows from `first` to before `last` of a stream, counted since the beginning. They never change again.

    `rows()` are their fields `[1, T, ...]` by name, of the newest T of these rows if the others are lost. `file` has
    the sha256 and the size of the file that holds all of them; it is empty as long as there is none.
    """

    stream: int
    first: int
    last: int
    file: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: Callable[[], dict[str, Tensor]] = dict


class Sequences:
    """The last `capacity` rows of `streams` environments together. Episodes of one environment follow each other.

    With `on_disk`, a checkpoint writes only the rows since the last one, as `chunks`, and the `extras`, which may have
    been refreshed. The rows are in files too, if a run asks for it with `use`; the samples are the same. With a
    `device` they are there.
    """

    def __init__(
        self, capacity: int, streams: int, on_disk: bool = False, device: str | torch.device | None = None
    ) -> None:
        """Raises UserError if there is not one row for each stream, and for rows on disk and on a device at once."""
        if on_disk and device is not None:
            raise UserError("The replay is on disk, so it cannot be on the device, too: add --no-replay-on-disk.")
        self.streams = [Replay(capacity // streams, device) for _ in range(streams)]
        self.on_disk = on_disk
        self.chunks: list[Chunk] = []

    def use(self, room: Callable[..., Tensor]) -> None:
        """Allocate memory by `room` from now on, see `Replay`."""
        for stream in self.streams:
            stream.room = room

    def __len__(self) -> int:
        """The number of rows stored, over all streams."""
        return sum(map(len, self.streams))

    def add(self, rows: dict[str, Tree], final_obs: Tree) -> None:
        """Append one step of every stream: fields of a Trajectory `[B, ...]`, and the true successors `[B, ...]`.

        A step with `mask` 0 (an autoreset step) is left out: its observation is the final one of the step before.
        """
        cut, mask = rows["cut"].tolist(), rows["mask"].tolist()
        leaves = dict(leaf for name, value in rows.items() for leaf in trees.leaves(value, name))
        fields = {name: x.numpy() for name, x in leaves.items() if x.is_cpu and x.dtype != torch.bfloat16}
        for i, stream in enumerate(self.streams):
            if not mask[i] or (not cut[i] and len(fields) == len(leaves) and stream.put(fields, i)):
                continue
            row = tree_map(_one(i), rows)
            if cut[i]:
                row = {**row, "cut": torch.zeros(1)}
            stream.add(row)
            if cut[i]:
                empty = {name: tree_map(torch.zeros_like, value) for name, value in row.items()}
                last = tree_map(_one(i), final_obs)
                stream.add({**empty, "obs": last, "cut": torch.ones(1), "mask": torch.zeros(1)})

    def interrupt(self) -> None:
        """The environments were reset without a step: the newest row of every stream ends its episode."""
        for stream in self.streams:
            stream.interrupt()

    @staticmethod
    def require_room(size: int, num_envs: int, length: int) -> None:
        """Raise UserError if sequences of `length` rows do not fit into the stream of each environment."""
        if size < num_envs * length:
            raise UserError(
                f"replay_size {size} is too small: num_envs {num_envs} streams of sequences of {length} rows do not "
                "fit."
            )

    def ready(self, length: int) -> bool:
        """Whether sequences of `length` rows can be sampled."""
        return any(len(stream) >= length for stream in self.streams)

    def sample(self, n: int, length: int, generator: torch.Generator) -> Trajectory:
        """`n` sequences of `length` rows `[n, length]`, uniform over all that are stored; episodes may end inside.

        `extras["key"]` `[n, length]` are for `refresh`. Raises UserError if none is long enough.
        """
        choices = torch.tensor([max(0, len(stream) - length + 1) for stream in self.streams], dtype=torch.float64)
        if not choices.any():
            raise UserError(f"Cannot sample sequences of {length} rows: {len(self)} are stored so far.")
        counts = torch.multinomial(choices, n, replacement=True, generator=generator).bincount(minlength=len(choices))
        held = [(self.streams[i], count) for i, count in enumerate(counts.tolist()) if count]
        starts = torch.cat([stream.starts(count, length, generator) for stream, count in held])
        capacity = self.streams[0].capacity
        column = (starts.unsqueeze(1) + torch.arange(length)) % capacity
        storages: list[Any] = [stream.storage for stream, _ in held]
        columns = column.flatten().to(storages[0].reward.device).split([count * length for _, count in held])

        def gather(fields: Sequence[Tensor]) -> Tensor:
            found = [x.index_select(1, at) for x, at in zip(fields, columns, strict=True)]
            joined = found[0] if len(found) == 1 else torch.cat(found, 1)
            return joined.view(n, length, *fields[0].shape[2:])

        batch: Trajectory = trees.merge(gather, storages)  # one field of all streams at a time: few calls
        key = column + (torch.repeat_interleave(counts) * capacity).unsqueeze(1)
        return batch.replace(extras={**batch.extras, "key": key})

    def episodes(self) -> tuple[Tree, int]:
        """The first observations `[N, ...]` of all episodes that are stored whole, and the most actions of one.

        Raises UserError if there is none.
        """
        found, longest = [], 0
        for stream in self.streams:
            if stream.storage is None:
                continue
            columns = stream.columns()
            ends = stream.storage.cut[0, columns].nonzero().squeeze(-1).cpu()
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1] + 1]) if len(ends) else ends
            whole = slice(int(len(stream) == stream.capacity), None)  # the first one may have lost its beginning
            if len(starts[whole]):
                longest = max(longest, int((ends - starts)[whole].max()))
                rows = columns[starts[whole]]
                found.append(trees.pick(tree_map(lambda x: x[0], stream.storage.obs), rows))
        if not found:
            raise UserError(
                f"The replay of {len(self)} rows holds no whole episode. Train longer, or, if episodes never end, "
                "with a time limit: --env-options time_limit=1000"
            )
        return trees.concat(found), longest

    def refresh(self, key: Tensor, extras: dict[str, Tensor]) -> None:
        """Overwrite `extras` `[N, ...]` of the rows `key` `[N]`."""
        capacity = self.streams[0].capacity
        of, column = key // capacity, key % capacity
        order = of.argsort(stable=True)  # of a row given twice, the later values stay
        column, counts = column[order], of.bincount()
        held = [(self.streams[i].storage, i) for i in counts.nonzero().squeeze(-1).tolist()]
        sizes = [int(counts[i]) for _, i in held]
        for name, values in extras.items():
            parts = zip(held, column.split(sizes), values[order.to(values.device)].split(sizes), strict=True)
            for (storage, _), at, new in parts:
                if storage is not None:
                    into = storage.extras[name]
                    into[0, at.to(into.device)] = new.to(into.device)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs."""
        states = [stream.state_dict() for stream in self.streams]
        if not self.on_disk:
            return {"streams": states}
        self.chunks = [chunk for i in range(len(states)) for chunk in self._log(i)]
        return {"streams": list(map(_without_chunks, states)), "chunks": self.chunks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` exactly. Raises UserError if the capacity or the number of streams differs."""
        if len(state["streams"]) != len(self.streams):
            raise UserError(
                f"The checkpoint's replay is of num_envs {len(state['streams'])}, this one of {len(self.streams)}: "
                "resume with the same num_envs."
            )
        for stream, saved in zip(self.streams, state["streams"], strict=True):
            stream.load_state_dict(saved)
            if stream.storage is not None and "extras" in saved:
                for name, values in saved["extras"].items():
                    stream.storage.extras[name][:, : values.shape[1]] = values
        self.chunks = state.get("chunks", [])
        for chunk in self.chunks:
            stream, rows = self.streams[chunk.stream], chunk.rows()
            first = max(chunk.first, stream.added - len(stream))
            for name, into in _constant(stream):
                into[:, _columns(stream, first, chunk.last)] = rows[name][:, first - chunk.last :]

    def _log(self, i: int) -> list[Chunk]:
        """The chunks of all rows of stream `i` but the newest, which `interrupt` may still change."""
        stream = self.streams[i]
        oldest = stream.added - len(stream)
        found = [chunk for chunk in self.chunks if chunk.stream == i and chunk.file and chunk.last > oldest]
        first, end = max([oldest, *(chunk.last for chunk in found)]), stream.added - 1
        while first < end:
            wrap = (first // stream.capacity + 1) * stream.capacity  # a chunk is in one piece in the ring
            last = min(end, wrap, first + CHUNK)
            found.append(Chunk(i, first, last))
            first = last
        for chunk in found:
            columns = _columns(stream, max(chunk.first, oldest), chunk.last)
            chunk.rows = functools.partial(_rows, stream, columns)
        return found


def _columns(stream: Replay, first: int, last: int) -> slice:
    """Where the ring holds the rows from `first` to before `last`, which are in one piece there."""
    return slice(first % stream.capacity, (last - 1) % stream.capacity + 1)


def _rows(stream: Replay, columns: slice) -> dict[str, Tensor]:
    return {name: x[:, columns] for name, x in _constant(stream)}


def _constant(stream: Replay) -> Iterator[tuple[str, Tensor]]:
    """The fields of `storage` that are never refreshed, by name: all but the extras."""
    for field in dataclasses.fields(Trajectory):
        if field.name != "extras":
            yield from trees.leaves(getattr(stream.storage, field.name), field.name)


def _without_chunks(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a stream without what its chunks hold: of all rows the extras, otherwise the newest row."""
    rows = state["rows"]
    if rows is None:
        return state
    at = (state["write"] - 1) % state["capacity"]
    return {**state, "rows": tree_map(lambda x: x[:, at : at + 1], rows), "at": at, "extras": rows["extras"]}


def _one(i: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[i : i + 1]

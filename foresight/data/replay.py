"""`Replay`: a ring buffer of experience, sampled as sequences or transitions, and saved with the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from foresight.data import trees
from foresight.data.trajectory import Trajectory, Tree, tree_map
from foresight.errors import UserError
from foresight.ops import returns

_FIELDS = tuple(f.name for f in dataclasses.fields(Trajectory))


@dataclasses.dataclass(frozen=True)
class Transitions:
    """N transitions of one or more steps each, for Q-learning. Scalars are `[N]`, features follow.

    - `obs`, `action`: of the first step; `next_obs`: the true successor of the last one;
    - `reward`: discounted sum over the steps; `discount`: the continuation after the last one, with a γ for each step:
      the n-step target is reward + discount · value(next_obs);
    - `key`: the index of the first step in the replay, for priorities;
    - `weight`: importance weight (None: all 1);
    - `passed`, `passed_weight`: if requested, the observations `[N, n - 1, ...]` of the steps between `obs` and
      `next_obs`, and their weights `[N, n - 1]` in the return (`returns.n_step_weights`: 0 where the transition is
      shorter).
    """

    obs: Tree
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_obs: Tree
    key: Tensor
    weight: Tensor | None = None
    passed: Tree = None
    passed_weight: Tensor | None = None

    def to(self, device: str | torch.device) -> Transitions:
        """The same on `device`; the same object if it is there already."""
        if self.reward.device == torch.device(device):
            return self
        return Transitions(*[tree_map(lambda x: x.to(device), getattr(self, name)) for name in _PARTS])


_PARTS = tuple(f.name for f in dataclasses.fields(Transitions))


class Replay:
    """The last `capacity` steps of each of B streams, in memory that is allocated once, at the first `add`.

    A stream is one environment of a batch: its steps are consecutive in time, and so are those of a sampled sequence.
    Episodes may end inside a sequence: `cut` marks where. Dtypes are kept: uint8 frames stay uint8.

    Observations are stored once: the successor of a step is the next step, but where a time limit cut, it is the
    `final_obs` given to `add`. A step with `mask` 0 only holds an observation, the successor of the step before: no
    transition starts at it.

    `rows` `[B, capacity, ...]` are the steps as a Trajectory, None before the first `add`. `room` is called with the
    shape and dtype of each of its tensors and returns the memory for it, all zeros. `added` counts the steps of each
    stream since the beginning.
    """

    def __init__(self, capacity: int, device: str | torch.device | None = None) -> None:
        """`capacity`: steps kept per stream; `device`: where (None: where the first ones are).

        Raises UserError if the capacity is below 1.
        """
        if capacity < 1:
            raise UserError(f"The replay's capacity must be at least 1 step per environment, not {capacity}.")
        self.capacity, self.device = capacity, device
        self.storage: Trajectory | None = None
        self.room: Callable[..., Tensor] = torch.zeros
        self.added = 0
        self._write = 0  # where the next step goes
        self._size = 0  # steps per stream
        self._flat: Trajectory | None = None  # views [B * capacity, ...] of `rows`
        self._columns: dict[str, tuple[NDArray[Any], torch.Size]] | None = None  # tensors as arrays, if all can be
        self._final: dict[int, Tree] = {}  # by key, the successors that no step holds
        self._unreal = False  # whether a step with mask 0 was ever added

    def __len__(self) -> int:
        """The number of steps stored, over all streams."""
        return 0 if self.storage is None else self._size * self.storage.shape[0]

    @property
    def newest(self) -> Tensor:
        """Keys `[B]` of the newest steps; undefined before the first `add`."""
        return torch.arange(self._streams()) * self.capacity + (self._write - 1) % self.capacity

    def columns(self) -> Tensor:
        """The columns of `storage` from the oldest to the newest step."""
        oldest = self._write if self._size == self.capacity else 0
        return (oldest + torch.arange(self._size)) % self.capacity

    def add(self, rows: Trajectory | dict[str, Tree], final_obs: Tree = None) -> None:
        """Append steps: a Trajectory `[B, T]`, or a dict of its fields `[B, ...]` for one step.

        `final_obs` `[B, ...]` are the true successors of one step; those at a time limit are stored.
        Raises UserError unless every `add` has the same fields and shapes.
        """
        if isinstance(rows, dict):
            if self._quick(rows):
                self._after(1, rows.get("mask"), final_obs)
                return
            steps = 1
            unknown = set(rows) - set(_FIELDS)
            if unknown:
                raise UserError(f"Replay rows have unknown fields {sorted(unknown)}; valid: {', '.join(_FIELDS)}.")
            fields = {key: tree_map(lambda x: x.unsqueeze(1), value) for key, value in rows.items()}
        else:
            steps = rows.shape[1]
            fields = {key: getattr(rows, key) for key in _FIELDS}
        if self.storage is None:
            self._allocate(fields)
        kept = min(steps, self.capacity)  # of a longer sequence only the end is kept
        skipped = steps - kept
        first = min(kept, self.capacity - self._write)
        segments = [(self._write, skipped, first)]
        if kept > first:
            segments.append((0, skipped + first, kept - first))
        for key in _FIELDS:
            _write(key, getattr(self.storage, key), fields.get(key), segments)
        self._after(kept, fields.get("mask"), final_obs)

    def put(self, fields: dict[str, NDArray[Any]], row: int) -> bool:
        """Append the step in this `row` of `fields` `[B, ...]`, named as `trees.leaves` does, to one stream.

        For loops over streams: a step inside an episode, with mask 1. Does nothing and returns False if its fields or
        shapes are not those of the steps before, or these are not in numpy's memory.
        """
        columns = self._columns
        if columns is None or len(fields) != len(columns):
            return False
        for name, x in fields.items():
            if name not in columns or columns[name][0].shape[2:] != x.shape[1:]:
                return False
        for name, x in fields.items():
            columns[name][0][0, self._write] = x[row]
        self._after(1, None, None)
        return True

    def interrupt(self) -> None:
        """The environments were reset without a step: the successors of the newest steps are unknown.

        The newest steps get `mask` 0, but those that ended their episode: nothing is missing of them. Raises ValueError
        if the steps have no mask.
        """
        if self.storage is None:
            return
        if self.storage.mask is None:
            raise ValueError("Only a replay with a mask can be interrupted.")
        at, newest = (self._write - 1) % self.capacity, self.newest.tolist()
        cut, discount = self.storage.cut[:, at].tolist(), self.storage.discount[:, at].tolist()
        for i, key in enumerate(newest):
            if cut[i] and (discount[i] == 0 or key in self._final):
                continue
            self.storage.mask[i, at], self.storage.discount[i, at], self.storage.cut[i, at] = 0, 0, 1
            self._unreal = True

    def sample(self, n: int, length: int = 1, generator: torch.Generator | None = None) -> Trajectory:
        """`n` sequences of `length` steps, uniform over all that are stored, with replacement: `[n, length]`.

        A sequence never joins the newest step to the oldest. `extras["key"]` `[n, length]` int64 are the steps' keys.
        Raises UserError if fewer than `length` steps per environment are stored.
        """
        return self.sequences(self.starts(n, length, generator), length)

    def starts(self, n: int, length: int, generator: torch.Generator | None = None) -> Tensor:
        """Keys `[n]` of the first steps of the sequences that `sample` draws; raises as it does."""
        if self.storage is None or self._size < length:
            raise UserError(
                f"Cannot sample sequences of {length} steps: {self._size} per environment are stored so far."
            )
        return self._draw(n, self._size - length + 1, generator)

    def sequences(self, key: Tensor, length: int) -> Trajectory:
        """The sequences of `length` steps that start at the steps `key` `[n]`, as `sample` returns them.

        A key is at least `length` - 1 steps older than the newest one.
        """
        flat, ahead = self._flat, self._ahead(key.unsqueeze(1), torch.arange(length))
        assert flat is not None
        rows, shape = ahead.flatten().to(flat.reward.device), (len(key), length)
        batch = flat.map(lambda x: x.index_select(0, rows).unflatten(0, shape))
        return batch.replace(extras={**batch.extras, "key": ahead})

    def transitions(
        self,
        n: int,
        gamma: float,
        n_steps: int = 1,
        generator: torch.Generator | None = None,
        passed: bool = False,
    ) -> Transitions:
        """`n` transitions of `n_steps` steps, uniform over the possible first steps, with replacement: see `gather`.

        Raises UserError if fewer than `n_steps` + 1 steps per environment are stored.
        """
        choices = self._size - n_steps  # the successor of a step is stored one step later
        if self.storage is None or choices < 1:
            raise UserError(
                f"Cannot sample transitions of {n_steps} steps: {self._size} per environment are stored so far."
            )
        key = self._draw(n, choices, generator)
        if self._unreal:
            assert self.storage.mask is not None
            mask = self.storage.mask.flatten()
            while len(wrong := (mask[key] == 0).nonzero().squeeze(-1)):
                key[wrong] = self._draw(len(wrong), choices, generator)
        return self.gather(key, gamma, n_steps, passed)

    def gather(self, key: Tensor, gamma: float, n_steps: int = 1, passed: bool = False) -> Transitions:
        """The transitions that start at the steps `key` `[N]`, of `n_steps` steps or until the episode ends.

        No transition crosses a cut: its reward and `next_obs` are of one episode. The steps that follow must be stored
        already: a key is at least `n_steps` steps older than the newest one. With `passed` the steps between are
        included, unless `n_steps` is 1.
        """
        flat, capacity = self._flat, self.capacity
        assert flat is not None
        between: Tree = None
        weights: Tensor | None = None
        if n_steps == 1:
            last = key
            reward, discount = flat.reward.index_select(0, key), gamma * flat.discount.index_select(0, key)
        else:
            ahead = self._ahead(key.unsqueeze(1), torch.arange(n_steps))
            mask = None if flat.mask is None or not self._unreal else flat.mask[ahead]
            reward, discount, rows = returns.n_step_transition(
                flat.reward[ahead], gamma * flat.discount[ahead], flat.cut[ahead], mask
            )
            last = self._ahead(key, rows)
            if passed:
                weights = returns.n_step_weights(gamma * flat.discount[ahead], flat.cut[ahead], mask)[:, 1:]
                between = tree_map(lambda x: x[ahead[:, 1:]], flat.obs)
        following = (last + 1) % capacity if self._streams() == 1 else self._ahead(last, 1)
        next_obs = tree_map(lambda x: x.index_select(0, following), flat.obs)
        if self._final:
            rows = (flat.cut[last] * flat.discount[last]).nonzero().squeeze(-1)
            keys = last[rows.to(last.device)].tolist()
            held = [(row, self._final[k]) for row, k in zip(rows.tolist(), keys, strict=True) if k in self._final]
            if held:
                _put(next_obs, torch.tensor([row for row, _ in held]), trees.stack([value for _, value in held], 0))
        obs = tree_map(lambda x: x.index_select(0, key), flat.obs)
        action = flat.action.index_select(0, key)
        return Transitions(obs, action, reward, discount, next_obs, key, None, between, weights)

    def state_dict(self) -> dict[str, Any]:
        """The stored steps (views, so that saving does not double memory) and where the next one goes."""
        held = None
        if self.storage is not None:
            held = {key: tree_map(lambda x: x[:, : self._size], getattr(self.storage, key)) for key in _FIELDS}
            held = {key: value for key, value in held.items() if value is not None}
        final = None
        if self._final:
            keys = list(self._final)
            final = {"keys": torch.tensor(keys), "obs": trees.stack([self._final[key] for key in keys], 0)}
        return {
            "capacity": self.capacity,
            "write": self._write,
            "size": self._size,
            "added": self.added,
            "rows": held,
            "final": final,
            "unreal": self._unreal,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` exactly. Raises UserError if the capacity differs.

        Its rows may be only some: consecutive ones, the first of them in column `at`.
        """
        if state["capacity"] != self.capacity:
            raise UserError(
                f"The checkpoint's replay has a capacity of {state['capacity']} steps per environment, this one "
                f"{self.capacity}: resume with the same replay_size and num_envs."
            )
        self._write, self._size, self.storage, self._unreal = state["write"], state["size"], None, state["unreal"]
        self.added = state.get("added", self._write + (self.capacity if self._size == self.capacity else 0))
        final = state["final"]
        self._final = {}
        if final is not None:
            keys = final["keys"].tolist()
            self._final = dict(zip(keys, _unbound(tree_map(torch.clone, final["obs"]), len(keys)), strict=True))
        if state["rows"] is not None:
            self._allocate(state["rows"])
            assert self.storage is not None
            segment = state.get("at", 0), 0, state["rows"]["reward"].shape[1]
            for key in _FIELDS:
                _write(key, getattr(self.storage, key), state["rows"].get(key), [segment])

    def _allocate(self, fields: dict[str, Tree]) -> None:
        self.storage = Trajectory(**tree_map(self._room, fields))
        self._flat = self.storage.map(lambda x: x.flatten(0, 1))
        held = [leaf for key in _FIELDS for leaf in trees.leaves(getattr(self.storage, key), key)]
        plain = all(x.is_cpu and x.dtype != torch.bfloat16 for _, x in held)  # numpy has no bfloat16
        self._columns = {name: (x.numpy(), x[:, 0].shape) for name, x in held} if plain else None

    def __deepcopy__(self, memo: dict[int, object]) -> Replay:
        copied = Replay(self.capacity, self.device)  # its views must be into its own memory
        copied.load_state_dict(self.state_dict())
        return copied

    def _streams(self) -> int:
        return 0 if self.storage is None else self.storage.shape[0]

    def _quick(self, rows: dict[str, Tree]) -> bool:
        """Write one step if every field is a tensor of the same shape as before; else do nothing and return False."""
        if self._columns is None:
            return False
        found = [leaf for key, value in rows.items() for leaf in trees.leaves(value, key)]
        if len(found) != len(self._columns):
            return False
        for name, row in found:
            if name not in self._columns or row.shape != self._columns[name][1] or not row.is_cpu:
                return False
        for name, row in found:
            self._columns[name][0][:, self._write] = row.numpy()  # a tenth of the cost in torch
        return True

    def _after(self, kept: int, mask: Tensor | None, final_obs: Tree) -> None:
        """Advance by the `kept` steps that were written, and store the successors that no step holds."""
        assert self.storage is not None
        if mask is not None and not self._unreal and not mask.all():
            self._unreal = True
        if self._final and self._size + kept > self.capacity:  # else nothing was overwritten
            for stream in range(self._streams()):
                for i in range(kept):
                    self._final.pop(stream * self.capacity + (self._write + i) % self.capacity, None)
        if final_obs is not None:
            limited = self.storage.cut[:, self._write] * self.storage.discount[:, self._write]
            if len(streams := limited.nonzero().squeeze(-1)):
                keys = (streams * self.capacity + self._write).tolist()
                # One copy of all: they are of one column, so that they are let go together.
                found = tree_map(lambda x: x.index_select(0, streams.to(x.device)), final_obs)
                self._final.update(zip(keys, _unbound(found, len(keys)), strict=True))
        self.added += kept
        self._write = (self._write + kept) % self.capacity
        self._size = min(self._size + kept, self.capacity)

    def _draw(self, n: int, choices: int, generator: torch.Generator | None) -> Tensor:
        """Keys of `n` steps, uniform over the oldest `choices` of every stream."""
        oldest = self._write if self._size == self.capacity else 0
        streams = self._streams()
        pick = torch.randint(streams * choices, (n,), generator=generator)
        if streams == 1:
            return pick if oldest == 0 else pick.add_(oldest).remainder_(self.capacity)
        return (pick // choices) * self.capacity + (oldest + pick % choices) % self.capacity

    def _ahead(self, key: Tensor, steps: Tensor | int) -> Tensor:
        """The keys `steps` steps later in the same streams."""
        column = key % self.capacity
        return key - column + (column + steps) % self.capacity

    def _room(self, like: Tensor) -> Tensor:
        """Memory `[B, capacity, ...]` for values like `like` `[B, T, ...]`."""
        shape = like.shape[0], self.capacity, *like.shape[2:]
        return self.room(*shape, dtype=like.dtype, device=self.device or like.device)


def shared_replay(rows: int, envs: int, n_steps: int = 1) -> Replay:
    """A `Replay` of `rows` steps in all, divided equally between `envs` environments.

    Raises UserError if that is too small for transitions of `n_steps` steps, or sequences of as many and one more.
    """
    part = rows // envs
    if part <= n_steps + 1:
        raise UserError(
            f"replay_size {rows} is too small: {part} steps per environment, but a batch needs more than {n_steps + 1}."
        )
    return Replay(part)


def _write(name: str, target: Tree, source: Tree, segments: list[tuple[int, int, int]]) -> None:
    """Copy `(to, from, steps)` segments along the time dim."""
    if isinstance(target, dict) and (target or source):
        if not isinstance(source, dict) or set(source) != set(target):
            raise UserError(f"Replay rows changed: '{name}' had the parts {sorted(target)} at the first add.")
        for key in target:
            _write(f"{name}.{key}", target[key], source[key], segments)
        return
    if target is None or isinstance(target, dict):
        if source is not None and not isinstance(source, dict):
            raise UserError(f"Replay rows changed: '{name}' was not there at the first add.")
        return
    if source is None or source.shape[0] != target.shape[0] or source.shape[2:] != target.shape[2:]:
        found = "nothing" if source is None else tuple(source.shape)
        raise UserError(f"Replay rows changed: '{name}' was {tuple(target.shape)} at the first add, now {found}.")
    for to, start, count in segments:
        target[:, to : to + count] = source[:, start : start + count]


def _unbound(tree: Tree, count: int) -> list[Tree]:
    """The rows of a tree of `[count, ...]`, as views."""
    if isinstance(tree, dict):
        parts = {name: _unbound(x, count) for name, x in tree.items()}
        return [{name: rows[i] for name, rows in parts.items()} for i in range(count)]
    return [None] * count if tree is None else list(tree.unbind(0))


def _put(tree: Tree, rows: Tensor, values: Tree) -> None:
    """Write `values` `[K, ...]` at the rows `rows` `[K]` of a tree of `[N, ...]`."""
    if isinstance(tree, dict):
        for key in tree:
            _put(tree[key], rows, values[key])
    else:
        tree[rows.to(tree.device)] = values.to(tree)

"""Prioritized replay: steps are sampled in proportion to their last TD error."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from foresight.data.replay import Replay, Transitions
from foresight.data.trajectory import Trajectory, Tree
from foresight.errors import UserError

MOST = 10.0  # the greatest exponent: with it, errors from 1e-6 to 1e30 have a finite power above 0


class SumTree:
    """`size` values ≥ 0, their sum, and sampling in proportion to them, in O(log size) each.

    A binary tree in one array: node i has the children 2i and 2i + 1, the leaves are the values, and every other
    node is the sum of its children. Sums are float64 and always recomputed from the children, so no error accumulates.
    """

    def __init__(self, size: int) -> None:
        """Raises UserError if `size` is below 1."""
        if size < 1:
            raise UserError(f"size is {size}: a sum tree needs at least 1.")
        self.size = size
        self._base = 1 << (size - 1).bit_length()
        self._nodes = np.zeros(2 * self._base)

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self._nodes[1])

    def __getitem__(self, keys: Tensor) -> Tensor:
        """The values at `keys` `[N]` (int64), float64 `[N]`."""
        return torch.from_numpy(self._nodes[self._base + keys.numpy()])

    def __setitem__(self, keys: Tensor, values: Tensor) -> None:
        """Set the values at `keys` `[N]`; of equal keys the last one wins."""
        _set(self._nodes, self._base, keys.numpy(), values.double().numpy())

    def find(self, sums: Tensor) -> Tensor:
        """For each of `sums` `[N]` in [0, total) the first key at which the running sum exceeds it, int64 `[N]`."""
        return torch.from_numpy(_find(self._nodes, self._base, sums.double().numpy()))

    def state_dict(self) -> dict[str, Any]:
        """The values."""
        return {"leaves": torch.from_numpy(self._nodes[self._base : self._base + self.size])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`. Raises UserError if the size differs."""
        leaves = state["leaves"]
        if len(leaves) != self.size:
            raise UserError(f"The checkpoint has {len(leaves)} priorities, this replay {self.size}.")
        self._nodes[:] = 0
        self[torch.arange(self.size)] = leaves


class Prioritized:
    """Prioritized experience replay around a `Replay`: P(step) = p^α / Σ p^α (Schaul et al. 2016, arXiv:1511.05952).

    A step can be sampled once the `n_steps` steps after it are stored; until it is trained on, its priority is the
    greatest so far. Steps with `mask` 0 are never sampled. α = 0 samples uniformly.
    """

    def __init__(self, replay: Replay, alpha: float, n_steps: int = 1) -> None:
        """Raises UserError unless `alpha` is in [0, 10]: the power of an error could be 0 or infinite."""
        if not 0 <= alpha <= MOST:
            raise UserError(f"priority_exponent must be at least 0 and at most {MOST}, not {alpha}: use about 0.6.")
        self.replay, self.alpha, self.n_steps = replay, alpha, n_steps
        self.tree: SumTree | None = None
        self.greatest = 1.0  # priority of a step that was never trained on

    def __len__(self) -> int:
        """The number of steps stored, over all streams."""
        return len(self.replay)

    def add(self, rows: Trajectory | dict[str, Tree], final_obs: Tree = None) -> None:
        """Append steps, as `Replay.add` does."""
        if isinstance(rows, Trajectory):
            for t in range(rows.shape[1]):
                step = rows.map(operator.itemgetter((slice(None), t)))
                self.add({field.name: getattr(step, field.name) for field in dataclasses.fields(step)})
            return
        self.replay.add(rows, final_obs)
        newest = self.replay.newest
        if self.tree is None:
            self.tree = SumTree(len(newest) * self.replay.capacity)
        self.tree[newest] = torch.zeros(len(newest))  # until its successor is stored
        if len(self.replay) > self.n_steps * len(newest):
            column = newest % self.replay.capacity
            complete = newest - column + (column - self.n_steps) % self.replay.capacity
            mask = None if self.replay.storage is None else self.replay.storage.mask
            real = torch.ones(len(newest)) if mask is None else (mask.flatten()[complete] > 0).double()
            self.tree[complete] = real * self.greatest**self.alpha

    def interrupt(self) -> None:
        """See `Replay.interrupt`."""
        self.replay.interrupt()

    def transitions(self, n: int, gamma: float, beta: float, generator: torch.Generator | None = None) -> Transitions:
        """`n` transitions of `n_steps` steps, one from each of n equal segments of the sum of priorities.

        `weight` is (1 / P)^β over its greatest in the batch, which corrects the bias fully at β = 1 (§3.4).
        Raises UserError before the first step can be sampled.
        """
        key, weight = self._draw(n, beta, generator)
        return dataclasses.replace(self.replay.gather(key, gamma, self.n_steps), weight=weight)

    def sequences(self, n: int, beta: float, generator: torch.Generator | None = None) -> Trajectory:
        """`n` sequences `[n, n_steps + 1]`, by the priorities of their first steps; see `Replay.sample`.

        `extras["weight"]` `[n, n_steps + 1]` is the weight of the sequence at each of its steps; see `transitions`.
        """
        key, weight = self._draw(n, beta, generator)
        batch = self.replay.sequences(key, self.n_steps + 1)
        return batch.replace(extras={**batch.extras, "weight": weight.unsqueeze(1).expand(batch.shape)})

    def _draw(self, n: int, beta: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Keys of `n` first steps, in random order, and their weights."""
        if self.tree is None or self.tree.total <= 0:
            raise UserError(f"Cannot sample transitions of {self.n_steps} steps: {len(self)} steps are stored so far.")
        # Segments in order would give keys sorted by stream, and users may treat the first rows differently.
        segment = torch.randperm(n, generator=generator)
        part = (segment + torch.rand(n, generator=generator, dtype=torch.float64)) / n
        key = self.tree.find(part * self.tree.total)
        weight = self.tree[key].pow(-beta)
        return key, (weight / weight.max()).float()

    def update(self, key: Tensor, priority: Tensor) -> None:
        """Set the priorities of the steps `key` `[N]` to |`priority`| + 1e-6, so that each can be sampled again."""
        if self.tree is None:
            return
        priority = priority.detach().cpu().double().abs() + 1e-6
        self.greatest = max(self.greatest, float(priority.max()))
        # A step that cannot be sampled (overwritten since, or mask 0) keeps priority 0.
        self.tree[key.cpu()] = torch.where(self.tree[key.cpu()] > 0, priority**self.alpha, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The steps, the priorities and the greatest of them."""
        tree = None if self.tree is None else self.tree.state_dict()
        return {"replay": self.replay.state_dict(), "tree": tree, "greatest": self.greatest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` exactly. Raises UserError if the capacity differs."""
        self.replay.load_state_dict(state["replay"])
        self.greatest, self.tree = state["greatest"], None
        if state["tree"] is not None:
            self.tree = SumTree(len(state["tree"]["leaves"]))
            self.tree.load_state_dict(state["tree"])


@njit(cache=True)
def _set(nodes: NDArray[np.float64], base: int, keys: NDArray[np.int64], values: NDArray[np.float64]) -> None:
    for i in range(len(keys)):
        node = base + keys[i]
        nodes[node] = values[i]
        while node > 1:
            node //= 2
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1]


@njit(cache=True)
def _find(nodes: NDArray[np.float64], base: int, sums: NDArray[np.float64]) -> NDArray[np.int64]:
    found = np.empty(len(sums), np.int64)
    for i in range(len(sums)):
        node, rest = 1, sums[i]
        while node < base:
            node *= 2
            # Rounding may carry the rest past the last value: never descend into an empty subtree.
            if rest >= nodes[node] and nodes[node + 1] > 0:
                rest -= nodes[node]
                node += 1
        found[i] = node - base
    return found

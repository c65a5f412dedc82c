"""A policy and a value over actions that features describe: every action is scored by the same network.

For observations with the key `action_features` `[..., A, F]`, beside `action_mask` `[..., A]`: elements of a page,
moves, items of a list. The order of the actions changes nothing, and a policy fits any number of them, as in DOMNet
(Liu et al. 2018, arXiv:1802.08802) and in pointer networks (Vinyals et al. 2015, arXiv:1506.03134).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foresight.data import trees
from foresight.data.trajectory import Tree
from foresight.nets.mlp import ACTIVATIONS, MLP, orthogonal

FEATURES, MASK = "action_features", trees.ACTION_MASK


class ScoredActions(nn.Module):
    """The body of an `ActorCritic`: a score of each action, from its features and the mean and maximum of all allowed.

    `outputs` are the widths of the heads: that of the policy is one score of each action, others read the mean and the
    maximum alone.
    """

    def __init__(
        self, features: int, outputs: tuple[int, ...], gains: tuple[float, ...], hidden: Sequence[int], activation: str
    ) -> None:
        super().__init__()
        self.each = MLP(features, hidden, activation)
        width = self.each.size
        self.activation = ACTIVATIONS[activation]
        self.own = orthogonal(nn.Linear(width, width))
        self.context = nn.Linear(2 * width, width, bias=False)
        self.score = orthogonal(nn.Linear(width, 1), gains[0])
        self.last = nn.ModuleList(
            nn.Sequential(orthogonal(nn.Linear(2 * width, width)), nn.Tanh(), orthogonal(nn.Linear(width, n), gain))
            for n, gain in zip(outputs[1:], gains[1:], strict=True)
        )

    def forward(self, obs: Tree) -> Sequence[Tensor]:
        """The inputs of the policy head `[..., A]` and of the others."""
        each, pooled = self._read(obs)
        return [self._scores(each, pooled), *(layer(pooled) for layer in self.last)]

    def single(self, index: int, obs: Tree) -> Tensor:
        """The input of head `index`."""
        each, pooled = self._read(obs)
        found: Tensor = self._scores(each, pooled) if index == 0 else self.last[index - 1](pooled)
        return found

    def last_layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Weight and bias of the layer that makes the input of head `index`."""
        layer: Any = self.score if index == 0 else self.last[index - 1][-1]  # type: ignore[index]
        return layer.weight, layer.bias

    def vjp(self, obs: Tree) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], None]] | None:
        """None: autograd does it. See `StackedMLP.vjp`."""
        return None

    def _read(self, obs: Tree) -> tuple[Tensor, Tensor]:
        each = self.each(obs[FEATURES])
        allowed = (obs[MASK] > 0).unsqueeze(-1)
        count = allowed.sum(-2).clamp(min=1)
        mean = (each * allowed).sum(-2) / count
        # 0 where nothing is allowed, as in rows that pad a batch
        most = each.masked_fill(~allowed, torch.finfo(each.dtype).min).amax(-2) * (allowed.any(-2))
        return each, torch.cat([mean, most], -1)

    def _scores(self, each: Tensor, pooled: Tensor) -> Tensor:
        h = self.activation(self.own(each) + self.context(pooled).unsqueeze(-2))
        return self.score(h).squeeze(-1)

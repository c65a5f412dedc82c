"""Search where the actions cannot all be listed: a few are drawn at every node, and the tree chooses among those.

It is a model like any other: the tree sees K actions by number. Source: Sampled MuZero, Hubert et al. 2021
(arXiv:2104.06303).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SampledActions:
    """`model` with `samples` actions drawn from its policy in every state: K numbered actions instead of a space.

    `model` has the face of `planning.search.Model`, but for its logits, which are the numbers `[B, W]` that `head`
    makes an `Output` of (`sample`, `logp`), and its `step`, which takes the actions themselves `[B, D]`. The state is
    a dict: the model's own (`inner`) and the drawn `actions` `[B, K, D]`; the root's are `root_actions(tree)`.

    The actions come from the policy itself (β = π), so all K have the same prior: (β̂/β) π is 1/K for each.
    """

    def __init__(
        self, model: Any, head: Callable[[Tensor], Any], samples: int, generator: torch.Generator | None = None
    ) -> None:
        self.model, self.head, self.samples, self.generator = model, head, samples, generator

    def root(self, obs: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """`(logits [B, K], value [B], state)`."""
        numbers, value, inner = self.model.root(obs)
        return self._logits(numbers), value, {"inner": inner, "actions": self._actions(numbers)}

    def step(self, state: dict[str, Any], action: Tensor) -> tuple[dict[str, Any], Tensor, Tensor, Tensor, Tensor]:
        """`(state, reward, discount, logits, value)` after the drawn actions with the numbers `action` int64 `[B]`."""
        taken = state["actions"][torch.arange(len(action), device=action.device), action]
        inner, reward, discount, numbers, value = self.model.step(state["inner"], taken)
        after = {"inner": inner, "actions": self._actions(numbers)}
        return after, reward, discount, self._logits(numbers), value

    def _actions(self, numbers: Tensor) -> Tensor:
        spread = numbers.unsqueeze(1).expand(-1, self.samples, -1)
        return self.head(spread).sample(self.generator)

    def _logits(self, numbers: Tensor) -> Tensor:
        return numbers.new_zeros(len(numbers), self.samples)


def root_actions(tree: Any) -> Tensor:
    """The actions `[B, K, D]` that were drawn at the root of a search with `SampledActions`."""
    return tree.state["actions"][0]

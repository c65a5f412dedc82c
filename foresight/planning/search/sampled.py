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

    `model` has the face of `planning.search.mcts.Model`, but for its logits, which are the numbers `[B, W]` that `head`
    makes an `Output` of (`sample`, `logp`, and `tempered` where τ is not 1), and its `step`, which takes the actions
    themselves: `[B, D]`, or int64 `[B]` where they are choices. The state is a dict: the model's own (`inner`) and the
    drawn `actions` `[B, K, D]` or `[B, K]`; the root's are `root_actions(tree)`. `legal` bool `[B, A]` says which
    choices there are at the root.

    The actions are drawn from β ∝ π^(1/τ), τ being the `temperature`, and their priors are in proportion to (β̂/β) π
    (the search makes their sum 1), where β̂ is the share that an action has of the K draws: 1/K for a real number. A
    choice that was drawn twice is one action, with twice that. With τ = 1 they come from the policy itself, and the
    prior is β̂.
    """

    def __init__(
        self,
        model: Any,
        head: Callable[[Tensor], Any],
        samples: int,
        generator: torch.Generator | None = None,
        legal: Tensor | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.model, self.head, self.samples, self.generator, self.legal = model, head, samples, generator, legal
        self.temperature = temperature

    def root(self, obs: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """`(logits [B, K], value [B], state)`."""
        numbers, value, inner = self.model.root(obs)
        if self.legal is not None:
            numbers = numbers.masked_fill(~self.legal, torch.finfo(numbers.dtype).min)
        actions, logits = self._drawn(numbers)
        return logits, value, {"inner": inner, "actions": actions}

    def step(self, state: dict[str, Any], action: Tensor) -> tuple[dict[str, Any], Tensor, Tensor, Tensor, Tensor]:
        """`(state, reward, discount, logits, value)` after the drawn actions with the numbers `action` int64 `[B]`."""
        taken = state["actions"][torch.arange(len(action), device=action.device), action]
        inner, reward, discount, numbers, value = self.model.step(state["inner"], taken)
        actions, logits = self._drawn(numbers)
        return {"inner": inner, "actions": actions}, reward, discount, logits, value

    def _drawn(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The actions, and the logits `[B, K]` of their prior: ln β̂ + ln π - ln β."""
        policy = self.head(numbers.unsqueeze(1).expand(-1, self.samples, -1))
        if self.temperature == 1:
            actions = policy.sample(self.generator)
            return actions, _logits(actions)
        draws = policy.tempered(self.temperature)
        actions = draws.sample(self.generator)
        return actions, _logits(actions) + policy.logp(actions) - draws.logp(actions)


def root_actions(tree: Any) -> Tensor:
    """The actions `[B, K, D]` or `[B, K]` that were drawn at the root of a search with `SampledActions`."""
    return tree.state["actions"][0]


def _logits(actions: Tensor) -> Tensor:
    """How often each was drawn, as logits `[B, K]`: -inf for what stands before it already."""
    if actions.is_floating_point():  # no two are alike
        return actions.new_zeros(actions.shape[:2])
    same = actions.unsqueeze(2) == actions.unsqueeze(1)
    first = same.int().argmax(2) == torch.arange(actions.shape[1], device=actions.device)
    return same.sum(2).float().log().masked_fill(~first, -torch.inf)

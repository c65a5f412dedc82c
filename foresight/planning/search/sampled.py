"""Search in large or continuous action spaces: K actions are sampled at every node, and the tree chooses among them.

The wrapper is a search `Model` with K numbered actions. Source: Sampled MuZero, Hubert et al. 2021
(arXiv:2104.06303).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from foresight.nets.outputs import Categorical, TanhNormal
from foresight.planning.search.mcts import Model, Obs, State
from foresight.planning.search.tree import Tree


class SampledActions(Generic[Obs, State]):
    """`model` with `samples` actions sampled from its policy in every state: K numbered actions.

    `model` is a `planning.search.mcts.Model`, except that its policy output `[B, W]` is turned into an `Output` by
    `head` (`sample`, `logp`, and `tempered` unless τ is 1), and that its `step` takes the actions themselves: `[B, D]`,
    or int64 `[B]` if discrete. The state is a dict: the model's own (`inner`) and the sampled `actions` `[B, K, D]` or
    `[B, K]`; `root_actions(tree)` returns the root's. `legal` bool `[B, A]`: legal discrete actions at the root.

    Actions are sampled from β ∝ π^(1/τ), where τ is the `temperature`, and their priors are proportional to (β̂/β) π
    (normalized by the search), where β̂ is the share of an action among the K samples: 1/K for continuous actions. A
    discrete action sampled twice is one action with twice the share. With τ = 1 the samples come from the policy
    itself, and the prior is β̂. A tree cannot be reused: every search samples other actions at its root.
    """

    reuses: ClassVar[bool] = False  # see `mcts.search`

    def __init__(
        self,
        model: Model[Obs, State],
        head: Callable[[Tensor], Categorical | TanhNormal],
        samples: int,
        generator: torch.Generator | None = None,
        legal: Tensor | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.model, self.head, self.samples, self.generator, self.legal = model, head, samples, generator, legal
        self.temperature = temperature

    def root(self, obs: Obs) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """`(logits [B, K], value [B], state)`."""
        policy, value, inner = self.model.root(obs)
        if self.legal is not None:
            policy = policy.masked_fill(~self.legal, torch.finfo(policy.dtype).min)
        actions, logits = self._sample(policy)
        return logits, value, {"inner": inner, "actions": actions}

    def step(self, state: dict[str, Any], action: Tensor) -> tuple[dict[str, Any], Tensor, Tensor, Tensor, Tensor]:
        """`(state, reward, discount, logits, value)` after the sampled actions of index `action` int64 `[B]`."""
        taken = state["actions"][torch.arange(len(action), device=action.device), action]
        inner, reward, discount, policy, value = self.model.step(state["inner"], taken)
        actions, logits = self._sample(policy)
        return {"inner": inner, "actions": actions}, reward, discount, logits, value

    def _sample(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Actions sampled from `parameters` `[B, W]`, and the logits `[B, K]` of their prior: ln β̂ + ln π - ln β."""
        policy = self.head(parameters.unsqueeze(1).expand(-1, self.samples, -1))
        if self.temperature == 1:
            actions = policy.sample(self.generator)
            return actions, _logits(actions)
        proposal = policy.tempered(self.temperature)
        actions = proposal.sample(self.generator)
        return actions, _logits(actions) + policy.logp(actions) - proposal.logp(actions)


def root_actions(tree: Tree) -> Tensor:
    """The actions `[B, K, D]` or `[B, K]` sampled at the root of a search with `SampledActions`."""
    actions: Tensor = tree.state["actions"][0]
    return actions


def _logits(actions: Tensor) -> Tensor:
    """Log counts of the samples, `[B, K]`: -inf for repetitions of an earlier one."""
    if actions.is_floating_point():  # all samples differ
        return actions.new_zeros(actions.shape[:2])
    same = actions.unsqueeze(2) == actions.unsqueeze(1)
    first = same.int().argmax(2) == torch.arange(actions.shape[1], device=actions.device)
    return same.sum(2).float().log().masked_fill(~first, -torch.inf)

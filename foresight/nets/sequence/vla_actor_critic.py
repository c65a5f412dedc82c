"""A vision-language-action policy with a value head, for PPO, and the check that it acts as it is trained.

Source: RL4VLA, Liu et al. 2025 (arXiv:2505.19789), §4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from foresight.data.trajectory import Tree, tree_map
from foresight.errors import UserError
from foresight.nets.outputs import Scalar
from foresight.nets.sequence.action_tokens import Tokens
from foresight.nets.sequence.vla import VLA


class VLAActorCritic(nn.Module):
    """A VLA and a value head on its features before the first action token: the interface of `ActorCritic`.

    Source: RL4VLA, Liu et al. 2025 (arXiv:2505.19789), §4: one backbone for both, and a small MLP for the value.
    """

    normalizer = None

    def __init__(self, vla: VLA) -> None:
        """Raises UserError for a head without log-probabilities."""
        super().__init__()
        if vla.config.head == "flow":
            raise UserError("PPO needs log-probabilities of actions, which head 'flow' does not have: use --head bins.")
        self.vla, self.policy_head = vla, vla.logits
        dim = vla.config.dim
        self.value_head = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, 1))
        nn.init.normal_(self.value_head[-1].weight, std=0.02)  # type: ignore[arg-type]
        nn.init.zeros_(self.value_head[-1].bias)  # type: ignore[arg-type]

    def policy(self, obs: Tree) -> Tokens:
        """The `Output` over actions."""
        return self(obs)[0]

    def value(self, obs: Tree, carry: Tree = None) -> Scalar:
        """The value."""
        return self(obs)[1]

    def forward(self, obs: Tree) -> tuple[Tokens, Scalar]:
        """Policy and value in one pass."""
        features = self.vla.features(obs)
        output = self.vla.output(features)
        assert isinstance(output, Tokens)
        return output, Scalar(self.value_head(features.hidden).squeeze(-1))

    def initial(self, batch: int) -> None:
        """The initial carry: None, as there is no memory."""

    def step(self, obs: Tree, carry: Tree = None) -> tuple[Tokens, None]:
        """`policy`; the carry is None."""
        return self.policy(obs), None

    def read(self, obs: Tree, carry: Tree = None, start: Tensor | None = None) -> tuple[Tokens, Scalar, None]:
        """`forward`."""
        return *self(obs), None

    def vjp(self, obs: Tree) -> tuple[Any, Any, Callable[[Tensor, Tensor], None]] | None:
        """None: there is no compiled backward pass, autograd does it. See `ActorCritic.vjp`."""


@torch.no_grad()
def require_one_path(network: VLA | VLAActorCritic, obs: Tree, greedy: Tensor | None = None) -> None:
    """Raise UserError unless acting on `obs` `[B, ...]` gives the log-probabilities of training on `[B, 1, ...]`.

    Also unless `greedy` `[B, ...]`, if given, what an evaluation does there, is as likely as the likeliest action. A
    policy that is trained on another path than it acts on learns nothing, however good its curve.
    """
    steps = tree_map(lambda x: x.unsqueeze(1), obs)
    acting = network(obs) if isinstance(network, VLA) else network.step(obs)[0]
    training = network(steps) if isinstance(network, VLA) else network.read(steps)[0]
    action = acting.mode()
    before, after = acting.token_logp(action), training.token_logp(action.unsqueeze(1)).squeeze(1)
    evaluated = before if greedy is None else training.token_logp(greedy.unsqueeze(1)).squeeze(1)
    for what, logp in (("acting", before), ("the actions of evaluation", evaluated)):
        if not (gap := (logp - after).abs().max().item()) < 1e-4:
            raise UserError(
                f"The log-probabilities of {what} differ by {gap:.2g} from those of training: is the network in "
                "training mode? Call network.eval() first."
            )

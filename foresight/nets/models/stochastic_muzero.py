"""Stochastic MuZero's learned model: what one does leads to an afterstate, and chance leads on from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresight.nets.mlp import MLP, orthogonal
from foresight.nets.models.muzero import Number
from foresight.ops import latent

State = dict[str, Tensor]


class ChanceModel(nn.Module):
    """Latents `[B, D]` of states and of afterstates; one of `codes` outcomes of chance leads from these to those.

    It has the face that `planning.search.mcts` asks of a model (`root`, `step`) with `actions` + `codes` actions, of
    which a state allows the first and an afterstate the last (`select.PUCT`, `chance`). A state of the search is a
    dict: the `latent`, and `after` `[B]`, 1 for an afterstate. Source: Antonoglou et al. 2022 (ICLR; openreview
    X6D9bAHhBQ1).
    """

    eye: Tensor

    def __init__(
        self,
        encoder: Any,
        watcher: Any,
        actions: int,
        codes: int = 32,
        latent_size: int = 64,
        hidden: Sequence[int] = (128,),
        support: int = 20,
        discount: float = 0.997,
        activation: str = "relu",
    ) -> None:
        """`encoder` and `watcher` are two encoders of observations: one for latents, one for what chance did.

        That is told from what was seen before and after, side by side, so that a code need not mean the same from every
        afterstate: of as many codes as outcomes are possible at once, all can be told apart.
        """
        super().__init__()
        self.discount, self.actions, self.codes = discount, actions, codes
        self.encoder, self.into = encoder, orthogonal(nn.Linear(encoder.size, latent_size), 1.0)
        self.acted = _Step(latent_size, actions, hidden, activation)
        self.happened = _Step(latent_size, codes, hidden, activation)
        self.reward = Number(self.happened.size, support)
        self.head, self.after = MLP(latent_size, hidden, activation), MLP(latent_size, hidden, activation)
        self.policy = orthogonal(nn.Linear(self.head.size, actions), 0.01)
        self.value = Number(self.head.size, support)
        self.outcome = orthogonal(nn.Linear(self.after.size, codes), 0.01)
        self.after_value = Number(self.after.size, support)
        self.watcher, self.between = watcher, MLP(2 * watcher.size, hidden, activation)
        self.code = orthogonal(nn.Linear(self.between.size, codes), 1.0)
        self.register_buffer("eye", torch.eye(max(actions, codes)), persistent=False)

    def represent(self, obs: Any) -> Tensor:
        """The latent `[B, D]` of what was seen."""
        return latent.unit_interval(self.into(self.encoder(obs)))

    def happening(self, obs: Any, next_obs: Any) -> Tensor:
        """Numbers `[B, C]`: the largest is the code of what chance did between these observations."""
        return self.code(self.between(torch.cat([self.watcher(obs), self.watcher(next_obs)], -1)))

    def act(self, state: Tensor, action: Tensor) -> Tensor:
        """The latent of the afterstate, for actions int64 `[B]`."""
        return self.acted(state, self.eye[action, : self.actions])[0]

    def chance(self, after: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        """The latent of the state after the outcome `code` `[B, C]`, and the features of the reward on the way."""
        return self.happened(after, code)

    def root(self, obs: Any) -> tuple[Tensor, Tensor, State]:
        """`(logits, value, state)`, as `planning.search.mcts` asks."""
        found = self.represent(obs)
        ahead = self.head(found)
        state = {"latent": found, "after": found.new_zeros(len(found))}
        return self._first(self.policy(ahead)), self.value(ahead), state

    def step(self, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Tensor, Tensor]:
        """`(state, reward, discount, logits, value)`, as `planning.search.mcts` asks.

        From a state to an afterstate, without reward and discount; or from there to a state. Both are computed for all
        rows, as a batch has some of each.
        """
        ended = state["after"] > 0
        after = self.act(state["latent"], action.clamp(max=self.actions - 1))
        behind = self.after(after)
        code = self.eye[(action - self.actions).clamp(min=0), : self.codes]
        found, on_the_way = self.chance(state["latent"], code)
        ahead = self.head(found)
        reward = torch.where(ended, self.reward(on_the_way), 0.0)
        discount = torch.where(ended, self.discount, 1.0)
        value = torch.where(ended, self.value(ahead), self.after_value(behind))
        wide = ended.unsqueeze(-1)
        logits = torch.where(wide, self._first(self.policy(ahead)), self._last(self.outcome(behind)))
        return {"latent": torch.where(wide, found, after), "after": (~ended).float()}, reward, discount, logits, value

    def follow(
        self, state: State, action: Tensor, obs: Any, next_obs: Any
    ) -> tuple[State, Tensor, Tensor, Tensor, Tensor]:
        """Two steps at once: the action, and the outcome that is seen from `obs` to `next_obs`."""
        after, *_ = self.step(state, action)
        return self.step(after, self.actions + self.happening(obs, next_obs).argmax(-1))

    def _first(self, logits: Tensor) -> Tensor:
        return functional.pad(logits, (0, self.codes), value=-torch.inf)

    def _last(self, logits: Tensor) -> Tensor:
        return functional.pad(logits, (self.actions, 0), value=-torch.inf)


class _Step(nn.Module):
    """From a latent and what was done (features) to the next latent, and the features that it was made of."""

    def __init__(self, latent_size: int, features: int, hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        self.body = MLP(latent_size + features, hidden, activation)
        self.next = orthogonal(nn.Linear(self.body.size, latent_size), 1.0)
        self.size = self.body.size

    def forward(self, state: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(torch.cat([state, done], -1))
        return latent.unit_interval(self.next(features) + state), features

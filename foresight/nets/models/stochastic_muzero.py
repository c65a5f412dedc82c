"""Stochastic MuZero's learned model: an action leads to an afterstate, a chance outcome to the next state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresight.data.trajectory import Tree
from foresight.nets.mlp import MLP, Encoder, orthogonal
from foresight.nets.models.muzero import CategoricalScalar
from foresight.ops import latent

State = dict[str, Tensor]


class ChanceModel(nn.Module):
    """Latents `[B, D]` of states and afterstates; one of `codes` chance outcomes leads from an afterstate to a state.

    A `planning.search.mcts.Model` (`root`, `step`) with `actions` + `codes` actions: the first are legal in states, the
    last in afterstates (`selection.PUCT`, `chance`). A state of the search is a dict: the `latent`, and `after` `[B]`,
    1 for an afterstate. Source: Antonoglou et al. 2022 (ICLR; openreview
    X6D9bAHhBQ1).
    """

    eye: Tensor
    code_mean: Tensor
    code_var: Tensor

    def __init__(
        self,
        encoder: Encoder,
        watcher: Encoder,
        actions: int,
        codes: int = 32,
        latent_size: int = 64,
        hidden: Sequence[int] = (128,),
        support: int = 20,
        discount: float = 0.997,
        activation: str = "relu",
        bin_width: float = 1.0,
    ) -> None:
        """`encoder` and `watcher` encode observations: one for latents, one for the code of the chance outcome.

        The code depends on the observations before and after the step, so it may mean different outcomes in different
        afterstates: `codes` need only be the number of outcomes of one afterstate.
        """
        super().__init__()
        self.discount, self.actions, self.codes = discount, actions, codes
        self.encoder, self.into = encoder, orthogonal(nn.Linear(encoder.size, latent_size), 1.0)
        self.acted = _Step(latent_size, actions, hidden, activation)
        self.happened = _Step(latent_size, codes, hidden, activation)
        self.reward = CategoricalScalar(self.happened.size, support, bin_width)
        self.head, self.after = MLP(latent_size, hidden, activation), MLP(latent_size, hidden, activation)
        self.policy = orthogonal(nn.Linear(self.head.size, actions), 0.01)
        self.value = CategoricalScalar(self.head.size, support, bin_width)
        self.outcome = orthogonal(nn.Linear(self.after.size, codes), 0.01)
        self.after_value = CategoricalScalar(self.after.size, support, bin_width)
        self.watcher, self.between = watcher, MLP(2 * watcher.size, hidden, activation)
        self.code = orthogonal(nn.Linear(self.between.size, codes), 1.0)
        self.register_buffer("code_mean", torch.zeros(codes))
        self.register_buffer("code_var", torch.ones(codes))
        self.register_buffer("eye", torch.eye(max(actions, codes)), persistent=False)

    def represent(self, obs: Tree) -> Tensor:
        """The latent `[B, D]` of an observation."""
        return latent.unit_interval(self.into(self.encoder(obs)))

    def encode_outcome(self, obs: Tree, next_obs: Tree, learning: bool = False) -> Tensor:
        """Scores `[B, C]`: the largest is the code of the chance outcome between these observations.

        Each code's scores have mean 0 and variance 1 over the batch if `learning`, else over the batches of updates
        (running statistics): no code can have the largest score of all outcomes.
        """
        scores = self.code(self.between(torch.cat([self.watcher(obs), self.watcher(next_obs)], -1)))
        return functional.batch_norm(scores, self.code_mean, self.code_var, training=learning)

    def act(self, state: Tensor, action: Tensor) -> Tensor:
        """The latent of the afterstate, for actions int64 `[B]`."""
        return self.acted(state, self.eye[action, : self.actions])[0]

    def chance(self, after: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        """The latent of the state after the outcome `code` `[B, C]`, and the features that the reward is read from."""
        return self.happened(after, code)

    def root(self, obs: Tree) -> tuple[Tensor, Tensor, State]:
        """`(logits, value, state)`, see `planning.search.mcts.Model`."""
        found = self.represent(obs)
        ahead = self.head(found)
        state = {"latent": found, "after": found.new_zeros(len(found))}
        return self._first(self.policy(ahead)), self.value(ahead), state

    def step(self, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Tensor, Tensor]:
        """`(state, reward, discount, logits, value)`, see `planning.search.mcts.Model`.

        From a state to an afterstate (reward 0, discount 1), or from an afterstate to a state. Both are computed for
        all rows, as a batch has both.
        """
        from_after = state["after"] > 0
        after = self.act(state["latent"], action.clamp(max=self.actions - 1))
        behind = self.after(after)
        code = self.eye[(action - self.actions).clamp(min=0), : self.codes]
        found, on_the_way = self.chance(state["latent"], code)
        ahead = self.head(found)
        reward = torch.where(from_after, self.reward(on_the_way), 0.0)
        discount = torch.where(from_after, self.discount, 1.0)
        value = torch.where(from_after, self.value(ahead), self.after_value(behind))
        wide = from_after.unsqueeze(-1)
        logits = torch.where(wide, self._first(self.policy(ahead)), self._last(self.outcome(behind)))
        return (
            {"latent": torch.where(wide, found, after), "after": (~from_after).float()},
            reward,
            discount,
            logits,
            value,
        )

    def follow(
        self, state: State, action: Tensor, obs: Tree, next_obs: Tree
    ) -> tuple[State, Tensor, Tensor, Tensor, Tensor]:
        """Two steps: the action, and the chance outcome observed between `obs` and `next_obs`."""
        after, *_ = self.step(state, action)
        return self.step(after, self.actions + self.encode_outcome(obs, next_obs).argmax(-1))

    def _first(self, logits: Tensor) -> Tensor:
        return functional.pad(logits, (0, self.codes), value=-torch.inf)

    def _last(self, logits: Tensor) -> Tensor:
        return functional.pad(logits, (self.actions, 0), value=-torch.inf)


class _Step(nn.Module):
    """From a latent and action features to the next latent, and the features before the last layer."""

    def __init__(self, latent_size: int, features: int, hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        self.body = MLP(latent_size + features, hidden, activation)
        self.next = orthogonal(nn.Linear(self.body.size, latent_size), 1.0)
        self.size = self.body.size

    def forward(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(torch.cat([state, action], -1))
        return latent.unit_interval(self.next(features) + state), features

"""What soft actor-critics are made of: several critics side by side, and a squashed policy within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight.data.replay import Replay, Transitions
from foresight.data.trajectory import Trajectory, Tree, tree_map
from foresight.errors import UserError
from foresight.nets import encoders
from foresight.nets.heads import TanhNormalHead
from foresight.nets.outputs import Categorical, TanhNormal
from foresight.nets.sequence import memory
from foresight.nets.stacked_mlp import StackedMLP


def trunk(space: gs.Space[Any], images: str = "nature", shape: memory.Shape | None = None) -> memory.Trunk:
    """What makes features of observations: the identity for vectors, convolutions for images, then a memory, if any.

    Raises UserError for a name or a number that cannot be.
    """
    encoder = encoders.image_encoder(space, images) if encoders.is_image(space) else encoders.vectorizer(space)
    return memory.Trunk(encoder, None if shape is None else memory.make(shape, int(encoder.size)))


class Critics(nn.Module):
    """`count` critics over the same features: `outputs` values each of (features, action).

    `trunk` makes the features; it is shared by the critics and learns from their loss only (as in SAC-AE, arXiv
    1910.01741: a policy without a trunk takes them as they are). `action_width` is 0 where the values are of all
    actions.
    """

    def __init__(
        self,
        space: gs.Space[Any],
        action_width: int,
        outputs: int,
        hidden: Sequence[int],
        activation: str = "relu",
        images: str = "nature",
        count: int = 2,
        shape: memory.Shape | None = None,
    ) -> None:
        super().__init__()
        self.trunk = trunk(space, images, shape)
        self.size = self.trunk.size
        self.towers = StackedMLP(self.size + action_width, hidden, [outputs] * count, [1.0] * count, activation)

    def forward(self, features: Tensor, action: Tensor | None = None) -> Sequence[Tensor]:
        """Values `[..., outputs]` of every critic."""
        return self.towers(features if action is None else torch.cat([features, action], -1))

    def vjp(self, features: Tensor, action: Tensor) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], None]] | None:
        """Values without autograd, and the way back to the weights: see `StackedMLP.vjp`. None where features need
        one.
        """
        if features.requires_grad:
            return None
        return self.towers.vjp(torch.cat([features, action], -1))

    def frozen(self, features: Tensor, action: Tensor) -> Sequence[Tensor]:
        """The same, but the critics are taken as given: the gradient goes to `action` alone."""
        return self.towers.frozen(torch.cat([features.detach(), action], -1))


class SquashedActor(nn.Module):
    """Normals under tanh over features; `outward` takes actions from (-1, 1) to the bounds of `space`.

    The features are those of its own `trunk`, or the critics' where it has none. Raises UserError where `space` is not
    a Box with bounds and one dim.
    """

    center: Tensor
    reach: Tensor

    def __init__(
        self,
        features: int,
        space: gs.Space[Any],
        name: str,
        hidden: Sequence[int],
        activation: str = "relu",
        own: memory.Trunk | None = None,
    ) -> None:
        super().__init__()
        self.trunk = own
        if not isinstance(space, gs.Box) or len(space.shape) != 1:
            raise UserError(
                f"{name} acts with real numbers, but this environment takes {space}. "
                "Use sac_discrete, dqn or ppo, or choose an environment with a Box of actions with one dim."
            )
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise UserError(
                f"{name} needs actions with bounds, but this environment takes {space}. Rescale them or use ppo."
            )
        low, high = torch.from_numpy(space.low.astype(np.float32)), torch.from_numpy(space.high.astype(np.float32))
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("reach", (high - low) / 2)
        self.head = TanhNormalHead(space.shape[0])
        self.towers = StackedMLP(features if own is None else own.size, hidden, [self.head.width], [0.01], activation)
        self.dims = int(space.shape[0])

    def forward(self, features: Tensor) -> TanhNormal:
        """The policy at `features`, over actions in (-1, 1)."""
        return self.head(self.towers(features)[0])

    def outward(self, action: Tensor) -> Tensor:
        """Actions in (-1, 1) as the world takes them."""
        return self.center + self.reach * action

    def inward(self, action: Tensor) -> Tensor:
        """The inverse of `outward`."""
        return (action - self.center) / self.reach


class CategoricalActor(nn.Module):
    """A categorical of `actions` over features; the part `mask_key` of dict observations says which are allowed.

    The features are those of its own `trunk`, or the critics' where it has none.
    """

    def __init__(
        self,
        features: int,
        actions: int,
        mask_key: str | None,
        hidden: Sequence[int],
        activation: str = "relu",
        own: memory.Trunk | None = None,
    ) -> None:
        super().__init__()
        self.trunk = own
        self.actions, self.mask_key = actions, mask_key
        self.towers = StackedMLP(features if own is None else own.size, hidden, [actions], [0.01], activation)

    def forward(self, features: Tensor, obs: Tree = None) -> Categorical:
        """The policy at `features`; `obs` is looked at for its mask only."""
        mask = None if self.mask_key is None else obs[self.mask_key] > 0
        return Categorical(self.towers(features)[0], mask)

    def uniform(self, like: Categorical) -> Categorical:
        """Every action equally likely that `like` allows."""
        allowed = like.logits > torch.finfo(like.logits.dtype).min
        return Categorical(torch.zeros_like(like.logits), allowed)


class Seen(NamedTuple):
    """N transitions as actor and critics see them: features `[N, D]` of a row and of its successor for each of them.

    `critics` and `actor` have a gradient to the trunks that made them; `next_critics` are the target critics'. `obs`
    and `next_obs` are looked at for masks of actions only. `discount` has the gamma of the algorithm in it. Where
    transitions have n > 1 rows, the actor sees those between too: `passed_actor` `[N, n - 1, D]`, `passed_obs`, and
    `passed_weight` `[N, n - 1]`, what each counts.
    """

    critics: Tensor
    actor: Tensor
    next_critics: Tensor
    next_actor: Tensor
    obs: Tree
    next_obs: Tree
    action: Tensor
    reward: Tensor
    discount: Tensor
    passed_actor: Tensor | None = None
    passed_obs: Tree = None
    passed_weight: Tensor | None = None


class SoftConfig(memory.Remembering, Protocol):
    """The fields of a soft actor-critic's Config by which its replay is read."""

    @property
    def batch_size(self) -> int:
        """Rows that are learned from in a gradient step."""

    @property
    def gamma(self) -> float:
        """The discount a step."""

    @property
    def n_steps(self) -> int:
        """Rewards before the bootstrap."""

    @property
    def sequence_length(self) -> int:
        """Rows of a sequence that are learned from."""

    @property
    def burn_in(self) -> int:
        """Rows before them that only fill the memory."""


class SoftState(Protocol):
    """The State of a soft actor-critic, as far as it is used here."""

    critics: Critics
    replay: Replay
    generator: torch.Generator
    sampler: torch.Generator

    @property
    def actor(self) -> SquashedActor | CategoricalActor:
        """The policy."""

    @property
    def config(self) -> SoftConfig:
        """The algorithm's Config."""


def reader(state: SoftState) -> memory.Trunk:
    """What the policy of a State with `actor` and `critics` sees with: its own trunk, or the critics'."""
    return state.critics.trunk if state.actor.trunk is None else state.actor.trunk


def sample(state: SoftState) -> Transitions | Trajectory:
    """A batch of a State's replay: transitions, or with a memory sequences of as many rows, and those around them."""
    config, device = state.config, state.generator.device
    if config.memory is None:
        rows = state.replay.transitions(config.batch_size, config.gamma, config.n_steps, state.sampler, passed=True)
        return rows.to(device)
    count, length = max(1, config.batch_size // config.sequence_length), config.burn_in + config.sequence_length + 1
    pieces = state.replay.sample(count, length, state.sampler)
    return pieces.map(lambda x: x.to(device))


def see(
    actor: SquashedActor | CategoricalActor,
    critics: Critics,
    target: Critics,
    batch: Transitions | Trajectory,
    gamma: float,
    burn_in: int = 0,
) -> Seen:
    """Transitions, or those in sequences `[B, T]`, where every row is seen with the memory of what was before it.

    The first `burn_in` rows of a sequence only fill the memories, and the last is only a successor. Left out are rows
    that are not real, and those that a time limit cut: no row shows their successor to the memory that saw them.
    `gamma` is for sequences; transitions have it in their discount.
    """
    if isinstance(batch, Transitions):
        features = critics.trunk(batch.obs)[0]
        with torch.no_grad():
            next_features = target.trunk(batch.next_obs)[0]
            eyes = critics.trunk if actor.trunk is None else actor.trunk
            next_own, passed = eyes(batch.next_obs)[0], None
            if batch.passed_weight is not None:
                size = batch.passed_weight.shape
                passed = eyes(tree_map(lambda x: x.flatten(0, 1), batch.passed))[0].unflatten(0, size)
        own = features.detach() if actor.trunk is None else actor.trunk(batch.obs)[0]
        rest = (batch.obs, batch.next_obs, batch.action, batch.reward, batch.discount)
        return Seen(features, own, next_features, next_own, *rest, passed, batch.passed, batch.passed_weight)
    assert batch.mask is not None
    start = memory.starts(batch.cut)
    rows = batch.map(lambda x: x[:, burn_in:])
    learned = ((rows.mask > 0) & (rows.cut * rows.discount == 0))[:, :-1]  # type: ignore[operator]

    def now(x: Tensor) -> Tensor:
        return x[:, :-1][learned]

    def then(x: Tensor) -> Tensor:
        return x[:, 1:][learned]

    features = critics.trunk.sequence(batch.obs, start, burn_in)
    own = features.detach() if actor.trunk is None else actor.trunk.sequence(batch.obs, start, burn_in)
    with torch.no_grad():
        following = target.trunk.sequence(batch.obs, start, burn_in)
    return Seen(
        now(features), now(own), then(following), then(own.detach()), tree_map(now, rows.obs),
        tree_map(then, rows.obs), now(rows.action), now(rows.reward), gamma * now(rows.discount),
    )  # fmt: skip

"""The networks of soft actor-critics: several critics over shared features, and policies within bounds."""

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
from foresight.nets.actor_critic import SharedTrunk
from foresight.nets.heads import StateDependentHead, TanhNormalHead
from foresight.nets.mlp import MLP
from foresight.nets.outputs import Categorical, TanhNormal
from foresight.nets.sequence import memory
from foresight.nets.stacked_mlp import StackedMLP


def trunk(space: gs.Space[Any], images: str = "nature", shape: memory.Shape | None = None) -> memory.Trunk:
    """From observations to features: the identity for vectors, convolutions for images, then the memory of `shape`.

    Raises UserError for an unknown name of `images`, or an unknown kind or a bad size of the memory.
    """
    encoder = encoders.image_encoder(space, images) if encoders.is_image(space) else encoders.vectorizer(space)
    return memory.Trunk(encoder, None if shape is None else memory.make(shape, int(encoder.size)))


class Critics(nn.Module):
    """`count` critics over the same features, each with `outputs` values for (features, action).

    The critics share `trunk`, which makes the features and is trained by their loss only (as in SAC-AE, arXiv
    1910.01741: a policy without its own trunk gets the features without gradient). `action_width` is the size of an
    action `[..., action_width]`, or 0 if a critic has a value for each of `outputs` discrete actions.
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
        self.mlp = StackedMLP(self.size + action_width, hidden, [outputs] * count, [1.0] * count, activation)

    def forward(self, features: Tensor, action: Tensor | None = None) -> Sequence[Tensor]:
        """Values `[..., outputs]` of every critic."""
        return self.mlp(features if action is None else torch.cat([features, action], -1))

    def vjp(self, features: Tensor, action: Tensor) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], None]] | None:
        """Values without autograd, and their backward pass to the weights of the MLPs, see `StackedMLP.vjp`.

        None if the features need a gradient, or where `StackedMLP.vjp` returns None: use autograd.
        """
        if features.requires_grad:
            return None
        return self.mlp.vjp(torch.cat([features, action], -1))

    def frozen(self, features: Tensor, action: Tensor) -> Sequence[Tensor]:
        """`forward` with frozen critics and features: the gradient flows to `action` only."""
        return self.mlp.frozen(torch.cat([features.detach(), action], -1))


class SquashedActor(nn.Module):
    """Tanh-squashed normals over features; `to_env` scales actions from (-1, 1) to the bounds of `space`.

    The features are those of its own trunk `own`, or the critics' if it has none. With `noise_log_std` the noise is
    state-dependent (`heads.StateDependentHead`). Raises UserError if `space` is not a bounded Box with one dim.
    """

    center: Tensor
    scale: Tensor
    head: Any  # TanhNormalHead or StateDependentHead
    mlp: Any  # StackedMLP or SharedTrunk

    def __init__(
        self,
        features: int,
        space: gs.Space[Any],
        name: str,
        hidden: Sequence[int],
        activation: str = "relu",
        own: memory.Trunk | None = None,
        log_std_bounds: tuple[float, float] = (-5.0, 2.0),
        noise_log_std: float | None = None,
    ) -> None:
        super().__init__()
        self.trunk = own
        if not isinstance(space, gs.Box) or len(space.shape) != 1:
            raise UserError(
                f"{name} needs continuous actions (a Box with one dim), but this environment takes {space}. "
                "Use sac_discrete, dqn or ppo, or choose another environment."
            )
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise UserError(
                f"{name} needs bounded actions, but this environment takes {space}. Wrap it with bounds, or use ppo."
            )
        encoders.require_choice(space)
        low, high = torch.from_numpy(space.low.astype(np.float32)), torch.from_numpy(space.high.astype(np.float32))
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("scale", (high - low) / 2)
        inputs = features if own is None else own.size
        if noise_log_std is None:
            self.head = TanhNormalHead(space.shape[0], log_std_bounds)
            self.mlp = StackedMLP(inputs, hidden, [self.head.width], [0.01], activation)
        else:
            self.head = StateDependentHead(space.shape[0], noise_log_std, squashed=True)
            body = MLP(inputs, hidden, activation)
            self.head.over(body.size)
            self.mlp = SharedTrunk(body, (self.head.width,), (0.01,), appended=True)
        self.dims = int(space.shape[0])

    def forward(self, features: Tensor) -> TanhNormal:
        """The policy at `features`, over actions in (-1, 1)."""
        return self.head(self.mlp(features)[0])

    def to_env(self, action: Tensor) -> Tensor:
        """Actions `[..., dims]` in (-1, 1), scaled to the bounds of the environment."""
        return self.center + self.scale * action

    def from_env(self, action: Tensor) -> Tensor:
        """The inverse of `to_env`."""
        return (action - self.center) / self.scale


class CategoricalActor(nn.Module):
    """A categorical over `actions`, from features; `mask_key` is the key of dict observations with allowed actions.

    The features are those of its own trunk `own`, or the critics' if it has none.
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
        self.mlp = StackedMLP(features if own is None else own.size, hidden, [actions], [0.01], activation)

    def forward(self, features: Tensor, obs: Tree = None) -> Categorical:
        """The policy at `features`; `obs` is used for its mask only."""
        mask = None if self.mask_key is None else obs[self.mask_key] > 0
        return Categorical(self.mlp(features)[0], mask)

    def uniform(self, like: Categorical) -> Categorical:
        """The uniform distribution over the actions that `like` allows."""
        allowed = like.logits > torch.finfo(like.logits.dtype).min
        return Categorical(torch.zeros_like(like.logits), allowed)


class Encoded(NamedTuple):
    """N transitions with the features `[N, D]` of observation and next observation, for the actor and for the critics.

    `critics` and `actor` have a gradient to the trunks that made them; `next_critics` are of the target critics' trunk.
    `obs` and `next_obs` are used for action masks only. `discount` includes the gamma of the algorithm. For n-step
    transitions with n > 1, the actor has features of the steps between too: `passed_actor` `[N, n - 1, D]`, with
    `passed_obs` and `passed_weight` `[N, n - 1]`, the weight of each.
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


class SoftConfig(memory.MemoryConfig, Protocol):
    """The fields of a soft actor-critic's Config that its batches depend on."""

    @property
    def batch_size(self) -> int:
        """Steps with a loss per gradient step."""

    @property
    def gamma(self) -> float:
        """The discount per step."""

    @property
    def n_steps(self) -> int:
        """Rewards before the bootstrap."""

    @property
    def sequence_length(self) -> int:
        """Steps of a sequence with a loss."""

    @property
    def burn_in(self) -> int:
        """Steps before them that only fill the memory."""


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


def policy_trunk(state: SoftState) -> memory.Trunk:
    """The trunk of the policy of a State with `actor` and `critics`: its own, or the critics' if it has none."""
    return state.critics.trunk if state.actor.trunk is None else state.actor.trunk


def reach(config: SoftConfig) -> int:
    """The steps after its first that each draw of `sample` needs: `n_steps`, or with a memory those of a sequence."""
    return config.n_steps if config.memory is None else config.burn_in + config.sequence_length


def sample(state: SoftState) -> Transitions | Trajectory:
    """A batch from a State's replay: `batch_size` transitions, or with a memory sequences with as many steps in total.

    A sequence also has `burn_in` steps before them and one step after them.
    """
    config, device = state.config, state.generator.device
    if config.memory is None:
        rows = state.replay.transitions(config.batch_size, config.gamma, config.n_steps, state.sampler, passed=True)
        return rows.to(device)
    count = max(1, config.batch_size // config.sequence_length)
    sequences = state.replay.sample(count, reach(config) + 1, state.sampler)
    return sequences.map(lambda x: x.to(device))


def encode(
    actor: SquashedActor | CategoricalActor,
    critics: Critics,
    target: Critics,
    batch: Transitions | Trajectory,
    gamma: float,
    burn_in: int = 0,
) -> Encoded:
    """The features of transitions, or of the transitions in sequences `[B, T]`, read with memory from their start.

    The first `burn_in` steps of a sequence only fill the memories, and the last is only a successor. Steps with mask 0
    are left out, and those cut by a time limit: the memory has not read their successor, which is not in the sequence.
    `gamma` is for sequences; the discount of transitions includes it.
    """
    if isinstance(batch, Transitions):
        features = critics.trunk(batch.obs)[0]
        with torch.no_grad():
            next_features = target.trunk(batch.next_obs)[0]
            own_trunk = critics.trunk if actor.trunk is None else actor.trunk
            next_own, passed = own_trunk(batch.next_obs)[0], None
            if batch.passed_weight is not None:
                size = batch.passed_weight.shape
                passed = own_trunk(tree_map(lambda x: x.flatten(0, 1), batch.passed))[0].unflatten(0, size)
        own = features.detach() if actor.trunk is None else actor.trunk(batch.obs)[0]
        rest = (batch.obs, batch.next_obs, batch.action, batch.reward, batch.discount)
        return Encoded(features, own, next_features, next_own, *rest, passed, batch.passed, batch.passed_weight)
    assert batch.mask is not None
    start = memory.starts(batch.cut)
    steps = batch.map(lambda x: x[:, burn_in:])
    trained = ((steps.mask > 0) & (steps.cut * steps.discount == 0))[:, :-1]  # type: ignore[operator]

    def now(x: Tensor) -> Tensor:
        return x[:, :-1][trained]

    def then(x: Tensor) -> Tensor:
        return x[:, 1:][trained]

    features = critics.trunk.sequence(batch.obs, start, burn_in)
    own = features.detach() if actor.trunk is None else actor.trunk.sequence(batch.obs, start, burn_in)
    with torch.no_grad():
        next_features = target.trunk.sequence(batch.obs, start, burn_in)
    return Encoded(
        now(features), now(own), then(next_features), then(own.detach()), tree_map(now, steps.obs),
        tree_map(then, steps.obs), now(steps.action), now(steps.reward), gamma * now(steps.discount),
    )  # fmt: skip

"""Compiled twins of losses: the loss is written once, readably; small networks on a CPU run its compiled form.

    @twin(twins.q_loss)
    def q_loss(network, batch, next_q, next_action): ...

Each twin takes the arguments of the readable loss. It runs the network's `vjp` and a loss of `ops.fused`, both
differentiated by hand, which is faster than autograd there. It returns None where it does not apply:
another device, activation or head. A test compares each with its readable loss, values and gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from foresight.data.replay import Transitions
from foresight.data.trajectory import Trajectory, batch_edges
from foresight.nets.actor_critic import ActorCritic
from foresight.nets.critics import Critics, Encoded, SquashedActor
from foresight.nets.heads import CategoricalHead, PopArtHead, TanhNormalHead
from foresight.nets.outputs import Categorical
from foresight.nets.q_network import QNetwork
from foresight.nets.sequence.memory import MemoryActorCritic
from foresight.nets.sequence.vla_actor_critic import VLAActorCritic
from foresight.nets.values import Values
from foresight.ops import advantage
from foresight.ops.fused import clipped, double_q, soft, weighted
from foresight.ops.fused.adam import Adam
from foresight.ops.fused.rmsprop import RMSProp
from foresight.training import optim

P = ParamSpec("P")
R = TypeVar("R")
Backward = Callable[[], object]  # computes the gradients of a loss


def twin(compiled: Callable[..., R | None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a readable loss: run `compiled` instead, unless it returns None."""

    def decorate(readable: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(readable)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            found = compiled(*args, **kwargs)
            return readable(*args, **kwargs) if found is None else found

        return run

    return decorate


class Weighing(Protocol):
    """The fields of a Config that the loss of an actor-critic has."""

    @property
    def value_coef(self) -> float:
        """The weight of the value loss."""

    @property
    def entropy_coef(self) -> float:
        """The weight of the entropy."""

    @property
    def normalize_advantage(self) -> bool:
        """Whether advantages are normalized over a batch or minibatch."""

    @property
    def max_grad_norm(self) -> float:
        """The bound of the gradient norm."""


class Coefficients(Weighing, Protocol):
    """The further fields of PPO's."""

    @property
    def clip_value(self) -> float | None:
        """How far a value may move; None: not limited."""

    @property
    def target_kl(self) -> float | None:
        """The divergence that ends the epochs; None: nothing does."""

    @property
    def critic_warmup(self) -> int:
        """The first updates of a VLA that train its value head only."""

    @property
    def epochs(self) -> int:
        """Passes over a rollout."""

    @property
    def minibatches(self) -> int:
        """Gradient steps of an epoch."""


class Clipped(Protocol):
    """The State of PPO, as far as its loss needs it."""

    network: ActorCritic | MemoryActorCritic | VLAActorCritic

    @property
    def config(self) -> Coefficients:
        """The algorithm's Config."""


def clipped_objective(state: Clipped, batch: Trajectory, clip: float) -> tuple[Backward, Tensor] | None:
    """The twin of `ppo.objective`, for one categorical action and separate trunks, without PopArt."""
    config, network = state.config, state.network
    scaled = isinstance(network.value_head, PopArtHead)
    if scaled or not isinstance(network.policy_head, CategoricalHead) or (found := network.vjp(batch.obs)) is None:
        return None
    assert batch.logprob is not None and batch.value is not None
    output, values, back = found
    assert isinstance(output, Categorical)  # of a CategoricalHead
    grad_logits, grad_value, metrics = clipped.clipped_objective(
        output.logits, values.value, batch.action, batch.logprob, batch.extras["advantage"], batch.extras["target"],
        batch.value, clip, config.clip_value, config.value_coef, config.entropy_coef, config.normalize_advantage,
    )  # fmt: skip
    return lambda: back(grad_logits, grad_value), metrics


class Stepping(Clipped, Protocol):
    """The State of PPO, as far as its epochs need it."""

    optimizer: torch.optim.Adam
    shuffler: torch.Generator


def clipped_epochs(state: Stepping, data: Trajectory, clip: float) -> Tensor | None:
    """The twin of `ppo.epochs`, for what `clipped_objective` applies to, if all layers are small."""
    config, network, optimizer = state.config, state.network, state.optimizer
    if config.target_kl is not None or config.critic_warmup or not isinstance(network, ActorCritic):
        return None
    if (found := network.small_members(data.obs)) is None:
        return None
    flat, policy, value, relu = found
    if (moments := optim.only_moments(optimizer, flat)) is None:
        return None
    assert data.logprob is not None and data.value is not None
    steps = data.obs, data.action, data.logprob, data.extras["advantage"], data.extras["target"], data.value
    clipping = clipped.Clipping(
        clip, math.inf if config.clip_value is None else config.clip_value, config.value_coef, config.entropy_coef,
        config.normalize_advantage, config.max_grad_norm,
    )  # fmt: skip
    adam, rows = _adam(optimizer, moments), len(data.reward)
    order = torch.cat([torch.randperm(rows, generator=state.shuffler) for _ in range(config.epochs)])
    starts = batch_edges(rows, optim.steps_of(rows, config.minibatches))[:-1]
    edges = [rows * epoch + start for epoch in range(config.epochs) for start in starts]
    metrics = clipped.clipped_epochs(policy, value, relu, flat, steps, order, [*edges, len(order)], clipping, adam)
    moments["step"] += len(edges)
    return metrics


class Weighted(Protocol):
    """The State of A2C, as far as its gradient step needs it."""

    network: ActorCritic | MemoryActorCritic
    optimizer: torch.optim.RMSprop

    @property
    def config(self) -> Weighing:
        """The algorithm's Config."""


def weighted_step(state: Weighted, batch: Trajectory, advantages: Tensor, target: Tensor) -> Tensor | None:
    """The twin of `a2c.descend`, for a categorical action and two small networks over vectors."""
    config, network, optimizer, real = state.config, state.network, state.optimizer, batch.mask
    if not isinstance(network, ActorCritic) or real is None:
        return None
    if (found := network.small_members(batch.obs.flatten(0, 1) if isinstance(batch.obs, Tensor) else None)) is None:
        return None
    flat, policy, value, relu = found
    if (squares := optim.only_squares(optimizer, flat)) is None:
        return None
    columns = [x.flatten(0, 1) for x in (batch.obs, batch.action, advantages, target)]
    if not (kept := real.flatten() > 0).all():
        columns = [x[kept] for x in columns]
    if config.normalize_advantage:
        columns[2] = advantage.normalize(columns[2])
    group = optimizer.param_groups[0]
    weights = weighted.Weights(config.value_coef, config.entropy_coef, config.max_grad_norm)
    rmsprop = RMSProp(squares["square_avg"].numpy(), group["lr"], group["alpha"], group["eps"])
    metrics = weighted.weighted_step(policy, value, relu, flat, columns, weights, rmsprop)
    squares["step"] += 1
    return metrics


def q_loss(
    network: QNetwork, batch: Transitions, next_q: Values, next_action: Tensor
) -> tuple[Backward, Tensor, Tensor, Tensor | None] | None:
    """The twin of `dqn.q_loss`, for scalar values without dueling streams and without importance weights."""
    if batch.weight is not None or (found := network.vjp(batch.obs)) is None:
        return None
    q, back = found
    grad, metrics = double_q.huber_q(q, batch.action, batch.reward, batch.discount, next_q.mean(), next_action)
    return lambda: back(grad), metrics[0], metrics[1], None


class DoubleConfig(Protocol):
    """The fields of a Config that DQN's gradient step has."""

    @property
    def double(self) -> bool:
        """Whether the online network selects the next action."""

    @property
    def max_grad_norm(self) -> float:
        """The bound of the gradient norm."""


class Learner(Protocol):
    """The State of DQN, as far as its gradient step needs it."""

    network: QNetwork
    target: QNetwork
    optimizer: torch.optim.Adam

    @property
    def config(self) -> DoubleConfig:
        """The algorithm's Config."""


def q_step(state: Learner, batch: Transitions) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The twin of `dqn.descend`, for what `q_loss` applies to, if observations are vectors and no action is masked."""
    online, target = state.network.member(batch.obs), state.target.member(batch.next_obs)
    if batch.weight is not None or online is None or target is None:
        return None
    body, optimizer, config = state.network.body, state.optimizer, state.config
    flat, relu = body.flat, body.activation == "relu"
    if (moments := optim.only_moments(optimizer, flat)) is None:
        return None
    columns = batch.obs, batch.action, batch.reward, batch.discount, batch.next_obs
    adam = _adam(optimizer, moments)
    metrics = double_q.q_step(online, target, relu, columns, config.double, config.max_grad_norm, adam)
    torch.autograd.graph.increment_version(flat)
    moments["step"] += 1
    return metrics[0], metrics[1], None


class PolicyConfig(Protocol):
    """The field of a Config that SAC's gradient steps have."""

    @property
    def policy_every(self) -> int:
        """Gradient steps of the critics between two of the policy."""


class SoftLearner(Protocol):
    """The State of SAC, as far as its gradient steps need it."""

    actor: SquashedActor
    critics: Critics
    target: Critics
    log_alpha: torch.nn.Parameter
    actor_optimizer: torch.optim.Adam
    critic_optimizer: torch.optim.Adam
    inner: torch.Generator
    gradient_steps: int

    @property
    def config(self) -> PolicyConfig:
        """The algorithm's Config."""


def soft_step(state: SoftLearner, encoded: Encoded) -> dict[str, Tensor] | None:
    """The twin of `sac.descend`, for features without gradient, one-step targets and noise that no state shapes."""
    actor, critics = state.actor, state.critics
    features = encoded.critics, encoded.next_critics, encoded.actor, encoded.next_actor
    if not isinstance(actor.head, TanhNormalHead) or any(x.requires_grad for x in features):
        return None
    policy, online = actor.mlp.members(encoded.actor), critics.mlp.members(encoded.critics)
    following = state.target.mlp.members(encoded.next_critics)
    if encoded.passed_weight is not None or policy is None or online is None or following is None:
        return None
    optimizers, weights = (state.critic_optimizer, state.actor_optimizer), (critics.mlp.flat, actor.mlp.flat)
    held, other = (optim.only_moments(*pair) for pair in zip(optimizers, weights, strict=True))
    if held is None or other is None:
        return None
    alpha, due = state.log_alpha.detach().exp(), state.gradient_steps % state.config.policy_every == 0
    (rows, dims), generator = encoded.action.shape, state.inner
    noises = [torch.empty(count, dims).normal_(generator=generator) for count in (rows, rows if due else 0)]
    columns = *features, actor.from_env(encoded.action), encoded.reward, encoded.discount, *noises
    metrics = soft.soft_step(
        policy[0], online, following, actor.mlp.activation == "relu", critics.mlp.activation == "relu", weights[0],
        columns, actor.head.bounds, alpha.item(), _adam(optimizers[0], held), _adam(optimizers[1], other),
    )  # fmt: skip
    found = {"critic_loss": metrics[0], "q": metrics[1], "alpha": alpha}
    torch.autograd.graph.increment_version(weights[0])
    held["step"] += 1
    if due:
        torch.autograd.graph.increment_version(weights[1])
        other["step"] += 1
        found["entropy"] = metrics[2]
    return found


def _adam(optimizer: torch.optim.Adam, moments: dict[str, Tensor]) -> Adam:
    group = optimizer.param_groups[0]
    return Adam(
        moments["exp_avg"].numpy(), moments["exp_avg_sq"].numpy(), int(moments["step"]), group["lr"], group["betas"],
        group["eps"],
    )  # fmt: skip


def critic_loss(
    critics: Critics,
    features: Tensor,
    action: Tensor,
    reward: Tensor,
    discount: Tensor,
    next_q: Sequence[Tensor],
    next_logp: Tensor,
    alpha: Tensor,
) -> tuple[Backward, Tensor, Tensor] | None:
    """The twin of `sac.critic_loss`, for features without gradient."""
    if (found := critics.vjp(features, action)) is None:
        return None
    q, back = found
    grads, metrics = soft.soft_q(q, reward, discount, next_q, next_logp, alpha.item())
    return lambda: back(grads), metrics[0], metrics[1]

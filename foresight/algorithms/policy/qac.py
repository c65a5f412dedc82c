"""QAC: Policy Gradient Methods for Reinforcement Learning with Function Approximation, Sutton et al. 2000.

    actor    ∇J(θ) = E_π[ q_w(s_t, a_t) ∇log π_θ(a_t|s_t) ]
    critic   minimize over w  E_π[ ½ (q_w(s_t, a_t) - G_t)² ],   G_t = r_t + γ q_w(s_{t+1}, a_{t+1}), a constant

The simplest actor-critic: the policy gradient theorem with an action value learned by Sarsa, on two time
scales (Konda & Tsitsiklis 2000, "Actor-Critic Algorithms"; Zhao 2025, *Mathematical Foundations of Reinforcement
Learning*, algorithm 10.1). No baseline is subtracted from q, which is why its gradient is noisy; `a2c` has one.

What is kept: on-policy segments, the next action taken in Sarsa's target, separate learning rates. Two options:
`trace_lambda` above 0 makes the target the λ-return (Sarsa(λ)); `all_actions` sums the actor's gradient over all
actions, Σ_a π(a|s) q_w(s, a), instead of sampling one: the same expectation without the sampling noise (Allen et al.
2017, "Mean Actor Critic", arXiv:1709.00503).

Where there is no next action, at a time limit and at the end of a segment, the target uses the mean over the policy,
Σ_a π(a|s) q_w(s, a). Left out: compatible features (theorem 2), for which q_w must be linear in ∇log π; continuous
actions, for which one network cannot output all q.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight import errors
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.errors import UserError
from foresight.nets import encoders
from foresight.nets.actor_critic import ActorCritic
from foresight.ops import policy, returns, schedules, targets, value
from foresight.training import optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "entropy", "value_loss")


@dataclass(frozen=True)
class Config:
    """The papers are theory and have no hyperparameters: defaults are ours, tuned on CartPole-v1."""

    steps: int = 200_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 8  # parallel environments
    rollout_steps: int = 16  # steps of each environment between two updates
    learning_rate: float = 1e-3  # Adam, of the actor: the slower time scale
    anneal_lr: bool = False  # anneal the actor's learning rate linearly to 0
    value_learning_rate: float = 3e-3  # Adam, of the critic: the faster time scale
    gamma: float = 0.99  # discount per step
    trace_lambda: float = 0.0  # λ of the critic's target; 0 is Sarsa
    all_actions: bool = False  # the actor's gradient summed over all actions; Allen et al. 2017
    entropy_coef: float = 0.0  # weight of the entropy bonus
    max_grad_norm: float = 0.5  # bound of the norm of each of the two gradients
    hidden: tuple[int, ...] = (64, 64)  # hidden layers of the two networks over vectors
    activation: str = "tanh"  # activation of the two networks over vectors
    images: str = "nature"  # the trunk over pixels: "nature", "nips", "impala", "vit" or "swin"
    threads: int = 1  # torch threads on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved."""

    config: Config
    network: ActorCritic  # its "value" is q(s, ·) `[..., A]`
    policy_optimizer: torch.optim.Adam
    value_optimizer: torch.optim.Adam
    generator: torch.Generator  # samples the actions
    step: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizers and generator. Raises UserError for spaces and settings that are not supported."""
    errors.at_least(1, config, "num_envs", "rollout_steps")
    require_end(spaces, config.gamma)
    if not isinstance(spaces.action, gs.Discrete):
        raise UserError(
            f"qac learns a value per action, so it needs Discrete actions, not {spaces.action}. Use a2c, trpo or ppo."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head = encoders.policy_head(spaces.action)
        body = encoders.separate_body(
            spaces.obs,
            outputs=(head.width, head.width),
            gains=(0.01, 1.0),
            hidden=config.hidden,
            activation=config.activation,
            images=config.images,
        )
        network = ActorCritic(body, head, nn.Identity(), None, encoders.mask_key(spaces.obs)).to(device)
    return State(
        config,
        network,
        torch.optim.Adam(network.policy_parameters(), lr=config.learning_rate),
        torch.optim.Adam(network.value_parameters(), lr=config.value_learning_rate),
        generator=torch.Generator(device).manual_seed(config.seed),
    )


def q_values(network: ActorCritic, obs: Tree) -> Tensor:
    """q(s, ·) `[..., A]`: the network's value head."""
    values: Any = network.value(obs)
    return values


@torch.inference_mode()
def act(state: State, obs: Tree, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """An action for every row of `obs`: sampled if `explore`, else the mode."""
    output = state.network.policy(obs)
    return output.sample(state.generator) if explore else output.mode(), {}, carry


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree) -> tuple[Trajectory, Tree]:
    """`rollout_steps` steps of every environment from `obs` on; also the next observation.

    `value` is q(s_t, a_t), `next_value` that of the next pair.
    """
    network = state.network
    choose, device = functools.partial(act, state, explore=True), state.generator.device
    segment = collect.segment(env, obs, choose, state.config.rollout_steps, device, state.episodes)
    state.step += segment.trajectory.reward.numel()
    taken = targets.taken(q_values(network, segment.trajectory.obs), segment.trajectory.action)
    next_value = collect.successors(
        segment, taken, lambda x, _: targets.expected(q_values(network, x), network.policy(x).mean())
    )
    return segment.trajectory.replace(value=taken, next_value=next_value), segment.last


def actor_loss(state: State, steps: Trajectory) -> tuple[Tensor, Tensor]:
    """`(loss, mean entropy)` over steps `[N]`; minus the gradient of the loss is the policy gradient."""
    config = state.config
    output = state.network.policy(steps.obs)
    with torch.no_grad():
        q = q_values(state.network, steps.obs)
    if config.all_actions:
        loss = -targets.expected(q, output.mean()).mean()
    else:
        loss = policy.reinforce(output.logp(steps.action), targets.taken(q, steps.action)).mean()
    entropy = output.entropy().mean()
    return loss - config.entropy_coef * entropy, entropy.detach()


def critic_loss(state: State, steps: Trajectory, target: Tensor) -> Tensor:
    """Half the mean squared error of q(s_t, a_t) over steps `[N]`."""
    return value.squared_loss(targets.taken(q_values(state.network, steps.obs), steps.action), target).mean()


def update(state: State, batch: Trajectory, progress: float = 0.0) -> dict[str, float]:
    """One step of the actor and one of the critic, both with the old q; `progress` anneals the actor's rate."""
    config, mask = state.config, batch.mask
    assert batch.next_value is not None and mask is not None
    rate = schedules.linear(progress, config.learning_rate, 0.0) if config.anneal_lr else config.learning_rate
    for group in state.policy_optimizer.param_groups:
        group["lr"] = rate
    real = mask > 0
    if not optim.steps_of(int(real.sum())):  # every environment only reset
        return {"learning_rate": rate}
    target = returns.lambda_return(
        batch.reward, config.gamma * batch.discount, batch.cut, batch.next_value, config.trace_lambda, mask
    )
    steps, target = batch.map(lambda x: x[real]), target[real]
    policy_loss, entropy = actor_loss(state, steps)
    value_loss = critic_loss(state, steps, target)
    optim.descend(state.policy_optimizer, policy_loss.backward, config.max_grad_norm)
    optim.descend(state.value_optimizer, value_loss.backward, config.max_grad_norm)
    metrics = torch.stack([policy_loss.detach(), value_loss.detach(), entropy]).tolist()
    return {**dict(zip(("policy_loss", "value_loss", "entropy"), metrics, strict=True)), "learning_rate": rate}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Collect a segment, update both once, until `steps`. A given `state` resumes with new episodes."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    obs = env.reset(config.seed + state.step)
    while state.step < config.steps:
        progress = state.step / config.steps
        batch, obs = rollout(state, env, obs)
        metrics = update(state, batch, progress)
        yield state.step, {**metrics, **state.episodes.metrics()}, state

"""Off-PAC: Off-Policy Actor-Critic, Degris, White & Sutton 2012 (arXiv:1205.4839).

A behavior policy b acts, and a target policy π is trained on its experience:

    actor    ∇J(θ) ≈ E_b[ ρ_t (r_t + γ (λ G_{t+1} + (1 - λ) V_w(s_{t+1})) - V_w(s_t)) ∇log π_θ(a_t|s_t) ]
    critic   minimize over w  E_b[ ½ (V_w(s_t) - G_t)² ],  G a constant
    where    G_t - V(s_t) = ρ_t δ_t + γ λ min(1, ρ_t) (G_{t+1} - V(s_{t+1})),   δ_t = r_t + γ V(s_{t+1}) - V(s_t)

and ρ_t = π_θ(a_t|s_t) / b(a_t|s_t), so with λ = 0 both updates are along ρ_t δ_t (the paper's algorithm 1 with λ = 0;
Zhao 2025, *Mathematical Foundations of Reinforcement Learning*, algorithm 10.3).

What is kept: the objective J(θ) = Σ_s d_b(s) V^π(s), states weighted as b visits them; the approximate gradient of the
paper's theorem 1, which leaves out ∇Q; separate learning rates. The behavior policy is b = (1 - ε) π + ε · uniform over
the allowed actions, so its probabilities are known exactly: `epsilon` 1 is the paper's uniform behavior policy, 0 is
on-policy, where every ρ is 1. Old segments stay in a replay with their behavior probabilities, and each new segment is
followed by updates on `replay_ratio` batches of old ones: π has changed since then, and ρ corrects for that too.

Differences: the forward view of V-trace (`ops.returns.vtrace`; Espeholt et al. 2018, arXiv:1802.01561), whose traces
are bounded by 1, in place of eligibility traces with unbounded ρ; and `max_ratio` bounds ρ, as the replay may be far
from π. So V is the value of π if no ρ exceeds `max_ratio`, and otherwise that of the policy ∝ min(`max_ratio` b, π).
Left out: the gradient correction of GTD(λ), whose second weights assume linear features; continuous actions.

A time limit is not a termination: its step bootstraps with the value of its final observation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight import errors
from foresight.data.replay import Replay
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.errors import UserError
from foresight.nets import encoders, heads
from foresight.nets.actor_critic import ActorCritic
from foresight.nets.outputs import Categorical
from foresight.ops import policy, returns, schedules, value
from foresight.training import optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "entropy", "value_loss", "ratio")


@dataclass(frozen=True)
class Config:
    """The paper has small environments and linear features: defaults are ours, tuned on CartPole-v1."""

    steps: int = 200_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 8  # parallel environments
    rollout_steps: int = 16  # steps of each environment between two updates
    epsilon: float = 0.1  # weight of the uniform policy in the behavior policy: 1 in the paper's §4, 0 is on-policy
    replay_segments: int = 64  # segments kept per environment
    replay_ratio: int = 2  # updates on replayed segments after each new segment, in batches of the same size
    max_ratio: float = 2.0  # bound of ρ, for actor and critic; traces are bounded by 1
    learning_rate: float = 1e-3  # Adam, of the actor
    anneal_lr: bool = False  # anneal the actor's learning rate linearly to 0
    value_learning_rate: float = 3e-3  # Adam, of the critic
    gamma: float = 0.99  # discount per step
    trace_lambda: float = 0.9  # λ of the traces
    entropy_coef: float = 0.0  # weight of the target policy's entropy
    max_grad_norm: float = 0.5  # bound of the norm of each of the two gradients
    hidden: tuple[int, ...] = (64, 64)  # hidden layers of the two networks over vectors
    activation: str = "tanh"  # activation of the two networks over vectors
    images: str = "nature"  # the trunk over pixels: "nature", "nips", "impala", "vit" or "swin"
    threads: int = 1  # torch threads on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved."""

    config: Config
    network: ActorCritic
    policy_optimizer: torch.optim.Adam
    value_optimizer: torch.optim.Adam
    replay: Replay  # a stream per environment, with behavior log-probabilities and the successor of every step
    generator: torch.Generator  # samples the actions
    sampler: torch.Generator  # samples the replay, on the CPU
    step: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones, of the behavior policy


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizers, replay and generators. Raises UserError for spaces and settings that are not supported."""
    _check(config)
    require_end(spaces, config.gamma)
    if not isinstance(spaces.action, gs.Discrete):
        raise UserError(
            "off_policy_ac mixes its policy with a uniform one, so it needs Discrete actions, "
            f"not {spaces.action}. Use sac."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head, value_head = encoders.policy_head(spaces.action), heads.ScalarHead()
        body = encoders.separate_body(
            spaces.obs,
            outputs=(head.width, value_head.width),
            gains=(0.01, 1.0),
            hidden=config.hidden,
            activation=config.activation,
            images=config.images,
        )
        network = ActorCritic(body, head, value_head, None, encoders.mask_key(spaces.obs)).to(device)
    return State(
        config,
        network,
        torch.optim.Adam(network.policy_parameters(), lr=config.learning_rate),
        torch.optim.Adam(network.value_parameters(), lr=config.value_learning_rate),
        Replay(config.replay_segments * config.rollout_steps),
        generator=torch.Generator(device).manual_seed(config.seed),
        sampler=torch.Generator().manual_seed(config.seed),
    )


def behavior(state: State, obs: Tree) -> Categorical:
    """b = (1 - ε) π + ε · uniform over the actions that are not masked."""
    target = state.network.policy(obs)
    assert isinstance(target, Categorical)  # see `build`
    allowed = (target.logits > torch.finfo(target.logits.dtype).min).float()
    uniform = allowed / allowed.sum(-1, keepdim=True)
    mixed = (1 - state.config.epsilon) * target.mean() + state.config.epsilon * uniform
    return Categorical(mixed.log(), mask=allowed > 0)


@torch.inference_mode()
def act(state: State, obs: Tree, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """An action for every row of `obs`: sampled from the behavior policy if `explore`, else the mode of π."""
    return behavior(state, obs).sample(state.generator) if explore else state.network.policy(obs).mode(), {}, carry


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree) -> tuple[Trajectory, Tree]:
    """`rollout_steps` steps of every environment from `obs` on, by the behavior policy; also the next observation.

    The steps have the `logprob` of the behavior policy and their successors, `extras["next_obs"]`. The last one has
    `cut` 1, so that no trace leaves the segment, wherever it is in the replay.
    """
    choose, device = functools.partial(act, state, explore=True), state.generator.device
    segment = collect.segment(env, obs, choose, state.config.rollout_steps, device, state.episodes)
    state.step += segment.trajectory.reward.numel()
    batch = segment.trajectory
    cut = batch.cut.clone()
    cut[:, -1] = 1
    logprob = behavior(state, batch.obs).logp(batch.action)
    extras = {"next_obs": collect.successor_obs(segment)}
    return batch.replace(cut=cut, logprob=logprob, extras=extras), segment.last


def losses(state: State, batch: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
    """`(actor's loss, critic's loss, [entropy, mean ρ])` of steps `[B, T]` of any behavior policy."""
    config, network, mask = state.config, state.network, batch.mask
    assert batch.logprob is not None and mask is not None
    real = mask > 0
    output, values = network.policy(batch.obs), network.value(batch.obs).value
    logprob = output.logp(batch.action)
    with torch.no_grad():
        ratio = policy.ratio(logprob, batch.logprob)
        advantages, target = returns.vtrace(
            batch.reward, config.gamma * batch.discount, batch.cut, values,
            network.value(batch.extras["next_obs"]).value, ratio, config.trace_lambda,
            clip_rho=config.max_ratio, clip_pg=config.max_ratio, mask=mask,
        )  # fmt: skip
    policy_loss = policy.reinforce(logprob, advantages)[real].mean()
    value_loss = value.squared_loss(values, target)[real].mean()
    entropy = output.entropy()[real].mean()
    statistics = torch.stack([entropy.detach(), ratio[real].mean()])
    return policy_loss - config.entropy_coef * entropy, value_loss, statistics


def update(state: State, batch: Trajectory, progress: float = 0.0) -> dict[str, float]:
    """One step of the actor and one of the critic, with the same values; `progress` anneals the actor's rate."""
    config = state.config
    rate = schedules.linear(progress, config.learning_rate, 0.0) if config.anneal_lr else config.learning_rate
    for group in state.policy_optimizer.param_groups:
        group["lr"] = rate
    assert batch.mask is not None
    if not optim.steps_of(int(batch.mask.sum())):  # every environment only reset
        return {"learning_rate": rate}
    policy_loss, value_loss, statistics = losses(state, batch)
    optim.descend(state.policy_optimizer, policy_loss.backward, config.max_grad_norm)
    optim.descend(state.value_optimizer, value_loss.backward, config.max_grad_norm)
    metrics = [policy_loss.item(), value_loss.item(), *statistics.tolist()]
    return {**dict(zip(("policy_loss", "value_loss", "entropy", "ratio"), metrics, strict=True)), "learning_rate": rate}


def learn(state: State, batch: Trajectory) -> dict[str, float]:
    """Update on a new segment, store it, and update on stored ones; returns the metrics of the last update."""
    config = state.config
    progress = max(state.step - batch.reward.numel(), 0) / config.steps
    metrics = update(state, batch, progress)
    if config.replay_ratio:
        state.replay.add(batch.map(lambda x: x.cpu()))
    for _ in range(config.replay_ratio):
        old = state.replay.sample(config.num_envs, config.rollout_steps, state.sampler)
        metrics = update(state, old.map(lambda x: x.to(state.generator.device)), progress)
    return metrics


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Collect a segment, update on it and on old ones, until `steps`. A given `state` resumes with new episodes."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    obs = env.reset(config.seed + state.step)
    while state.step < config.steps:
        batch, obs = rollout(state, env, obs)
        metrics = learn(state, batch)
        yield state.step, {**metrics, **state.episodes.metrics()}, state


def _check(config: Config) -> None:
    errors.at_least(1, config, "num_envs", "rollout_steps", "replay_segments")
    errors.at_least(0, config, "replay_ratio")
    if not 0 <= config.epsilon <= 1:
        raise UserError(f"epsilon must be between 0 and 1, not {config.epsilon}.")
    if config.max_ratio < 1:
        raise UserError(f"max_ratio must be at least 1, not {config.max_ratio}: on-policy, every ratio is 1.")

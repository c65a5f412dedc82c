"""A2C: Asynchronous Methods for Deep Reinforcement Learning, Mnih et al. 2016 (arXiv:1602.01783), synchronous.

    maximize  E_t[ log π(a_t|s_t) A_t ]  -  c₁ E_t[ ½ (V(s_t) - G_t)² ]  +  c₂ E_t[ H(π(·|s_t)) ]

where G_t = r_t + γ r_{t+1} + ... + γᵏ V(s_{t+k}) extends to the end of the segment; A_t = G_t - V(s_t) has no gradient.

What is kept (§4, algorithm S3): segments of a few steps; every step bootstraps from the end of its segment; one
gradient step per segment; the entropy bonus; RMSProp without momentum. Instead of running asynchronous threads, all
environments step together and one update waits for all of them, as in the A2C of OpenAI's baselines (2017), which found
it no worse. `gae_lambda` below 1 is generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438); 1 is the
paper's estimator.

A time limit is not a termination: its step bootstraps with the value of its final observation. With `memory` (the
paper's LSTM, §5.1, or another) the policy has a recurrent state, the carry, which is reset where an episode ends, in
acting and in training. Left out: asynchrony.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foresight import errors
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.nets import encoders, heads, normalize
from foresight.nets.actor_critic import ActorCritic, Sampled
from foresight.nets.sequence import memory
from foresight.nets.sequence.memory import MemoryActorCritic
from foresight.ops import advantage, diagnostics, policy, returns, schedules, value
from foresight.training import optim, twins
from foresight.training.twins import twin

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "entropy", "value_loss", "explained_variance")
ACTING = ("network",)  # the fields of State that are sent to actors


@dataclass(frozen=True)
class Config:
    """Defaults: stable-baselines3's A2C ("SB3"), which presets of rl-baselines3-zoo start from."""

    steps: int = 500_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 8  # parallel environments; the paper has 16 threads
    rollout_steps: int = 5  # steps of each environment between two updates; §5.1 (t_max)
    learning_rate: float = 7e-4  # RMSProp; SB3
    anneal_lr: bool = False  # anneal the learning rate linearly to 0; the paper's Atari setting (§8)
    decay: float = 0.99  # decay of RMSProp's mean square; §8
    optimizer_epsilon: float = 1e-5  # added to RMSProp's root mean square; SB3
    gamma: float = 0.99  # discount per step; §8
    gae_lambda: float = 1.0  # λ of GAE; 1 is the paper's n-step return
    normalize_advantage: bool = False  # to mean 0 and std 1 over the batch; SB3
    entropy_coef: float = 0.0  # c₂: weight of the entropy bonus; 0.01 on Atari (§8)
    value_coef: float = 1.0  # c₁: weight of the value loss, ½ squared error; SB3's vf_coef 0.5 (no ½ there)
    max_grad_norm: float = 0.5  # bound of the global gradient norm; SB3
    normalize_obs: bool = False  # subtract the running mean, divide by the running std, clip to ±10
    normalize_reward: bool = False  # divide by the running std of the discounted return, clip to ±10
    hidden: tuple[int, ...] = (64, 64)  # hidden layers of the MLPs over vectors; SB3
    activation: str = "tanh"  # activation of the hidden layers; SB3
    images: str = "nature"  # the trunk over pixels: "nature", "nips", "impala", "vit" or "swin"
    memory: str | None = None  # "gru", "lstm", "gtrxl" or "transformer", over the trunk; see nets.sequence.memory
    memory_size: int = 64  # width of the memory
    memory_layers: int = 1  # layers of the memory
    memory_heads: int = 4  # attention heads of the memory
    memory_window: int = 64  # past env steps in the attention window
    backbone: str = "shared"  # one "shared" memory, two "separate" ones, or one for the "actor" or "critic" only
    log_std: float = 0.0  # initial log standard deviation of continuous actions
    threads: int = 1  # torch threads on a CPU; small networks are fastest with 1, pixels with 0 (one per core)


@dataclass
class State:
    """Everything that is saved. `network` includes the observation statistics, so a policy is saved with them."""

    config: Config
    network: ActorCritic | MemoryActorCritic
    optimizer: torch.optim.RMSprop
    generator: torch.Generator  # samples the actions
    reward_scaler: normalize.RewardScaler | None = None
    step: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network, optimizer and generator. Raises UserError for spaces and settings that are not supported."""
    errors.at_least(1, config, "num_envs", "rollout_steps")
    errors.share(config, "decay")
    require_end(spaces, config.gamma)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head, value_head = encoders.policy_head(spaces.action, config.log_std), heads.ScalarHead()
        normalizer = encoders.normalizer(spaces.obs) if config.normalize_obs else None
        network = memory.actor_critic(
            spaces.obs, head, value_head, memory.shape_of(config), config.backbone,
            config.hidden, config.activation, config.images, normalizer,
        ).to(device)  # fmt: skip
    return State(
        config,
        network,
        torch.optim.RMSprop(
            network.parameters(), lr=config.learning_rate, alpha=config.decay, eps=config.optimizer_epsilon
        ),
        generator=torch.Generator(device).manual_seed(config.seed),
        reward_scaler=normalize.reward_scaler(config, device),
    )


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """An action for every row of `obs`: sampled if `explore`, else the mode. Use `reset_carry` at a cut."""
    output, carry = state.network.step(obs, carry)
    return output.sample(state.generator) if explore else output.mode(), {}, carry


reset_carry = memory.reset_carry
restart = normalize.restart


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree, carry: Tree = None) -> tuple[Trajectory, Tree, Tree]:
    """`rollout_steps` steps of every environment from `obs` on, with values; also the next observation and the memory.

    With a memory, `extras` has `carry` `[B, ...]`, its state before the first step, and `start` `[B, T]`, 1 where an
    episode begins and the memory is reset.
    """
    config, network = state.config, state.network
    if carry is None:
        carry = network.initial(env.num_envs)
    choose, device = Sampled(network, state.generator), state.generator.device
    segment = collect.segment(env, obs, choose, config.rollout_steps, device, state.episodes, carry)
    steps, start = segment.trajectory, memory.starts(segment.trajectory.cut)
    state.step += steps.reward.numel()
    values = network.read(steps.obs, carry, start)[1].value
    next_value = collect.successors(segment, values, lambda obs, carry: network.value(obs, carry).value)
    extras = {} if carry is None else {"carry": carry, "start": start}
    return steps.replace(value=values, next_value=next_value, extras=extras), segment.last, segment.carry


@twin(twins.weighted_step)
def descend(state: State, batch: Trajectory, advantages: Tensor, target: Tensor) -> Tensor:
    """One gradient step on the real steps of a segment: policy loss, value loss and entropy, `[3]`.

    `advantages` and `target` are `[B, T]`.
    """
    config, network = state.config, state.network
    assert batch.mask is not None
    output, values, _ = network.read(batch.obs, batch.extras.get("carry"), batch.extras.get("start"))
    real = batch.mask > 0
    columns = (output.logp(batch.action), output.entropy(), values.value, advantages, target)
    logprob, entropies, predicted, advantages, target = (x[real] for x in columns)
    if config.normalize_advantage:
        advantages = advantage.normalize(advantages)
    policy_loss = policy.reinforce(logprob, advantages).mean()
    value_loss = value.squared_loss(predicted, target).mean()
    entropy = entropies.mean()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    optim.descend(state.optimizer, loss.backward, config.max_grad_norm)
    return torch.stack([policy_loss, value_loss, entropy]).detach()


def update(state: State, batch: Trajectory, progress: float = 0.0) -> dict[str, float]:
    """One gradient step on one segment with values; `progress` in [0, 1] anneals the learning rate."""
    config, network = state.config, state.network
    rate = schedules.linear(progress, config.learning_rate, 0.0) if config.anneal_lr else config.learning_rate
    for group in state.optimizer.param_groups:
        group["lr"] = rate

    mask = batch.mask
    assert batch.value is not None and batch.next_value is not None and mask is not None
    reward = normalize.scaled(state.reward_scaler, batch)
    real = mask > 0
    if not optim.steps_of(int(real.sum())):  # every environment only reset
        return {"learning_rate": rate}
    advantages, target = returns.gae(
        reward, config.gamma * batch.discount, batch.cut, batch.value, batch.next_value, config.gae_lambda, mask
    )
    losses = descend(state, batch, advantages, target)
    if network.normalizer is not None:
        network.normalizer.update(batch.obs[real])
    metrics = dict(zip(("policy_loss", "value_loss", "entropy"), losses.tolist(), strict=True))
    explained = diagnostics.explained_variance(batch.value[real], target[real]).item()
    return {**metrics, "explained_variance": explained, "learning_rate": rate}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Collect a segment, update once, until `steps`. A given `state` resumes with new episodes."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    restart(state)
    obs, carry = env.reset(config.seed + state.step), None
    while state.step < config.steps:
        progress = state.step / config.steps
        batch, obs, carry = rollout(state, env, obs, carry)
        metrics = update(state, batch, progress)
        yield state.step, {**metrics, **state.episodes.metrics()}, state

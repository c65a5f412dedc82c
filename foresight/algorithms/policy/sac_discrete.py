"""Discrete SAC: Soft Actor-Critic for discrete action settings, Christodoulou 2019 (arXiv:1910.07207).

    critics      minimize  E[ ½ (Q_i(s, a) - y)² ],  y = r + γ Σ_a' π(a'|s') ( min_j Q⁻_j(s', a') - α log π(a'|s') )
    policy       minimize  E[ Σ_a π(a|s) ( α log π(a|s) - min_j Q_j(s, a) ) ]
    temperature  minimize  E[ -log α Σ_a π(a|s) (log π(a|s) + H̄) ]

where (s, a, r, s') come from replay and Q⁻ is an older copy of Q. Expectations over actions are sums, so no action is
sampled in the losses and no gradient flows through one; otherwise the algorithm is `sac`.

What is kept: two critics that output the values of all actions, their minimum (§4), and the automatic temperature,
whose target H̄ is a fraction of the maximum entropy log A (0.98 in the paper's code, 0.89 in CleanRL's).

Differences: a time limit is not a termination; masked actions have probability 0, and the maximum entropy of a state is
the logarithm of the number of its allowed actions; on pixels the policy uses the critics' convolutions, and its
gradient does not reach them. With `n_steps` above 1 the target has n rewards, and the entropy of the policy at every
state between them: y = r_0 + Σ_k γᵏ (r_k + α H(π(·|s_k))) + γⁿ (...), k = 1 .. n - 1. With a `memory` the replay yields
sequences, and the `burn_in` steps before them warm up the memory (R2D2, Kapturowski et al. 2019, §3).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foresight import errors
from foresight.data.replay import Replay, Transitions, shared_replay
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.envs.collect import Rollout
from foresight.errors import UserError
from foresight.nets import q_network
from foresight.nets.critics import CategoricalActor, Critics, encode, policy_trunk, reach, sample, trunk
from foresight.nets.encoders import mask_key
from foresight.nets.sequence import memory
from foresight.ops import policy, schedules, targets, value
from foresight.training import optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "q", "alpha", "entropy")
ACTING = ("actor", "critics")  # the fields of State that are sent to actors
REPORT = 1_000  # env steps between two yields


@dataclass(frozen=True)
class Config:
    """Defaults: those of `sac`, because the paper's table is for Atari; see the presets for tasks."""

    steps: int = 1_000_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 1  # parallel environments
    rollout_steps: int = 1  # steps of each environment between two rounds of updates, and per message of an actor
    max_lag: int = 1  # rounds of updates by which an actor's policy may lag; 0: actors wait for every update
    learning_rate: float = 3e-4  # Adam, for critics, policy and temperature; appendix B
    batch_size: int = 256  # transitions per gradient step; 64 on Atari (appendix B)
    replay_size: int = 1_000_000  # transitions kept; appendix B
    learning_starts: int = 1_000  # env steps with random actions, before the first update; 20,000 on Atari
    train_every: int = 1  # env steps between updates; 4 on Atari (appendix B)
    gradient_steps: int = 1  # gradient steps per update
    gamma: float = 0.99  # discount per step; appendix B
    target_every: int = 1  # gradient steps between two updates of the target critics; 8,000 on Atari (appendix B)
    tau: float = 0.005  # fraction by which the target critics move; 1 copies
    n_steps: int = 1  # rewards, and entropies between them, before the bootstrap
    entropy_temperature: float = 1.0  # α: initial temperature, in reward per nat
    learn_temperature: bool = True  # whether α is learned; §4
    target_entropy: float = 0.89  # H̄ / log A for A allowed actions; 0.98 in the authors' code, 0.89 in CleanRL
    hidden: tuple[int, ...] = (256, 256)  # hidden layers of policy and critics
    activation: str = "relu"  # activation of the hidden layers
    images: str = "nature"  # the trunk over pixels: "nature", "nips", "impala", "vit" or "swin"
    memory: str | None = None  # "gru", "lstm", "gtrxl" or "transformer", over observations; see nets.sequence.memory
    memory_size: int = 64  # width of the memory
    memory_layers: int = 1  # layers of the memory
    memory_heads: int = 4  # attention heads of the memory
    memory_window: int = 64  # past env steps in the attention window
    backbone: str = "shared"  # one "shared" memory, two "separate" ones, or one for the "actor" or "critic" only
    sequence_length: int = 16  # steps per sequence in a batch, if there is a memory
    burn_in: int = 16  # steps before a sequence that only warm up the memory (R2D2: 40 before sequences of 80)
    threads: int = 1  # torch threads on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved, including the replay."""

    config: Config
    actor: CategoricalActor
    critics: Critics
    target: Critics
    log_alpha: nn.Parameter
    actor_optimizer: torch.optim.Adam
    critic_optimizer: torch.optim.Adam
    alpha_optimizer: torch.optim.Adam
    replay: Replay
    generator: torch.Generator  # samples the actions
    sampler: torch.Generator  # samples transitions, on the CPU
    step: int = 0
    gradient_steps: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizers and replay. Raises UserError for spaces and settings that discrete SAC does not support."""
    _check(config)
    require_end(spaces, config.gamma)
    actions = q_network.actions_of(spaces.action, "Discrete SAC", "sac or ppo")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        shapes = memory.shapes_of(config)
        critics, target = (
            Critics(spaces.obs, 0, actions, config.hidden, config.activation, config.images, shape=shapes["critic"]).to(
                device
            )
            for _ in range(2)
        )
        own = None if config.backbone == "shared" else trunk(spaces.obs, config.images, shapes["actor"])
        actor = CategoricalActor(critics.size, actions, mask_key(spaces.obs), config.hidden, config.activation, own)
        actor.to(device)
    optim.track(target, critics)
    log_alpha = nn.Parameter(torch.tensor(config.entropy_temperature, device=device).log())
    rate = config.learning_rate
    return State(
        config,
        actor,
        critics,
        target.requires_grad_(False),
        log_alpha,
        torch.optim.Adam(actor.parameters(), lr=rate, fused=True),
        torch.optim.Adam(critics.parameters(), lr=rate, fused=True),
        torch.optim.Adam([log_alpha], lr=rate, fused=True),
        shared_replay(config.replay_size, config.num_envs, reach(config)),
        generator=torch.Generator(device).manual_seed(config.seed),
        sampler=torch.Generator().manual_seed(config.seed),
    )


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """An action for every row of `obs`: sampled if `explore` (uniformly before `learning_starts`), else the mode."""
    features, carry = policy_trunk(state)(obs, carry)
    output = state.actor(features, obs)
    if not explore:
        return output.mode(), {}, carry
    if state.step < state.config.learning_starts:
        output = state.actor.uniform(output)
    return output.sample(state.generator), {}, carry


reset_carry = memory.reset_carry


def restart(state: State) -> None:
    """Call this when the environments were reset: the successors of the newest transitions are then unknown."""
    state.replay.interrupt()


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree, carry: Tree = None) -> tuple[Rollout, Tree, Tree]:
    """`rollout_steps` steps of every environment from `obs` on; also the next observation and the memory."""
    if carry is None:
        carry = policy_trunk(state).initial(env.num_envs)
    choose, device = functools.partial(act, state, explore=True), state.generator.device
    segment = collect.segment(env, obs, choose, state.config.rollout_steps, device, state.episodes, carry)
    state.step += segment.trajectory.reward.numel()
    return dataclasses.replace(segment, first=None, carry=None, final_carry=None), segment.last, segment.carry


def update(state: State, batch: Transitions | Trajectory) -> dict[str, float]:
    """One gradient step of critics, policy and temperature, and the update of the target critics when it is due."""
    config, actor, critics, target = state.config, state.actor, state.critics, state.target
    alpha = state.log_alpha.detach().exp()
    encoded = encode(actor, critics, target, batch, config.gamma, config.burn_in)
    with torch.no_grad():
        next_policy = actor(encoded.next_actor, encoded.next_obs)
        next_q = torch.minimum(*target(encoded.next_critics))
        next_value = targets.expected(next_q, next_policy.mean()) + alpha * next_policy.entropy()
        reward = encoded.reward
        if encoded.passed_weight is not None:
            passed = actor(encoded.passed_actor, encoded.passed_obs).entropy()
            reward = value.soft_reward(reward, encoded.passed_weight, passed, alpha)
        q_target = reward + encoded.discount * next_value
    values = critics(encoded.critics)
    q_taken = torch.stack([targets.taken(q, encoded.action) for q in values])
    critic_loss = value.squared_loss(q_taken, q_target.expand_as(q_taken)).mean(1).sum()
    optim.step(state.critic_optimizer, critic_loss.backward)

    output = actor(encoded.actor, encoded.obs)
    min_q = torch.minimum(*(q.detach() for q in values))
    entropy = output.entropy().mean()
    actor_loss = -targets.expected(min_q, output.mean()).mean() - alpha * entropy
    optim.step(state.actor_optimizer, actor_loss.backward)

    if config.learn_temperature:
        target_entropy = config.target_entropy * actor.uniform(output).entropy().mean()
        optim.step(state.alpha_optimizer, policy.temperature_loss(state.log_alpha, entropy, target_entropy).backward)
    state.gradient_steps += 1
    if state.gradient_steps % config.target_every == 0:
        optim.track(target, critics, config.tau)
    metrics = torch.stack([critic_loss.detach(), q_taken.detach().mean(), alpha, entropy.detach()]).tolist()
    return dict(zip(("critic_loss", "q", "alpha", "entropy"), metrics, strict=True))


def learn(state: State, segment: Rollout) -> dict[str, float]:
    """Store the rollout, then run the updates that are due; returns the metrics of the last one."""
    config = state.config
    metrics: dict[str, float] = {}
    before = state.step - segment.trajectory.reward.numel()
    collect.add_to_replay(state.replay, segment)
    if state.step > config.learning_starts and len(state.replay) > (reach(config) + 1) * config.num_envs:
        for _ in range(config.gradient_steps * schedules.passed(before, state.step, config.train_every)):
            metrics = update(state, sample(state))
    return metrics


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Act, store, update, until `steps`. A given `state` resumes with new episodes."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    restart(state)
    obs, carry = env.reset(config.seed + state.step), None
    metrics: dict[str, float] = {}
    while state.step < config.steps:
        before = state.step
        segment, obs, carry = rollout(state, env, obs, carry)
        metrics |= learn(state, segment)
        if schedules.passed(before, state.step, REPORT) or state.step >= config.steps:
            yield state.step, {**metrics, **state.episodes.metrics()}, state


def _check(config: Config) -> None:
    errors.at_least(0, config, "max_lag")
    errors.at_least(
        1,
        config,
        "num_envs",
        "rollout_steps",
        "batch_size",
        "replay_size",
        "train_every",
        "gradient_steps",
        "target_every",
        "n_steps",
    )
    errors.at_least(0, config, "burn_in")
    errors.at_least(1, config, "sequence_length")
    errors.between(0, 1, config, "gamma", "tau")
    memory.check_backbone(config.memory, config.backbone)
    if config.entropy_temperature <= 0:
        raise UserError(f"entropy_temperature must be above 0, not {config.entropy_temperature}.")
    if config.memory is not None and config.n_steps > 1:
        raise UserError(
            f"n_steps must be 1 with a memory, not {config.n_steps}: n-step targets of sequences are not implemented."
        )

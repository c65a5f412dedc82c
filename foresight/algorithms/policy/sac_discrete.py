"""Discrete SAC: Soft Actor-Critic for discrete action settings, Christodoulou 2019 (arXiv:1910.07207).

    critics      minimise  E[ ½ (Q_i(s, a) - y)² ],  y = r + γ Σ_a' π(a'|s') ( min_j Q⁻_j(s', a') - α log π(a'|s') )
    policy       minimise  E[ Σ_a π(a|s) ( α log π(a|s) - min_j Q_j(s, a) ) ]
    temperature  minimise  E[ -log α Σ_a π(a|s) (log π(a|s) + H̄) ]

where (s, a, r, s') come from replay and Q⁻ is an older copy of Q. Expectations over actions are sums, so nothing is
sampled and no gradient goes through an action; otherwise it is `sac`.

What is kept: two critics that give the values of all actions, their minimum (§4), and the automatic temperature, whose
target H̄ is a share of the greatest entropy log A (0.98 in the paper's code, 0.89 in CleanRL's).

Otherwise than there: a time limit is no termination; masked actions have probability 0; on pixels the critics'
convolutions are the policy's too, which does not change them. Left out: recurrent policies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foresight import errors
from foresight.data import trees
from foresight.data.replay import Replay, Transitions, shared_replay
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_worlds
from foresight.errors import UserError
from foresight.nets import optim, q_network
from foresight.nets.critics import CategoricalActor, Critics
from foresight.nets.encoders import mask_key
from foresight.ops import policy, schedules, targets, value

WORLD = "control"
UNIT = "env steps"
METRICS = ("return", "length", "q", "alpha", "entropy")
REPORT = 1_000  # env steps between two yields


@dataclass(frozen=True)
class Config:
    """Defaults: those of `sac` where the paper's table is for Atari; presets say what tasks want."""

    steps: int = 1_000_000  # env steps in all worlds together
    seed: int = 0
    num_envs: int = 1  # worlds stepped together
    learning_rate: float = 3e-4  # Adam, for critics, policy and temperature; appendix B
    batch_size: int = 256  # transitions of a gradient step; 64 on Atari (appendix B)
    replay_size: int = 1_000_000  # rows that are kept; appendix B
    learning_starts: int = 1_000  # env steps with random actions, before the first update; 20,000 on Atari
    train_every: int = 1  # env steps between updates; 4 on Atari (appendix B)
    updates: int = 1  # gradient steps of each update
    gamma: float = 0.99  # discount a step; appendix B
    target_every: int = 1  # gradient steps between two moves of the target critics; 8,000 on Atari (appendix B)
    tau: float = 0.005  # how far they move; 1 copies
    n_steps: int = 1  # rewards before the bootstrap
    alpha: float = 1.0  # temperature at the start, in reward a nat
    learn_alpha: bool = True  # whether it is learnt; §4
    target_entropy: float = 0.89  # H̄ as a share of log A: 0.98 in the authors' code, 0.89 in CleanRL's
    hidden: tuple[int, ...] = (256, 256)  # layers of policy and critics
    activation: str = "relu"  # of those layers
    images: str = "nature"  # the convolutions over pixels: "nature" or "impala"
    threads: int = 1  # of torch, on a CPU; 0 is one a core


@dataclass
class State:
    """All that a run is, the replay too."""

    config: Config
    actor: CategoricalActor
    critics: Critics
    target: Critics
    log_alpha: nn.Parameter
    actor_optimizer: torch.optim.Adam
    critic_optimizer: torch.optim.Adam
    alpha_optimizer: torch.optim.Adam
    replay: Replay
    generator: torch.Generator  # draws the actions
    sampler: torch.Generator  # draws transitions, on the CPU
    step: int = 0
    gradient_steps: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 that finished


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimisers and replay. Raises UserError for spaces and settings that discrete SAC cannot work with."""
    _check(config)
    actions = q_network.actions_of(spaces.action, "Discrete SAC", "sac or ppo")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        critics, target = (
            Critics(spaces.obs, 0, actions, config.hidden, config.activation, config.images).to(device)
            for _ in range(2)
        )
        actor = CategoricalActor(critics.size, actions, mask_key(spaces.obs), config.hidden, config.activation)
        actor.to(device)
    optim.track(target, critics)
    log_alpha = nn.Parameter(torch.tensor(config.alpha, device=device).log())
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
        shared_replay(config.replay_size, config.num_envs, config.n_steps),
        generator=torch.Generator(device).manual_seed(config.seed),
        sampler=torch.Generator().manual_seed(config.seed),
    )


@torch.no_grad()
def act(state: State, obs: Any, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """An action for every row of `obs`: drawn if `explore` (uniformly before learning starts), else the likeliest."""
    output = state.actor(state.critics.encoder(obs), obs)
    if not explore:
        return output.mode(), {}, carry
    if state.step < state.config.learning_starts:
        output = state.actor.uniform(output)
    return output.sample(state.generator), {}, carry


def update(state: State, batch: Transitions) -> dict[str, float]:
    """One gradient step of critics, policy and temperature, and perhaps one move of the target critics."""
    config, actor, critics, target = state.config, state.actor, state.critics, state.target
    alpha = state.log_alpha.detach().exp()
    features = critics.encoder(batch.obs)
    with torch.no_grad():
        following = actor(critics.encoder(batch.next_obs), batch.next_obs)
        judged = torch.minimum(*target(target.encoder(batch.next_obs)))
        soft = targets.expected(judged, following.mean()) + alpha * following.entropy()
        goal = batch.reward + batch.discount * soft
    values = critics(features)
    done = torch.stack([targets.taken(q, batch.action) for q in values])
    critic_loss = value.squared_loss(done, goal.expand_as(done)).mean(1).sum()
    optim.step(state.critic_optimizer, critic_loss.backward)

    chosen = actor(features.detach(), batch.obs)
    judged = torch.minimum(*(q.detach() for q in values))
    entropy = chosen.entropy().mean()
    actor_loss = -targets.expected(judged, chosen.mean()).mean() - alpha * entropy
    optim.step(state.actor_optimizer, actor_loss.backward)

    if config.learn_alpha:
        wanted = config.target_entropy * math.log(actor.actions)
        optim.step(state.alpha_optimizer, policy.temperature_loss(state.log_alpha, entropy, wanted).backward)
    state.gradient_steps += 1
    if state.gradient_steps % config.target_every == 0:
        optim.track(target, critics, config.tau)
    shown = torch.stack([critic_loss.detach(), done.detach().mean(), alpha, entropy.detach()]).tolist()
    return dict(zip(("critic_loss", "q", "alpha", "entropy"), shown, strict=True))


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Act, remember, update, until `steps`. A given state goes on with new episodes."""
    require_worlds(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    place = state.generator.device
    state.replay.interrupt()
    obs = env.reset(config.seed + state.step)
    metrics: dict[str, float] = {}
    while state.step < config.steps:
        before = state.step
        action = act(state, trees.to(obs, place), explore=True)[0].cpu()
        feedback = env.step(action)
        collect.remember(state.replay, obs, action, feedback)
        state.episodes.note(feedback.info)
        state.step += env.num_envs
        obs = feedback.obs
        if state.step > config.learning_starts and len(state.replay) > (config.n_steps + 1) * env.num_envs:
            for _ in range(config.updates * schedules.passed(before, state.step, config.train_every)):
                batch = state.replay.transitions(config.batch_size, config.gamma, config.n_steps, state.sampler)
                metrics = update(state, batch.to(place))
        if schedules.passed(before, state.step, REPORT) or state.step >= config.steps:
            yield state.step, {**metrics, **state.episodes.metrics()}, state


def _check(config: Config) -> None:
    errors.at_least(
        1, config, "num_envs", "batch_size", "replay_size", "train_every", "updates", "target_every", "n_steps"
    )
    errors.between(0, 1, config, "gamma", "tau")
    if config.alpha <= 0:
        raise UserError(f"alpha, the temperature, must be above 0, not {config.alpha}.")

"""GRPO of whole episodes in environments, as SimpleVLA-RL has it for policies that see and read (arXiv:2509.09674).

    maximize  E[ Σ_t min(ρ_t A_g, clip(ρ_t, 1-ε, 1+ε') A_g) ],    A_g = (R_g - mean R) / (std R)

over groups of G episodes that begin alike: the same room and the same instruction. R is the return of an episode, A is
the advantage of all of its steps, and there is no value function. GRPO itself is of language models: Shao et al. 2024
(arXiv:2402.03300, `algorithms/language/grpo`).

What is kept: asymmetric clip (ε 0.2, ε' 0.28), no KL, no entropy bonus, steps after the end of an episode are masked,
groups of equal returns are left out, one epoch. The network is that of a run of `vla`, without a value head.

Differences: one ratio per action, which in BabyAI is one token; sampling at temperature 1 instead of 1.6.

An env step is a step of an episode that has not ended, so that curves compare with PPO's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_num_envs
from foresight.errors import UserError
from foresight.nets.sequence import vla
from foresight.nets.sequence.vla import VLA
from foresight.nets.sequence.vla_actor_critic import require_one_path
from foresight.ops import advantage, kl, policy, schedules
from foresight.training import optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "entropy", "approx_kl", "used_groups")


@dataclass(frozen=True)
class Config:
    """Defaults: SimpleVLA-RL's where noted."""

    steps: int = 1_000_000  # env steps of running episodes
    seed: int = 0
    policy: str = ""  # a run of vla
    num_envs: int = 64  # episodes per update; the paper: 64 groups
    group: int = 8  # episodes that begin alike; the paper's
    longest: int = 64  # env steps of an episode
    epochs: int = 1  # passes over each batch
    minibatches: int = 4  # gradient steps per epoch
    learning_rate: float = 3e-4  # Adam; 5e-6 in the paper, for 7 billion weights
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    clip_ratio: float = 0.2  # ε; the paper's
    clip_high: float = 0.28  # ε'; the paper's
    max_grad_norm: float = 0.5  # bound of the global gradient norm
    sample: bool = True  # draw actions in evaluation; False: the likeliest
    threads: int = 1  # of torch, on a CPU


@dataclass
class State:
    """Everything that is saved."""

    config: Config
    network: VLA
    optimizer: torch.optim.Adam
    generator: torch.Generator  # samples the actions
    shuffler: torch.Generator  # shuffles minibatches, on the CPU
    step: int = 0
    rounds: int = 0  # batches so far: each has its own seed
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network, optimizer and generators. Raises UserError for settings that do not fit."""
    errors.at_least(1, config, "num_envs", "longest", "epochs", "minibatches")
    if config.group < 2 or config.num_envs % config.group:
        raise UserError(f"num_envs must be a multiple of group, at least 2, not {config.num_envs} and {config.group}.")
    if not config.policy:
        raise UserError(f"No policy given. {vla.ADVICE}")
    network = vla.load(config.policy, spaces.obs, spaces.action, spaces.embodiments).to(device).eval()
    if network.config.head == "flow":
        raise UserError("GRPO needs log-probabilities of actions, which head 'flow' does not have: use --head bins.")
    return State(
        config,
        network,
        torch.optim.Adam(network.parameters(), lr=config.learning_rate, eps=1e-5, fused=True),
        generator=torch.Generator(device).manual_seed(config.seed),
        shuffler=torch.Generator().manual_seed(config.seed),
    )


@torch.inference_mode()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """An action for every row of `obs`: drawn if `explore` or `config.sample`, else the likeliest."""
    output = state.network(obs)
    return output.sample(state.generator) if explore or state.config.sample else output.mode(), {}, carry


def rollout(state: State, env: Env) -> tuple[Trajectory, dict[str, float]]:
    """The steps `[N, ...]` of one episode of every environment in groups of mixed returns, and their metrics.

    `extras["advantage"]` is that of the episode.
    """
    config = state.config

    def choose(obs: Tree, carry: Tree) -> tuple[Tensor, dict[str, Tensor], Tree]:
        return act(state, obs, carry, explore=True)

    segment = collect.episodes(
        env, config.seed + state.rounds, choose, config.longest, state.generator.device, state.episodes
    )
    steps = segment.trajectory
    assert steps.mask is not None
    state.step += int(steps.mask.sum())
    state.rounds += 1
    total = (steps.reward * steps.mask).sum(1).view(-1, config.group)
    mixed = advantage.differs(total)
    gains = advantage.group_scaled(total).flatten()
    real = (steps.mask > 0) & mixed.repeat_interleave(config.group).unsqueeze(1)
    extras = {"advantage": gains.unsqueeze(1).expand_as(steps.reward)}
    steps = steps.replace(extras=extras).map(lambda x: x[real])
    with torch.no_grad():
        rows = torch.arange(len(steps.reward), device=steps.reward.device).split(1024)
        parts = [state.network(trees.pick(steps.obs, i)).logp(steps.action[i]) for i in rows if len(i)]
    logprob = torch.cat([steps.reward[:0], *parts])
    return steps.replace(logprob=logprob), {"used_groups": mixed.float().mean().item()}


def update(state: State, batch: Trajectory, progress: float = 0.0) -> dict[str, float]:
    """Epochs of minibatch steps on the steps of one batch; `progress` in [0, 1] anneals the learning rate."""
    config = state.config
    rate = schedules.linear(progress, config.learning_rate, 0.0) if config.anneal_lr else config.learning_rate
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    found = []
    for _ in range(config.epochs):
        for part in batch.minibatches(min(config.minibatches, len(batch.reward)), state.shuffler):
            assert part.logprob is not None
            output = state.network(part.obs)
            logprob = output.logp(part.action)
            ratio = policy.ratio(logprob, part.logprob)
            losses = policy.clipped_surrogate(ratio, part.extras["advantage"], config.clip_ratio, config.clip_high)
            optim.descend(state.optimizer, losses.mean().backward, config.max_grad_norm)
            with torch.no_grad():
                divergence = kl.k3(part.logprob, logprob).mean()
                found.append(torch.stack([losses.mean(), output.entropy().mean(), divergence]))
    mean = torch.stack(found).mean(0).tolist()
    return dict(zip(("policy_loss", "entropy", "approx_kl"), mean, strict=True))


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Episodes of every environment, then an update, until `steps`. Raises UserError if episodes cannot begin alike."""
    require_num_envs(env, config.num_envs)
    begin = getattr(env, "same_starts", None)
    if begin is None:
        raise UserError(f"'{env.name}' cannot begin several episodes alike. BabyAI with a camera can.")
    begin(config.group)
    if state is None:
        state = build(config, env.spaces, device)
    if isinstance(state.network, VLA) and not state.step:  # a network of one's own reads single observations alone
        greedy, seen = replace(state, config=replace(state.config, sample=False)), env.reset(config.seed)
        seen = trees.to(seen, state.generator.device)
        require_one_path(state.network, seen, act(greedy, seen)[0])
    while state.step < config.steps:
        progress = state.step / config.steps
        batch, metrics = rollout(state, env)
        if len(batch.reward):  # else all groups succeeded or failed as a whole
            metrics |= update(state, batch, progress)
        yield state.step, {**metrics, **state.episodes.metrics()}, state

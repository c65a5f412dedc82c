"""Rainbow: Combining improvements in deep reinforcement learning, Hessel et al. 2018 (arXiv:1710.02298).

    minimize  E_{n steps ~ p^ω}[ w · KL( Φ(R⁽ⁿ⁾ + γⁿ Z⁻(s_n, argmax_a E Z(s_n, a)))  ‖  Z(s, a) ) ]

DQN with six extensions, each of which is one line here:
  Double DQN (van Hasselt et al. 2016, arXiv:1509.06461)      the online network selects, the target evaluates
  prioritized replay (Schaul et al. 2016, arXiv:1511.05952)   `Prioritized`; see `PRIORITIES`
  dueling networks (Wang et al. 2016, arXiv:1511.06581)       `QNetwork(dueling=True)`
  n-step targets (Sutton 1988)                                `n_steps`
  C51 (Bellemare et al. 2017, arXiv:1707.06887)               `AtomHead`; Φ is its projection
  noisy networks (Fortunato et al. 2018, arXiv:1706.10295)    `sigma`; no ε
The paper leaves each of them out in turn (its figure 3). So do `n_steps=1`, `priority_exponent=0`, `double=False`,
`dueling=False`, and `sigma=None` (exploration is then ε-greedy). DQN with scalar or quantile values is `dqn`.

Left out: the paper's Atari protocol, which belongs to the environment (see `envs.control.atari`).
Differences: a time limit is not a termination; noise is sampled once per batch, as in the authors' later code; the
priority is the loss, the cross-entropy, as in Dopamine, and not the KL, which is one option.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foresight import errors
from foresight.data.priorities import Prioritized
from foresight.data.replay import Transitions, shared_replay
from foresight.data.trajectory import Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.envs.collect import Rollout
from foresight.nets import q_network, values
from foresight.nets.q_network import QNetwork
from foresight.ops import schedules
from foresight.training import optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "loss", "q")
ACTING = ("network",)  # the fields of State that are sent to actors
REPORT = 1_000  # env steps between two yields


# The priority of a transition from its predicted distribution and its target. A well-fitted one has almost no KL and is
# hardly ever sampled again; its cross-entropy is still the entropy of the target.
PRIORITIES: dict[str, Callable[[values.Atoms, Tensor], Tensor]] = {
    "cross_entropy": lambda predicted, target: predicted.loss(target).detach(),
    "kl": lambda predicted, target: predicted.error(target),
}


@dataclass(frozen=True)
class Config:
    """Defaults: the paper's table 1 unless noted. One step here is 4 frames there."""

    steps: int = 1_000_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 1  # parallel environments
    rollout_steps: int = 1  # steps of each environment between two rounds of updates, and per message of an actor
    max_lag: int = 1  # rounds of updates by which an actor's policy may lag; 0: actors wait for every update
    learning_rate: float = 6.25e-5  # Adam
    adam_epsilon: float = 1.5e-4  # Adam's ε, added to the root mean square
    batch_size: int = 32  # transitions per gradient step
    replay_size: int = 1_000_000  # transitions kept
    learning_starts: int = 20_000  # env steps before the first update (80,000 frames)
    train_every: int = 4  # env steps between gradient steps
    target_every: int = 8_000  # env steps between two copies of the network (32,000 frames)
    gamma: float = 0.99  # discount per step
    n_steps: int = 3  # rewards before the bootstrap
    atoms: int = 51  # atoms of each value distribution
    value_range: tuple[float, float] = (-10.0, 10.0)  # range of the atoms
    priority: str = "cross_entropy"  # p of a transition: "cross_entropy" or "kl", see `PRIORITIES`
    priority_exponent: float = 0.5  # ω: 0 samples uniformly
    priority_correction: float = 0.4  # β: importance weights are (1 / P)^β; annealed to 1 over the run
    sigma: float | None = 0.5  # σ₀ of the noisy layers; None: no noise, ε-greedy instead
    epsilon: float = 0.01  # probability of a random action if there are no noisy layers
    double: bool = True  # the online network selects the next action
    dueling: bool = True  # separate streams for state value and advantage
    max_grad_norm: float = 10.0  # bound of the global gradient norm; as in the dueling paper, §4.2
    hidden: tuple[int, ...] = (256, 256)  # hidden layers over vectors
    activation: str = "relu"  # activation of the hidden layers
    images: str = "nature"  # the trunk over pixels: "nature", "nips", "impala", "vit" or "swin"
    threads: int = 1  # torch threads on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved, including the replay and its priorities."""

    config: Config
    network: QNetwork
    target: QNetwork
    optimizer: torch.optim.Adam
    replay: Prioritized
    generator: torch.Generator  # samples the noise and exploratory actions in acting
    inner: torch.Generator  # samples the noise in updates
    sampler: torch.Generator  # samples the replay, on the CPU
    step: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizer and replay. Raises UserError for spaces and settings that Rainbow does not support."""
    _check(config)
    require_end(spaces, config.gamma)
    actions = q_network.actions_of(spaces.action, "Rainbow", "sac or ppo")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network, target = (
            QNetwork(
                spaces.obs, actions, values.AtomHead(config.atoms, *config.value_range), config.hidden,
                config.activation, config.images, config.dueling, config.sigma,
            ).to(device)
            for _ in range(2)
        )  # fmt: skip
    optim.track(target, network)
    replay = shared_replay(config.replay_size, config.num_envs, config.n_steps)
    return State(
        config,
        network,
        target.requires_grad_(False),
        torch.optim.Adam(network.parameters(), lr=config.learning_rate, eps=config.adam_epsilon, fused=True),
        Prioritized(replay, config.priority_exponent, config.n_steps),
        generator=torch.Generator(device).manual_seed(config.seed),
        inner=torch.Generator(device).manual_seed(config.seed + 1),
        sampler=torch.Generator().manual_seed(config.seed),
    )


@torch.no_grad()
def act(state: State, obs: Tree, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """The greedy action for every row of `obs`; with `explore`, under freshly sampled noise."""
    network = state.network
    noise = network.noise(state.generator) if explore else None
    action = network.best(network(obs, noise).mean(), obs)
    if explore and noise is None:
        random = torch.rand(len(action), generator=state.generator, device=action.device) < state.config.epsilon
        action = torch.where(random, network.random(obs, len(action), state.generator), action)
    return action, {}, carry


def restart(state: State) -> None:
    """Call this when the environments were reset: the successors of the newest transitions are then unknown."""
    state.replay.interrupt()


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree) -> tuple[Rollout, Tree]:
    """`rollout_steps` steps of every environment from `obs` on; also the next observation."""
    choose, device = functools.partial(act, state, explore=True), state.generator.device
    segment = collect.segment(env, obs, choose, state.config.rollout_steps, device, state.episodes)
    state.step += segment.trajectory.reward.numel()
    return segment, segment.last


def sample(state: State) -> Transitions:
    """A batch; its importance weights are annealed to the full correction over the run (arXiv 1511.05952, §3.4)."""
    config = state.config
    beta = schedules.linear(state.step / config.steps, config.priority_correction, 1.0)
    return state.replay.transitions(config.batch_size, config.gamma, beta, state.sampler).to(state.generator.device)


def update(state: State, batch: Transitions) -> dict[str, float]:
    """One gradient step, and the new priorities of its transitions."""
    network, target, generator = state.network, state.target, state.inner
    with torch.no_grad():
        next_q = target(batch.next_obs, target.noise(generator))
        online = network(batch.next_obs, network.noise(generator)) if state.config.double else next_q
        next_action = network.best(online.mean(), batch.next_obs)
        q_target = next_q.pick(next_action).backup(batch.reward, batch.discount)
    q_taken = network(batch.obs, network.noise(generator)).pick(batch.action)
    loss = q_taken.loss(q_target)  # the KL plus the entropy of the target, a constant
    optim.descend(state.optimizer, (batch.weight * loss).mean().backward, state.config.max_grad_norm)
    state.replay.update(batch.key, PRIORITIES[state.config.priority](q_taken, q_target))
    with torch.no_grad():
        return {"loss": loss.mean().item(), "q": q_taken.mean().mean().item()}


def learn(state: State, segment: Rollout) -> dict[str, float]:
    """Store the rollout, then run the updates that are due; returns the metrics of the last one."""
    config = state.config
    metrics: dict[str, float] = {}
    before = state.step - segment.trajectory.reward.numel()
    collect.add_to_replay(state.replay, segment)
    if state.step > config.learning_starts and len(state.replay) > (config.n_steps + 1) * config.num_envs:
        for _ in range(schedules.passed(before, state.step, config.train_every)):
            metrics = update(state, sample(state))
    if schedules.passed(before, state.step, config.target_every):
        optim.track(state.target, state.network)
    return metrics


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Act, store, update, until `steps`. A given `state` resumes with new episodes."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    restart(state)
    obs = env.reset(config.seed + state.step)
    metrics: dict[str, float] = {}
    while state.step < config.steps:
        before = state.step
        segment, obs = rollout(state, env, obs)
        metrics |= learn(state, segment)
        if schedules.passed(before, state.step, REPORT) or state.step >= config.steps:
            yield state.step, {**metrics, **state.episodes.metrics()}, state


def _check(config: Config) -> None:
    errors.at_least(0, config, "max_lag")
    errors.at_least(
        1, config, "num_envs", "rollout_steps", "batch_size", "replay_size", "train_every", "target_every", "n_steps"
    )
    errors.between(0, 1, config, "gamma", "epsilon", "priority_correction")
    if config.priority not in PRIORITIES:
        raise errors.unknown("priority", config.priority, PRIORITIES)

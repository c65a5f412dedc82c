"""DQN: Human-level control through deep reinforcement learning, Mnih et al. 2015 (Nature 518, 529).

    minimize  E_{(s,a,r,s') ~ replay}[ huber( r + γ max_a' Q⁻(s', a') - Q(s, a) ) ]

where Q⁻ is the target network, an older copy of Q: copied every `target_every` env steps, or, with `tau` below 1, moved
a fraction `tau` toward Q every `target_every` gradient steps.

What is kept: uniform replay, the target network, ε-greedy exploration annealed linearly, the clipped error (Huber loss
with δ = 1), one network for all actions. Each of these papers changes one line, and is an option:
  Double DQN (van Hasselt et al. 2016, arXiv:1509.06461)  `double`: Q selects a', Q⁻ evaluates it
  Dueling networks (Wang et al. 2016, arXiv:1511.06581)   `dueling`: Q = V + A - mean A
  n-step targets (Sutton & Barto 2018, §7.1)              `n_steps`: γⁿ max Q⁻ after n rewards of one episode
  C51 (Bellemare et al. 2017, arXiv:1707.06887)           `values="atoms"`: each value is a distribution on 51 atoms
  QR-DQN (Dabney et al. 2018, arXiv:1710.10044)           `values="quantiles"`: each value is `atoms` quantiles
  Prioritized replay (Schaul et al. 2016, arXiv:1511.05952)  `priority_exponent`: P(step) ∝ |error|^α, loss × (1 / P)^β
All of them together, with atoms and noisy networks, are `rainbow`.

Differences: Adam instead of RMSProp; a time limit is not a termination: its target bootstraps from the final
observation; evaluation is greedy (ε is 0, not 0.05). Left out: recurrent Q-networks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.priorities import Prioritized
from foresight.data.replay import Replay, Transitions, shared_replay
from foresight.data.trajectory import Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.envs.collect import Rollout
from foresight.nets import precision, q_network, values
from foresight.nets.q_network import QNetwork
from foresight.ops import schedules
from foresight.training import optim, twins
from foresight.training.twins import twin

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "loss", "q", "epsilon")
ACTING = ("network",)  # the fields of State that are sent to actors
REPORT = 1_000  # env steps between two yields


@dataclass(frozen=True)
class Config:
    """Defaults: stable-baselines3's, the paper's scaled to smaller machines; see the presets for tasks."""

    steps: int = 1_000_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 1  # parallel environments
    rollout_steps: int = 1  # steps of each environment between two rounds of updates, and per message of an actor
    max_lag: int = 1  # rounds of updates by which an actor's policy may lag; 0: actors wait for every update
    learning_rate: float = 1e-4  # Adam (the paper: RMSProp, 2.5e-4)
    adam_epsilon: float = 1e-8  # Adam's ε, added to the root mean square (Rainbow: 1.5e-4)
    anneal_lr: bool = False  # anneal the learning rate linearly to 0
    batch_size: int = 32  # transitions per gradient step; extended data table 1
    replay_size: int = 1_000_000  # transitions kept; extended data table 1
    learning_starts: int = 100  # env steps before the first update; 50,000 in table 1
    train_every: int = 4  # env steps between updates; table 1
    gradient_steps: int = 1  # gradient steps per update
    target_every: int = 10_000  # env steps between two copies of the network (table 1); gradient steps if tau < 1
    tau: float = 1.0  # fraction by which the target moves: 1 copies; 0.005 with target_every 1 is Polyak averaging
    gamma: float = 0.99  # discount per step; table 1
    epsilon_start: float = 1.0  # probability of a random action at the start; table 1
    epsilon_end: float = 0.05  # probability of a random action at the end; 0.1 in table 1
    epsilon_fraction: float = 0.1  # fraction of the run over which this probability is annealed
    max_grad_norm: float = 10.0  # bound of the global gradient norm
    double: bool = False  # the online network selects the next action (arXiv 1509.06461, eq. 4)
    dueling: bool = False  # separate streams for state value and advantage (arXiv 1511.06581, eq. 9)
    n_steps: int = 1  # rewards before the bootstrap; 3 in Rainbow (arXiv 1710.02298, table 1)
    priority_exponent: float = 0.0  # α of prioritized replay: 0 samples uniformly; 0.6 in arXiv 1511.05952, table 3
    priority_correction: float = 0.4  # β: importance weights are (1 / P)^β; annealed to 1 over the run; the same table
    values: str = "points"  # representation of a value: "points", "atoms" (C51) or "quantiles" (QR-DQN)
    atoms: int = 51  # atoms or quantiles per value: 51 in C51 (§5 of its paper), 200 in QR-DQN
    value_range: tuple[float, float] = (-10.0, 10.0)  # range of C51's atoms, in units of return; §5 of its paper
    hidden: tuple[int, ...] = (256, 256)  # hidden layers over vectors
    activation: str = "relu"  # activation of the hidden layers
    images: str = "nature"  # the trunk over pixels: "nature", "nips", "impala", "vit" or "swin"
    precision: str = "float32"  # of products in updates: "float32", "bfloat16", or "auto": see `nets.precision`
    threads: int = 1  # torch threads on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved, including the replay."""

    config: Config
    network: QNetwork
    target: QNetwork
    optimizer: torch.optim.Adam
    replay: Replay | Prioritized
    generator: torch.Generator  # samples exploratory actions
    sampler: torch.Generator  # samples transitions, on the CPU
    step: int = 0
    gradient_steps: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizer and replay. Raises UserError for spaces and hyperparameters that DQN does not support."""
    _check(config)
    require_end(spaces, config.gamma)
    actions = q_network.actions_of(spaces.action, "DQN", "sac or ppo")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network, target = (
            QNetwork(
                spaces.obs, actions, _head(config), config.hidden, config.activation, config.images, config.dueling
            ).to(device)
            for _ in range(2)
        )
    optim.track(target, network)
    replay = shared_replay(config.replay_size, config.num_envs, config.n_steps)
    return State(
        config,
        network,
        target.requires_grad_(False),
        torch.optim.Adam(network.parameters(), lr=config.learning_rate, eps=config.adam_epsilon, fused=True),
        Prioritized(replay, config.priority_exponent, config.n_steps) if config.priority_exponent else replay,
        generator=torch.Generator(device).manual_seed(config.seed),
        sampler=torch.Generator().manual_seed(config.seed),
    )


@torch.no_grad()
def act(state: State, obs: Tree, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """The greedy action for every row of `obs`; with `explore`, a random one with probability ε."""
    network = state.network
    if not explore:
        return network.best(network(obs).mean(), obs), {}, carry
    count = len(trees.first(obs))
    random = torch.rand(count, generator=state.generator, device=state.generator.device) < epsilon(state)
    if not random.any():
        return network.best(network(obs).mean(), obs), {}, carry
    action = network.random(obs, count, state.generator)
    if not random.all():
        action = torch.where(random, action, network.best(network(obs).mean(), obs))
    return action, {}, carry


def epsilon(state: State) -> float:
    """The probability of a random action at this step of the run."""
    config = state.config
    progress = state.step / max(1.0, config.epsilon_fraction * config.steps)
    return schedules.linear(progress, config.epsilon_start, config.epsilon_end)


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
    """A batch for one update, on the device of the networks, uniformly or by priority."""
    config = state.config
    if isinstance(state.replay, Prioritized):  # its bias is corrected fully at the end of the run only (§3.4)
        beta = schedules.linear(state.step / config.steps, config.priority_correction, 1.0)
        batch = state.replay.transitions(config.batch_size, config.gamma, beta, state.sampler)
    else:
        batch = state.replay.transitions(config.batch_size, config.gamma, config.n_steps, state.sampler)
    return batch.to(state.generator.device)


@twin(twins.q_loss)
def q_loss(
    network: QNetwork, batch: Transitions, next_q: values.Values, next_action: Tensor
) -> tuple[Callable[[], object], Tensor, Tensor, Tensor | None]:
    """The loss of Q(s, a) for the target r + γ Q⁻(s', a'): its backward pass (not yet run), the loss, the mean Q.

    Last, for a batch with importance weights, the error of each transition `[N]`: its priority.
    """
    q_target = next_q.pick(next_action).backup(batch.reward, batch.discount)
    q_taken = network(batch.obs).pick(batch.action)
    losses, error = q_taken.loss(q_target), None
    if batch.weight is not None:
        losses, error = batch.weight * losses, q_taken.error(q_target)
    loss = losses.mean()
    return loss.backward, loss.detach(), q_taken.mean().detach().mean(), error


def objective(state: State, batch: Transitions) -> tuple[Callable[[], object], Tensor, Tensor, Tensor | None]:
    """`q_loss` with the next action selected by the target network, or by the online network with `double`."""
    network, target = state.network, state.target
    with torch.no_grad():
        next_q = target(batch.next_obs)
        online = network(batch.next_obs) if state.config.double else next_q
        next_action = network.best(online.mean(), batch.next_obs)
    return q_loss(network, batch, next_q, next_action)


@twin(twins.q_step)
def descend(state: State, batch: Transitions) -> tuple[Tensor, Tensor, Tensor | None]:
    """A gradient step on `objective`; returns its loss, the mean Q and the errors."""
    backward, loss, q, error = objective(state, batch)
    optim.descend(state.optimizer, backward, state.config.max_grad_norm)
    return loss, q, error


def update(state: State, batch: Transitions) -> dict[str, float]:
    """One gradient step; with `tau` below 1 also the update of the target network when it is due."""
    config = state.config
    if config.anneal_lr:
        state.optimizer.param_groups[0]["lr"] = schedules.linear(state.step / config.steps, config.learning_rate)
    with precision.autocast(config.precision, state.generator.device):
        loss, q, error = descend(state, batch)
    if isinstance(state.replay, Prioritized) and error is not None:
        state.replay.update(batch.key, error)
    state.gradient_steps += 1
    if config.tau < 1 and state.gradient_steps % config.target_every == 0:
        optim.track(state.target, state.network, config.tau)
    return {"loss": loss.item(), "q": q.item()}


def learn(state: State, segment: Rollout) -> dict[str, float]:
    """Store the rollout, then run the updates that are due; returns the metrics of the last one."""
    config = state.config
    metrics: dict[str, float] = {}
    before = state.step - segment.trajectory.reward.numel()
    collect.add_to_replay(state.replay, segment)
    if state.step > config.learning_starts and len(state.replay) > (config.n_steps + 1) * config.num_envs:
        for _ in range(config.gradient_steps * schedules.passed(before, state.step, config.train_every)):
            metrics = update(state, sample(state))
    if config.tau == 1 and schedules.passed(before, state.step, config.target_every):
        optim.track(state.target, state.network)
    return {**metrics, "epsilon": epsilon(state)}


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


def _head(config: Config) -> values.ValuesHead:
    heads: dict[str, Callable[[], values.ValuesHead]] = {
        "points": values.PointHead,
        "atoms": lambda: values.AtomHead(config.atoms, *config.value_range),
        "quantiles": lambda: values.QuantileHead(config.atoms),
    }
    if config.values not in heads:
        raise errors.unknown("kind of values", config.values, heads)
    return heads[config.values]()


def _check(config: Config) -> None:
    precision.dtype(config.precision, "cpu")  # raises for an unknown one
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
        "atoms",
    )
    errors.between(0, 1, config, "gamma", "epsilon_start", "epsilon_end", "tau", "priority_correction")

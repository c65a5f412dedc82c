"""Upside-Down RL, Schmidhuber 2019 (arXiv:1912.02875); Srivastava et al. 2019 (arXiv:1912.02877), algorithms 1 and 2.

    minimize  E_{episode ~ replay, t}[ -log B(a_t | s_t, R_t, T - t) ],   R_t = Σ_{t' ≥ t} r_{t'}

The behavior function B is commanded to reach a return within a number of steps. It learns by supervision alone: what an
episode did from t on is an example for the command that it fulfilled. The replay keeps the episodes of the highest
returns. New ones are asked for somewhat more than the best of them reached: the mean length of the best episodes, and a
return drawn uniformly between their mean return and one deviation above (§2.2.4). During an episode the rewards
received and the steps taken are subtracted from the command.

What is kept: the replay sorted by return, exploratory commands, commands that reach to the end of an episode, the
command that gates the features of the observation, sampled actions in training.

Differences: the observations are normalized by the first episodes; several environments act at once, so that an
iteration adds as many episodes; the replay may begin with recorded episodes (`data`) instead of random ones; also
actions of a Box. In evaluation, the command is the mean of the best episodes or `target_return`, and the likeliest
action is taken, or one sampled at a low `temperature`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight import errors
from foresight.data import episodes as data
from foresight.data import trees
from foresight.data.trajectory import Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_num_envs
from foresight.nets.imitation import ActionDistribution, NormalizedObs
from foresight.nets.mlp import MLP
from foresight.training import offline, optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "asked", "loss")


@dataclass(frozen=True)
class Config:
    """Defaults: within the ranges of the paper's search for LunarLander (table 3); see the presets for tasks."""

    steps: int = 500_000  # env steps of whole episodes, summed over all environments; see the page
    seed: int = 0
    num_envs: int = 16  # parallel environments; each adds an episode per iteration (the paper: 10 to 40 episodes)
    data: tuple[str, ...] = ()  # folders of episodes that the replay begins with; none: random episodes
    target_return: float | None = None  # asked for in evaluation; None: the mean of the best episodes
    temperature: float = 0.0  # at which a choice is sampled in evaluation; 0: the likeliest
    warmup_episodes: int = 50  # before the first update, if there are no data
    replay_size: int = 500  # episodes with the highest returns that are kept
    best_episodes: int = 50  # of the replay, which commands are made of ("last few" in the paper)
    gradient_steps: int = 150  # per iteration
    batch_size: int = 512  # steps per gradient step
    learning_rate: float = 1e-3  # Adam
    to_end: bool = True  # commands reach to the end of the episode, as in the paper's tasks; else to a step drawn
    return_scale: float = 0.02  # times the return that is asked for
    horizon_scale: float = 0.02  # times the number of steps
    hidden: tuple[int, ...] = (64, 64)  # units; the first layer is gated by the command
    max_grad_norm: float = 10.0  # bound of the global gradient norm
    threads: int = 1  # of torch, on a CPU; 0: one per core


class Behavior(nn.Module):
    """The behavior function B: features of the observation, gated by those of the command (§2.3)."""

    def __init__(self, spaces: Spaces, hidden: tuple[int, ...], scales: tuple[float, float]) -> None:
        super().__init__()
        self.spaces, self.scales = spaces, scales
        self.inputs, self.actions = NormalizedObs(spaces.obs), ActionDistribution(spaces.action)
        self.embed, self.gate = nn.Linear(self.inputs.size, hidden[0]), nn.Linear(2, hidden[0])
        self.body = MLP(hidden[0], hidden[1:], "relu")
        self.head = nn.Linear(self.body.size, self.actions.outputs)

    def forward(self, obs: Tensor, to_go: Tensor, horizon: Tensor) -> Tensor:
        """Outputs for actions `[B, outputs]`; the command is a return `to_go` `[B]` in `horizon` `[B]` steps."""
        command = torch.stack([to_go * self.scales[0], horizon * self.scales[1]], -1)
        features = torch.relu(self.embed(self.inputs(obs))) * torch.sigmoid(self.gate(command))
        y: Tensor = self.head(self.body(features))
        return y


def _of_commands(state: State) -> data.Episodes | None:
    """What commands are made of: rewards and lengths of the best episodes, without what was seen and done in them."""
    if state.replay is None:
        return None
    best = state.replay.highest(state.config.best_episodes)
    return replace(best, obs=torch.zeros_like(best.obs), action=torch.zeros_like(best.action))


@dataclass
class State:
    """Everything that is saved, including the replay."""

    config: Config
    behavior: Behavior
    optimizer: torch.optim.Adam
    generator: torch.Generator  # samples actions and commands
    sampler: torch.Generator  # samples steps of episodes, on the CPU
    step: int = 0
    replay: data.Episodes | None = field(default=None, metadata={"share": _of_commands})  # ordered by return
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network and optimizer. Raises UserError for spaces and settings that are not supported."""
    errors.at_least(
        1, config, "num_envs", "warmup_episodes", "replay_size", "best_episodes", "gradient_steps", "batch_size"
    )
    data.check_spaces(spaces.obs, spaces.action)
    if config.temperature < 0 or (config.temperature and isinstance(spaces.action, gs.Box)):
        raise errors.UserError("temperature is of a choice among actions, and at least 0. Leave it out for a Box.")
    if not config.hidden:
        raise errors.UserError("hidden must have at least one layer, which the command gates, such as: --hidden 64 64")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        scales = config.return_scale, config.horizon_scale
        behavior = Behavior(spaces, config.hidden, scales).to(device)
    return State(
        config,
        behavior,
        torch.optim.Adam(behavior.parameters(), lr=config.learning_rate, fused=True),
        generator=torch.Generator(device).manual_seed(config.seed),
        sampler=torch.Generator().manual_seed(config.seed),
    )


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """The likeliest action for the command, or one sampled at `temperature`; with `explore` a command is drawn too.

    The carry is the command of the episode, the number of steps taken and the rewards received, `[B]` each; `rewarded`
    adds up both.
    """
    if carry is None:
        zeros = torch.zeros(len(obs), device=obs.device)
        carry = {"asked": zeros, "horizon": zeros, "steps": zeros, "received": zeros}
    new, (asked, horizon) = carry["steps"] == 0, command(state, len(obs), explore)
    asked, horizon = torch.where(new, asked, carry["asked"]), torch.where(new, horizon, carry["horizon"])
    behavior, left = state.behavior, (horizon - carry["steps"]).clamp(min=1)
    temperature = 1.0 if explore else state.config.temperature
    output = behavior.actions(behavior(obs, asked - carry["received"], left) / (temperature or 1.0))
    action = output.sample(state.generator) if temperature else output.mode()
    after = {"asked": asked, "horizon": horizon, "steps": carry["steps"] + 1, "received": carry["received"]}
    return behavior.actions.code.to_env(action), {}, after


def rewarded(carry: Tree, reward: Tensor) -> Tree:
    """The carry after the `reward` `[B]` of the last action."""
    return {**carry, "received": carry["received"] + reward.to(carry["received"].device)}


def reset_carry(carry: Tree, cut: Tensor) -> Tree:
    """The carry with the rows set to zero where an episode was cut."""
    return trees.reset_carry(carry, cut)


def read_files(state: State) -> None:
    """Begin the replay with the data, if there are some. Raises UserError if all rewards are 0."""
    if state.config.data:
        spaces = state.behavior.spaces
        recorded = offline.read(state.config.data, spaces.obs, spaces.action)
        offline.require_rewards(recorded)
        add(state, recorded)


def command(state: State, count: int, explore: bool) -> tuple[Tensor, Tensor]:
    """Returns and numbers of steps to ask for, `[count]` each, in exploration (algorithm 2) or evaluation."""
    device, target = state.generator.device, state.config.target_return
    if state.replay is None:
        return torch.zeros(count, device=device), torch.zeros(count, device=device)
    best = state.replay.highest(state.config.best_episodes)
    mean, std = float(best.returns.mean()), float(best.returns.std(correction=0))
    horizon = torch.full((count,), float(best.length.float().mean()), device=device)
    if explore:
        return mean + std * torch.rand(count, generator=state.generator, device=device), horizon
    return torch.full((count,), mean if target is None else target, device=device), horizon


def rollout(state: State, env: Env, count: int) -> data.Episodes:
    """`count` new episodes, sampled from the behavior function with exploratory commands."""
    quota = [count // env.num_envs + (i < count % env.num_envs) for i in range(env.num_envs)]
    choose, device = functools.partial(act, state, explore=True), state.generator.device
    seed = state.config.seed + state.step
    found = collect.record(env, seed, choose, quota, device, state.episodes, rewarded, reset_carry)
    state.step += int(found.length.sum())
    return found


def add(state: State, found: data.Episodes) -> None:
    """Keep the best of the replay and the episodes `found`. The first ones give the statistics of observations."""
    if state.replay is None:
        state.behavior.inputs.fit(found.obs[found.rows].to(state.generator.device))
    both = found if state.replay is None else data.join([state.replay, found])
    state.replay = both.highest(state.config.replay_size)


def sample(state: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Observations `[B, ...]`, actions `[B, ...]`, and the commands that were fulfilled: a return in a number of steps.

    Episodes are drawn uniformly, and a step of each; without `to_end` also the step t_2 that ends the command (§2.2.3).
    """
    replay, size, device = state.replay, state.config.batch_size, state.generator.device
    assert replay is not None
    owner = torch.randint(0, len(replay), (size,), generator=state.sampler)
    length = replay.length[owner]
    begin = (torch.rand(size, generator=state.sampler) * length).long()
    rows = replay.first[owner] + begin
    span = length - begin
    if not state.config.to_end:
        span = 1 + (torch.rand(size, generator=state.sampler) * span).long()
    to_go = replay.to_go[rows] - replay.to_go[rows + span]
    batch = replay.obs[rows], replay.action[rows], to_go, span.float()
    return tuple(x.to(device) for x in batch)  # type: ignore[return-value]  # four tensors


def update(state: State, obs: Tensor, action: Tensor, to_go: Tensor, horizon: Tensor) -> dict[str, float]:
    """One gradient step on steps `[B, ...]` and the commands `[B]` that were fulfilled from them on."""
    behavior = state.behavior
    output = behavior.actions(behavior(obs, to_go, horizon))
    loss = -behavior.actions.logp(output, action).mean()
    optim.descend(state.optimizer, loss.backward, state.config.max_grad_norm)
    return {"loss": loss.item()}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Fill the replay, then train on it and add new episodes to it, until `steps`."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    if state.replay is None:
        read_files(state)
    if state.replay is None:
        add(state, rollout(state, env, config.warmup_episodes))
        if state.step >= config.steps:
            raise errors.UserError(
                f"The first {config.warmup_episodes} episodes took {state.step:,} env steps, and the run ends after "
                f"{config.steps:,}: nothing would be learned. Raise --steps, or lower --warmup-episodes."
            )
    while state.step < config.steps:
        metrics: dict[str, float] = {}
        for _ in range(config.gradient_steps):
            metrics = update(state, *sample(state))
        asked = float(command(state, 1, False)[0])
        add(state, rollout(state, env, config.num_envs))
        yield state.step, {**metrics, "asked": asked, **state.episodes.metrics()}, state

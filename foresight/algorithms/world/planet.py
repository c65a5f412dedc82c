"""PlaNet: Learning latent dynamics for planning from pixels, Hafner et al. 2019 (arXiv:1811.04551).

    world model  minimize  Σ_t  -log p(x_t|s_t) - log p(r_t|s_t) + max(free, KL[q(s_t|h_t, x_t) ‖ p(s_t|h_t)])     eq. 4
    action       a_t = first mean of CEM over a_{t:t+H},  maximize  Σ_{k=1..H} r̂_{t+k}                            alg. 2

There is no policy and no value: at every step the cross-entropy method plans again in the latent space of the model.

What is kept: the Gaussian recurrent state-space model with free nats (`nets.models.planet`), seed episodes of random
actions, gradient steps on sequences between two episodes, noise on the actions of collected episodes, replanning at
every step from a standard normal.

Differences: candidates are scored along the means of the latents, from the mean of the posterior (the paper samples a
trajectory for each). With `act_best` the action is that of the best sequence that was scored, as in iCEM (Pinneri et
al. 2020, arXiv:2008.06389): where no plan finds a reward, all returns are equal, and a mean of them stays still. The
squared error of observations and rewards has a coefficient each, since the unit variance of the paper is meant for the
sum over 12,288 pixels. Latent overshooting is left out (the paper's code does not use it either); images are not
quantized to 5 bits. As in the paper, the end of an episode is not predicted: tasks should end by a time limit only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.sequences import Arrival, Sequences, arrivals
from foresight.data.trajectory import Trajectory, Tree, tree_map
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_num_envs
from foresight.nets import encoders
from foresight.nets.models.planet import GaussianRSSM
from foresight.nets.models.world_model import obs_model
from foresight.planning.continuous import bounds, cem
from foresight.training import optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "reconstruction", "reward", "divergence")


@dataclass(frozen=True)
class Config:
    """Defaults: the paper's, whose code they are from where the text has none; see the presets for tasks."""

    steps: int = 125_000  # env steps, summed over all environments; 1,000 episodes at an action repeat of 8
    seed: int = 0
    num_envs: int = 1  # parallel environments; each collects one episode between two rounds of updates
    seed_episodes: int = 5  # rounds of episodes with random actions, before the first update
    updates: int = 100  # gradient steps between two rounds of episodes; C in algorithm 1
    batch_size: int = 50  # sequences per gradient step
    sequence_length: int = 50  # rows per sequence
    replay_size: int = 1_000_000  # rows kept
    replay_on_disk: bool = False  # rows in files of the run, not in memory; a checkpoint then writes only new ones
    learning_rate: float = 1e-3  # Adam
    adam_eps: float = 1e-4  # ε of Adam
    max_grad_norm: float = 1000.0  # bound of the gradient norm
    reconstruction_coef: float = 1.0  # of the halved squared error of observations; larger for short vectors
    reward_coef: float = 10.0  # of the halved squared error of rewards
    free_nats: float = 3.0  # KL below which there is no gradient, per step
    min_std: float = 0.1  # of latents
    horizon: int = 12  # planned steps; H
    candidates: int = 1000  # action sequences per iteration; J
    elites: int = 100  # sequences that the next iteration is fitted to; K
    iterations: int = 10  # of the cross-entropy method; I. One, with one elite: random shooting
    act_best: bool = False  # act by the best of all scored sequences (iCEM, arXiv 2008.06389), not by the last mean
    action_noise: float = 0.3  # standard deviation of the noise on collected actions, in units of half their range
    deter: int = 200  # units of the recurrent state
    stoch: int = 30  # Gaussian latents
    hidden: int = 200  # units of layers inside the recurrent state-space model
    units: int = 300  # per layer of the reward; of encoder and decoder of vectors
    layers: int = 3  # of the reward; of encoder and decoder of vectors
    depth: int = 32  # channels of the image encoder: 2, 3, 4 and 4 times this
    patch: int = 1  # side of the squares in which images are read and drawn, in pixels; 1: convolutions only
    decoded: int = 0  # rows of each sequence that are reconstructed per update, drawn at random; 0: all
    threads: int = 1  # of torch, on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved, including the replay."""

    config: Config
    model: GaussianRSSM
    optimizer: torch.optim.Optimizer
    replay: Sequences
    generator: torch.Generator  # samples latents and candidates
    sampler: torch.Generator  # samples sequences, on the CPU
    step: int = 0
    gradient_steps: int = 0
    rounds: int = 0  # of collected episodes
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones
    space: Any = field(default=None, metadata={"save": False})  # of the environment's actions


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Model, optimizer and replay. Raises UserError for spaces and settings that are not supported."""
    _check(config)
    encoders.require_choice(spaces.action)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        obs = obs_model(spaces.obs, config.units, config.layers, config.depth, config.patch)
        model = GaussianRSSM(
            obs, bounds.width(spaces.action), config.deter, config.stoch, config.hidden, config.units, config.layers,
            config.min_std, config.free_nats, config.decoded,
        ).to(device)  # fmt: skip
    return State(
        config,
        model,
        torch.optim.Adam(model.parameters(), config.learning_rate, eps=config.adam_eps, fused=True),
        Sequences(config.replay_size, config.num_envs, config.replay_on_disk),
        generator=torch.Generator(device).manual_seed(config.seed),
        sampler=torch.Generator().manual_seed(config.seed),
        space=spaces.action,
    )


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """The first action of a plan for every row of `obs`, with noise if `explore` (uniform in the seed episodes).

    The carry is the latent state and the last action in [-1, 1]. With `explore` that is an extra, for the replay.
    """
    model, config = state.model, state.config
    batch = len(trees.first(obs))
    carry = model.initial(batch) if carry is None else carry
    nothing = torch.zeros(batch, 1, device=state.generator.device)
    one = tree_map(lambda x: x.unsqueeze(1), obs)
    found = model.observe(carry, one, carry["action"].unsqueeze(1), nothing, state.generator)
    belief = {"deter": found["deter"][:, 0], "stoch": found["mean"][:, 0]}
    if explore and state.rounds < config.seed_episodes:
        action = 2 * torch.rand(batch, model.action_width, generator=state.generator, device=nothing.device) - 1
    else:
        action = plan(state, belief)[:, 0]
        if explore:
            noise = torch.randn(action.shape, generator=state.generator, device=nothing.device)
            action = (action + config.action_noise * noise).clamp(-1, 1)
    carry = model.carry({name: x[:, 0] for name, x in found.items()}, action)
    return bounds.to_env(action, state.space), {"action": action} if explore else {}, carry


def plan(state: State, belief: Tree) -> Tensor:
    """Algorithm 2: actions `[B, H, A]` by the cross-entropy method, from latent states `[B, ...]`."""
    model, config = state.model, state.config
    batch, rows = len(belief["deter"]), len(belief["deter"]) * config.candidates
    starts = {name: x.repeat_interleave(config.candidates, 0) for name, x in belief.items()}

    def score(sequences: Tensor) -> Tensor:
        """`[B, N]` of `[B, N, H, A]`."""
        return model.rewards(starts, sequences.reshape(rows, *sequences.shape[2:])).sum(-1).view(batch, -1)

    start = cem.initial(batch, config.horizon, model.action_width, device=state.generator.device)
    if config.act_best:
        return cem.best_scored(score, start, config.candidates, config.elites, config.iterations, state.generator)
    return cem.cem(score, start, config.candidates, config.elites, config.iterations, state.generator).mean


def reset_carry(carry: Tree, cut: Tensor) -> Tree:
    """The carry with the rows set to zero where an episode was cut."""
    return trees.reset_carry(carry, cut)


@torch.no_grad()
def rollout(state: State, env: Env) -> None:
    """Store a whole episode of every environment (of the others also what they do until the longest has ended)."""
    choose = functools.partial(act, state, explore=True)
    seed = state.config.seed + state.step
    for segment in collect.whole_episodes(env, seed, choose, state.episodes, state.generator.device):
        collect.add_sequences(state.replay, segment)
        state.step += segment.trajectory.reward.numel()
    state.replay.interrupt()
    state.rounds += 1


def sample(state: State) -> tuple[Trajectory, Arrival]:
    """Sequences `[B, T]`, and what led to each row."""
    config, device = state.config, state.generator.device
    batch = state.replay.sample(config.batch_size, config.sequence_length, state.sampler).map(lambda x: x.to(device))
    return batch.replace(action=batch.extras["action"]), arrivals(batch)


def update(state: State, batch: Trajectory, arrival: Arrival) -> dict[str, float]:
    """One gradient step of the world model."""
    config = state.config
    terms, _ = state.model.loss(state.model.initial(batch.shape[0]), batch, arrival, state.generator)
    coefs = {"reconstruction": config.reconstruction_coef, "reward": config.reward_coef, "divergence": 1.0}
    means = {name: term.mean() for name, term in terms.items()}
    optim.descend(state.optimizer, optim.total(terms, coefs).backward, config.max_grad_norm)
    state.gradient_steps += 1
    return {name: mean.item() for name, mean in means.items()}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Algorithm 1: after the seed episodes, updates and an episode in turn, until `steps`."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    while state.step < config.steps:
        metrics: dict[str, float] = {}
        if state.rounds >= config.seed_episodes and state.replay.ready(config.sequence_length):
            for _ in range(config.updates):
                metrics = update(state, *sample(state))
        rollout(state, env)
        yield state.step, {**metrics, **state.episodes.metrics()}, state


def _check(config: Config) -> None:
    errors.at_least(0, config, "action_noise", "seed_episodes", "free_nats", "min_std", "decoded")
    errors.at_least(
        1, config, "num_envs", "updates", "batch_size", "replay_size", "horizon", "candidates",
        "elites", "iterations", "deter", "stoch", "hidden", "units", "layers", "depth", "patch",
    )  # fmt: skip
    errors.at_least(2, config, "sequence_length")  # the model is trained on what the row before leads to
    cem.require_elites(config.candidates, config.elites)
    Sequences.require_room(config.replay_size, config.num_envs, config.sequence_length)

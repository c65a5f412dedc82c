"""DreamerV3: Mastering diverse domains through world models, Hafner et al. 2023 (arXiv:2301.04104).

    world model  minimize  Σ_t  -log p(x_t|s_t) - log p(r_t|s_t) - log p(c_t|s_t)
                                + β_dyn max(1, KL[sg(q) ‖ p]) + β_rep max(1, KL[q ‖ sg(p)])            eq. 5
    critic       minimize  Σ_t  w_t ( -log p_ψ(R_t | s_t) - log p_ψ(sg(V_ψ'(s_t)) | s_t) )
    actor        minimize  -Σ_t  w_t ( sg(R_t - V_ψ(s_t)) / max(1, S) · log π(a_t|s_t) + η H[π(·|s_t)] )      eq. 7

where s_t are latent states, R_t is the λ-return of a rollout that the actor makes inside the world model, w_t the
predicted probability that the rollout is still alive, S the running range of returns between their 5th and 95th
percentile, and ψ' a slow average of ψ.

What is kept: the recurrent state-space model with categorical latents (`nets.models.rssm`), symlog observations,
two-hot rewards and values, KL balance with free bits, imagination from every state of the batch, Reinforce for all
kinds of actions, the critic's loss on replayed sequences as well, LaProp with adaptive clipping, one optimizer for all.

`decoder` false is R2-Dreamer (ICLR 2026): no reconstruction; a linear projection of s_t must correlate with the
encoding of x_t feature by feature, and with no other feature of it.

Differences: replayed sequences are drawn uniformly (the paper also trains on the newest ones first); the reward of the
first row of an episode is not a target. The discount γ is inside the predicted continuation, as in the code.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from foresight import errors
from foresight.data import trees
from foresight.data.sequences import Arrival, Sequences, arrivals
from foresight.data.trajectory import Trajectory, Tree, tree_map
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.envs.collect import Rollout
from foresight.errors import UserError
from foresight.nets import precision
from foresight.nets.models.latent_actor import LatentActor, action_width
from foresight.nets.models.rssm import RSSM
from foresight.nets.models.world_model import TwoHotMLP, WorldModel, compile_steps, obs_model, recompute
from foresight.ops import schedules
from foresight.training import graphs, imagination, optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "reconstruction", "dynamics", "imagined_return", "entropy")
ACTING = ("model", "actor", "critic")  # the fields of State that actors are sent
REPORT = 1_000  # env steps between two yields


@dataclass(frozen=True)
class Config:
    """Defaults: the paper's 1M-parameter model; see the presets for tasks."""

    steps: int = 500_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 1  # parallel environments
    rollout_steps: int = 1  # steps of each environment between two rounds of updates, and per message of an actor
    max_lag: int = 1  # rounds of updates by which an actor's policy may lag; 0: actors wait, as without actors
    train_ratio: float = 512.0  # replayed steps per env step; 1,024 on state inputs, 256 on Atari 100k (table 2)
    batch_size: int = 16  # sequences per gradient step; table 4
    sequence_length: int = 64  # rows per sequence; table 4
    replay_size: int = 1_000_000  # rows kept; 5,000,000 in table 4
    replay_on_disk: bool = False  # rows in files of the run, not in memory; a checkpoint then writes only new ones
    replay_on_device: bool = False  # rows in the memory of the device that learns, not the CPU's
    learning_starts: int = 1_000  # env steps with random actions, before the first update
    learning_rate: float = 4e-5  # LaProp; table 4
    lr_warmup: int = 1_000  # gradient steps
    horizon: int = 15  # imagined steps; table 4
    imagined_last: int = 0  # imagine from that many last rows of each sequence; 0: from all of them, as table 4
    gamma: float = 0.997  # discount per step, 1 - 1/333; table 4
    gae_lambda: float = 0.95  # λ of the returns; table 4
    entropy_coef: float = 3e-4  # η; table 4
    dynamics_coef: float = 1.0  # β_dyn; table 4
    representation_coef: float = 0.1  # β_rep; table 4
    replay_value_coef: float = 0.3  # of the critic's loss on replayed sequences; table 4
    free_nats: float = 1.0  # KL below which there is no gradient, per step; table 4
    unimix: float = 0.01  # share of uniform probability in latents and discrete actions; table 4
    slow_critic_rate: float = 0.02  # of the slow critic's average, per gradient step; table 4
    deter: int = 512  # units of the recurrent state; table 3 and the code's size1m
    hidden: int = 64  # units of layers inside the recurrent state-space model
    groups: int = 32  # categoricals per latent
    classes: int = 4  # classes per categorical
    blocks: int = 8  # of the recurrent state
    units: int = 64  # per layer of encoder, decoder, heads, actor and critic
    layers: int = 3  # of encoder, decoder, actor and critic; reward and continuation have one
    depth: int = 4  # channels of the image encoder: 2, 3, 4 and 4 times this
    patch: int = 1  # side of the squares in which images are read and drawn, in pixels; 1: convolutions only
    images: str = "convs"  # the encoder of images; or "vit", "vit:16" (pixels of a patch), "swin", "impala", "nature"
    decoded: int = 0  # rows of each sequence that are reconstructed per update, drawn at random; 0: all
    decoder: bool = True  # observations are reconstructed; without: R2-Dreamer's redundancy reduction instead
    redundancy_coef: float = 0.05  # of that loss; R2-Dreamer's code
    precision: str = "float32"  # of matrix products: "float32", "bfloat16" (under autocast) or "auto" (the faster one)
    compile: bool = False  # the step of imagination by torch.compile, on a GPU the networks of images too
    graph: bool = True  # on a GPU, record an update as a CUDA graph and replay it; on a CPU nothing
    gradient_checkpointing: bool = False  # recompute the image encoder and decoder backward: less memory, same values
    search_simulations: int = 0  # of MuZero's search in the model before every action; 0: the actor's action
    threads: int = 1  # of torch, on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved, including the replay."""

    config: Config
    model: WorldModel
    actor: LatentActor
    critic: TwoHotMLP
    slow_critic: TwoHotMLP
    spread: imagination.Spread
    optimizer: imagination.LaProp
    replay: Sequences
    generator: torch.Generator  # samples the actions that are taken, and the latents before them
    inner: torch.Generator  # samples latents and imagined actions within updates
    sampler: torch.Generator  # samples sequences, on the CPU
    step: int = 0
    gradient_steps: int = 0
    due: float = 0.0  # replayed steps that the train ratio allows and that were not yet trained on
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones
    graph: graphs.Graph = field(default_factory=graphs.Graph, metadata={"save": False})  # of an update


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizer and replay. Raises UserError for spaces and settings that are not supported."""
    _check(config)
    require_end(spaces, config.gamma)
    imagination.require_searchable(config.search_simulations, spaces.action)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        obs = obs_model(spaces.obs, config.units, config.layers, config.depth, config.patch, config.images)
        model = RSSM(
            obs, action_width(spaces.action), config.deter, config.hidden, config.groups, config.classes,
            config.blocks, config.unimix, config.free_nats, config.units, decoded=config.decoded,
            decoder=config.decoder,
        )  # fmt: skip
        if config.gradient_checkpointing:
            recompute(model)
        if config.compile:
            compile_steps(model, device)
        actor = LatentActor(spaces.action, model.size, config.units, config.layers, config.unimix)
        critic = TwoHotMLP(model.size, config.units, config.layers)
        model, actor, critic = model.to(device), actor.to(device), critic.to(device)
    parameters = [*model.parameters(), *actor.parameters(), *critic.parameters()]
    return State(
        config,
        model,
        actor,
        critic,
        copy.deepcopy(critic).requires_grad_(False),
        imagination.Spread().to(device),
        imagination.LaProp(parameters, config.learning_rate, warmup=config.lr_warmup),
        Sequences(
            config.replay_size, config.num_envs, config.replay_on_disk, device if config.replay_on_device else None
        ),
        generator=torch.Generator(device).manual_seed(config.seed),
        inner=torch.Generator(device).manual_seed(config.seed + 1),
        sampler=torch.Generator().manual_seed(config.seed),
        graph=graphs.Graph(config.graph),
    )


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """An action for every row of `obs`: sampled if `explore`, else the mode, of latents too.

    Before `learning_starts`, sampled actions are uniform. The carry is the latent state and the features of the last
    action. The extras are the carry, for the replay.
    """
    model, actor, config = state.model, state.actor, state.config
    batch = trees.first(obs).shape[0]
    carry = model.initial(batch) if carry is None else carry
    nothing = torch.zeros(batch, 1, device=state.generator.device)
    one = tree_map(lambda x: x.unsqueeze(1), obs)
    unknown = nothing.unsqueeze(-1).expand(-1, -1, actor.width)  # the action is not chosen yet
    found = model.observe(carry, one, unknown, nothing, state.generator if explore else None)
    now = {name: x[:, 0] for name, x in found.items()}
    output = actor(model.features(now))
    action = output.sample(state.generator) if explore else output.mode()
    if explore and state.step < config.learning_starts:
        action = actor.random(batch, state.generator)
    elif simulations := state.config.search_simulations:
        inside = imagination.Inside(model, actor, state.critic, state.config.gamma, state.generator)
        action = imagination.searched(inside, now, simulations, explore)
    features = actor.action_features(action)
    carry = model.carry(now, features)
    extras = {**{name: carry[name] for name in model.kept}, "action": features}
    return actor.to_env(action), extras if explore else {}, carry


def reset_carry(carry: Tree, cut: Tensor) -> Tree:
    """The carry with the rows set to zero where an episode was cut."""
    return trees.reset_carry(carry, cut)


def restart(state: State) -> None:
    """The environments were reset: the successors of the newest transitions are unknown."""
    state.replay.interrupt()


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree, carry: Tree = None) -> tuple[Rollout, Tree, Tree]:
    """`rollout_steps` of every environment from `obs` on; also the next observation and the carry."""
    carry = state.model.initial(env.num_envs) if carry is None else carry
    choose, device = functools.partial(act, state, explore=True), state.generator.device
    segment = collect.segment(
        env, obs, choose, state.config.rollout_steps, device, state.episodes, carry, terminal=True
    )
    state.step += segment.trajectory.reward.numel()
    return dataclasses.replace(segment, first=None, carry=None, final_carry=None), segment.last, segment.carry


def sample(state: State) -> tuple[Tree, Trajectory, Arrival]:
    """The latent states `[B, ...]` before sequences, as last computed; the sequences `[B, T]`; what led to each row."""
    config, device = state.config, state.generator.device
    batch = state.replay.sample(config.batch_size, config.sequence_length + 1, state.sampler)
    batch = batch.map(lambda x: x.to(device)).replace(discount=config.gamma * batch.discount.to(device))
    arrival = Arrival(*(x[:, 1:] for x in arrivals(batch)))
    keep = (1 - batch.cut[:, 0]).unsqueeze(-1)
    carry = state.model.initial(config.batch_size)
    carry |= {name: batch.extras[name][:, 0] * keep for name in state.model.kept}
    return carry, batch.map(lambda x: x[:, 1:]), arrival


def update(state: State, carry: Tree, batch: Trajectory, arrival: Arrival) -> dict[str, float]:
    """`descend`, then the replay gets the latent states that were computed."""
    found, fresh = state.graph(functools.partial(descend, state), (carry, batch, arrival), [state.inner])
    metrics = dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))
    optim.require_finite(metrics)
    state.replay.refresh(batch.extras["key"].flatten().cpu(), fresh)
    state.gradient_steps += 1
    return metrics


def descend(
    state: State, carry: Tree, batch: Trajectory, arrival: Arrival
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One gradient step of world model, critic and actor together, and the average of the slow critic.

    Returns the metrics and the latent states of all rows `[B T, ...]` that the replay keeps.
    """
    config, model, actor, critic = state.config, state.model, state.actor, state.critic
    batch = batch.replace(action=batch.extras["action"])
    with precision.autocast(config.precision, state.inner.device):
        terms, found = model.loss(carry, batch, arrival, state.inner)

    latents = {name: x.detach() for name, x in found.items()}
    alive = 1 - batch.cut * arrival.known * (arrival.discount == 0)  # 0 at final observations; a lost life is not one
    late = slice(-config.imagined_last, None) if config.imagined_last else slice(None)
    starts = {name: x[:, late].flatten(0, 1) for name, x in latents.items()}
    with precision.autocast(config.precision, state.inner.device):
        steps, features = imagination.rollout(model, starts, actor, config.horizon, config.gamma, state.inner)
        output = actor(features, config.horizon)  # of the last state only the value counts, which bootstraps
        predicted = critic(features)
        with torch.no_grad():
            slow = state.slow_critic(features).mean()
    with torch.no_grad():
        value = predicted.mean()
        target = imagination.imagined_return(steps, value, config.gae_lambda)
        weight = imagination.reach_weights(alive[:, late].flatten(), steps.discount)
        advantage = (target - value[:, :-1]) / state.spread.update(target)
    terms["actor"] = imagination.actor_loss(output, steps.action, advantage, weight, config.entropy_coef)
    terms["critic"] = weight * predicted.loss(functional.pad(target, (0, 1)), slow)[:, :-1]
    replayed, features = batch.map(lambda x: x[:, late]), model.features(found)[:, late]
    terms["replay_value"] = replay_value_loss(state, replayed, features, target[:, 0].view_as(replayed.reward))

    coefs = {
        "dynamics": config.dynamics_coef,
        "representation": config.representation_coef,
        "replay_value": config.replay_value_coef,
        "redundancy": config.redundancy_coef,
    }
    optim.step(state.optimizer, optim.total(terms, coefs).backward)
    optim.track(state.slow_critic, critic, config.slow_critic_rate)
    metrics = {name: term.detach().mean() for name, term in terms.items()}
    metrics |= {"imagined_return": target.mean(), "entropy": output.entropy().detach().mean()}
    metrics["saturated"] = imagination.saturated(critic.bins, arrival.reward, target)
    return metrics, {name: latents[name].flatten(0, 1) for name in model.kept if name in latents}


def replay_value_loss(state: State, batch: Trajectory, features: Tensor, imagined: Tensor) -> Tensor:
    """The critic's loss `[B, T]` on replayed sequences, whose λ-returns bootstrap from the `imagined` ones `[B, T]`.

    The gradient reaches the world model.
    """
    target, known = imagination.replayed_return(batch, imagined, state.config.gae_lambda)
    with torch.no_grad():
        slow = state.slow_critic(features).mean()
    predicted = state.critic(features)
    return known * predicted.loss(target, slow)


def learn(state: State, segment: Rollout) -> dict[str, float]:
    """Store the rollout, then run the updates that the train ratio allows; returns the metrics of the last one."""
    config = state.config
    collect.add_sequences(state.replay, segment)
    metrics: dict[str, float] = {}
    if state.step >= config.learning_starts and state.replay.ready(config.sequence_length + 1):
        state.due += config.train_ratio * segment.trajectory.reward.numel()
        for _ in range(int(state.due // (config.batch_size * config.sequence_length))):
            metrics = update(state, *sample(state))
            state.due -= config.batch_size * config.sequence_length
    return metrics


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Act, store, update, until `steps`. A given state resumes with new episodes."""
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
    precision.dtype(config.precision, "cpu")
    errors.at_least(0, config, "max_lag", "imagined_last", "decoded", "search_simulations")
    errors.at_least(
        1, config, "num_envs", "rollout_steps", "batch_size", "sequence_length", "replay_size", "horizon", "groups",
        "classes", "blocks", "deter", "hidden", "units", "layers", "depth", "patch",
    )  # fmt: skip
    errors.between(0, 1, config, "gamma", "gae_lambda", "slow_critic_rate")
    errors.share(config, "unimix")
    if not 0 < config.train_ratio < math.inf:
        raise UserError(f"train_ratio must be above 0, not {config.train_ratio}: it is replayed steps per env step.")
    if config.imagined_last > config.sequence_length:
        raise UserError(
            f"imagined_last {config.imagined_last} is more than sequence_length {config.sequence_length}: "
            "imagination starts at rows of the sequences. 0 means all rows."
        )
    if config.replay_value_coef and config.imagined_last == 1:
        raise UserError(
            f"replay_value_coef {config.replay_value_coef} trains on returns between the rows that imagination starts "
            "at, of which there is only one. Set imagined_last to at least 2, or to 0 for all rows."
        )
    if config.deter % config.blocks:
        raise UserError(f"deter {config.deter} is no multiple of blocks {config.blocks}.")
    Sequences.require_room(config.replay_size, config.num_envs, config.sequence_length + 1)

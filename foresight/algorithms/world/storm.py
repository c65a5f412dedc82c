"""STORM: Efficient stochastic transformer based world models, Zhang et al. 2023 (arXiv:2310.09615).

    world model  minimize  Σ_t  |o_t - ô_t|² - log p(r_t|h_t) - log p(c_t|h_t)
                                + β_dyn max(1, KL[sg(q(z_{t+1}|o_{t+1})) ‖ p(z_{t+1}|h_t)])
                                + β_rep max(1, KL[q(z_{t+1}|o_{t+1}) ‖ sg(p(z_{t+1}|h_t))])
    critic       minimize  Σ_t  w_t ( -log p_ψ(R_t | s_t) - log p_ψ(R'_t | s_t) )
    actor        minimize  -Σ_t  w_t ( sg(R_t - V_ψ(s_t)) / max(1, S) · log π(a_t|s_t) + η H[π(·|s_t)] )

where z_t is the categorical latent of the observation o_t, h_t the output of a causal transformer over the latents and
actions up to t, and s_t = (z_t, h_{t-1}). R_t is the λ-return of a rollout that the actor makes inside the world model,
R'_t the same with the values of a slow average of the critic, w_t is γ^t times the predicted probability that the
rollout is still alive, and S the running range of returns between their 5th and 95th percentile.

What is kept: one token a step, two steps of training (model, then agent) after every env step, imagination from random
contexts of the replay, free bits on the mean divergence, the coefficients, sizes and learning rates.

Departures from the authors' code, where that differs from the definitions:

- the λ-return mixes in V(s_{t+1}), the code V(s_t);
- attention and positions begin again at every episode, the code reads across the end of episodes;
- the actor sees the latent of the current observation; the code's sees a sample of the prior of it, so that it acts
  before looking;
- the predicted continuation, with γ, multiplies values, and the losses of later steps weigh less by it; the code
  thresholds it and does not weigh;
- the mean of two-hot predictions is taken over the values of the bins, not over their symlog;
- the network: see `nets.models.storm`. Encoder and decoder are those of our other world models.

`replay_value_coef` adds DreamerV3's loss of the critic on real returns, `imagined_last` its starts of imagination: the
rows on which the model was just trained. `contrastive_coef` adds the loss of TWISTER (`nets.models.contrastive`).
`sequence_model` "lstm" replaces the transformer by an LSTM with as many weights, to show what attention adds.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
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
from foresight.nets.models.contrastive import Contrastive
from foresight.nets.models.latent_actor import LatentActor, action_width
from foresight.nets.models.storm import STORM, CausalTransformer, RecurrentSequence, SequenceModel
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
    """Defaults: the paper's, for Atari 100k. "Code" is the authors'."""

    steps: int = 102_000  # env steps, summed over all environments; code
    seed: int = 0
    num_envs: int = 1  # parallel environments
    rollout_steps: int = 1  # steps of each environment between two rounds of updates, and per message of an actor
    max_lag: int = 1  # rounds of updates by which an actor's policy may lag; 0: actors wait, as without actors
    train_every: int = 1  # env steps per update of model and agent; code
    batch_size: int = 16  # sequences per update of the model; code
    sequence_length: int = 64  # rows per sequence; code
    replay_size: int = 100_000  # rows kept; code
    replay_on_disk: bool = False  # rows in files of the run, not in memory; a checkpoint then writes only new ones
    replay_on_device: bool = False  # rows in the memory of the device that learns, not the CPU's; code
    learning_starts: int = 1_024  # env steps with random actions, before the first update; code
    learning_rate: float = 1e-4  # of the model, Adam; code
    agent_learning_rate: float = 3e-5  # of actor and critic, Adam; code
    max_grad_norm: float = 1_000.0  # of the model; code
    agent_max_grad_norm: float = 100.0  # of actor and critic; code
    imagined_batch: int = 1_024  # imagined rollouts per update of the agent; code
    context: int = 8  # earlier steps that acting and imagination see (the code imagines with 8 and acts with 16)
    imagined_last: int = 0  # imagine from so many last rows of the model's sequences; 0: from `imagined_batch` contexts
    horizon: int = 16  # imagined steps; code
    gamma: float = 0.985  # discount per step; code
    gae_lambda: float = 0.95  # λ of the returns; code
    entropy_coef: float = 3e-4  # η; code
    dynamics_coef: float = 0.5  # β_dyn; code
    representation_coef: float = 0.1  # β_rep; code
    contrastive_coef: float = 0.0  # of TWISTER's loss, which has 1; 0: without it
    contrastive_steps: int = 10  # steps ahead of that loss, the current one included; TWISTER's code
    replay_value_coef: float = 0.0  # of the critic's loss on replayed rows, which DreamerV3 has with 0.3
    free_nats: float = 1.0  # mean KL below which there is no gradient; code
    unimix: float = 0.01  # share of uniform probability in latents; code
    slow_critic_rate: float = 0.02  # of the slow critic's average, per update; code
    sequence_model: str = "transformer"  # or "lstm"
    width: int = 512  # of the sequence model
    sequence_layers: int = 2  # of the sequence model
    heads: int = 8  # of attention
    dropout: float = 0.1  # in the transformer, while the model is trained
    groups: int = 32  # categoricals per latent
    classes: int = 32  # classes per categorical
    units: int = 512  # per layer of the heads, actor and critic, and of encoder and decoder of vectors
    layers: int = 2  # of the heads, actor and critic, and of encoder and decoder of vectors
    depth: int = 16  # channels of the image encoder: 2, 3, 4 and 4 times this
    patch: int = 1  # side of the squares in which images are read and drawn, in pixels; 1: convolutions only
    decoded: int = 0  # rows of each sequence that are reconstructed per update, drawn at random; 0: all
    precision: str = "float32"  # of matrix products: "float32", "bfloat16" (under autocast) or "auto" (the faster one)
    compile: bool = False  # the step of imagination by torch.compile, on a GPU the networks of images too
    graph: bool = True  # on a GPU, record an update as a CUDA graph and replay it; on a CPU nothing
    gradient_checkpointing: bool = False  # recompute the image encoder and decoder backward: less memory, same values
    search_simulations: int = 0  # of MuZero's search in the model before every action; 0: the actor's action
    threads: int = 1  # of torch, on a CPU; 0: one per core


SEQUENCE_MODELS: dict[str, Callable[[Config], SequenceModel]] = {
    "transformer": lambda c: CausalTransformer(c.width, c.sequence_layers, c.heads, c.dropout),
    "lstm": lambda c: RecurrentSequence(c.width, c.sequence_layers),
}


@dataclass
class State:
    """Everything that is saved, including the replay."""

    config: Config
    model: WorldModel
    actor: LatentActor
    critic: TwoHotMLP
    slow_critic: TwoHotMLP
    spread: imagination.Spread
    optimizer: torch.optim.Adam  # of the model
    agent_optimizer: torch.optim.Adam  # of actor and critic
    replay: Sequences
    generator: torch.Generator  # samples the actions that are taken, and the latents before them
    inner: torch.Generator  # samples latents and imagined actions within updates
    sampler: torch.Generator  # samples sequences, on the CPU
    step: int = 0
    gradient_steps: int = 0
    due: int = 0  # env steps that were not yet trained on
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones
    graph: graphs.Graph = field(default_factory=graphs.Graph, metadata={"save": False})  # of an update


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizers and replay. Raises UserError for spaces and settings that are not supported."""
    _check(config)
    require_end(spaces, config.gamma)
    imagination.require_searchable(config.search_simulations, spaces.action)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        obs = obs_model(spaces.obs, config.units, config.layers, config.depth, config.patch)
        width, stoch = action_width(spaces.action), config.groups * config.classes
        contrastive = None
        if config.contrastive_coef:
            contrastive = Contrastive(config.width, stoch, width, config.contrastive_steps, config.units)
        model = STORM(
            obs, width, SEQUENCE_MODELS[config.sequence_model](config), config.groups, config.classes, config.context,
            config.unimix, config.free_nats, config.units, config.layers, contrastive, config.sequence_length,
            config.decoded,
        )  # fmt: skip
        if config.gradient_checkpointing:
            recompute(model)
        if config.compile:
            compile_steps(model, device)
        actor = LatentActor(spaces.action, model.size, config.units, config.layers, unimix=0.0)
        critic = TwoHotMLP(model.size, config.units, config.layers)
        model, actor, critic = model.to(device), actor.to(device), critic.to(device)
    agent = [*actor.parameters(), *critic.parameters()]
    return State(
        config,
        model,
        actor,
        critic,
        copy.deepcopy(critic).requires_grad_(False),
        imagination.Spread().to(device),
        optim.adam(model.parameters(), config.learning_rate),
        optim.adam(agent, config.agent_learning_rate, 1e-5),
        Sequences(
            config.replay_size, config.num_envs, config.replay_on_disk, device if config.replay_on_device else None
        ),
        generator=torch.Generator(device).manual_seed(config.seed),
        inner=torch.Generator(device).manual_seed(config.seed + 1),
        sampler=torch.Generator().manual_seed(config.seed),
        graph=graphs.Graph(config.graph and config.sequence_model != "lstm"),  # its steps depend on where episodes end
    )


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """An action for every row of `obs`: sampled if `explore`, else the mode, of latents too.

    Before `learning_starts`, sampled actions are uniform. The carry is the latents and actions of the last `context`
    steps. The extras are the action as the model reads it, for the replay.
    """
    model, actor = state.model, state.actor
    batch = len(trees.first(obs))
    carry = model.initial(batch) if carry is None else carry
    one, generator = tree_map(lambda x: x.unsqueeze(1), obs), state.generator if explore else None
    nothing = torch.zeros(batch, 1, actor.width, device=state.generator.device)  # the action is not chosen yet
    found = model.observe(carry, one, nothing, nothing[..., 0], generator)
    now = {name: x[:, 0] for name, x in found.items()}
    output = actor(model.features(now))
    action = output.sample(state.generator) if explore else output.mode()
    if explore and state.step < state.config.learning_starts:
        action = actor.random(batch, state.generator)
    elif simulations := state.config.search_simulations:
        inside = imagination.Inside(model, actor, state.critic, state.config.gamma, state.generator)
        action = imagination.searched(inside, now, simulations, explore)
    features = actor.action_features(action)
    return actor.to_env(action), {"action": features} if explore else {}, model.carry(now, features)


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


def sample(state: State, count: int, length: int) -> tuple[Trajectory, Arrival]:
    """`count` sequences of `length` rows, actions as the model reads them, γ in the discount; what led to each row."""
    batch = state.replay.sample(count, length, state.sampler).map(lambda x: x.to(state.generator.device))
    batch = batch.replace(action=batch.extras["action"], discount=state.config.gamma * batch.discount)
    return batch, arrivals(batch)


def update_model(state: State, batch: Trajectory, arrival: Arrival) -> tuple[dict[str, Tensor], Tree]:
    """One gradient step of the world model on sequences `[B, T]`; its metrics, and the states of all rows."""
    config, model = state.config, state.model
    with precision.autocast(config.precision, state.inner.device):
        terms, found = model.loss(model.initial(len(batch.reward)), batch, arrival, state.inner)
    coefs = {
        "dynamics": config.dynamics_coef,
        "representation": config.representation_coef,
        "contrastive": config.contrastive_coef,
    }
    optim.descend(state.optimizer, optim.total(terms, coefs).backward, config.max_grad_norm)
    return {name: term.detach().mean() for name, term in terms.items()}, tree_map(Tensor.detach, found)


def roots(state: State, batch: Trajectory, arrival: Arrival, found: Tree = None) -> tuple[Tree, Trajectory, Arrival]:
    """Where imagination begins: states, rows and what led to them, `[N, L, ...]`.

    The last rows of the sequences on which the model was just trained, whose states were `found`; or, without those,
    the last row of each context.
    """
    config, length = state.config, state.config.imagined_last
    if found is None:
        length = 1
        with torch.no_grad(), precision.autocast(config.precision, state.inner.device):
            latest = state.model.latest(batch.obs, batch.action, batch.cut, state.inner)
        found = {name: x.unsqueeze(1) for name, x in latest.items()}
    late = slice(-length, None)
    found = {name: x[:, late] for name, x in found.items()}
    return found, batch.map(lambda x: x[:, late]), Arrival(*(x[:, late] for x in arrival))


def update_agent(state: State, starts: Tree, batch: Trajectory, arrival: Arrival) -> dict[str, Tensor]:
    """One gradient step of actor and critic on rollouts from all rows `[N, L]` of a batch, whose states are given."""
    config, model, actor, critic = state.config, state.model, state.actor, state.critic
    flat = {name: x.flatten(0, 1) for name, x in starts.items()}
    with precision.autocast(config.precision, state.inner.device):
        steps, features = imagination.rollout(model, flat, actor, config.horizon, config.gamma, state.inner)
        output = actor(features, config.horizon)  # of the last state only the value counts, which bootstraps
        predicted = critic(features)
        with torch.no_grad():
            slow = state.slow_critic(features).mean()
    with torch.no_grad():
        value = predicted.mean()
        target = imagination.imagined_return(steps, value, config.gae_lambda)
        slow_target = imagination.imagined_return(steps, slow, config.gae_lambda)
        # 0 at final observations, not at lost lives; and where it is not known which of both a first row is
        alive = 1 - batch.cut * (1 - arrival.known * (arrival.discount != 0))
        weight = imagination.reach_weights(alive.flatten(), steps.discount)
        advantage = (target - value[:, :-1]) / state.spread.update(target)
    actor_loss = imagination.actor_loss(output, steps.action, advantage, weight, config.entropy_coef)
    critic_loss = weight * predicted.loss(functional.pad(target, (0, 1)), functional.pad(slow_target, (0, 1)))[:, :-1]
    terms = {"actor": actor_loss, "critic": critic_loss}
    if config.replay_value_coef:
        real, known = imagination.replayed_return(batch, target[:, 0].view_as(batch.reward), config.gae_lambda)
        here = critic(features[:, 0].unflatten(0, batch.reward.shape))
        terms["replay_value"] = known * here.loss(real, slow[:, 0].view_as(real))
    loss = optim.total(terms, {"replay_value": config.replay_value_coef})
    optim.descend(state.agent_optimizer, loss.backward, config.agent_max_grad_norm)
    optim.track(state.slow_critic, critic, config.slow_critic_rate)
    found = {**terms, "imagined_return": target, "entropy": output.entropy()}
    found["saturated"] = imagination.saturated(critic.bins, arrival.reward, target)
    return {name: x.detach().mean() for name, x in found.items()}


def update_both(
    state: State, rows: tuple[Trajectory, Arrival], contexts: tuple[Trajectory, Arrival] | None = None
) -> dict[str, Tensor]:
    """One gradient step of the model on sequences, then one of the agent: on rollouts from their rows or `contexts`."""
    metrics, found = update_model(state, *rows)
    starts = roots(state, *contexts) if contexts else roots(state, *rows, found=found)
    return metrics | update_agent(state, *starts)


def update(state: State) -> dict[str, float]:
    """One update of the world model, then one of the agent."""
    config = state.config
    inputs = [sample(state, config.batch_size, config.sequence_length)]
    if not config.imagined_last:
        inputs.append(sample(state, config.imagined_batch, config.context + 1))
    found = state.graph(functools.partial(update_both, state), inputs, [state.inner])
    metrics = dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))
    optim.require_finite(metrics)
    state.gradient_steps += 1
    return metrics


def learn(state: State, segment: Rollout) -> dict[str, float]:
    """Store the rollout, then run the updates that are due; returns the metrics of the last one."""
    config = state.config
    collect.add_sequences(state.replay, segment)
    metrics: dict[str, float] = {}
    if state.step >= config.learning_starts and state.replay.ready(max(config.sequence_length, config.context + 1)):
        state.due += segment.trajectory.reward.numel()
        while state.due >= config.train_every:
            metrics = update(state)
            state.due -= config.train_every
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
    if config.sequence_model not in SEQUENCE_MODELS:
        raise errors.unknown("sequence_model", config.sequence_model, SEQUENCE_MODELS)
    errors.at_least(
        0, config, "max_lag", "contrastive_coef", "decoded", "imagined_last", "replay_value_coef", "search_simulations"
    )
    errors.at_least(
        1, config, "num_envs", "rollout_steps", "train_every", "batch_size", "replay_size",
        "imagined_batch", "context", "horizon", "contrastive_steps", "width", "sequence_layers", "heads", "groups",
        "classes", "units", "layers", "depth", "patch",
    )  # fmt: skip
    errors.at_least(2, config, "sequence_length")  # the model is trained on what the row before leads to
    errors.between(0, 1, config, "gamma", "gae_lambda", "slow_critic_rate")
    errors.share(config, "dropout", "unimix")
    if config.sequence_model == "transformer" and config.width % (2 * config.heads):
        raise UserError(f"width must be an even multiple of heads, {config.heads}, not {config.width}.")
    if config.context > config.sequence_length:
        raise UserError(
            f"context {config.context} is more than sequence_length {config.sequence_length}: the model would read "
            "more steps than it was trained on. Lower --context or raise --sequence-length."
        )
    if config.imagined_last > config.sequence_length:
        raise UserError(
            f"imagined_last {config.imagined_last} is more than sequence_length {config.sequence_length}: "
            "imagination starts at rows of the sequences. 0 means contexts of their own."
        )
    if config.replay_value_coef and config.imagined_last < 2:
        raise UserError(
            f"replay_value_coef {config.replay_value_coef} trains on returns between the rows that imagination starts "
            f"at, which are single ones with imagined_last {config.imagined_last}. Set imagined_last to at least 2."
        )
    Sequences.require_room(config.replay_size, config.num_envs, max(config.sequence_length, config.context + 1))

"""TD-MPC2: Scalable, robust world models for continuous control, Hansen et al. 2024 (arXiv:2310.16828).

    model, critics  minimize  Σ_t ρᵗ ( c_z ‖z_{t+1} - sg(h(s_{t+1}))‖² + c_r CE(R(z_t, a_t), r_t)
                                       + c_q CE(Q(z_t, a_t), y_t) )
                    where  z_0 = h(s_0),  z_{t+1} = d(z_t, a_t),  y_t = r_t + γ min Q⁻(h(s_{t+1}), π(h(s_{t+1})))§3.1
    policy          maximize  Σ_t ρᵗ ( Q(z_t, π(z_t)) / max(1, S) + β dim(A) H(π(·|z_t)) )                      §3.1
    planning        maximize  Σ_{t<H} γᵗ R(z_t, a_t) + γᴴ Q(z_H, π(z_H))  over a_0 .. a_{H-1}, by MPPI          §3.2

where S is the running range of Q between its 5th and 95th percentile, and Q⁻ a slow average of Q.

What is kept: latent states on simplices (SimNorm), joint training of model and critics through the predicted latents,
two-hot rewards and values, the minimum (targets) and the mean (policy, planning) of two random critics of the ensemble,
policy proposals among the candidates of MPPI, the plan of the last step as the start of the next, and as many updates
before the first plan as random steps.

Differences: SiLU for Mish (see `nets.models.tdmpc2`); bins of two-hot values are symexp-spaced, and the prediction is
their mean (the authors' code: the symexp of the mean of symlog values, which is biased); a predicted termination
weights what comes after it by its probability (the code: by a threshold). Left out: several tasks in one model.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from foresight import errors
from foresight.data import trees
from foresight.data.sequences import Sequences, arrivals
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.envs.collect import Rollout
from foresight.errors import UserError
from foresight.nets.models.tdmpc2 import TDMPC2, LatentPolicy, QEnsemble
from foresight.ops import schedules
from foresight.planning.continuous import cem
from foresight.training import imagination, optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "consistency", "reward", "q")
ACTING = ("model", "critics", "policy")  # the fields of State that actors are sent
REPORT = 1_000  # env steps between two yields


@dataclass(frozen=True)
class Config:
    """Defaults: the paper's, with its model of 1M parameters; see the presets for tasks."""

    steps: int = 1_000_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 1  # parallel environments
    rollout_steps: int = 1  # steps of each environment between two rounds of updates, and per message of an actor
    max_lag: int = 1  # rounds of updates by which an actor's policy may lag; 0: actors wait, as without actors
    batch_size: int = 256  # sequences of `horizon` steps per gradient step; appendix
    replay_size: int = 1_000_000  # rows kept; appendix
    replay_on_disk: bool = False  # rows in files of the run, not in memory; a checkpoint then writes only new ones
    learning_starts: int = 1_000  # env steps with random actions, before the first update; 5 episodes, at least 1,000
    train_every: int = 1  # env steps between updates; appendix
    gradient_steps: int = 1  # gradient steps per update; appendix
    learning_rate: float = 3e-4  # Adam; appendix
    anneal_lr: bool = False  # anneal the learning rates linearly to 0
    encoder_lr_scale: float = 0.3  # times the learning rate, for the encoder; appendix
    max_grad_norm: float = 20.0  # of model and critics, and of the policy; appendix
    gamma: float = 0.99  # discount per step; the paper: (T/5 - 1) / (T/5) for episodes of T steps, 0.95 to 0.995
    horizon: int = 3  # H: steps of a plan and of a training sequence; appendix
    rho: float = 0.5  # ρ: weight of a step of a sequence, relative to the step before; appendix
    consistency_coef: float = 20.0  # c_z; appendix
    reward_coef: float = 0.1  # c_r; appendix
    value_coef: float = 0.1  # c_q; appendix
    termination_coef: float = 1.0  # of the cross-entropy of terminations; the authors' code
    entropy_coef: float = 1e-4  # β, times the dims of an action; appendix
    tau: float = 0.01  # fraction by which the target critics move per gradient step; appendix
    episodic: bool = True  # whether terminations are predicted; the paper's tasks have none
    candidates: int = 512  # action sequences per iteration, proposals included; appendix
    proposals: int = 24  # of these made by the policy; appendix
    elites: int = 64  # action sequences that the plan is fitted to; appendix
    iterations: int = 6  # of MPPI; 0: act by the policy, without planning; appendix
    temperature: float = 0.5  # of elites: weights are exp(temperature · (return - best)); appendix
    min_std: float = 0.05  # of a plan, in half the range of an action; appendix
    max_std: float = 2.0  # of a plan, and that of the first iteration; appendix
    latent_size: int = 128  # features of a latent state; 512 for 5M parameters
    simnorm_dim: int = 8  # dims of each simplex; appendix
    hidden: int = 384  # units of dynamics, reward, critics and policy; 512 for 5M parameters
    encoder_hidden: int = 256  # units of the encoder of vectors; appendix
    encoder_layers: int = 2  # layers of the encoder of vectors, the latent state's included; appendix
    channels: int = 32  # of the four convolutions over images; appendix
    critics: int = 2  # of the ensemble; 5 for 5M parameters
    dropout: float = 0.01  # share of units of the critics' first layer; appendix
    bins: int = 101  # of two-hot rewards and values, from -symexp(10) to symexp(10); appendix
    threads: int = 1  # of torch, on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved, including the replay."""

    config: Config
    model: TDMPC2
    critics: QEnsemble
    target: QEnsemble
    policy: LatentPolicy
    spread: imagination.Spread
    optimizer: torch.optim.Adam
    policy_optimizer: torch.optim.Adam
    replay: Sequences
    generator: torch.Generator  # samples the plans and actions that are taken
    inner: torch.Generator  # samples the actions, critics, dropout and shifts within updates
    sampler: torch.Generator  # samples sequences, on the CPU
    step: int = 0
    gradient_steps: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizers and replay. Raises UserError for spaces and settings that are not supported."""
    _check(config)
    require_end(spaces, config.gamma)
    size, units, bins = config.latent_size, config.hidden, config.bins
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = LatentPolicy(spaces.action, size, units).to(device)
        model = TDMPC2(
            spaces.obs, policy.width, size, units, config.encoder_hidden, config.encoder_layers, config.channels, bins,
            config.simnorm_dim, config.episodic and not spaces.continuing,
        ).to(device)  # fmt: skip
        critics = QEnsemble(size, policy.width, units, config.critics, bins, config.dropout).to(device)
    rate = config.learning_rate
    encoder = list(model.encoder.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("encoder.")]
    groups: list[dict[str, Any]] = [
        {"params": encoder, "lr": rate * config.encoder_lr_scale}, {"params": [*rest, *critics.parameters()]}
    ]  # fmt: skip
    return State(
        config,
        model,
        critics,
        copy.deepcopy(critics).requires_grad_(False),
        policy,
        imagination.Spread().to(device),
        torch.optim.Adam(groups, lr=rate, fused=True),
        torch.optim.Adam(policy.parameters(), lr=rate, eps=1e-5, fused=True),
        Sequences(config.replay_size, config.num_envs, config.replay_on_disk),
        generator=torch.Generator(device).manual_seed(config.seed),
        inner=torch.Generator(device).manual_seed(config.seed + 1),
        sampler=torch.Generator().manual_seed(config.seed),
    )


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """The first action of a plan for every row of `obs`, with the plan's noise if `explore`.

    The carry is the mean of the last plan `[B, H, A]`, zero at the start of an episode. Before `learning_starts` the
    actions are uniform if `explore`.
    """
    config, policy = state.config, state.policy
    latent = state.model.encoder(obs)
    mean = latent.new_zeros(len(latent), config.horizon, policy.width) if carry is None else carry
    if explore and state.step < config.learning_starts:
        action = torch.empty_like(mean[:, 0]).uniform_(-1, 1, generator=state.generator)
    elif not config.iterations:
        output = policy(latent)
        action = output.sample(state.generator) if explore else output.mode()
    else:
        found, elites, weight = plan(state, latent, mean)
        action, mean = cem.chosen(elites, weight, state.generator)[:, 0], found.mean
        if explore:
            action = action + found.std[:, 0] * torch.empty_like(action).normal_(generator=state.generator)
    return policy.to_env(action), {}, mean


def plan(state: State, latent: Tensor, mean: Tensor) -> tuple[cem.Plan, Tensor, Tensor]:
    """MPPI from latent states `[B, size]` and the `mean` `[B, H, A]` of the plan before: see `cem.mppi`."""
    config, model, policy, generator = state.config, state.model, state.policy, state.generator

    def value(latent: Tensor) -> Tensor:
        first, second = state.critics.two(latent, policy(latent).sample(generator), generator)
        return (first + second) / 2

    def score(sequences: Tensor) -> Tensor:
        return cem.lookahead(model.step, latent, sequences, config.gamma, value)

    start = cem.shifted(cem.Plan(mean, mean), config.max_std)
    drawn, bounds = config.candidates - config.proposals, (config.min_std, config.max_std)
    return cem.mppi(
        score, start, drawn, config.elites, config.iterations, generator, config.temperature, bounds,
        proposals(state, latent),
    )  # fmt: skip


def proposals(state: State, latent: Tensor) -> Tensor | None:
    """Action sequences of the policy in the model, `[B, proposals, H, A]`, or None if there are 0."""
    count = state.config.proposals
    if not count:
        return None
    z, actions = latent.repeat_interleave(count, 0), []
    for t in range(state.config.horizon):
        actions.append(state.policy(z).sample(state.generator))
        if t < state.config.horizon - 1:
            z = state.model.dynamics(torch.cat([z, actions[-1]], -1))
    return torch.stack(actions, 1).unflatten(0, (len(latent), count))


def reset_carry(carry: Tree, cut: Tensor) -> Tree:
    """The carry with the rows set to zero where an episode was cut."""
    return trees.reset_carry(carry, cut)


def restart(state: State) -> None:
    """The environments were reset: the successors of the newest transitions are unknown."""
    state.replay.interrupt()


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree, carry: Tree = None) -> tuple[Rollout, Tree, Tree]:
    """`rollout_steps` of every environment from `obs` on; also the next observation and the carry."""
    config, device = state.config, state.generator.device
    if carry is None:
        carry = torch.zeros(env.num_envs, config.horizon, state.policy.width, device=device)
    choose = functools.partial(act, state, explore=True)
    segment = collect.segment(env, obs, choose, config.rollout_steps, device, state.episodes, carry, terminal=True)
    state.step += segment.trajectory.reward.numel()
    return dataclasses.replace(segment, first=None, carry=None, final_carry=None), segment.last, segment.carry


def sample(state: State) -> Trajectory:
    """Sequences `[B, H + 1]` from the replay, with actions in (-1, 1)."""
    device = state.generator.device
    batch = state.replay.sample(state.config.batch_size, state.config.horizon + 1, state.sampler)
    batch = batch.map(lambda x: x.to(device))
    return batch.replace(action=state.policy.from_env(batch.action))


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One gradient step of model and critics, one of the policy, and one update of the target critics."""
    config, model, critics = state.config, state.model, state.critics
    arrival = arrivals(batch)
    terms, found = model.loss(None, batch, arrival, state.inner)
    latent, action = found["latent"], batch.action[:, :-1]
    target = q_target(state, batch.reward[:, :-1], batch.discount[:, :-1], found["target"][:, 1:])
    predicted = critics(latent[:, :-1], action, state.inner)
    terms["value"] = pad(torch.stack([q.loss(target) for q in predicted]).mean(0), (1, 0))

    # A row counts if no episode ended between the first row and it; ρ per step, the first row has no loss.
    reached = arrival.known[:, 1:].cumprod(1)
    steps = torch.arange(config.horizon + 1, device=latent.device)
    weight = pad(reached * config.rho ** steps[:-1], (1, 0)) / config.horizon
    coefs = {
        "consistency": config.consistency_coef, "reward": config.reward_coef, "value": config.value_coef,
        "termination": config.termination_coef,
    }  # fmt: skip
    assert terms.keys() <= coefs.keys()
    losses = {name: (weight * term).sum(1).mean() for name, term in terms.items()}
    optim.descend(state.optimizer, optim.total(losses, coefs).backward, config.max_grad_norm)

    weight = pad(reached, (1, 0), value=1.0) * config.rho**steps / (config.horizon + 1)
    objective, q, entropy = policy_objective(state, latent.detach())
    policy_loss = -(weight * objective).sum(1).mean()
    inputs = list(state.policy.parameters())  # the critics' weights need no gradient here
    optim.descend(state.policy_optimizer, lambda: policy_loss.backward(inputs=inputs), config.max_grad_norm)
    optim.track(state.target, critics, config.tau)
    state.gradient_steps += 1
    metrics = {**{name: term.detach() for name, term in losses.items()}, "q": q.mean(), "entropy": entropy.mean()}
    metrics["saturated"] = imagination.saturated(model.bins, arrival.reward, target)
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


@torch.no_grad()
def q_target(state: State, reward: Tensor, discount: Tensor, latent: Tensor) -> Tensor:
    """y = r + γ · discount · min of two target critics at the next `latent` `[..., size]`. Shapes: all others `[...]`.

    Source: §3.1.
    """
    action = state.policy(latent).sample(state.inner)
    return reward + state.config.gamma * discount * torch.minimum(*state.target.two(latent, action, state.inner))


def policy_objective(state: State, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the policy maximizes at `latent` `[B, T, size]`; also Q and the entropy, all `[B, T]`. Source: §3.1.

    The range S is that of the first row.
    """
    action, logp = state.policy(latent).sample_logp(state.inner)
    first, second = state.critics.two(latent, action, state.inner)
    q = (first + second) / 2
    scale = state.spread.update(q.detach()[:, 0])
    bonus = state.config.entropy_coef * state.policy.width * logp
    return q / scale - bonus, q.detach(), -logp.detach()


def learn(state: State, segment: Rollout) -> dict[str, float]:
    """Store the rollout, then run the updates that are due; returns the metrics of the last one.

    Those of the random steps are due when learning starts.
    """
    config = state.config
    steps = segment.trajectory
    if not config.episodic and ((steps.discount == 0) & (steps.mask > 0)).any():  # type: ignore[operator]
        raise UserError(
            "This environment terminated, but episodic is false: plans would ignore terminations. Use --episodic."
        )
    collect.add_sequences(state.replay, segment)
    metrics: dict[str, float] = {}
    if config.anneal_lr:
        rate = schedules.linear(state.step / config.steps, config.learning_rate)
        for group in (*state.optimizer.param_groups, *state.policy_optimizer.param_groups):
            group["lr"] = rate
        state.optimizer.param_groups[0]["lr"] = rate * config.encoder_lr_scale
    if state.step >= config.learning_starts and state.replay.ready(config.horizon + 1):
        while state.gradient_steps < config.gradient_steps * (state.step // config.train_every):
            metrics = update(state, sample(state))
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
    errors.at_least(0, config, "max_lag", "proposals", "iterations", "encoder_lr_scale", "min_std", "temperature")
    errors.at_least(
        1, config, "num_envs", "rollout_steps", "batch_size", "replay_size", "train_every", "gradient_steps", "horizon",
        "candidates", "elites", "latent_size", "hidden", "encoder_hidden", "encoder_layers", "channels", "simnorm_dim",
    )  # fmt: skip
    errors.at_least(2, config, "critics", "bins")
    errors.between(0, 1, config, "gamma", "rho", "tau")
    errors.share(config, "dropout")
    if config.latent_size % config.simnorm_dim:
        raise UserError(
            f"latent_size must be a multiple of simnorm_dim, {config.simnorm_dim}, not {config.latent_size}."
        )
    if not config.max_std > 0 or config.max_std < config.min_std:
        raise UserError(f"max_std must be above 0 and at least min_std, {config.min_std}, not {config.max_std}.")
    if config.temperature == math.inf:
        raise UserError("temperature must be finite: the largest weights the best elite alone.")
    if config.proposals >= config.candidates:
        raise UserError(f"proposals must be below candidates, {config.candidates}, not {config.proposals}.")
    cem.require_elites(config.candidates, config.elites)
    Sequences.require_room(config.replay_size, config.num_envs, config.horizon + 1)

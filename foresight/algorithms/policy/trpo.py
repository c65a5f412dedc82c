"""TRPO: Trust Region Policy Optimization, Schulman et al. 2015 (arXiv:1502.05477).

    maximize over θ  L(θ) = E_t[ π_θ(a_t|s_t) / π_old(a_t|s_t) · A_t ]   subject to   E_t[ KL(π_old ‖ π_θ) ] ≤ δ

One step of the paper (appendix C):
  1  g = ∇L at θ_old, and the Fisher matrix F, the Hessian of the mean KL there, as products F v only
  2  conjugate gradients solve (F + damping · I) x ≈ g                             `ops.natural.conjugate_gradient`
  3  the largest step that the quadratic model of the KL allows: β = √(2δ / xᵀ(F + damping · I)x)
  4  backtracking line search over θ_old + 0.8ʲ β x: the first point where L improves and the true mean KL is at most δ;
     if there is none, θ_old is restored

What is kept: the single-path estimate of the objective (§5.1), the average KL (eq. 12), the line search on the true
constraint. Differences: advantages by GAE with a value network fitted by Adam between the steps (Schulman et al. 2016,
arXiv:1506.02438, fits it with a trust region too), normalized over the batch as in all later implementations; the
Fisher matrix is the Hessian of the KL by double differentiation, which equals the paper's JᵀMJ at θ_old. Left out: the
"vine" estimate (§5.2), which needs an environment that can be reset to a given state.

A time limit is not a termination: its step bootstraps with the value of its final observation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foresight import errors
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.errors import UserError
from foresight.nets import encoders, heads, normalize
from foresight.nets.actor_critic import ActorCritic
from foresight.nets.outputs import Output
from foresight.ops import advantage, diagnostics, natural, policy, returns, value
from foresight.training import optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "entropy", "kl", "explained_variance")
ACTING = ("network",)  # the fields of State that are sent to actors


@dataclass(frozen=True)
class Config:
    """Defaults: sb3-contrib's TRPO ("contrib"), which presets of rl-baselines3-zoo start from."""

    steps: int = 1_000_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 2  # parallel environments
    rollout_steps: int = 1024  # steps of each environment between two updates
    gamma: float = 0.99  # discount per step; the paper, table 1
    gae_lambda: float = 0.95  # λ of GAE; contrib
    target_kl: float = 0.01  # δ, in nats; the paper, table 1
    damping: float = 0.1  # added to the diagonal of the Fisher matrix; contrib
    cg_iterations: int = 15  # conjugate gradient iterations; contrib (the paper: 10)
    subsample: int = 1  # the Fisher matrix uses every n-th step; the paper: 10 (appendix C.1)
    backtracks: int = 10  # maximum number of points of the line search
    backtrack_factor: float = 0.8  # factor between the points of the line search; contrib
    normalize_advantage: bool = True  # to mean 0 and std 1 over the batch; contrib
    value_learning_rate: float = 1e-3  # Adam, of the value network; contrib
    value_epochs: int = 10  # epochs of the value network on each rollout; contrib
    value_batch: int = 128  # minibatch size of the value epochs; contrib
    normalize_obs: bool = False  # subtract the running mean, divide by the running std, clip to ±10
    normalize_reward: bool = False  # divide by the running std of the discounted return, clip to ±10
    hidden: tuple[int, ...] = (64, 64)  # hidden layers of the two networks over vectors; contrib
    activation: str = "tanh"  # activation of the two networks; the paper, appendix D
    images: str = "nature"  # the trunk over pixels: "nature", "nips", "impala", "vit" or "swin"
    log_std: float = 0.0  # initial log standard deviation of continuous actions
    threads: int = 1  # torch threads on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved. `network` includes the observation statistics, so a policy is saved with them."""

    config: Config
    network: ActorCritic  # policy and value share no weights: fitting the value must not change the policy
    value_optimizer: torch.optim.Adam
    generator: torch.Generator  # samples the actions
    shuffler: torch.Generator  # shuffles the value network's minibatches, on the CPU
    reward_scaler: normalize.RewardScaler | None = None
    step: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizer and generators. Raises UserError for spaces and settings that are not supported."""
    _check(config)
    require_end(spaces, config.gamma)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head, value_head = encoders.policy_head(spaces.action, config.log_std), heads.ScalarHead()
        body = encoders.separate_body(
            spaces.obs,
            outputs=(head.width, value_head.width),
            gains=(0.01, 1.0),
            hidden=config.hidden,
            activation=config.activation,
            images=config.images,
            twice=True,  # for the Hessian of the KL
        )
        normalizer = encoders.normalizer(spaces.obs) if config.normalize_obs else None
        network = ActorCritic(body, head, value_head, normalizer, encoders.mask_key(spaces.obs)).to(device)
    return State(
        config,
        network,
        torch.optim.Adam(network.value_parameters(), lr=config.value_learning_rate),
        generator=torch.Generator(device).manual_seed(config.seed),
        shuffler=torch.Generator().manual_seed(config.seed),
        reward_scaler=normalize.reward_scaler(config, device),
    )


@torch.inference_mode()
def act(state: State, obs: Tree, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """An action for every row of `obs`: sampled if `explore`, else the mode."""
    output = state.network.policy(obs)
    return output.sample(state.generator) if explore else output.mode(), {}, carry


restart = normalize.restart


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree) -> tuple[Trajectory, Tree]:
    """`rollout_steps` steps of every environment from `obs` on, with values; also the next observation."""
    network = state.network
    choose, device = functools.partial(act, state, explore=True), state.generator.device
    segment = collect.segment(env, obs, choose, state.config.rollout_steps, device, state.episodes)
    state.step += segment.trajectory.reward.numel()
    values = network.value(segment.trajectory.obs).value
    next_value = collect.successors(segment, values, lambda x, _: network.value(x).value)
    return segment.trajectory.replace(value=values, next_value=next_value), segment.last


def surrogate(output: Output, steps: Trajectory, old_logprob: Tensor, advantages: Tensor) -> Tensor:
    """L(θ), from the new policy's `output`; eq. 14 with A for Q."""
    return (policy.ratio(output.logp(steps.action), old_logprob) * advantages).mean()


def step_direction(config: Config, gradient: Tensor, fisher: natural.Product) -> Tensor:
    """The full step β x `[N]`: along F⁻¹g, up to a KL of δ in the quadratic model; 0 if there is no such step."""
    x = natural.conjugate_gradient(fisher, gradient, config.cg_iterations)
    curvature = (x @ fisher(x)).item()
    if not (curvature > 0 and math.isfinite(curvature)):
        return torch.zeros_like(x)
    return math.sqrt(2 * config.target_kl / curvature) * x


@torch.no_grad()
def line_search(state: State, steps: Trajectory, advantages: Tensor, full: Tensor) -> dict[str, float]:
    """Move the policy to the first point that meets both conditions of step 4, or leave it unchanged.

    Returns `kl`, `improvement` (of L) and `step_fraction` (of the full step): all 0 if no point does.
    """
    config, network, parameters = state.config, state.network, state.network.policy_parameters()
    start = natural.flatten(parameters)  # a copy
    old = network.policy(steps.obs)
    old_logprob = old.logp(steps.action)
    before = surrogate(old, steps, old_logprob, advantages)
    fraction = 1.0
    for _ in range(config.backtracks if full.any() else 0):
        _put(parameters, start + fraction * full)
        new = network.policy(steps.obs)
        divergence = old.kl(new).mean().item()
        improvement = (surrogate(new, steps, old_logprob, advantages) - before).item()
        if divergence <= config.target_kl and improvement > 0:  # both false for NaN
            return {"kl": divergence, "improvement": improvement, "step_fraction": fraction}
        fraction *= config.backtrack_factor
    _put(parameters, start)
    return {"kl": 0.0, "improvement": 0.0, "step_fraction": 0.0}


def improve(state: State, steps: Trajectory, advantages: Tensor) -> dict[str, float]:
    """One step of the policy (1 to 4 above) on steps `[N]` with advantages `[N]`."""
    config, network, parameters = state.config, state.network, state.network.policy_parameters()
    with torch.no_grad():
        old = network.policy(steps.obs)
        old_logprob = old.logp(steps.action)
    new = network.policy(steps.obs)
    objective = surrogate(new, steps, old_logprob, advantages)
    gradient = natural.flatten(torch.autograd.grad(objective, parameters, retain_graph=config.subsample == 1))
    if config.subsample > 1:
        part = steps.map(lambda x: x[:: config.subsample])
        with torch.no_grad():
            old = network.policy(part.obs)
        new = network.policy(part.obs)
    fisher = natural.curvature(old.kl(new).mean(), parameters, config.damping)
    full = step_direction(config, gradient, fisher)
    entropy = old.entropy().mean().item()
    return {**line_search(state, steps, advantages, full), "entropy": entropy}


def fit_value(state: State, steps: Trajectory, target: Tensor) -> float:
    """Epochs of least squares on the returns `[N]`; returns the mean loss of the last epoch."""
    config = state.config
    losses: list[Tensor] = []
    data = steps.replace(extras={"target": target})
    parts = max(1, round(len(target) / config.value_batch))
    for _ in range(config.value_epochs):
        losses = []
        for minibatch in data.minibatches(parts, state.shuffler):
            values = state.network.value(minibatch.obs).value
            error = value.squared_loss(values, minibatch.extras["target"]).mean()
            optim.descend(state.value_optimizer, error.backward, math.inf)
            losses.append(error.detach())
    return torch.stack(losses).mean().item()


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One step of the policy on one rollout with values, then a fit of the value network."""
    config, mask = state.config, batch.mask
    assert batch.value is not None and batch.next_value is not None and mask is not None
    reward = normalize.scaled(state.reward_scaler, batch)
    advantages, target = returns.gae(
        reward, config.gamma * batch.discount, batch.cut, batch.value, batch.next_value, config.gae_lambda, mask
    )
    real = mask > 0
    if not optim.steps_of(int(real.sum())):  # every environment only reset
        return {}
    learned = batch.replace(mask=None, next_value=None)
    steps, advantages, target = learned.map(lambda x: x[real]), advantages[real], target[real]
    if config.normalize_advantage:
        advantages = advantage.normalize(advantages)

    metrics = improve(state, steps, advantages)
    metrics["value_loss"] = fit_value(state, steps, target)
    if state.network.normalizer is not None:
        state.network.normalizer.update(steps.obs)
    assert steps.value is not None
    metrics["explained_variance"] = diagnostics.explained_variance(steps.value, target).item()
    return metrics


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Roll out, step the policy, fit the value, until `steps`. A given `state` resumes with new episodes."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    restart(state)
    obs = env.reset(config.seed + state.step)
    while state.step < config.steps:
        batch, obs = rollout(state, env, obs)
        metrics = update(state, batch)
        yield state.step, {**metrics, **state.episodes.metrics()}, state


def _put(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Copy a vector `[N]` into the parameters, in order."""
    for parameter, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
        parameter.copy_(part.view_as(parameter))


def _check(config: Config) -> None:
    whole = ("num_envs", "rollout_steps", "cg_iterations", "subsample", "backtracks", "value_epochs", "value_batch")
    errors.at_least(1, config, *whole)
    if not config.target_kl > 0:
        raise UserError(f"target_kl, the size of the trust region, must be above 0, not {config.target_kl}.")
    if config.damping < 0:
        raise UserError(f"damping must be at least 0, not {config.damping}.")
    if not 0 < config.backtrack_factor < 1:
        raise UserError(f"backtrack_factor must be between 0 and 1, not {config.backtrack_factor}.")

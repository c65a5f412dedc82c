"""IMPALA: Importance Weighted Actor-Learner Architectures, Espeholt et al. 2018 (arXiv:1802.01561).

    minimize  Σ [ -ρ_t (r_t + γ v_{t+1} - V(s_t)) log π(a_t|s_t)  +  c₁ ½ (v_t - V(s_t))²  -  c₂ H(π(·|s_t)) ]

where ρ_t = min(ρ̄, π(a_t|s_t) / μ(a_t|s_t)), μ is the behavior policy and v the V-trace target (`ops.returns.vtrace`):

    v_t = V(s_t) + δ_t + γ c_t (v_{t+1} - V(s_{t+1})),   δ_t = ρ_t (r_t + γ V(s_{t+1}) - V(s_t)),  c_t = λ min(c̄, ratio)

Actors act, and one learner updates. An actor sends `Rollout`s: steps, the observations after them, and the
log-probabilities of the behavior policy, which may be older than the policy being updated; V-trace corrects for that.
With a `memory` (the paper's LSTM, or another) a rollout also has the recurrent state before its first step, from which
the learner recomputes the rest with its own weights (§3.1). `train` is the synchronous form in one process. With
`foresight train impala --actors 4` the same `rollout` runs in four processes that never wait for the learner
(`runtime.distributed.actors`), and the learner runs the same `update`.

With `state_dependent_noise` (gSDE, Raffin et al. 2021, arXiv:2005.05719) the noise of continuous actions is linear in
the policy's features. Each environment draws the weights of its noise at the start of a rollout and every so many
steps of it; no rollout holds those of an older policy.

Kept: V-trace with separate ρ̄ and c̄, and v_{t+1} (not V) in the policy's advantage (§4.2, appendix E.3), losses summed
over steps (appendix D), RMSProp with ε = 0.01 and no momentum, a global gradient norm of 40, the learning rate annealed
linearly to 0 (table D.1), the deep residual trunk over pixels (figure 3, right), several tasks at once (§5.3).

Differences: a time limit is not a termination: its step bootstraps with the value of its final observation. torch adds
RMSProp's ε outside the square root, TensorFlow inside. Left out: the instruction LSTM of DMLab's language levels
and population based training. PopArt (`popart_rate`) has one mean and deviation for all tasks, not one each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.trajectory import Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.envs.collect import Rollout
from foresight.errors import UserError
from foresight.nets import encoders, heads, precision
from foresight.nets.actor_critic import ActorCritic, Sampled
from foresight.nets.sequence import memory
from foresight.nets.sequence.memory import MemoryActorCritic
from foresight.ops import diagnostics, policy, returns, schedules, value
from foresight.training import optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "entropy", "lag", "explained_variance")
ACTING = ("network",)  # the fields of State that are sent to actors
OPTIMIZERS = {"rmsprop": 0.01, "adam": 1e-8}  # and the default ε of each


@dataclass(frozen=True)
class Config:
    """Defaults: the paper's table D.1 (Atari) unless noted; see the presets for tasks."""

    steps: int = 10_000_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 8  # parallel environments per actor
    rollout_steps: int = 20  # steps of each environment in a rollout (the paper's n, table D.1)
    rollouts_per_update: int = 4  # with 8 environments in each, the paper's batch of 32
    gamma: float = 0.99  # discount per step, table D.1
    learning_rate: float = 6e-4  # initial learning rate; table D.1
    anneal_lr: bool = True  # anneal the learning rate linearly to 0, table D.1
    optimizer: str = "rmsprop"  # "rmsprop" (table D.1) or "adam"
    optimizer_epsilon: float | None = None  # None: 0.01 for RMSProp (table D.1), 1e-8 for Adam
    entropy_coef: float = 0.01  # c₂: weight of the entropy bonus, table D.1
    value_coef: float = 0.5  # c₁: weight of the value loss, ½ squared error, table D.1
    max_grad_norm: float = 40.0  # bound of the gradient norm of the summed loss, table D.1
    clip_rho: float = 1.0  # ρ̄: bounds ρ; it sets the fixed point, between V^μ and V^π; §5.2.2 compares 1, 10 and 100
    clip_c: float = 1.0  # c̄: bounds the traces, and so how far TD errors propagate back; at most ρ̄
    clip_pg: float = 1.0  # ρ̄ in the policy gradient
    trace_lambda: float = 1.0  # λ of the traces, remark 2
    popart_rate: float | None = (
        None  # β of PopArt per update: values are normalized; 3e-4 in arXiv 1809.04474; None: not
    )
    max_lag: int | None = None  # updates by which the policy of a rollout may lag; None: no limit; 0: actors wait
    hidden: tuple[int, ...] = (64, 64)  # hidden layers of the MLPs over vectors; the paper has none
    activation: str = "tanh"  # activation of the MLPs
    images: str = "impala"  # the trunk over pixels: "impala" (figure 3, right), "nature", "nips", "vit" or "swin"
    memory: str | None = None  # "gru", "lstm", "gtrxl" or "transformer", over the trunk; an LSTM of 256 in figure 3
    memory_size: int = 64  # width of the memory
    memory_layers: int = 1  # layers of the memory
    memory_heads: int = 4  # attention heads of the memory
    memory_window: int = 64  # past env steps in the attention window
    backbone: str = "shared"  # one "shared" memory, two "separate" ones, or one for the "actor" or "critic" only
    log_std: float = 0.0  # initial log standard deviation of continuous actions, or of the weights of gSDE
    state_dependent_noise: int | None = None  # steps for which gSDE (arXiv 2005.05719) holds its noise; None: not
    precision: str = "float32"  # "float32", "bfloat16" (autocast of the trunk over pixels) or "auto" (the faster one)
    threads: int = 1  # torch threads on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved."""

    config: Config
    network: ActorCritic | MemoryActorCritic
    optimizer: torch.optim.Optimizer
    generator: torch.Generator  # samples the actions
    step: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network, optimizer and generator. Raises UserError for spaces and settings that IMPALA does not support."""
    _check(config)
    require_end(spaces, config.gamma)
    halved = precision.dtype(config.precision, device) is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        held = config.state_dependent_noise is not None
        head = (encoders.state_dependent_head if held else encoders.policy_head)(spaces.action, config.log_std)
        value_head = heads.ScalarHead() if config.popart_rate is None else heads.PopArtHead()
        network = memory.actor_critic(
            spaces.obs, head, value_head, memory.shape_of(config), config.backbone,
            config.hidden, config.activation, config.images, None, halved,
        ).to(device)  # fmt: skip
    kinds = {"rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam}
    epsilon = OPTIMIZERS[config.optimizer] if config.optimizer_epsilon is None else config.optimizer_epsilon
    optimizer = kinds[config.optimizer](network.parameters(), lr=config.learning_rate, eps=epsilon)
    return State(config, network, optimizer, generator=torch.Generator(device).manual_seed(config.seed))


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """An action for every row of `obs`: sampled if `explore`, else the mode. Use `reset_carry` at a cut."""
    output, carry = state.network.step(obs, carry)
    return output.sample(state.generator) if explore else output.mode(), {}, carry


reset_carry = memory.reset_carry


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree, carry: Tree = None) -> tuple[Rollout, Tree, Tree]:
    """`rollout_steps` steps of every environment from `obs` on; also the next observation and the memory."""
    if carry is None:
        carry = state.network.initial(env.num_envs)
    head, held = state.network.policy_head, state.config.state_dependent_noise
    sample = heads.sampler(head, env.num_envs, held, state.generator)
    choose, device = Sampled(state.network, state.generator, sample, noted=True), state.generator.device
    segment = collect.segment(env, obs, choose, state.config.rollout_steps, device, state.episodes, carry)
    steps = segment.trajectory
    if steps.logprob is None:  # of a compiled loop, which has no memory
        assert isinstance(state.network, ActorCritic)
        steps = steps.replace(logprob=state.network.policy(steps.obs).logp(steps.action))
    state.step += steps.reward.numel()
    # the learner recomputes the carry
    return dataclasses.replace(segment, trajectory=steps, carry=None), segment.last, segment.carry


def update(state: State, segment: Rollout, progress: float = 0.0) -> dict[str, float]:
    """One gradient step on one rollout (or several, joined along B); returns the metrics.

    `progress` in [0, 1] is the share of training that was done before the rollout, for the annealed learning rate.
    """
    config, network, device = state.config, state.network, state.generator.device
    rate = schedules.linear(progress if config.anneal_lr else 0.0, config.learning_rate)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    steps = segment.trajectory.map(lambda x: x.to(device))
    mask, behavior = steps.mask, steps.logprob
    assert mask is not None and behavior is not None
    if not optim.steps_of(int(mask.sum())):  # all environments were reset
        return {"learning_rate": rate}
    output, values, carry = network.read(steps.obs, trees.to(segment.first, device), memory.starts(steps.cut))
    logprob = output.logp(steps.action)
    with torch.no_grad():
        ahead = dataclasses.replace(segment, trajectory=steps, carry=memory.reset_carry(carry, steps.cut[:, -1]))
        next_value = collect.successors(ahead, values.value, lambda obs, carry: network.value(obs, carry).value)
        ratio = policy.ratio(logprob, behavior)
        advantages, target = returns.vtrace(
            steps.reward, config.gamma * steps.discount, steps.cut, values.value, next_value, ratio,
            config.trace_lambda, config.clip_rho, config.clip_c, config.clip_pg, mask,
        )  # fmt: skip
    real, scale = mask > 0, heads.value_scale(network.value_head)
    policy_loss = policy.reinforce(logprob, advantages / scale)[real].sum()
    value_loss = value.squared_loss(values.value, target)[real].sum() / scale**2
    entropy = output.entropy()[real].sum()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    optim.descend(state.optimizer, loss.backward, config.max_grad_norm, summed=True)
    if config.popart_rate is not None and isinstance(network.value_head, heads.PopArtHead):
        network.value_head.update(*network.value_layer(), target[real], config.popart_rate)
    with torch.no_grad():
        count = real.sum().clamp(min=1)
        clipped = (ratio[real] > config.clip_rho).float().sum()
        explained = diagnostics.explained_variance(values.value[real], target[real])
        sums = torch.stack([policy_loss, value_loss, entropy, ratio[real].sum(), clipped]) / count
    names = ("policy_loss", "value_loss", "entropy", "ratio", "clip_fraction")
    metrics = dict(zip(names, sums.tolist(), strict=True))
    return {**metrics, "explained_variance": explained.item(), "learning_rate": rate}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Collect rollouts, update once, until `steps`: a single actor that waits for the learner."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    obs, carry = env.reset(config.seed + state.step), None
    while state.step < config.steps:
        progress, segments = state.step / config.steps, []
        for _ in range(config.rollouts_per_update):
            segment, obs, carry = rollout(state, env, obs, carry)
            segments.append(segment)
        metrics = update(state, trees.join(segments), progress)
        yield state.step, {**metrics, **state.episodes.metrics()}, state


def _check(config: Config) -> None:
    errors.at_least(1, config, "num_envs", "rollout_steps", "rollouts_per_update")
    if config.state_dependent_noise is not None:
        errors.at_least(1, config, "state_dependent_noise")
    errors.at_least(0, config, "clip_c", "clip_pg")  # below, an importance weight would change its sign
    if config.clip_c > config.clip_rho:
        raise UserError(f"clip_c must be at most clip_rho ({config.clip_rho}), not {config.clip_c}; see §4.1.")
    if config.max_lag is not None and config.max_lag < 0:
        raise UserError(f"max_lag must be at least 0, not {config.max_lag}.")
    if config.optimizer not in OPTIMIZERS:
        raise errors.unknown("optimizer", config.optimizer, OPTIMIZERS)

"""IMPALA: Importance Weighted Actor-Learner Architectures, Espeholt et al. 2018 (arXiv:1802.01561).

    minimise  Σ [ -ρ_t (r_t + γ v_{t+1} - V(s_t)) log π(a_t|s_t)  +  c₁ ½ (v_t - V(s_t))²  -  c₂ H(π(·|s_t)) ]

where ρ_t = min(ρ̄, π(a_t|s_t) / μ(a_t|s_t)), μ is the policy that acted and v the V-trace target (`ops.returns.vtrace`):

    v_t = V(s_t) + δ_t + γ c_t (v_{t+1} - V(s_{t+1})),   δ_t = ρ_t (r_t + γ V(s_{t+1}) - V(s_t)),  c_t = λ min(c̄, ratio)

Actors act, one learner learns. A message from one to the other is a whole `Unroll`: rows, what was seen after them, and
the log-probabilities of the policy that acted, which may be older than the one that learns from it; V-trace corrects
for that. `train` is the synchronous form in one process. With `foresight train impala --actors 4` the same `rollout`
runs in four processes that never wait for the learner (`runtime.actors`), and the same `update` learns.

Kept: V-trace with ρ̄ and c̄ of its own and v_{t+1} (not V) in the policy's advantage (§4.2, appendix E.3), losses summed
over rows (appendix D), RMSProp with ε = 0.01 and no momentum, a global gradient norm of 40, the learning rate
annealed linearly to 0 (table D.1), the deep residual trunk over pixels (figure 3, right), several tasks at once (§5.3).

Otherwise than there: a time limit is no termination, its row bootstraps with the value of its final observation.
torch adds RMSProp's ε outside of the root, TensorFlow inside. Left out: the instruction LSTM of DMLab's language
levels, population based training and PopArt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.trajectory import Trajectory, tree_map
from foresight.envs.base import Env, Episodes, Spaces, require_worlds
from foresight.errors import UserError
from foresight.nets import encoders, heads, optim
from foresight.nets.actor_critic import ActorCritic
from foresight.ops import diagnostics, policy, returns, schedules, value

WORLD = "control"
UNIT = "env steps"
METRICS = ("return", "length", "entropy", "lag", "explained_variance")
ACTING = ("network",)  # the fields of State that actors are sent
OPTIMIZERS = ("rmsprop", "adam")


@dataclass(frozen=True)
class Config:
    """Defaults: the paper's table D.1 (Atari); presets say what tasks want."""

    steps: int = 10_000_000  # env steps in all worlds together
    seed: int = 0
    num_envs: int = 8  # worlds of one actor, stepped together
    unroll_steps: int = 20  # steps of each world in an unroll (the paper's n, table D.1)
    unrolls: int = 4  # in one update; with 8 worlds in each the paper's batch of 32
    gamma: float = 0.99  # discount a step, table D.1
    learning_rate: float = 6e-4  # table D.1
    anneal: bool = True  # learning rate linearly to 0, table D.1
    optimizer: str = "rmsprop"  # table D.1; or "adam"
    epsilon: float = 0.01  # of the optimiser, added to the root; table D.1
    entropy_coef: float = 0.01  # c₂, table D.1
    value_coef: float = 0.5  # c₁ of ½ squared error, table D.1
    max_grad_norm: float = 40.0  # of the gradient of the summed loss, table D.1
    clip_rho: float = 1.0  # ρ̄: moves the fixed point towards μ; §5.2.2 compares 1, 10 and 100
    clip_c: float = 1.0  # c̄: how far errors travel back; at most ρ̄
    clip_pg: float = 1.0  # ρ̄ in the policy's gradient
    trace_lambda: float = 1.0  # λ of the traces, remark 2
    max_lag: int | None = None  # updates that a policy may be old when its unroll is learnt from; 0: actors wait
    hidden: tuple[int, ...] = (64, 64)  # layers of the trunks over vectors; no vectors in the paper
    activation: str = "tanh"  # the same
    images: str = "impala"  # the trunk over pixels: "impala" (figure 3, right) or "nature"
    precision: str = "float32"  # or "bfloat16": the trunk over pixels runs under autocast
    threads: int = 1  # of torch, on a CPU


@dataclass(frozen=True)
class Unroll:
    """One message: `rows` `[B, T]` with the behaviour `logprob`, and what the learner's value needs beyond them.

    `last` `[B, ...]` was seen after the last row. `final` `[K, ...]` holds the true successors of the rows where a time
    limit cut, in the order of `rows.extras["limit"].nonzero()`. So all of it can be joined along the first dim.
    """

    rows: Trajectory
    last: Any
    final: Any


@dataclass
class State:
    """All that a run is."""

    config: Config
    network: ActorCritic
    optimizer: torch.optim.Optimizer
    generator: torch.Generator  # draws the actions
    step: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 that finished


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network, optimiser and generator. Raises UserError for spaces and settings that IMPALA cannot work with."""
    _check(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head, value_head = encoders.policy_head(spaces.action), heads.ScalarHead()
        body = encoders.actor_critic_body(
            spaces.obs,
            outputs=(head.width, value_head.width),
            gains=(0.01, 1.0),
            hidden=config.hidden,
            activation=config.activation,
            images=config.images,
            bfloat16=config.precision == "bfloat16",
        )
        network = ActorCritic(body, head, value_head, mask_key=encoders.mask_key(spaces.obs)).to(device)
    kinds = {"rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam}
    optimizer = kinds[config.optimizer](network.parameters(), lr=config.learning_rate, eps=config.epsilon)
    return State(config, network, optimizer, generator=torch.Generator(device).manual_seed(config.seed))


@torch.inference_mode()
def act(state: State, obs: Any, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """An action for every row of `obs`: drawn if `explore`, else the mode."""
    output = state.network.policy(obs)
    if not explore:
        return output.mode(), {}, carry
    action = output.sample(state.generator)
    return action, {"logprob": output.logp(action)}, carry


@torch.no_grad()
def rollout(state: State, env: Env, obs: Any) -> tuple[Unroll, Any]:
    """`unroll_steps` of every world from `obs` on; returns them and the observation to go on from."""
    device = state.generator.device
    rows: list[tuple[Any, ...]] = []
    limits: list[Tensor] = []
    finals: list[tuple[Tensor, Any]] = []  # (place of the row among all rows, final observation) at time limits
    steps = state.config.unroll_steps
    for t in range(steps):
        action, extras, _ = act(state, trees.to(obs, device), explore=True)
        action, logprob = action.cpu(), extras["logprob"].cpu()
        feedback = env.step(action)
        limit = torch.zeros_like(feedback.cut)
        if feedback.final_obs is not feedback.obs:
            limit = feedback.cut * feedback.discount
            worlds = limit.nonzero().squeeze(-1)
            if len(worlds):
                finals.append((worlds * steps + t, trees.pick(feedback.final_obs, worlds)))
        limits.append(limit)
        rows.append((obs, action, feedback.reward, feedback.discount, feedback.cut, feedback.mask, logprob))
        state.episodes.note(feedback.info)
        obs = feedback.obs
    batch = Trajectory(*(trees.stack(column) for column in zip(*rows, strict=True)))
    batch = batch.replace(extras={"limit": torch.stack(limits, 1)})
    state.step += batch.reward.numel()
    final = tree_map(lambda x: x[:0], obs)
    if finals:
        order = torch.cat([place for place, _ in finals]).argsort()
        final = trees.pick(trees.concat([seen for _, seen in finals]), order)
    return Unroll(batch, obs, final), obs


def update(state: State, unroll: Unroll) -> dict[str, float]:
    """One gradient step on one unroll (or several, joined along B)."""
    config, network, device = state.config, state.network, state.generator.device
    progress = state.step / config.steps if config.anneal else 0.0
    rate = schedules.linear(progress, config.learning_rate)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    rows = unroll.rows.map(lambda x: x.to(device))
    mask, behaviour, limit = rows.mask, rows.logprob, rows.extras["limit"] > 0
    assert mask is not None and behaviour is not None
    output, values = network(rows.obs)
    logprob = output.logp(rows.action)
    with torch.no_grad():
        next_value = returns.following(values.value, network.value(trees.to(unroll.last, device)).value)
        if limit.any():
            next_value[limit] = network.value(trees.to(unroll.final, device)).value
        ratio = policy.ratio(logprob, behaviour)
        gain, target = returns.vtrace(
            rows.reward, config.gamma * rows.discount, rows.cut, values.value, next_value, ratio,
            config.trace_lambda, config.clip_rho, config.clip_c, config.clip_pg, mask,
        )  # fmt: skip
    real = mask > 0
    policy_loss = policy.reinforce(logprob, gain)[real].sum()
    value_loss = value.squared_loss(values.value, target)[real].sum()
    entropy = output.entropy()[real].sum()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    optim.descend(state.optimizer, loss.backward, config.max_grad_norm)
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
    """Unrolls, one update, and so on, until `steps`: one actor that waits for the learner, so that nothing is stale."""
    require_worlds(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    obs = env.reset(config.seed + state.step)
    while state.step < config.steps:
        unrolls = []
        for _ in range(config.unrolls):
            unroll, obs = rollout(state, env, obs)
            unrolls.append(unroll)
        metrics = update(state, trees.join(unrolls))
        yield state.step, {**metrics, **state.episodes.metrics()}, state


def _check(config: Config) -> None:
    errors.at_least(1, config, "num_envs", "unroll_steps", "unrolls")
    if config.clip_c > config.clip_rho:
        raise UserError(f"clip_c must be at most clip_rho ({config.clip_rho}), not {config.clip_c}; see §4.1.")
    if config.max_lag is not None and config.max_lag < 0:
        raise UserError(f"max_lag must be at least 0, not {config.max_lag}.")
    if config.optimizer not in OPTIMIZERS:
        raise errors.unknown("optimizer", config.optimizer, OPTIMIZERS)
    if config.precision not in ("float32", "bfloat16"):
        raise errors.unknown("precision", config.precision, ("float32", "bfloat16"))

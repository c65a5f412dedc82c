"""PPG: Phasic Policy Gradient, Cobbe et al. 2020 (arXiv:2009.04416).

Policy and value have separate networks, so that neither objective interferes with the other. A separate phase distills
the value's features into the policy network, through a second value head on that network:

    policy phase, N_π times (algorithm 1; each is an iteration of PPO with two networks):
        maximize over π  E_t[ min(ρ_t A_t, clip(ρ_t, 1-ε, 1+ε) A_t) ] + β_S E_t[ H(π(·|s_t)) ],   E_π epochs
        minimize over V  E_t[ ½ (V(s_t) - G_t)² ],                                                E_V epochs
    auxiliary phase, E_aux epochs over all steps of the N_π iterations:
        minimize over π  E_t[ ½ (V_π(s_t) - G_t)² ] + β_clone E_t[ KL(π_old(·|s_t) ‖ π(·|s_t)) ],  the joint loss
        minimize over V  E_t[ ½ (V(s_t) - G_t)² ]

where V_π is the auxiliary head and π_old the policy at the start of the phase.

What is kept: two networks ("dual"), the defaults of the paper's table A (Procgen) for every coefficient, advantages
normalized over the batch, a separate optimizer for the auxiliary phase as in the authors' code. Differences: auxiliary
minibatches are of steps, not of segments, which is the same without a recurrent network; a time limit is not a
termination. Left out: the shared and the detached architecture of §3.5; the layers with normalized weights and the two
trunks of IMPALA's network at Procgen's settings: `images` "impala" is this library's own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.errors import UserError
from foresight.nets import encoders, heads, normalize
from foresight.nets.actor_critic import ActorCritic, SeparateNetworks, SharedTrunk
from foresight.ops import advantage, diagnostics, kl, policy, returns, value
from foresight.training import optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "entropy", "approx_kl", "explained_variance", "auxiliary_loss")
ACTING = ("network",)  # the fields of State that are sent to actors


@dataclass(frozen=True)
class Config:
    """Defaults: the paper's appendix A (Procgen), with environments and steps for a small machine."""

    steps: int = 1_000_000  # env steps, summed over all environments; the paper: 100M
    seed: int = 0
    num_envs: int = 8  # parallel environments; the paper: 4 workers x 64
    rollout_steps: int = 256  # steps of each environment between two updates
    policy_iterations: int = 32  # N_π: iterations of the policy phase between two auxiliary phases
    policy_epochs: int = 1  # E_π: epochs of the policy network per iteration
    value_epochs: int = 1  # E_V: epochs of the value network per iteration
    auxiliary_epochs: int = 6  # E_aux: epochs of an auxiliary phase
    minibatches: int = 8  # gradient steps per epoch of the policy phase
    auxiliary_minibatches: int = 16  # gradient steps per epoch of the auxiliary phase, per rollout of the policy phase
    learning_rate: float = 5e-4  # Adam, of all three optimizers
    gamma: float = 0.999  # discount per step
    gae_lambda: float = 0.95  # λ of GAE
    clip_ratio: float = 0.2  # ε of the clipped ratio
    entropy_coef: float = 0.01  # β_S: weight of the entropy bonus
    clone_coef: float = 1.0  # β_clone: weight of the KL from the policy before the auxiliary phase
    max_grad_norm: float = 0.5  # bound of the gradient norm; PPO's, the authors' code does not clip
    normalize_reward: bool = True  # divide by the running std of the discounted return, clip to ±10
    hidden: tuple[int, ...] = (64, 64)  # hidden layers of the two trunks over vectors
    activation: str = "tanh"  # activation of the two trunks over vectors
    images: str = "impala"  # the trunks over pixels: "nature", "nips", "impala", "vit" or "swin"
    log_std: float = 0.0  # initial log standard deviation of continuous actions
    threads: int = 1  # torch threads on a CPU; small networks are fastest with 1, pixels with 0 (one per core)


@dataclass
class State:
    """Everything that is saved."""

    config: Config
    network: ActorCritic  # `body.policy` gives the policy and V_π, `body.value` gives V
    policy_optimizer: torch.optim.Adam
    value_optimizer: torch.optim.Adam
    auxiliary_optimizer: torch.optim.Adam  # of all weights
    generator: torch.Generator  # samples the actions
    shuffler: torch.Generator  # shuffles minibatches, on the CPU
    reward_scaler: normalize.RewardScaler | None = None
    step: int = 0
    # `obs`, `target` per iteration.
    remembered: list[dict[str, Any]] = field(default_factory=list, metadata={"share": False})
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizers and generators. Raises UserError for spaces and settings that are not supported."""
    _check(config)
    require_end(spaces, config.gamma)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head, value_head = encoders.policy_head(spaces.action, config.log_std), heads.ScalarHead()
        trunks = [encoders.encoder(spaces.obs, config.hidden, config.activation, config.images) for _ in range(2)]
        body = SeparateNetworks(
            SharedTrunk(trunks[0], (head.width, 1), (0.01, 1.0)), SharedTrunk(trunks[1], (1,), (1.0,))
        )
        network = ActorCritic(body, head, value_head, None, encoders.mask_key(spaces.obs)).to(device)
    return State(
        config,
        network,
        torch.optim.Adam(network.policy_parameters(), lr=config.learning_rate),
        torch.optim.Adam(network.value_parameters(), lr=config.learning_rate),
        torch.optim.Adam(network.parameters(), lr=config.learning_rate),
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
    """`rollout_steps` steps of every environment from `obs` on, with `logprob`, values; also the next observation."""
    network = state.network
    choose, device = functools.partial(act, state, explore=True), state.generator.device
    segment = collect.segment(env, obs, choose, state.config.rollout_steps, device, state.episodes)
    batch = segment.trajectory
    state.step += batch.reward.numel()
    output, values = network(batch.obs)
    next_value = collect.successors(segment, values.value, lambda x, _: network.value(x).value)
    logprob = output.logp(batch.action)
    return batch.replace(logprob=logprob, value=values.value, next_value=next_value), segment.last


def policy_loss(state: State, steps: Trajectory) -> tuple[Tensor, Tensor]:
    """`(loss, [entropy, k3 estimate of the KL])` of the policy phase over steps `[N]`."""
    config = state.config
    assert steps.logprob is not None
    output = state.network.policy(steps.obs)
    logprob = output.logp(steps.action)
    ratio = policy.ratio(logprob, steps.logprob)
    entropy = output.entropy().mean()
    loss = policy.clipped_surrogate(ratio, steps.extras["advantage"], config.clip_ratio).mean()
    metrics = torch.stack([entropy.detach(), kl.k3(steps.logprob, logprob.detach()).mean()])
    return loss - config.entropy_coef * entropy, metrics


def value_loss(state: State, obs: Tree, target: Tensor) -> Tensor:
    """The loss of the value network over steps `[N]`, in both phases."""
    return value.squared_loss(state.network.value(obs).value, target).mean()


def joint_loss(state: State, old: ActorCritic, obs: Tree, target: Tensor) -> tuple[Tensor, Tensor]:
    """`(loss of V_π, KL(π_old ‖ π))` over steps `[N]`; `old` is the network before the auxiliary phase."""
    auxiliary = state.network.value_head(state.network.body.policy.single(1, obs))  # type: ignore[union-attr, operator]
    with torch.no_grad():
        before = old.policy(obs)
    error = value.squared_loss(auxiliary.value, target).mean()
    return error, before.kl(state.network.policy(obs)).mean()


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One iteration of the policy phase on one rollout with values; the auxiliary phase after every N_π-th."""
    config, mask = state.config, batch.mask
    assert batch.value is not None and batch.next_value is not None and mask is not None
    reward = normalize.scaled(state.reward_scaler, batch)
    advantages, target = returns.gae(
        reward, config.gamma * batch.discount, batch.cut, batch.value, batch.next_value, config.gae_lambda, mask
    )
    extras = {"advantage": advantage.normalize(advantages, mask), "target": target}
    real = mask > 0
    if not optim.steps_of(int(real.sum())):  # every environment only reset
        return {}
    steps = batch.replace(mask=None, next_value=None, extras=extras).map(lambda x: x[real])
    count = optim.steps_of(len(steps.reward), config.minibatches)

    policy_metrics, value_losses = [], []
    for _ in range(config.policy_epochs):
        for part in steps.minibatches(count, state.shuffler):
            loss, found = policy_loss(state, part)
            optim.descend(state.policy_optimizer, loss.backward, config.max_grad_norm)
            policy_metrics.append(torch.cat([loss.detach()[None], found]))
    for _ in range(config.value_epochs):
        for part in steps.minibatches(count, state.shuffler):
            error = value_loss(state, part.obs, part.extras["target"])
            optim.descend(state.value_optimizer, error.backward, config.max_grad_norm)
            value_losses.append(error.detach())
    metrics = dict(
        zip(("policy_loss", "entropy", "approx_kl"), torch.stack(policy_metrics).mean(0).tolist(), strict=True)
    )
    metrics["value_loss"] = torch.stack(value_losses).mean().item()
    assert steps.value is not None
    metrics["explained_variance"] = diagnostics.explained_variance(steps.value, steps.extras["target"]).item()

    state.remembered.append({"obs": steps.obs, "target": steps.extras["target"]})
    if len(state.remembered) >= config.policy_iterations:
        metrics.update(auxiliary_phase(state))
    return metrics


def auxiliary_phase(state: State) -> dict[str, float]:
    """Distill the values of all steps since the last phase into the policy network, while cloning the policy.

    Returns means over the last epoch: the loss of the auxiliary head, and `clone_kl`, the KL from the policy before.
    """
    config = state.config
    obs, target = (trees.concat([part[key] for part in state.remembered]) for key in ("obs", "target"))
    count = min(config.auxiliary_minibatches * len(state.remembered), len(target))
    old = copy.deepcopy(state.network)
    losses: list[Tensor] = []
    for _ in range(config.auxiliary_epochs):
        losses = []
        for part in torch.randperm(len(target), generator=state.shuffler).to(target.device).chunk(count):
            steps, part_target = trees.pick(obs, part), target[part]
            error, divergence = joint_loss(state, old, steps, part_target)
            loss = error + config.clone_coef * divergence + value_loss(state, steps, part_target)
            optim.descend(state.auxiliary_optimizer, loss.backward, config.max_grad_norm)
            losses.append(torch.stack([error, divergence]).detach())
    state.remembered = []
    if not losses:
        return {}
    return dict(zip(("auxiliary_loss", "clone_kl"), torch.stack(losses).mean(0).tolist(), strict=True))


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Iterations of the policy phase, with auxiliary phases between them, until `steps`. A given `state` resumes."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    restart(state)
    obs = env.reset(config.seed + state.step)
    while state.step < config.steps:
        batch, obs = rollout(state, env, obs)
        metrics = update(state, batch)
        yield state.step, {**metrics, **state.episodes.metrics()}, state


def _check(config: Config) -> None:
    whole = ("num_envs", "rollout_steps", "policy_iterations", "policy_epochs", "value_epochs", "minibatches")
    errors.at_least(1, config, *whole, "auxiliary_minibatches")
    if config.auxiliary_epochs < 0:
        raise UserError(f"auxiliary_epochs must be at least 0, not {config.auxiliary_epochs}.")
    steps = config.num_envs * config.rollout_steps
    if config.minibatches > steps:
        raise UserError(
            f"minibatches is {config.minibatches}, but a rollout has only {steps} steps (num_envs x rollout_steps). "
            f"Use --minibatches {steps} or less."
        )

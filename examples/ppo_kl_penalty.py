"""PPO with a KL penalty instead of the clip: Schulman et al. 2017 (arXiv:1707.06347), §4. One file, one variant.

    maximize  E_t[ ρ_t A_t - β KL(π_old(·|s_t) ‖ π(·|s_t)) ]  -  c₁ E_t[ ½ (V(s_t) - G_t)² ]  +  c₂ E_t[ H(π(·|s_t)) ]

where ρ_t = π(a_t|s_t) / π_old(a_t|s_t), A is generalized advantage estimation and G = A + V_old. β adapts: after each
update d = E_t[KL(π_old ‖ π)] is measured; β is halved if d < d_targ / 1.5 and doubled if d > 1.5 d_targ.

Kept: the adaptation of β with the paper's constants; several epochs of minibatches. The KL is estimated by k3 from the
actions taken, which were sampled from π_old: an unbiased value and an unbiased gradient. Left out: the options of `ppo`
beyond the paper's loss (normalized observations, memory, annealing).

    foresight train examples/ppo_kl_penalty.py --env CartPole-v1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foresight import errors
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.nets import actor_critic, encoders, heads
from foresight.ops import advantage, diagnostics, kl, policy, returns, value
from foresight.training import optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "approx_kl", "kl_coef", "explained_variance")


@dataclass(frozen=True)
class Config:
    """Defaults: small control tasks such as CartPole."""

    steps: int = 100_000  # env steps, summed over all envs
    seed: int = 0
    num_envs: int = 8  # envs stepped in parallel
    rollout_steps: int = 128  # steps of each env between two updates (the paper's T)
    epochs: int = 10  # passes over each rollout; table 3
    minibatches: int = 4  # gradient steps per epoch
    learning_rate: float = 1e-3  # Adam; chosen on CartPole
    gamma: float = 0.99  # discount per step; table 3
    gae_lambda: float = 0.95  # table 3
    kl_coef: float = 1.0  # β at the start; "quickly adjusts" (§4)
    kl_target: float = 0.01  # d_targ, nats per step; table 1: 0.003, 0.01 and 0.03
    entropy_coef: float = 0.0  # c₂
    value_coef: float = 0.5  # c₁ of ½ squared error
    max_grad_norm: float = 0.5  # global norm
    hidden: tuple[int, ...] = (64, 64)  # layers of each MLP; §6.1
    threads: int = 1  # of torch, on a CPU


@dataclass
class State:
    """Everything that changes during a run."""

    config: Config
    network: actor_critic.ActorCritic
    optimizer: torch.optim.Adam
    generator: torch.Generator  # samples the actions
    shuffler: torch.Generator  # shuffles the minibatches, on the CPU
    kl_coef: float  # β
    step: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 that finished


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network, optimizer and generators. Raises UserError for unsupported spaces and values out of range."""
    errors.at_least(1, config, "num_envs", "rollout_steps", "epochs", "minibatches")
    require_end(spaces, config.gamma)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head, value_head = encoders.policy_head(spaces.action), heads.ScalarHead()
        body = encoders.actor_critic_body(spaces.obs, (head.width, value_head.width), (0.01, 1.0), config.hidden)
        network = actor_critic.ActorCritic(body, head, value_head).to(device)
    return State(
        config,
        network,
        torch.optim.Adam(network.parameters(), lr=config.learning_rate, eps=1e-5, fused=True),
        generator=torch.Generator(device).manual_seed(config.seed),
        shuffler=torch.Generator().manual_seed(config.seed),
        kl_coef=config.kl_coef,
    )


@torch.inference_mode()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """An action for each row of `obs`: sampled if `explore`, else the mode."""
    output = state.network.policy(obs)
    return output.sample(state.generator) if explore else output.mode(), {}, carry


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree) -> tuple[Trajectory, Tree]:
    """`rollout_steps` of each env from `obs` with `logprob`, `value` and `next_value`; and the next observation."""

    def choose(obs: Tree, carry: Tree) -> tuple[Tensor, dict[str, Tensor], Tree]:
        return act(state, obs, carry, explore=True)

    config, network = state.config, state.network
    unroll = collect.segment(env, obs, choose, config.rollout_steps, state.generator.device, state.episodes)
    rows = unroll.trajectory
    state.step += rows.reward.numel()
    output, values = network(rows.obs)
    next_value = collect.successors(unroll, values.value, lambda obs, carry: network.value(obs).value)
    return rows.replace(logprob=output.logp(rows.action), value=values.value, next_value=next_value), unroll.last


def loss(state: State, batch: Trajectory) -> tuple[Tensor, Tensor]:
    """The loss over N steps, and the policy loss, value loss, entropy and KL `[4]`."""
    config, old_logprob, target = state.config, batch.logprob, batch.extras["target"]
    assert old_logprob is not None
    output, values = state.network(batch.obs)
    logprob = output.logp(batch.action)
    advantages = advantage.normalize(batch.extras["advantage"])
    policy_loss = -(policy.ratio(logprob, old_logprob) * advantages).mean()
    divergence = kl.k3(old_logprob, logprob).mean()
    value_loss = value.squared_loss(values.value, target).mean()
    entropy = output.entropy().mean()
    total = policy_loss + state.kl_coef * divergence + config.value_coef * value_loss - config.entropy_coef * entropy
    return total, torch.stack([policy_loss, value_loss, entropy, divergence]).detach()


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """Epochs of gradient steps on one rollout, then one adaptation of β."""
    config, mask = state.config, batch.mask
    assert batch.value is not None and batch.next_value is not None and mask is not None
    advantages, target = returns.gae(
        batch.reward, config.gamma * batch.discount, batch.cut, batch.value, batch.next_value, config.gae_lambda
    )
    rows = batch.replace(mask=None, next_value=None, extras={"advantage": advantages, "target": target})
    real = mask.flatten() > 0
    rows = rows.map(lambda x: x.flatten(0, 1)[real])

    recorded = []
    for _ in range(config.epochs):
        for minibatch in rows.minibatches(config.minibatches, state.shuffler):
            total, terms = loss(state, minibatch)
            recorded.append(terms)
            optim.descend(state.optimizer, total.backward, config.max_grad_norm)

    with torch.no_grad():
        assert rows.logprob is not None
        divergence = kl.k3(rows.logprob, state.network.policy(rows.obs).logp(rows.action)).mean().item()
    used = state.kl_coef
    if divergence < config.kl_target / 1.5:
        state.kl_coef /= 2
    elif divergence > config.kl_target * 1.5:
        state.kl_coef *= 2

    policy_loss, value_loss, entropy, _ = torch.stack(recorded).mean(0).tolist()
    explained = diagnostics.explained_variance(batch.value[mask > 0], target[mask > 0]).item()
    return {
        "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy,
        "approx_kl": divergence, "kl_coef": used, "explained_variance": explained,
    }  # fmt: skip


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Act, evaluate, update, until `steps`. A given `state` continues with new episodes."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    obs = env.reset(config.seed + state.step)
    while state.step < config.steps:
        batch, obs = rollout(state, env, obs)
        metrics = update(state, batch)
        yield state.step, {**metrics, **state.episodes.metrics()}, state

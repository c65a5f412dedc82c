"""REINFORCE: Simple statistical gradient-following algorithms, Williams 1992 (Machine Learning 8).

    ∇J(θ) = E_π[ Σ_t ψ_t ∇log π(a_t|s_t) ]

in three forms of ψ, with `weigh_time` all of the same expectation and each with less variance than the one before:

    trajectory      ψ_t = G_0                  the return of the whole episode
    reward_to_go    ψ_t = γᵗ G_t               an action cannot affect earlier rewards
    baseline        ψ_t = γᵗ (G_t - b(s_t))    any function of the state can be subtracted; here b ≈ V

where G_t = r_t + γ r_{t+1} + ... to the end of the episode. Sutton & Barto 2018, §13.3 (the second form) and §13.4
(the third, with b fitted to G by least squares); Williams 1992, theorem 1 (any baseline).

What is kept: every batch is whole episodes of the current policy, one per environment; the gradient is their mean. The
factor γᵗ of the discounted objective is an option (`weigh_time`): in practice it is left out, so that late and early
states have equal weight (Nota & Thomas 2020, arXiv:1906.07073).

A time limit ends the episode in the first two forms, which have no value to bootstrap from. The third bootstraps from
the baseline of the final observation.

Left out: eligibility traces for steps within an episode, and the REINFORCE of stochastic units inside a network.
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
from foresight.errors import UserError
from foresight.nets import encoders, heads
from foresight.nets.actor_critic import ActorCritic, Sampled
from foresight.ops import advantage, policy, returns, schedules, value
from foresight.training import optim

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "entropy", "value_loss")
FORMS = ("trajectory", "reward_to_go", "baseline")


@dataclass(frozen=True)
class Config:
    """The paper has no such experiments: defaults are ours, tuned on CartPole-v1."""

    steps: int = 200_000  # env steps, summed over all environments, including those waiting for the longest episode
    seed: int = 0
    num_envs: int = 8  # parallel environments; a batch is one episode of each
    form: str = "baseline"  # "trajectory", "reward_to_go" or "baseline"
    max_episode_steps: int = 1000  # steps after which an episode is truncated, as by a time limit
    gamma: float = 0.99  # discount per step
    weigh_time: bool = False  # keep the factor γᵗ; Sutton & Barto 2018, §13.3
    normalize_advantage: bool = False  # normalize ψ to mean 0 and std 1 over the batch; common, but biased
    learning_rate: float = 3e-3  # Adam, of the policy
    anneal_lr: bool = False  # anneal the policy's learning rate linearly to 0
    value_learning_rate: float = 1e-2  # Adam, of the baseline
    value_steps: int = 10  # gradient steps of the baseline, on the whole batch, after each step of the policy
    entropy_coef: float = 0.0  # weight of the entropy bonus of every step
    max_grad_norm: float = 0.5  # bound of the gradient norm; as in SLM-Lab's reinforce_cartpole
    hidden: tuple[int, ...] = (64, 64)  # hidden layers of the trunks over vectors
    activation: str = "tanh"  # activation of the trunks over vectors
    images: str = "nature"  # the trunk over pixels: "nature", "nips", "impala", "vit" or "swin"
    log_std: float = 0.0  # initial log standard deviation of continuous actions
    threads: int = 1  # torch threads on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved."""

    config: Config
    network: ActorCritic  # its value is the baseline; unused in the other two forms
    policy_optimizer: torch.optim.Adam
    value_optimizer: torch.optim.Adam
    generator: torch.Generator  # samples the actions
    step: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network, optimizers and generator. Raises UserError for spaces and settings that are not supported."""
    _check(config)
    if config.form == "baseline":
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
        )
        network = ActorCritic(body, head, value_head, None, encoders.mask_key(spaces.obs)).to(device)
    return State(
        config,
        network,
        torch.optim.Adam(network.policy_parameters(), lr=config.learning_rate),
        torch.optim.Adam(network.value_parameters(), lr=config.value_learning_rate),
        generator=torch.Generator(device).manual_seed(config.seed),
    )


@torch.inference_mode()
def act(state: State, obs: Tree, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """An action for every row of `obs`: sampled if `explore`, else the mode."""
    output = state.network.policy(obs)
    return output.sample(state.generator) if explore else output.mode(), {}, carry


@torch.no_grad()
def rollout(state: State, env: Env) -> Trajectory:
    """One whole episode of every environment `[B, T]`; `mask` is 0 after its end. Has values if there is a baseline."""
    config, device = state.config, state.generator.device
    choose = Sampled(state.network, state.generator)
    segment = collect.episodes(env, config.seed + state.step, choose, config.max_episode_steps, device, state.episodes)
    state.step += segment.trajectory.reward.numel()
    if config.form != "baseline":
        return segment.trajectory
    values = state.network.value(segment.trajectory.obs).value
    next_value = collect.successors(segment, values, lambda obs, _: state.network.value(obs).value)
    return segment.trajectory.replace(value=values, next_value=next_value)


def weights(config: Config, batch: Trajectory) -> tuple[Tensor, Tensor]:
    """`(ψ, G)`, both `[B, T]`: the weights of ∇log π, and the returns."""
    to_go = returns.discounted_return(
        batch.reward, config.gamma * batch.discount, batch.cut, batch.next_value, batch.mask
    )
    if config.form == "trajectory":
        return to_go[:, :1].expand_as(to_go), to_go
    psi = to_go
    if config.form == "baseline":
        assert batch.value is not None
        psi = to_go - batch.value
    if config.weigh_time:
        psi = psi * config.gamma ** torch.arange(psi.shape[1], device=psi.device)
    return psi, to_go


def loss(state: State, steps: Trajectory, psi: Tensor, episodes: int) -> tuple[Tensor, Tensor]:
    """`(loss, mean entropy)`; minus the gradient of the loss is the mean of Σ_t ψ_t ∇log π over the episodes."""
    output = state.network.policy(steps.obs)
    entropy = output.entropy()
    terms = policy.reinforce(output.logp(steps.action), psi) - state.config.entropy_coef * entropy
    return terms.sum() / episodes, entropy.detach().mean()


def update(state: State, batch: Trajectory, progress: float = 0.0) -> dict[str, float]:
    """A step of the policy on a batch of episodes, then steps of the baseline; `progress` anneals the policy's rate."""
    config, mask = state.config, batch.mask
    assert mask is not None
    rate = schedules.linear(progress, config.learning_rate, 0.0) if config.anneal_lr else config.learning_rate
    for group in state.policy_optimizer.param_groups:
        group["lr"] = rate
    psi, target = weights(config, batch)
    if config.normalize_advantage:
        psi = advantage.normalize(psi, mask)
    real = mask > 0
    steps, psi, target = batch.map(lambda x: x[real]), psi[real], target[real]

    total, entropy = loss(state, steps, psi, episodes=len(mask))
    optim.descend(state.policy_optimizer, total.backward, config.max_grad_norm)
    metrics = {"policy_loss": total.item(), "entropy": entropy.item(), "learning_rate": rate}
    if config.form == "baseline":
        for _ in range(config.value_steps):
            error = value.squared_loss(state.network.value(steps.obs).value, target).mean()
            optim.descend(state.value_optimizer, error.backward, config.max_grad_norm)
        metrics["value_loss"] = error.item()
    return metrics


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Collect whole episodes, then update, until `steps`. A given `state` resumes with new episodes."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    while state.step < config.steps:
        progress = state.step / config.steps
        metrics = update(state, rollout(state, env), progress)
        yield state.step, {**metrics, **state.episodes.metrics()}, state


def _check(config: Config) -> None:
    errors.at_least(1, config, "num_envs", "max_episode_steps", "value_steps")
    if config.form not in FORMS:
        raise errors.unknown("form of REINFORCE", config.form, FORMS)
    if config.num_envs == 1 and config.form == "trajectory" and config.normalize_advantage:
        raise UserError(
            "One episode has one weight in the form 'trajectory', and normalized it is 0. Use --num-envs 2 or more, or "
            "leave out --normalize-advantage."
        )

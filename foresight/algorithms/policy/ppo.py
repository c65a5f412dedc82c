"""PPO: Proximal Policy Optimization Algorithms, Schulman et al. 2017 (arXiv:1707.06347).

    maximize  E_t[ min(ρ_t A_t, clip(ρ_t, 1-ε, 1+ε) A_t) ]  -  c₁ E_t[ ½ (V(s_t) - G_t)² ]  +  c₂ E_t[ H(π(·|s_t)) ]

where ρ_t = π(a_t|s_t) / π_old(a_t|s_t), A is generalized advantage estimation and G = A + V_old.

What is kept of "The 37 Implementation Details of PPO" (Huang et al. 2022), by their numbers:
  1  parallel environments in segments of fixed length, which cut episodes   `rollout`
  2  orthogonal weights: √2 in the body, 0.01 for the policy, 1 for the value  `nets.heads`, `nets.mlp`
  3  Adam with ε = 1e-5                                                       `build`
  4  learning rate annealed linearly to 0                                     `anneal_lr`
  5  GAE with the value as bootstrap, G = A + V_old                           `ops.returns.gae`
  6  shuffled minibatches that cover every step once per epoch                `Trajectory.minibatches`
  7  advantages normalized in every minibatch                                 `normalize_advantage`
  8  clipped surrogate                                                        `ops.policy.clipped_surrogate`
  9  clipped value loss (an option: `clip_value`)                             `ops.value.clipped_loss`
  10 one loss: policy, value and entropy                                      `objective`
  11 global gradient norm clipped to 0.5                                      `max_grad_norm`
  12 losses, entropy, clip fraction and k3 KL as metrics                      `LOSS_METRICS`
  13 separate trunks (vectors) or one trunk (pixels: 21) for policy and value  `nets.actor_critic`
  14 to 20, the Atari set (no-ops, skip, lives, fire, 84x84 gray, sign of the reward, 4 frames)  `envs.control.atari`
  22 bytes scaled to [0, 1]                                                   `nets.conv`
  23 to 25 normal actions, state-independent log-std, independent dims        `nets.outputs.Normal`
  27 environments clip actions to their bounds; the learner keeps the sample  `envs.base.Spaces`
  28 to 31 observations and rewards scaled by running statistics and clipped  `nets.normalize`
  37 several choices at once: independent categoricals                        `nets.outputs.MultiCategorical`
and of their further details: clip range annealing, early stopping on a KL target, masks of invalid actions (the key
`action_mask` of a dict observation).

With `state_dependent_noise` (gSDE, Raffin et al. 2021, arXiv:2005.05719) the noise of continuous actions is linear in
the policy's features. Each environment draws the weights of its noise at the start of a rollout and every so many
steps of it.

Differences: a time limit is not a termination: its step bootstraps with the value of its final observation.
Steps on which an environment only reset (`Feedback.mask` 0) are left out of losses and statistics. The running
statistics change between iterations only, so the policy that acts is the one that is updated.

With `policy`, a run of `vla`, the network is that policy with a value head on its features before the first action
token, as RL4VLA has it (Liu et al. 2025, arXiv:2505.19789), without entropy bonus; the presets have three epochs, not
one. An action is several tokens, and ρ_t is that of the whole action; with `ratio` "token" there is one ratio per
token. In an environment that takes chunks of actions there is one for each action, or with "chunk" one for all of them.
The first `critic_warmup` updates train the value head only (VLA-RL, arXiv:2505.18719).

With `memory` (details 32 to 36 for the LSTM; the same for transformers) the policy has a recurrent state, the carry,
which is reset where an episode ends, in acting and in training. Minibatches are then whole sequences, one per
environment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.errors import UserError
from foresight.nets import encoders, heads, normalize, precision
from foresight.nets.actor_critic import ActorCritic, Sampled
from foresight.nets.outputs import Output
from foresight.nets.sequence import memory, vla
from foresight.nets.sequence.action_tokens import Tokens
from foresight.nets.sequence.memory import MemoryActorCritic
from foresight.nets.sequence.vla_actor_critic import VLAActorCritic, require_one_path
from foresight.ops import advantage, diagnostics, kl, policy, returns, schedules, value
from foresight.training import optim, twins
from foresight.training.twins import twin

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "entropy", "approx_kl", "explained_variance")
ACTING = ("network",)  # the fields of State that are sent to actors
RATIOS = ("action", "token", "chunk")
LOSS_METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")  # of every minibatch; detail 12


@dataclass(frozen=True)
class Config:
    """Defaults: the paper's table 3 (MuJoCo) unless noted; see the presets for tasks."""

    steps: int = 1_000_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 8  # parallel environments; Huang et al., detail 1
    rollout_steps: int = 128  # steps of each environment between two updates (the paper's T)
    epochs: int = 4  # passes over each rollout
    minibatches: int = 4  # gradient steps per epoch
    learning_rate: float = 3e-4  # Adam, table 3
    anneal_lr: bool = True  # anneal the learning rate linearly to 0; detail 4
    gamma: float = 0.99  # discount per step, table 3
    gae_lambda: float = 0.95  # λ of GAE, table 3
    clip_ratio: float = 0.2  # ε of the clipped ratio; table 3
    anneal_clip: bool = False  # ε linearly to 0; the paper's Atari setting (table 5)
    clip_value: float | None = None  # range of the value clip, in units of the return; detail 9 has it equal to ε
    entropy_coef: float = 0.0  # c₂: weight of the entropy bonus; 0.01 on Atari (table 5)
    value_coef: float = 0.5  # c₁: weight of ½ squared error; stable-baselines3's vf_coef 0.5 (no ½ there) is 1.0 here
    max_grad_norm: float = 0.5  # bound of the global gradient norm; detail 11
    target_kl: float | None = None  # stop the epochs when the k3 estimate exceeds 1.5 times this, in nats
    normalize_advantage: bool = True  # to mean 0 and std 1 in every minibatch; detail 7
    normalize_obs: bool = False  # subtract the running mean, divide by the running std, clip to ±10; details 28 and 29
    popart_rate: float | None = None  # β of PopArt (arXiv 1602.07714), per update: values are normalized; None: not
    normalize_reward: bool = False  # divide by the running std of the discounted return, clip to ±10; details 30 and 31
    hidden: tuple[int, ...] = (64, 64)  # hidden layers of the MLPs over vectors; §6.1
    activation: str = "tanh"  # activation of the hidden layers; §6.1
    images: str = "nature"  # the trunk over pixels: "nature", "nips", "impala", "vit" or "swin"
    memory: str | None = None  # "gru", "lstm", "gtrxl" or "transformer", over the trunk; see nets.sequence.memory
    memory_size: int = 64  # width of the memory
    memory_layers: int = 1  # layers of the memory
    memory_heads: int = 4  # attention heads of the memory
    memory_window: int = 64  # past env steps in the attention window
    policy: str | None = None  # a run of vla to fine-tune instead of a new network
    ratio: str = "action"  # of a VLA: one per "action" (RL4VLA), "token" (SimpleVLA-RL) or "chunk" of actions
    sample: bool = False  # draw actions in evaluation too, as a VLA without memory needs it
    critic_warmup: int = 0  # first updates that train the value head of a VLA only; 5 in VLA-RL
    backbone: str = "shared"  # one "shared" memory, two "separate" ones, or one for the "actor" or "critic" only
    log_std: float = 0.0  # initial log standard deviation of continuous actions, or of the weights of gSDE; detail 24
    state_dependent_noise: int | None = None  # steps for which gSDE (arXiv 2005.05719) holds its noise; None: not
    precision: str = "float32"  # "float32", "bfloat16" (the trunks run under autocast) or "auto" (the faster one)
    threads: int = 1  # torch threads on a CPU; small networks are fastest with 1, pixels with 0 (one per core)


@dataclass
class State:
    """Everything that is saved. `network` includes the observation statistics, so a policy is saved with them."""

    config: Config
    network: ActorCritic | MemoryActorCritic | VLAActorCritic
    optimizer: torch.optim.Adam
    generator: torch.Generator  # samples the actions
    shuffler: torch.Generator  # shuffles minibatches, on the CPU
    reward_scaler: normalize.RewardScaler | None = None
    step: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network, optimizer and generators. Raises UserError for spaces and settings that PPO does not support."""
    _check(config)
    require_end(spaces, config.gamma)
    halved = precision.dtype(config.precision, device) is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = _network(config, spaces, halved).to(device)
    return State(
        config,
        network,
        torch.optim.Adam(network.parameters(), lr=config.learning_rate, eps=1e-5, fused=True),
        generator=torch.Generator(device).manual_seed(config.seed),
        shuffler=torch.Generator().manual_seed(config.seed),
        reward_scaler=normalize.reward_scaler(config, device),
    )


def _network(config: Config, spaces: Spaces, halved: bool) -> ActorCritic | MemoryActorCritic | VLAActorCritic:
    if config.policy is not None:
        return VLAActorCritic(vla.load(config.policy, spaces.obs, spaces.action, spaces.embodiments)).eval()
    held = config.state_dependent_noise is not None
    head = (encoders.state_dependent_head if held else encoders.policy_head)(spaces.action, config.log_std)
    value_head = heads.ScalarHead() if config.popart_rate is None else heads.PopArtHead()
    normalizer = encoders.normalizer(spaces.obs) if config.normalize_obs else None
    return memory.actor_critic(
        spaces.obs, head, value_head, memory.shape_of(config), config.backbone,
        config.hidden, config.activation, config.images, normalizer, halved,
    )  # fmt: skip


@torch.inference_mode()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """An action for every row of `obs`: sampled if `explore` or `config.sample`, else the mode. See `reset_carry`."""
    output, carry = state.network.step(obs, carry)
    return output.sample(state.generator) if explore or state.config.sample else output.mode(), {}, carry


reset_carry = memory.reset_carry
restart = normalize.restart


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree, carry: Tree = None) -> tuple[Trajectory, Tree, Tree]:
    """`rollout_steps` steps of every environment from `obs` on, evaluated; also the next observation and the memory."""
    if carry is None:
        carry = state.network.initial(env.num_envs)

    network, held = state.network, state.config.state_dependent_noise
    sample = heads.sampler(network.policy_head, env.num_envs, held, state.generator)
    choose = Sampled(network, state.generator, sample)  # `act` with less overhead
    segment = collect.segment(
        env, obs, choose, state.config.rollout_steps, state.generator.device, state.episodes, carry
    )
    state.step += segment.trajectory.reward.numel()
    return evaluate(state, segment), segment.last, segment.carry


@torch.no_grad()
def evaluate(state: State, segment: collect.Rollout) -> Trajectory:
    """The rollout with `logprob`, `value` and `next_value`.

    One pass over the batch instead of one at every step: cheaper, and the same computation as in `objective`, so that
    the first ratio is 1. With a memory, `extras` has `carry` `[B, ...]`, its state before the first step, and
    `start` `[B, T]`, 1 where an episode begins and the memory is reset.
    """
    steps, network = segment.trajectory, state.network
    extras = {} if segment.first is None else {"carry": segment.first, "start": memory.starts(steps.cut)}
    output, values, _ = network.read(steps.obs, segment.first, extras.get("start"))
    next_value = collect.successors(segment, values.value, lambda obs, carry: network.value(obs, carry).value)
    logprob = _logprob(state.config, output, steps.action)
    return steps.replace(logprob=logprob, value=values.value, next_value=next_value, extras=extras)


@twin(twins.clipped_objective)
def objective(state: State, batch: Trajectory, clip: float) -> tuple[Callable[[], object], Tensor]:
    """The loss over N steps, or over sequences: its backward pass (not yet run), and its `LOSS_METRICS`."""
    config, network = state.config, state.network
    old_logprob, old_value = batch.logprob, batch.value
    advantages, target = batch.extras["advantage"], batch.extras["target"]
    assert old_logprob is not None and old_value is not None
    output, values, _ = network.read(batch.obs, batch.extras.get("carry"), batch.extras.get("start"))
    logprob, entropies, predicted = _logprob(config, output, batch.action), output.entropy(), values.value
    if batch.mask is not None:  # a memory reads whole sequences; the loss is over their unmasked steps
        columns = (logprob, entropies, predicted, advantages, target, old_logprob, old_value)
        real = batch.mask > 0
        logprob, entropies, predicted, advantages, target, old_logprob, old_value = (x[real] for x in columns)
    if config.normalize_advantage:
        advantages = advantage.normalize(advantages)
    if logprob.dim() > advantages.dim():
        advantages = advantages.unsqueeze(-1)  # each token has the advantage of its action
    ratio = policy.ratio(logprob, old_logprob)
    policy_loss = policy.clipped_surrogate(ratio, advantages, clip).mean()
    if config.clip_value is None:
        value_loss = value.squared_loss(predicted, target).mean()
    else:
        value_loss = value.clipped_loss(predicted, old_value, target, config.clip_value).mean()
    value_loss = value_loss / heads.value_scale(network.value_head) ** 2
    entropy = entropies.mean()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    with torch.no_grad():
        divergence, clipped = kl.k3(old_logprob, logprob).mean(), policy.clip_fraction(ratio, clip)
        return loss.backward, torch.stack([policy_loss, value_loss, entropy, divergence, clipped])


def _logprob(config: Config, output: Output, action: Tensor) -> Tensor:
    """What ratios are of: the log-probability of each action, of each of its tokens `[..., K]`, or of a whole chunk."""
    if isinstance(output, Tokens) and config.ratio != "chunk":
        return output.token_logp(action) if config.ratio == "token" else output.action_logp(action)
    return output.logp(action)


def _value_head_only(network: VLAActorCritic, backward: Callable[[], object]) -> None:
    """The gradients that `backward` computes, of the value head alone."""
    backward()
    for name, weight in network.named_parameters():
        if not name.startswith("value_head"):
            weight.grad = None


@twin(twins.clipped_epochs)
def epochs(state: State, data: Trajectory, clip: float) -> Tensor:
    """Minibatch steps over a rollout, shuffled in every epoch: the `LOSS_METRICS` of each step, `[K, 5]`."""
    config, losses = state.config, []
    count = optim.steps_of(len(data.reward), config.minibatches)
    shuffled = (part for _ in range(config.epochs) for part in data.minibatches(count, state.shuffler))
    for minibatch in shuffled:
        backward, loss = objective(state, minibatch, clip)
        losses.append(loss)
        if state.step <= config.critic_warmup * config.num_envs * config.rollout_steps:
            assert isinstance(state.network, VLAActorCritic)
            backward = functools.partial(_value_head_only, state.network, backward)
        if config.target_kl is not None and loss[LOSS_METRICS.index("approx_kl")] > 1.5 * config.target_kl:
            break
        optim.descend(state.optimizer, backward, config.max_grad_norm)
    return torch.stack(losses)


def update(state: State, batch: Trajectory, progress: float = 0.0) -> dict[str, float]:
    """Epochs of minibatch steps on one evaluated rollout; `progress` in [0, 1] anneals learning rate and clip range."""
    config = state.config
    rate = schedules.linear(progress, config.learning_rate, 0.0) if config.anneal_lr else config.learning_rate
    clip = schedules.linear(progress, config.clip_ratio, 0.0) if config.anneal_clip else config.clip_ratio
    for group in state.optimizer.param_groups:
        group["lr"] = rate

    mask = batch.mask
    assert batch.value is not None and batch.next_value is not None and mask is not None
    reward = normalize.scaled(state.reward_scaler, batch)
    if not optim.steps_of(int(mask.sum())):  # every environment only reset
        return {"learning_rate": rate}
    advantages, target = returns.gae(
        reward, config.gamma * batch.discount, batch.cut, batch.value, batch.next_value, config.gae_lambda
    )
    old_value = batch.value
    if config.popart_rate is not None and isinstance(state.network.value_head, heads.PopArtHead):
        first = not state.network.value_head.moments[1]
        state.network.value_head.update(*state.network.value_layer(), target[mask > 0], config.popart_rate)
        advantages = advantages / heads.value_scale(state.network.value_head)
        if first:  # values are not preserved: the value clip is relative to the new ones
            with torch.no_grad():
                values = state.network.read(batch.obs, batch.extras.get("carry"), batch.extras.get("start"))[1]
            batch = batch.replace(value=values.value)
    extras = {**batch.extras, "advantage": advantages, "target": target}
    data = batch.replace(mask=None, next_value=None, extras=extras)
    if config.memory is not None:  # minibatches of whole sequences
        if not mask.all():
            taken = mask.any(1)  # a minibatch needs a step with a loss
            data = data.replace(mask=mask).map(lambda x: x[taken])
    else:
        data = data.map(lambda x: x.flatten(0, 1))
        if not mask.all():
            real = mask.flatten() > 0
            data = data.map(lambda x: x[real])

    losses = epochs(state, data, clip)
    if state.network.normalizer is not None:
        state.network.normalizer.update(data.obs if config.memory is None else batch.obs[mask > 0])
    metrics = dict(zip(LOSS_METRICS, losses.mean(0).tolist(), strict=True))
    explained = diagnostics.explained_variance(old_value[mask > 0], target[mask > 0]).item()
    return {**metrics, "explained_variance": explained, "learning_rate": rate}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Act, evaluate, update, until `steps`. A given `state` resumes with new episodes."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    restart(state)
    obs, carry = env.reset(config.seed + state.step), None
    if isinstance(state.network, VLAActorCritic) and not state.step:
        greedy, seen = replace(state, config=replace(state.config, sample=False)), trees.to(obs, state.generator.device)
        require_one_path(state.network, seen, act(greedy, seen)[0])
    while state.step < config.steps:
        progress = state.step / config.steps
        batch, obs, carry = rollout(state, env, obs, carry)
        metrics = update(state, batch, progress)
        yield state.step, {**metrics, **state.episodes.metrics()}, state


def _check(config: Config) -> None:
    errors.at_least(1, config, "num_envs", "rollout_steps", "epochs", "minibatches")
    if config.state_dependent_noise is not None:
        errors.at_least(1, config, "state_dependent_noise")
    for name in ("clip_ratio", "clip_value", "target_kl"):
        if (bound := getattr(config, name)) is not None and not bound > 0:
            raise UserError(f"{name} must be above 0, not {bound}.")
    steps = config.num_envs * config.rollout_steps
    most = max(1, steps // 2) if config.normalize_advantage else steps
    if config.minibatches > most:
        two = "; a normalized advantage needs two in each minibatch" if config.normalize_advantage else ""
        raise UserError(
            f"minibatches is {config.minibatches}, but a rollout has only {steps} steps (num_envs x rollout_steps)"
            f"{two}. Use --minibatches {most} or less."
        )
    if config.memory is not None and config.minibatches > config.num_envs:
        raise UserError(
            f"With a memory, minibatches are whole sequences, one per environment: {config.minibatches} minibatches "
            f"are too many for num_envs {config.num_envs}. Use --minibatches {config.num_envs} or less."
        )
    if config.ratio not in RATIOS:
        raise errors.unknown("ratio", config.ratio, RATIOS)
    given = {
        "memory": config.memory is not None,
        "normalize_obs": config.normalize_obs,
        "popart_rate": config.popart_rate is not None,
        "state_dependent_noise": config.state_dependent_noise is not None,
        "backbone": config.backbone != "shared",
    }
    if config.policy is not None and any(given.values()):
        name = next(name for name, on in given.items() if on)
        raise UserError(f"A VLA has no {name}: leave out --{name.replace('_', '-')} or --policy.")
    if config.policy is None and (config.critic_warmup or config.ratio != "action"):
        raise UserError("critic_warmup and ratio are for a VLA: add --policy RUN, a run of vla, or leave them out.")
    if config.memory is not None and config.precision != "float32":
        raise UserError(
            f"A policy with a memory needs precision float32, not {config.precision}. Leave out --precision."
        )

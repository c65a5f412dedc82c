"""SAC: Soft Actor-Critic algorithms and applications, Haarnoja et al. 2018 (arXiv:1812.05905).

    critics      minimize  E[ ½ (Q_i(s, a) - y)² ],  y = r + γ ( min_j Q⁻_j(s', a') - α log π(a'|s') ),  a' ~ π(s')
    policy       minimize  E[ α log π(a|s) - min_j Q_j(s, a) ],  a ~ π(s), through a = tanh(μ(s) + σ(s) ε)
    temperature  minimize  E[ -log α (log π(a|s) + H̄) ]

where (s, a, r, s') come from replay and Q⁻ is a moving average of Q: Q⁻ ← Q⁻ + τ (Q - Q⁻).

What is kept: two critics and their minimum (§5), the squashed normal with the correction of its density (appendix C) in
a numerically stable form, the reparametrized policy gradient (eq. 9), and the automatic temperature (§5). Actions are
scaled to (-1, 1) for any bounds of the environment, so H̄ = -dim(A) means the same everywhere. With `n_steps`
above 1 the target has n rewards, and the entropy of the policy at every state between them:

    y = r_0 + Σ_k γᵏ (r_k - α log π(a'_k|s_k)) + γⁿ (...),  k = 1 .. n - 1,  a'_k ~ π(s_k) freshly sampled, as a' is

Differences: the temperature's loss is in log α (as in the authors' code); a time limit is not a termination: its target
bootstraps from the final observation; before `learning_starts` actions are uniformly random. On pixels the policy uses
the critics' convolutions, and its gradient does not reach them. With a `memory` the replay yields sequences, and the
`burn_in` steps before them warm up the memory (R2D2, Kapturowski et al. 2019, §3). With `policy_every` above 1 the
policy and the temperature are updated less often than the critics (TD3, Fujimoto et al. 2018, arXiv:1802.09477, §5.2);
the target critics are not. With `state_dependent_noise` (gSDE, Raffin et al. 2021, arXiv:2005.05719) σ(s) is that of
noise linear in the features of the policy, whose weights are held for so many steps while acting. Left out: the value
network of the first version (arXiv:1801.01290). For discrete actions see `sac_discrete`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foresight import errors
from foresight.data.replay import Replay, Transitions, shared_replay
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.envs.collect import Rollout
from foresight.errors import UserError
from foresight.nets import precision
from foresight.nets.critics import Critics, Encoded, SquashedActor, encode, policy_trunk, reach, sample, trunk
from foresight.nets.sequence import memory
from foresight.ops import policy, schedules, value
from foresight.training import optim, twins
from foresight.training.twins import twin

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "q", "alpha", "entropy")
ACTING = ("actor", "critics")  # the fields of State that are sent to actors
REPORT = 1_000  # env steps between two yields


@dataclass(frozen=True)
class Config:
    """Defaults: the paper's table 1 unless noted; see the presets for tasks."""

    steps: int = 1_000_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 1  # parallel environments
    rollout_steps: int = 1  # steps of each environment between two rounds of updates, and per message of an actor
    max_lag: int = 1  # rounds of updates by which an actor's policy may lag; 0: actors wait for every update
    learning_rate: float = 3e-4  # Adam, for critics, policy and temperature; table 1
    anneal_lr: bool = False  # anneal the learning rate linearly to 0
    batch_size: int = 256  # transitions per gradient step; table 1
    replay_size: int = 1_000_000  # transitions kept; table 1
    learning_starts: int = 10_000  # env steps with random actions, before the first update; the authors' code
    train_every: int = 1  # env steps between updates; table 1
    gradient_steps: int = 1  # gradient steps per update; table 1
    gamma: float = 0.99  # discount per step; table 1
    policy_every: int = 1  # gradient steps of the critics between two of policy and temperature; 2 in TD3
    tau: float = 0.005  # fraction by which the target critics move per gradient step; table 1
    n_steps: int = 1  # rewards, and entropies between them, before the bootstrap
    entropy_temperature: float = 1.0  # α: initial temperature, in reward per nat
    learn_temperature: bool = True  # whether α is learned; §5
    target_entropy: float | None = None  # H̄ in nats; None: -1 per action dim (table 1)
    log_std_bounds: tuple[float, float] = (-5.0, 2.0)  # of the policy's log standard deviation; (-20, 2) in their code
    state_dependent_noise: int | None = None  # steps for which gSDE (arXiv 2005.05719) holds its noise; None: not
    noise_log_std: float = -3.0  # of gSDE's weights, initial; stable-baselines3
    hidden: tuple[int, ...] = (256, 256)  # hidden layers of policy and critics; table 1
    activation: str = "relu"  # activation of the hidden layers; table 1
    images: str = "nature"  # the trunk over pixels: "nature", "nips", "impala", "vit" or "swin"
    precision: str = "float32"  # of products in updates: "float32", "bfloat16", or "auto": see `nets.precision`
    memory: str | None = None  # "gru", "lstm", "gtrxl" or "transformer", over observations; see nets.sequence.memory
    memory_size: int = 64  # width of the memory
    memory_layers: int = 1  # layers of the memory
    memory_heads: int = 4  # attention heads of the memory
    memory_window: int = 64  # past env steps in the attention window
    backbone: str = "shared"  # one "shared" memory, two "separate" ones, or one for the "actor" or "critic" only
    sequence_length: int = 16  # steps per sequence in a batch, if there is a memory
    burn_in: int = 16  # steps before a sequence that only warm up the memory (R2D2: 40 before sequences of 80)
    threads: int = 1  # torch threads on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved, including the replay."""

    config: Config
    actor: SquashedActor
    critics: Critics
    target: Critics
    log_alpha: nn.Parameter
    actor_optimizer: torch.optim.Adam
    critic_optimizer: torch.optim.Adam
    alpha_optimizer: torch.optim.Adam
    replay: Replay
    generator: torch.Generator  # samples the actions that are taken
    inner: torch.Generator  # samples the actions within updates
    sampler: torch.Generator  # samples transitions, on the CPU
    step: int = 0
    gradient_steps: int = 0  # of the critics
    noise: Tensor | None = None  # the weights of gSDE that are held, of every environment
    noise_age: int = 0  # steps for which they were held
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizers and replay. Raises UserError for spaces and settings that SAC does not support."""
    _check(config)
    require_end(spaces, config.gamma)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        dims = spaces.action.shape[0] if spaces.action.shape else 0
        shapes = memory.shapes_of(config)
        critics, target = (
            Critics(spaces.obs, dims, 1, config.hidden, config.activation, config.images, shape=shapes["critic"]).to(
                device
            )
            for _ in range(2)
        )
        own = None if config.backbone == "shared" else trunk(spaces.obs, config.images, shapes["actor"])
        actor = SquashedActor(
            critics.size,
            spaces.action,
            "SAC",
            config.hidden,
            config.activation,
            own,
            config.log_std_bounds,
            None if config.state_dependent_noise is None else config.noise_log_std,
        ).to(device)
    optim.track(target, critics)
    log_alpha = nn.Parameter(torch.tensor(config.entropy_temperature, device=device).log())
    rate = config.learning_rate
    return State(
        config,
        actor,
        critics,
        target.requires_grad_(False),
        log_alpha,
        torch.optim.Adam(actor.parameters(), lr=rate, fused=True),
        torch.optim.Adam(critics.parameters(), lr=rate, fused=True),
        torch.optim.Adam([log_alpha], lr=rate, fused=True),
        shared_replay(config.replay_size, config.num_envs, reach(config)),
        generator=torch.Generator(device).manual_seed(config.seed),
        inner=torch.Generator(device).manual_seed(config.seed + 1),
        sampler=torch.Generator().manual_seed(config.seed),
    )


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """An action for every row of `obs`: sampled if `explore` (uniformly before `learning_starts`), else tanh(μ)."""
    features, carry = policy_trunk(state)(obs, carry)
    output = state.actor(features)
    if not explore:
        action = output.mode()
    elif state.step < state.config.learning_starts:
        action = torch.empty_like(output.mode()).uniform_(-1, 1, generator=state.generator)
    elif state.config.state_dependent_noise is None:
        action = output.sample(state.generator)
    else:
        action = output.perturbed(_held_noise(state, len(features), state.config.state_dependent_noise))
    return state.actor.to_env(action), {}, carry


def _held_noise(state: State, rows: int, every: int) -> Tensor:
    """gSDE's weights for `rows` environments, drawn again after `every` steps."""
    if state.noise is None or len(state.noise) != rows or state.noise_age >= every:
        state.noise, state.noise_age = next(state.actor.head.noise(rows, 1, state.generator)), 0
    state.noise_age += 1
    return state.noise


reset_carry = memory.reset_carry


def restart(state: State) -> None:
    """Call this when the environments were reset: the successors of the newest transitions are then unknown."""
    state.replay.interrupt()


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree, carry: Tree = None) -> tuple[Rollout, Tree, Tree]:
    """`rollout_steps` steps of every environment from `obs` on; also the next observation and the memory."""
    if carry is None:
        carry = policy_trunk(state).initial(env.num_envs)
    choose, device = functools.partial(act, state, explore=True), state.generator.device
    segment = collect.segment(env, obs, choose, state.config.rollout_steps, device, state.episodes, carry)
    state.step += segment.trajectory.reward.numel()
    return dataclasses.replace(segment, first=None, carry=None, final_carry=None), segment.last, segment.carry


@twin(twins.critic_loss)
def critic_loss(
    critics: Critics,
    features: Tensor,
    action: Tensor,
    reward: Tensor,
    discount: Tensor,
    next_q: Sequence[Tensor],
    next_logp: Tensor,
    alpha: Tensor,
) -> tuple[Callable[[], object], Tensor, Tensor]:
    """The critics' loss for the soft target y: its backward pass (not yet run), the loss and the mean Q(s, a)."""
    q_target = reward + discount * (torch.minimum(*next_q).squeeze(-1) - alpha * next_logp)
    q_taken = torch.cat(list(critics(features, action)), -1).t()  # one row per critic
    loss = value.squared_loss(q_taken, q_target.expand_as(q_taken)).mean(1).sum()
    return loss.backward, loss.detach(), q_taken.detach().mean()


def objective(state: State, encoded: Encoded) -> tuple[Callable[[], object], Tensor, Tensor]:
    """`critic_loss` with next actions sampled from the policy and next values of the target critics."""
    actor, critics, target = state.actor, state.critics, state.target
    alpha = state.log_alpha.detach().exp()
    with torch.no_grad():
        next_action, next_logp = actor(encoded.next_actor).sample_logp(state.inner)
        next_q = target(encoded.next_critics, next_action)
        reward = encoded.reward
        if encoded.passed_weight is not None:
            _, passed_logp = actor(encoded.passed_actor).sample_logp(state.inner)
            reward = value.soft_reward(reward, encoded.passed_weight, -passed_logp, alpha)
    action = actor.from_env(encoded.action)
    return critic_loss(critics, encoded.critics, action, reward, encoded.discount, next_q, next_logp, alpha)


@twin(twins.soft_step)
def descend(state: State, encoded: Encoded) -> dict[str, Tensor]:
    """The gradient steps of critics and policy (where due); returns metrics."""
    actor, critics, alpha = state.actor, state.critics, state.log_alpha.detach().exp()
    backward, critic_loss, q = objective(state, encoded)
    optim.step(state.critic_optimizer, backward)
    found = {"critic_loss": critic_loss, "q": q, "alpha": alpha}
    if state.gradient_steps % state.config.policy_every == 0:
        action, logp = actor(encoded.actor).sample_logp(state.inner)
        min_q = torch.minimum(*critics.frozen(encoded.critics, action)).squeeze(-1)
        optim.step(state.actor_optimizer, (alpha * logp - min_q).mean().backward)
        found["entropy"] = -logp.detach().mean()
    return found


def update(state: State, batch: Transitions | Trajectory) -> dict[str, float]:
    """One gradient step of critics, policy and temperature (where due), and one update of the target critics."""
    config, actor, critics = state.config, state.actor, state.critics
    if config.anneal_lr:
        for optimizer in (state.actor_optimizer, state.critic_optimizer, state.alpha_optimizer):
            optimizer.param_groups[0]["lr"] = schedules.linear(state.step / config.steps, config.learning_rate)
    state.gradient_steps += 1
    with precision.autocast(config.precision, state.inner.device):
        found = descend(state, encode(actor, critics, state.target, batch, config.gamma, config.burn_in))
        if "entropy" in found and config.learn_temperature:
            target = -float(actor.dims) if config.target_entropy is None else config.target_entropy
            loss = policy.temperature_loss(state.log_alpha, found["entropy"], target)
            optim.step(state.alpha_optimizer, loss.backward)
    optim.track(state.target, critics, config.tau)
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))


def learn(state: State, segment: Rollout) -> dict[str, float]:
    """Store the rollout, then run the updates that are due; returns the metrics of the last one."""
    config = state.config
    metrics: dict[str, float] = {}
    before = state.step - segment.trajectory.reward.numel()
    collect.add_to_replay(state.replay, segment)
    if state.step > config.learning_starts and len(state.replay) > (reach(config) + 1) * config.num_envs:
        for _ in range(config.gradient_steps * schedules.passed(before, state.step, config.train_every)):
            metrics |= update(state, sample(state))
    return metrics


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Act, store, update, until `steps`. A given `state` resumes with new episodes."""
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
    precision.dtype(config.precision, "cpu")  # raises for an unknown one
    errors.at_least(0, config, "max_lag")
    errors.at_least(
        1, config, "num_envs", "rollout_steps", "batch_size", "replay_size", "train_every", "gradient_steps",
        "policy_every", "n_steps",
    )  # fmt: skip
    errors.at_least(0, config, "burn_in")
    errors.at_least(1, config, "sequence_length")
    errors.between(0, 1, config, "gamma", "tau")
    memory.check_backbone(config.memory, config.backbone)
    if not config.log_std_bounds[0] < config.log_std_bounds[1]:
        raise UserError(f"log_std_bounds must be a low and a higher bound, not {config.log_std_bounds}.")
    if config.state_dependent_noise is not None:
        errors.at_least(1, config, "state_dependent_noise")
        if tuple(config.log_std_bounds) != Config.log_std_bounds:
            raise UserError(
                "log_std_bounds has no effect with state_dependent_noise, whose size is learned for all states at "
                "once: set noise_log_std, where it begins, instead."
            )
    elif config.noise_log_std != Config.noise_log_std:
        raise UserError("noise_log_std is of state_dependent_noise: set that, too, such as to 8, or leave it out.")
    if config.entropy_temperature <= 0:
        raise UserError(f"entropy_temperature must be above 0, not {config.entropy_temperature}.")
    if config.memory is not None and config.precision != "float32":
        raise UserError(f"SAC with a memory needs precision float32, not {config.precision}. Leave out --precision.")
    if config.memory is not None and config.n_steps > 1:
        raise UserError(
            f"n_steps must be 1 with a memory, not {config.n_steps}: n-step targets of sequences are not implemented."
        )

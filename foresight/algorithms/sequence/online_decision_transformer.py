"""Online Decision Transformer, Zheng et al. 2022 (arXiv:2202.05607), algorithm 1 and §4.

    minimize  E[ -log π(a_t | R_{≤t}, s_{≤t}, a_{<t}) ]   subject to   E[ H(π(·| R_{≤t}, s_{≤t}, a_{<t})) ] ≥ β

over windows of K steps of episodes (eq. 4), by its Lagrangian: the policy minimizes -log π - α H, and α ≥ 0 minimizes α
(H - β). The transformer is pretrained on recorded episodes. Then it alternates between whole episodes, sampled with a
high return asked for, and gradient steps on a replay that drops its oldest episodes. The returns to go in a window are
those that the episode reached, not those that were asked for (hindsight return relabeling).

What is kept: the stochastic policy (a squashed normal of actions of a Box) with its entropy constraint, the replay that
begins with the best recorded episodes, relabeled returns, windows sampled uniformly over steps, the mean action in
evaluation.

Differences: exploration asks for the return that evaluation asks for, the highest of the data, and for a higher one
only with `explore_return` (the paper: twice that of evaluation); smaller networks; AdamW instead of LAMB; positions are
the time steps of the episode, as in the Decision Transformer; several episodes per iteration, one of each environment;
also discrete actions, whose target entropy is a fraction of the largest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foresight import errors
from foresight.data import episodes as data
from foresight.data import trees
from foresight.data.episodes import Window
from foresight.data.trajectory import Tree
from foresight.envs import collect
from foresight.envs.base import Env, Episodes, Spaces, require_num_envs
from foresight.nets import precision
from foresight.nets.imitation import ActionDistribution
from foresight.nets.sequence import decision
from foresight.nets.sequence.decision import DecisionTransformer
from foresight.ops import policy, schedules
from foresight.ops.seeding import seed_global
from foresight.training import offline, optim

KIND = "control"
UNIT = "updates"
METRICS = ("return", "loss", "entropy", "alpha")
ATTENDS = True  # acts by attention
REPORT = 50  # updates between two yields


@dataclass(frozen=True)
class Config:
    """Defaults: small networks for vector observations; see the comments for the paper's values on Gym (table 5)."""

    steps: int = 6_000  # gradient steps, those of the pretraining included
    seed: int = 0
    data: tuple[str, ...] = ()  # folders of episodes, see `foresight data episodes`
    num_envs: int = 8  # parallel environments, each with one episode per iteration; 1 in the paper
    pretrain_steps: int = 1_000  # gradient steps on the data alone; 5,000 in the paper
    gradient_steps: int = 100  # between two rounds of episodes; 300 in the paper
    replay_size: int = 1_000  # episodes; the paper's
    target_return: float | None = None  # asked for in evaluation; None: the highest of the data
    explore_return: float | None = None  # asked for in exploration; None: that of evaluation. The paper: twice that
    target_entropy: float | None = None  # β, in nats; None: -1 per dim (the paper's), or 0.2 of the largest if discrete
    initial_alpha: float = 0.1  # weight of the entropy; the paper's
    alpha_learning_rate: float = 1e-4  # Adam; the paper's
    context: int = 10  # steps K of a window; 20 in the paper
    batch_size: int = 64  # windows; 256 in the paper
    learning_rate: float = 1e-3  # AdamW; 1e-4 in the paper
    lr_warmup: int = 100  # gradient steps; 10,000 in the paper
    weight_decay: float = 5e-4  # the paper's
    max_grad_norm: float = 0.25  # the paper's
    dim: int = 64  # width of the transformer; 512 in the paper
    layers: int = 2  # 4 in the paper
    heads: int = 1  # 4 in the paper
    dropout: float = 0.1  # the paper's
    max_length: int = 1_000  # time steps with an embedding of their own
    precision: str = "float32"  # "float32", "bfloat16" (the transformer runs under autocast) or "auto" (the faster one)
    threads: int = 1  # of torch, on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved, including the replay."""

    config: Config
    net: DecisionTransformer
    actions: ActionDistribution
    log_alpha: nn.Parameter
    optimizer: torch.optim.AdamW
    alpha_optimizer: torch.optim.Adam
    generator: torch.Generator  # samples the actions that are taken
    sampler: torch.Generator  # samples windows, on the CPU
    step: int = 0
    env_steps: int = 0
    # The oldest episodes first.
    replay: data.Episodes | None = field(default=None, metadata={"share": False})
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network and optimizers. Raises UserError for spaces and settings that are not supported."""
    errors.at_least(0, config, "pretrain_steps")
    errors.at_least(
        1, config, "num_envs", "gradient_steps", "replay_size", "context", "batch_size", "dim", "layers", "heads",
        "max_length",
    )  # fmt: skip
    errors.share(config, "dropout")
    if config.initial_alpha <= 0:
        raise errors.UserError(f"initial_alpha must be above 0, not {config.initial_alpha:g}.")
    halved = precision.dtype(config.precision, device) is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        actions = ActionDistribution(spaces.action).to(device)
        net = DecisionTransformer(
            spaces.obs, spaces.action, config.dim, config.layers, config.heads, config.max_length, config.dropout,
            actions.outputs, halved,
        ).to(device)  # fmt: skip
    log_alpha = nn.Parameter(torch.tensor(math.log(config.initial_alpha), device=device))
    return State(
        config,
        net,
        actions,
        log_alpha,
        torch.optim.AdamW(net.parameters(), config.learning_rate, weight_decay=config.weight_decay),
        torch.optim.Adam([log_alpha], config.alpha_learning_rate),
        generator=torch.Generator(device).manual_seed(config.seed),
        sampler=torch.Generator().manual_seed(config.seed),
    )


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """The likeliest action for the return asked for; with `explore` a sampled one, for that of exploration.

    The carry is the window of K steps, the number of steps in the episode, and the rewards received `[B]`, which
    `rewarded` adds up. The extras are the network's `output` `[B, outputs]`.
    """
    config, net = state.config, state.net.eval()
    carry = decision.empty_carry(net, obs, config.context) if carry is None else carry
    target = config.target_return if not explore or config.explore_return is None else config.explore_return
    asked = net.best if target is None else obs.new_tensor(target, dtype=torch.float32)
    y, window = decision.predict(net, carry, obs, asked - carry["received"])
    output = state.actions(y)
    action = net.actions.to_env(output.sample(state.generator) if explore else output.mode())
    return action, {"output": y}, decision.advance(net, carry, window, action)


rewarded = decision.rewarded


def reset_carry(carry: Tree, cut: Tensor) -> Tree:
    """The carry of an empty window where an episode was cut."""
    return trees.reset_carry(carry, cut)


def read_files(state: State) -> None:
    """Begin the replay with the best episodes of the data, and take their statistics."""
    found = offline.read(state.config.data, state.net.obs_space, state.net.action_space)
    offline.require_rewards(found)
    state.net.fit(found)
    state.replay = found.highest(state.config.replay_size)


def target_entropy(state: State) -> float:
    """β, in nats."""
    code, given = state.net.actions, state.config.target_entropy
    if given is not None:
        return given
    return 0.2 * math.log(code.width) if code.discrete else -float(code.width)


def rollout(state: State, env: Env) -> None:
    """Add one sampled episode of every environment to the replay, which drops the oldest."""
    choose, device = functools.partial(act, state, explore=True), state.generator.device
    seed, quota = state.config.seed + state.env_steps, [1] * env.num_envs
    found = collect.record(env, seed, choose, quota, device, state.episodes, rewarded, reset_carry)
    state.env_steps += int(found.length.sum())
    assert state.replay is not None
    both = data.join([state.replay, found])
    state.replay = both.pick(torch.arange(max(0, len(both) - state.config.replay_size), len(both)))


def update(state: State, batch: Window) -> dict[str, float]:
    """One gradient step of the policy on windows `[B, K]`, and one of α."""
    config, net, actions = state.config, state.net.train(), state.actions
    for group in state.optimizer.param_groups:
        group["lr"] = config.learning_rate * schedules.warmup(state.step, config.lr_warmup)
    output = actions(net(batch.obs, net.actions.encode(batch.action), batch.to_go, batch.time, batch.mask))
    alpha, weight = state.log_alpha.detach().exp(), batch.mask / batch.mask.sum()
    loss = -(weight * actions.logp(output, batch.action)).sum()
    entropy = (weight * output.entropy()).sum()
    optim.descend(state.optimizer, (loss - alpha * entropy).backward, config.max_grad_norm)
    optim.step(state.alpha_optimizer, policy.temperature_loss(state.log_alpha, entropy, target_entropy(state)).backward)
    state.step += 1
    return {"loss": loss.item(), "entropy": entropy.item(), "alpha": alpha.item()}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Pretrain on the data, then alternate between episodes and updates, until `steps`."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    if state.replay is None:
        read_files(state)
    assert state.replay is not None
    while state.step < config.steps:
        online = state.step - config.pretrain_steps
        if online >= 0 and online % config.gradient_steps == 0:
            rollout(state, env)
        batch = state.replay.windows(config.batch_size, config.context, state.sampler)
        with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
            seed_global(config.seed + state.step, device)
            metrics = update(state, Window(*(x.to(device) for x in batch)))
        if state.step % REPORT == 0 or state.step >= config.steps:
            yield state.step, {**metrics, "env_steps": state.env_steps, **state.episodes.metrics()}, state

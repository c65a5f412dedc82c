"""Trajectory Transformer, Janner et al. 2021 (arXiv:2106.02039): a model of whole episodes, and beam search in it.

    minimize  -Σ_t ( Σ_i log p(s_tⁱ | s_t^{<i}, τ_{<t}) + w_a Σ_j log p(a_tʲ | a_t^{<j}, s_t, τ_{<t})
                     + log p(r_t | a_t, s_t, τ_{<t}) + log p(V_t | r_t, a_t, s_t, τ_{<t}) )
    where  V_t = Σ_{k > 0} γ^{k-1} r_{t+k}

Every number of an episode is a token: one of `bins` per dimension. To act, the transformer continues the last steps: it
samples actions, predicts rewards, returns to go and observations, and beam search keeps the continuations with the
highest Σ γᵗ r_t + γᴴ V_H (algorithm 1; §3.2, offline reinforcement learning). The first action of the best is taken.

What is kept: quantile or uniform bins, one vocabulary and one output layer per dimension, the weight of actions,
actions sampled from the likeliest tokens that have 0.6 of the probability together, the likeliest observations, the
means of rewards and returns, a plan at every step.

Differences: smaller networks; rotary instead of learned positions, and first embeddings that are alike for numbers near
each other; the return to go is predicted from the token of the reward and is not a token that is read (in the authors'
code it is read, and masked in attention, but what follows directly still sees it); a bin stands for the mean of its
data, not for its middle; keys and values are cached; left out: the penalty of terminations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.episodes import Episodes
from foresight.data.trajectory import Tree
from foresight.envs.base import Env, Spaces
from foresight.errors import UserError
from foresight.nets.sequence.trajectory import Prefix, TrajectoryTransformer
from foresight.ops import returns, schedules
from foresight.ops.seeding import seed_global
from foresight.planning.generation import sampling
from foresight.planning.search import beam
from foresight.training import offline, optim

KIND = "control"
UNIT = "updates"
METRICS = ("loss", "action", "reward", "value")
ATTENDS = True  # acts by attention
REPORT = 50  # updates between two yields
BINS = ("quantiles", "uniform")


@dataclass(frozen=True)
class Config:
    """Defaults: small networks for vector observations; see the comments for the paper's values."""

    steps: int = 3_000  # gradient steps; the paper: 50 epochs of 1M tokens
    seed: int = 0
    data: tuple[str, ...] = ()  # folders of episodes, see `foresight data episodes`
    gamma: float = 0.99  # discount per step; the authors' code
    bins: int = 100  # N, tokens per dimension; the paper's
    binning: str = "quantiles"  # "quantiles" (equally many data per bin) or "uniform" (equal widths); both in the paper
    window: int = 10  # steps of a training sequence; the authors' code
    context: int = 4  # steps before the current one that a plan sees; 5 in the authors' code
    horizon: int = 6  # steps H of a plan; 5 to 15 in the paper; context and horizon together at most `window`
    beam_width: int = 32  # candidates that are kept; 128 in the paper
    branches: int = 2  # continuations of each candidate; the authors' code; 1: sampled rollouts without pruning
    top_p: float = 0.6  # share of the probability of actions that is sampled from; the authors' code
    action_weight: float = 5.0  # of action tokens in the loss; the authors' code
    batch_size: int = 64  # sequences; 256 in the paper
    learning_rate: float = 6e-4  # AdamW; the paper's, annealed by a cosine
    lr_warmup: int = 100  # gradient steps
    weight_decay: float = 0.1  # of matrices; the paper's
    max_grad_norm: float = 1.0  # the paper's
    dim: int = 64  # width of the transformer; 128 in the paper
    layers: int = 2  # 4 in the paper
    heads: int = 4  # the paper's
    dropout: float = 0.1  # the paper's
    threads: int = 1  # of torch, on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved; the data are read again."""

    config: Config
    net: TrajectoryTransformer
    optimizer: torch.optim.AdamW
    generator: torch.Generator  # samples the actions of plans
    sampler: torch.Generator  # samples sequences, on the CPU
    step: int = 0
    episodes: Episodes | None = field(default=None, metadata={"save": False})
    tokens: Tensor | None = field(default=None, metadata={"save": False})  # of all rows of the data, `[R, I + 1]`


class Candidates(NamedTuple):
    """M partial plans: what was read, the features of the last token, discounted rewards, and the first action."""

    prefix: Prefix
    features: Tensor  # [M, D]
    reward: Tensor  # [M]
    first: Tensor  # [M, A], tokens

    def select(self, rows: Tensor) -> Candidates:
        """Row i of the result is row `rows[i]`."""
        return Candidates(self.prefix.select(rows), self.features[rows], self.reward[rows], self.first[rows])


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network and optimizer. Raises UserError for spaces and settings that are not supported."""
    _check(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        net = TrajectoryTransformer(
            spaces.obs, spaces.action, config.bins, config.dim, config.layers, config.heads, config.dropout
        ).to(device)
    matrices = [
        p for name, p in net.named_parameters() if p.ndim > 1 and "embed" not in name and "position" not in name
    ]
    kept = {id(p) for p in matrices}
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": [p for p in net.parameters() if id(p) not in kept], "weight_decay": 0.0},
    ]
    return State(
        config,
        net,
        torch.optim.AdamW(groups, config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay),
        generator=torch.Generator(device).manual_seed(config.seed),
        sampler=torch.Generator().manual_seed(config.seed),
    )


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """The first action of the best plan of the beam; `explore` changes nothing.

    The carry is the last steps as numbers `[B, C, I]`, 1 where they are real, `[B, C]`; `rewarded` adds the rewards.
    """
    config, net = state.config, state.net.eval()
    if carry is None:
        zeros = torch.zeros(len(obs), config.context, net.inputs, device=obs.device)
        carry = {"numbers": zeros, "mask": zeros[:, :, 0]}
    nothing = torch.zeros(len(obs), net.action_size, device=obs.device)
    now = net.row(obs, nothing, nothing[:, 0])
    best = plan(state, carry["numbers"], carry["mask"], now[:, : net.obs_size])
    action = net.to_env(best.first)
    row = torch.cat([now[:, : net.obs_size], net.bins.decode(best.first, net.obs_size), nothing[:, :1]], 1)
    numbers = torch.cat([carry["numbers"][:, 1:], row[:, None]], 1)
    mask = torch.cat([carry["mask"][:, 1:], torch.ones_like(row[:, :1])], 1)
    return action, {"return": best.reward}, {"numbers": numbers, "mask": mask}


def rewarded(carry: Tree, reward: Tensor) -> Tree:
    """The carry after the `reward` `[B]` of the last action."""
    numbers = carry["numbers"].clone()
    numbers[:, -1, -1] = reward.to(numbers.device)
    return {**carry, "numbers": numbers}


def reset_carry(carry: Tree, cut: Tensor) -> Tree:
    """The carry without steps where an episode was cut."""
    return trees.reset_carry(carry, cut)


def plan(state: State, numbers: Tensor, mask: Tensor, obs: Tensor, cached: bool = True) -> Candidates:
    """The best plan after the steps `numbers` `[B, C, I]` (`mask` `[B, C]`) and the observation `obs` `[B, O]`.

    Its `reward` is the sum of the discounted rewards of its steps. `cached` False computes all keys and values for
    every token.
    """
    config, net = state.config, state.net
    tokens = torch.cat([net.bins.encode(numbers).flatten(1), net.bins.encode(obs)], 1)
    real: Tensor | None = torch.cat([mask.repeat_interleave(net.inputs, 1), torch.ones_like(obs)], 1) > 0
    if bool(mask.all()):
        real = None
    slots = tokens.shape[1] + config.horizon * net.inputs
    prefix, features = net.start(tokens, real, slots if cached else 0)
    nothing = torch.zeros(len(obs), net.action_size, dtype=torch.int64, device=obs.device)
    root = Candidates(prefix, features, features.new_zeros(len(obs)), nothing)
    return beam.search(
        root, len(obs), lambda x, t: propose(state, x, t), lambda x: observe(state, x), Candidates.select,
        config.beam_width, config.branches, config.horizon, obs.device,
    )  # fmt: skip


def propose(state: State, plans: Candidates, t: int) -> tuple[Candidates, Tensor]:
    """Sample an action of every plan, predict reward and return to go; also the scores Σ_{k≤t} γᵏ r_k + γᵗ⁺¹ V_t."""
    config, net = state.config, state.net
    prefix, features, chosen = plans.prefix, plans.features, []
    for column in range(net.obs_size, net.obs_size + net.action_size):
        uniform = torch.rand(len(features), generator=state.generator, device=features.device)
        token, _ = sampling.choose(net.next_logits(features, column), uniform, 1.0, top_p=config.top_p)
        prefix, features = net.read(prefix, token)
        chosen.append(token)
    logits = net.next_logits(features, net.inputs - 1)
    reward = plans.reward + config.gamma**t * net.bins.expected(logits, net.inputs - 1)
    prefix, features = net.read(prefix, logits.argmax(-1))
    value = net.bins.expected(net.value_head(features), net.inputs)
    first = torch.stack(chosen, 1) if t == 0 else plans.first
    return Candidates(prefix, features, reward, first), reward + config.gamma ** (t + 1) * value


def observe(state: State, plans: Candidates) -> Candidates:
    """The likeliest next observation of every plan."""
    net, prefix, features = state.net, plans.prefix, plans.features
    for column in range(net.obs_size):
        prefix, features = net.read(prefix, net.next_logits(features, column).argmax(-1))
    return plans._replace(prefix=prefix, features=features)


def read_files(state: State) -> None:
    """Read the data as tokens; a new State takes the bins from them. Raises UserError without rewards."""
    config, net = state.config, state.net
    state.episodes = found = offline.read(config.data, net.obs_space, net.action_space)
    offline.require_rewards(found)
    cut = torch.zeros(1, len(found.reward))
    cut[0, found.first + found.length] = 1
    to_go = returns.discounted_return(found.reward[None], torch.full_like(cut, config.gamma), cut)[0]
    numbers = torch.cat([net.row(found.obs, found.action, found.reward), to_go.roll(-1)[:, None]], 1)
    if not state.step:
        net.bins.fit(numbers[found.rows].to(net.bins.edges.device), config.binning == "quantiles", net.whole)
    state.tokens = net.bins.encode(numbers.to(net.bins.edges.device)).cpu()


def sample(state: State) -> tuple[Tensor, Tensor]:
    """Tokens `[B, K, I + 1]` of K consecutive steps, and the mask `[B, K]`, 0 on padding, which is on the left."""
    config, data, tokens = state.config, state.episodes, state.tokens
    assert data is not None and tokens is not None
    begin = torch.randint(0, len(data.rows), (config.batch_size,), generator=state.sampler)
    rows, _, real = data.window_rows(begin, config.window)
    device = state.generator.device
    return tokens[rows].to(device), real.float().to(device)


def update(state: State, tokens: Tensor, mask: Tensor) -> dict[str, float]:
    """One gradient step on tokens `[B, K, I + 1]`; the last of each step is that of the return to go."""
    config, net = state.config, state.net.train()
    rate = schedules.warmup(state.step, config.lr_warmup) * schedules.cosine(state.step / config.steps, 1.0, 0.1)
    for group in state.optimizer.param_groups:
        group["lr"] = config.learning_rate * rate
    logits, value = net(tokens[..., :-1], mask)
    following = torch.cat([tokens[:, :, 1:-1], tokens[:, :, :1].roll(-1, 1)], 2)  # the token after each one
    nats = -logits.log_softmax(-1).gather(-1, following.unsqueeze(-1)).squeeze(-1)  # [B, K, I]
    weight = mask / mask.sum()
    inside = torch.cat([weight[:, :-1], torch.zeros_like(weight[:, :1])], 1)  # the last step has no next observation
    a, r = net.obs_size - 1, net.inputs - 2
    terms = {
        "obs": (weight * nats[..., :a].sum(-1) + inside * nats[..., -1]).sum(),
        "action": (weight * nats[..., a:r].sum(-1)).sum(),
        "reward": (weight * nats[..., r]).sum(),
        "value": (weight * -value.log_softmax(-1).gather(-1, tokens[..., -1:]).squeeze(-1)).sum(),
    }
    coefs = {"obs": 1.0, "action": config.action_weight, "reward": 1.0, "value": 1.0}
    loss = torch.stack([coefs[name] * term for name, term in terms.items()]).sum() / (net.inputs + 1)
    optim.descend(state.optimizer, loss.backward, config.max_grad_norm)
    state.step += 1
    return {"loss": loss.item(), **{name: term.item() for name, term in terms.items()}}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Update on windows of the data until `steps`; the environment is only for evaluation."""
    if state is None:
        state = build(config, env.spaces, device)
    if state.episodes is None:
        read_files(state)
    while state.step < config.steps:
        with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
            seed_global(config.seed + state.step, device)
            metrics = update(state, *sample(state))
        if state.step % REPORT == 0 or state.step >= config.steps:
            yield state.step, metrics, state


def _check(config: Config) -> None:
    errors.at_least(
        1, config, "window", "context", "horizon", "beam_width", "branches", "batch_size", "dim", "layers", "heads"
    )
    errors.at_least(2, config, "bins")
    errors.between(0, 1, config, "gamma", "top_p")
    if not config.top_p > 0:
        raise UserError("top_p must be more than 0: it is the share of the probability that actions are sampled from.")
    errors.share(config, "dropout")
    if config.binning not in BINS:
        raise errors.unknown("binning", config.binning, BINS)
    if config.context + config.horizon > config.window:
        raise UserError(
            f"context {config.context} and horizon {config.horizon} are more than the window of {config.window} steps "
            f"that positions are trained for. Set --window {config.context + config.horizon}"
        )

"""Decision Transformer, Chen et al. 2021 (arXiv:2106.01345): actions predicted from the return that is asked for.

    minimize  Σ_t -log π(a_t | R_{≤t}, s_{≤t}, a_{<t}),   R_t = Σ_{t' ≥ t} r_{t'}        (Box: ‖a_t - μ‖²)

over windows of K steps of recorded episodes, by a causal transformer that reads (R_1, s_1, a_1, R_2, s_2, a_2, ...) and
predicts a_t at s_t. To act, R_1 is the return asked for, and R_{t+1} = R_t - r_t. There is no value function and no
bootstrapping: it imitates the episodes that reached what is asked, whether by skill or by luck.

What is kept: the three tokens, the embedding of the time step of the episode instead of positions, layer norm on the
tokens, returns to go of the whole episode, windows sampled uniformly over steps, the loss on actions only, the clipped
gradient, AdamW with linear warmup.

Differences: smaller networks; GELU; returns are divided by the largest return to go of the data instead of a constant
per task; no loss on padding and no padding value, as padding is masked; the likeliest action is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.episodes import Episodes, Window
from foresight.data.trajectory import Tree
from foresight.envs.base import Env, Spaces
from foresight.nets import precision
from foresight.nets.sequence import decision
from foresight.nets.sequence.decision import DecisionTransformer
from foresight.ops import schedules
from foresight.ops.seeding import seed_global
from foresight.training import offline, optim

KIND = "control"
UNIT = "updates"
METRICS = ("loss",)
ATTENDS = True  # acts by attention
REPORT = 50  # updates between two yields


@dataclass(frozen=True)
class Config:
    """Defaults: small networks for vector observations; see the comments for the paper's values on Gym."""

    steps: int = 3_000  # gradient steps; 100,000 in the paper
    seed: int = 0
    data: tuple[str, ...] = ()  # folders of episodes, see `foresight data episodes`
    target_return: float | None = None  # asked for in evaluation; None: the highest of the data
    constant_return: bool = False  # the return token is always 0: an ablation
    context: int = 10  # steps K of a window; 20 in the paper
    batch_size: int = 64  # windows; the paper's
    learning_rate: float = 1e-3  # AdamW; 1e-4 in the paper
    lr_warmup: int = 100  # gradient steps; 10,000 in the paper
    weight_decay: float = 1e-4  # the paper's
    max_grad_norm: float = 0.25  # the paper's
    dim: int = 64  # width of the transformer; 128 in the paper
    layers: int = 2  # 3 in the paper
    heads: int = 1  # the paper's
    dropout: float = 0.1  # the paper's
    max_length: int = 1_000  # time steps with an embedding of their own; the official code's
    precision: str = "float32"  # "float32", "bfloat16" (the transformer runs under autocast) or "auto" (the faster one)
    threads: int = 1  # of torch, on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved; the data are read again."""

    config: Config
    net: DecisionTransformer
    optimizer: torch.optim.AdamW
    sampler: torch.Generator  # samples windows, on the CPU
    step: int = 0
    episodes: Episodes | None = field(default=None, metadata={"save": False})


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network and optimizer. Raises UserError for spaces and settings that are not supported."""
    errors.at_least(1, config, "context", "batch_size", "dim", "layers", "heads", "max_length")
    errors.share(config, "dropout")
    halved = precision.dtype(config.precision, device) is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        net = DecisionTransformer(
            spaces.obs, spaces.action, config.dim, config.layers, config.heads, config.max_length, config.dropout,
            bfloat16=halved,
        ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), config.learning_rate, weight_decay=config.weight_decay, fused=True)
    return State(config, net, optimizer, torch.Generator().manual_seed(config.seed))


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """The likeliest action after the last K steps; `explore` changes nothing.

    The carry is the window of K steps, the number of steps in the episode, and the rewards received `[B]`, which
    `rewarded` adds up. The extras are the network's `output` `[B, width]`.
    """
    config, net = state.config, state.net.eval()
    carry = decision.empty_carry(net, obs, config.context) if carry is None else carry
    asked = net.best if config.target_return is None else obs.new_tensor(config.target_return, dtype=torch.float32)
    to_go = torch.zeros_like(carry["received"]) if config.constant_return else asked - carry["received"]
    output, window = decision.predict(net, carry, obs, to_go)
    action = net.actions.decode(output)
    return action, {"output": output}, decision.advance(net, carry, window, action)


rewarded = decision.rewarded


def reset_carry(carry: Tree, cut: Tensor) -> Tree:
    """The carry of an empty window where an episode was cut."""
    return trees.reset_carry(carry, cut)


def read_files(state: State) -> None:
    """Read the data; a new State takes their statistics. Raises UserError if all rewards are 0."""
    config, net = state.config, state.net
    state.episodes = offline.read(config.data, net.obs_space, net.action_space)
    offline.require_rewards(state.episodes)
    if not state.step:
        net.fit(state.episodes)
    offline.warn_beyond(config.target_return, float(net.best))


def update(state: State, batch: Window) -> dict[str, float]:
    """One gradient step on windows `[B, K]`."""
    config, net = state.config, state.net.train()
    for group in state.optimizer.param_groups:
        group["lr"] = config.learning_rate * schedules.warmup(state.step, config.lr_warmup)
    to_go = torch.zeros_like(batch.to_go) if config.constant_return else batch.to_go
    y = net(batch.obs, net.actions.encode(batch.action), to_go, batch.time, batch.mask)
    loss = (net.actions.loss(y, batch.action) * batch.mask).sum() / batch.mask.sum()
    optim.descend(state.optimizer, loss.backward, config.max_grad_norm)
    state.step += 1
    return {"loss": loss.item()}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Update on windows of the data until `steps`; the environment is only for evaluation."""
    if state is None:
        state = build(config, env.spaces, device)
    if state.episodes is None:
        read_files(state)
    assert state.episodes is not None
    while state.step < config.steps:
        batch = state.episodes.windows(config.batch_size, config.context, state.sampler)
        with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
            seed_global(config.seed + state.step, device)
            metrics = update(state, Window(*(x.to(device) for x in batch)))
        if state.step % REPORT == 0 or state.step >= config.steps:
            yield state.step, metrics, state

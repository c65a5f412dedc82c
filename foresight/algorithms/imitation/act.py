"""ACT, Zhao et al. 2023 (arXiv:2304.13705): action chunking with transformers, and temporal ensembling.

    minimize  E Σ_t |a_t - π_θ(o, z)_t| / T + β KL(q_φ(z | o, a_{1:T}) ‖ N(0, I)),   z ~ q_φ        (algorithm 1)

over the T actions that follow each observation of the demonstrations. The latent z takes up the style of a
demonstration; to act it is 0, the mean of its prior. With temporal ensembling a chunk is predicted in every step, and
the action is the mean of all predictions made for it, the i-th of them (from the oldest, i = 0) with weight exp(-m i);
otherwise `action_steps` of a chunk are taken before the next one is predicted.

What is kept: the autoencoder, the L1 loss, β, the latent of 0 to act, the ensembling, mean and deviation of
observations and actions, AdamW. The decoder has one layer, as the official code computes it.

Differences: smaller networks; an observation, with its images, is one token, where each cell of a ResNet's feature map
is one, and the posterior reads images too; padding at the end of an episode has no part in the mean of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight import errors
from foresight.data import trees
from foresight.data.episodes import Episodes
from foresight.data.trajectory import Tree
from foresight.envs.base import Env, Spaces
from foresight.errors import UserError
from foresight.nets import imitation
from foresight.nets.imitation import MeanStd, NormalizedObs
from foresight.nets.sequence.chunker import ActionChunker
from foresight.ops import kl
from foresight.ops.seeding import seed_global
from foresight.training import offline, optim

KIND = "control"
UNIT = "updates"
METRICS = ("loss", "l1", "kl")
REPORT = 50  # updates between two yields


@dataclass(frozen=True)
class Config:
    """Defaults: small networks; see the comments for the paper's values."""

    steps: int = 5_000  # gradient steps
    seed: int = 0
    data: tuple[str, ...] = ()  # folders of episodes, see `foresight data episodes`
    chunk: int = 16  # actions T of a prediction; 100 in the paper, of 50 a second
    ensemble: float | None = 0.01  # m of the weights of temporal ensembling, the paper's; None: without it
    action_steps: int = 8  # of a chunk that are taken, without ensembling; all in the paper
    images: str = "nature"  # the network of each image: "nature", "nips", "impala", "vit" or "swin"
    dim: int = 64  # width of the transformers; 512 in the paper
    heads: int = 4  # 8 in the paper
    hidden: int = 256  # units of their MLPs; 3200 in the paper
    posterior_layers: int = 2  # 4 in the paper
    encoder_layers: int = 2  # 4 in the paper
    decoder_layers: int = 1  # 7 in the paper, of which the official code computes one
    latent: int = 16  # dims of z; 32 in the paper
    kl_coef: float = 10.0  # β; the paper's
    dropout: float = 0.1  # the paper's
    batch_size: int = 64  # chunks; 8 in the paper
    learning_rate: float = 3e-4  # AdamW; 1e-5 in the paper
    weight_decay: float = 1e-4  # the official code's
    max_grad_norm: float = 1.0  # own
    threads: int = 1  # of torch, on a CPU; 0: one per core


class Policy(nn.Module):
    """The autoencoder, and the statistics of observations and actions, which are taken from the data."""

    def __init__(self, config: Config, spaces: Spaces) -> None:
        super().__init__()
        if not (isinstance(spaces.action, gs.Box) and len(spaces.action.shape) == 1):
            raise UserError(
                f"ACT acts in a Box with one dim, not {spaces.action}. {imitation.elsewhere(spaces.obs, spaces.action)}"
            )
        self.spaces = spaces
        self.inputs, self.actions = NormalizedObs(spaces.obs, config.images), MeanStd(spaces.action.shape[0])
        layers = (config.posterior_layers, config.encoder_layers, config.decoder_layers)
        self.net = ActionChunker(
            self.inputs.size, spaces.action.shape[0], config.chunk, config.dim, config.heads, config.hidden, layers,
            config.latent, config.dropout,
        )  # fmt: skip

    def fit(self, data: Episodes) -> None:
        """Take the statistics of the data."""
        self.inputs.fit(data.obs, data.rows)
        self.actions.fit(data.action[data.rows].to(self.actions.mean.device))


@dataclass
class State:
    """Everything that is saved; the data are read again."""

    config: Config
    policy: Policy
    optimizer: torch.optim.AdamW
    sampler: torch.Generator  # samples chunks and latents, on the CPU
    step: int = 0
    episodes: Episodes | None = field(default=None, metadata={"save": False})


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network and optimizer. Raises UserError for spaces and settings that are not supported."""
    errors.at_least(
        1, config, "chunk", "batch_size", "dim", "heads", "hidden", "posterior_layers", "encoder_layers",
        "decoder_layers", "latent",
    )  # fmt: skip
    if config.ensemble is None:
        errors.between(1, config.chunk, config, "action_steps")
    errors.share(config, "dropout")
    if config.dim % config.heads or config.dim % 2:
        raise UserError(f"dim must be an even multiple of heads, {config.heads}, not {config.dim}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = Policy(config, spaces).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    return State(config, policy, optimizer, torch.Generator().manual_seed(config.seed))


@torch.no_grad()
def predict(state: State, obs: Tree) -> Tensor:
    """Chunks of actions `[B, T, A]` in the environment's units for observations `[B, ...]`, with the latent 0."""
    policy = state.policy.eval()
    inputs = policy.inputs(obs)
    return policy.actions.decode(policy.net(inputs, inputs.new_zeros(len(inputs), policy.net.latent)))


def ensembled(mean: Tensor, count: Tensor, chunk: Tensor, m: float) -> tuple[Tensor, Tensor]:
    """The weighted means `[B, T, A]` of the predictions of T actions, and their number `[B, T]`, with one `chunk` more.

    The i-th prediction of an action, from the oldest on, has the weight exp(-m i).
    Source: Zhao et al. 2023, algorithm 2.
    """
    ages = torch.arange(int(count.max()) + 1, device=count.device)
    weights = torch.exp(-m * ages)
    before = (weights * (ages < count.unsqueeze(-1))).sum(-1).unsqueeze(-1)
    new = weights[count].unsqueeze(-1)
    return (mean * before + chunk * new) / (before + new), count + 1


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """The next action; `explore` changes nothing.

    The carry is the actions ahead `[B, T, A]`, how many predictions each is the mean of `[B, T]`, and the steps of the
    episode `[B]`.
    """
    config = state.config
    if carry is None:
        like = trees.first(obs)
        count = torch.zeros(len(like), config.chunk, dtype=torch.int64, device=like.device)
        ahead = torch.zeros(*count.shape, len(state.policy.actions.mean), device=like.device)
        carry = {"ahead": ahead, "count": count, "steps": count[:, 0]}
    ahead, count, steps = carry["ahead"], carry["count"], carry["steps"]
    if config.ensemble is not None:
        ahead, count = ensembled(ahead, count, predict(state, obs), config.ensemble)
    else:
        due = steps % config.action_steps == 0
        if due.any():
            ahead = ahead.clone()
            ahead[due] = predict(state, trees.pick(obs, due))
    action = ahead[:, 0]
    ahead, count = (torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1) for x in (ahead, count))
    return action, {}, {"ahead": ahead, "count": count, "steps": steps + 1}


def reset_carry(carry: Tree, cut: Tensor) -> Tree:
    """The carry of a new episode where one was cut."""
    return trees.reset_carry(carry, cut)


def read_files(state: State) -> None:
    """Read the data; a new State takes their statistics. Raises UserError if a chunk is longer than all episodes."""
    config, spaces = state.config, state.policy.spaces
    state.episodes = offline.read(config.data, spaces.obs, spaces.action)
    offline.check_horizon(state.episodes, config.chunk, "chunk")
    if not state.step:
        state.policy.fit(state.episodes)


def update(state: State, obs: Tree, action: Tensor, real: Tensor) -> dict[str, float]:
    """One gradient step on observations `[B, ...]` and the actions `[B, T, A]` from there on; `real` `[B, T]`."""
    config, policy = state.config, state.policy.train()
    inputs, target = policy.inputs(obs), policy.actions.encode(action)
    mean, log_variance = policy.net.posterior(inputs, target, real)
    noise = torch.randn(mean.shape, generator=state.sampler).to(mean.device)
    std = (log_variance / 2).exp()
    predicted = policy.net(inputs, mean + std * noise)
    l1 = ((predicted - target).abs().mean(-1) * real).sum() / real.sum()
    divergence = kl.normal(mean, std, torch.zeros_like(mean), torch.ones_like(std)).mean()
    loss = l1 + config.kl_coef * divergence
    optim.descend(state.optimizer, loss.backward, config.max_grad_norm)
    state.step += 1
    return {"loss": loss.item(), "l1": l1.item(), "kl": divergence.item()}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Update on chunks of the data until `steps`; the environment is only for evaluation."""
    if state is None:
        state = build(config, env.spaces, device)
    if state.episodes is None:
        read_files(state)
    data = state.episodes
    assert data is not None
    while state.step < config.steps:
        start = torch.randint(0, len(data.rows), (config.batch_size,), generator=state.sampler)
        rows, real = data.around(start, range(config.chunk))
        with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
            seed_global(config.seed + state.step, device)
            batch = (trees.pick(data.obs, data.rows[start]), data.action[rows], real)
            metrics = update(state, *(trees.to(x, device) for x in batch))
        if state.step % REPORT == 0 or state.step >= config.steps:
            yield state.step, metrics, state

"""Behavior cloning, Pomerleau 1991, of all episodes or the best ones (%BC, Chen et al. 2021, arXiv:2106.01345, §5.1).

    minimize  Σ_{(s, a) ∈ D_p} -log π(a | s)        (actions of a Box: ‖a - μ(s)‖²)

where D_p holds the episodes of the highest returns that together have the share p of all steps of the data. With p = 1
rewards are not read; with p = 0.1 it is 10%-BC, the baseline of every method that is conditioned on returns.

What is kept: the selection by steps, ordered by return. Differences: an MLP on one observation instead of the last 20,
after a network of `nets.encoders` on each image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foresight import errors
from foresight.data import trees
from foresight.data.episodes import Episodes
from foresight.data.trajectory import Tree
from foresight.envs.base import Env, Spaces
from foresight.nets import encoders
from foresight.nets.imitation import ActionCode, NormalizedObs
from foresight.nets.mlp import MLP
from foresight.training import offline, optim

KIND = "control"
UNIT = "updates"
METRICS = ("loss",)
REPORT = 50  # updates between two yields
MASKED = -1e9  # logit of a masked action: finite, as a target of 0 times -inf is NaN


@dataclass(frozen=True)
class Config:
    """Defaults: small networks."""

    steps: int = 3_000  # gradient steps
    seed: int = 0
    data: tuple[str, ...] = ()  # folders of episodes, see `foresight data episodes`
    share: float = 1.0  # of the steps, of the episodes with the highest returns; the paper: 0.1, 0.25, 0.4 and 1
    images: str = "nature"  # the network of each image: "nature", "nips", "impala", "vit" or "swin"
    hidden: tuple[int, ...] = (128, 128)  # units per layer
    batch_size: int = 256  # steps per update
    learning_rate: float = 1e-3  # AdamW
    weight_decay: float = 1e-4  # the paper's, for the Decision Transformer
    max_grad_norm: float = 0.25  # the paper's
    threads: int = 1  # of torch, on a CPU; 0: one per core


class Policy(nn.Module):
    """Observations to outputs for actions."""

    def __init__(self, spaces: Spaces, hidden: tuple[int, ...], images: str) -> None:
        super().__init__()
        self.spaces, self.mask_key = spaces, encoders.mask_key(spaces.obs)
        self.inputs, self.actions = NormalizedObs(spaces.obs, images), ActionCode(spaces.action)
        self.body = MLP(self.inputs.size, hidden, "relu")
        self.head = nn.Linear(self.body.size, self.actions.width)

    def forward(self, obs: Tree) -> Tensor:
        """`[..., width]`; masked actions are `MASKED`."""
        y: Tensor = self.head(self.body(self.inputs(obs)))
        if self.mask_key is not None and self.actions.discrete:
            y = y.masked_fill(obs[self.mask_key] == 0, MASKED)
        return y


@dataclass
class State:
    """Everything that is saved; the data are read again."""

    config: Config
    policy: Policy
    optimizer: torch.optim.AdamW
    sampler: torch.Generator  # samples steps, on the CPU
    step: int = 0
    episodes: Episodes | None = field(default=None, metadata={"save": False})


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network and optimizer. Raises UserError for spaces and settings that are not supported."""
    errors.at_least(1, config, "batch_size")
    errors.between(1e-6, 1, config, "share")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = Policy(spaces, config.hidden, config.images).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    return State(config, policy, optimizer, torch.Generator().manual_seed(config.seed))


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """The likeliest action; `explore` changes nothing."""
    return state.policy.actions.decode(state.policy(obs)), {}, carry


def read_files(state: State) -> None:
    """Read the data and choose the best episodes; a new State takes their statistics."""
    found = offline.read(state.config.data, state.policy.spaces.obs, state.policy.spaces.action)
    if state.config.share < 1:
        offline.require_rewards(found)
    state.episodes = found.best(state.config.share)
    if not state.step:
        state.policy.inputs.fit(state.episodes.obs, state.episodes.rows)


def update(state: State, obs: Tree, action: Tensor) -> dict[str, float]:
    """One gradient step on observations `[B, ...]` and actions `[B, ...]`."""
    policy = state.policy
    loss = policy.actions.loss(policy(obs), action).mean()
    optim.descend(state.optimizer, loss.backward, state.config.max_grad_norm)
    state.step += 1
    return {"loss": loss.item()}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Update on the data until `steps`; the environment is only for evaluation."""
    if state is None:
        state = build(config, env.spaces, device)
    if state.episodes is None:
        read_files(state)
    data = state.episodes
    assert data is not None
    while state.step < config.steps:
        rows = data.rows[torch.randint(0, len(data.rows), (config.batch_size,), generator=state.sampler)]
        metrics = update(state, trees.to(trees.pick(data.obs, rows), device), data.action[rows].to(device))
        if state.step % REPORT == 0 or state.step >= config.steps:
            yield state.step, metrics, state

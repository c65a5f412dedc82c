"""A vision-language-action policy after RT-1, Brohan et al. 2022 (arXiv:2212.06817): imitation from images and words.

    minimize  E_{(o, w, a) ∈ D}[ -Σ_k log π(a_k | o, w) ]

over recorded steps, where o are images, w is an instruction and a_k are the K tokens of an action: a choice as it is,
each number of a Box as one of 255 bins. Image tokens and words go through a transformer, and then one token per k,
which sees the images and the words but no other action token. With head "flow" the action is sampled by flow matching
instead (Lipman et al. 2022, arXiv:2210.02747), as in π0. With head "point" the first two numbers are a point of the
first picture and one token, for which the cells of the picture are the choices: a pointer (Vinyals et al. 2015,
arXiv:1506.03134), as RoboPoint (Yuan et al. 2024, arXiv:2406.10721) asks a policy for points.

With `find` the policy also learns which instruction of a batch belongs to which picture: how its words name things.

What is kept: convolutions that the instruction modulates (FiLM), TokenLearner, bins, the mask between action tokens,
cross-entropy; the ranges of actions are the quantiles 0.01 and 0.99 of the data, as in OpenVLA (arXiv:2406.09246);
missing cameras are masked, as in Octo (arXiv:2405.12213). One policy may learn several embodiments, as RT-X
(arXiv:2310.08864): actions are padded to the longest and masked, and each has ranges of its own.

Differences: a small network trained from scratch instead of EfficientNet-B3 and the Universal Sentence Encoder; one
frame instead of six; words instead of one sentence vector; AdamW with warmup, annealed to 0. `sample` draws actions
instead of taking the likeliest: a policy without memory that always takes the likeliest one may turn in a circle.

`nets.sequence.vla` is the network. PPO fine-tunes the result by reward: `foresight train ppo --policy RUN`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.embodiments import EMBODIMENT, MISSION
from foresight.data.episodes import Episodes
from foresight.data.trajectory import Tree
from foresight.envs.base import Env, Spaces
from foresight.errors import UserError
from foresight.nets.sequence import vla
from foresight.nets.sequence.action_tokens import Tokens
from foresight.nets.sequence.vla import VLA, Shape
from foresight.ops import schedules
from foresight.ops.seeding import seed_global
from foresight.training import offline, optim

KIND = "control"
UNIT = "updates"
METRICS = ("loss", "accuracy")
ATTENDS = True  # acts by attention
REPORT = 50  # updates between two yields


@dataclass(frozen=True)
class Config:
    """Defaults: small networks for small images; see the comments for RT-1's values."""

    steps: int = 6_000  # gradient steps
    seed: int = 0
    data: tuple[str, ...] = ()  # folders of episodes, see `foresight data episodes`; each is of one embodiment
    share: float = 1.0  # of the episodes of each embodiment, the first ones: an ablation of the amount of data
    batch_size: int = 128  # steps per update
    learning_rate: float = 1e-3  # AdamW; 1e-4 in RT-1
    lr_warmup: int = 100  # gradient steps
    weight_decay: float = 1e-2  # AdamW; its default
    max_grad_norm: float = 1.0  # bound of the global gradient norm
    sample: bool = True  # draw actions in evaluation; False: the likeliest, as RT-1
    dim: int = 64  # width of the transformer; 512 in RT-1
    layers: int = 2  # of the transformer; 8 in RT-1
    heads: int = 4  # of its attention; 8 in RT-1
    channels: int = 32  # of the convolutions
    patch: int = 6  # side of the patches of the first convolution, in pixels
    images: str = "convs"  # what reads the patches; or "vit": a Vision Transformer of as many layers and heads
    film_layers: int = 2  # convolutions that the instruction modulates
    image_tokens: int = 8  # of each camera; RT-1's
    words: int = 12  # the longest instruction
    edges: int = 256  # of the bins of a continuous action; RT-1's
    label_smoothing: float = 0.0  # share of each token's probability that is spread evenly; above 0: a careless policy
    head: str = "bins"  # or "flow" for continuous actions, "point" for a point of the picture and then bins
    points: int = 1  # of head "point": with more, the words alone point first, and the transformer sees what is there
    find: bool = False  # one more token: the patch of the first picture that fits every word, found by attention
    blind: str | None = None  # "language" or "image": an ablation in which the policy does not see it
    threads: int = 1  # of torch, on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved; the data are read again."""

    config: Config
    policy: VLA
    optimizer: torch.optim.AdamW
    sampler: torch.Generator  # samples steps, on the CPU
    generator: torch.Generator  # samples actions
    step: int = 0
    episodes: Episodes | None = field(default=None, metadata={"save": False})


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network and optimizer. Raises UserError for spaces and settings that are not supported."""
    errors.at_least(
        1, config, "batch_size", "dim", "layers", "heads", "channels", "patch", "image_tokens", "words", "points"
    )
    errors.at_least(2, config, "edges")
    errors.share(config, "label_smoothing")
    if not 0 < config.share <= 1:
        raise UserError(f"share must be more than 0 and at most 1, not {config.share}.")
    if config.dim % config.heads:
        raise UserError(f"dim must be a multiple of heads, {config.heads}, not {config.dim}.")
    if config.images == "vit" and config.channels % config.heads:
        raise UserError(
            f"channels must be a multiple of heads, {config.heads}, not {config.channels}, with images vit."
        )
    if config.label_smoothing and config.head == "flow":
        raise UserError("label_smoothing is for action tokens: leave it out, or use --head bins.")
    shape = Shape(**{part.name: getattr(config, part.name) for part in fields(Shape)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = VLA(spaces.obs, spaces.action, shape, spaces.embodiments).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    sampler, generator = torch.Generator(), torch.Generator(device)
    return State(config, policy, optimizer, sampler.manual_seed(config.seed), generator.manual_seed(config.seed))


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """An action for every row of `obs`: drawn if `explore` or `config.sample`, else the likeliest."""
    output = state.policy.eval()(obs)
    return output.sample(state.generator) if explore or state.config.sample else output.mode(), {}, carry


def read_files(state: State) -> None:
    """Read the data; a new State takes their words, their scales and the ranges of their actions."""
    policy, share = state.policy, state.config.share
    found = offline.read(state.config.data, policy.obs_space, policy.action_space, policy.embodiments)
    if share < 1:
        which = found.obs[EMBODIMENT][found.first] if policy.embodiments else torch.zeros(len(found))
        each = [(which == i).nonzero().flatten() for i in which.unique()]
        found = found.pick(torch.cat([own[: max(1, round(share * len(own)))] for own in each]))
    state.episodes = found
    if not state.step:
        rows, device = state.episodes.rows, state.generator.device
        read = (MISSION, *policy.vectors, *([EMBODIMENT] if policy.embodiments else []))
        obs = {name: state.episodes.obs[name][rows].to(device) for name in read}
        policy.fit(obs, state.episodes.action[rows].to(device))


def update(state: State, obs: Tree, action: Tensor) -> dict[str, float]:
    """One gradient step on observations `[B, ...]` and actions `[B, ...]`."""
    config, policy = state.config, state.policy.train()
    rate = schedules.warmup_linear(config.learning_rate, state.step, config.steps, config.lr_warmup, anneal=True)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    output = policy(obs)
    smoothed = config.label_smoothing > 0 and isinstance(output, Tokens)
    loss = (output.smoothed_loss(action, config.label_smoothing) if smoothed else output.loss(action)).mean()
    metrics = {"loss": loss.item()}
    if config.find:
        found = policy.finder_loss(obs)
        metrics["find_loss"] = found.item()
        loss = loss + found
    if not policy.actions.continuous:
        same = (output.mode() == action).float()
        metrics["accuracy"] = same.mean().item()
    optim.descend(state.optimizer, loss.backward, config.max_grad_norm)
    state.step += 1
    return metrics


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Update on steps of the data until `steps`; the environment is only for evaluation."""
    if state is None:
        state = build(config, env.spaces, device)
    if state.episodes is None:
        read_files(state)
    data = state.episodes
    assert data is not None
    while state.step < config.steps:
        rows = data.rows[torch.randint(0, len(data.rows), (config.batch_size,), generator=state.sampler)]
        with torch.random.fork_rng(devices=[]):  # hidden words and the noise of a flow are drawn from the global one
            seed_global(config.seed + state.step, device)
            metrics = update(state, trees.to(trees.pick(data.obs, rows), device), data.action[rows].to(device))
        if state.step % REPORT == 0 or state.step >= config.steps:
            yield state.step, metrics, state


def export(state: State, out: Path) -> Path:
    """Write the policy to the folder `out`, from which PPO reads it."""
    return vla.save(state.policy, out)

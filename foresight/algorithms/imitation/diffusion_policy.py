"""Diffusion Policy, Chi et al. 2023 (arXiv:2303.04137): a chunk of actions, denoised given the last observations.

    minimize  E ‖ε - ε_θ(√ᾱ_k A + √(1 - ᾱ_k) ε, k, O)‖²,   k ~ U{1, ..., K},   ε ~ N(0, I)                  (eq. 5)

A are the T_p actions from the first of the T_o observations O on, scaled to [-1, 1] by the data. To act, A_K ~ N(0, I)
is denoised to A_0; of it T_a actions are taken, from the newest observation on, and then the next chunk is sampled.
So a policy that saw two ways around an obstacle takes one of them, where the mean of both leads into the obstacle.

What is kept: the receding horizon, the squared-cosine schedule, prediction of the noise, clipping to [-1, 1], the 1-D
U-Net with FiLM and the causal transformer, min-max scaling, chunks that repeat the first or the last step at the ends
of an episode, AdamW with warmup and cosine, the averaged weights that act.

Differences: smaller networks, and an MLP with residual blocks as in IDQL (arXiv:2304.10573) to choose; images by a
network of `nets.encoders`, without random crops, instead of a ResNet with a spatial softmax; no embedding of the
observations in the U-Net; the observations are tokens of the transformer's sequence instead of a memory that it attends
to; after clipping the noise is computed again, so that DDIM with η = 1 is DDPM.
"""

from __future__ import annotations

import copy
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
from foresight.nets.imitation import MinMax, SeenObs
from foresight.nets.sequence.denoisers import DenoisingMLP, DenoisingTransformer, UNet1D
from foresight.ops import schedules
from foresight.ops.generative import diffusion
from foresight.ops.seeding import seed_global
from foresight.training import offline, optim

KIND = "control"
UNIT = "updates"
METRICS = ("loss",)
DENOISERS = ("unet", "transformer", "mlp")
REPORT = 50  # updates between two yields


@dataclass(frozen=True)
class Config:
    """Defaults: small networks; see the comments for the paper's values (state policies)."""

    steps: int = 5_000  # gradient steps
    seed: int = 0
    data: tuple[str, ...] = ()  # folders of episodes, see `foresight data episodes`
    obs_steps: int = 2  # observations T_o that are read; the paper's
    horizon: int = 16  # actions T_p that are predicted, the first one at the oldest observation; the paper's
    action_steps: int = 8  # of them that are taken, T_a; the paper's
    denoiser: str = "unet"  # "transformer", or "mlp": of the three the most samples a second
    images: str = "nature"  # the network of each image: "nature", "nips", "impala", "vit" or "swin"
    widths: tuple[int, ...] = (64, 128)  # channels of the U-Net; (256, 512, 1024) in the paper
    kernel: int = 5  # steps that a convolution reads; the paper's
    groups: int = 8  # of channels that are normalized together; the paper's
    embedding: int = 64  # of the noise level, in the U-Net; 256 in the paper
    dim: int = 64  # width of the transformer or of the MLP; 256 in the paper
    layers: int = 3  # of the transformer, 8 in the paper; or of the MLP, 3 in IDQL
    heads: int = 4  # of the transformer; the paper's
    dropout: float = 0.01  # of the transformer and of the MLP; the paper's
    diffusion_steps: int = 100  # noise levels K; the paper's
    denoising_steps: int = 10  # levels that are visited to act; 100 in the paper's simulations, 10 on its robot
    eta: float = 0.0  # randomness of denoising: 0 is DDIM, 1 is DDPM
    batch_size: int = 128  # chunks; 256 in the paper
    learning_rate: float = 3e-4  # AdamW; 1e-4 in the paper
    lr_warmup: int = 500  # gradient steps; the paper's
    weight_decay: float = 1e-6  # the paper's, for the U-Net; 1e-3 or 0.1 for the transformer
    ema_power: float = 0.75  # the average forgets 1 / (1 + updates)^power per update; the official code's
    ema_max: float = 0.9999  # the most that it keeps per update; the official code's
    max_grad_norm: float = 1.0  # own
    threads: int = 1  # of torch, on a CPU; 0: one per core


class Policy(nn.Module):
    """The denoiser, and the scales of observations and actions, which are taken from the data."""

    def __init__(self, config: Config, spaces: Spaces) -> None:
        super().__init__()
        if not (isinstance(spaces.action, gs.Box) and len(spaces.action.shape) == 1):
            raise UserError(
                f"A diffusion policy acts in a Box with one dim, not {spaces.action}. "
                f"{imitation.elsewhere(spaces.obs, spaces.action)}"
            )
        if config.denoiser not in DENOISERS:
            raise errors.unknown("denoiser", config.denoiser, DENOISERS)
        self.spaces, width = spaces, spaces.action.shape[0]
        self.seen = SeenObs(spaces.obs, config.images)
        self.inputs, self.actions = MinMax(self.seen.width), MinMax(width)
        self.net: UNet1D | DenoisingTransformer | DenoisingMLP
        size = config.obs_steps * self.seen.size
        if config.denoiser == "unet":
            self.net = UNet1D(width, size, config.widths, config.kernel, config.groups, config.embedding)
        elif config.denoiser == "mlp":
            self.net = DenoisingMLP(config.horizon * width, size, config.dim, config.layers, config.dropout)
        else:
            steps = config.obs_steps + config.horizon
            self.net = DenoisingTransformer(
                width, self.seen.size, steps, config.dim, config.layers, config.heads, config.dropout
            )
        if config.horizon % self.net.multiple:
            raise UserError(
                f"horizon must be a multiple of {self.net.multiple} with {len(config.widths)} widths of the U-Net, "
                f"not {config.horizon}."
            )
        self.alpha_bar: Tensor
        self.register_buffer("alpha_bar", diffusion.squared_cosine(config.diffusion_steps), persistent=False)

    def fit(self, data: Episodes) -> None:
        """Take the scales of the data."""
        self.inputs.fit(self.seen.numbers(data.obs)[data.rows].to(self.alpha_bar.device))
        self.actions.fit(data.action[data.rows].to(self.alpha_bar.device))

    def condition(self, obs: Tree) -> Tensor:
        """Observations `[B, T_o, ...]` as vectors `[B, T_o, D]`."""
        y: Tensor = self.seen(obs, self.inputs.encode)
        return y


@dataclass
class State:
    """Everything that is saved; the data are read again."""

    config: Config
    policy: Policy
    average: Policy  # of the weights; it acts
    optimizer: torch.optim.AdamW
    sampler: torch.Generator  # samples chunks, levels and noise to train on, on the CPU
    generator: torch.Generator  # samples the noise to act from, on the CPU
    step: int = 0
    episodes: Episodes | None = field(default=None, metadata={"save": False})


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks and optimizer. Raises UserError for spaces and settings that are not supported."""
    errors.at_least(
        1, config, "obs_steps", "horizon", "action_steps", "groups", "dim", "layers", "heads", "diffusion_steps",
        "batch_size", "kernel",
    )  # fmt: skip
    errors.at_least(2, config, "dim", "embedding")  # the waves of the noise level: with fewer it is not seen
    errors.between(1, config.diffusion_steps, config, "denoising_steps")
    errors.between(0, 1, config, "eta")
    errors.share(config, "dropout")
    if config.obs_steps - 1 + config.action_steps > config.horizon:
        raise UserError(
            f"horizon must be at least obs_steps - 1 + action_steps = {config.obs_steps - 1 + config.action_steps}, "
            f"not {config.horizon}."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = Policy(config, spaces).to(device)
    optimizer = torch.optim.AdamW(
        policy.parameters(), config.learning_rate, betas=(0.95, 0.999), weight_decay=config.weight_decay
    )
    sampler, generator = (torch.Generator().manual_seed(config.seed + i) for i in range(2))
    return State(config, policy, copy.deepcopy(policy), optimizer, sampler, generator)


@torch.no_grad()
def sample(state: State, obs: Tree) -> Tensor:
    """Chunks of actions `[B, T_p, A]` in the environment's units for observations `[B, T_o, ...]`."""
    config, policy = state.config, state.average.eval()
    condition, alpha_bar = policy.condition(obs), policy.alpha_bar
    visited = diffusion.levels(config.diffusion_steps, config.denoising_steps)

    def normal() -> Tensor:
        shape = (len(condition), config.horizon, len(policy.actions.low))
        return torch.randn(shape, generator=state.generator).to(condition.device)

    x = normal()
    for k, following in zip(visited, [*visited[1:], 0], strict=True):
        noise = policy.net(x, torch.full((len(x),), k, device=x.device), condition)
        clean = diffusion.predict_clean(x, noise, alpha_bar[k])
        fresh = normal() if config.eta and following else torch.zeros_like(x)
        x = diffusion.step_back(x, clean, alpha_bar[k], alpha_bar[following], config.eta, fresh)
    return policy.actions.decode(x)


def taken(chunk: Tensor, obs_steps: int, action_steps: int) -> Tensor:
    """The actions `[B, T_a, A]` of a chunk `[B, T_p, A]` that are taken: from the newest observation on."""
    return chunk[:, obs_steps - 1 : obs_steps - 1 + action_steps]


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """The next action of the chunk, which is sampled every `action_steps` steps; `explore` changes nothing.

    The carry is the last observations `[B, T_o, ...]`, the rest of the chunk, and the steps of the episode `[B]`.
    """
    config, like = state.config, trees.first(obs)
    if carry is None:
        carry = {
            "obs": trees.stack([obs] * config.obs_steps),
            "plan": torch.zeros(len(like), config.action_steps, len(state.policy.actions.low), device=like.device),
            "steps": torch.zeros(len(like), dtype=torch.int64, device=like.device),
        }
    steps = carry["steps"]
    seen = trees.merge(lambda pair: remembered(pair[0], pair[1], steps), [carry["obs"], obs])
    plan, place = carry["plan"].clone(), steps % config.action_steps
    due = place == 0
    if due.any():
        plan[due] = taken(sample(state, trees.pick(seen, due)), config.obs_steps, config.action_steps)
    action = plan[torch.arange(len(plan), device=plan.device), place]
    return action, {}, {"obs": seen, "plan": plan, "steps": steps + 1}


def remembered(past: Tensor, obs: Tensor, steps: Tensor) -> Tensor:
    """The last observations `[B, T_o, ...]` and the new one `[B, ...]`, after `steps` `[B]` of the episode."""
    seen = torch.cat([past[:, 1:], obs.unsqueeze(1)], 1)
    seen[steps == 0] = obs.unsqueeze(1)[steps == 0]  # before its first step an episode has no past
    return seen


def reset_carry(carry: Tree, cut: Tensor) -> Tree:
    """The carry of a new episode where one was cut."""
    return trees.reset_carry(carry, cut)


def read_files(state: State) -> None:
    """Read the data; a new State takes their scales. Raises UserError if the horizon is longer than all episodes."""
    config, spaces = state.config, state.policy.spaces
    state.episodes = offline.read(config.data, spaces.obs, spaces.action)
    offline.check_horizon(state.episodes, config.horizon)
    if not state.step:
        state.policy.fit(state.episodes)
        state.average.fit(state.episodes)


def update(state: State, obs: Tree, action: Tensor) -> dict[str, float]:
    """One gradient step on observations `[B, T_o, ...]` and chunks `[B, T_p, A]` of their actions."""
    config, policy = state.config, state.policy.train()
    rate = schedules.warmup(state.step, config.lr_warmup) * schedules.cosine(state.step / config.steps, 1.0)
    for group in state.optimizer.param_groups:
        group["lr"] = config.learning_rate * rate
    clean, count = policy.actions.encode(action), len(action)
    level = torch.randint(1, config.diffusion_steps + 1, (count,), generator=state.sampler).to(clean.device)
    noise = torch.randn(clean.shape, generator=state.sampler).to(clean.device)
    noisy = diffusion.add_noise(clean, noise, policy.alpha_bar[level].view(-1, 1, 1))
    loss = (policy.net(noisy, level, policy.condition(obs)) - noise).square().mean()
    optim.descend(state.optimizer, loss.backward, config.max_grad_norm)
    state.step += 1
    keep = min(1 - (1 + state.step) ** -config.ema_power, config.ema_max)
    optim.track(state.average, policy, 1 - keep)
    return {"loss": loss.item()}


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
    offsets = range(1 - config.obs_steps, 1 - config.obs_steps + config.horizon)
    while state.step < config.steps:
        start = torch.randint(0, len(data.rows), (config.batch_size,), generator=state.sampler)
        rows, _ = data.around(start, offsets)
        with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
            seed_global(config.seed + state.step, device)
            seen = trees.to(trees.pick(data.obs, rows[:, : config.obs_steps]), device)
            metrics = update(state, seen, data.action[rows].to(device))
        if state.step % REPORT == 0 or state.step >= config.steps:
            yield state.step, metrics, state

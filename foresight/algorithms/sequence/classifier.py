"""Images classified by a Vision Transformer, Dosovitskiy et al. 2020 (arXiv:2010.11929), or a Swin Transformer.

    minimize  Σ_i -log p(y_i | x_i),   p = softmax(W f(x))

over images x with labels y. f is a Vision Transformer (`nets.sequence.vit`), whose features are those of its class
token, or a Swin Transformer (`nets.sequence.swin`; Liu et al. 2021, arXiv:2103.14030), whose features are the mean of
its tokens. As an agent it observes an image and its action is the class.

What is kept: the architectures, AdamW with a linear warmup and a decay to 0, a bounded gradient, dropout. Differences:
small networks, trained from scratch on small images; the only augmentation, if any, moves them by `shift` pixels; the
decay is linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foresight import errors
from foresight.envs.base import Spaces
from foresight.envs.images.make import Images
from foresight.nets.sequence.swin import Swin
from foresight.nets.sequence.vit import ViT
from foresight.ops import schedules
from foresight.ops.seeding import seed_global
from foresight.training import optim

KIND = "images"
UNIT = "updates"
METRICS = ("loss", "accuracy")
REPORT = 20  # updates between two yields
NETWORKS = ("vit", "swin")


@dataclass(frozen=True)
class Config:
    """Defaults: a small network for images of 8 × 8 pixels."""

    steps: int = 1_000  # gradient steps
    seed: int = 0
    images: str = "vit"  # the network: "vit" or "swin"
    patch: int = 2  # pixels of a side of a patch: attention costs the square of their number
    dim: int = 64  # width of the ViT, or of the first stage of the Swin Transformer; 192 in ViT-Ti, 96 in Swin-T
    layers: int = 4  # of the ViT; 12 in ViT-Ti
    heads: int = 4  # of the ViT; 3 in ViT-Ti
    positions: bool = True  # of the ViT; without, it cannot tell patches in one order from those in another
    depths: tuple[int, ...] = (2, 2)  # blocks of the stages of the Swin Transformer; 2, 2, 6, 2 in Swin-T
    stage_heads: tuple[int, ...] = (2, 4)  # heads of the stages; 3, 6, 12, 24 in Swin-T
    window: int = 4  # tokens of a side of a window; 7 in Swin-T
    dropout: float = 0.1  # of the ViT; the paper's
    shift: int = 0  # images move by up to so many pixels, in training; 1 of 8 slows learning down several times
    batch_size: int = 64  # images per update
    learning_rate: float = 1.5e-3  # AdamW; 1e-3 in the papers, with batches of 1,024 and more
    lr_warmup: int = 50  # updates over which the learning rate rises linearly; then it falls linearly to 0
    weight_decay: float = 0.05  # Swin's; ViT has 0.1 to 0.3
    max_grad_norm: float = 1.0  # the papers'
    threads: int = 1  # of torch, on a CPU; 0: one per core


class Classifier(nn.Module):
    """Images `[..., C, H, W]` to logits `[..., classes]`."""

    def __init__(self, encoder: ViT | Swin, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.size, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        y: Tensor = self.head(self.encoder(images))
        return y


@dataclass
class State:
    """Everything that is saved."""

    config: Config
    network: Classifier
    optimizer: torch.optim.AdamW
    generator: torch.Generator  # samples images and their shifts, on the CPU
    step: int = 0


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Network and optimizer. Raises UserError for an unknown network and for sizes that do not fit."""
    errors.at_least(1, config, "batch_size", "patch", "dim", "layers", "heads", "window")
    if min(config.depths, default=0) < 1:
        raise errors.UserError(f"depths must be at least 1 each, not {' '.join(map(str, config.depths))}.")
    errors.at_least(0, config, "shift")
    errors.share(config, "dropout")
    if config.images not in NETWORKS:
        raise errors.unknown("image network", config.images, NETWORKS)
    shape = spaces.obs.shape or ()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        encoder: ViT | Swin = (
            ViT(
                shape, patch=config.patch, dim=config.dim, layers=config.layers, heads=config.heads,
                dropout=config.dropout, positions=config.positions,
            )
            if config.images == "vit"
            else Swin(
                shape, patch=config.patch, dim=config.dim, depths=config.depths, heads=config.stage_heads,
                window=config.window,
            )
        )  # fmt: skip
        network = Classifier(encoder, int(spaces.action.n)).to(device)  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(network.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    return State(config, network, optimizer, torch.Generator().manual_seed(config.seed))


@torch.no_grad()
def act(state: State, obs: Tensor, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """The likeliest class of each image; `explore` changes nothing. The extras are the `logits` `[B, classes]`."""
    logits = state.network.eval()(obs)
    return logits.argmax(-1), {"logits": logits}, carry


def shifted(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Each of `images` `[B, C, H, W]` moved by up to `most` pixels in both directions; zeros fill the gap."""
    if not most:
        return images
    *_, height, width = images.shape
    padded = F.pad(images, (most, most, most, most))
    down, right = torch.randint(0, 2 * most + 1, (2, len(images), 1), generator=generator)
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    batch = torch.arange(len(images))
    return padded[batch[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def update(state: State, images: Tensor, labels: Tensor) -> dict[str, float]:
    """One gradient step on images `[B, C, H, W]` and their labels `[B]`."""
    config, network = state.config, state.network.train()
    rate = schedules.warmup_linear(config.learning_rate, state.step, config.steps, config.lr_warmup, True)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    logits = network(images)
    loss = F.cross_entropy(logits, labels)
    optim.descend(state.optimizer, loss.backward, config.max_grad_norm)
    state.step += 1
    return {"loss": loss.item(), "accuracy": (logits.argmax(-1) == labels).float().mean().item()}


def train(
    config: Config, env: Images, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Update on sampled images until `steps`."""
    if state is None:
        state = build(config, env.spaces, device)
    while state.step < config.steps:
        rows = torch.randint(0, len(env.train), (config.batch_size,), generator=state.generator)
        images = shifted(env.train[rows], config.shift, state.generator)
        with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
            seed_global(config.seed + state.step, device)
            metrics = update(state, images.to(device), env.train_label[rows].to(device))
        if state.step % REPORT == 0 or state.step >= config.steps:
            yield state.step, metrics, state

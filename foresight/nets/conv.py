"""Convolutional encoders for images: bytes `[..., C, H, W]` in, features `[..., size]` out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foresight.errors import UserError
from foresight.nets.mlp import Encoder, orthogonal
from foresight.ops.fused import images


class Nature(nn.Module):
    """The network of Mnih et al. 2015 (Nature 518): 3 convolutions, one linear layer, ReLU.

    `shape` is (C, H, W); the smallest height and width is 36. Bytes are scaled to [0, 1]. Weights and activations
    are channels-last, the fastest layout on CPU and GPU. With `size` None there is no linear layer: the features
    are the flattened output of the convolutions.
    """

    def __init__(self, shape: Sequence[int], size: int | None = 512) -> None:
        super().__init__()
        channels, _, _ = _image(shape, smallest=36)
        self.convs = _channels_last(
            orthogonal(nn.Conv2d(channels, 32, 8, 4)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, 2)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3, 1)),
            nn.ReLU(),
        )
        self.linear, self.size = _linear(_features(self.convs, shape), size)

    def forward(self, obs: Tensor) -> Tensor:
        """Features `[..., size]` of images `[..., C, H, W]`."""
        h = self.convs(_pixels(obs)).flatten(1)
        return (h if self.linear is None else torch.relu(self.linear(h))).view(*obs.shape[:-3], self.size)


class Nips(nn.Module):
    """The smaller network of Mnih et al. 2013 (arXiv:1312.5602, §4.1): 2 convolutions, one linear layer, ReLU.

    A third of Nature's arithmetic: for long runs without an accelerator. Otherwise as `Nature`.
    """

    def __init__(self, shape: Sequence[int], size: int | None = 256) -> None:
        super().__init__()
        channels, _, _ = _image(shape, smallest=20)
        self.convs = _channels_last(
            orthogonal(nn.Conv2d(channels, 16, 8, 4)), nn.ReLU(), orthogonal(nn.Conv2d(16, 32, 4, 2)), nn.ReLU()
        )
        self.linear, self.size = _linear(_features(self.convs, shape), size)

    forward = Nature.forward


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.second(torch.relu(self.first(torch.relu(x))))


class Impala(nn.Module):
    """The deep residual network of IMPALA (arXiv 1802.01561, figure 3): 15 convolutions in three blocks.

    `shape` is (C, H, W); `channels` are those of the three blocks (Procgen and PPG use the same ones). With `size`
    None there is no linear layer.
    """

    def __init__(self, shape: Sequence[int], size: int | None = 256, channels: Sequence[int] = (16, 32, 32)) -> None:
        super().__init__()
        inputs, _, _ = _image(shape, smallest=8)
        blocks: list[nn.Module] = []
        for outputs in channels:
            blocks += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
            blocks += [Residual(outputs), Residual(outputs)]
            inputs = outputs
        self.blocks = _channels_last(*blocks, nn.ReLU())
        self.linear, self.size = _linear(_features(self.blocks, shape), size)

    def forward(self, obs: Tensor) -> Tensor:
        """Features `[..., size]` of images `[..., C, H, W]`."""
        h = self.blocks(_pixels(obs)).flatten(1)
        return (h if self.linear is None else torch.relu(self.linear(h))).view(*obs.shape[:-3], self.size)


class Planes(nn.Module):
    """`encoder` of `[..., C, H, W]` for images whose dims are in another `order` (see `order`)."""

    def __init__(self, encoder: Encoder, order: tuple[int, ...]) -> None:
        super().__init__()
        self.encoder, self.order = encoder, order
        self.size = encoder.size

    def forward(self, obs: Tensor) -> Tensor:
        """Features `[..., size]`."""
        lead = obs.dim() - len(self.order)
        ordered = obs.permute(*range(lead), *(lead + i for i in self.order))
        return self.encoder(ordered.unsqueeze(lead) if ordered.dim() == lead + 2 else ordered.flatten(lead, -3))


COLORS = (1, 3, 4)  # channels that a pixel may have
SYMBOLS, PICTURE = 25, 36  # the longest side of a grid of symbols; the shortest side of an image without color channels


def order(shape: Sequence[int]) -> tuple[int, ...] | None:
    """The permutation of dims that makes an image [..., C, H, W]; None where bytes of this `shape` are not an image.

    Images are `[C, H, W]`; Gymnasium's `[H, W, C]`, recognized by its 1, 3 or 4 channels at the end; gray `[H, W]`; and
    K of any of these, `[K, ...]`, from a frame stack. A grid of symbols (MiniGrid's `[H, W, 3]` with no side longer
    than 25) is not an image, nor is a stack of them.
    """
    if len(shape) == 2:
        return (0, 1) if min(shape) >= PICTURE else None
    if len(shape) not in (3, 4):
        return None
    height, width, last = shape[-3:]
    stack = tuple(range(len(shape) - 3))
    if last in COLORS and min(height, width) > max(COLORS):
        symbols = last == 3 and max(height, width) <= SYMBOLS
        return None if symbols else (*stack, *(len(stack) + i for i in (2, 0, 1)))
    return tuple(range(len(shape))) if not stack or min(width, last) >= PICTURE else None


def _channels_last(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _image(shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise UserError(
            f"This encoder needs images (channels, height, width) of at least {smallest}x{smallest} pixels, "
            f"but the observation is {tuple(shape)}. Choose another encoder with --images, or resize the observation."
        )
    return shape[0], shape[1], shape[2]


def _pixels(obs: Tensor) -> Tensor:
    """Images `[N, C, H, W]`, channels-last, in [0, 1] if they were bytes."""
    flat = obs.reshape(-1, *obs.shape[-3:])
    if obs.dtype != torch.uint8:
        return flat.contiguous(memory_format=torch.channels_last)
    kind = torch.get_autocast_dtype(obs.device.type) if torch.is_autocast_enabled(obs.device.type) else torch.float32
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # torch's
    traced = tracing or torch.compiler.is_compiling()  # numba code cannot be traced
    ready = flat.is_contiguous(memory_format=torch.channels_last)  # as images `[H, W, C]` are
    if obs.device.type == "cpu" and kind == torch.float32 and not traced and not ready:
        return images.pixels(flat)
    return flat.to(kind, memory_format=torch.channels_last).div_(255)


def _linear(features: int, size: int | None) -> tuple[nn.Linear | None, int]:
    """The last layer, if any, and the number of features."""
    return (None, features) if size is None else (orthogonal(nn.Linear(features, size)), size)


def _features(module: nn.Module, shape: Sequence[int]) -> int:
    with torch.no_grad():
        return module(torch.zeros(1, *shape)).numel()

"""Vision Transformer: an image as a sequence of patches, read by a transformer without a causal mask.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), equations 1 to 4: a linear map of each patch, a class token before
them, learned positions, blocks with layer norm first, and the normalized class token as the features.

Patches of P × P pixels of an H × W image are N = ⌈H / P⌉ · ⌈W / P⌉ tokens, and attention costs N²: P sets the cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foresight.errors import UserError
from foresight.nets.sequence.transformer import NO_CACHE, Block, TransformerConfig

TOKENS_PER_SIDE = 8  # at most, where no patch size is given


def to_patches(images: Tensor, patch: int) -> Tensor:
    """Images `[N, C, H, W]` as rows of squares, `[N, ⌈H / P⌉ · ⌈W / P⌉, C · P · P]`; zeros fill the last squares."""
    count, channels, height, width = images.shape
    images = F.pad(images, (0, -width % patch, 0, -height % patch))
    rows, columns = images.shape[2] // patch, images.shape[3] // patch
    squares = images.reshape(count, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(count, rows * columns, -1)


def from_patches(squares: Tensor, shape: Sequence[int], patch: int) -> Tensor:
    """The images `[N, C, H, W]` of `to_patches`; `shape` is (C, H, W)."""
    channels, height, width = shape
    rows, columns = math.ceil(height / patch), math.ceil(width / patch)
    images = squares.reshape(-1, rows, columns, channels, patch, patch).permute(0, 3, 1, 4, 2, 5)
    return images.reshape(-1, channels, rows * patch, columns * patch)[..., :height, :width]


def pixels(obs: Tensor) -> Tensor:
    """Images `[..., C, H, W]` as floats `[N, C, H, W]`; bytes are scaled to [0, 1]."""
    flat = obs.reshape(-1, *obs.shape[-3:])
    return flat.float() / 255 if obs.dtype == torch.uint8 else flat


class ViT(nn.Module):
    """Images `[..., C, H, W]` to features `[..., size]`, the class token's.

    `shape` is (C, H, W). `patch` is the side P of a patch in pixels; None: the smallest of which no more than 8 fill a
    side. With `size` None the features are `dim` wide, otherwise a linear layer and ReLU follow. Without `positions`
    the features do not depend on the order of the patches. Raises UserError for sizes that do not fit.
    """

    def __init__(
        self,
        shape: Sequence[int],
        size: int | None = None,
        patch: int | None = None,
        dim: int = 64,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        positions: bool = True,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(shape)
        patch = math.ceil(max(height, width) / TOKENS_PER_SIDE) if patch is None else patch
        if not 1 <= patch <= max(height, width):
            raise UserError(f"patch must be from 1 to {max(height, width)} pixels, the side of the image, not {patch}.")
        if dim % heads:
            raise UserError(f"dim must be a multiple of heads, {heads}, not {dim}.")
        config = TransformerConfig(
            layers=layers, dim=dim, heads=heads, norm="layer", norm_eps=1e-6, activation="gelu", bias=True,
            dropout=dropout,
        )  # fmt: skip
        self.shape, self.patch = (channels, height, width), patch
        self.rows, self.columns = math.ceil(height / patch), math.ceil(width / patch)
        self.embed = nn.Linear(channels * patch * patch, dim)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.zeros(1, 1 + self.rows * self.columns, dim)) if positions else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.linear = None if size is None else nn.Linear(dim, size)
        self.size = dim if size is None else size
        initialize(self)

    def forward(self, obs: Tensor, every: bool = False) -> Tensor:
        """Features `[..., size]` of images `[..., C, H, W]`; token 0 of its attention is the class token.

        With `every` those of all tokens, the class token first: `[..., 1 + N, dim]`.
        """
        x = self.embed(to_patches(pixels(obs), self.patch))
        x = torch.cat([self.class_token.expand(len(x), -1, -1).to(x.dtype), x], 1)
        x = self.dropout(x if self.position is None else x + self.position)
        everything = torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        for block in self.blocks:
            x, _, _ = block(x, None, everything, NO_CACHE, 0)
        if every:
            return self.norm(x).view(*obs.shape[:-3], *x.shape[1:])
        features = self.norm(x[:, 0])
        features = features if self.linear is None else torch.relu(self.linear(features))
        return features.view(*obs.shape[:-3], self.size)


def image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """(C, H, W). Raises UserError for another number of dims."""
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(
            f"This encoder needs images (channels, height, width), but the observation is {tuple(shape)}. "
            "Choose another encoder with --images."
        )
    return shape[0], shape[1], shape[2]


def initialize(module: nn.Module) -> None:
    """Weights of all linear layers and tables: normal, cut at two deviations; biases 0.

    The deviation is 1 / √(their last dim): 0.02, which is that for a width of 2,500, leaves networks as narrow as these
    without a signal for hundreds of updates.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            std = 0.02 if name.endswith("attention.bias") else parameter.shape[-1] ** -0.5  # Swin's biases by position
            nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)

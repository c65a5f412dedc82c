"""Swin Transformer: attention within windows of patches, which every second block shifts by half a window.

Source: Liu et al. 2021 (arXiv:2103.14030), equations 3 and 4: relative position biases, shifted windows, and patch
merging, which halves both sides and doubles the width between stages. The cost grows linearly with the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foresight.errors import UserError
from foresight.nets.sequence.attention import is_recording, softmax
from foresight.nets.sequence.transformer import MLP, TransformerConfig
from foresight.nets.sequence.vit import image_shape, initialize, pixels, to_patches

EPS = 1e-5
TOKENS_PER_SIDE = 16  # at most in the first stage, where no patch size is given


def windows(height: int, width: int, side: int, shift: int) -> tuple[Tensor, Tensor]:
    """The tokens `[W, T]` of each window of `side` × `side`, and `[W, T, T]` bool: which may see which.

    Both sides are multiples of `side`. The grid is shifted up and to the left, and what leaves it comes back at the
    other end: a window there holds tokens that are no neighbors, which must not see each other.
    """
    grid = torch.arange(height * width).view(height, width).roll((-shift, -shift), (0, 1))
    tokens = grid.view(height // side, side, width // side, side).transpose(1, 2).reshape(-1, side * side)
    row, column = tokens // width, tokens % width
    near = [(x[:, :, None] - x[:, None, :]).abs() < side for x in (row, column)]
    return tokens, near[0] & near[1]


def relative_positions(side: int) -> Tensor:
    """`[T, T]` int64: the row of the table of biases for a query and a key, (2 side - 1)² different ones."""
    place = torch.arange(side * side)
    rows, columns = (x[:, None] - x[None] + side - 1 for x in (place // side, place % side))
    return rows * (2 * side - 1) + columns


class WindowAttention(nn.Module):
    """Attention within each window, with a learned bias for every difference of positions."""

    relative: Tensor

    def __init__(self, dim: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.zeros((2 * side - 1) ** 2, heads))
        self.register_buffer("relative", relative_positions(side), persistent=False)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        """x `[B, W, T, D]`, allowed `[W, T, T]` -> the same shape; its weights are `[B, W, heads, T, T]`."""
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
        query, key, value = parts.unbind(0)
        scores = self.bias[self.relative].permute(2, 0, 1).masked_fill(~allowed.unsqueeze(1), -math.inf)
        if is_recording():
            products = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
            mixed = softmax(products.float() + scores).to(value.dtype) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, scores.to(query.dtype))
        return self.out(mixed.transpose(2, 3).flatten(-2))


class SwinBlock(nn.Module):
    """One block on a grid of `height` × `width` tokens: attention in windows, then an MLP, added to the stream."""

    tokens: Tensor
    places: Tensor
    allowed: Tensor

    def __init__(self, dim: int, heads: int, height: int, width: int, side: int, shift: int) -> None:
        super().__init__()
        self.padding = (0, -width % side, 0, -height % side)
        self.height, self.width = height, width
        tokens, allowed = windows(height + self.padding[3], width + self.padding[1], side, shift)
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("places", tokens.flatten().argsort(), persistent=False)
        self.register_buffer("allowed", allowed, persistent=False)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim, eps=EPS), nn.LayerNorm(dim, eps=EPS)
        self.attention = WindowAttention(dim, heads, side)
        self.mlp = MLP(TransformerConfig(dim=dim, heads=heads, activation="gelu", bias=True))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, height, width, D]` -> the same."""
        grid = F.pad(self.attention_norm(x), (0, 0, *self.padding))
        mixed = self.attention(grid.flatten(1, 2)[:, self.tokens], self.allowed)
        mixed = mixed.flatten(1, 2)[:, self.places].view(grid.shape)
        x = x + mixed[:, : self.height, : self.width]
        return x + self.mlp(self.mlp_norm(x))


class Merging(nn.Module):
    """Squares of 2 × 2 tokens `[B, H, W, D]` become one, `[B, ⌈H / 2⌉, ⌈W / 2⌉, 2 D]`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim, eps=EPS), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Features in the order (row, column) = (0, 0), (1, 0), (0, 1), (1, 1), as in the official weights."""
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        four = [x[:, row::2, column::2] for column in range(2) for row in range(2)]
        merged: Tensor = self.reduction(self.norm(torch.cat(four, -1)))
        return merged


class Swin(nn.Module):
    """Images `[..., C, H, W]` to features `[..., size]`: the mean of the last stage's tokens.

    `shape` is (C, H, W). The width is `dim` in the first stage and doubles with every other; `depths` and `heads` hold
    the blocks and heads of each stage; `window` is the side of a window in tokens, at most that of the grid. `patch` as
    in `ViT`, but up to 16 tokens fill a side; `size` as there. Swin-T: patch 4, dim 96, depths (2, 2, 6, 2), heads
    (3, 6, 12, 24), window 7. Raises UserError for sizes that do not fit.
    """

    def __init__(
        self,
        shape: Sequence[int],
        size: int | None = None,
        patch: int | None = None,
        dim: int = 32,
        depths: Sequence[int] = (2, 2),
        heads: Sequence[int] = (2, 4),
        window: int = 4,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(shape)
        patch = math.ceil(max(height, width) / TOKENS_PER_SIDE) if patch is None else patch
        if not 1 <= patch <= max(height, width):
            raise UserError(f"patch must be from 1 to {max(height, width)} pixels, the side of the image, not {patch}.")
        if len(depths) != len(heads):
            raise UserError(f"depths and heads need one number per stage, not {len(depths)} and {len(heads)}.")
        if any(count < 1 or dim * 2**stage % count for stage, count in enumerate(heads)):
            raise UserError(f"The width of a stage, {dim} · 2^stage, must be a multiple of its heads, {tuple(heads)}.")
        self.patch = patch
        self.embed, self.embed_norm = nn.Linear(channels * patch * patch, dim), nn.LayerNorm(dim, eps=EPS)
        height, width = math.ceil(height / patch), math.ceil(width / patch)
        self.grid = (height, width)
        layers: list[nn.Module] = []
        for stage, (depth, count) in enumerate(zip(depths, heads, strict=True)):
            if stage:
                layers.append(Merging(dim))
                height, width, dim = math.ceil(height / 2), math.ceil(width / 2), 2 * dim
            side, half = (window, window // 2) if min(height, width) > window else (min(height, width), 0)
            layers += [SwinBlock(dim, count, height, width, side, half * (i % 2)) for i in range(depth)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(dim, eps=EPS)
        self.linear = None if size is None else nn.Linear(dim, size)
        self.size = dim if size is None else size
        initialize(self)

    def forward(self, obs: Tensor) -> Tensor:
        """Features `[..., size]` of images `[..., C, H, W]`."""
        x = self.embed_norm(self.embed(to_patches(pixels(obs), self.patch))).unflatten(1, self.grid)
        for layer in self.layers:
            x = layer(x)
        features = self.norm(x).mean((1, 2))
        features = features if self.linear is None else torch.relu(self.linear(features))
        return features.view(*obs.shape[:-3], self.size)

"""Grounding: where in a picture is what is asked for, as attention over its patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pointer(nn.Module):
    """A query `[..., dim]` and `count` cells `[..., cells, channels]` to a logit of each cell, and what is seen there.

    What is seen, and where, is the mean over the cells, weighted by their probabilities, as `[..., dim]`. Each of the
    `points` has a map of its queries.
    """

    def __init__(self, count: int, channels: int, dim: int, points: int = 1) -> None:
        super().__init__()
        self.queries = nn.ModuleList(nn.Linear(dim, dim) for _ in range(points))
        self.key, self.read = nn.Linear(channels, dim), nn.Linear(channels, dim)
        self.position = nn.Parameter(0.02 * torch.randn(count, dim))

    def forward(self, query: Tensor, cells: Tensor, point: int = -1) -> tuple[Tensor, Tensor]:
        """Logits `[..., cells]` and what is seen `[..., dim]`."""
        keys, asked = self.key(cells) + self.position, self.queries[point](query)
        logits = (keys @ asked.unsqueeze(-1)).squeeze(-1) * (4 / keys.shape[-1] ** 0.5)
        return logits, (logits.softmax(-1).unsqueeze(-2) @ (self.read(cells) + self.position)).squeeze(-2)


class Finder(nn.Module):
    """Images `[N, C, H, W]`, words `[N, W, dim]` and their mask to a logit of each patch, and where it is `[N, dim]`.

        logit of patch c  =  n_c + Σ_w log σ(¼ q_w · k_c + b)

    Each word alone tells which patches it fits, and a patch must fit all words, the `and` of neural module networks
    (Andreas et al. 2016, arXiv:1511.02799): a color and a kind that were never seen together are found together. For
    this a key k_c is a linear map of the pixels of the patch; with more layers it learns the pairs by heart. Keys and
    queries are normalized. n_c, learned, decides between patches that fit. The last logit is for what is not in the
    picture. Where it is is a vector of the patch, not of its pixels.
    """

    def __init__(self, shape: tuple[int, int, int], patch: int, dim: int) -> None:
        super().__init__()
        depth, height, width = shape
        count = (height // patch) * (width // patch)
        self.key, self.query = nn.Conv2d(depth, dim, patch, patch), nn.Linear(dim, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.fits = nn.Parameter(torch.tensor(2.0))  # b: at first most words fit most patches
        self.near = nn.Parameter(F.pad(torch.zeros(count), (0, 1), value=-4.0))
        self.position = nn.Parameter(0.02 * torch.randn(count + 1, dim))

    def forward(self, image: Tensor, words: Tensor, spoken: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[N, cells + 1]` and where it is. What fits has no gradient here, see `loss`."""
        with torch.no_grad():
            fit = self._fit(self._keys(image), words, spoken)
        logits = fit + self.near
        return logits, logits.softmax(-1) @ self.position

    def loss(self, image: Tensor, words: Tensor, spoken: Tensor, which: Tensor) -> Tensor:
        """Which of M instructions, words `[M, W, dim]`, is that of each image? The cross-entropy with `which` `[N]`.

        Actions do not teach what words name: the mean place of the floor helps them at first, and then all words find
        the floor and no other patch has a gradient. The floor is in all pictures, so it does not tell which instruction
        is whose. Source: contrastive phrase grounding, Gupta et al. 2020 (arXiv:2006.09920), with all patches that fit.
        """
        scores = (self._fit(self._keys(image).unsqueeze(1), words, spoken) + self.near).logsumexp(-1)
        return F.cross_entropy(scores + which.bincount(minlength=len(words)).log(), which)

    def _keys(self, image: Tensor) -> Tensor:
        keys: Tensor = self.norms[0](self.key(image).flatten(2).transpose(1, 2))
        return keys

    def _fit(self, keys: Tensor, words: Tensor, spoken: Tensor) -> Tensor:
        """Logits but for n_c, of keys `[..., cells, dim]` for words `[..., W, dim]`."""
        fit = F.logsigmoid(self.norms[1](self.query(words)) @ keys.transpose(-1, -2) / 4 + self.fits)
        return F.pad((fit * spoken.unsqueeze(-1)).sum(-2), (0, 1))

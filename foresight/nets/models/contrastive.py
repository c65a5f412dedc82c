"""Action-conditioned contrastive predictive coding: the loss that TWISTER adds to a transformer world model.

    q_k = f_k(h_{t-1}, a_t, ..., a_{t+k-1}),  y_k = g_k(z of the augmented observation t + k)
    loss = Σ_k 0.75^k  -log [ exp(q_k · y_k) / Σ_negatives exp(q_k · y) ] / Σ_k 0.75^k,  k = 0 .. steps - 1

Source: TWISTER (ICLR 2025) and its code. Negatives are all observations of the batch at the same k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresight.nets.models.world_model import mlp


class Contrastive(nn.Module):
    """Heads with one hidden layer of `units` for each of `steps` distances: `size` features in, `stoch` latents."""

    DECAY = 0.75

    def __init__(self, size: int, stoch: int, action_width: int, steps: int = 10, units: int = 512) -> None:
        super().__init__()
        self.queries = nn.ModuleList(mlp(size + k * action_width, units, 1, units) for k in range(steps))
        self.keys = nn.ModuleList(mlp(stoch, units, 1, units) for _ in range(steps))

    def forward(self, deter: Tensor, action: Tensor, stoch: Tensor, cut: Tensor, known: Tensor) -> Tensor:
        """The loss `[B, T]` of h before each row `[B, T, D]`, its action `[B, T, A]` and augmented latents `[B, T, Z]`.

        0 where h is not `known` `[B, T]`; a distance counts only if its observation is of the same episode.
        """
        steps = min(len(self.queries), deter.shape[1])
        total, reached = torch.zeros_like(known), known
        for k in range(steps):
            n = deter.shape[1] - k
            reached = reached[:, :n] * (1 - cut[:, k - 1 : k - 1 + n]) if k else reached
            query = self.queries[k](torch.cat([deter[:, :n], *(action[:, j : j + n] for j in range(k))], -1))
            scores = (query.flatten(0, 1) @ self.keys[k](stoch[:, k:]).flatten(0, 1).T).float()
            loss = (scores.logsumexp(1) - scores.diagonal()).view_as(reached) * reached
            total = total + self.DECAY**k * functional.pad(loss, (0, k))
        return total / sum(self.DECAY**k for k in range(steps))

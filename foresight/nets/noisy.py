"""Noisy linear layers: exploration by learned noise in the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class NoisyLinear(nn.Module):
    """y = (μ_w + σ_w ⊙ ε_w) x + μ_b + σ_b ⊙ ε_b with factorized noise (Fortunato et al. 2018, arXiv:1706.10295, §3).

    ε_w = f(ε_out) f(ε_in)ᵀ, ε_b = f(ε_out), f(x) = sign(x) √|x|. The noise is an argument, drawn by `noise`; without
    it the layer is linear with the mean weights. `sigma` is σ₀, the initial spread: 0.5 in the paper.
    """

    def __init__(self, inputs: int, outputs: int, sigma: float = 0.5) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_spread = nn.Parameter(torch.full((outputs, inputs), sigma * bound))
        self.bias_spread = nn.Parameter(torch.full((outputs,), sigma * bound))

    def noise(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """A sample of f(ε_in) `[inputs]` and f(ε_out) `[outputs]`."""
        outputs, inputs = self.weight.shape
        drawn = torch.empty(inputs + outputs, device=self.weight.device).normal_(generator=generator)
        scaled = drawn.sign() * drawn.abs().sqrt()
        return scaled[:inputs], scaled[inputs:]

    def forward(self, x: Tensor, noise: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        if noise is None:
            return nn.functional.linear(x, self.weight, self.bias)
        inner, outer = noise
        weight = self.weight + self.weight_spread * torch.outer(outer, inner)
        return nn.functional.linear(x, weight, self.bias + self.bias_spread * outer)

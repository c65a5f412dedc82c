"""Denoising diffusion: the noise schedule, the forward process, and one step back, of DDPM and DDIM alike.

Levels of noise k are 0 (none) to K. Sources: Ho et al. 2020 (arXiv:2006.11239), Nichol & Dhariwal 2021
(arXiv:2102.09672), Song et al. 2020 (arXiv:2010.02502).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_BETA = 0.999  # Nichol & Dhariwal 2021, §3.2: no singularity at the last level


def squared_cosine(steps: int) -> Tensor:
    """ᾱ_0 = 1, ᾱ_1, ..., ᾱ_K `[K + 1]`, the share of variance that is signal, for K = `steps`.

    β_k = min(1 - f(k) / f(k - 1), 0.999) with f(k) = cos²((k / K + 0.008) / 1.008 · π / 2), and
    ᾱ_k = Π_{i≤k} (1 - β_i). Source: Nichol & Dhariwal 2021, eq. 17.
    """
    angle = (torch.arange(steps + 1, dtype=torch.float64) / steps + 0.008) / 1.008 * math.pi / 2
    signal = angle.cos().square()
    beta = (1 - signal[1:] / signal[:-1]).clamp(max=MAX_BETA)
    return torch.cat([torch.ones(1, dtype=torch.float64), (1 - beta).cumprod(0)]).float()


def levels(steps: int, used: int) -> list[int]:
    """The `used` of K = `steps` levels that are visited, from the noisiest on: evenly spaced, ending with 1.

    After each comes the next one, and after the last comes 0. A single one is K, at which a sample is pure noise.
    Source: Song et al. 2020, appendix D.2 (linear).
    """
    if used == 1:
        return [steps]
    return [1 + (used - i) * steps // used for i in range(1, used + 1)]


def add_noise(clean: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
    """x_k = √ᾱ_k x_0 + √(1 - ᾱ_k) ε, of shapes that broadcast. Source: Ho et al. 2020, eq. 4."""
    return alpha_bar.sqrt() * clean + (1 - alpha_bar).sqrt() * noise


def predict_clean(noisy: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
    """x_0 = (x_k - √(1 - ᾱ_k) ε) / √ᾱ_k, clipped to [-1, 1], the range of normalized data: `add_noise` inverted."""
    return ((noisy - (1 - alpha_bar).sqrt() * noise) / alpha_bar.sqrt()).clamp(-1, 1)


def step_back(noisy: Tensor, clean: Tensor, alpha_bar: Tensor, before: Tensor, eta: float, noise: Tensor) -> Tensor:
    """A sample at the level with ᾱ = `before`, given x_k at `alpha_bar` and x_0 = `clean`.

    √ᾱ' x_0 + √(1 - ᾱ' - σ²) ε + σ z, with σ = η √((1 - ᾱ') / (1 - ᾱ)) √(1 - ᾱ / ᾱ'), ε the noise that leads from x_0 to
    x_k, and z = `noise`. η = 0 is DDIM; η = 1 is DDPM: the Gaussian q(x_{k-1} | x_k, x_0) (Ho et al. 2020, eq. 7).
    Source: Song et al. 2020, eq. 12 and 16.
    """
    sigma = eta * ((1 - before) / (1 - alpha_bar)).sqrt() * (1 - alpha_bar / before).sqrt()
    direction = (noisy - alpha_bar.sqrt() * clean) / (1 - alpha_bar).sqrt()
    return before.sqrt() * clean + (1 - before - sigma.square()).clamp(min=0).sqrt() * direction + sigma * noise

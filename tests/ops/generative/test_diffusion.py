"""Diffusion steps against Bayes' rule for Gaussians, written out, and against values that can be checked."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from foresight.ops.generative import diffusion
from tests.sabotage import returns, sabotaged_by, scaled


@sabotaged_by(
    "foresight.ops.generative.diffusion.squared_cosine", returns(lambda x: x.sqrt()), returns(lambda x: x.roll(1))
)
def test_the_schedule_is_the_published_one() -> None:
    found = diffusion.squared_cosine(100)
    f = [math.cos((k / 100 + 0.008) / 1.008 * math.pi / 2) ** 2 for k in range(101)]
    assert len(found) == 101 and found[0] == 1
    for k in (1, 10, 50, 99):  # below the cap on β, ᾱ_k = f(k) / f(0)
        assert found[k].item() == pytest.approx(f[k] / f[0], rel=1e-4)
    assert 1 - found[100] / found[99] == pytest.approx(0.999, abs=1e-6)
    # diffusers 0.42, DDPMScheduler(100, beta_schedule="squaredcos_cap_v2").alphas_cumprod at 0, 49 and 98
    assert found[[1, 50, 99]].tolist() == pytest.approx([0.99936873, 0.49384353, 0.00024285720], rel=1e-5)


def test_levels_end_with_the_first() -> None:
    assert diffusion.levels(100, 10) == [91, 81, 71, 61, 51, 41, 31, 21, 11, 1]
    assert diffusion.levels(4, 4) == [4, 3, 2, 1] and diffusion.levels(5, 2) == [3, 1]


@pytest.mark.parametrize("steps", [1, 3, 100])
def test_the_first_level_is_almost_pure_noise(steps: int) -> None:
    """Denoising begins with pure noise, so also where the levels are no multiple of those that are visited."""
    for used in range(1, steps + 1):
        found = diffusion.levels(steps, used)
        assert len(found) == used and found[0] > steps - steps / used and (found[-1] == 1 or used == 1)
        gaps = {a - b for a, b in itertools.pairwise(found)}
        assert not gaps or (max(gaps) - min(gaps) <= 1 and min(gaps) >= 1)
    assert diffusion.levels(steps, 1) == [steps]


@sabotaged_by("foresight.ops.generative.diffusion.add_noise", scaled(1.1))
@sabotaged_by("foresight.ops.generative.diffusion.predict_clean", returns(lambda x: x * 1.01))
def test_noise_is_removed_exactly_and_clipped() -> None:
    alpha_bar, clean, noise = torch.tensor(0.3), torch.tensor([-1.0, 0.2, 1]), torch.tensor([2.0, -1, 0.5])
    noisy = diffusion.add_noise(clean, noise, alpha_bar)
    torch.testing.assert_close(noisy, math.sqrt(0.3) * clean + math.sqrt(0.7) * noise)
    torch.testing.assert_close(diffusion.predict_clean(noisy, noise, alpha_bar), clean)
    assert diffusion.predict_clean(torch.tensor(9.0), torch.tensor(0.0), alpha_bar) == 1


def _ddpm(noisy, clean, beta, alpha_bar, before, z):
    """Ho et al. 2020, eq. 7: the product of the Gaussians q(x_k | x_{k-1}) and q(x_{k-1} | x_0), normalized."""
    precision = (1 - beta) / beta + 1 / (1 - before)
    mean = (math.sqrt(1 - beta) * noisy / beta + math.sqrt(before) * clean / (1 - before)) / precision
    return mean + z / math.sqrt(precision)


@sabotaged_by("foresight.ops.generative.diffusion.step_back", lambda f: lambda *a: f(*a[:4], 0.9, a[5]))
def test_ddim_with_eta_1_is_ddpm() -> None:
    alpha_bar = diffusion.squared_cosine(20)
    noisy, clean, z = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    clean = clean.clamp(-1, 1)
    for k in (20, 11, 2):
        beta = 1 - (alpha_bar[k] / alpha_bar[k - 1]).item()
        found = diffusion.step_back(noisy, clean, alpha_bar[k], alpha_bar[k - 1], 1.0, z)
        expected = _ddpm(noisy, clean, beta, alpha_bar[k].item(), alpha_bar[k - 1].item(), z)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # The last step has no noise.
    torch.testing.assert_close(diffusion.step_back(noisy, clean, alpha_bar[1], alpha_bar[0], 1.0, z), clean)


@pytest.mark.parametrize(
    ("before", "eta", "expected"),
    [
        # DDIMScheduler(...).set_timesteps(10), .step(noise, 50, noisy, eta=0, use_clipped_model_output=True)
        (41, 0.0, [1.0629953145980835, -0.39266544580459595, 0.4247211515903473]),
        # DDPMScheduler(..., variance_type="fixed_small").step(noise, 50, noisy), which drew z
        (50, 1.0, [1.3474140167236328, -0.44448143243789673, -0.09999024868011475]),
    ],
)
@sabotaged_by("foresight.ops.generative.diffusion.step_back", lambda f: lambda *a: f(*a[:4], 0.5, a[5]))
@sabotaged_by("foresight.ops.generative.diffusion.predict_clean", lambda f: lambda *a: f(*a) * 1.01)
def test_steps_are_those_of_diffusers(before: int, eta: float, expected: list[float]) -> None:
    """diffusers 0.42.1, schedulers of 100 steps with beta_schedule="squaredcos_cap_v2", whose step 50 is level 51."""
    noisy, noise = torch.tensor([1.1, -0.4, 0.25]), torch.tensor([0.9, -0.3, -1.2])
    z = torch.tensor([1.5409960746765137, -0.293428897857666, -2.1787893772125244])
    alpha_bar = diffusion.squared_cosine(100)
    clean = diffusion.predict_clean(noisy, noise, alpha_bar[51])  # the last one is clipped
    found = diffusion.step_back(noisy, clean, alpha_bar[51], alpha_bar[before], eta, z)
    torch.testing.assert_close(found, torch.tensor(expected))


@sabotaged_by("foresight.ops.generative.diffusion.step_back", lambda f: lambda *a: f(*a[:4], 0.5, a[5]))
def test_ddim_with_eta_0_keeps_the_noise() -> None:
    """From x_k made of x_0 and ε, the step lands on what `add_noise` makes of the same two, at any other level."""
    alpha_bar = diffusion.squared_cosine(50)
    clean, noise = torch.tensor([-0.5, 1.0]), torch.tensor([0.3, -2.0])
    for k, before in ((40, 20), (50, 49), (7, 0)):
        noisy = diffusion.add_noise(clean, noise, alpha_bar[k])
        found = diffusion.step_back(noisy, clean, alpha_bar[k], alpha_bar[before], 0.0, torch.randn(2))
        expected = diffusion.add_noise(clean, noise, alpha_bar[before])
        torch.testing.assert_close(found, expected, atol=1e-3 if k == 50 else 1e-5, rtol=1e-5)


@sabotaged_by(
    "foresight.ops.generative.diffusion.step_back", lambda f: lambda *a: f(a[0], a[1], a[2], a[3], a[4], 0 * a[5])
)
def test_the_exact_denoiser_of_a_gaussian_samples_it() -> None:
    """x_0 ~ N(0, s²) without clipping: with the true E[ε | x_k] and η = 1, K steps give the standard deviation s."""
    steps, s, x = 200, 0.2, torch.randn(4_000, generator=torch.Generator().manual_seed(0))
    alpha_bar = diffusion.squared_cosine(steps)
    generator = torch.Generator().manual_seed(1)
    for k in diffusion.levels(steps, steps):
        a = alpha_bar[k]
        noise = (1 - a).sqrt() * x / (a * s**2 + 1 - a)
        clean = diffusion.predict_clean(x, noise, a)
        x = diffusion.step_back(x, clean, a, alpha_bar[k - 1], 1.0, torch.randn(x.shape, generator=generator))
    assert x.std().item() == pytest.approx(s, rel=0.06) and x.mean().abs() < 0.02

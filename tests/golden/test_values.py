"""Distributions of returns, dueling streams and n-step transitions: small numbers, and the definitions in loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foresight.nets.noisy import NoisyLinear
from foresight.nets.values import Atoms, Points, Quantiles
from foresight.ops import distributional, returns, transforms, value
from foresight.training import optim
from tests.sabotage import change, drop, flip_sign, off_by_one, sabotaged_by, scaled, swap


def _projected(probs: torch.Tensor, atoms: list[float], reward: torch.Tensor, discount: torch.Tensor) -> torch.Tensor:
    """Bellemare et al. 2017, eq. 7, as it stands there."""
    low, high, step = atoms[0], atoms[-1], atoms[1] - atoms[0]
    out = [[0.0] * len(atoms) for _ in probs]
    for row, (p, r, d) in enumerate(zip(probs.tolist(), reward.tolist(), discount.tolist(), strict=True)):
        for i, z in enumerate(atoms):
            for j, other in enumerate(atoms):
                moved = min(max(r + d * other, low), high)
                out[row][i] += min(max(1 - abs(moved - z) / step, 0.0), 1.0) * p[j]
    return torch.tensor(out, dtype=probs.dtype)


@sabotaged_by(
    "foresight.ops.distributional.project", swap("reward", "discount"), off_by_one, change("discount", lambda d: d * 0)
)
@given(seed=st.integers(0, 2**31), count=st.integers(2, 9))
def test_the_projection_is_its_definition(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.linspace(-2, 3, count, dtype=torch.float64)
    probs = torch.randn(6, count, generator=generator, dtype=torch.float64).softmax(-1)
    reward = 3 * torch.randn(6, generator=generator, dtype=torch.float64)
    discount = torch.rand(6, generator=generator, dtype=torch.float64).round(decimals=1)
    found = distributional.project(probs, atoms, reward, discount)
    torch.testing.assert_close(found, _projected(probs, atoms.tolist(), reward, discount))
    torch.testing.assert_close(found.sum(-1), torch.ones(6, dtype=torch.float64))
    no_future = distributional.project(probs, atoms, reward, 0 * discount)
    torch.testing.assert_close(no_future, transforms.two_hot(reward, atoms))


@sabotaged_by("foresight.ops.distributional.project", off_by_one)
def test_the_projection_by_hand() -> None:
    """Atoms 0, 1, 2 with all mass on 2: reward 0.5 and discount 0.5 make it 1.5, half on 1 and half on 2."""
    probs, atoms = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([0.0, 1.0, 2.0])
    found = distributional.project(probs, atoms, torch.tensor([0.5]), torch.tensor([0.5]))
    assert found.tolist() == [[0.0, 0.5, 0.5]]
    far = distributional.project(probs, atoms, torch.tensor([9.0]), torch.tensor([0.5]))
    assert far.tolist() == [[0.0, 0.0, 1.0]]


@sabotaged_by(
    "foresight.ops.distributional.quantile_huber_loss", change("kappa", lambda k: 3 * k), swap("quantiles", "target")
)
@given(seed=st.integers(0, 2**31))
def test_the_quantile_loss_is_its_definition(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    quantiles, target = 2 * torch.randn(4, 5, generator=generator), 2 * torch.randn(4, 7, generator=generator)
    kappa, expected = 0.7, []
    for q, t in zip(quantiles.tolist(), target.tolist(), strict=True):
        total = 0.0
        for i, quantile in enumerate(q):
            for sample in t:
                u = sample - quantile
                huber = 0.5 * u * u if abs(u) <= kappa else kappa * (abs(u) - 0.5 * kappa)
                total += abs((i + 0.5) / 5 - (u < 0)) * huber / kappa / 7
        expected.append(total)
    torch.testing.assert_close(distributional.quantile_huber_loss(quantiles, target, kappa), torch.tensor(expected))


@sabotaged_by("foresight.ops.distributional.quantile_huber_loss", change("quantiles", lambda q: -q))
def test_quantile_regression_finds_quantiles() -> None:
    """Of a uniform law on [0, 8]: at the levels 1/8, 3/8, 5/8, 7/8 they are 1, 3, 5 and 7."""
    target = torch.linspace(0, 8, 161)
    quantiles = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([quantiles], lr=4.0)
    for _ in range(150):
        optim.step(optimizer, distributional.quantile_huber_loss(quantiles, target, kappa=0.02).backward)
    torch.testing.assert_close(quantiles.detach(), torch.tensor([1.0, 3.0, 5.0, 7.0]), atol=0.1, rtol=0)


@sabotaged_by("foresight.ops.value.dueling", flip_sign, scaled(1.5))
def test_dueling_by_hand() -> None:
    """V = 10, A = (1, 2, 6) with mean 3: Q = (8, 9, 13)."""
    found = value.dueling(torch.tensor([[10.0]]), torch.tensor([[[1.0], [2.0], [6.0]]]))
    assert found.squeeze(-1).tolist() == [[8.0, 9.0, 13.0]]
    level = value.dueling(torch.tensor([[10.0, 4.0]]), torch.full((1, 3, 2), 7.0))
    assert level.tolist() == [[[10.0, 4.0]] * 3]


@sabotaged_by("foresight.ops.value.double_q_target", swap("reward", "discount"))
def test_the_q_target_by_hand() -> None:
    """r = 1, γ = 0.1, Q⁻ = (5, 9): DQN takes 9 and gets 1.9; Double DQN, whose network prefers the first, 1.5."""
    reward, discount, following = torch.tensor([1.0]), torch.tensor([0.1]), torch.tensor([[5.0, 9.0]])
    assert value.double_q_target(reward, discount, following, following.argmax(-1)).item() == pytest.approx(1.9)
    assert value.double_q_target(reward, discount, following, torch.tensor([0])).item() == pytest.approx(1.5)


@sabotaged_by(
    "foresight.ops.returns.n_step_transition", swap("discount", "cut"), drop("mask"), change("cut", torch.zeros_like)
)
def test_n_step_transitions_by_hand() -> None:
    """γ = 0.1 and digit rewards: the digits that count can be read off."""
    reward = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    discount = torch.full((5, 3), 0.1)
    cut, mask = torch.zeros(5, 3), torch.ones(5, 3)
    cut[1, 1], discount[1, 1] = 1, 0.0  # terminates after the second
    cut[2, 0] = 1  # a time limit after the first
    mask[3, 2], mask[4, 1] = 0, 0  # the third, and the second, are not real
    total, left, last = returns.n_step_transition(reward, discount, cut, mask)
    torch.testing.assert_close(total, torch.tensor([1.23, 1.2, 1.0, 1.2, 1.0]))
    torch.testing.assert_close(left, torch.tensor([0.001, 0.0, 0.1, 0.01, 0.1]))
    assert last.tolist() == [2, 1, 0, 1, 0]


@sabotaged_by("foresight.ops.returns.n_step_transition", change("cut", torch.zeros_like))
@given(seed=st.integers(0, 2**31), n=st.integers(1, 6))
def test_an_n_step_transition_is_the_n_step_return(seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward, next_value = torch.randn(20, n, generator=generator), torch.randn(20, n, generator=generator)
    cut = (torch.rand(20, n, generator=generator) < 0.3).float()
    discount = 0.9 * (1 - cut * (torch.rand(20, n, generator=generator) < 0.5).float())
    total, left, last = returns.n_step_transition(reward, discount, cut)
    found = total + left * next_value.gather(1, last[:, None])[:, 0]
    torch.testing.assert_close(found, returns.n_step_return(reward, discount, cut, next_value, n)[:, 0])
    if n == 1:
        assert torch.equal(total, reward[:, 0]) and torch.equal(left, discount[:, 0])


def _values(kind: str, generator: torch.Generator) -> Points | Atoms | Quantiles:
    if kind == "points":
        return Points(torch.randn(6, 3, generator=generator))
    numbers = torch.randn(6, 3, 11, generator=generator)
    return Atoms(numbers, torch.linspace(-9, 9, 11)) if kind == "atoms" else Quantiles(numbers)


@sabotaged_by("foresight.nets.values.Points.backup", swap("reward", "discount"))
@sabotaged_by("foresight.nets.values.Atoms.backup", swap("reward", "discount"))
@sabotaged_by("foresight.nets.values.Quantiles.backup", swap("reward", "discount"))
def test_every_kind_of_value_obeys_the_bellman_equation_in_the_mean() -> None:
    for kind in ("points", "atoms", "quantiles"):
        _obeys(kind)


def _obeys(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = _values(kind, generator)
    action = torch.randint(0, 3, (6,), generator=generator)
    picked = values.pick(action)
    torch.testing.assert_close(picked.mean(), values.mean().gather(-1, action[:, None])[:, 0])
    reward, discount = torch.randn(6, generator=generator), torch.full((6,), 0.8)
    target = picked.backup(reward, discount)
    mean = (
        target
        if kind == "points"
        else (target * picked.atoms).sum(-1)
        if isinstance(picked, Atoms)
        else target.mean(-1)
    )
    torch.testing.assert_close(mean, reward + 0.8 * picked.mean())
    assert picked.loss(target).shape == (6,)
    draws = torch.stack([values.sample(generator) for _ in range(1000)])
    torch.testing.assert_close(draws.mean(0), values.mean(), atol=0.6, rtol=0)


@sabotaged_by("foresight.nets.noisy.NoisyLinear.noise", scaled(1.5))
def test_noisy_layers_have_the_standard_deviation_of_their_sigma() -> None:
    """Var of a weight is σ² E[f(ε)²]² = σ² (E|ε|)² = σ² · 2/π, as f(ε)² = |ε|; the mean is μ."""
    torch.manual_seed(0)
    layer, generator = NoisyLinear(3, 2, 0.5), torch.Generator().manual_seed(0)
    assert layer.weight_spread[0, 0].item() == pytest.approx(0.5 / math.sqrt(3))
    inputs = torch.eye(3)
    draws = torch.stack([layer(inputs, layer.noise(generator)) - layer.bias for _ in range(4_000)]).detach()
    bias_part = (layer.bias_spread**2 * math.sqrt(2 / math.pi)).detach()
    weight_part = (layer.weight_spread.T**2 * (2 / math.pi)).detach()
    torch.testing.assert_close(draws.mean(0), layer.weight.T.detach(), atol=0.03, rtol=0)
    # Both parts share f(ε_out), and E[f(ε)] = 0 makes their covariance 0.
    torch.testing.assert_close(draws.var(0), weight_part + bias_part, rtol=0.1, atol=0)
    torch.testing.assert_close(layer(inputs), layer.weight.T + layer.bias)

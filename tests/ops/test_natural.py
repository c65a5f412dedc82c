"""The natural gradient: the solver against a dense solve, the products against the Fisher matrix written down."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from foresight.nets.outputs import Categorical, Normal
from foresight.ops import natural
from tests.sabotage import change, flip_sign, sabotaged_by, scaled


def _system(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return root @ root.t() + torch.eye(size, dtype=torch.float64), torch.randn(size, generator=generator).double()


@sabotaged_by("foresight.ops.natural.conjugate_gradient", flip_sign, change("iterations", lambda n: n // 6))
@given(seed=st.integers(0, 2**31), size=st.integers(4, 12))
def test_conjugate_gradient_solves(seed, size):
    matrix, b = _system(seed, size)
    x = natural.conjugate_gradient(lambda v: matrix @ v, b, iterations=3 * size, tolerance=1e-24)
    assert torch.allclose(x, torch.linalg.solve(matrix, b), rtol=1e-6, atol=1e-8)


@sabotaged_by("foresight.ops.natural.conjugate_gradient", scaled(1.01))
@given(seed=st.integers(0, 2**31))
def test_one_iteration_is_steepest_descent(seed):
    matrix, b = _system(seed, 5)
    x = natural.conjugate_gradient(lambda v: matrix @ v, b, iterations=1)
    assert torch.allclose(x, b * (b @ b) / (b @ matrix @ b))


@given(seed=st.integers(0, 2**31))
def test_every_iteration_reduces_the_error(seed):
    matrix, b = _system(seed, 8)
    exact = torch.linalg.solve(matrix, b)
    gaps = [exact - natural.conjugate_gradient(lambda v: matrix @ v, b, iterations=n) for n in range(1, 9)]
    energy = torch.stack([gap @ matrix @ gap for gap in gaps])
    assert (energy[1:] <= energy[:-1] * (1 + 1e-9) + 1e-12).all()


def test_nothing_to_solve():
    assert not natural.conjugate_gradient(lambda v: v, torch.zeros(3)).any()


def _network(outputs: int) -> tuple[nn.Module, torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    return network, torch.randn(6, 3, dtype=torch.float64), list(network.parameters())


def _fisher_categorical() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """`(divergence, E[∇log π ∇log πᵀ] summed over all actions, parameters)`."""
    network, x, parameters = _network(3)
    logits = network(x)
    expected = torch.zeros(())
    for row, p in zip(logits.log_softmax(-1), logits.detach().softmax(-1), strict=True):
        for action in range(3):
            score = natural.flatten(torch.autograd.grad(row[action], parameters, retain_graph=True))
            expected = expected + p[action] * torch.outer(score, score) / len(x)
    return Categorical(logits.detach()).kl(Categorical(logits)).mean(), expected, parameters


def _fisher_normal() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The paper's form JᵀMJ: M is 1/σ² for a mean and 2 for a logarithm of σ."""
    network, x, parameters = _network(2)
    log_std = torch.tensor([-0.5, 0.3], dtype=torch.float64, requires_grad=True)
    parameters = [*parameters, log_std]
    mean = network(x)
    expected = torch.zeros(())
    for row in mean:
        for i in range(2):
            for quantity, weight in ((row[i], (-2 * log_std[i]).exp()), (log_std[i], 2.0)):
                grads = torch.autograd.grad(quantity, parameters, retain_graph=True, allow_unused=True)
                part = natural.flatten(
                    [torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)]
                )
                expected = expected + weight * torch.outer(part, part) / len(x)
    old = Normal(mean.detach(), log_std.detach().exp())
    return old.kl(Normal(mean, log_std.exp())).mean(), expected.detach(), parameters


@sabotaged_by("foresight.ops.natural.curvature", change("divergence", lambda d: 2 * d), change("damping", lambda x: -x))
@sabotaged_by("foresight.ops.natural.flatten", lambda f: lambda tensors: f(list(tensors)[::-1]))
@pytest.mark.parametrize("fisher", [_fisher_categorical, _fisher_normal])
def test_products_are_those_of_the_fisher_matrix(fisher):
    # Sabotaged `flatten` would reorder the expected matrix too, so that is written down without the saboteur.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(natural, "flatten", lambda tensors: torch.cat([t.reshape(-1) for t in tensors]))
        divergence, expected, parameters = fisher()
    product = natural.curvature(divergence, parameters, damping=0.1)
    size = sum(p.numel() for p in parameters)
    found = torch.stack([product(row) for row in torch.eye(size, dtype=torch.float64)])
    assert expected.abs().max() > 0.05
    assert torch.allclose(found, expected + 0.1 * torch.eye(size, dtype=torch.float64), rtol=1e-8, atol=1e-12)

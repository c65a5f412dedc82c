"""Reductions of attention weights against sums written out."""

from __future__ import annotations

import torch
from torch import Tensor

from foresight.runtime.attention import reductions
from tests.sabotage import sabotaged_by, scaled


def causal(*shape: int) -> Tensor:
    scores = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return scores.masked_fill(torch.ones(shape[-2:]).triu(1) > 0, -torch.inf).softmax(-1)


def no_residual(original):
    def mutant(layers):
        found = []
        for layer in layers:
            found.append(layer @ found[-1] if found else layer)
        return found

    return mutant


@sabotaged_by(
    "foresight.runtime.attention.reductions.rollout", no_residual, lambda f: lambda layers: f(layers[::-1])[::-1]
)
def test_rollout_sums_over_all_paths() -> None:
    """A token at layer 2 is made of an input by every path through layer 1, half of each step staying in place."""
    layers = causal(2, 4, 4)
    expected = torch.zeros(4, 4)
    half = [(layer + torch.eye(4)) / 2 for layer in layers]
    for q in range(4):
        for k in range(4):
            expected[q, k] = sum(half[1][q, m] * half[0][m, k] for m in range(4))
    first, second = reductions.rollout(list(layers))
    torch.testing.assert_close(first, half[0])
    torch.testing.assert_close(second, expected)
    torch.testing.assert_close(second.sum(-1), torch.ones(4))


@sabotaged_by("foresight.runtime.attention.reductions.received", lambda f: lambda weights: weights.mean(-2))
def test_received_is_the_mean_over_the_queries_that_see_a_key() -> None:
    weights = causal(3, 5, 5)
    for k in range(5):
        torch.testing.assert_close(reductions.received(weights)[:, k], weights[:, k:, k].mean(-1))


@sabotaged_by("foresight.runtime.attention.reductions.without_first", scaled(2.0), lambda f: lambda weights: weights)
def test_without_the_first_key_rows_sum_to_one_again() -> None:
    weights = causal(2, 4, 4)
    rest = reductions.without_first(weights)
    assert not rest[..., 0].any() and not rest[:, 0].any()  # the first query sees nothing else
    torch.testing.assert_close(rest[:, 1:].sum(-1), torch.ones(2, 3))
    torch.testing.assert_close(rest[:, 3, 1] / rest[:, 3, 2], weights[:, 3, 1] / weights[:, 3, 2])

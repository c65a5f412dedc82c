from __future__ import annotations

import torch

from foresight.ops import routing
from tests.sabotage import change, drop, flip_sign, sabotaged_by, scaled


@sabotaged_by("foresight.ops.routing.top_experts", drop("bias"), change("affinity", lambda p: 1 - p))
def test_a_choice_by_hand():
    affinity = torch.tensor([[0.5, 0.3, 0.2], [0.12, 0.08, 0.8]])
    chosen, weights = routing.top_experts(affinity, 2, torch.tensor([0.0, 0.0, 0.2]))
    assert chosen.tolist() == [[0, 2], [2, 0]]
    expected = torch.tensor([[5 / 7, 2 / 7], [20 / 23, 3 / 23]])  # of the affinities, not of what chose
    torch.testing.assert_close(weights, expected)


def test_the_bias_chooses_and_weighs_nothing():
    affinity = torch.rand(50, 6, generator=torch.Generator().manual_seed(0))
    plain, weights = routing.top_experts(affinity, 6)
    pushed, others = routing.top_experts(affinity, 6, torch.tensor([9.0, 0, 0, 0, 0, -9]))
    assert (pushed[:, 0] == 0).all() and (pushed[:, -1] == 5).all()
    torch.testing.assert_close(
        torch.zeros(50, 6).scatter(1, plain, weights), torch.zeros(50, 6).scatter(1, pushed, others)
    )


@sabotaged_by("foresight.ops.routing.balance_loss", scaled(2.0), change("chosen", lambda c: 1 - c))
def test_the_balance_loss_by_hand():
    affinity = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    chosen = affinity.argmax(-1, keepdim=True)
    torch.testing.assert_close(
        routing.balance_loss(affinity, chosen), torch.tensor(2 * (2 / 3 * 1.7 / 3 + 1 / 3 * 1.3 / 3))
    )
    torch.testing.assert_close(
        routing.balance_loss(torch.full((4, 4), 0.25), torch.arange(4)[:, None]), torch.tensor(1.0)
    )


@sabotaged_by("foresight.ops.routing.balance_loss", flip_sign, scaled(2.0))
def test_the_gradient_of_the_balance_loss_is_the_load():
    """∂L / ∂p_ne = E f_e / N: the more an expert has, the more it is pushed down; the load itself is no function."""
    generator = torch.Generator().manual_seed(0)
    affinity = torch.rand(20, 5, generator=generator, dtype=torch.float64).softmax(-1).requires_grad_()
    chosen = affinity.detach().topk(2, -1).indices
    routing.balance_loss(affinity, chosen).backward()
    for n in range(20):
        for e in range(5):
            share = sum(int(x == e) for row in chosen.tolist() for x in row) / 40
            assert abs(affinity.grad[n, e].item() - 5 * share / 20) < 1e-8  # the load is in float32
    logits = torch.zeros(20, 5, dtype=torch.float64, requires_grad=True)
    crowded = torch.full((20, 1), 3)
    routing.balance_loss(logits.softmax(-1), crowded).backward()
    assert (logits.grad[:, 3] > 0).all() and (logits.grad[:, :3] < 0).all()  # a step down takes from the crowded one


@sabotaged_by("foresight.ops.routing.balanced_bias", change("rate", lambda u: -u), scaled(1.1))
def test_the_bias_rule_by_hand():
    bias = routing.balanced_bias(torch.tensor([0.0, 0.5, 0.3, -1.0]), torch.tensor([0.5, 0.25, 0.25, 0.0]), 0.1)
    torch.testing.assert_close(bias, torch.tensor([-0.1, 0.5, 0.3, -0.9]))

"""Small functions of learned models, with numbers that can be checked by hand."""

from __future__ import annotations

import torch

from foresight.ops import latent
from tests.sabotage import change, drop, flip_sign, sabotaged_by, scaled, swap


@sabotaged_by("foresight.ops.latent.scale_gradient", change("factor", lambda f: 1.0))
def test_a_gradient_is_scaled_and_the_number_is_not() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = latent.scale_gradient(x, 0.5)
    assert torch.equal(y, x)
    (y * torch.tensor([3.0, 5.0])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.5, 2.5]


@sabotaged_by("foresight.ops.latent.unit_interval", scaled(2.0))
def test_latents_are_in_the_unit_interval() -> None:
    y = latent.unit_interval(torch.tensor([[2.0, 4.0, 3.0], [7.0, 7.0, 7.0]]), eps=0.0)
    assert y[0].tolist() == [0.0, 1.0, 0.5]
    assert latent.unit_interval(torch.full((2, 3), 7.0)).abs().max() == 0


@sabotaged_by("foresight.ops.latent.unroll_masks", swap("discount", "cut"), drop("mask"))
def test_rows_beyond_the_end_are_known_only_after_a_termination() -> None:
    cut = torch.tensor([[0, 0, 1, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 0.0]])
    discount = torch.ones(5, 5)
    discount[0, 2] = discount[1, 4] = 0  # row 0 terminates; row 1 first meets a time limit
    mask = torch.ones(5, 5)
    mask[3, 2], discount[3, 2], mask[4, 0], discount[4, 0] = 0, 0, 0, 0  # rows of which nothing is known
    alive, over = latent.unroll_masks(discount, cut, mask)
    assert alive.tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1] * 5, [1, 1, 0, 0, 0], [0] * 5]
    assert over.tolist() == [[0, 0, 0, 1, 1], [0] * 5, [0] * 5, [0] * 5, [0] * 5]


@sabotaged_by("foresight.ops.latent.negative_cosine", flip_sign, swap("prediction", "target"))
def test_consistency_is_a_cosine_and_holds_the_target_still() -> None:
    a, b = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.tensor([[1.0, 0.0]], requires_grad=True)
    loss = latent.negative_cosine(a, b)
    torch.testing.assert_close(loss, torch.tensor([-0.6]))
    loss.sum().backward()
    assert b.grad is None and a.grad is not None


@sabotaged_by("foresight.ops.latent.shrunk_horizon", change("share", lambda _: 1.0), change("n", lambda n: n + 1))
def test_old_rows_use_fewer_steps() -> None:
    age = torch.tensor([0, 29, 30, 60, 100, 1000])
    assert latent.shrunk_horizon(age, 100, 5).tolist() == [5, 5, 4, 3, 2, 1]


@sabotaged_by("foresight.ops.latent.value_prefix", change("horizon", lambda h: h + 1), change("alive", torch.ones_like))
def test_a_value_prefix_is_reset() -> None:
    reward = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    alive = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])
    assert latent.value_prefix(reward, alive, 2).tolist() == [[1.0, 3.0, 3.0, 7.0, 0.0]]

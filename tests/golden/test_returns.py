"""Returns that a person can check: discount 0.1 and digits for rewards, so a return reads like its rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from foresight.ops import returns
from tests.sabotage import change, drop, flip_sign, off_by_one, sabotaged_by, shift, swap

RETURNS = "foresight.ops.returns."
never_cut = change("cut", torch.zeros_like, label="ignore_cut")


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def close(actual: Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, row(*expected), rtol=0, atol=1e-12)


# Row 1 terminates (its next_value 6 is worth nothing); row 3 meets a time limit, where the value is 7; after
# row 5 the segment ends, where the value is 8.
REWARD = row(1, 2, 3, 4, 5, 6)
DISCOUNT = row(0.1, 0, 0.1, 0.1, 0.1, 0.1)
CUT = row(0, 1, 0, 1, 0, 0)
VALUE = row(1, 1, 2, 2, 3, 3)
NEXT = row(1, 6, 2, 7, 3, 8)


@sabotaged_by(
    RETURNS + "discounted_return", flip_sign, off_by_one, never_cut, swap("discount", "cut"), drop("next_value")
)
def test_monte_carlo() -> None:
    close(returns.discounted_return(REWARD, DISCOUNT, CUT, NEXT), 1.2, 2, 3.47, 4.7, 5.68, 6.8)


@sabotaged_by(RETURNS + "discounted_return", flip_sign, never_cut, swap("discount", "cut"))
def test_monte_carlo_without_bootstrap() -> None:
    close(returns.discounted_return(REWARD, DISCOUNT, CUT), 1.2, 2, 3.4, 4, 5.6, 6)


@sabotaged_by(RETURNS + "discounted_return", drop("mask"), flip_sign, swap("discount", "cut"))
def test_monte_carlo_of_padded_tokens() -> None:
    # Discount 1 between tokens, the reward on the last real one, whose discount is 0. Garbage in the padding.
    reward, discount = row(0, 0, 1, 9, 9), row(1, 1, 0, 1, 1)
    close(returns.discounted_return(reward, discount, row(0, 0, 1, 0, 0), mask=row(1, 1, 1, 0, 0)), 1, 1, 1, 0, 0)


@sabotaged_by(RETURNS + "n_step_return", flip_sign, never_cut, shift("next_value"), swap("discount", "cut"))
def test_two_steps() -> None:
    #  row 0: 1 + .1·2 (then terminated)   row 2: 3 + .1·4 + .01·7   row 3: 4 + .1·7   row 4: 5 + .1·6 + .01·8
    close(returns.n_step_return(REWARD, DISCOUNT, CUT, NEXT, 2), 1.2, 2, 3.47, 4.7, 5.68, 6.8)
    #  one step: reward + .1 · next_value
    close(returns.n_step_return(REWARD, DISCOUNT, CUT, NEXT, 1), 1.1, 2, 3.2, 4.7, 5.3, 6.8)


@sabotaged_by(RETURNS + "lambda_return", flip_sign, never_cut, shift("next_value"), swap("discount", "cut"))
def test_lambda_return_halfway() -> None:
    # Rows 0, 2 and 4 lie halfway between one step and two.
    close(returns.lambda_return(REWARD, DISCOUNT, CUT, NEXT, 0.5), 1.15, 2, 3.335, 4.7, 5.49, 6.8)


@sabotaged_by(
    RETURNS + "gae", flip_sign, off_by_one, never_cut, shift("value"), swap("discount", "cut"), swap("value", "reward")
)
def test_gae() -> None:
    # δ = .1, 1, 1.2, 2.7, 2.3, 3.8 and the trace decays by .1 · .5
    advantage, target = returns.gae(REWARD, DISCOUNT, CUT, VALUE, NEXT, 0.5)
    close(advantage, 0.15, 1, 1.335, 2.7, 2.49, 3.8)
    close(target, 1.15, 2, 3.335, 4.7, 5.49, 6.8)


@sabotaged_by(RETURNS + "gae", change("discount", torch.Tensor.abs), flip_sign)
def test_gae_when_the_mover_changes() -> None:
    # Zero-sum: the winner's last move earns 1, and it is -1 for the other one, and 1 again.
    advantage, _ = returns.gae(row(0, 0, 1), row(-1, -1, 0), row(0, 0, 1), row(0, 0, 0), row(0, 0, 0), 1.0)
    close(advantage, 1, -1, 1)


@sabotaged_by(
    RETURNS + "vtrace",
    flip_sign,
    never_cut,
    shift("ratio"),
    swap("value", "next_value"),
    change("clip_c", lambda _: 9.0),
    change("clip_rho", lambda _: 9.0),
    change("clip_pg", lambda _: 9.0),
)
def test_vtrace() -> None:
    # Values 0 inside, 5 after the end. Ratios: 2 is clipped to 1, 0.5 halves row 1 and all that it passes on.
    zero, ratio = row(0, 0, 0), row(2, 0.5, 2)
    advantage, target = returns.vtrace(row(1, 2, 3), row(0.1, 0.1, 0.1), row(0, 0, 0), zero, row(0, 0, 5), ratio)
    #  v_2 = 3 + .1·5    v_1 = .5 · (2 + .1 · 3.5)    v_0 = 1 + .1 · 1.175
    close(target, 1.1175, 1.175, 3.5)
    close(advantage, 1.1175, 1.175, 3.5)
    # Cut after row 1, where the value is 4: nothing of row 2 comes back.
    arguments = (row(1, 2, 3), row(0.1, 0.1, 0.1), row(0, 1, 0), zero, row(0, 4, 5), ratio)
    close(returns.vtrace(*arguments)[1], 1.12, 1.2, 3.5)


@sabotaged_by(RETURNS + "retrace", flip_sign, never_cut, shift("ratio"), drop("mask"), swap("value", "next_value"))
def test_retrace() -> None:
    # Q = 1 everywhere, expected Q 2 after each action. δ = 0.2, 1.2, 2.2 (row 3 is not real).
    # The trace into row 1 is 0.5, into row 2 min(1, 3).
    target = returns.retrace(
        row(1, 2, 3, 9), row(*[0.1] * 4), row(0, 0, 0, 0), row(1, 1, 1, 1), row(2, 2, 2, 2), row(7, 0.5, 3, 1),
        mask=row(1, 1, 1, 0),
    )  # fmt: skip
    #  2: 1 + 2.2     1: 1 + 1.2 + .1·1·2.2     0: 1 + .2 + .1·.5·1.42
    close(target, 1.271, 2.42, 3.2, 0)
    cut = returns.retrace(row(1, 2), row(0.1, 0.1), row(1, 0), row(1, 1), row(2, 2), row(1, 1))
    close(cut, 1.2, 2.2)


@sabotaged_by(RETURNS + "following", shift("value"), flip_sign)
def test_following() -> None:
    close(returns.following(row(1, 2, 3), torch.tensor([9.0])), 2, 3, 9)


@sabotaged_by(RETURNS + "forward", flip_sign, drop("start"), shift("decay"))
def test_forward() -> None:
    close(returns.forward(row(1, 2, 3), row(0.1, 1, 0.1), row(4)[0]), 1.4, 3.4, 3.34)

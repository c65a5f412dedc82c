"""Every return against its definition, written out as sums, over random endings; and masks, gradients, errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foresight.ops import returns
from tests.ops import patterns
from tests.ops.patterns import Segment, every_row, segments
from tests.sabotage import change, drop, flip_sign, off_by_one, sabotaged_by, shift, swap

LAMBDAS = st.sampled_from([0.0, 0.5, 0.95, 1.0])
RETURNS = "foresight.ops.returns."
never_cut = change("cut", torch.zeros_like, label="ignore_cut")


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@sabotaged_by(RETURNS + "backward", flip_sign, off_by_one, shift("decay"), swap("delta", "decay"))
@given(st.integers(1, 3), st.integers(1, 40), st.integers(0, 2**31))
def test_backward_is_the_loop(rows: int, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(rows, steps, generator=generator, dtype=torch.float64)
    decay = torch.randn(rows, steps, generator=generator, dtype=torch.float64)
    decay[torch.rand(rows, steps, generator=generator) < 0.2] = 0
    expected, x = torch.empty_like(delta), torch.zeros(rows, dtype=torch.float64)
    for t in reversed(range(steps)):
        x = delta[:, t] + decay[:, t] * x
        expected[:, t] = x
    close(returns.backward(delta, decay), expected)


@sabotaged_by(RETURNS + "forward", drop("start"), shift("decay"), flip_sign)
@given(st.integers(1, 3), st.integers(1, 20), st.integers(0, 2**31))
def test_forward_is_the_loop(rows: int, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    delta, decay = torch.randn(2, rows, steps, generator=generator, dtype=torch.float64).unbind()
    x = start = torch.randn(rows, generator=generator, dtype=torch.float64)
    expected = torch.empty_like(delta)
    for t in range(steps):
        x = delta[:, t] + decay[:, t] * x
        expected[:, t] = x
    close(returns.forward(delta, decay, start), expected)


@sabotaged_by(
    RETURNS + "discounted_return",
    flip_sign,
    never_cut,
    drop("mask"),
    drop("next_value"),
    swap("discount", "cut"),
    shift("next_value"),
)
@given(segments())
def test_discounted_return(s: Segment) -> None:
    steps = s.reward.shape[1]
    expected = every_row(s, lambda b, t: patterns.n_step(s, b, t, steps))
    close(returns.discounted_return(s.reward, s.discount, s.cut, s.next_value, s.mask), expected)


@sabotaged_by(
    RETURNS + "n_step_return",
    never_cut,
    drop("mask"),
    swap("discount", "cut"),
    shift("next_value"),
    change("n", lambda n: n + 1),
)
@given(segments(), st.integers(1, 10))
def test_n_step_return(s: Segment, n: int) -> None:
    expected = every_row(s, lambda b, t: patterns.n_step(s, b, t, n))
    close(returns.n_step_return(s.reward, s.discount, s.cut, s.next_value, n, s.mask), expected)


@sabotaged_by(
    RETURNS + "lambda_return",
    never_cut,
    drop("mask"),
    swap("discount", "cut"),
    shift("next_value"),
    shift("reward"),
    change("lam", lambda lam: 1 - lam),
)
@given(segments(), LAMBDAS)
def test_lambda_return(s: Segment, lam: float) -> None:
    expected = every_row(s, lambda b, t: patterns.lambda_mixture(s, b, t, lam))
    close(returns.lambda_return(s.reward, s.discount, s.cut, s.next_value, lam, s.mask), expected)


@sabotaged_by(
    RETURNS + "gae",
    flip_sign,
    never_cut,
    drop("mask"),
    swap("discount", "cut"),
    swap("value", "next_value"),
    shift("value"),
    shift("cut"),
)
@given(segments(), LAMBDAS)
def test_gae(s: Segment, lam: float) -> None:
    def row(b: int, t: int) -> Tensor:
        return sum(
            patterns.discount_between(s, b, t, i) * lam ** (i - t) * patterns.td_error(s, b, i) for i in s.span(b, t)
        )

    advantage, target = returns.gae(s.reward, s.discount, s.cut, s.value, s.next_value, lam, s.mask)
    expected = every_row(s, row)
    close(advantage, expected)
    close(target, expected + s.value * s.mask)


@sabotaged_by(
    RETURNS + "vtrace",
    flip_sign,
    never_cut,
    drop("mask"),
    swap("discount", "cut"),
    swap("clip_rho", "clip_c"),
    swap("clip_rho", "clip_pg"),
    shift("ratio"),
    shift("next_value"),
)
@given(segments(), LAMBDAS)
def test_vtrace(s: Segment, lam: float) -> None:
    clip_rho, clip_c, clip_pg = 1.2, 0.7, 2.0

    def target_row(b: int, t: int) -> Tensor:
        total = s.value[b, t].clone()
        for i in s.span(b, t):
            traces = torch.stack([lam * s.ratio[b, j].clamp(max=clip_c) for j in range(t, i)] or [torch.tensor(1.0)])
            weight = patterns.discount_between(s, b, t, i) * traces.prod() * s.ratio[b, i].clamp(max=clip_rho)
            total = total + weight * patterns.td_error(s, b, i)
        return total

    def advantage_row(b: int, t: int) -> Tensor:
        """ρ_t (δ_t + λ Σ_i γ^(i-t) c_(t+1) ... c_(i-1) ρ_i δ_i): with λ in every factor but that of a_t, as in GAE."""
        total = patterns.td_error(s, b, t)
        for i in [i for i in s.span(b, t) if i > t]:
            weight = lam * patterns.discount_between(s, b, t, i) * s.ratio[b, i].clamp(max=clip_rho)
            for j in range(t + 1, i):
                weight = weight * lam * s.ratio[b, j].clamp(max=clip_c)
            total = total + weight * patterns.td_error(s, b, i)
        return s.ratio[b, t].clamp(max=clip_pg) * total

    advantage, target = returns.vtrace(
        s.reward, s.discount, s.cut, s.value, s.next_value, s.ratio, lam, clip_rho, clip_c, clip_pg, s.mask
    )
    close(target, every_row(s, target_row))
    close(advantage, every_row(s, advantage_row))


@sabotaged_by(
    RETURNS + "retrace",
    flip_sign,
    never_cut,
    drop("mask"),
    swap("discount", "cut"),
    shift("ratio"),
    shift("value"),
    change("ratio", torch.ones_like),
)
@given(segments(), LAMBDAS)
def test_retrace(s: Segment, lam: float) -> None:
    def row(b: int, t: int) -> Tensor:
        total = s.value[b, t].clone()
        for i in s.span(b, t):
            weight = patterns.discount_between(s, b, t, i)
            for j in range(t + 1, i + 1):  # the trace begins one row later: a_t itself is given
                weight = weight * lam * s.ratio[b, j].clamp(max=1.0)
            total = total + weight * patterns.td_error(s, b, i)
        return total

    target = returns.retrace(s.reward, s.discount, s.cut, s.value, s.next_value, s.ratio, lam, s.mask)
    close(target, every_row(s, row))


@sabotaged_by(RETURNS + "gae", drop("mask"))
@sabotaged_by(RETURNS + "vtrace", drop("mask"))
@sabotaged_by(RETURNS + "retrace", drop("mask"))
@sabotaged_by(RETURNS + "n_step_return", drop("mask"))
@sabotaged_by(RETURNS + "lambda_return", drop("mask"))
@pytest.mark.parametrize("garbage", [float("nan"), 7.0])
def test_nothing_in_an_unreal_row_is_read(garbage: float) -> None:
    torch.manual_seed(1)
    reward, value, next_value, ratio = torch.randn(4, 2, 6).unbind()
    discount, cut, mask = torch.full((2, 6), 0.9), torch.zeros(2, 6), torch.ones(2, 6)
    mask[0, 3:] = 0
    mask[1, 2] = 0

    def everything() -> list[Tensor]:
        common = (reward, discount, cut)
        return [
            *returns.gae(*common, value, next_value, 0.9, mask),
            *returns.vtrace(*common, value, next_value, ratio.exp(), mask=mask),
            returns.retrace(*common, value, next_value, ratio.exp(), mask=mask),
            returns.n_step_return(*common, next_value, 3, mask),
            returns.lambda_return(*common, next_value, 0.9, mask),
        ]

    clean = everything()
    for x in (reward, value, next_value, ratio, discount):
        x[mask == 0] = garbage
    for before, after in zip(clean, everything(), strict=True):
        assert torch.equal(before, after)
        assert (after[mask == 0] == 0).all()


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_gradients_flow_to_every_argument(steps: int) -> None:
    def inputs(count: int) -> list[Tensor]:
        return list(torch.randn(count, 2, steps, dtype=torch.float64).requires_grad_().unbind())

    assert torch.autograd.gradcheck(returns.backward, inputs(2))
    cut = torch.zeros(2, steps, dtype=torch.float64)

    def dreamed(reward: Tensor, discount: Tensor, value: Tensor) -> Tensor:
        return returns.lambda_return(reward, discount, cut, value, 0.95)

    assert torch.autograd.gradcheck(dreamed, inputs(3))


def test_long_segments_neither_overflow_nor_drift() -> None:
    torch.manual_seed(0)
    delta, decay = torch.randn(2, 5000), torch.full((2, 5000), 0.99 * 0.95)
    exact = returns.backward(delta.double(), decay.double())
    torch.testing.assert_close(returns.backward(delta, decay).double(), exact, rtol=1e-5, atol=1e-5)


def test_cut_and_mask_may_be_boolean() -> None:
    s = torch.randn(3, 2, 7)
    cut, mask = torch.rand(2, 7) < 0.3, torch.rand(2, 7) < 0.8
    discount = torch.full((2, 7), 0.9)
    for function in (returns.gae, returns.vtrace, returns.retrace):
        extra = (0.9,) if function is returns.gae else (torch.ones(2, 7),)
        flags = function(s[0], discount, cut, s[1], s[2], *extra, mask=mask)
        numbers = function(s[0], discount, cut.float(), s[1], s[2], *extra, mask=mask.float())
        torch.testing.assert_close(flags, numbers, rtol=0, atol=0)


def test_shapes_that_would_broadcast_are_refused() -> None:
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="one shape"):
        returns.gae(x, x, x, torch.zeros(3, 1), x, 0.95)
    with pytest.raises(ValueError, match="one shape"):
        returns.backward(torch.zeros(4), torch.zeros(4))
    with pytest.raises(ValueError, match="at least 1"):
        returns.n_step_return(x, x, x, x, 0)

"""Transforms and schedules that a person can check by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foresight.ops import schedules, transforms
from tests.sabotage import change, flip_sign, returns, sabotaged_by, scaled, swap


def close(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


@sabotaged_by("foresight.ops.transforms.symlog", flip_sign, scaled(1.01))
@sabotaged_by("foresight.ops.transforms.symexp", flip_sign, scaled(1.01))
def test_symlog() -> None:
    close(transforms.symlog(torch.tensor([0, math.e - 1, 1 - math.e**3])), [0.0, 1.0, -3.0])
    close(transforms.symexp(torch.tensor([0.0, 1.0, -3.0])), [0, math.e - 1, 1 - math.e**3])


@sabotaged_by("foresight.ops.transforms.signed_hyperbolic", flip_sign, change("eps", lambda e: 2 * e))
@sabotaged_by("foresight.ops.transforms.signed_parabolic", flip_sign, change("eps", lambda e: 2 * e))
def test_signed_hyperbolic() -> None:
    # √(8 + 1) - 1 + 0.5 · 8 = 6
    close(transforms.signed_hyperbolic(torch.tensor([0.0, 8.0, -8.0]), eps=0.5), [0.0, 6.0, -6.0])
    close(transforms.signed_parabolic(torch.tensor([0.0, 6.0, -6.0]), eps=0.5), [0.0, 8.0, -8.0])


@sabotaged_by("foresight.ops.transforms.two_hot", change("x", lambda x: x + 0.5), change("bins", lambda b: 2 * b))
@sabotaged_by("foresight.ops.transforms.two_hot_decode", flip_sign, scaled(2.0))
def test_two_hot() -> None:
    bins = torch.tensor([-1.0, 0.0, 2.0])
    code = transforms.two_hot(torch.tensor([-5.0, -1.0, -0.25, 0.0, 0.5, 2.0, 5.0]), bins)
    close(code, [[1, 0, 0], [1, 0, 0], [0.25, 0.75, 0], [0, 1, 0], [0, 0.75, 0.25], [0, 0, 1], [0, 0, 1]])
    close(transforms.two_hot_decode(code, bins), [-1, -1, -0.25, 0, 0.5, 2, 2])


@sabotaged_by("foresight.ops.transforms.symexp_bins", returns(lambda bins: bins.where(bins.abs() > 1, 0)))
def test_bins_are_evenly_spaced_under_symlog_also_where_none_is_0() -> None:
    for count in (2, 3, 20, 21, 100, 255):
        bins = transforms.symexp_bins(count, 10.0)
        torch.testing.assert_close(bins, transforms.symexp(torch.linspace(-10, 10, count)), rtol=1e-5, atol=1e-5)
        assert (bins.diff() > 0).all() and torch.equal(bins, -bins.flip(-1)), count


def plain_sum(original: object) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda probs, bins: (probs * bins).sum(-1)


@sabotaged_by("foresight.ops.transforms.two_hot_decode", plain_sum)
def test_a_fresh_two_hot_head_predicts_exactly_nothing() -> None:
    bins = transforms.symexp(torch.linspace(-20, 20, 255))
    decoded = transforms.two_hot_decode(torch.zeros(255).softmax(-1), 0.5 * (bins - bins.flip(-1)))
    assert decoded.item() == 0
    tilted = transforms.two_hot_decode(torch.tensor([0.25, 0.75]), torch.tensor([-1.0, 1.0]))
    assert tilted.item() == 0.5


@sabotaged_by("foresight.ops.transforms.percentile_scale", flip_sign, change("rate", lambda r: 1 - r))
def test_percentile_scale() -> None:
    x = torch.arange(101.0)[torch.randperm(101)]
    close(transforms.percentile_scale(x), 90.0)  # 95 - 5
    close(transforms.percentile_scale(x, torch.tensor(10.0), rate=0.25), 30.0)


@sabotaged_by("foresight.ops.transforms.merge_moments", flip_sign, scaled(1.1))
@sabotaged_by("foresight.ops.transforms.moments", flip_sign, scaled(1.1))
def test_moments() -> None:
    #  1, 3 and then 5, 7, 9: mean 5, variance (16 + 4 + 0 + 4 + 16) / 5
    first, rest = transforms.moments(torch.tensor([1.0, 3.0])), transforms.moments(torch.tensor([5.0, 7.0, 9.0]))
    assert first == (2, 2, 1)
    assert tuple(round(x.item(), 12) for x in transforms.merge_moments(first, rest)) == (5, 5, 8)


@sabotaged_by("foresight.ops.schedules.linear", flip_sign, swap("start", "end"))
@sabotaged_by("foresight.ops.schedules.cosine", flip_sign, swap("start", "end"))
@sabotaged_by("foresight.ops.schedules.exponential", flip_sign, swap("start", "end"))
@sabotaged_by("foresight.ops.schedules.constant", flip_sign)
@sabotaged_by("foresight.ops.schedules.piecewise", flip_sign, change("progress", lambda p: 1 - p))
@sabotaged_by("foresight.ops.schedules.warmup", flip_sign, change("steps", lambda s: s + 1))
def test_schedules() -> None:
    at = (-1, 0, 0.25, 0.5, 1, 2)
    assert [schedules.constant(p, 3.0) for p in at] == [3] * 6
    assert [schedules.linear(p, 4.0, 2.0) for p in at] == [4, 4, 3.5, 3, 2, 2]
    assert [round(schedules.cosine(p, 4.0, 2.0), 12) for p in at] == [4, 4, round(3 + math.sqrt(0.5), 12), 3, 2, 2]
    assert [round(schedules.exponential(p, 16.0, 1.0), 12) for p in at] == [16, 16, 8, 4, 1, 1]
    line = ((0.25, 1.0), (0.5, 3.0), (0.5, 7.0), (1.0, 8.0))
    assert [schedules.piecewise(p, line) for p in (0, 0.25, 0.375, 0.5, 0.75, 1, 2)] == [1, 1, 2, 7, 7.5, 8, 8]
    assert [schedules.warmup(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


@sabotaged_by("foresight.ops.schedules.passed", swap("before", "after"), change("before", lambda b: b - 1))
def test_what_happens_every_so_often() -> None:
    assert [schedules.passed(0, after, 4) for after in (3, 4, 5, 12)] == [0, 1, 1, 3]
    assert schedules.passed(4, 7, 4) == 0 and schedules.passed(4, 8, 4) == 1


def test_bad_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="the same sign"):
        schedules.exponential(0.5, 1.0, 0.0)
    with pytest.raises(ValueError, match="in order"):
        schedules.piecewise(0.5, ((1.0, 0.0), (0.0, 1.0)))
    with pytest.raises(ValueError, match="in order"):
        schedules.piecewise(0.5, ())
    assert schedules.warmup(0, 0) == 1

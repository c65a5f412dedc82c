"""Random segments of experience with every kind of ending in them, and returns straight from their definitions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Float64 `[B, T]`, consistent: next_value is the next row's value except where the next row is no successor."""

    reward: Tensor
    discount: Tensor
    cut: Tensor
    value: Tensor
    next_value: Tensor
    ratio: Tensor
    mask: Tensor

    def ends(self, b: int, t: int) -> bool:
        """Whether nothing after row t belongs to it."""
        last = t == self.reward.shape[1] - 1
        return last or bool(self.cut[b, t]) or not bool(self.mask[b, t + 1])

    def span(self, b: int, t: int) -> range:
        """The rows from t to the end of its episode or segment."""
        stop = t
        while not self.ends(b, stop):
            stop += 1
        return range(t, stop + 1)


@st.composite
def segments(draw: st.DrawFn, masked: bool = True) -> Segment:
    """Segments with terminations, time limits, rows that are not real and, at times, a change of the mover."""
    rows, steps = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    gamma = draw(st.sampled_from([0.1, 0.9, 1.0]))
    flips = draw(st.booleans())
    often = draw(st.sampled_from([0.0, 0.2, 0.5]))

    def normal() -> Tensor:
        return torch.randn(rows, steps, generator=generator, dtype=torch.float64)

    def events(rate: float) -> Tensor:
        return (torch.rand(rows, steps, generator=generator) < rate).double()

    terminated, limit = events(often), events(often)
    sign = 1 - 2 * events(0.5) if flips else torch.ones(rows, steps, dtype=torch.float64)
    mask = 1 - events(often) if masked else torch.ones(rows, steps, dtype=torch.float64)
    cut = torch.maximum(terminated, limit)
    value = normal()
    next_value = normal()
    inside = (cut == 0) & torch.cat([mask[:, 1:] == 1, torch.zeros(rows, 1, dtype=torch.bool)], 1)
    next_value = torch.where(inside, torch.roll(value, -1, 1), next_value)
    return Segment(normal(), gamma * sign * (1 - terminated), cut, value, next_value, normal().exp(), mask)


def every_row(segment: Segment, row: object) -> Tensor:
    """`row(b, t)` for every real row, and 0 for the others."""
    rows, steps = segment.reward.shape
    result = torch.zeros(rows, steps, dtype=torch.float64)
    for b in range(rows):
        for t in range(steps):
            if segment.mask[b, t]:
                result[b, t] = row(b, t)  # type: ignore[operator]
    return result


def discount_between(segment: Segment, b: int, start: int, stop: int) -> Tensor:
    """discount_start · ... · discount_{stop-1}."""
    return segment.discount[b, start:stop].prod()


def n_step(segment: Segment, b: int, t: int, n: int) -> Tensor:
    """Σ_{k<m} (discounts) · reward_{t+k} + (discounts) · next_value, with m = n or as many as there are."""
    rows = segment.span(b, t)[:n]
    rewards = sum(discount_between(segment, b, t, i) * segment.reward[b, i] for i in rows)
    return rewards + discount_between(segment, b, t, rows[-1] + 1) * segment.next_value[b, rows[-1]]


def lambda_mixture(segment: Segment, b: int, t: int, lam: float) -> Tensor:
    """(1 - λ) Σ_{n<N} λ^{n-1} G⁽ⁿ⁾ + λ^{N-1} G⁽ᴺ⁾, N the rows until the end."""
    count = len(segment.span(b, t))
    head = sum((1 - lam) * lam ** (n - 1) * n_step(segment, b, t, n) for n in range(1, count))
    return head + lam ** (count - 1) * n_step(segment, b, t, count)


def td_error(segment: Segment, b: int, t: int) -> Tensor:
    """reward_t + discount_t · next_value_t - value_t."""
    bootstrap = segment.discount[b, t] * segment.next_value[b, t]
    return segment.reward[b, t] + bootstrap - segment.value[b, t]

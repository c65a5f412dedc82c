"""What must hold between returns, whatever the numbers: each estimator becomes another one in its limits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foresight.ops import returns
from tests.ops.patterns import Segment, segments
from tests.sabotage import change, drop, flip_sign, off_by_one, sabotaged_by, shift, swap

RETURNS = "foresight.ops.returns."
LAMBDAS = st.sampled_from([0.0, 0.5, 0.95, 1.0])
never_cut = change("cut", torch.zeros_like, label="ignore_cut")


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@sabotaged_by(RETURNS + "gae", flip_sign, never_cut, drop("mask"), change("lam", lambda lam: 0.9))
@sabotaged_by(RETURNS + "discounted_return", flip_sign, off_by_one, never_cut, swap("discount", "cut"))
@given(segments())
def test_lambda_1_is_monte_carlo(s: Segment) -> None:
    monte_carlo = returns.discounted_return(s.reward, s.discount, s.cut, s.next_value, s.mask)
    close(returns.lambda_return(s.reward, s.discount, s.cut, s.next_value, 1.0, s.mask), monte_carlo)
    advantage, _ = returns.gae(s.reward, s.discount, s.cut, s.value, s.next_value, 1.0, s.mask)
    close(advantage, monte_carlo - s.value * s.mask)


@sabotaged_by(RETURNS + "gae", flip_sign, shift("next_value"), change("lam", lambda lam: lam + 0.1))
@sabotaged_by(RETURNS + "lambda_return", shift("next_value"), change("lam", lambda lam: lam + 0.1))
@sabotaged_by(RETURNS + "retrace", shift("next_value"), change("lam", lambda lam: lam + 0.1))
@sabotaged_by(RETURNS + "n_step_return", shift("next_value"), change("n", lambda n: n + 1))
@given(segments())
def test_lambda_0_and_one_step_are_td_0(s: Segment) -> None:
    td_0 = (s.reward + s.discount * s.next_value) * s.mask
    close(returns.lambda_return(s.reward, s.discount, s.cut, s.next_value, 0.0, s.mask), td_0)
    close(returns.n_step_return(s.reward, s.discount, s.cut, s.next_value, 1, s.mask), td_0)
    close(returns.gae(s.reward, s.discount, s.cut, s.value, s.next_value, 0.0, s.mask)[1], td_0)
    close(returns.retrace(s.reward, s.discount, s.cut, s.value, s.next_value, s.ratio, 0.0, s.mask), td_0)


@sabotaged_by(RETURNS + "n_step_return", never_cut, drop("mask"), change("n", lambda n: n - 1))
@given(segments())
def test_as_many_steps_as_there_are_is_monte_carlo(s: Segment) -> None:
    steps = s.reward.shape[1]
    monte_carlo = returns.discounted_return(s.reward, s.discount, s.cut, s.next_value, s.mask)
    # One more than there are, so that the twin that takes one step less still has one.
    close(returns.n_step_return(s.reward, s.discount, s.cut, s.next_value, max(steps, 2), s.mask), monte_carlo)


@sabotaged_by(RETURNS + "gae", flip_sign, never_cut, shift("value"), drop("mask"))
@sabotaged_by(RETURNS + "vtrace", flip_sign, never_cut, shift("value"), change("ratio", lambda r: 0.5 * r))
@sabotaged_by(RETURNS + "retrace", flip_sign, never_cut, shift("value"), change("ratio", lambda r: 0.5 * r))
@given(segments(), LAMBDAS)
def test_on_policy_all_targets_are_the_lambda_return(s: Segment, lam: float) -> None:
    ones = torch.ones_like(s.ratio)
    expected = returns.lambda_return(s.reward, s.discount, s.cut, s.next_value, lam, s.mask)
    close(returns.gae(s.reward, s.discount, s.cut, s.value, s.next_value, lam, s.mask)[1], expected)
    close(returns.vtrace(s.reward, s.discount, s.cut, s.value, s.next_value, ones, lam, mask=s.mask)[1], expected)
    close(returns.retrace(s.reward, s.discount, s.cut, s.value, s.next_value, ones, lam, s.mask), expected)


@sabotaged_by(
    RETURNS + "vtrace", flip_sign, never_cut, change("ratio", lambda r: 0.5 * r), change("clip_pg", lambda c: 0.5)
)
@given(segments(), LAMBDAS)
def test_on_policy_vtrace_has_the_advantage_of_gae(s: Segment, lam: float) -> None:
    ones = torch.ones_like(s.ratio)
    expected, _ = returns.gae(s.reward, s.discount, s.cut, s.value, s.next_value, lam, s.mask)
    advantage, _ = returns.vtrace(s.reward, s.discount, s.cut, s.value, s.next_value, ones, lam, mask=s.mask)
    close(advantage, expected)


@sabotaged_by(RETURNS + "gae", never_cut, shift("cut"))
@sabotaged_by(RETURNS + "vtrace", never_cut, shift("cut"))
@sabotaged_by(RETURNS + "retrace", never_cut, shift("cut"))
@given(segments(masked=False), segments(masked=False))
def test_a_cut_is_as_good_as_two_segments(first: Segment, second: Segment) -> None:
    """Episodes in one row of a batch, one after the other, know nothing of each other."""
    rows = min(first.reward.shape[0], second.reward.shape[0])
    steps = first.reward.shape[1]
    pairs = {
        f.name: (getattr(first, f.name)[:rows], getattr(second, f.name)[:rows]) for f in dataclasses.fields(Segment)
    }
    pairs["cut"][0][:, -1] = 1
    joined = Segment(**{name: torch.cat(pair, 1) for name, pair in pairs.items()})
    apart = [Segment(**{name: pair[i] for name, pair in pairs.items()}) for i in range(2)]

    def estimates(s: Segment) -> list[Tensor]:
        common = (s.reward, s.discount, s.cut, s.value, s.next_value)
        return [
            *returns.gae(*common, 0.9),
            *returns.vtrace(*common, s.ratio, 0.9),
            returns.retrace(*common, s.ratio, 0.9),
        ]

    for whole, head, tail in zip(estimates(joined), estimates(apart[0]), estimates(apart[1]), strict=True):
        close(whole[:, :steps], head)
        close(whole[:, steps:], tail)


@sabotaged_by(RETURNS + "gae", drop("mask"))
@sabotaged_by(RETURNS + "vtrace", drop("mask"))
@sabotaged_by(RETURNS + "retrace", drop("mask"))
@sabotaged_by(RETURNS + "n_step_return", drop("mask"))
@given(segments(masked=False), st.integers(1, 4))
def test_padding_changes_nothing(s: Segment, extra: int) -> None:
    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, extra), value=1.0)

    mask = torch.nn.functional.pad(s.mask, (0, extra))
    short = (s.reward, s.discount, s.cut, s.value, s.next_value)
    long = tuple(padded(x) for x in short)
    steps = s.reward.shape[1]
    for name, tail in (("gae", (0.9,)), ("vtrace", (s.ratio,)), ("retrace", (s.ratio,))):
        function = getattr(returns, name)
        expected = function(*short, *tail)
        longer = function(*long, *(padded(x) if isinstance(x, Tensor) else x for x in tail), mask=mask)
        for a, b in zip(longer if isinstance(longer, tuple) else (longer,), _tuple(expected), strict=True):
            close(a[:, :steps], b)
            assert (a[:, steps:] == 0).all()
    three = returns.n_step_return(*long[:3], long[4], 3, mask)
    close(three[:, :steps], returns.n_step_return(*short[:3], short[4], 3))
    assert (three[:, steps:] == 0).all()


def _tuple(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def ends_the_world(discount: Tensor) -> Tensor:
    return discount * 0.0


@sabotaged_by(
    RETURNS + "gae", change("next_value", torch.zeros_like), change("discount", ends_the_world), swap("discount", "cut")
)
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_a_time_limit_is_not_a_termination(lam: float) -> None:
    """Reward 1 for ever at discount 0.98 is worth 50, also if the clock stops every 8 steps: no row is a surprise."""
    ones = torch.ones(2, 24, dtype=torch.float64)
    cut = torch.zeros_like(ones)
    cut[:, 7::8] = 1
    advantage, target = returns.gae(ones, 0.98 * ones, cut, 50 * ones, 50 * ones, lam)
    close(advantage, 0 * ones)
    close(target, 50 * ones)


@sabotaged_by(RETURNS + "retrace", change("ratio", torch.ones_like), flip_sign)
@sabotaged_by(RETURNS + "vtrace", change("clip_rho", lambda c: 0.3), change("ratio", torch.ones_like), flip_sign)
def test_off_policy_targets_are_right_on_average() -> None:
    """Two steps of a two-armed bandit, every path enumerated under the behavior policy."""
    target_policy, behavior = torch.tensor([0.7, 0.3]).double(), torch.tensor([0.5, 0.5]).double()
    first, second = torch.tensor([1.0, 5.0]).double(), torch.tensor([2.0, -4.0]).double()
    true_value = (target_policy * first).sum() + 0.5 * (target_policy * second).sum()
    wrong = torch.tensor(3.0).double()  # the estimate of the second state; the whole trace must correct it
    v_total, q_total = torch.zeros(()).double(), torch.zeros(2).double()
    for a in range(2):
        for b in range(2):
            chance = behavior[a] * behavior[b]
            ratio = (target_policy / behavior)[[a, b]][None]
            reward = torch.stack([first[a], second[b]])[None]
            zeros, discount = torch.zeros(1, 2).double(), torch.tensor([[0.5, 0.0]]).double()
            value = torch.stack([wrong, wrong])[None]
            next_value = torch.stack([wrong, wrong])[None]
            _, target = returns.vtrace(
                reward, discount, zeros, value, next_value, ratio, clip_rho=9.0, clip_c=9.0, mask=None
            )
            v_total += chance * target[0, 0]
            q_total[a] += behavior[b] * returns.retrace(reward, discount, zeros, value, next_value, ratio)[0, 0]
    close(v_total, true_value)
    # Retrace cuts the trace at 1: c(b) = min(1, ratio), with Q = next_value = 3 it moves by Σ_b μ(b) c(b) δ(b).
    trace = (behavior * (target_policy / behavior).clamp(max=1) * (second - wrong)).sum()
    close(q_total, first + 0.5 * (wrong + trace))


@sabotaged_by(RETURNS + "lambda_return", shift("discount"), change("lam", lambda lam: lam + 0.1))
def test_the_lambda_return_of_an_imagined_rollout_is_the_double_sum() -> None:
    """(1 - λ) Σ_n λ^(n-1) G^(n), the last G with the rest; G^(n) is n discounted rewards and the value after them."""
    generator, lam, steps = torch.Generator().manual_seed(0), 0.7, 6
    reward, discount, following = torch.rand(3, 1, steps, generator=generator).double()
    found = returns.lambda_return(reward, discount, torch.zeros_like(reward), following, lam)[0]
    for t in range(steps):
        total = 0.0
        for n in range(1, steps - t + 1):
            reach, partial = 1.0, 0.0
            for k in range(t, t + n):
                partial, reach = partial + reach * float(reward[0, k]), reach * float(discount[0, k])
            weight = lam ** (n - 1) * (1.0 if n == steps - t else 1 - lam)
            total += weight * (partial + reach * float(following[0, t + n - 1]))
        assert abs(total - float(found[t])) < 1e-9

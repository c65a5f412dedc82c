"""Speculative sampling gives the target's distribution, by counting over all that can happen."""

from __future__ import annotations

import itertools

import torch

from foresight.ops.speculation import accepted, distribution, residual
from tests.sabotage import change, sabotaged_by, swap

# q in quarters and p in eighths: every p / q is a multiple of 1/4, so four draws of u stand for all of them.
TARGET = torch.tensor([[4, 3, 1], [0, 2, 6], [5, 2, 1], [3, 3, 2]], dtype=torch.float64) / 8
DRAFT = torch.tensor([[1, 2, 1], [2, 1, 1], [1, 1, 2]], dtype=torch.float64) / 4
UNIFORM = (torch.arange(4, dtype=torch.float64) + 0.5) / 4


def _written(n: int) -> dict[tuple[int, ...], float]:
    """The probability of all that one pass writes from n drafts, cut to its first n + 1 tokens and filled up from p."""
    found: dict[tuple[int, ...], float] = {}
    for drafts in itertools.product(range(3), repeat=n):
        offered = float(torch.stack([DRAFT[i, x] for i, x in enumerate(drafts)]).prod())
        for draws in itertools.product(UNIFORM.tolist(), repeat=n):
            tokens, uniform = torch.tensor(drafts), torch.tensor(draws, dtype=torch.float64)
            kept = int(accepted(TARGET[:n], DRAFT[:n], tokens, uniform))
            assert 0 <= kept <= n
            rest = residual(TARGET[kept], torch.cat([DRAFT[:n], torch.zeros(1, 3)])[kept])
            for token in range(3):
                # What is not written yet is the next pass's: by the target itself.
                for more in itertools.product(range(3), repeat=n - kept):
                    chance = offered / 4**n * float(rest[token])
                    for place, x in enumerate(more, kept + 1):
                        chance *= float(TARGET[place, x])
                    key = (*drafts[:kept], token, *more)
                    found[key] = found.get(key, 0.0) + chance
    return found


@sabotaged_by("foresight.ops.speculation.residual", lambda f: lambda target, draft: target, swap("target", "draft"))
@sabotaged_by("foresight.ops.speculation.accepted", change("uniform", lambda u: 0.5 * u), swap("target", "draft"))
def test_what_is_written_has_the_targets_distribution_exactly():
    for n in (1, 2, 3):
        found = _written(n)
        for key in itertools.product(range(3), repeat=n + 1):
            expected = float(torch.stack([TARGET[i, x] for i, x in enumerate(key)]).prod())
            assert abs(found.get(key, 0.0) - expected) < 1e-12, key


@sabotaged_by(
    "foresight.ops.speculation.accepted", lambda f: lambda t, d, x, u: f(t, d, x, u) * 0, swap("target", "draft")
)
def test_drafts_are_accepted_as_often_as_both_models_agree():
    """The chance of the first draft is Σ min(p, q) (Leviathan et al. 2023, theorem 3.5)."""
    kept = [
        float(DRAFT[0, x]) / 4 * int(accepted(TARGET[:1], DRAFT[:1], torch.tensor([x]), UNIFORM[i, None]))
        for x in range(3)
        for i in range(4)
    ]
    assert abs(sum(kept) - float(torch.minimum(TARGET[0], DRAFT[0]).sum())) < 1e-12


def test_what_the_target_rules_out_is_never_kept():
    kept = accepted(TARGET[1:2], DRAFT[1:2], torch.tensor([0]), torch.zeros(1))  # p = 0, u = 0
    assert int(kept) == 0


def test_a_draft_from_the_target_is_always_accepted():
    uniform = torch.rand(100, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = torch.tensor([0, 1, 2, 2]).expand(100, 4)
    assert (accepted(TARGET.expand(100, 4, 3), TARGET.expand(100, 4, 3), tokens, uniform) == 4).all()
    assert torch.equal(residual(TARGET, TARGET), TARGET)
    assert torch.equal(residual(TARGET, torch.zeros(4, 3)), TARGET)


@sabotaged_by("foresight.ops.speculation.accepted", lambda f: _standing)
def test_one_rejection_ends_all_after_it():
    target = torch.eye(3)[[0, 1, 2, 0]]
    draft = torch.full((4, 3), 1 / 3)
    uniform = torch.full((5, 4), 0.9)
    tokens = torch.tensor([[1, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 2], [0, 0, 2, 0], [0, 1, 1, 0]])
    assert accepted(target.expand(5, 4, 3), draft.expand(5, 4, 3), tokens, uniform).tolist() == [0, 4, 3, 1, 2]


def _standing(target, draft, tokens, uniform):
    """All that pass by themselves, also after a rejection."""
    wanted, offered = (x.gather(-1, tokens[..., None])[..., 0] for x in (target, draft))
    return (uniform * offered < wanted).sum(-1)


@sabotaged_by("foresight.ops.speculation.distribution", change("temperature", lambda t: 1.0))
def test_greedy_is_all_on_the_best():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, 2.0]])
    assert distribution(logits, 0.0).tolist() == [[0, 1, 0], [0, 0, 1]]
    torch.testing.assert_close(distribution(logits, 0.5), (2 * logits).softmax(-1))
    assert distribution(logits.bfloat16(), 1.0).dtype == torch.float32

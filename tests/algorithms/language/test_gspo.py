"""GSPO: one ratio for a whole completion."""

from __future__ import annotations

import torch

from foresight.algorithms.language import gspo
from tests.algorithms.language.group_runs import REWARDS, first_gradients, second_pass
from tests.sabotage import sabotaged_by


def without_length(original):
    return lambda logprob, old, mask: original(logprob, old, mask) ** mask.sum(1, keepdim=True)


def objective(logprob, rewards, length, stopped, batch) -> torch.Tensor:
    """arXiv:2507.18071, eq. 5: at ratio 1 the gradient is that of GRPO."""
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return (advantage * logprob.sum(1) / length).sum() / REWARDS.numel()


@sabotaged_by("foresight.training.microbatch.split", lambda f: lambda *a: [part[:1] for part in f(*a)])
def test_the_first_gradient_is_that_of_the_papers_objective():
    """At ratio 1, before any clip, through the untouched transformers model."""
    for mine, expected in first_gradients(gspo, objective):
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-4)


@sabotaged_by("foresight.ops.policy.sequence_ratio", without_length)
def test_gspo_has_one_ratio_for_a_whole_completion():
    shift = 1e-4 * torch.arange(6.0)
    grad, batch = second_pass(gspo, shift, -1.0)  # a wrong answer: no clip above
    for row, n in zip(grad.flatten(0, 1), batch.length.flatten().tolist(), strict=True):
        s = shift[:n].mean().exp()
        torch.testing.assert_close(row[:n], s.expand(n))  # Σ_t weight 1 · s · 1/n, over n tokens
        assert (row[n:] == 0).all()

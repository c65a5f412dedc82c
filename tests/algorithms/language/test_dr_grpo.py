"""Dr. GRPO: its objective, without a division by lengths or by the spread of rewards."""

from __future__ import annotations

import torch

from foresight.algorithms.language import dr_grpo
from tests.algorithms.language.group_runs import REWARDS, TOKENS, first_gradients
from tests.sabotage import sabotaged_by


def objective(logprob, rewards, length, stopped, batch) -> torch.Tensor:
    """arXiv:2503.20783: centered advantages that are not scaled, and a constant number of tokens."""
    return ((rewards - rewards.mean()) * logprob.sum(1)).sum() / (REWARDS.numel() * TOKENS)


@sabotaged_by("foresight.training.microbatch.split", lambda f: lambda *a: [part[:1] for part in f(*a)])
def test_the_first_gradient_is_that_of_the_papers_objective():
    """At ratio 1, before any clip, through the untouched transformers model."""
    for mine, expected in first_gradients(dr_grpo, objective):
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-4)

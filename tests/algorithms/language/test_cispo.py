"""CISPO: clipped weights that drop no token."""

from __future__ import annotations

import torch

from foresight.algorithms.language import cispo
from tests.algorithms.language.group_runs import first_gradients, second_pass
from tests.sabotage import change, sabotaged_by


def objective(logprob, rewards, length, stopped, batch) -> torch.Tensor:
    """arXiv:2506.13585, eq. 4: scaled advantages, the mean over all tokens of the batch."""
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return (advantage * logprob.sum(1)).sum() / batch.length.sum()


@sabotaged_by("foresight.training.microbatch.split", lambda f: lambda *a: [part[:1] for part in f(*a)])
def test_the_first_gradient_is_that_of_the_papers_objective():
    """At ratio 1, before any clip, through the untouched transformers model."""
    for mine, expected in first_gradients(cispo, objective):
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-4)


@sabotaged_by("foresight.ops.policy.clipped_weight", change("clip_high", lambda _: 0.2))
def test_cispo_drops_no_token_and_bounds_its_weight():
    shift = torch.log(torch.tensor([0.01, 0.5, 1.0, 2.0, 5.0, 50.0]))
    grad, batch = second_pass(cispo, shift, 1.0)
    for row in grad[batch.length == 6]:
        torch.testing.assert_close(-row, torch.tensor([0.01, 0.5, 1.0, 2.0, 5.0, 5.0]))

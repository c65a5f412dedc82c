"""RLOO: the leave-one-out baseline and the KL penalty in the reward."""

from __future__ import annotations

import copy

import torch

from foresight.algorithms.language import rloo
from tests.algorithms.language.group_runs import REWARDS, first_gradients, gradient, plain_logprob, rollout
from tests.sabotage import flip_sign, sabotaged_by, scaled


def objective(logprob, rewards, length, stopped, batch) -> torch.Tensor:
    """arXiv:2402.14740: the baseline of a completion is the mean reward of the others."""
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    return ((rewards - others) * logprob.sum(1)).sum() / REWARDS.numel()


@sabotaged_by("foresight.training.microbatch.split", lambda f: lambda *a: [part[:1] for part in f(*a)])
def test_the_first_gradient_is_that_of_the_papers_objective():
    """At ratio 1, before any clip, through the untouched transformers model."""
    for mine, expected in first_gradients(rloo, objective):
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-4)


@sabotaged_by("foresight.ops.kl.k1", flip_sign, scaled(2.0))
def test_rloo_pays_for_its_distance_from_the_reference_in_the_reward():
    state, batch = rollout(rloo, kl_coef=0.5)
    torch.manual_seed(1)
    for weight in state.reference.parameters():
        weight.mul_(1 + 0.1 * torch.randn_like(weight))
    with torch.no_grad():
        distance = (plain_logprob(state, batch) - state.reference.logprob(batch)[0]).sum(-1)
    shaped = REWARDS - 0.5 * distance
    caught = gradient(rloo, copy.deepcopy(state), batch)
    state.reference = None
    expected = gradient(rloo, state, batch, shaped)
    for a, b in zip(caught, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)

from __future__ import annotations

import pytest
import torch

from foresight.ops import kl, tokens
from tests.sabotage import change, flip_sign, sabotaged_by, scaled, swap


def _plain(logits, chosen, temperature):
    table = torch.distributions.Categorical(logits=logits / temperature)
    return table.log_prob(chosen), table.entropy()


@sabotaged_by("foresight.ops.tokens.token_logprob", flip_sign, scaled(1.01))
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("rows", [1, 64, 150])
def test_it_is_the_log_softmax_and_its_entropy(rows, temperature):
    logits = 5 * torch.randn(rows, 37)
    chosen = torch.randint(37, (rows,))
    logprob, entropy = tokens.token_logprob(logits, chosen, temperature)
    expected, expected_entropy = _plain(logits, chosen, temperature)
    torch.testing.assert_close(logprob, expected)
    torch.testing.assert_close(entropy, expected_entropy)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_its_gradient(temperature):
    logits = torch.randn(70, 5, dtype=torch.float64, requires_grad=True)
    chosen = torch.randint(5, (70,))
    assert torch.autograd.gradcheck(lambda x: tokens.token_logprob(x, chosen, temperature)[0], logits)


def wrong(original):
    return lambda logits, tokens, temperature=1.0: original(logits * 1.0, tokens.flip(0), temperature)


@sabotaged_by("foresight.ops.tokens.token_logprob", wrong)
def test_a_ruled_out_token_is_no_nan():
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [2.0, -torch.inf, 0.0]], requires_grad=True)
    logprob, entropy = tokens.token_logprob(logits, torch.tensor([0, 2]))
    logprob.sum().backward()
    expected = logits.detach()[:, [0, 2]].requires_grad_()
    again, expected_entropy = _plain(expected, torch.tensor([0, 1]), 1.0)
    again.sum().backward()
    torch.testing.assert_close(logprob, again)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(logits.grad[:, [0, 2]], expected.grad)
    assert (logits.grad[:, 1] == 0).all()


def test_narrow_logits_keep_their_type_and_give_wide_answers():
    logits = torch.randn(3, 11).bfloat16().requires_grad_()
    logprob, entropy = tokens.token_logprob(logits, torch.tensor([1, 2, 3]))
    assert logprob.dtype == entropy.dtype == torch.float32
    logprob.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    exact = logits.detach().float().requires_grad_()
    exact.log_softmax(-1)[torch.arange(3), torch.tensor([1, 2, 3])].sum().backward()
    torch.testing.assert_close(logits.grad.float(), exact.grad, atol=4e-3, rtol=1e-2)


@sabotaged_by("foresight.ops.tokens.token_divergence", scaled(1.01), swap("logits", "target"))
@pytest.mark.parametrize("rows", [1, 64, 150])
def test_the_divergence_is_the_exact_one(rows):
    logits, target = 3 * torch.randn(rows, 37), 3 * torch.randn(rows, 37)
    distance, overlap = tokens.token_divergence(logits, target)
    torch.testing.assert_close(distance, kl.categorical(target, logits))
    shared = torch.minimum(logits.softmax(-1), target.softmax(-1)).sum(-1)
    torch.testing.assert_close(overlap, shared)


def test_the_gradient_of_the_divergence():
    target = torch.randn(70, 5, dtype=torch.float64)
    logits = torch.randn(70, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: tokens.token_divergence(x, target)[0], logits)
    assert not tokens.token_divergence(logits, target)[1].requires_grad


@sabotaged_by("foresight.ops.tokens.token_divergence", change("target", lambda z: z.clamp(min=-1.0)))
def test_a_token_that_both_rule_out_adds_nothing():
    logits = torch.tensor([[0.5, -torch.inf, 1.0]], requires_grad=True)
    target = torch.tensor([[2.0, -torch.inf, 0.0]])
    distance, overlap = tokens.token_divergence(logits, target)
    distance.sum().backward()
    torch.testing.assert_close(distance[0], kl.categorical(target[0, [0, 2]], logits[0, [0, 2]]).detach())
    torch.testing.assert_close(logits.grad[0], logits.detach()[0].softmax(-1) - target[0].softmax(-1))
    assert 0 < overlap < 1

"""The compiled loops over rows of logits: each equals the operations that it stands in for, its gradients too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foresight.ops import tokens
from foresight.ops.fused import tokens as fused
from tests.sabotage import change, flip_sign, sabotaged_by, scaled


def _with_gradient(logits: Tensor, temperature: float, entropy_too: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(4, logits.shape[-1], (len(logits),), generator=generator)
    outer, slope = 3 * torch.randn(2, len(logits), generator=generator)
    z = logits.clone().requires_grad_()
    logprob, entropy = tokens.token_logprob(z, chosen, temperature)
    ((logprob * outer).sum() + (entropy * slope).sum() * entropy_too).backward()
    assert z.grad is not None and z.grad.dtype == z.dtype
    return logprob.detach(), entropy.detach(), z.grad


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@sabotaged_by("foresight.ops.fused.tokens.token_logprob", change("temperature", lambda x: 1.1 * x))
@sabotaged_by("foresight.ops.fused.tokens.token_logprob_backward", scaled(1.05), change("slope", torch.zeros_like))
def test_rows_of_logits(dtype: torch.dtype, temperature: float, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(70, 301, generator=generator)).to(dtype)
    logits[:, 3], logits[5, 7:200] = -torch.inf, -torch.inf
    for entropy_too in (True, False):
        found = _with_gradient(logits, temperature, entropy_too)
        with monkeypatch.context() as patch:
            patch.setattr(fused, "able", lambda _: False)
            expected = _with_gradient(logits, temperature, entropy_too)
        assert (found[2][:, 3] == 0).all() and found[2].isfinite().all()
        rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 1e-5)  # a gradient in bfloat16 has 8 bits
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[2], expected[2], rtol=rtol, atol=atol)


def _divergence(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    outer = 3 * torch.randn(len(logits), generator=torch.Generator().manual_seed(1))
    z = logits.clone().requires_grad_()
    distance, overlap = tokens.token_divergence(z, target)
    (distance * outer).sum().backward()
    assert z.grad is not None and z.grad.dtype == z.dtype and not overlap.requires_grad
    return distance.detach(), overlap, z.grad


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@sabotaged_by("foresight.ops.fused.tokens.token_divergence", change("target", lambda z: 1.1 * z))
@sabotaged_by("foresight.ops.fused.tokens.token_divergence_backward", scaled(1.05), change("wanted", torch.zeros_like))
def test_divergences_of_rows(dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    logits, target = ((5 * torch.randn(70, 301, generator=generator)).to(dtype) for _ in range(2))
    logits[:, 3], target[:, 3], target[5, 7:200] = -torch.inf, -torch.inf, -torch.inf
    found = _divergence(logits, target)
    with monkeypatch.context() as patch:
        patch.setattr(fused, "able", lambda _: False)
        expected = _divergence(logits, target)
    assert (found[2][:, 3] == 0).all() and found[2].isfinite().all()
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 1e-5)  # a gradient in bfloat16 has 8 bits
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], expected[2], rtol=rtol, atol=atol)


def test_what_the_target_expects_and_the_logits_rule_out_is_far() -> None:
    logits, target = torch.zeros(2, 9), torch.zeros(2, 9)
    logits[1, 4] = -torch.inf
    distance, _ = tokens.token_divergence(logits, target)
    assert distance[0].abs() < 1e-6 and distance[1] > 1e30
    with pytest.raises(ValueError, match=r"logits of shape \[2, 9\] and a target of \[2, 8\]: they differ"):
        tokens.token_divergence(logits, target[:, 1:])


@sabotaged_by("foresight.ops.tokens.token_logprob", flip_sign)
def test_logits_that_are_no_rows_in_memory() -> None:
    wide = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    found, _ = tokens.token_logprob(wide.T, torch.arange(10) % 6)
    torch.testing.assert_close(found, wide.T.log_softmax(-1)[torch.arange(10), torch.arange(10) % 6])
    found, _ = tokens.token_logprob(wide[:, ::2], torch.zeros(6, dtype=torch.int64))
    torch.testing.assert_close(found, wide[:, ::2].log_softmax(-1)[:, 0])


@sabotaged_by("foresight.ops.tokens.token_logprob", flip_sign)
def test_logits_far_from_0() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) - 1e4
    _, entropy = tokens.token_logprob(logits, torch.tensor([0, 1, 2]))  # Σ p z would lose four digits
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits.double()).entropy().float())


def test_a_logit_that_is_no_number_is_seen() -> None:
    logits = torch.zeros(2, 40)
    logits[1, 11] = torch.nan
    logits.requires_grad_()
    logprob, entropy = tokens.token_logprob(logits, torch.tensor([0, 0]))
    assert logprob.isnan().tolist() == entropy.isnan().tolist() == [False, True]
    logprob.sum().backward()
    assert logits.grad is not None and logits.grad.isnan().any(-1).tolist() == [False, True]


def test_no_rows() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    logprob, entropy = tokens.token_logprob(logits, torch.zeros(0, dtype=torch.int64))
    assert logprob.shape == entropy.shape == (0,)


@pytest.mark.parametrize("chosen", [[0, 5], [-1, 0], [0, 1, 2], [0]])
def test_tokens_outside_the_vocabulary_are_refused(chosen: list[int]) -> None:
    with pytest.raises(IndexError, match="2 from 0 to 4 are needed"):
        tokens.token_logprob(torch.zeros(2, 5), torch.tensor(chosen))

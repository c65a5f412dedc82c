"""The compiled loops of a decoder layer: each is as near to the exact result as the operations it stands in for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from foresight.ops.fused import decoder
from tests.sabotage import change, sabotaged_by

KINDS = pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
THREADS = pytest.mark.parametrize("threads", [1, 2])
Function = Callable[..., Tensor]


def _with_gradients(function: Function, above: Tensor, given: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    given = [x.to(dtype).detach().requires_grad_() for x in given]
    result = function(*given)
    return [result.detach(), *torch.autograd.grad(result, given, above.to(result.dtype))]


def _near(found: Function, twin: Function, above: Tensor, *given: Tensor) -> None:
    """Both with their gradients, against the twin in float64."""
    exact = _with_gradients(twin, above, given, torch.float64)
    here = _with_gradients(found, above, given, given[0].dtype)
    theirs = _with_gradients(twin, above, given, given[0].dtype)
    for one, other, expected in zip(here, theirs, exact, strict=True):
        error, usual = ((x.double() - expected).abs().max().item() for x in (one, other))
        assert error <= 1.5 * usual + 2e-6 * expected.abs().max().item(), (error, usual)
        assert one.shape == expected.shape


def _angles(rows: int, places: int, width: int) -> tuple[Tensor, Tensor]:
    angles = 6 * torch.rand(rows, places, width // 2, generator=torch.Generator().manual_seed(2))
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()


@KINDS
@THREADS
@sabotaged_by("foresight.ops.fused.decoder.rotated", change("sin", lambda x: -x))
def test_rotated_heads(kind: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    cos, sin = _angles(2, 5, 8)
    for heads in (torch.randn(2, 5, 3, 8, generator=generator), torch.randn(2, 3, 5, 8).transpose(1, 2)):
        heads = heads.to(kind)

        def twin(x: Tensor) -> Tensor:
            turned, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos.to(x), sin.to(x))
            return turned.to(torch.promote_types(x.dtype, torch.float32))

        above = torch.randn(2, 3, 5, 8, generator=generator)
        _near(lambda x: decoder.rotated(x, cos, sin), twin, above, heads)
        assert decoder.rotated(heads, cos, sin).dtype == torch.float32


@KINDS
@THREADS
@sabotaged_by("foresight.ops.fused.decoder.rms_norm", change("eps", lambda x: 3 * x))
def test_rms_norm(kind: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 33, generator=generator) * torch.tensor([0.01, 1.0, 30.0]).view(3, 1, 1)
    gain, above = torch.rand(33, generator=generator) + 0.5, torch.randn(3, 7, 33, generator=generator)

    def twin(x: Tensor, gain: Tensor) -> Tensor:
        return torch.rms_norm(x, (33,), gain, 1e-3)

    _near(lambda x, gain: decoder.rms_norm(x, gain, 1e-3, kind), twin, above, x.to(kind), gain.to(kind))
    narrow = decoder.rms_norm(x, gain, 1e-3, torch.bfloat16)  # of a stream in float32, for a product in bfloat16
    assert torch.equal(narrow, decoder.rms_norm(x, gain, 1e-3, torch.float32).bfloat16())
    assert torch.equal(
        decoder.rms_norm(x[:1, :2], gain, 1e-3, torch.float32), decoder.rms_norm(x, gain, 1e-3, torch.float32)[:1, :2]
    )


@KINDS
@THREADS
@sabotaged_by("foresight.ops.fused.decoder.swiglu", change("up", lambda x: 1.05 * x), change("gate", torch.sigmoid))
def test_swiglu(kind: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    gate, up, above = 4 * torch.randn(3, 2, 6, 20, generator=torch.Generator().manual_seed(0))
    gate[0, 0], gate[0, 1] = 100.0, -100.0
    _near(decoder.swiglu, lambda gate, up: functional.silu(gate) * up, above, gate.to(kind), up.to(kind))
    empty = torch.zeros(0, 20, requires_grad=True)
    assert not decoder.able(empty)


@KINDS
@THREADS
@sabotaged_by("foresight.ops.fused.decoder.normed", change("eps", lambda eps: 2 * eps), change("gain", lambda x: 2 * x))
def test_a_branch_is_added_to_the_stream_and_the_sum_normalized(
    kind: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    x, branch = torch.randn(5, 2, 40, generator=generator).to(kind), torch.randn(5, 2, 40, generator=generator)
    branch, gain, before = branch.bfloat16(), torch.rand(40, generator=generator), x.clone()
    for more, expected in ((branch, (x.double() + branch.double()).to(kind)), (None, x)):
        total, found = decoder.normed(x, gain.numpy(), 0.3, more)
        assert torch.equal(total, expected) and torch.equal(x, before)
        exact = functional.rms_norm(expected.double(), (40,), gain.double(), 0.3)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


@KINDS
@THREADS
@sabotaged_by("foresight.ops.fused.decoder.gated", change("both", lambda x: x.flip(-1)))
def test_a_gate_and_what_it_gates_in_one_tensor(
    kind: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    both = (3 * torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(0))).to(kind)
    gate, up = both.double().chunk(2, -1)
    found = decoder.gated(both)
    assert found.dtype == kind
    rtol = 1e-5 if kind == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), functional.silu(gate) * up, rtol=rtol, atol=1e-6)

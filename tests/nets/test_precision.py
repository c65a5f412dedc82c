"""Which numbers matrices are multiplied in."""

from __future__ import annotations

import pytest
import torch

from foresight.errors import UserError
from foresight.nets import precision


@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_the_faster(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "fast_bfloat16", lambda device: fast)
    assert precision.dtype("auto", "cpu") is (torch.bfloat16 if fast else None)
    assert precision.dtype("bfloat16", "cpu") is torch.bfloat16 and precision.dtype("float32", "cpu") is None


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UserError, match="bfloat16"):
        precision.dtype("bfloat", "cpu")


@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_that_only_emulates_bfloat16_computes_in_float32(native, monkeypatch):
    """T4, V100: torch counts emulation as support unless it is asked not to."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert precision.dtype("auto", "cuda") is (torch.bfloat16 if native else None)

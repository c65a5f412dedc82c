"""Activation checkpointing: RMSNorm (in under half the time) and SwiGLU that save less; recomputed layers (slower)."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
MLPS = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        result, scale = _normed(x, weight, eps, dtype)
        ctx.save_for_backward(x, weight, scale)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        normed, grad = x.float() * scale, grad.float()
        trained = ctx.needs_input_grad[1]
        to_weight = (grad * normed).sum_to_size(weight.shape).to(weight.dtype) if trained else None
        inner = grad * weight
        along = (inner * normed).mean(-1, keepdim=True)
        return inner.sub_(normed.mul_(along)).mul_(scale).to(x.dtype), to_weight, None, None


def _normed(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(dtype), scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w · x / √(mean x² + ε) (Zhang and Sennrich 2019, eq. 4) of x `[..., D]` and w `[D]`, computed in float32.

    The result `[..., D]` has the dtype of x, or autocast's if that is on: it feeds matrix products.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps, dtype)  # type: ignore[no-untyped-call]  # torch's
    return _normed(x, weight, eps, dtype)[0]  # decoding: many norms, each too short for autograd's overhead


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), grad * functional.silu(gate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020, arXiv:2002.05202, eq. 6) of equal shapes; silu(gate) is not saved."""
    found: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]  # torch's
    return found


def use(module: nn.Module) -> None:
    """Replace the usual RMSNorms of a transformers model by `rms_norm`, and the usual MLPs by those with `swiglu`."""
    for part in module.modules():  # methods of `part`, so that a deep copy gets its own
        if type(part).__name__ in NORMS:
            part.forward = MethodType(_norm, part)
        elif type(part).__name__ in MLPS and type(part.act_fn).__name__ in ("SiLU", "SiLUActivation"):
            part.forward = MethodType(_mlp, part)


def layers(module: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model, from the last to the first, so that one inside another comes before it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)][::-1]


def recompute(module: nn.Module) -> None:
    """Gradient checkpointing: each layer of a transformers model saves only its input and is recomputed in backward.

    Chen et al. 2016 (arXiv:1604.06174). The result is identical: nothing in a layer is random, since dropout is off.
    """
    for layer in layers(module):
        layer.forward = MethodType(_again, layer)


def _again(self: Any, *args: Any, **kwargs: Any) -> Any:
    run = functools.partial(type(self).forward, self)
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _norm(self: Any, x: Tensor) -> Tensor:
    return rms_norm(x, self.weight, self.variance_epsilon)


def _mlp(self: Any, x: Tensor) -> Tensor:
    down: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
    return down

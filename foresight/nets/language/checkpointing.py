"""The parts of a transformer in training: faster ones that save less, and activation checkpointing, which is slower."""

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
ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
SILU = ("SiLU", "SiLUActivation")  # activations of torch and of transformers
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
    from foresight.ops.fused import decoder  # late: numba is slow to import

    dtype = _dtype(x)
    if _many(x) and decoder.able(x, weight) and dtype in decoder.KINDS:
        return decoder.rms_norm(x, weight, eps, dtype)
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps, dtype)  # type: ignore[no-untyped-call]  # torch's
    return _normed(x, weight, eps, dtype)[0]  # decoding: many norms, each too short for autograd's overhead


def _many(x: Tensor) -> bool:
    """Whether x `[..., T, D]` has several places: torch's operations are as fast in a step of decoding, which has one.

    It must not depend on the gradient: a policy and its reference are computed in the same way.
    """
    return x.dim() > 1 and x.shape[-2] > 1


def _dtype(x: Tensor) -> torch.dtype:
    """That of the matrix products of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


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
    from foresight.ops.fused import decoder  # late: numba is slow to import

    if _many(gate) and decoder.able(gate, up) and (gate.shape, gate.dtype) == (up.shape, up.dtype):
        return decoder.swiglu(gate, up)
    found: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]  # torch's
    return found


def use(module: nn.Module) -> None:
    """Have the usual parts of a transformers model save less: `rms_norm`, MLPs with `swiglu`, attention over a tree."""
    for part in module.modules():  # methods of `part`, so that a deep copy gets its own
        if type(part).__name__ in NORMS:
            part.forward = MethodType(_norm, part)
        elif type(part).__name__ in MLPS and type(part.act_fn).__name__ in SILU:
            part.forward = MethodType(_mlp, part)
        elif type(part).__name__ in ATTENTIONS:
            part.forward = MethodType(_attention, part)


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


def _attention(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *args: Any, **options: Any
) -> Any:
    """The layer's own forward; over a tree of tokens on a CPU, heads are turned by one compiled loop."""
    from foresight.nets.language import tree_attention
    from foresight.nets.language.tokentree import TokenTree
    from foresight.ops.fused import decoder  # late: numba is slow to import

    cos, sin = position_embeddings
    usual = isinstance(options.get("tree"), TokenTree) and _many(hidden_states) and cos.dtype == torch.float32
    whole = cos.shape == (*hidden_states.shape[:2], self.head_dim)
    if not (usual and whole) or hidden_states.device.type != "cpu" or _dtype(hidden_states) not in decoder.KINDS:
        return type(self).forward(self, hidden_states, position_embeddings, *args, **options)
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (project(hidden_states).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
    query, key = decoder.rotated(query, cos, sin), decoder.rotated(key, cos, sin)
    options["attention_mask"] = None  # the tree is the mask
    mixed, weights = tree_attention.tree_attention(
        self, query, key, value.transpose(1, 2), scaling=self.scaling, **options
    )
    return self.o_proj(mixed.flatten(2)), weights

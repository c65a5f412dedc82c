"""The natural gradient: matrix-free products with the curvature, and conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]  # `[N]` to `[N]`, linear


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors concatenated into one vector `[N]`."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def curvature(divergence: Tensor, parameters: Sequence[Tensor], damping: float = 0.0) -> Product:
    """The product v ↦ (F + damping · I) v, where F is the Hessian of `divergence` with respect to `parameters`.

    Shapes: `divergence` a scalar, twice differentiable in the parameters, which have N elements in all; v `[N]`.
    Two backward passes per product, no matrix is formed (Pearlmutter 1994). Where `divergence` is the mean of
    KL(π_old ‖ π) at π = π_old, F is the Fisher information matrix (Schulman et al. 2015, arXiv:1502.05477,
    appendix C).
    """
    gradient = flatten(torch.autograd.grad(divergence, parameters, create_graph=True))

    def product(v: Tensor) -> Tensor:
        parts = torch.autograd.grad(gradient @ v, parameters, retain_graph=True)
        return flatten(parts) + damping * v

    return product


def conjugate_gradient(product: Product, b: Tensor, iterations: int = 10, tolerance: float = 1e-10) -> Tensor:
    """x with A x ≈ b, for the symmetric positive definite A that `product` multiplies by.

    Shapes: b `[N]`; returns `[N]`. Starts at 0 and stops after `iterations`, or when the squared norm of the
    residual b - A x is below `tolerance`. Exact up to rounding after N iterations, and x·b ≥ 0 after any number.
    Source: Hestenes & Stiefel 1952.

    Becomes one step of steepest descent, b · (b·b) / (b·A b), when iterations is 1.
    """
    x = torch.zeros_like(b)
    residual, direction = b.clone(), b.clone()
    square = residual @ residual
    for _ in range(iterations):
        if square <= tolerance:
            break
        image = product(direction)
        step = square / (direction @ image)
        x = x + step * direction
        residual = residual - step * image
        previous, square = square, residual @ residual
        direction = residual + square / previous * direction
    return x

"""The natural gradient: products with a curvature that is never written down, and a solver that needs only these."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]  # `[N]` to `[N]`, linear


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors as one vector `[N]`, one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def curvature(divergence: Tensor, parameters: Sequence[Tensor], damping: float = 0.0) -> Product:
    """The product v ↦ (F + damping · I) v, where F is the Hessian of `divergence` with respect to `parameters`.

    Shapes: `divergence` a scalar that depends on the parameters, N numbers in all, twice differentiably; v `[N]`.
    Two backward passes a product, and no matrix (Pearlmutter 1994). Where `divergence` is the mean of
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

    Shapes: b `[N]`; returns `[N]`. Starts at 0 and ends after `iterations`, or where the squared length of the
    residual b - A x is below `tolerance`. Exact after N iterations but for rounding, and after any number x does not
    point away from b. Source: Hestenes & Stiefel 1952.

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

"""A mixture of experts in place of a transformer's MLP: a router sends every token to its top-k experts.

There is no capacity limit: no token is dropped, and the output for a token does not depend on the rest of the batch, so
a batch can be split, packed and cached as with any other layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresight.nets.language.checkpointing import swiglu
from foresight.ops import routing


class Routing(NamedTuple):
    """The routing of the N tokens of a batch: affinities `[N, E]`, which sum to 1, and the experts chosen, `[N, K]`."""

    affinity: Tensor
    chosen: Tensor

    @property
    def load(self) -> Tensor:
        """The share of the choices of each expert, `[E]`."""
        return routing.load(self.chosen, self.affinity.shape[-1])

    @property
    def balance(self) -> Tensor:
        """The auxiliary loss of Switch, a scalar: 1 where the load is even."""
        return routing.balance_loss(self.affinity, self.chosen)


class MixtureOfExperts(nn.Module):
    """E SwiGLU experts of `hidden` features, K of which compute a token: y = Σ_k w_k · down_k(silu(gate_k x) · up_k x).

    The affinities are the softmax of a linear router. `bias` is that of loss-free balancing; it is saved, and 0 until
    `rebalance` is called. Sources: Shazeer et al. 2017 (arXiv:1701.06538), Fedus et al. 2021 (arXiv:2101.03961).
    """

    bias: Tensor

    def __init__(self, dim: int, hidden: int, experts: int, chosen: int) -> None:
        """Raises ValueError unless `chosen` is from 1 to `experts`."""
        super().__init__()
        if not 1 <= chosen <= experts:
            raise ValueError(f"Cannot choose {chosen} of {experts} experts: chosen must be from 1 to {experts}.")
        self.experts, self.chosen = experts, chosen
        self.router = nn.Parameter(torch.empty(experts, dim))
        self.up = nn.Parameter(torch.empty(experts, 2 * hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))
        self.register_buffer("bias", torch.zeros(experts))
        for weight in (self.router, self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def route(self, x: Tensor) -> tuple[Routing, Tensor]:
        """The routing of tokens `[N, D]`, and the weights `[N, K]` of their experts; in float32, for near ties."""
        with torch.autocast(x.device.type, enabled=False):
            affinity = functional.linear(x.float(), self.router.float()).softmax(-1)
        chosen, weights = routing.top_experts(affinity, self.chosen, self.bias)
        return Routing(affinity, chosen), weights

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """`[..., D]` to `[..., D]`, and the routing."""
        flat = x.reshape(-1, x.shape[-1])
        routed, weights = self.route(flat)
        parts, places = [], []
        for expert in range(self.experts):
            place, rank = (routed.chosen == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(flat[place], self.up[expert]).chunk(2, -1)
            parts.append(functional.linear(swiglu(gate, up), self.down[expert]) * weights[place, rank, None])
            places.append(place)
        rows = torch.cat(parts)
        total = torch.zeros_like(flat, dtype=rows.dtype).index_add(0, torch.cat(places), rows)
        return total.view(x.shape).to(x.dtype), routed

    @torch.no_grad()
    def rebalance(self, load: Tensor, rate: float) -> None:
        """One step of loss-free balancing with the load `[E]` of a whole batch, after its gradient step."""
        self.bias.copy_(routing.balanced_bias(self.bias, load.to(self.bias), rate))

"""GTrXL: Stabilizing Transformers for Reinforcement Learning, Parisotto et al. 2019 (arXiv:1910.06764).

    Y  = RelativeAttention(LayerNorm([memory, E]))       E  = gate(E, relu(Y))
    F  = MLP(LayerNorm(E))                               E' = gate(E, relu(F))

Kept: layer norm on the branch inputs with an identity residual stream ("identity map reordering"), ReLU on the
branches, GRU gates with bias 2, so that a layer starts near the identity and the policy as one without memory, the
relative positions of Transformer-XL (Dai et al. 2019, arXiv:1901.02860), and its memory: the inputs of every layer at
the last `window` steps, without gradient. Left out: the depth (12 layers, memory of 512 steps), which is configurable.

A step sees exactly the `window` steps before it in its episode, whether they are in the memory or in the sequence, so
reading a sequence at once gives the same result as reading it step by step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from foresight.errors import UserError
from foresight.nets.mlp import orthogonal
from foresight.nets.sequence.attention import softmax
from foresight.nets.sequence.window import slide, still_filled, visible


class Gate(nn.Module):
    """The GRU gate (§3.2), which mixes the branch `y` into the stream `x`.

    r = σ(W_r y + U_r x),  z = σ(W_z y + U_z x - b),  h = tanh(W_g y + U_g (r ⊙ x)),  g(x, y) = (1 - z) ⊙ x + z ⊙ h
    """

    def __init__(self, size: int, bias: float = 2.0) -> None:
        super().__init__()
        self.branch = nn.Linear(size, 3 * size, bias=False)  # W_r, W_z, W_g
        self.stream = nn.Linear(size, 2 * size, bias=False)  # U_r, U_z
        self.reset = nn.Linear(size, size, bias=False)  # U_g
        self.bias = nn.Parameter(torch.full((size,), bias))
        for linear in (self.branch, self.stream, self.reset):
            for square in linear.weight.detach().split(size):
                nn.init.orthogonal_(square)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The stream `[..., size]` after the branch `y` `[..., size]`."""
        to_reset, to_update, to_new = self.branch(y).chunk(3, -1)
        from_reset, from_update = self.stream(x).chunk(2, -1)
        reset = torch.sigmoid(to_reset + from_reset)
        update = torch.sigmoid(to_update + from_update - self.bias)
        return torch.lerp(x, torch.tanh(to_new + self.reset(reset * x)), update)


class RelativeAttention(nn.Module):
    """Attention whose scores are (q + u)·k + (q + v)·r, with r the key of the distance (arXiv:1901.02860, §3.3)."""

    distances: Tensor

    def __init__(self, size: int, heads: int, window: int) -> None:
        super().__init__()
        if size % heads or size % 2:
            raise UserError(f"The size of GTrXL must be even and a multiple of its {heads} heads, not {size}.")
        self.heads, self.width = heads, size // heads
        self.query, self.key_value, self.out, self.distance_key = (
            orthogonal(nn.Linear(size, n, bias=False), 1.0) for n in (size, 2 * size, size, size)
        )
        self.content_bias = nn.Parameter(torch.zeros(heads, self.width))  # u
        self.distance_bias = nn.Parameter(torch.zeros(heads, self.width))  # v
        self.register_buffer("distances", _sinusoids(window, size), persistent=False)

    def forward(self, x: Tensor, seen: Tensor, allowed: Tensor) -> Tensor:
        """Attention of steps `x` `[B, T, size]` over `seen` `[B, W + T, size]`, whose last T are the steps themselves.

        `allowed` `[B, T, W + T]` (bool) comes from `visible`.
        """
        batch, steps, _ = x.shape
        query = self.query(x).view(batch, steps, self.heads, self.width).transpose(1, 2)
        key, value = self.key_value(seen).view(batch, -1, 2, self.heads, self.width).permute(2, 0, 3, 1, 4)
        distance = self.distance_key(self.distances).view(-1, self.heads, self.width).permute(1, 2, 0)
        content = (query + self.content_bias[:, None]) @ key.transpose(-1, -2)
        position = _skew((query + self.distance_bias[:, None]) @ distance)
        scores = (content + position) / math.sqrt(self.width)
        weights = softmax(scores.masked_fill(~allowed[:, None], -math.inf))  # every step sees at least itself
        return self.out((weights @ value).transpose(1, 2).reshape(batch, steps, -1))


class Layer(nn.Module):
    """Attention and MLP, each with pre-norm, ReLU and a gate into the stream."""

    def __init__(self, size: int, heads: int, window: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = RelativeAttention(size, heads, window)
        self.attention_gate, self.mlp_gate = Gate(size), Gate(size)
        self.mlp = nn.Sequential(orthogonal(nn.Linear(size, hidden)), nn.ReLU(), orthogonal(nn.Linear(hidden, size)))

    def forward(self, x: Tensor, memory: Tensor, allowed: Tensor) -> Tensor:
        """The stream `[B, T, size]` after this layer; `memory` `[B, W, size]` is its earlier input."""
        seen = self.attention_norm(torch.cat([memory, x], 1))
        attended = self.attention(seen[:, memory.shape[1] :], seen, allowed)
        x = self.attention_gate(x, torch.relu(attended))
        return self.mlp_gate(x, torch.relu(self.mlp(self.mlp_norm(x))))


class GTrXL(nn.Module):
    """`layers` of gated attention over the last `window` steps: `[B, T, inputs]` to `[B, T, size]`.

    `hidden` is the width inside the MLPs (None: 4 `size`). Raises UserError if `size` is odd or no multiple of `heads`.
    """

    def __init__(
        self, inputs: int, size: int, layers: int = 1, heads: int = 4, window: int = 64, hidden: int | None = None
    ) -> None:
        super().__init__()
        self.size, self.window = size, window
        self.embed = orthogonal(nn.Linear(inputs, size), 1.0)
        self.layers = nn.ModuleList(Layer(size, heads, window, hidden or 4 * size) for _ in range(layers))

    def initial(self, batch: int) -> dict[str, Tensor]:
        """The carry of `batch` rows before the first step: zeros."""
        memory = self.embed.weight.new_zeros(batch, self.window, len(self.layers), self.size)
        return {"memory": memory, "filled": torch.zeros(memory.shape[:2], dtype=torch.bool, device=memory.device)}

    def forward(
        self, x: Tensor, carry: dict[str, Tensor], start: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `Recurrent.forward`."""
        steps = x.shape[1]
        if start is not None and not start.any():
            start = None
        allowed = visible(carry["filled"], start, steps)
        h, inputs = self.embed(x), []
        for layer, memory in zip(self.layers, carry["memory"].unbind(2), strict=True):
            inputs.append(h.detach())
            h = layer(h, memory, allowed)
        after = {
            "memory": slide(carry["memory"], torch.stack(inputs, 2)),
            "filled": still_filled(carry["filled"], start, steps),
        }
        return h, after


def _sinusoids(window: int, size: int) -> Tensor:
    """Features of the distances W, W - 1, ..., 0, `[W + 1, size]` (Vaswani et al. 2017, arXiv:1706.03762, §3.5)."""
    distance = torch.arange(window + 1).sub(window).neg()[:, None].float()
    angle = distance * 10_000.0 ** (-torch.arange(0, size, 2).float() / size)
    return torch.cat([angle.sin(), angle.cos()], 1)


def _skew(scores: Tensor) -> Tensor:
    """Scores by distance `[..., T, W + 1]` (W first) as scores by slot `[..., T, W + T]`: row t is shifted by t.

    Slots further back than W, or in the future, get arbitrary values: `allowed` masks them.
    """
    *lead, steps, distances = scores.shape
    wide = torch.nn.functional.pad(scores, (0, steps)).flatten(-2)
    return wide[..., : steps * (distances + steps - 1)].view(*lead, steps, distances + steps - 1)

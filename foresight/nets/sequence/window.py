"""A causal transformer that reads the last `window` steps of its own episode, as a policy's memory.

The carry is tensors `[B, ...]`; zeros are an empty window. Reading a sequence at once gives the same result as reading
it step by step: each step sees the same slots, those of the carry and those of the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foresight.errors import UserError
from foresight.nets.sequence.transformer import Cache, Transformer, TransformerConfig, rotary_angles


def visible(filled: Tensor, start: Tensor | None, steps: int) -> Tensor:
    """Which slots each of T = `steps` steps sees, `[B, T, W + T]` bool: W slots of the carry, then T of the steps.

    A step sees itself and at most the W steps before it in its own episode. `filled` `[B, W]` is true where a slot
    holds a step of the episode that the sequence continues; `start` `[B, T]` is 1 at the first step of an episode.
    """
    batch, window = filled.shape
    step = torch.arange(steps, device=filled.device)[:, None]
    slot = torch.arange(window + steps, device=filled.device)
    near = (slot >= step) & (slot <= step + window)  # step t is in slot t + W
    if start is None:
        new = filled.new_ones(batch, steps)
        return near & torch.cat([filled, new], 1)[:, None]
    episode = start.long().cumsum(1)
    past = (episode == 0)[:, :, None] & filled[:, None]
    return near & torch.cat([past, episode[:, :, None] == episode[:, None]], 2)


def still_filled(filled: Tensor, start: Tensor | None, steps: int) -> Tensor:
    """`filled` `[B, W]` after T = `steps` steps: true where a slot holds a step of the last step's episode."""
    if start is None:
        return slide(filled, filled.new_ones(filled.shape[0], steps))
    episode = start.long().cumsum(1)
    last = episode[:, -1:]
    return slide(filled & (last == 0), episode == last)


def slide(past: Tensor, new: Tensor) -> Tensor:
    """The last W of `[B, W, ...]` followed by `[B, T, ...]`."""
    window = past.shape[1]
    return torch.cat([past[:, new.shape[1] :], new[:, max(0, new.shape[1] - window) :]], 1)


class Window(nn.Module):
    """`layers` of `nets.sequence.transformer` blocks with rotary positions: `[B, T, inputs]` to `[B, T, size]`.

    The carry holds the keys and values of the last `window` steps. Raises UserError unless `size` is an even multiple
    of `heads`.
    """

    def __init__(self, inputs: int, size: int, layers: int = 1, heads: int = 4, window: int = 64) -> None:
        super().__init__()
        if size % (2 * heads):
            raise UserError(f"The memory's size must be an even multiple of {heads} heads, not {size}.")
        self.size, self.window = size, window
        self.embed = nn.Linear(inputs, size)
        self.net = Transformer(TransformerConfig(layers=layers, dim=size, heads=heads, norm="layer", activation="gelu"))

    def initial(self, batch: int) -> dict[str, Tensor]:
        """The carry of `batch` rows before the first step: zeros."""
        config, like = self.net.config, self.embed.weight
        shape = (batch, self.window, config.layers, config.kv, config.head_width)
        filled = torch.zeros(batch, self.window, dtype=torch.bool, device=like.device)
        count = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return {"keys": like.new_zeros(shape), "values": like.new_zeros(shape), "filled": filled, "count": count}

    def forward(
        self, x: Tensor, carry: dict[str, Tensor], start: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `Recurrent.forward`."""
        config, steps = self.net.config, x.shape[1]
        if start is not None and not start.any():
            start = None
        position = _positions(carry["count"], start, steps)
        angles = rotary_angles(position, config.head_width, config.rope_base)
        allowed = visible(carry["filled"], start, steps)[:, None]
        past = [carry[part].permute(2, 0, 3, 1, 4) for part in ("keys", "values")]  # layers, B, heads, W, head_width
        cache = Cache(tuple(past[0]), tuple(past[1]), None, self.window, False)
        h, keys, values = self.embed(x), [], []
        for layer, block in enumerate(self.net.blocks):
            h, key, value = block(h, angles, allowed, cache, layer)
            keys.append(key[:, :, -self.window :].detach())
            values.append(value[:, :, -self.window :].detach())
        after = {
            "keys": torch.stack(keys, 2).permute(0, 3, 2, 1, 4),
            "values": torch.stack(values, 2).permute(0, 3, 2, 1, 4),
            "filled": still_filled(carry["filled"], start, steps),
            "count": position[:, -1] + 1,
        }
        return self.net.norm(h), after


def _positions(count: Tensor, start: Tensor | None, steps: int) -> Tensor:
    """How many steps of its episode precede each step, `[B, T]`; `count` `[B]` precede the first."""
    step = torch.arange(steps, device=count.device)
    if start is None:
        return count[:, None] + step
    began = torch.where(start > 0, step, -count[:, None]).cummax(1).values
    return step - began

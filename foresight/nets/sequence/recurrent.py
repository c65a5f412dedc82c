"""LSTM and GRU with the hidden state as an explicit carry, reset inside a sequence where an episode starts.

Hochreiter & Schmidhuber 1997 (Neural Computation 9(8)); Cho et al. 2014 (arXiv:1406.1078).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from foresight import errors

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU}


class Recurrent(nn.Module):
    """`layers` of a recurrent net of `kind` 'lstm' or 'gru': `[B, T, inputs]` to `[B, T, size]`.

    Orthogonal initial weights, zero biases (PPO details 32 and 33). Raises UserError for another kind.
    """

    def __init__(self, kind: str, inputs: int, size: int, layers: int = 1) -> None:
        super().__init__()
        if kind not in KINDS:
            raise errors.unknown("recurrent net", kind, KINDS)
        self.size, self.layers, self.parts = size, layers, ("hidden", "cell") if kind == "lstm" else ("hidden",)
        self.net = KINDS[kind](inputs, size, layers, batch_first=True)
        for name, parameter in self.net.named_parameters():
            if "weight" in name:
                for gate in parameter.detach().split(size):
                    nn.init.orthogonal_(gate)
            else:
                nn.init.zeros_(parameter)

    def initial(self, batch: int) -> dict[str, Tensor]:
        """The carry of `batch` rows before the first step: zeros, `[B, layers, size]` each."""
        like = next(self.net.parameters())
        return {part: like.new_zeros(batch, self.layers, self.size) for part in self.parts}

    def forward(
        self, x: Tensor, carry: dict[str, Tensor], start: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Read `x` `[B, T, inputs]`; returns the features `[B, T, size]` and the carry after the last step.

        `start` `[B, T]` is 1 at the first step of an episode: the state is reset before that step is read.
        """
        states = [carry[part].transpose(0, 1) for part in self.parts]
        if start is None or not start.any():
            y, after = self._run(x, states)
            return y, self._carry(after)
        batch, steps = start.shape
        index, sizes, begins, last = _segments(start)
        continues = (begins % steps == 0) & (start.flatten()[begins] == 0)  # segments that start from the carry
        states = [state[:, begins // steps] * continues[:, None] for state in states]
        packed, after = self._run(PackedSequence(x.flatten(0, 1)[index], sizes.cpu()), states)
        y = packed.data[index.argsort()].view(batch, steps, self.size)
        return y, self._carry([state[:, last] for state in after])

    def _run(self, x: Tensor | PackedSequence, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        states = [state.contiguous() for state in states]
        y, after = self.net(x, tuple(states) if len(states) == 2 else states[0])
        return y, [after] if len(states) == 1 else list(after)

    def _carry(self, states: list[Tensor]) -> dict[str, Tensor]:
        return {part: state.transpose(0, 1) for part, state in zip(self.parts, states, strict=True)}


def _segments(start: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The layout of `[B, T]` steps, flattened, in a packed sequence of the N segments between episode starts.

    Returns the step at each place of the packed sequence `[B T]`; how many segments have a first step, a second, ...;
    the first step of each segment `[N]`, longest first; and the last segment of each batch row `[B]`.
    """
    first = start > 0
    first[:, 0] = True
    flat = first.flatten()
    segment, begins = flat.cumsum(0) - 1, flat.nonzero().squeeze(-1)
    place = torch.arange(len(flat), device=start.device) - begins[segment]
    order = segment.bincount().argsort(descending=True, stable=True)
    rank = order.argsort()
    index = (place * len(begins) + rank[segment]).argsort()
    last = rank[segment.view_as(start)[:, -1]]
    return index, place.bincount(), begins[order], last

"""A language model with one number in place of the vocabulary: a critic of every token, a judge of whole answers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foresight.data.text import TokenBatch
from foresight.nets.language.model import LanguageModel


class Scorer(nn.Module):
    """The trunk of a language model and a linear map to a scalar, in float32 whatever the trunk computes in."""

    def __init__(self, trunk: LanguageModel) -> None:
        super().__init__()
        self.trunk = trunk

    @property
    def head(self) -> nn.Linear:
        """The map from the hidden state to the number."""
        return self.trunk.module.score  # type: ignore[no-any-return]

    def reset(self, std: float, generator: torch.Generator | None = None) -> None:
        """Draw the head anew from a normal distribution; 0 makes every score 0."""
        with torch.no_grad():
            self.head.weight.copy_(std * torch.randn(self.head.weight.shape, generator=generator))

    def values(self, batch: TokenBatch) -> Tensor:
        """The value `[P, G, T]` of what stands *before* each token: row t is the state in which token t was chosen."""
        return self._numbers(batch, after=False)

    def scores(self, batch: TokenBatch) -> Tensor:
        """The score `[P, G]` of each whole completion, read at its last token: found by length, not by padding."""
        return self.steps(batch).gather(-1, (batch.length.to(self.trunk.device) - 1)[..., None])[..., 0]

    def steps(self, batch: TokenBatch) -> Tensor:
        """The score `[P, G, T]` of a completion up to and with each token."""
        return self._numbers(batch, after=True)

    def _numbers(self, batch: TokenBatch, after: bool) -> Tensor:
        with self.trunk.precision():
            hidden = self.trunk.contexts(batch, after)
        with torch.autocast(hidden.device.type, enabled=False):
            numbers = hidden.float() @ self.head.weight[0]
        mask = batch.mask.to(numbers.device)
        return torch.zeros(mask.shape, device=numbers.device).masked_scatter(mask, numbers)

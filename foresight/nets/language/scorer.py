"""A language model with a scalar head: a critic of every token, or a reward model of whole answers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foresight.data.text import TokenBatch
from foresight.nets.language.model import LanguageModel


class Scorer(nn.Module):
    """The trunk of a language model and a linear scalar head, always in float32."""

    def __init__(self, trunk: LanguageModel) -> None:
        super().__init__()
        self.trunk = trunk

    @property
    def head(self) -> nn.Linear:
        """The linear map from the hidden state to the scalar."""
        return self.trunk.module.score

    def reset(self, std: float, generator: torch.Generator | None = None) -> None:
        """Reinitialize the head from a normal distribution; `std` 0 makes every score 0."""
        with torch.no_grad():
            self.head.weight.copy_(std * torch.randn(self.head.weight.shape, generator=generator))

    def values(self, batch: TokenBatch) -> Tensor:
        """The value `[P, G, T]` of the state *before* each token: step t is the state in which token t was sampled."""
        return self._outputs(batch, after=False)

    def scores(self, batch: TokenBatch) -> Tensor:
        """The score `[P, G]` of each whole completion, at its last token: found by length, not by padding."""
        return self.steps(batch).gather(-1, (batch.length.to(self.trunk.device) - 1)[..., None])[..., 0]

    def steps(self, batch: TokenBatch) -> Tensor:
        """The score `[P, G, T]` of a completion up to and including each token."""
        return self._outputs(batch, after=True)

    def _outputs(self, batch: TokenBatch, after: bool) -> Tensor:
        with self.trunk.precision():
            hidden = self.trunk.contexts(batch, after)
        with torch.autocast(hidden.device.type, enabled=False):
            outputs = hidden.float() @ self.head.weight[0]
        mask = batch.mask.to(outputs.device)
        return torch.zeros(mask.shape, device=outputs.device).masked_scatter(mask, outputs)

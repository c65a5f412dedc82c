"""A language model with a scalar head: a critic of every token, or a reward model of whole answers or of steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresight.data.text import TokenBatch
from foresight.errors import UserError
from foresight.nets.language import architecture
from foresight.nets.language.model import LanguageModel, token_tree
from foresight.ops.tokens import token_logprob


class Scorer(nn.Module):
    """The trunk of a language model and a linear scalar head, always in float32.

    `unembedding` is the head for next tokens that `steps_and_logprob` uses; None: the embedding matrix.
    """

    def __init__(self, trunk: LanguageModel) -> None:
        super().__init__()
        self.trunk = trunk
        self.unembedding: nn.Module | None = None

    @property
    def head(self) -> nn.Linear:
        """The linear map from the hidden state to the scalar."""
        return self.trunk.module.score

    @property
    def of_steps(self) -> bool:
        """Whether it was trained on labeled steps, and not on whole answers; saved with the model."""
        return bool(getattr(self.trunk.module.config, "scores_steps", False))

    @of_steps.setter
    def of_steps(self, value: bool) -> None:
        self.trunk.module.config.scores_steps = value

    @property
    def delimiter(self) -> str:
        """The text between two of the steps that it was trained on; saved with the model."""
        return str(getattr(self.trunk.module.config, "steps_delimiter", "\n"))

    @delimiter.setter
    def delimiter(self, value: str) -> None:
        self.trunk.module.config.steps_delimiter = value

    def reset(self, std: float, generator: torch.Generator | None = None) -> None:
        """Reinitialize the head from a normal distribution; `std` 0 makes every score 0."""
        with torch.no_grad():
            self.head.weight.copy_(std * torch.randn(self.head.weight.shape, generator=generator))

    def values(self, batch: TokenBatch) -> Tensor:
        """The value `[P, G, T]` of the state *before* each token: step t is the state in which token t was sampled."""
        return self._outputs(batch, after=False)

    def scores(self, batch: TokenBatch) -> Tensor:
        """The score `[P, G]` of each whole completion, at its last sampled token: found by length, not by padding."""
        return at_end(self.steps(batch), batch)

    def steps(self, batch: TokenBatch) -> Tensor:
        """The score `[P, G, T]` of a completion up to and including each token."""
        return self._outputs(batch, after=True)

    def steps_and_logprob(self, batch: TokenBatch, modeled: Tensor) -> tuple[Tensor, Tensor]:
        """As `steps`, and log π of the tokens where `modeled` (bool), 0 elsewhere: `[P, G, T]` each, from one pass."""
        self._check_length(batch)
        tree, path = token_tree(batch)
        mask, modeled, device = batch.mask, modeled & batch.mask, self.trunk.device
        nodes = path[modeled[mask]]
        with self.trunk.precision():
            hidden = self.trunk.states(tree)
            logits = self.trunk.scaled(self._unembed(hidden[tree.parents[nodes].to(device)]))
        logprob, _ = token_logprob(logits, tree.tokens[nodes].to(device))
        empty = torch.zeros(mask.shape, device=device)
        return self._scalars(hidden[path.to(device)], mask), empty.masked_scatter(modeled.to(device), logprob)

    def _unembed(self, hidden: Tensor) -> Tensor:
        if self.unembedding is not None:
            logits: Tensor = self.unembedding(hidden)
            return logits
        return functional.linear(hidden, architecture.trunk(self.trunk.module).get_input_embeddings().weight)

    def _outputs(self, batch: TokenBatch, after: bool) -> Tensor:
        self._check_length(batch)
        with self.trunk.precision():
            hidden = self.trunk.contexts(batch, after)
        return self._scalars(hidden, batch.mask)

    def _check_length(self, batch: TokenBatch) -> None:
        longest = int((batch.prompt_length[:, None] + batch.length).max())
        if longest > self.trunk.context:
            raise UserError(
                f"A prompt with its completion has {longest} tokens, and the critic or reward model that reads it has "
                f"a context of {self.trunk.context}: choose one with a longer context, or shorter texts."
            )

    def _scalars(self, hidden: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            outputs = hidden.float() @ self.head.weight[0]
        mask = mask.to(outputs.device)
        return torch.zeros(mask.shape, device=outputs.device).masked_scatter(mask, outputs)


def at_end(steps: Tensor, batch: TokenBatch) -> Tensor:
    """The value `[P, G]` of `steps` `[P, G, T]` at the last token of each completion."""
    return steps.gather(-1, batch.last().to(steps.device)[..., None])[..., 0]


def completing(policy: LanguageModel, ids: Sequence[int], characters: Sequence[int]) -> list[int]:
    """The place of the token after which the text of `ids` first has each number of `characters`; else the last.

    A character of which only the first bytes are written does not count.
    """
    written = [len(policy.decode(ids[: t + 1]).rstrip("\ufffd")) for t in range(len(ids))]
    return [next((t for t, count in enumerate(written) if count >= end), len(ids) - 1) for end in characters]

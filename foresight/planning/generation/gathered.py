"""Completions by several processes, each of which holds a part of the model (`distributed`).

Each keeps a whole copy to sample with, which takes over the weights that changed, and completes its share of the
prompts. All have to ask for the same at the same time, and all get everything: what one process would have sampled, for
each skips the random numbers of those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foresight import distributed
from foresight.data.text import TokenBatch
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation.decoding import generate
from foresight.planning.generation.rollout import texts


class Together:
    """A `Completer` for `policy`, which is split over the processes."""

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy
        self._copy: LanguageModel | None = None
        self._version: list[float] = []

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        group: int = 1,
        max_new_tokens: int = 16,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> TokenBatch:
        """See `planning.generation.decoding.generate`; `options` are its."""
        count, places = len(prompts), distributed.processes()
        first, last = (count * place // places for place in (distributed.rank(), distributed.rank() + 1))
        generator = torch.default_generator if generator is None else generator
        model, numbers = self._current(), group * max_new_tokens
        torch.rand(first * numbers, generator=generator)
        mine = None
        if last > first:
            mine = generate(model, prompts[first:last], group, max_new_tokens, temperature, generator, **options)
        torch.rand((count - last) * numbers, generator=generator)
        return TokenBatch.concat([part for part in distributed.gathered(mine) if part is not None])

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> list[str]:
        """One completion of each prompt as text."""
        return texts(self.policy, self(prompts, 1, max_new_tokens, temperature, generator, **options))

    def _current(self) -> LanguageModel:
        """The copy, with the weights that the policy has now."""
        version = distributed.version(self.policy)
        if self._copy is None or distributed.agreed(version != self._version):
            module = distributed.whole(self.policy.module).requires_grad_(False)
            self._copy = LanguageModel(module, self.policy.tokenizer, self.policy.autocast)
            self._version = version
        return self._copy


def attach(state: Any) -> None:
    """Have all processes sample for the policy of a State, if it has one that completes."""
    policy = getattr(state, "policy", None)
    if isinstance(policy, LanguageModel):
        policy.completer = Together(policy)

"""Sampling in several processes over which the policy is sharded (`distributed`).

Each process keeps a whole copy of the model, refreshed when the weights change, and completes its share of the prompts;
an all-gather then gives every process all completions. They equal those of one process: each skips the random numbers
of the shares before its own. All processes must make the same calls.
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


class AllGatherSampler:
    """A `Completer` for `policy`, which is sharded over the processes."""

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
        """See `planning.generation.decoding.generate`, also for `options`."""
        count, processes = len(prompts), distributed.processes()
        first, last = (count * rank // processes for rank in (distributed.rank(), distributed.rank() + 1))
        generator = torch.default_generator if generator is None else generator
        model, uniforms = self._current(), group * max_new_tokens  # random numbers a prompt
        torch.rand(first * uniforms, generator=generator)
        mine = None
        if last > first:
            mine = generate(model, prompts[first:last], group, max_new_tokens, temperature, generator, **options)
        torch.rand((count - last) * uniforms, generator=generator)
        return TokenBatch.concat([part for part in distributed.all_gather(mine) if part is not None])

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
        """The copy, with the present weights of the policy."""
        version = distributed.version(self.policy)
        if self._copy is None or distributed.any_rank(version != self._version):
            module = distributed.unsharded(self.policy.module).requires_grad_(False)
            self._copy = LanguageModel(module, self.policy.tokenizer, self.policy.autocast, self.policy.capabilities)
            self._version = version
        return self._copy


def attach(state: object) -> None:
    """Let all processes sample for the policy of a State, if it is a language model."""
    policy = getattr(state, "policy", None)
    if isinstance(policy, LanguageModel):
        policy.completer = AllGatherSampler(policy)

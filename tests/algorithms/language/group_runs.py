"""Rollouts, gradients and log-probabilities for tests of GRPO's family, on a tiny random model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from foresight.data.text import TokenBatch
from foresight.planning.generation.rollout import complete
from tests import tiny_language
from tests.algorithms.language.tiny_states import fresh

PROMPTS = ["1+1?", "22+3?", "4?", "4?"]
REWARDS = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.5, 0.0, 2.0]])
TOKENS = 6


def build(module: ModuleType, **fields):
    base = {"model": tiny_language.folder(), "precision": "float32", "prompts": 4, "group": 4, "max_new_tokens": TOKENS}
    state = fresh(module, **{**base, "max_grad_norm": math.inf, **fields})
    state.policy.stop_ids = [0, 5, 9, 14, 20]  # so that completions differ in length
    return state


def rollout(module: ModuleType, **fields) -> tuple:
    state = build(module, **fields)
    batch = complete(state.policy, PROMPTS, 4, TOKENS, state.config.temperature, state.generator)
    assert 0 < batch.stopped.float().mean() < 1
    assert len(batch.length.unique()) > 2
    return state, batch


def gradient(module: ModuleType, state, batch: TokenBatch, rewards: Tensor = REWARDS) -> list[Tensor]:
    """The gradient that an update hands to the optimizer."""
    caught: list[Tensor] = []
    parameters = list(state.policy.parameters())
    state.optimizer.register_step_pre_hook(lambda *_: caught.extend(p.grad.clone() for p in parameters))
    module.update(state, batch, rewards)
    return caught


def plain_logprob(state, batch: TokenBatch) -> Tensor:
    """Each completion by itself through the untouched transformers model: no cache, no sharing, no padding."""
    module = state.policy.module
    rows = torch.zeros(batch.completion.shape)
    for p, prompt in enumerate(batch.prompts()):
        for g in range(batch.completion.shape[1]):
            length = int(batch.length[p, g])
            tokens = torch.tensor([prompt + batch.completion[p, g, :length].tolist()])
            cached = state.policy.forward(tokens, torch.tensor([tokens.shape[1]]))[0]
            logits = module.get_output_embeddings()(cached)[0, len(prompt) - 1 : -1]
            row = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
            rows = rows.index_put((torch.tensor(p), torch.tensor(g), torch.arange(length)), row)
    return rows


def count_a(examples, completions):
    return [float(c.count("a")) for c in completions]


def second_pass(module: ModuleType, shift: Tensor, advantage: float, **fields: Any) -> tuple[Tensor, TokenBatch]:
    """∂loss / ∂log π `[P, G, T]`, per token of weight 1, where log π - log π_old is `shift`."""
    state, batch = rollout(module, **fields)
    logprob = state.policy.logprob(batch)[0].detach()
    known = logprob.clone().requires_grad_()
    state.policy.logprob = lambda *_: (known, torch.zeros_like(known))  # type: ignore[method-assign]
    gain, weights = torch.full(REWARDS.shape, advantage), batch.mask.float()
    module.loss(state, batch, gain, weights, logprob - shift)[0].backward()
    return known.grad, batch


def first_gradients(module: ModuleType, objective: Callable[..., Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The gradient of the first update and that of the paper's objective, for each parameter.

    `objective(logprob, rewards, length, stopped, batch)` is what one group adds to the objective at ratio 1, where
    ∇ρ = ∇log π: log π is `[G, T]`, computed completion by completion; rewards, lengths and `stopped` are `[G]`.
    """
    state, batch = rollout(module)
    caught = gradient(module, copy.deepcopy(state), batch)
    logprob, total = plain_logprob(state, batch), torch.zeros(())
    for p in range(len(REWARDS)):
        total = total + objective(logprob[p], REWARDS[p], batch.length[p], batch.stopped[p], batch)
    (-total).backward()
    expected = [parameter.grad for parameter in state.policy.parameters()]
    return list(zip(caught, expected, strict=True))  # type: ignore[arg-type]

"""Rows, gradients and log-probabilities for tests of supervised language algorithms, on a tiny random model."""

from __future__ import annotations

import math

import torch

from foresight.envs.text.task import Example
from foresight.nets.language.model import LanguageModel
from tests import tiny_language
from tests.algorithms.language.tiny_states import fresh

PAIRS = [
    Example(f"{i}+{i}?", columns={"prompt": f"{i}+{i}?", "chosen": str(2 * i), "rejected": "ab" * (i + 1)})
    for i in range(6)
]
SHOWN = [Example(f"{i}?", columns={"prompt": f"{i}?", "completion": "12" * (i + 1)}) for i in range(6)]
LABELED = [
    Example(f"{i}+{i}?", columns={"prompt": f"{i}+{i}?", "completion": answer, "label": answer.isdigit()})
    for i in range(4)
    for answer in (str(2 * i), "ab" * (i + 1))
]
PROMPT = "1?"


def build(module, **fields):
    base = {"model": tiny_language.folder(), "precision": "float32", "max_grad_norm": math.inf, "anneal_lr": False}
    return fresh(module, **{**base, **fields})


def gradient(module, state, *batch) -> tuple[list[torch.Tensor], dict[str, float]]:
    caught: list[torch.Tensor] = []
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    state.optimizer.register_step_pre_hook(lambda *_: caught.extend(p.grad.clone() for p in parameters))
    metrics = module.update(state, *batch)
    return caught, metrics


def row_logprob(model: LanguageModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """log π of each token of one completion, computed without other rows."""
    tokens = torch.tensor([prompt + completion])
    hidden = model(tokens, torch.tensor([tokens.shape[1]]))[0]
    logits = model.logits(hidden)[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def same_gradients(caught, parameters) -> None:
    for mine, parameter in zip(caught, parameters, strict=True):
        expected = torch.zeros_like(mine) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(mine, expected, atol=3e-6, rtol=1e-4)  # of float32 on any processor


def answer_logprobs(state) -> dict[str, float]:
    """log π of the answers 2 and 3, each with its end token."""
    tokens = [state.policy.tokenizer.encode(x)[0] for x in "23"]
    prompt = state.policy.encode(PROMPT)
    found = {}
    for token, name in zip(tokens, "23", strict=True):
        hidden = state.policy(torch.tensor([[*prompt, token]]), torch.tensor([len(prompt) + 1]))[0]
        logits = state.policy.logits(hidden)[0].log_softmax(-1)
        end = state.policy.tokenizer.eos_token_id
        found[name] = (logits[len(prompt) - 1, token] + logits[len(prompt), end]).item()
    return found

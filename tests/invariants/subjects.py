"""What the invariants are tried on: every algorithm that trains on tokens, on a random model.

Prompts are ragged, two of them are equal, and some answers stop while others hit the limit.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from foresight.algorithms.language import (
    cispo,
    dapo,
    distill,
    dpo,
    dr_grpo,
    grpo,
    gspo,
    kto,
    orpo,
    reward_model,
    rlhf_ppo,
    rloo,
    sft,
)
from foresight.data.text import TokenBatch
from foresight.envs.text.task import Example
from foresight.planning.generation.rollout import complete
from foresight.training.options import build_config, field_types
from tests import tiny_language

FAMILY = (grpo, dr_grpo, dapo, rloo, cispo, gspo)  # a group is its own baseline
SAMPLED = (*FAMILY, rlhf_ppo, distill)  # trained on answers that they sampled
SHOWN = (sft, dpo, kto, orpo, reward_model)  # trained on answers of a data set
ALL = (*SAMPLED, *SHOWN)

PROMPTS = ["1+1?", "22+3?", "4?", "4?"]
REWARDS = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.5, 0.0, 2.0]])
TOKENS = 6
STOPS = [0, 5, 9, 14, 20]  # so that answers differ in length
ROWS = [
    Example(p, columns={"prompt": p, "completion": "12" * (i + 1), "chosen": str(2 * i), "rejected": "ab" * (i + 1)})
    for i, p in enumerate(("1+1?", "2?", "33?", "2?"))
]


def of(*modules: ModuleType) -> pytest.MarkDecorator:
    """The test is run once for each of these algorithms, which it takes as `module`."""
    return pytest.mark.parametrize("module", modules, ids=[m.__name__.rsplit(".", 1)[-1] for m in modules])


both = pytest.mark.parametrize("precision", ["float32", "bfloat16"])


def has(module: ModuleType, name: str) -> bool:
    """Whether the algorithm has this field."""
    return name in field_types(module.Config)


def build(module: ModuleType, **fields: Any) -> Any:
    """The algorithm's State; fields that it does not have are left out."""
    base = {
        "model": tiny_language.folder(0), "teacher": tiny_language.folder(1), "precision": "float32", "prompts": 4,
        "group": 4, "max_new_tokens": TOKENS, "minibatches": 1, "max_grad_norm": math.inf, "anneal_lr": False,
    }  # fmt: skip
    state = module.build(build_config(module.Config, **{k: v for k, v in {**base, **fields}.items() if has(module, k)}))
    if module in SAMPLED:
        state.policy.stop_ids = STOPS
    return state


def sample(module: ModuleType, state: Any, prompts: list[str] | None = None) -> TokenBatch:
    """What the algorithm trains on: four answers to each prompt, or the rows of the data."""
    if module in SHOWN:
        return module._corpus(state, ROWS).batch(range(len(ROWS)))  # type: ignore[no-any-return]
    temperature = state.config.temperature
    batch = complete(state.policy, prompts or PROMPTS, 4, TOKENS, temperature, state.generator)
    assert 0 < batch.stopped.float().mean() < 1 and len(batch.length.unique()) > 2  # the case is not trivial
    return batch


def update(module: ModuleType, state: Any, batch: TokenBatch, rewards: torch.Tensor | None = None) -> dict[str, float]:
    """One update from a batch."""
    if module is kto:
        return module.update(state, batch, kto.labeled(ROWS)[: len(batch.length)])  # type: ignore[no-any-return]
    if module is reward_model:
        return module.update(state, batch, ROWS)  # type: ignore[no-any-return]
    if module in (distill, sft, dpo, orpo):
        return module.update(state, batch)  # type: ignore[no-any-return]
    return module.update(state, batch, REWARDS if rewards is None else rewards)  # type: ignore[no-any-return]


def gradient(
    module: ModuleType, state: Any, batch: TokenBatch, rewards: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """What an update hands to the optimizers; empty if it hands them nothing."""
    caught: list[torch.Tensor] = []
    for name in ("optimizer", "critic_optimizer"):
        if hasattr(state, name):
            parameters = [p for group in getattr(state, name).param_groups for p in group["params"]]
            getattr(state, name).register_step_pre_hook(
                lambda *_, parameters=parameters: caught.extend(p.grad.clone() for p in parameters)
            )
    update(module, state, batch, rewards)
    return caught


def same(ones: list[torch.Tensor], others: list[torch.Tensor], atol: float = 1e-6, rtol: float = 1e-4) -> None:
    """Two gradients are one."""
    assert len(ones) == len(others) > 0
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol)


def disturb(module: torch.nn.Module, by: float = 0.1, seed: int = 1) -> None:
    """Move every weight a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1 + by * torch.randn(weight.shape, generator=generator))

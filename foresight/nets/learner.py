"""A pretrained language model that learns: policy and optimiser of a Config, a frozen reference, the exported one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foresight.nets import pretrained
from foresight.nets.language import LanguageModel


def build(
    config: Any, device: torch.device | str, weight_decay: float = 0.0
) -> tuple[LanguageModel, torch.optim.Optimizer, torch.Generator]:
    """The policy that a Config describes, its optimiser, and the generator of its prompts and samples.

    It reads the fields `model`, `precision`, `learning_rate` and `seed`. Raises UserError as `pretrained.load` does.
    """
    policy = pretrained.load(config.model, device, config.precision)
    generator = torch.Generator().manual_seed(config.seed)
    return policy, adamw(policy, config.learning_rate, weight_decay), generator


def adamw(model: nn.Module, learning_rate: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over the weights that learn.

    Fused: one pass over memory that makes no temporaries, which is most of what an update costs on a CPU.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(weights, lr=learning_rate, weight_decay=weight_decay, fused=True)


def frozen(policy: LanguageModel) -> LanguageModel:
    """A copy of a policy as it is now that never learns: the reference of a KL."""
    return copy.deepcopy(policy).requires_grad_(False)


def export(state: Any, directory: str | Path) -> Path:
    """Write the policy of a State as a Hugging Face folder that `transformers` loads by itself."""
    return pretrained.save_folder(state.policy.module, state.policy.tokenizer, directory)

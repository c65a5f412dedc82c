"""Training a pretrained language model: policy and optimizer of a Config, the frozen reference, the export."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from foresight import distributed, errors
from foresight.nets.language import checkpointing, lora, pretrained
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.scorer import Scorer
from foresight.training.options import Tuning

OPTIMIZERS = ("adamw", "adamw8bit")


class Seeded(Protocol):
    """The fields of a Config for adapters."""

    @property
    def seed(self) -> int:
        """Of all random numbers."""

    @property
    def tuning(self) -> Tuning:
        """How the model is tuned."""


class Pretrained(Seeded, Protocol):
    """The fields of a Config for a pretrained policy and its optimizer."""

    @property
    def model(self) -> str:
        """The name, folder or hub id of the model."""

    @property
    def learning_rate(self) -> float:
        """Of the optimizer."""


class Exportable(Protocol):
    """A State whose policy can be exported."""

    policy: LanguageModel

    @property
    def config(self) -> Pretrained:
        """The algorithm's Config."""


def build(
    config: Pretrained, device: torch.device | str
) -> tuple[LanguageModel, torch.optim.Optimizer, torch.Generator]:
    """The policy that a Config describes, its optimizer, and the generator of its prompts and samples.

    Reads the fields `model`, `learning_rate`, `seed` and `tuning`. Raises UserError as `pretrained.load` and `adamw`
    do.
    """
    tuning = config.tuning
    policy = pretrained.load(config.model, device, tuning.precision, narrow=tuning.lora > 0)
    _prepare(policy, config)
    generator = torch.Generator().manual_seed(config.seed)
    return policy, adamw(policy, config.learning_rate, tuning), generator


def scorer(
    config: Seeded,
    device: torch.device | str,
    name: str,
    std: float | None = None,
    generator: torch.Generator | None = None,
) -> Scorer:
    """A trainable `Scorer` from the model `name` (see `pretrained.load_scorer`), with adapters if `tuning.lora` > 0."""
    tuning = config.tuning
    found = pretrained.load_scorer(name, device, tuning.precision, std, generator, narrow=tuning.lora > 0)
    _prepare(found.trunk, config)
    return found


def _prepare(model: LanguageModel, config: Seeded) -> None:
    tuning = config.tuning
    if not tuning.lora and tuning.lora_targets:
        raise errors.UserError(
            "--lora-targets is given without --lora: also give the rank of the adapters, as in --lora 16."
        )
    if tuning.lora:
        lora.add(model, tuning.lora, tuning.lora_targets, torch.Generator().manual_seed(config.seed))
    if tuning.gradient_checkpointing:
        checkpointing.recompute(model.module)
    if distributed.processes() > 1:
        shard(model)


def shard(model: LanguageModel) -> None:
    """Keep a shard of every weight in this process (`distributed.shard`). Raises UserError for a model without layers.

    Make the optimizer after this.
    """
    layers = checkpointing.layers(model.module)
    if not layers:
        raise errors.UserError(
            f"{type(model.module).__name__} has no layers that can be sharded: run without torchrun."
        )
    distributed.shard(model.module, layers)


def _count(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Count the change of all weights, as optimizers do that are not fused: copies of weights go by it."""
    torch.autograd.graph.increment_version([p for group in optimizer.param_groups for p in group["params"]])


def adamw(model: nn.Module, learning_rate: float, tuning: Tuning) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over the trainable weights, with `tuning.weight_decay`.

    Fused: one pass over memory without temporaries, which is most of what an update costs on a CPU. Raises UserError
    for a `tuning.optimizer` outside `OPTIMIZERS`, and for the 8-bit one on a CPU or without bitsandbytes.
    """
    kind, weight_decay = tuning.optimizer, tuning.weight_decay
    weights = [p for p in model.parameters() if p.requires_grad]
    if kind == "adamw":
        fused = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=weight_decay, fused=True)
        fused.register_step_post_hook(_count)
        return fused
    if kind not in OPTIMIZERS:
        raise errors.unknown("optimizer", kind, OPTIMIZERS)
    try:
        bitsandbytes = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise errors.UserError(
            f"The optimizer {kind} needs bitsandbytes: run `pip install bitsandbytes`, or leave --optimizer out."
        ) from error
    if weights[0].device.type == "cpu":
        raise errors.UserError(
            f"The optimizer {kind} needs an accelerator, not a CPU: choose another --device or leave --optimizer out."
        )
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        weights, lr=learning_rate, weight_decay=weight_decay
    )
    return optimizer


def frozen(policy: LanguageModel) -> LanguageModel:
    """The policy before training, as the reference of a KL penalty: a copy or, with adapters, the base itself.

    The base is always the initial policy: a model's own adapter was merged into it at loading.
    """
    if distributed.is_sharded(policy.module):
        copied = LanguageModel(
            distributed.unsharded(policy.module), policy.tokenizer, policy.autocast, policy.capabilities
        )
        if lora.has(copied.module):
            copied = lora.base(copied)
        shard(copied.requires_grad_(False))
        return copied
    return lora.base(policy) if lora.has(policy.module) else copy.deepcopy(policy).requires_grad_(False)


def export(state: Exportable, directory: str | Path, merged: bool = True) -> Path:
    """Write the policy of a State as a Hugging Face folder that plain `transformers` loads.

    Adapters are merged into the base or, if not `merged`, written as an adapter, which `peft` also loads.
    """
    return pretrained.save_folder(
        state.policy.module, state.policy.tokenizer, directory, merged, base=state.config.model
    )

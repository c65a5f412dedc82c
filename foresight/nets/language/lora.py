"""LoRA, Hu et al. 2021 (arXiv:2106.09685): a frozen linear map W plus a trained product of two low-rank matrices.

    y = W x + α/r · B A x        A `[r, in]` is random, B `[out, r]` is 0: the initial output is that of W

The package peft inserts the adapters into a transformers model, so every forward pass includes them: sampling and
training use the same weights. The base is held once, in the dtype of the matrix products, and is its own reference.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from foresight import errors
from foresight.nets.language.model import LanguageModel

ALPHA = 32  # α: the best learning rate then hardly depends on r ("LoRA Without Regret", Schulman et al. 2025)
NAME = "default"  # peft's name of the adapter
MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")  # in their layers peft refuses `out_proj`
PASSED = {"dt_proj", "out_proj"}  # Mamba computes with these weights past their layers, and so past adapters


def add(model: LanguageModel, rank: int, targets: Sequence[str] = (), generator: torch.Generator | None = None) -> None:
    """Freeze the weights of a model and add adapters to its linear layers (those that `targets` names, or all).

    A scalar head (`Scorer`) stays fully trainable. Raises UserError, naming the valid layers, for a target that matches
    none, and for a model or a target that peft cannot adapt.
    """
    if rank < 1:
        raise errors.UserError(f"lora must be a rank of at least 1, or 0 to train all weights, not {rank}.")
    from peft import LoraConfig

    module = model.module
    linear, transposed = _linear(getattr(module, module.base_model_prefix))
    names = {name.rsplit(".", 1)[-1] for name in linear}
    if module.config.model_type in MAMBA:
        names -= PASSED
    if not names:
        raise errors.UserError(f"{type(module).__name__} has no linear layer for --lora: leave it out.")
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise errors.unknown("lora target", target, names)
    head = getattr(module, "score", None)
    kind, chosen = "CAUSAL_LM" if head is None else "SEQ_CLS", list(targets) or sorted(names)
    try:
        module.add_adapter(LoraConfig(kind, r=rank, lora_alpha=ALPHA, target_modules=chosen, fan_in_fan_out=transposed))
    except ValueError as error:
        raise errors.UserError(
            f"peft adds no adapters to these layers of {type(module).__name__} ({error}): choose other --lora-targets."
        ) from error
    for _, _, layer in _adapters(module):
        thin = layer.lora_A.float()[NAME].weight.data  # float32: small steps would be lost in bfloat16
        thin.copy_(nn.init.kaiming_uniform_(torch.empty(thin.shape), a=5**0.5, generator=generator))
        layer.lora_B.float()
        layer.forward = MethodType(_forward, layer)  # a method of `layer`, so that a deep copy gets its own
    if head is not None:
        head.requires_grad_(True)


def has(module: Any) -> bool:
    """Whether a transformers model has adapters."""
    return bool(getattr(module, "peft_config", None))


def base(model: LanguageModel) -> LanguageModel:
    """The model without its adapters, as before training. It shares the weights of `model`."""
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    _remove(twin.module)
    return twin


def narrow(module: Any) -> bool:
    """Whether a transformers model holds weights in less than float32."""
    return any(weight.dtype != torch.float32 for weight in module.parameters())


def merged(module: Any, base: Any = None) -> Any:
    """A float32 copy of a transformers model with each adapter merged into its layer: W + α/r · B A.

    Weights held in less than float32 are taken from `base`, the model before adapters, if given.
    """
    rounded = {name for name, weight in module.named_parameters() if weight.dtype != torch.float32}
    whole = copy.deepcopy(module).float()  # before merging: a small change would be lost in bfloat16
    originals = {} if base is None else dict(base.named_parameters())
    for name, weight in whole.named_parameters():
        if name in rounded and (exact := originals.get(name.replace(".base_layer.", "."))) is not None:
            weight.data.copy_(exact)
    merge(whole)
    return whole


def merge(module: Any) -> None:
    """Merge each adapter of a transformers model into its layer and remove it: a plain model is left."""
    for _, _, layer in _adapters(module):
        layer.merge()
    _remove(module)
    module.requires_grad_(True)  # peft froze the base
    vars(module).pop("_weight_conversions", None)  # or transformers would save it under adapter names


def _remove(module: Any) -> None:
    for parent, name, layer in list(_adapters(module)):
        setattr(parent, name, layer.get_base_layer())
    del module.peft_config
    module._hf_peft_config_loaded = False  # transformers checks this before saving


def _adapters(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each adapter: its parent module, its name there, and the adapter."""
    from peft.tuners.lora import LoraLayer

    for parent in module.modules():
        for name, part in parent.named_children():
            if isinstance(part, LoraLayer):
                yield parent, name, part


def _linear(module: nn.Module) -> tuple[list[str], bool]:
    """The names of the linear layers, and whether they hold their weights transposed, as those of GPT-2 do."""
    from transformers.pytorch_utils import Conv1D

    parts = {name: part for name, part in module.named_modules() if isinstance(part, (nn.Linear, Conv1D))}
    return list(parts), any(isinstance(part, Conv1D) for part in parts.values())


def _forward(self: Any, x: Tensor) -> Tensor:
    """As peft, but without a float32 copy of x, and scaled at rank r instead of at the output."""
    return self.base_layer(x) + self.lora_B[NAME](self.lora_A[NAME](x) * self.scaling[NAME])

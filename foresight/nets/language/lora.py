"""LoRA, Hu et al. 2021 (arXiv:2106.09685): a linear map W that is frozen, and a product of two thin ones that learns.

    y = W x + α/r · B A x        A `[r, in]` is drawn, B `[out, r]` is 0: at first nothing has changed

The package peft puts the maps into a transformers model, so that they are part of its every forward pass: what
samples is what learns. The base is held once, in the type of the matrix products, and is its own reference.
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

ALPHA = 32  # α: with it the best learning rate hardly depends on r ("LoRA Without Regret", Schulman et al. 2025)
NAME = "default"  # of the adapter, as peft has it


def add(model: LanguageModel, rank: int, targets: Sequence[str] = (), generator: torch.Generator | None = None) -> None:
    """Freeze the weights of a model and give its linear layers (those that `targets` names, or all) adapters.

    A number in place of the vocabulary (`Scorer`) goes on learning whole. Raises UserError, naming the layers that
    there are, for a target that matches none.
    """
    if rank < 1:
        raise errors.UserError(f"lora is {rank}: it is the rank of the adapters, 1 or more (0: all weights learn).")
    from peft import LoraConfig

    module = model.module
    names = _linear(getattr(module, module.base_model_prefix))
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise errors.unknown("lora target", target, {name.rsplit(".", 1)[-1] for name in names})
    chosen = list(targets) or sorted({name.rsplit(".", 1)[-1] for name in names})
    head = getattr(module, "score", None)
    kind = "CAUSAL_LM" if head is None else "SEQ_CLS"
    module.add_adapter(LoraConfig(kind, r=rank, lora_alpha=ALPHA, target_modules=chosen))
    for _, _, layer in _adapters(module):
        thin = layer.lora_A.float()[NAME].weight.data  # float: small steps would be lost in narrow weights
        thin.copy_(nn.init.kaiming_uniform_(torch.empty(thin.shape), a=5**0.5, generator=generator))
        layer.lora_B.float()
        layer.forward = MethodType(_forward, layer)  # a method of `layer`, so that a deep copy gets its own
    if head is not None:
        head.requires_grad_(True)


def has(module: Any) -> bool:
    """Whether a transformers model has adapters."""
    return bool(getattr(module, "peft_config", None))


def base(model: LanguageModel) -> LanguageModel:
    """The model without its adapters: what it was before it learned. Its weights are those of `model`, not copies."""
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    _remove(twin.module)
    return twin


def narrow(module: Any) -> bool:
    """Whether a transformers model holds weights that were rounded to fewer bits."""
    return any(weight.dtype != torch.float32 for weight in module.parameters())


def merged(module: Any, base: Any = None) -> Any:
    """A copy of a transformers model in float32 in which each adapter is added to its layer: W + α/r · B A.

    Weights that were rounded are taken from `base`, the model before adapters were added, if it is given.
    """
    rounded = {name for name, weight in module.named_parameters() if weight.dtype != torch.float32}
    whole = copy.deepcopy(module).float()  # first: a small change would be lost in a narrow weight
    known = {} if base is None else dict(base.named_parameters())
    for name, weight in whole.named_parameters():
        if name in rounded and (exact := known.get(name.replace(".base_layer.", "."))) is not None:
            weight.data.copy_(exact)
    merge(whole)
    return whole


def merge(module: Any) -> None:
    """Add each adapter of a transformers model to the weight of its layer and take it out: what is left is a model."""
    for _, _, layer in _adapters(module):
        layer.merge()
    _remove(module)
    module.requires_grad_(True)  # whoever put the adapters in froze the rest
    vars(module).pop("_weight_conversions", None)  # by which transformers would save it under an adapter's names


def _remove(module: Any) -> None:
    for parent, name, layer in list(_adapters(module)):
        setattr(parent, name, layer.get_base_layer())
    del module.peft_config
    module._hf_peft_config_loaded = False  # what transformers asks before it saves


def _adapters(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each adapter, the module that holds it, and its name there."""
    from peft.tuners.lora import LoraLayer

    for parent in module.modules():
        for name, part in parent.named_children():
            if isinstance(part, LoraLayer):
                yield parent, name, part


def _linear(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]


def _forward(self: Any, x: Tensor) -> Tensor:
    """As peft does it, but without a copy of x in float32, and scaled where there are r numbers and not out."""
    return self.base_layer(x) + self.lora_B[NAME](self.lora_A[NAME](x) * self.scaling[NAME])

"""Options that several algorithms share: one frozen dataclass each inside a Config, flat names everywhere else.

On the command line, in presets and in `config.yaml` they are next to the other fields. This module does not import
torch, so that `--help` is fast.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a language model is tuned."""

    lora: int = 0
    """Rank of the LoRA adapters, trained while the model is frozen; 0: train all weights."""
    lora_targets: tuple[str, ...] = ()
    """The linear layers with adapters, such as q_proj v_proj; empty: all of them."""
    precision: str = "auto"
    """Precision of matrix products, over float32 weights: "auto", "float32" or "bfloat16"."""
    optimizer: str = "adamw"
    """adamw, or adamw8bit: 8-bit moments (Dettmers et al. 2021, arXiv:2110.02861), from the package bitsandbytes."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    lr_warmup: int = 0
    """Updates over which the learning rate rises linearly."""
    anneal_lr: bool = False
    """Whether the learning rate then falls linearly to 0."""
    max_grad_norm: float = 1.0
    """Bound of the gradient norm of each model."""
    gradient_checkpointing: bool = False
    """Whether layers store only their inputs and are recomputed in the backward pass: less memory, the same values."""
    micro_tokens: int = 768
    """Distinct tokens per micro-batch, prompts included: fewer need less memory and more time; same gradient."""


@dataclasses.dataclass(frozen=True)
class Correction:
    """How a language model's loss is corrected where a server or another precision sampled (`ops.policy`)."""

    importance_correction: str = "none"
    """Weight of each token, π_old of the learner / π of the sampler: "none" (1), "truncated" or "masked"."""
    importance_cap: float = 2.0
    """Upper bound of the weight; "masked" drops tokens whose weight is outside [1 / cap, cap] (IcePop: 0.5 to 5)."""


@dataclasses.dataclass(frozen=True)
class ModelTraining:
    """How MuZero and its variants train their model: its size, the replay, the optimizer and the order of the work."""

    latent_size: int = 64
    """Latent dimensions."""
    hidden: tuple[int, ...] = (128,)
    """Hidden layers of each function."""
    support: int = 20
    """Bins of h(x) on each side of 0: 20 reaches ±422, 40 reaches ±1,555; 300 in MuZero (appendix F)."""
    bin_width: float = 1.0
    """Distance between bins of h(x), where 1 is h(3): smaller where returns are; 0.025 with 20 bins reaches ±1.25."""
    images: str = "nature"
    """Image encoder: "nature", "nips", "impala", "vit" or "swin"."""
    replay_size: int = 100_000
    """Transitions kept, summed over all environments."""
    priority_exponent: float = 0.0
    """α: sequences are drawn in proportion to |search value - value target|^α; 0: uniformly; 1 in EfficientZero V2."""
    priority_correction: float = 1.0
    """β: importance weights are (1 / P)^β, over the greatest in a batch; 1 in EfficientZero V2."""
    search_values: bool = False
    """Reanalyzed sequences have the values of their new searches as targets; EfficientZero V2 (arXiv:2403.00564)."""
    learning_starts: int = 1_000
    """Env steps before the first gradient step."""
    batch_size: int = 128
    """Sequences per gradient step."""
    train_every: int = 4
    """Env steps per gradient step."""
    target_every: int = 200
    """Gradient steps between target network updates; 100 in LightZero."""
    learning_rate: float = 3e-3
    """Adam; LightZero."""
    learning_rate_decay: float = 1.0
    """Exponential decay of the learning rate: its factor at the end; 0.1 ** (1000 / 350) in MuZero (appendix G)."""
    weight_decay: float = 1e-4
    """L2 weight decay in Adam; MuZero, appendix G."""
    max_grad_norm: float = 10.0
    """Bound of the gradient norm; LightZero."""
    collect_steps: int = 32
    """Steps per env between rounds of updates, and in an actor's message."""
    max_lag: int = 1
    """Rounds of updates by which the actors' weights may lag; 0: synchronous."""
    threads: int = 1
    """Torch CPU threads."""


def parts(kind: type[Any]) -> dict[str, Any]:
    """The shared parts of a Config class by field name: the fields whose default is itself a dataclass."""
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(kind)
    }
    return {name: default for name, default in defaults.items() if dataclasses.is_dataclass(default)}


def field_types(kind: type[Any]) -> dict[str, Any]:
    """The type of every field of a Config class by its flat name."""
    own, shared = typing.get_type_hints(kind), parts(kind)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        found |= field_types(type(shared[field.name])) if field.name in shared else {field.name: own[field.name]}
    return found


def flatten(config: Any) -> dict[str, Any]:
    """The values of a Config by flat name."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        found |= flatten(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return found


def build_config(kind: type[Any], /, *args: Any, **values: Any) -> Any:
    """A Config of class `kind` from flat names: `build_config(grpo.Config, steps=10, lora=16)`."""
    for name, default in parts(kind).items():
        own = {field: values.pop(field) for field in flatten(default) if field in values}
        if own:
            values[name] = build_config(type(default), **{**flatten(values.get(name, default)), **own})
    return kind(*args, **values)

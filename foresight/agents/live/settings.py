"""The settings of a live run. This module does not import torch: the loops that need none start quickly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from foresight.errors import UserError, at_least
from foresight.runtime import catalog
from foresight.training.options import Tuning

MODES = ("both", "evaluative", "directive")
SETTINGS = "live.json"
LEAST = 1e-4  # temperature, but for 0, and top_p: in float32 logits over less may be infinite, and no token be left


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters. OpenClaw-RL's are in parentheses."""

    model: str = "smollm2"
    """"smollm2" (packaged), a Hugging Face folder, or a hub id."""
    seed: int = 0
    """Seeds the adapters."""
    mode: str = "both"
    """evaluative (scores), directive (hints), or both."""
    batch: int = 8
    """Turns per update (16)."""
    staleness: int = 4
    """Updates between the weights that wrote a turn and those that are trained."""
    learning_rate: float = 1e-4
    """AdamW (1e-5 for 4B parameters; 1e-4 with adapters)."""
    clip_low: float = 0.2
    """ε of the clipped ratio."""
    clip_high: float = 0.28
    """ε' of the clipped ratio."""
    score_weight: float = 1.0
    """w_r of the score."""
    hint_weight: float = 1.0
    """w_h of the hint."""
    hint_clip: float = 2.0
    """c, the bound of the difference of log-probabilities in nats."""
    hint_top_k: int = 0
    """K: next tokens over which the hint's divergence is taken (50); 0: the sampled tokens alone (its other form)."""
    hint_guidance: float = 1.0
    """c: with `hint_top_k`, the teacher is π^{1-c} π_hint^c, which exaggerates the hint above 1 (1)."""
    kl_coef: float = 0.02
    """β of the k2 penalty with the first version."""
    rehearsal: float = 0.0
    """β' of the KL from the first version on its own answers to questions of the check (own: not in the paper)."""
    kl_bound: float = 1.0
    """KL per token to the first version, in nats, beyond which an update is undone."""
    tuning: Tuning = Tuning(lora=16)
    """How the model is tuned (`training.options`)."""

    def __post_init__(self) -> None:
        """Raises UserError for values out of range."""
        if self.mode not in MODES:
            raise UserError(f"mode must be {', '.join(MODES)}, not '{self.mode}'.")
        at_least(1, self, "batch")
        at_least(0, self, "staleness", "learning_rate", "hint_clip", "hint_top_k", "kl_coef", "rehearsal", "kl_bound")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A live run but for its hyperparameters."""

    host: str = "127.0.0.1"
    port: int = 8000
    score: str = ""  # file.py:name, the URL of a server, or the folder of a reward model; "": nothing is scored
    device: str = "cpu"
    temperature: float = 1.0
    patience: float = 3600.0  # seconds that a turn waits for its next state
    check: str = ""  # a text task whose held-out accuracy must not fall
    check_size: int = 50
    check_every: int = 4
    tolerance: float = 0.1
    ray: str = ""  # the address of a Ray cluster, whose machines score and train; "": this one

    def __post_init__(self) -> None:
        """Raises UserError for a temperature at which turns cannot be trained on."""
        if not LEAST <= self.temperature <= 10:
            raise UserError(
                f"temperature is {self.temperature:g}: turns are sampled at more than 0 (at least {LEAST:g}), and at "
                "most 10."
            )


def write(folder: Path, settings: Settings, config: Config) -> None:
    """Write the settings of a run."""
    from foresight.runtime.checkpoints import checkpoint

    document = {"settings": dataclasses.asdict(settings), "config": dataclasses.asdict(config)}
    checkpoint.write_atomic(folder / SETTINGS, json.dumps(document, indent=1) + "\n")


def read(folder: Path) -> tuple[Settings, Config]:
    """The settings of a run. Raises UserError if there is none in the folder, or if it is damaged."""
    file = folder / SETTINGS
    if not file.is_file():
        raise UserError(f"{folder} is no live run: it has no {SETTINGS}.")
    document = catalog.read_mapping(file)
    try:
        config = dict(document["config"])
        tuning: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in config.pop("tuning").items()}
        return Settings(**document["settings"]), Config(**config, tuning=Tuning(**tuning))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}. It was edited or is incomplete.") from error

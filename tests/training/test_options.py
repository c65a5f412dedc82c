"""Laws of shared options: parts of a Config on the inside, flat names on the outside."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from foresight.cli import fields
from foresight.training.options import Tuning, build_config, field_types, flatten


@dataclasses.dataclass(frozen=True)
class Config:
    """A Config with a shared part."""

    steps: int = 5  # updates
    tuning: Tuning = Tuning(anneal_lr=True, micro_tokens=768)


def test_flat_names_build_the_config_and_its_shared_part():
    config = build_config(Config, 7, lora=16, lora_targets=("q_proj",))
    assert config == Config(7, Tuning(16, ("q_proj",), anneal_lr=True, micro_tokens=768))
    assert build_config(Config, **flatten(config)) == config
    assert build_config(Config) == Config()
    assert build_config(Config, tuning=Tuning(lora=3), precision="float32").tuning == Tuning(3, precision="float32")
    assert list(field_types(Config)) == list(flatten(config)) == ["steps", *flatten(Tuning())]


def test_a_shared_part_is_described_by_its_own_comments_with_the_defaults_of_the_algorithm():
    described = {field.name: field for field in fields.describe(Config, Path(__file__))}
    assert (described["steps"].help, described["micro_tokens"].default) == ("updates", 768)
    assert "LoRA" in described["lora"].help and described["lora"].type == "int"

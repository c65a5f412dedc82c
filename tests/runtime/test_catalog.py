"""The catalog: quick, without torch, and true to the files."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from foresight.errors import UserError
from foresight.runtime import catalog
from foresight.runtime.config import config_fields, resolve
from foresight.training.options import flatten

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(catalog.algorithms())


def test_the_entries_are_those_of_the_modules() -> None:
    assert {"value_iteration", "ppo", "grpo"} <= set(NAMES)
    for name, entry in catalog.algorithms().items():
        module = catalog.module(name)
        assert (entry.kind, entry.unit, entry.metrics) == (module.KIND, module.UNIT, tuple(module.METRICS))
        assert entry.title and entry.doc.startswith(entry.title) and entry.path.name == f"{name}.py"
        assert entry.kind in ("control", "tabular", "game", "text", "images")


@pytest.mark.parametrize("name", NAMES)
def test_a_config_without_torch_is_the_real_one(name: str) -> None:
    light, real = catalog.config_class(name), catalog.module(name).Config
    assert [(f.name, f.type, f.default) for f in dataclasses.fields(light)] == [
        (f.name, f.type, f.default) for f in dataclasses.fields(real)
    ]
    assert inspect.getsource(light) == inspect.getsource(real)  # help texts are made from the source
    assert config_fields.fields(name, {}) == flatten(real())


def test_no_torch_for_names_and_fields() -> None:
    code = (
        "import sys\nfrom foresight.runtime import catalog, run\n"
        "from foresight.runtime.config import config_fields, resolve\n"
        "for name in catalog.algorithms():\n    config_fields.fields(name, {}); catalog.presets(name)\n"
        "heavy = {'torch', 'gymnasium', 'transformers', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_fits_its_algorithm_and_names_its_source(name: str) -> None:
    for preset, values in catalog.presets(name).items():
        resolved = resolve.resolve(name, preset=preset)
        assert resolved.env and values.get("source"), f"{name}: {preset}"


def test_unknown_names() -> None:
    with pytest.raises(UserError, match="Did you mean 'value_iteration'"):
        catalog.entry("value_iterations")
    with pytest.raises(UserError, match="is not an algorithm file"):
        catalog.entry(str(Path(__file__)))


def test_a_config_that_needs_its_module_is_imported_for_real(tmp_path: Path) -> None:
    own = tmp_path / "needy.py"
    own.write_text(
        '"""NEEDY: needs a function for its defaults."""\nfrom __future__ import annotations\n'
        'from dataclasses import dataclass\nKIND = "text"\n\ndef half(x: int) -> int:\n    return x // 2\n\n'
        "@dataclass(frozen=True)\nclass Config:\n    steps: int = half(8)\n"
    )
    assert catalog.config_class(str(own))().steps == 4

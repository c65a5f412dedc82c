"""Benchmarks run too seldom to find a renamed field by accident: their Configs are read from the source."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

from foresight.training.options import flatten, parts
from tests.house.rules import ROOT

PACKAGES = "foresight.algorithms."


def unknown_fields(path: str, source: str) -> list[str]:
    """Keywords given to the `Config` of an algorithm, or with it to another call, that are not fields of it."""
    bad = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        modules = {
            (alias.asname or alias.name): f"{node.module}.{alias.name}"
            for node in ast.walk(function)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES)
            for alias in node.names
        }
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            for candidate in [call.func, *call.args[:1]]:
                name = (
                    candidate.value
                    if isinstance(candidate, ast.Attribute) and candidate.attr == "Config"
                    else candidate
                )
                if isinstance(name, ast.Name) and name.id in modules:
                    known = _fields(importlib.import_module(modules[name.id]).Config)
                    bad += [
                        f"{path}:{call.lineno}: {name.id}.Config has no field {keyword.arg}"
                        for keyword in call.keywords
                        if keyword.arg and keyword.arg not in known
                    ]
    return bad


def _fields(kind: type[Any]) -> set[str]:
    return set(kind.__dataclass_fields__).union(*(flatten(default) for default in parts(kind).values()))


def test_benchmarks_set_fields_that_exist() -> None:
    files = sorted(Path(ROOT, "benchmarks").glob("*.py"))
    assert len(files) > 20
    bad = [line for file in files for line in unknown_fields(file.name, file.read_text(encoding="utf-8"))]
    assert not bad, "\n" + "\n".join(bad)


@pytest.mark.parametrize("call", ["n_step_sarsa.Config(n=4)", "measure(n_step_sarsa, n=4)"])
def test_a_field_that_does_not_exist_is_caught(call: str) -> None:
    source = f"def ours():\n    from foresight.algorithms.tabular import n_step_sarsa\n    {call}\n"
    assert unknown_fields("x.py", source) == ["x.py:3: n_step_sarsa.Config has no field n"]
    assert not unknown_fields("x.py", source.replace("n=4", "n_steps=4"))

"""The notebooks are those of their pages, run from the first cell to the last, and print what the pages show."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from tests import tiny_language
from tests.house.rules import ROOT

MADE = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))
PAGES: dict[Path, Path] = MADE["pages"]()
DREAMER = {
    "num_envs": 8, "rollout_steps": 4, "learning_starts": 64, "train_ratio": 8.0, "batch_size": 4, "sequence_length": 8,
    "replay_size": 2_000, "horizon": 2, "deter": 32, "hidden": 16, "groups": 4, "classes": 4, "units": 16, "layers": 1,
}  # fmt: skip
# The parameters of the shortest run, of notebooks that take longer.
SHORT: dict[str, dict[str, Any]] = {
    "04_value_networks": {"STEPS": 600},
    "ppo_by_hand": {"ITERATIONS": 2},
    "grpo_in_four_minutes": {"MODEL": tiny_language.folder, "STEPS": 1, "EVALUATED": 4},
    "world_model_dreams": {"STEPS": 192, "SIZES": DREAMER},
}


def execute(document: dict[str, Any], short: dict[str, Any]) -> list[str]:
    """Run all cells in one namespace; returns where the output is not the one that the notebook holds."""
    names: dict[str, Any] = {"__name__": "__main__"}
    bad, left = [], dict(short)
    for cell in document["cells"]:
        if cell["cell_type"] != "code":
            continue
        printed, source = io.StringIO(), "".join(cell["source"])
        for name in list(left):
            source, found = re.subn(rf"^{name} = .*$", f"{name} = short_{name}", source, count=1, flags=re.MULTILINE)
            if found:
                value = left.pop(name)
                names[f"short_{name}"] = value() if callable(value) else value
        with contextlib.redirect_stdout(printed):
            exec(compile(source, cell["id"], "exec"), names)
        shown = "".join(text for output in cell["outputs"] for text in output["text"])
        if shown and printed.getvalue() != shown:
            bad.append(f"{cell['id']} prints\n{printed.getvalue()}, not\n{shown}")
    assert not left, f"no parameters {sorted(left)}"
    return bad


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_notebook_runs_and_is_that_of_its_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    document = json.loads(PAGES[page].read_text(encoding="utf-8"))
    assert document == MADE["notebook"](page, PAGES[page]), "run: python docs/notebooks.py"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert execute(document, SHORT.get(page.stem, {})) == []
    finally:
        pyplot.close("all")


def cell(source: str, printed: str = "") -> dict[str, Any]:
    """A document of one cell."""
    outputs = [{"text": [printed]}] if printed else []
    return {"cells": [{"cell_type": "code", "id": "cell-0", "source": [source], "outputs": outputs}]}


def test_a_wrong_answer_and_a_wrong_output_are_caught() -> None:
    assert execute(cell("print(1 + 1)", "2\n"), {}) == []
    assert execute(cell("print(1 + 1)", "3\n"), {})
    with pytest.raises(AssertionError):
        execute(cell("assert 1 + 1 == 3"), {})
    short = cell("N = 100  # questions\nprint(N + 3)", "5\n")
    assert execute(short, {"N": 2}) == [] and execute(short, {})
    with pytest.raises(AssertionError, match="no parameters"):
        execute(cell("M = 100"), {"N": 2})


CHAPTERS = [page for page in PAGES if page.parent.name == "learn"]


def complaints(text: str) -> list[str]:
    """What a chapter lacks: exercises that are numbered, an answer to each, and an assertion about the most of them."""
    exercises = re.findall(r"^(\d)\. ", text.partition("\n## Exercises\n")[2], re.MULTILINE)
    answers = re.findall(r"<summary>Answer (\d)</summary>(.*?)</details>", text, re.DOTALL)
    bad = [] if exercises and exercises == [number for number, _ in answers] else ["exercises and answers differ"]
    return bad + [f"answer {number} is not tested" for number, answer in answers if "assert " not in answer]


@pytest.mark.parametrize("page", CHAPTERS, ids=[page.stem for page in CHAPTERS])
def test_every_exercise_has_a_tested_answer(page: Path) -> None:
    assert complaints(page.read_text(encoding="utf-8")) == []


def test_the_course_has_twelve_chapters_and_a_missing_answer_is_caught() -> None:
    assert len(CHAPTERS) == 12
    good = '\n## Exercises\n\n1. Why?\n\n<details markdown="1"><summary>Answer 1</summary>\nassert True\n</details>\n'
    assert complaints(good) == []
    assert complaints(good.replace("1. Why?", "1. Why?\n2. How?"))
    assert complaints(good.replace("assert ", ""))

"""The page of an algorithm has one template: idea, objective, code, commands, pitfalls, metrics, numbers, results."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from foresight.runtime import catalog
from tests.house.rules import ROOT

SITE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "site.py"))
DOCS = ROOT / "docs"
NAMES = sorted(catalog.algorithms())


def missing(name: str, path: Path, text: str, metrics: tuple[str, ...]) -> list[str]:
    """What the page of an algorithm lacks."""
    head = text.partition("\n## ")[0]
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    file = path.relative_to(ROOT).as_posix()
    bad = [f"section {title!r}" for title in ("Try it", "What to know", "Metrics") if title not in sections]
    bad += ["its paper"] * (not re.search(r"(18|19|20)\d\d|this library|the library's own", head))
    bad += ["a link to its code"] * (f"](../{file})" not in head)
    bad += ["the objective"] * (not re.search(r"^    \S|^\$\$|^\d\. ", head, re.MULTILINE))
    bad += ["a command"] * (f"foresight train {name}" not in text)
    known = text.partition("\n## What to know\n")[2].partition("\n## ")[0]
    bad += ["two things to know"] * (known.count("\n- ") < 2)
    shown = text.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    refers = re.search(r"\[GRPO\]\(grpo.md#metrics\)|\[GRPO\]\(grpo.md\)|metrics are|\[MuZero's\]", text)
    bad += [f"the metric {one}" for one in metrics if f"`{one}`" not in shown and not refers]
    return bad


def metrics(path: Path) -> tuple[str, ...]:
    """METRICS of an algorithm file."""
    return tuple(re.findall(r'"(\w+)"', re.findall(r"^METRICS = \((.*?)\)", path.read_text(), re.M | re.S)[0]))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_an_algorithm_has_all_sections(name: str) -> None:
    entry = catalog.entry(name)
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert missing(name, entry.path, text, metrics(entry.path)) == []


def test_a_page_that_lacks_something_is_caught() -> None:
    entry = catalog.entry("sarsa")
    text = (DOCS / "sarsa.md").read_text(encoding="utf-8")
    found = metrics(entry.path)
    for part in ("## What to know", "](../foresight", "    q(s, a)", "foresight train sarsa", "`td_error`"):
        assert missing("sarsa", entry.path, text.replace(part, ""), found), part


def test_generated_sections_name_functions_and_sources() -> None:
    names = SITE["modules"]()
    text = SITE["anatomy"](catalog.entry("ppo").path, names) + SITE["hyperparameters"]("ppo")
    assert "| `update` | Epochs of minibatch steps on one evaluated rollout" in text
    assert "[`returns.gae`](../foresight/ops/returns.py) | " in text
    assert "def train(" in text and "| `clip_ratio` | `0.2` | " in text
    assert re.search(r"\| `CartPole-v1` \| `env: CartPole-v1, .*` \| RL Zoo", text)

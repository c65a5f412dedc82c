"""The site: every page has a place, links lead to where the site has them, and nothing is loaded from elsewhere."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.house.rules import ROOT

SITE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "site.py"))
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def test_only_what_both_builders_read_is_used() -> None:
    plugins = [next(iter(p)) if isinstance(p, dict) else p for p in CONFIG["plugins"]]
    assert set(plugins) <= {"search", "autorefs", "mkdocstrings"} and "hooks" not in CONFIG
    assert CONFIG["theme"]["font"] is False
    assets = [*CONFIG["extra_css"], *CONFIG["extra_javascript"]]
    assert all((DOCS / asset).is_file() for asset in assets)
    fonts = (DOCS / "assets/katex/katex.min.css").read_text()
    assert all(f"fonts/{font.name}" in fonts for font in (DOCS / "assets/katex/fonts").iterdir())


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the builder reads."""
    out = tmp_path_factory.mktemp("site") / "docs"
    assert SITE["stage"](out) > 500
    return out


def test_links_of_the_staged_pages_lead_somewhere(staged: Path) -> None:
    bad = []
    for page in staged.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if "reference/algorithms" in page.as_posix():
            continue  # source listings
        for _, target, _ in SITE["LINK"].findall(text):
            if "://" not in target and not (page.parent / target).exists():
                bad.append(f"{page.relative_to(staged)}: {target}")
    assert bad == []


def test_a_link_into_the_repository_is_rewritten(staged: Path) -> None:
    known = {ROOT / "foresight/ops/returns.py": "reference/ops/returns.md"}
    copies: set[Path] = set()
    text = "[a](../foresight/ops/returns.py) [b](../tests/sabotage.py) [c](ppo.md#x) [d](../results) [e](https://x.y)"
    found = SITE["rewritten"](text, DOCS / "x.md", "x.md", known, copies)
    assert found == "[a](reference/ops/returns.md) [b](files/tests/sabotage.py.txt) [c](ppo.md#x) d [e](https://x.y)"
    assert copies == {ROOT / "tests/sabotage.py"}
    inner = SITE["rewritten"]("[a](../ppo.md)", DOCS / "learn/x.md", "learn/x.md", {}, set())
    assert inner == "[a](../ppo.md)"
    source = (staged / "reference/algorithms/policy/ppo.md").read_text()
    assert (
        "clipped_surrogate" in source
        and "::: foresight.ops.returns" in (staged / "reference/ops/returns.md").read_text()
    )


def test_the_page_of_an_algorithm_ends_with_its_results(staged: Path) -> None:
    assert "## Published results" not in (DOCS / "ppo.md").read_text(encoding="utf-8")
    text = (staged / "ppo.md").read_text(encoding="utf-8").partition("## Published results")[2]
    assert (
        "[ppo-CartPole-v1](files/results/ppo-CartPole-v1.json) | CartPole-v1" in text and "foresight reproduce" in text
    )
    assert "## Published results" not in (staged / "search.md").read_text(encoding="utf-8")


def test_outside_assets_and_dead_links_of_a_built_site_are_caught(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<link rel="canonical" href="https://x.y"><a href="https://x.y">x</a>')
    (tmp_path / "a.html").write_text('<script src="b.html"></script><a href="b.html#part">b</a><a href="#c">c</a>')
    assert SITE["faults"](tmp_path) == []
    (tmp_path / "a.html").write_text('<script src="https://x.y/z.js"></script><a href="c.html">c</a>')
    (tmp_path / "a.css").write_text("@import 'https://x.y/z.css'; p { background: url(//x.y/z.png) }")
    assert len(SITE["faults"](tmp_path)) == 4


def test_the_diagrams_are_those_of_the_script() -> None:
    made = runpy.run_path(str(DOCS / "diagrams.py"))
    assert made["FILE"].read_text(encoding="utf-8") == made["picture"](), "run: python docs/diagrams.py"
    assert set(made["DIAGRAMS"]) >= {"dynamic programming", "TD(0)", "Q-learning", "Monte Carlo"}

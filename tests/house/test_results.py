"""The tables of results are what the files in results/ say, and every result says how it was made."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from foresight.runtime import results

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "results").glob("*.json"))


def test_the_page_of_results_is_made_from_the_files():
    page = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["page"]()
    assert (ROOT / "docs" / "results.md").read_text() == page, "run: python benchmarks/tables.py"


def test_the_index_that_is_packaged_is_made_from_the_files():
    assert results.INDEX.read_text() == results.document(), "run: python benchmarks/tables.py"


@pytest.mark.parametrize("file", RESULTS, ids=[file.stem for file in RESULTS])
def test_a_result_says_what_made_it(file):
    result = json.loads(file.read_text())
    for key in ("what", "command", "versions", "machine", "seconds"):
        assert result.get(key), f"{file.name} has no '{key}'"
    assert "torch" in result["versions"]
    assert "cores" in result["machine"]

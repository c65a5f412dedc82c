"""The pages and the index of results and of invariants are what the files say, and every result says what made it."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

from foresight.runtime import bench
from foresight.runtime.results import results

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "results").glob("*.json"))


def test_the_page_of_results_is_made_from_the_files():
    page = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["page"]()
    assert (ROOT / "docs" / "results.md").read_text() == page, "run: python benchmarks/tables.py"


def test_the_page_that_compares_libraries_is_made_from_the_benchmarks():
    page = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["compare"]()
    assert (ROOT / "docs" / "compare.md").read_text() == page, "run: python benchmarks/tables.py"
    peers = [
        result.get("peer") for file in RESULTS if "bench-" in file.name for result in [json.loads(file.read_text())]
    ]
    assert all(f"## {peer['name']}\n" in page for peer in peers if peer and peer["name"] != "foresight")


def test_a_ratio_is_that_of_the_rounds_of_its_benchmark():
    found = [json.loads(file.read_text()) for file in RESULTS if file.name.startswith("bench-")]
    for one in (one for one in found if "peer" in one):
        again = bench.compared(one["each"]["ours"], one["each"]["peer"], one["target"])
        assert {key: one[key] for key in again} == again, one["what"]


def test_the_page_of_grpos_family_is_made_from_the_code():
    made = runpy.run_path(str(ROOT / "benchmarks" / "grpo_family.py"))
    result = json.loads(made["FILE"].read_text()) if made["FILE"].is_file() else None
    assert made["PAGE"].read_text() == made["page"](result), "run: python benchmarks/grpo_family.py --page"
    assert made["slots"]("gspo")["ratio"] == "`sequence_ratio(logprob, old, mask)`"
    assert all(text != "–" for text in made["slots"]("grpo").values())


def test_the_page_of_the_comparison_is_made_from_the_figures():
    made = runpy.run_path(str(ROOT / "benchmarks" / "comparison.py"))
    result = json.loads(made["FILE"].read_text())
    assert made["PAGE"].read_text() == made["page"](result), "run: python benchmarks/tables.py"
    assert result["reached"] == json.loads(json.dumps(made["reached"](result["cells"])))


def test_the_page_of_the_stack_has_the_figures():
    made = runpy.run_path(str(ROOT / "benchmarks" / "stack.py"))
    result = json.loads(made["FILE"].read_text())
    assert made["PAGE"].read_text() == made["page"](result), "run: python benchmarks/tables.py"


def test_the_index_that_is_packaged_is_made_from_the_files():
    assert results.INDEX.read_text() == results.document(), "run: python benchmarks/tables.py"


def test_the_page_of_invariants_is_made_from_the_tests():
    page = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["invariants"]()
    assert (ROOT / "docs" / "invariants.md").read_text() == page, "run: python benchmarks/tables.py"


INVARIANTS = sorted((ROOT / "tests" / "invariants").glob("test_*.py"))


@pytest.mark.parametrize("file", INVARIANTS, ids=[file.stem for file in INVARIANTS])
def test_a_file_of_invariants_names_what_each_test_decides(file):
    tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    assert file.stem.removeprefix("test_") in tables["SUITE"]
    assert [row[-1] for row in tables["pitfalls"](file)] == list(_tests(file))


def test_every_test_on_the_page_of_invariants_has_a_twin():
    page = (ROOT / "docs" / "invariants.md").read_text()
    named = re.findall(r"\[`(test_\w+)`\]\(\.\./(\S+?)\)", page)
    assert len(named) > 70
    tests = {path: _tests(ROOT / path) for path in {path for _, path in named}}
    assert [name for name, path in named if "sabotaged_by" not in map(_called, tests[path][name].decorator_list)] == []


def _tests(file):
    """The test functions of a file, by name."""
    return {
        node.name: node for node in ast.parse(file.read_text()).body if getattr(node, "name", "").startswith("test_")
    }


def _called(decorator):
    return getattr(getattr(decorator, "func", None), "id", "")


@pytest.mark.parametrize("file", RESULTS, ids=[file.stem for file in RESULTS])
def test_a_result_names_what_made_it(file):
    result = json.loads(file.read_text())
    for key in ("what", "command", "versions", "machine", "seconds"):
        assert result.get(key), f"{file.name} has no '{key}'"
    assert "torch" in result["versions"]
    assert "cores" in result["machine"]


def test_a_command_does_not_build_on_what_a_file_has():
    commands = [json.loads(file.read_text())["command"].split() for file in RESULTS]
    assert not [" ".join(one) for one in commands if {"--more", "--keep"} & set(one)]

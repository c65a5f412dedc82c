"""Search trees equal mctx's, node for node; `make_search_trees.py` wrote what is compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foresight.planning.search import selection
from foresight.planning.search.mcts import PUCT, Gumbel, SearchResult, search
from tests.planning.search.table_model import TableModel
from tests.sabotage import change, drop, flip_sign, returns, sabotaged_by, scaled

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("search_trees.json").read_text(encoding="utf-8"))


def found(case: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch) -> SearchResult:
    options = case["options"]
    if case["kind"] == "gumbel":
        how = "siblings" if options["rescale_values"] else "none"
        rule: Any = Gumbel(options["considered"], options["value_scale"], options["maxvisit_init"], how)
        monkeypatch.setattr(selection, "gumbel_noise", lambda *_: torch.tensor(case["noise"]))
    else:
        rule = PUCT(options["c_init"], options["c_base"])
        monkeypatch.setattr(selection, "tie_noise", lambda like, _: torch.zeros_like(like))
    legal = None if case["legal"] is None else torch.tensor(case["legal"]) > 0
    return search(
        TableModel(case["world"]), torch.tensor(case["roots"]), case["simulations"], rule, legal=legal,
        generator=torch.Generator(), backend=backend,
    )  # fmt: skip


def paths(result: SearchResult, row: int) -> dict[str, tuple[int, float | None]]:
    """`{path: (visits, value)}`; the value of a terminal node counts nowhere and is None."""
    tree, named = result.tree, {0: ""}
    for node in range(1, tree.size):
        if tree.visits[row, node] > 0:
            above = named[int(tree.parent[row, node])]
            action = str(int(tree.action[row, node]))
            named[node] = f"{above}-{action}" if above else action
    terminal = (tree.discount[row] == 0) & (tree.parent[row] >= 0)
    return {
        path: (int(tree.visits[row, node]), None if terminal[node] else float(tree.value[row, node]))
        for node, path in named.items()
    }


def _compare(case: dict[str, Any], result: SearchResult) -> None:
    assert result.action.tolist() == case["action"]
    torch.testing.assert_close(result.weights, torch.tensor(case["weights"]), atol=1e-5, rtol=0)
    torch.testing.assert_close(result.value, torch.tensor(case["value"]), atol=1e-5, rtol=0)
    for row, expected in enumerate(case["nodes"]):
        ours = paths(result, row)
        assert {path: seen[0] for path, seen in ours.items()} == {path: seen[0] for path, seen in expected.items()}
        for path, (_, value) in expected.items():
            assert (value is None) == (ours[path][1] is None)
            assert value is None or abs(value - (ours[path][1] or 0.0)) < 1e-5, path


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['kind']}-{c['simulations']}")
@pytest.mark.parametrize("backend", ["compiled", "tensor"])
def test_trees_equal_those_of_mctx(case: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _compare(case, found(case, backend, monkeypatch))


def test_the_golden_cases_cover_enough() -> None:
    depths = [max(path.count("-") + 1 for path in nodes) for case in CASES for nodes in case["nodes"]]
    assert len(CASES) == 8 and max(depths) >= 8
    assert any(None in seen for case in CASES for nodes in case["nodes"] for seen in nodes.values())
    assert {case["kind"] for case in CASES if case["legal"]} == {"puct", "gumbel"}


@sabotaged_by("foresight.planning.search.selection.completed_values", flip_sign, scaled(2.0))
@sabotaged_by("foresight.planning.search.selection.mixed_value", scaled(0.0))
@sabotaged_by("foresight.planning.search.selection.halving_score", flip_sign)
@sabotaged_by("foresight.planning.search.selection.considered_visits", lambda f: lambda m, n: f(max(m - 1, 1), n))
def test_gumbel_trees_notice_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in CASES:
        if case["kind"] == "gumbel":
            _compare(case, found(case, "tensor", monkeypatch))


@sabotaged_by("foresight.planning.search.selection.normalize", change("how", lambda _: "none"), scaled(0.5))
@sabotaged_by("foresight.planning.search.selection.first_play", change("how", lambda _: "parent"))
@sabotaged_by("foresight.planning.search.selection.PUCT.score", flip_sign)
@sabotaged_by("tests.planning.search.table_model.TableModel.step", returns(lambda x: x + 0.1))
@sabotaged_by("foresight.planning.search.mcts.search", drop("legal"))
def test_puct_trees_notice_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in CASES:
        if case["kind"] == "puct":
            _compare(case, found(case, "tensor", monkeypatch))

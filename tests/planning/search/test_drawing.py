"""Search trees as dicts, JSON, DOT and figures: values that can be checked by hand."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch

from foresight.planning.search import drawing
from foresight.planning.search.mcts import PUCT, UCT, search
from tests.planning.search.table_model import TableModel, random_tables
from tests.planning.search.test_mcts import ladder
from tests.sabotage import drop, sabotaged_by


def test_a_ladder_as_a_dict() -> None:
    tree = search(TableModel(ladder()), torch.tensor([0]), 4, PUCT()).tree
    root = drawing.as_dict(tree, names=lambda a: "ab"[a])
    assert root["visits"] == 5 and root["value"] == pytest.approx(0.35)
    (mine,) = root["children"]
    assert mine["action"] == "a" and mine["visits"] == 4 and mine["prior"] == 1.0
    assert mine["value"] == pytest.approx(-0.4375) and mine["q"] == pytest.approx(0.4375)
    (yours,) = mine["children"]
    (last,) = yours["children"]
    assert last["terminal"] and last["q"] == 1.0 and last["visits"] == 2 and last["children"] == []
    assert drawing.as_dict(tree, least=3)["children"][0]["children"][0]["children"] == []
    assert [step[:2] for step in drawing.principal_line(tree)] == [(0, 4), (0, 3), (0, 2)]


def test_json_and_dot_hold_every_node() -> None:
    tree = search(TableModel(random_tables(0)), torch.tensor([0, 1]), 30, PUCT()).tree

    def count(node: dict) -> int:
        return 1 + sum(count(child) for child in node["children"])

    for row in range(2):
        assert count(json.loads(drawing.as_json(tree, row))) == 31
        text = drawing.as_dot(tree, row)
        assert len(re.findall(r" \[label=\"N ", text)) == 31 and text.count("->") == 30
        assert text.startswith("digraph") and text.endswith("}")


@sabotaged_by("foresight.planning.search.drawing.principal_line", drop("first"))
def test_principal_lines_follow_the_most_visited() -> None:
    tree = search(TableModel(random_tables(1)), torch.tensor([3]), 60, UCT(normalize="siblings")).tree
    counts = tree.child_visits()[0]
    for action in range(4):
        line = drawing.principal_line(tree, 0, action)
        assert line[0][:2] == (action, int(counts[action]))
        assert line[0][2] == pytest.approx(float(tree.child_values()[0, action]))
        assert all(a[1] >= b[1] for a, b in itertools.pairwise(line))
    assert drawing.principal_line(tree)[0][0] == int(counts.argmax())


@sabotaged_by("foresight.planning.search.drawing.principal_line", lambda f: lambda *x: f(*x)[:1])
def test_a_picture_shows_the_lines() -> None:
    tree = search(TableModel(random_tables(1)), torch.tensor([3]), 60, UCT(normalize="siblings")).tree
    figure = drawing.picture(tree, lines=2, depth=3, names=lambda a: f"move {a}")
    texts = [text.get_text() for text in figure.axes[0].texts]
    first = int(tree.child_visits()[0].argmax())
    assert len(texts) == 6 and texts[0].startswith(f"move {first}\nN {int(tree.child_visits()[0].max())}")
    figure.canvas.draw()

"""Search trees on the page: the most visited nodes as nested dicts, whose actions have names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foresight.planning.search import drawing
from foresight.planning.search.tree import Tree

BRANCHES = 6  # children of a node that are shown, by visits
SHOWN = 400  # nodes of a tree that are shown


def shown(tree: Tree, name: Callable[[int, int], str]) -> dict[str, Any]:
    """The tree of row 0 as `drawing.as_dict`, pruned; `hidden` counts the children of a node that are left out.

    `name(node, action)` is the name of an action at a node of `tree`.
    """
    root = drawing.as_dict(tree)
    prune(root)
    todo = [(root, 0)]
    while todo:
        own, node = todo.pop()
        for child in own["children"]:
            action = int(child["action"])
            child["action"] = name(node, action)
            todo.append((child, int(tree.children[0, node, action])))
    return root


def prune(root: dict[str, Any], most: int = SHOWN) -> None:
    """Keep the most visited nodes: at most `BRANCHES` children of each, `most` in all; `hidden` counts the rest."""
    kept, todo = 1, [root]
    while todo:
        node = todo.pop(0)
        children = node["children"]
        room = max(0, min(BRANCHES, most - kept))
        node["hidden"] = node.get("hidden", 0) + max(0, len(children) - room)
        node["children"] = children[:room]
        kept += len(node["children"])
        todo = sorted([*todo, *node["children"]], key=lambda one: -one["visits"])

"""Our search trees compared with mctx's, node by node, and the compiled with the tensor tree: results/search-trees.

python benchmarks/search_trees.py

The trees of mctx are in tests/golden/search_trees.json, written by tests/golden/make_search_trees.py.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from foresight.runtime import bench  # noqa: E402
from tests.golden import test_search_trees as golden  # noqa: E402

Nodes = dict[str, Any]  # {path: (visits, value or None)}


def difference_of(ours: Nodes, theirs: Nodes) -> tuple[float, int]:
    """The largest difference of a value, and how many nodes have different visits or are in one tree only."""
    both = [path for path in ours if path in theirs]
    values = [abs(ours[path][1] - theirs[path][1]) for path in both if None not in (ours[path][1], theirs[path][1])]
    differ = sum(ours[path][0] != theirs[path][0] for path in both) + len(set(ours) ^ set(theirs))
    return max(values, default=0.0), differ


def main() -> None:
    began = time.perf_counter()
    to_mctx, between, visits, nodes = 0.0, 0.0, 0, 0
    for case in golden.CASES:
        with pytest.MonkeyPatch.context() as patch:
            trees = [golden.found(case, backend, patch) for backend in ("compiled", "tensor")]
        for row, expected in enumerate(case["nodes"]):
            compiled, tensor = (golden.paths(tree, row) for tree in trees)
            for ours in (compiled, tensor):
                difference, differ = difference_of(ours, expected)
                to_mctx, visits = max(to_mctx, difference), visits + differ
            difference, differ = difference_of(compiled, tensor)
            between, visits, nodes = max(between, difference), visits + differ, nodes + len(expected)
    result = {
        "what": "PUCT and Gumbel trees compared with mctx on shared inputs, and the two backends with each other",
        "command": "python benchmarks/search_trees.py",
        "seeds": 0,
        "largest_difference": to_mctx,
        "between_backends": between,
        "visits_that_differ": visits,
        "nodes": nodes,
        "seconds": round(time.perf_counter() - began, 1),
        "versions": bench.versions(),
        "machine": bench.machine(),
    }
    (ROOT / "results" / "search-trees.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key not in ("versions", "machine")}))


if __name__ == "__main__":
    main()

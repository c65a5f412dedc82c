"""Tree search with PUCT compared with LightZero's C++ tree: batch 64, 50 simulations, 9 actions, a 2 x 128 MLP.

The same weights on both sides, MuZero's rule with Dirichlet noise at the root, values normalized over the tree, tree
and network together. The peer is LightZero's compiled tree in its own loop (`MuZeroMCTSCtree.search`), which gathers
the states of the leaves in Python; for the tree `pip install --no-deps lightzero` is enough.
"""

from __future__ import annotations

from typing import Any

UNIT = "simulations/s"
PEER = "lightzero"
TARGET = 3.0


def ours() -> dict[str, Any]:
    """This library's search, as `muzero` calls it."""
    from benchmarks import _search
    from foresight.planning.search.mcts import PUCT, Dirichlet

    return _search.ours(PUCT(normalize="tree", first_play="parent"), noise=Dirichlet(0.3, 0.25), temperature=1.0)


def peer() -> dict[str, Any]:
    """LightZero's search."""
    from benchmarks import _search

    return _search.lightzero()

"""Tree search with PUCT: batch 64, 50 simulations, 9 actions, a 64-wide latent with a 2 x 128 MLP.

The same weights on both sides, MuZero's rule with Dirichlet noise at the root, values normalized by siblings, tree and
network together. The peer is compiled by JAX for the CPU.
"""

from __future__ import annotations

from typing import Any

UNIT = "simulations/s"
PEER = "mctx"
TARGET = 1.0


def ours() -> dict[str, Any]:
    """This library's search, as a user calls it."""
    from benchmarks import _search
    from foresight.planning.search.mcts import PUCT, Dirichlet

    return _search.ours(PUCT(), noise=Dirichlet(0.3, 0.25), temperature=1.0)


def peer() -> dict[str, Any]:
    """mctx.muzero_policy."""
    from benchmarks import _search

    return _search.mctx("muzero_policy")

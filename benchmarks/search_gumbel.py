"""Tree search of Gumbel MuZero: batch 64, 50 simulations, 9 actions, a 64-wide latent with a 2 x 128 MLP.

The same weights on both sides, 16 considered actions, completed values, tree and network together. The peer is
compiled by JAX for the CPU.
"""

from __future__ import annotations

from typing import Any

UNIT = "simulations/s"
PEER = "mctx"
TARGET = 1.0


def ours() -> dict[str, Any]:
    """This library's search, as a user calls it."""
    from benchmarks import _search
    from foresight.planning.search.mcts import Gumbel

    return _search.ours(Gumbel())


def peer() -> dict[str, Any]:
    """mctx.gumbel_muzero_policy."""
    from benchmarks import _search

    return _search.mctx("gumbel_muzero_policy")

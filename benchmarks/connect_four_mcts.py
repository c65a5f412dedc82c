"""Monte Carlo tree search with random playouts from the empty board of Connect Four, one thread.

One search of 100,000 simulations (the peer's Python search: 10,000), UCT with c = 2, one playout per leaf, without
reuse of trees. Compilation is a separate warm-up (`warmup_seconds`). The peer is OpenSpiel's search in Python with its
C++ rules; `openspiel_cpp_rate`, measured in the same process as `rate`, is its search in C++.
"""

from __future__ import annotations

import time
from typing import Any

UNIT = "simulations/s"
PEER = "open_spiel"
TARGET = 5.0


def ours() -> dict[str, Any]:
    from foresight.envs.games import make as games
    from foresight.planning.search import playouts

    game, random = games.make("connect_four"), playouts.stream(0)
    began = time.perf_counter()
    playouts.uct(game, game.start(1), 10, random)
    warmup = time.perf_counter() - began
    began = time.perf_counter()
    visits, _ = playouts.uct(game, game.start(1), 100_000, random)
    seconds = time.perf_counter() - began
    spiel = games.make("connect_four", rules="openspiel")
    position = spiel.start(1)
    start = time.perf_counter()
    playouts.uct(spiel, position, 50_000, random)
    other = 50_000 / (time.perf_counter() - start)
    return {
        "rate": 100_000 / seconds,
        "seconds": seconds,
        "threads": 1,
        "warmup_seconds": warmup,
        "best_column": int(visits.argmax()) + 1,
        "openspiel_cpp_rate": other,
        "ratio_to_openspiel_cpp": 100_000 / seconds / other,
    }


def peer() -> dict[str, Any]:
    import numpy as np
    import pyspiel
    from open_spiel.python.algorithms import mcts

    game, random = pyspiel.load_game("connect_four"), np.random.RandomState(0)
    bot = mcts.MCTSBot(game, 2.0, 10_000, mcts.RandomRolloutEvaluator(1, random), random_state=random, solve=False)
    began = time.perf_counter()
    root = bot.mcts_search(game.new_initial_state())
    seconds = time.perf_counter() - began
    best = max(root.children, key=lambda child: child.explore_count).action
    return {"rate": 10_000 / seconds, "seconds": seconds, "threads": 1, "best_column": best + 1}

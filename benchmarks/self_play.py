"""Self-play of AlphaZero: positions per second in tic-tac-toe and Connect Four, and a time profile.

The presets unchanged, an untrained network, one thread, no training: 64 games of tic-tac-toe with 25 simulations per
move, 128 of Connect Four with 16. `rate` is Connect Four's. Shares: `rules` is playing moves, legal moves and planes;
`network` is the forward pass; `tree` is the rest: selection, expansion, backup and recording.
"""

from __future__ import annotations

import time
from typing import Any

import torch

UNIT = "positions/s"
PEER = ""


def ours() -> dict[str, Any]:
    torch.set_num_threads(1)
    four, three = measure("connect_four", 30), measure("tic_tac_toe", 60)
    named = {f"tic_tac_toe_{key}": value for key, value in three.items()}
    return {**four, **named, "threads": 1}


def measure(name: str, moves: int) -> dict[str, Any]:
    from foresight.algorithms.search import alphazero
    from foresight.envs.games import make as games
    from foresight.runtime.config import resolve

    config = alphazero.Config(**{**resolve.resolve("alphazero", preset=name).config, "playout_steps": 0})
    game = games.make(name)
    state = alphazero.build(config, game)
    state.running.actions = [[] for _ in range(config.num_games)]
    state.running.rows = [[] for _ in range(config.num_games)]
    clocks = {"rules": 0.0, "network": 0.0}

    def timed(function: Any, key: str) -> Any:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            answer = function(*args)
            clocks[key] += time.perf_counter() - began
            return answer

        return run

    for part in ("step", "legal", "planes", "mover"):
        setattr(game, part, timed(getattr(game, part), "rules"))
    network = state.player if state.player is not None else state.network
    network.forward = timed(network.forward, "network")  # type: ignore[method-assign]
    position = game.start(config.num_games)
    for _ in range(5):
        position = alphazero.self_play(state, position)  # compiles
    clocks.update(rules=0.0, network=0.0)
    began, before = time.perf_counter(), state.step
    for _ in range(moves):
        position = alphazero.self_play(state, position)
    seconds = time.perf_counter() - began
    played = state.step - before
    return {
        "rate": played / seconds,
        "simulations_per_second": played * config.simulations / seconds,
        "share_rules": clocks["rules"] / seconds,
        "share_network": clocks["network"] / seconds,
        "share_tree": 1 - (clocks["rules"] + clocks["network"]) / seconds,
        "simulations": config.simulations,
    }

"""Self-play of AlphaZero: positions per second in Connect Four and tic-tac-toe, and a time profile.

The presets unchanged, one thread, no training: 128 games of Connect Four with 32 simulations per move, 64 of
tic-tac-toe with 25. `rate` is Connect Four's with the bundled agent's weights, as late in training; `untrained_rate`
is that of a new network, whose games share fewer positions; `plain_rate` is `rate` in float32 and with every position
computed. Shares: `rules` is playing moves, legal moves and planes; `network` is the forward pass; `tree` is the rest:
selection, expansion, backup and recording.
"""

from __future__ import annotations

import time
from typing import Any

import torch

UNIT = "positions/s"
PEER = ""


def ours() -> dict[str, Any]:
    torch.set_num_threads(1)
    four, new = measure("connect_four", 30, trained=True), measure("connect_four", 20)
    plain, three = measure("connect_four", 20, trained=True, plain=True), measure("tic_tac_toe", 60)
    named = {f"tic_tac_toe_{key}": value for key, value in three.items()}
    rates = {"untrained_rate": new["rate"], "plain_rate": plain["rate"], "speedup": four["rate"] / plain["rate"]}
    return {**four, **rates, **named, "threads": 1}


def measure(name: str, moves: int, trained: bool = False, plain: bool = False) -> dict[str, Any]:
    import foresight
    from foresight.algorithms.search import alphazero
    from foresight.envs.games import make as games
    from foresight.runtime.config import resolve

    options = {**resolve.resolve("alphazero", preset=name).config, "playout_steps": 0}
    config = alphazero.Config(**{**options, "precision": "float32"} if plain else options)
    game = games.make(name)
    state = alphazero.build(config, game)
    if trained:
        state.network.load_state_dict(foresight.load(name).state.network.state_dict())
    once = alphazero.each_once
    if plain:
        alphazero.each_once = lambda network: network
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
    network.forward = timed(network.forward, "network")
    position = game.start(config.num_games)
    for _ in range(5):
        position = alphazero.self_play(state, position)  # compiles
    clocks.update(rules=0.0, network=0.0)
    began, before = time.perf_counter(), state.step
    for _ in range(moves):
        position = alphazero.self_play(state, position)
    seconds = time.perf_counter() - began
    played = state.step - before
    alphazero.each_once = once
    return {
        "rate": played / seconds,
        "simulations_per_second": played * config.simulations / seconds,
        "share_rules": clocks["rules"] / seconds,
        "share_network": clocks["network"] / seconds,
        "share_tree": 1 - (clocks["rules"] + clocks["network"]) / seconds,
        "simulations": config.simulations,
    }

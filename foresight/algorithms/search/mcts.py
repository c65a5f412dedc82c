"""MCTS: Bandit based Monte-Carlo planning, Kocsis & Szepesvári 2006, with random playouts.

    a* = argmax_a N(s, a),   down the tree by  argmax_a  Q(s, a) + c √(ln N(s) / N(s, a))

Planning only: nothing is trained, and every move starts a new search. The value of a new leaf is the result of one
uniformly random playout. Kept: untried actions come first; the most visited action is played. Left out: progressive
bias, and later additions (RAVE, solving). `train` plays `steps` games against the game's opponent and reports the
score, so that a run can be compared and played against like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresight.envs.games.game import Game
from foresight.errors import UserError
from foresight.planning.games import opponents
from foresight.planning.search import playouts

KIND = "game"
UNIT = "games"
METRICS = ("score", "moves")


@dataclass(frozen=True)
class Config:
    """Defaults as in OpenSpiel's examples."""

    steps: int = 20  # games against the game's opponent
    seed: int = 0
    simulations: int = 1000  # playouts per move
    c: float = 2.0  # exploration, for results in [-1, 1]


@dataclass
class State:
    """Random numbers and counters."""

    config: Config
    random: np.ndarray  # `playouts.stream`
    step: int = 0
    points: float = 0.0
    game: Any = field(default=None, metadata={"save": False})


def build(config: Config, game: Game, device: str | torch.device = "cpu") -> State:
    """The State. Raises UserError for fewer than 1 simulation or more than fit into memory, and for an invalid `c`."""
    if config.simulations < 1:
        raise UserError(
            f"simulations must be at least 1, not {config.simulations}: MCTS has no policy without a search."
        )
    if not 0 <= config.c < math.inf:
        raise UserError(f"c must be a number of at least 0, not {config.c}.")
    playouts.require_room(game, config.simulations)
    return State(config, playouts.stream(config.seed), game=game)


def act(
    state: State, obs: Tensor, carry: None = None, explore: bool = False, simulations: int | None = None
) -> tuple[Tensor, dict[str, Any], None]:
    """The most visited action at each position; with `explore`, one sampled in proportion to the visits.

    Extras: `value` `[B]` for the player to move, `visits`, `values`, `prior` `[B, A]` (uniform), and of a single
    position the `tree`; those of a batch would be large.
    """
    if simulations is not None and simulations < 1:
        raise UserError(f"simulations must be at least 1, not {simulations}: MCTS has no policy without a search.")
    asked = (state.game, obs, simulations or state.config.simulations, state.random, state.config.c)
    tree = None
    if len(obs) == 1:
        visits, values, tree = playouts.grow(*asked)
    else:
        visits, values = playouts.uct(*asked)
    legal = state.game.legal(obs)
    share = visits / visits.sum(-1, keepdim=True)
    if explore:
        seed = playouts.seed_of(state.random)
        action = torch.multinomial(share, 1, generator=torch.Generator().manual_seed(seed)).squeeze(-1)
    else:
        action = (visits + 0.25 * values).masked_fill(~legal, -1.0).argmax(-1)
    extras: dict[str, Any] = {
        "value": (share * values).sum(-1), "visits": visits, "values": values,
        "prior": legal / legal.sum(-1, keepdim=True),
    }  # fmt: skip
    if tree is not None:
        extras["tree"] = tree
    return action, extras, carry


def update(state: State, score: float) -> dict[str, float]:
    """Count one game's score."""
    state.step += 1
    state.points += score
    return {"score": state.points / state.step}


def train(
    config: Config, env: Game, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """One game per step against the game's opponent, moving first in every other game."""
    if state is None:
        state = build(config, env, device)
    game = state.game = env
    while state.step < config.steps:
        first = state.step % 2 == 0
        opponent = opponents.make(game.opponent, game, config.seed + state.step)
        position = game.start(1)
        while not bool(game.over(position)[0]):
            ours = (int(game.mover(position)[0]) == 0) == first
            action = act(state, position)[0] if ours else opponent(position)
            position = game.step(position, action).position
            game.free_except(position)
        score = float(game.first_score(position)[0])
        metrics = update(state, score if first else 1 - score)
        yield state.step, {**metrics, "moves": float(game.moves(position)[0])}, state

"""Games: the rules of two-player games, which an agent plays against itself."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from foresight.runtime.kinds.kind import Kind, fold, make_env

if TYPE_CHECKING:
    from foresight.envs.games.game import Game
    from foresight.runtime.agent import Agent
    from foresight.runtime.catalog import Algorithm, State
    from foresight.runtime.config.settings import Settings
    from foresight.runtime.evaluation.evaluate import Evaluation


def _training(settings: Settings) -> Game:
    from foresight.planning.games import opponents

    env: Game = make_env(settings)
    opponents.make(env.opponent, env)  # raises here, not at the first evaluation, if there is no such opponent
    return env


def _evaluate(module: Algorithm, state: State, game: Game, episodes: int | None, seed: int) -> Evaluation:
    from foresight.runtime.evaluation import evaluate

    if hasattr(module, "measure"):
        return evaluate.from_measure(module, state, game)
    return _score(module, state, game, episodes, seed)


def _score(
    module: Algorithm, state: State, game: Game, episodes: int | None, seed: int, random: bool = False
) -> Evaluation:
    """The score of the State's play (or, with `random`, of random play) against the game's opponent."""
    from foresight.planning.games import opponents
    from foresight.runtime.evaluation import match
    from foresight.runtime.evaluation.evaluate import EVALUATION_SEED, Evaluation

    other = opponents.make(game.opponent, game, seed + EVALUATION_SEED)
    one = opponents.make("random", game, seed) if random else match.chooser(module, state)
    mine = getattr(state, "game", None)
    try:
        if hasattr(state, "game"):
            state.game = game  # its positions are those of this game
        result = match.play(game, one, other, max(2, episodes or 2), seed=seed)
    finally:
        if hasattr(state, "game"):
            state.game = mine
    won, drawn, lost = result.counts
    extra = {"won": float(won), "drawn": float(drawn), "lost": float(lost)}
    return dataclasses.replace(
        Evaluation.of(f"score against {game.opponent}", list(result.scores)), extra_metrics=extra
    )


def _act(agent: Agent, obs: Any, explore: bool) -> Any:
    """Actions for a batch of positions of `agent.env`."""
    import torch

    with torch.no_grad():
        return agent.module.act(agent.state, obs, None, explore=explore)[0].cpu().numpy()


KIND = Kind(
    actors=True,
    resolve_name=lambda name, entry: (None, fold(name)),
    training_env=_training,
    evaluation_env=lambda settings, env: make_env(settings),  # a game may store the positions in play, and drop others'
    single_env=lambda settings, render: make_env(settings),
    evaluate=_evaluate,
    baseline=lambda module, state, env, episodes, seed: _score(module, state, env, episodes, seed, random=True),
    act=_act,
    matches=True,
)

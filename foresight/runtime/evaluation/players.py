"""Players of a match by name: a run directory, or an opponent that needs no training."""

from __future__ import annotations

from pathlib import Path

from foresight.envs.games.game import Chooser, Game
from foresight.errors import UserError
from foresight.planning.games import opponents
from foresight.runtime import kinds, run
from foresight.runtime.checkpoints import checkpoint
from foresight.runtime.config.settings import Settings
from foresight.runtime.evaluation import match


def player(name: str, game: Game | None, seed: int = 0, simulations: int | None = None) -> tuple[Chooser, Game]:
    """A player by name (a run directory or an opponent), and its game (`game` for an opponent).

    Raises UserError for a run of another game than `game`, for a run that plays no game, and for an opponent if
    `game` is None.
    """
    if opponents.is_opponent(name) and not Path(name).exists():
        if game is None:
            raise UserError("The first player must be a run, whose game the opponents then play. Name a run first.")
        return opponents.make(name, game, seed), game
    agent = run.load(run.find(name))
    if not kinds.get(agent.settings.kind).matches:
        raise UserError(f"{name} is a run of {agent.settings.algorithm} on {agent.settings.env}, which is not a game.")
    if game is not None and (agent.env.name, agent.env.options) != (game.name, game.options):
        raise UserError(f"{name} plays {_describe(agent.env)}, but the other player plays {_describe(game)}.")
    if game is not None and (type(agent.env), agent.env.shape) != (type(game), game.shape):
        raise UserError(f"{name} and the other player were trained with different rules=: their boards differ.")
    if game is not None and hasattr(agent.state, "game"):
        agent.state.game = game  # both players must know the same positions
    options = {} if simulations is None else {"simulations": simulations}
    return match.chooser(agent.module, agent.state, **options), game or agent.env


def simulations_of(name: str, given: int | None = None) -> int | None:
    """Simulations per move when a run plays: `given`, or else those of its Config.

    None for an opponent, whose name holds them.
    """
    if opponents.is_opponent(name) and not Path(name).exists():
        return None
    config = Settings.read(run.find(name)).config
    counts = [given, config.get("play_simulations"), config.get("simulations")]
    return next((count for count in counts if count is not None), None)


def checkpoints(name: str, count: int, simulations: int | None = None) -> tuple[dict[int, Chooser], Game]:
    """Up to `count` checkpoints of one run as players by step, evenly spaced from the oldest to the newest.

    Raises UserError for a run that plays no game, and for one with fewer than two checkpoints.
    """
    path = run.find(name)
    agent = run.load(path)
    if not kinds.get(agent.settings.kind).matches:
        raise UserError(f"{name} is a run of {agent.settings.algorithm} on {agent.settings.env}, which is not a game.")
    steps = list(checkpoint.all_steps(path / "checkpoints"))
    if count < 2 or len(steps) < 2:
        raise UserError(
            f"{count} checkpoints of {name} cannot play each other: it has {checkpoint.listed(path / 'checkpoints')}, "
            "and at least two must play. Keep more with: foresight train ... --keep 100 --checkpoint-every 60"
        )
    count = min(count, len(steps))
    options = {} if simulations is None else {"simulations": simulations}
    found = {}
    for i in range(count):
        step = steps[round(i * (len(steps) - 1) / (count - 1))]
        one = run.load(path, step)
        one.state.game = agent.env  # all players must know the same positions
        one.state.replay = None  # may be large, and is not needed to play
        found[step] = match.chooser(one.module, one.state, **options)
    return found, agent.env


def _describe(game: Game) -> str:
    options = ", ".join(f"{key}={value}" for key, value in game.options.items())
    return f"{game.title} ({options})" if options else game.title

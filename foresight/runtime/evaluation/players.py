"""Players by name: a run directory, or an opponent that needs no training."""

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
    """A player by name: a run directory, or an opponent; and its game (`game` for an opponent).

    Raises UserError for a run of another game than `game`, for a run that plays no game, and for an opponent where no
    game is known yet.
    """
    if opponents.is_opponent(name) and not Path(name).exists():
        if game is None:
            raise UserError("Name a run first: the opponents play whatever game it plays.")
        return opponents.make(name, game, seed), game
    agent = run.load(run.find(name))
    if not kinds.get(agent.settings.kind).matches:
        raise UserError(f"{name} is a run of {agent.settings.algorithm} on {agent.settings.env}, which is no game.")
    if game is not None and (agent.env.name, agent.env.options) != (game.name, game.options):
        raise UserError(f"{name} plays {_called(agent.env)}, but the other player plays {_called(game)}.")
    if game is not None and (type(agent.env), agent.env.shape) != (type(game), game.shape):
        raise UserError(f"{name} was trained with other rules= than the other player: it sees other boards.")
    if game is not None and hasattr(agent.state, "game"):
        agent.state.game = game  # both players must know the same positions
    options = {} if simulations is None else {"simulations": simulations}
    return match.chooser(agent.module, agent.state, **options), game or agent.env


def simulations_of(name: str, given: int | None = None) -> int | None:
    """How many simulations a run searches a move with in play: those `given`, or as its Config says.

    None for an opponent, whose name says it.
    """
    if opponents.is_opponent(name) and not Path(name).exists():
        return None
    config = Settings.read(run.find(name)).config
    said = [given, config.get("play_simulations"), config.get("simulations")]
    return next((count for count in said if count is not None), None)


def checkpoints(name: str, count: int, simulations: int | None = None) -> tuple[dict[int, Chooser], Game]:
    """Up to `count` checkpoints of one run, from the oldest to the newest at even distances, as players by step.

    Raises UserError for a run that plays no game, and where it has kept fewer than two checkpoints.
    """
    path = run.find(name)
    agent = run.load(path)
    if not kinds.get(agent.settings.kind).matches:
        raise UserError(f"{name} is a run of {agent.settings.algorithm} on {agent.settings.env}, which is no game.")
    steps = list(checkpoint.all_steps(path / "checkpoints"))
    if count < 2 or len(steps) < 2:
        raise UserError(
            f"{name} has the checkpoints {checkpoint.listed(path / 'checkpoints')}, and {count} are to meet: two is "
            "the least. `foresight train ... --keep 100 --checkpoint-every 60` keeps more."
        )
    count = min(count, len(steps))
    options = {} if simulations is None else {"simulations": simulations}
    found = {}
    for i in range(count):
        step = steps[round(i * (len(steps) - 1) / (count - 1))]
        one = run.load(path, step)
        one.state.game = agent.env  # all players must know the same positions
        one.state.replay = None  # what it learned from, which may be large, is of no use here
        found[step] = match.chooser(one.module, one.state, **options)
    return found, agent.env


def _called(game: Game) -> str:
    words = ", ".join(f"{key}={value}" for key, value in game.options.items())
    return f"{game.title} ({words})" if words else game.title

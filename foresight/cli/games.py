"""`foresight match`, which plays agents and opponents against each other, and games against one in the terminal."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from foresight.cli import fields, screen
from foresight.errors import UserError

if TYPE_CHECKING:  # these import torch
    from rich.console import Console
    from torch import Tensor

    from foresight.envs.games.game import Game
    from foresight.runtime.agent import Agent

HINT = "Type a move; help lists the commands."
HELP = """a move     a name that `moves` lists, in upper or lower case, or an action number, such as #12
moves      list the legal moves
?          the agent's analysis: your expected score, the moves it searched, its principal variation
tree FILE  write that search tree to a .json, .dot, .png, .svg or .pdf file
undo       take back your last move
(nothing)  show the board again
quit       leave the game, also with Ctrl-D or Ctrl-C"""
EMPTY = " .-+"  # signs of empty cells in pictures of boards
SHOWN = 6  # moves in the agent's analysis


def match(
    first: Annotated[str, tyro.conf.Positional],
    second: Annotated[str | None, tyro.conf.Positional] = None,
    games: int = 100,
    openings: int | None = None,
    simulations: int | None = None,
    checkpoints: int | None = None,
    seed: int = 0,
    json: bool = False,
) -> int:
    """Play a match with both colors, and estimate the Elo difference with a 95% interval.

    With --checkpoints and one run, checkpoints of this run play a round robin, which shows whether the run improved.

    Args:
        first: a run directory, or the name of a bundled agent (connect_four).
        second: a run directory, a bundled agent, random, minimax:DEPTH, mcts:SIMULATIONS or solver (Connect Four).
        games: number of games, half of them with each color.
        openings: random moves at the start of each pair of games, the same for both colors; default: 2 between two
            runs, which would otherwise repeat the same game, and 0 against other opponents, which are random.
        simulations: simulations per move, for runs; default: as in their evaluation (play_simulations of the Config).
        checkpoints: number of checkpoints of the run that play a round robin, instead of a second player.
        seed: seed of opponents and openings.
        json: print the result as JSON.
    """
    if games < 1:
        raise UserError(f"--games must be at least 1, not {games}.")
    if openings is not None and openings < 0:
        raise UserError(f"--openings must be at least 0, not {openings}.")
    if simulations is not None and simulations < 0:
        raise UserError(f"--simulations must be 0 (the raw policy) or more, not {simulations}.")
    fields.check_seed(seed)
    from foresight.planning.games import opponents
    from foresight.runtime.evaluation import match as matches
    from foresight.runtime.evaluation import players

    if checkpoints is not None and second is None:
        return _ladder(first, checkpoints, games, 2 if openings is None else openings, simulations, seed, json)
    if second is None or checkpoints is not None:
        raise UserError(
            "Name a second player (foresight match RUN mcts:1000), or how many checkpoints of the run play each other "
            "(foresight match RUN --checkpoints 4), but not both."
        )
    names = [first, second]
    swapped = opponents.is_opponent(first) and not opponents.is_opponent(second)
    one, game = players.player(names[swapped], None, seed, simulations)
    other, _ = players.player(names[not swapped], game, seed + 1, simulations)
    if openings is None:
        openings = 0 if opponents.is_opponent(names[not swapped]) else 2
    left, right = (other, one) if swapped else (one, other)
    with _watched(f"{first} vs. {second}", games) as watch:
        result = matches.play(game, left, right, games, openings, seed, watch=watch)
    effort = [players.simulations_of(name, simulations) for name in names]
    document = {
        "game": game.title, "first": first, "second": second, "simulations": effort, "openings": openings,
        **result.document(),
    }  # fmt: skip
    if json:
        screen.emit(document)
        return 0
    won, drawn, lost = result.counts
    low, high = result.interval()
    console = screen.stdout()
    titles = [
        name if count is None else f"{name} ({count:,} simulations per move)"
        for name, count in zip(names, effort, strict=True)
    ]
    console.print(f"{titles[0]} vs. {titles[1]} at {game.title}, {games} games", markup=False)
    console.print(f"won {won}, drawn {drawn}, lost {lost}: score {100 * result.score:.1f}% "
                  f"(95%: {100 * low:.1f} to {100 * high:.1f})", markup=False)  # fmt: skip
    if games > 1:
        console.print(
            f"moving first {100 * document['score_first']:.1f}%, second {100 * document['score_second']:.1f}%"
        )
    middle, bottom, top = (_elo(x) for x in result.elo())
    console.print(f"Elo {middle} (95%: {bottom} to {top})", markup=False)
    return 0


def _ladder(name: str, count: int, games: int, openings: int, simulations: int | None, seed: int, json: bool) -> int:
    """A round robin of the checkpoints of one run, with their Elo ratings."""
    from foresight.runtime.evaluation import match as matches
    from foresight.runtime.evaluation import players

    found, game = players.checkpoints(name, count, simulations)
    steps = list(found)
    with _watched(f"checkpoints of {name}", games * len(steps) * (len(steps) - 1) // 2) as watch:
        result = matches.ladder(game, list(found.values()), games, openings, seed, watch)
    if json:
        screen.emit({"game": game.title, "run": name, "openings": openings, "steps": steps, **result})
        return 0
    console = screen.stdout()
    console.print(f"{len(steps)} checkpoints of {name} at {game.title}, {games} games per pair", markup=False)
    rows = [
        (f"{step:,}", f"{row['elo']:+d}", f"{row['elo_low']:+d} to {row['elo_high']:+d}")
        for step, row in zip(steps, result["elo"], strict=True)
    ]
    screen.table(console, ("step", "Elo", "95%"), rows)
    return 0


@contextlib.contextmanager
def _watched(title: str, games: int) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a match on stderr. A thread refreshes it, so that it also moves during a long search."""
    from foresight.runtime.monitoring.progress import Progress

    progress, counts, over = Progress(title, games, "games", ("moves",)), [0, 0], threading.Event()

    def refresh() -> None:
        while not over.wait(0.5):
            progress.update(counts[0], {"moves": counts[1]})

    def watch(ended: int, moves: int) -> None:
        counts[0] += ended
        counts[1] += moves

    thread = threading.Thread(target=refresh, daemon=True)
    with progress:
        thread.start()
        try:
            yield watch
        finally:
            over.set()
            thread.join()
            progress.update(counts[0], {"moves": counts[1]})


def against(agent: Agent, human_first: bool, simulations: int | None, lines: Iterator[str]) -> None:
    """Play one game against `agent`, with the moves and commands of `lines`, until it is over or the lines end."""
    import torch

    from foresight.envs.games.notation import colors, named

    if simulations is not None and simulations < 0:
        raise UserError(f"--simulations must be 0 (the raw policy) or more, not {simulations}.")
    game, console = agent.env, screen.stdout()
    options = {} if simulations is None else {"simulations": simulations}
    history, drawn = [game.start(1)], 0
    human = 0 if human_first else 1
    sign = colors(game)[human]
    console.print(
        f"{game.title}: you move {'first' if human_first else 'second'}{f' ({sign})' if sign else ''}. {HINT}",
        style="dim", markup=False,
    )  # fmt: skip
    while not bool(game.over(history[-1])[0]):
        game.free_except(torch.cat(history))  # not the positions of searches
        position = history[-1]
        if drawn != len(history):  # the human's move is shown before the agent searches
            console.print("\n" + board(game, history) + "\n", markup=False)
            drawn = len(history)
        if int(game.mover(position)[0]) != human:
            action, extras, _ = agent.module.act(agent.state, position, None, explore=False, **options)
            action = action.cpu()  # the rules are on the CPU, wherever the network is
            name = game.move_name(position, int(action[0]))
            value = f" (your expected score: {_percent(-_value(extras, int(action[0])))})" if "value" in extras else ""
            history.append(game.step(position, action).position)
            console.print(f"The agent plays {name}{value}", markup=False)
            continue
        line = next(lines, None)
        if line is None or line.strip().lower() in ("quit", "q", "exit"):
            return
        before = len(history)
        _execute(line.strip(), agent, options, history, human, console, named)
        if len(history) != before or not line.strip():
            drawn = 0
    console.print("\n" + board(game, history) + "\n", markup=False)
    score = float(game.first_score(history[-1])[0])
    mine = score if human_first else 1 - score
    console.print({1.0: "You won.", 0.5: "A draw.", 0.0: "The agent won."}.get(mine, f"You scored {mine}."))


def board(game: Game, history: list[Tensor]) -> str:
    """The last position as text, with the cell of the last move in brackets where the picture has room for them."""
    lines = [f" {line} " for line in game.picture(history[-1]).splitlines()]
    if len(history) > 1:
        old = [f" {line} " for line in game.picture(history[-2]).splitlines()]
        last = -1 if game.name in ("chess", "shogi") else None  # the last line of their pictures holds counters
        changed = [
            (r, c, was in EMPTY)
            for r, (then, now) in enumerate(zip(old[:last], lines[:last], strict=False))
            if len(then) == len(now)
            for c, (was, sign) in enumerate(zip(then, now, strict=True))
            if was != sign and sign.isalpha() and now[c - 1] == now[c + 1] == " "
        ]
        placed = [cell for cell in changed if cell[2]]  # a stone that only changed color was not placed
        for r, c, _ in placed or changed:
            lines[r] = f"{lines[r][: c - 1]}({lines[r][c]}){lines[r][c + 2 :]}"
    return "\n".join(line.rstrip() for line in lines)


def _execute(
    line: str,
    agent: Agent,
    options: dict[str, Any],
    history: list[Tensor],
    human: int,
    console: Console,
    named: Callable[[Game, Tensor, str], int],
) -> None:
    """Execute one line of input: a command or a move."""
    game, position = agent.env, history[-1]
    if line.lower() in ("?", "view", "hint"):
        console.print(view(agent, position, options), markup=False)
    elif line.lower().split(" ")[0] == "tree":
        try:
            console.print(draw(agent, position, options, line[4:].strip()), markup=False)
        except UserError as error:
            console.print(str(error), style="yellow", markup=False)
    elif line.lower() == "moves":
        legal = game.legal(position)[0].nonzero().flatten().tolist()
        console.print("Legal: " + ", ".join(game.move_name(position, action) for action in legal), markup=False)
    elif line.lower() == "undo":
        before = [i for i, old in enumerate(history[:-1]) if int(game.mover(old)[0]) == human]
        if before:
            del history[before[-1] + 1 :]
        else:
            console.print("There is no move to take back.")
    elif line.lower() in ("help", "h"):
        console.print(HELP, style="dim", markup=False)
    elif not line:
        return  # the caller prints the board again
    else:
        try:
            action = named(game, position, line)
        except UserError as error:
            console.print(str(error), style="yellow", markup=False)
            return
        import torch

        history.append(game.step(position, torch.tensor([action])).position)


def view(agent: Agent, position: Tensor, options: dict[str, Any]) -> str:
    """The agent's analysis of one position as text: the expected score (1 a win, ½ a draw) of its best move for the
    player to move, visits, prior and value of the moves that it searched, and its principal variation.
    """
    from foresight.runtime.evaluation.match import principal_variation

    game = agent.env
    action, extras, _ = agent.module.act(agent.state, position, None, explore=False, **options)
    played = int(action[0])
    words = [f"Your expected score: {_percent(_value(extras, played))}, with {game.move_name(position, played)}."]
    if "visits" in extras:
        visits, prior = extras["visits"][0], extras["prior"][0]
        order = (visits.double() + prior.double()).argsort(descending=True).tolist()
        order.sort(key=lambda one: one != played)  # the move that it would play comes first
        order = [action for action in order if visits[action] > 0 or prior[action] > 0][:SHOWN]
        tree = extras.get("tree")
        values = tree.child_values()[0] if tree is not None else extras.get("values", [None])[0]
        words.append("move     visits   prior   value")
        for action in order:
            value = _percent(float(values[action])) if values is not None and visits[action] > 0 else ""
            name = game.move_name(position, action)
            words.append(f"{name:<8} {int(visits[action]):>6}   {100 * float(prior[action]):>4.0f}%   {value:>5}")
        if tree is not None:
            words.append("line     " + " ".join(_names(game, position, principal_variation(tree, played))))
    return "\n".join(words)


def draw(agent: Agent, position: Tensor, options: dict[str, Any], out: str) -> str:
    """Write the agent's search tree of one position to `out` (.json, .dot for Graphviz, or a picture of its lines).

    Returns a message that names the file. Moves have names where a name means the same move in every position, and
    action numbers elsewhere (chess). Raises UserError if the agent does not search or the file cannot be written.
    """
    from foresight.envs.games.openspiel import Spiel
    from foresight.planning.search import drawing

    file = Path(out)
    if file.suffix not in (".json", ".dot", ".png", ".svg", ".pdf"):
        raise UserError(
            f"'{out}' is not a file that ends in .json, .dot, .png, .svg or .pdf. Type for example: tree search.png"
        )
    _, extras, _ = agent.module.act(agent.state, position, None, explore=False, **options)
    tree, game = extras.get("tree"), agent.env
    if tree is None:
        raise UserError("This agent does not search, so there is no search tree.")
    names = str if isinstance(game, Spiel) else functools.partial(game.move_name, position)
    try:
        if file.suffix in (".json", ".dot"):
            write = drawing.as_json if file.suffix == ".json" else drawing.as_dot
            file.write_text(write(tree, names=names), encoding="utf-8")
        else:
            drawing.picture(tree, names=names).savefig(file)
    except OSError as error:
        raise UserError(f"Cannot write to {file}: {error.strerror or error}.") from error
    return f"Search tree written to {file}"


def _names(game: Game, position: Tensor, actions: list[int]) -> list[str]:
    """The names of the moves, up to the first illegal one: a search in a learned model may continue after the end."""
    import torch

    names: list[str] = []
    for action in actions:
        if not bool(game.legal(position)[0, action]):
            break
        names.append(game.move_name(position, action))
        position = game.step(position, torch.tensor([action])).position
    return names


def _value(extras: dict[str, Any], played: int) -> float:
    """The value in [-1, 1] of the move `played` for the player who makes it; without a search, of the position."""
    tree, visits = extras.get("tree"), extras.get("visits")
    values = tree.child_values() if tree is not None else extras.get("values")
    if visits is None or values is None or not visits[0, played] > 0:
        return float(extras["value"][0])
    return float(values[0, played])


def _percent(value: float) -> str:
    """A value in [-1, 1] as an expected score in percent; the values of learned models are clamped to the interval."""
    return f"{50 * (1 + min(max(value, -1.0), 1.0)):.0f}%"


def _elo(x: float) -> str:
    return f"{x:+.0f}" if math.isfinite(x) else ("+inf" if x > 0 else "-inf")

"""A game against an agent in the terminal, and `foresight match`: agents and opponents against each other."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro

from foresight.cli import screen
from foresight.errors import UserError

HINT = "Type a move; help lists the commands."
HELP = """a move     as `moves` lists them, in upper or lower case, or its number as #12
moves      the legal ones
?          the agent's view: what you can expect, the moves it looked at, the line it expects
tree FILE  the search behind that: .json, .dot, .png, .svg or .pdf
undo       take your last move back
(nothing)  the board again
quit       leave the game, as Ctrl-D and Ctrl-C do"""
EMPTY = " .-+"  # of a board
SHOWN = 6  # actions of the agent's view


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
    """Play a match, both colors, and estimate the difference in Elo with its interval.

    With --checkpoints and one run, its own checkpoints meet each other: did it grow stronger?

    Args:
        first: a run directory, or the name of a bundled agent (connect_four).
        second: another of these, or random, minimax:DEPTH, mcts:SIMULATIONS, solver (Connect Four).
        games: how many; half of them with each color.
        openings: random moves before each game, the same for both colors; by default 2 between two runs, which
            would else repeat one game, and 0 against the others, which vary by themselves.
        simulations: a move, of the search of runs; by default those of their result (play_simulations of the Config).
        checkpoints: instead of a second player, how many checkpoints of the first meet, each of them every other.
        seed: of opponents and openings.
        json: print the result as JSON.
    """
    if games < 1:
        raise UserError(f"--games must be at least 1, not {games}.")
    if openings is not None and openings < 0:
        raise UserError(f"--openings must be at least 0, not {openings}.")
    if simulations is not None and simulations < 0:
        raise UserError(f"--simulations must be 0 (the raw policy) or more, not {simulations}.")
    from foresight.planning.games import opponents
    from foresight.runtime.evaluation import match as matches
    from foresight.runtime.evaluation import players

    if checkpoints is not None and second is None:
        return _ladder(first, checkpoints, games, 2 if openings is None else openings, simulations, seed, json)
    if second is None or checkpoints is not None:
        raise UserError("Name a second player, or say how many of the run's checkpoints shall meet (--checkpoints 4).")
    names = [first, second]
    swapped = opponents.is_opponent(first) and not opponents.is_opponent(second)
    one, game = players.player(names[swapped], None, seed, simulations)
    other, _ = players.player(names[not swapped], game, seed + 1, simulations)
    if openings is None:
        openings = 0 if opponents.is_opponent(names[not swapped]) else 2
    left, right = (other, one) if swapped else (one, other)
    with _watched(f"{first} against {second}", games) as watch:
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
    called = [
        name if count is None else f"{name} ({count:,} simulations a move)"
        for name, count in zip(names, effort, strict=True)
    ]
    console.print(f"{called[0]} against {called[1]} at {game.title}, {games} games", markup=False)
    console.print(f"won {won}, drawn {drawn}, lost {lost}: {100 * result.score:.1f}% of the points "
                  f"(95%: {100 * low:.1f} to {100 * high:.1f})", markup=False)  # fmt: skip
    if games > 1:
        console.print(
            f"moving first {100 * document['score_first']:.1f}%, second {100 * document['score_second']:.1f}%"
        )
    middle, bottom, top = (_elo(x) for x in result.elo())
    console.print(f"Elo {middle} (95%: {bottom} to {top})", markup=False)
    return 0


def _ladder(name: str, count: int, games: int, openings: int, simulations: int | None, seed: int, json: bool) -> int:
    """The checkpoints of one run against each other."""
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
    console.print(f"{len(steps)} checkpoints of {name} at {game.title}, {games} games each pair", markup=False)
    rows = [
        (f"{step:,}", f"{row['elo']:+d}", f"{row['elo_low']:+d} to {row['elo_high']:+d}")
        for step, row in zip(steps, result["elo"], strict=True)
    ]
    console.print(screen.table(("step", "Elo", "95%"), rows))
    return 0


@contextlib.contextmanager
def _watched(title: str, games: int) -> Iterator[Callable[[int, int], None]]:
    """Progress of a match on stderr, also while one player thinks: a thread of its own looks at what was told last."""
    from foresight.runtime.monitoring.progress import Progress

    progress, told, over = Progress(title, games, "games", ("moves",)), [0, 0], threading.Event()

    def beat() -> None:
        while not over.wait(0.5):
            progress.update(told[0], {"moves": told[1]})

    def watch(ended: int, moves: int) -> None:
        told[0] += ended
        told[1] += moves

    thread = threading.Thread(target=beat, daemon=True)
    with progress:
        thread.start()
        try:
            yield watch
        finally:
            over.set()
            thread.join()
            progress.update(told[0], {"moves": told[1]})


def sit(agent: Any, person_first: bool, simulations: int | None, lines: Iterator[str]) -> None:
    """Play one game against `agent`, moves from `lines`, until it is over or the lines end."""
    from foresight.envs.games.notation import colors, named

    if simulations is not None and simulations < 0:
        raise UserError(f"--simulations must be 0 (the raw policy) or more, not {simulations}.")
    game, console = agent.env, screen.stdout()
    options = {} if simulations is None else {"simulations": simulations}
    history, drawn = [game.start(1)], 0
    person = 0 if person_first else 1
    sign = colors(game)[person]
    console.print(
        f"{game.title}: you move {'first' if person_first else 'second'}{f' ({sign})' if sign else ''}. {HINT}",
        style="dim", markup=False,
    )  # fmt: skip
    while not bool(game.over(history[-1])[0]):
        position = history[-1]
        if drawn != len(history):  # also one's own move before the agent thinks of an answer
            console.print("\n" + board(game, history) + "\n", markup=False)
            drawn = len(history)
        if int(game.mover(position)[0]) != person:
            action, extras, _ = agent.module.act(agent.state, position, None, explore=False, **options)
            name = game.move_name(position, int(action[0]))
            value = f": you can expect {_share(-_worth(extras, int(action[0])))}" if "value" in extras else ""
            history.append(game.step(position, action).position)
            console.print(f"The agent plays {name}{value}", markup=False)
            continue
        line = next(lines, None)
        if line is None or line.strip().lower() in ("quit", "q", "exit"):
            return
        before = len(history)
        _answer(line.strip(), agent, options, history, person, console, named)
        if len(history) != before or not line.strip():
            drawn = 0
    console.print("\n" + board(game, history) + "\n", markup=False)
    score = float(game.first_score(history[-1])[0])
    mine = score if person_first else 1 - score
    console.print({1.0: "You won.", 0.5: "A draw.", 0.0: "The agent won."}.get(mine, f"You scored {mine}."))


def board(game: Any, history: list[Any]) -> str:
    """The last of the positions for the eye, the cell of the last move in brackets where the picture has room."""
    lines = [f" {line} " for line in game.picture(history[-1]).splitlines()]
    if len(history) > 1:
        old = [f" {line} " for line in game.picture(history[-2]).splitlines()]
        last = -1 if game.name in ("chess", "shogi") else None  # below their boards stand counts
        changed = [
            (r, c, was in EMPTY)
            for r, (then, now) in enumerate(zip(old[:last], lines[:last], strict=False))
            if len(then) == len(now)
            for c, (was, sign) in enumerate(zip(then, now, strict=True))
            if was != sign and sign.isalpha() and now[c - 1] == now[c + 1] == " "
        ]
        fresh = [cell for cell in changed if cell[2]]  # where stones only changed color nobody moved
        for r, c, _ in fresh or changed:
            lines[r] = f"{lines[r][: c - 1]}({lines[r][c]}){lines[r][c + 2 :]}"
    return "\n".join(line.rstrip() for line in lines)


def _answer(
    line: str, agent: Any, options: dict[str, Any], history: list[Any], person: int, console: Any, named: Any
) -> None:
    """Do what one line asks for."""
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
        before = [i for i, old in enumerate(history[:-1]) if int(game.mover(old)[0]) == person]
        if before:
            del history[before[-1] + 1 :]
        else:
            console.print("There is nothing to take back.")
    elif line.lower() in ("help", "h"):
        console.print(HELP, style="dim", markup=False)
    elif not line:
        return  # the board is drawn again
    else:
        try:
            action = named(game, position, line)
        except UserError as error:
            console.print(str(error), style="yellow", markup=False)
            return
        import torch

        history.append(game.step(position, torch.tensor([action])).position)


def view(agent: Any, position: Any, options: dict[str, Any]) -> str:
    """What the agent thinks of one position: the value of its best move for the player to move, as a share of the
    points, the actions it looked at with theirs, the line it expects.
    """
    from foresight.runtime.evaluation.match import line

    game = agent.env
    action, extras, _ = agent.module.act(agent.state, position, None, explore=False, **options)
    played = int(action[0])
    words = [f"You can expect {_share(_worth(extras, played))}, with {game.move_name(position, played)}."]
    if "visits" in extras:
        visits, prior = extras["visits"][0], extras["prior"][0]
        order = (visits.double() + prior.double()).argsort(descending=True).tolist()
        order.sort(key=lambda one: one != played)  # what it would play stands first
        order = [action for action in order if visits[action] > 0 or prior[action] > 0][:SHOWN]
        tree = extras.get("tree")
        values = tree.child_values()[0] if tree is not None else extras.get("values", [None])[0]
        words.append("move     visits   prior   value")
        for action in order:
            seen = _percent(float(values[action])) if values is not None and visits[action] > 0 else ""
            name = game.move_name(position, action)
            words.append(f"{name:<8} {int(visits[action]):>6}   {100 * float(prior[action]):>4.0f}%   {seen:>5}")
        if tree is not None:
            words.append("line     " + " ".join(_names(game, position, line(tree, played))))
    return "\n".join(words)


def draw(agent: Any, position: Any, options: dict[str, Any], out: str) -> str:
    """Write the agent's search of one position to `out` and say so: .json, .dot (Graphviz), or a picture of its lines.

    Moves have their names where these mean the same in every position, and their numbers elsewhere (chess). Raises
    UserError for an agent that does not search and a file that cannot be written.
    """
    from foresight.envs.games.openspiel import Spiel
    from foresight.planning.search import drawing

    file = Path(out)
    if file.suffix not in (".json", ".dot", ".png", ".svg", ".pdf"):
        raise UserError(f"Name a file that ends in .json, .dot, .png, .svg or .pdf: tree search.png, not '{out}'.")
    _, extras, _ = agent.module.act(agent.state, position, None, explore=False, **options)
    tree, game = extras.get("tree"), agent.env
    if tree is None:
        raise UserError(
            "This agent keeps no tree: of its search it tells the visits and values (?)."
            if "visits" in extras
            else "This agent does not search: there is no tree."
        )
    names = str if isinstance(game, Spiel) else functools.partial(game.move_name, position)
    try:
        if file.suffix in (".json", ".dot"):
            write = drawing.as_json if file.suffix == ".json" else drawing.as_dot
            file.write_text(write(tree, names=names), encoding="utf-8")
        else:
            drawing.picture(tree, names=names).savefig(file)
    except OSError as error:
        raise UserError(f"Cannot write to {file}: {error.strerror or error}.") from error
    return f"The search is in {file}"


def _names(game: Any, position: Any, actions: list[int]) -> list[str]:
    """The moves by name, as far as they are legal: a search in a learned model may go on where the game does not."""
    import torch

    names: list[str] = []
    for action in actions:
        if not bool(game.legal(position)[0, action]):
            break
        names.append(game.move_name(position, action))
        position = game.step(position, torch.tensor([action])).position
    return names


def _worth(extras: dict[str, Any], played: int) -> float:
    """What the move that is played is worth to whoever plays it, in [-1, 1]; without a search, the position."""
    tree, visits = extras.get("tree"), extras.get("visits")
    values = tree.child_values() if tree is not None else extras.get("values")
    if visits is None or values is None or not visits[0, played] > 0:
        return float(extras["value"][0])
    return float(values[0, played])


def _percent(value: float) -> str:
    """A value in [-1, 1] as a share of the points; what a learned model says may lie beyond."""
    return f"{50 * (1 + min(max(value, -1.0), 1.0)):.0f}%"


def _share(value: float) -> str:
    return f"{_percent(value)} of the points"


def _elo(x: float) -> str:
    return f"{x:+.0f}" if math.isfinite(x) else ("+inf" if x > 0 else "-inf")

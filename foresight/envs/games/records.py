"""Game records: SGF (Go, Hex) and PGN (chess) files as lists of actions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch

from foresight.envs.games.game import Game
from foresight.envs.games.notation import named
from foresight.envs.games.openspiel import Spiel
from foresight.errors import UserError

SUFFIXES = (".sgf", ".pgn")
RESULTS = ("1-0", "0-1", "1/2-1/2", "*")


class GameRecord(NamedTuple):
    """One game of a file: `where` names it in messages, `moves` are in its notation."""

    where: str
    tags: dict[str, str]
    moves: list[str]


def read(game: Game, path: str | Path) -> list[list[int]]:
    """The actions of every recorded game in a file, or in all SGF and PGN files of a folder.

    Raises UserError if there are none, and at an illegal move, with the file, the move number and the legal moves.
    """
    path = Path(path).expanduser()
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UserError(f"There is no SGF or PGN file at {path}.")
    found = []
    for file in files:
        text = file.read_text(encoding="utf-8-sig", errors="replace")
        kind = file.suffix.lower()
        if kind not in SUFFIXES:
            raise UserError(f"{file} is neither an .sgf nor a .pgn file.")
        games = sgf(text, str(file)) if kind == ".sgf" else pgn(text, str(file))
        found += [_actions(game, recorded, kind) for recorded in games]
    if not any(found):
        raise UserError(f"No game in {path} has a move.")
    return [actions for actions in found if actions]


def sgf(text: str, file: str = "SGF") -> list[GameRecord]:
    """The main line of every game tree. Raises UserError for text that is not SGF."""
    games: list[GameRecord] = []
    at, depth, number = max(text.find("("), 0), 0, 0  # text before the first game is ignored
    tags: dict[str, str] = {}
    moves: list[str] = []
    closed = 0  # the depth of the first finished branch: later branches are not the main line
    token = re.compile(
        r"\s*(?:(?P<sign>[();])|(?P<name>[A-Za-z]+)\s*(?P<values>(?:\[(?:\\.|[^\]\\])*\]\s*)+))", re.DOTALL
    )
    while text[at:].strip():
        match = token.match(text, at)
        if match is None:
            raise UserError(f"{file} is not SGF at character {at + 1}: {text[at : at + 20].strip()!r}.")
        at = match.end()
        sign, name = match.group("sign"), match.group("name")
        if sign == "(":
            depth += 1
        elif sign == ")":
            closed = closed or depth
            depth -= 1
            if depth == 0:
                number += 1
                games.append(GameRecord(f"{file}, game {number}" if number > 1 else file, tags, moves))
                tags, moves, closed = {}, [], 0
        elif name is not None and not closed:
            values = re.findall(r"\[((?:\\.|[^\]\\])*)\]", match.group("values"), re.DOTALL)
            if name in ("B", "W"):
                if name == "W" and not moves:
                    raise UserError(f"{file}: white moves first, which is not supported.")
                if (name == "W") != (len(moves) % 2 == 1):
                    raise UserError(f"{file}, move {len(moves) + 1}: {name} moves twice in a row.")
                moves.append(values[0].strip())
            elif name in ("AB", "AW", "AE"):
                raise UserError(f"{file}: it has setup stones ({name}), which are not supported.")
            else:
                tags[name] = values[0]
    if depth != 0:
        raise UserError(f"{file}: the SGF is truncated: {depth} brackets are not closed.")
    return games


def pgn(text: str, file: str = "PGN") -> list[GameRecord]:
    """Every game, without comments and variations."""
    games: list[GameRecord] = []
    tags: dict[str, str] = {}
    moves: list[str] = []

    def close() -> None:
        if tags or moves:
            number = len(games) + 1
            games.append(GameRecord(f"{file}, game {number}" if number > 1 else file, dict(tags), list(moves)))
        tags.clear()
        moves.clear()

    def play(lines: list[str]) -> None:
        plain = re.sub(r"\{[^}]*\}|;[^\n]*|\$\d+", " ", "\n".join(lines))
        while re.search(r"\([^()]*\)", plain):
            plain = re.sub(r"\([^()]*\)", " ", plain)
        for word in plain.split():
            word = re.sub(r"^(\d+\.|\.\.)\.*", "", word)  # 12. or 12... or, alone, ...
            if word in RESULTS:
                close()
            elif word:
                moves.append(word)
        lines.clear()

    waiting: list[str] = []  # lines of moves; a comment may span several
    for line in text.splitlines():
        tag = re.match(r'\s*\[(\w+)\s+"(.*)"\]', line)
        if line.startswith("%"):  # an escape line
            continue
        if tag is None:
            waiting.append(line)
            continue
        play(waiting)
        if moves:
            close()
        if tag.group(1) == "FEN":
            raise UserError(f"{file}: a game starts from a position (FEN), which is not supported.")
        tags[tag.group(1)] = tag.group(2)
    play(waiting)
    close()
    return games


def _actions(game: Game, recorded: GameRecord, kind: str) -> list[int]:
    size = recorded.tags.get("SZ")
    if kind == ".sgf" and size and set(size.split(":")) != {str(game.shape[-1])}:
        found = size.replace(":", "x") if ":" in size else f"{size}x{size}"
        raise UserError(f"{recorded.where}: the board is {found}, but {game.title} is played on {game.shape[-1]}.")
    position, actions = game.start(1), []
    for t, word in enumerate(recorded.moves):
        if bool(game.over(position)[0]):
            raise UserError(f"{recorded.where}, move {t + 1}: the game was over before '{word}'.")
        try:
            if kind == ".sgf" and game.name == "go":
                action = named(game, position, _point(word, game.shape[-1], isinstance(game, Spiel)))
            elif kind == ".pgn":
                action = _san(game, position, word)
            else:
                action = named(game, position, word)
        except UserError as error:
            raise UserError(f"{recorded.where}, move {t + 1}: {error}") from error
        actions.append(action)
        position = game.step(position, torch.tensor([action])).position
        game.free_except(position)
    return actions


def _point(word: str, size: int, skips: bool) -> str:
    """SGF counts rows from the top with letters; an empty word is a pass, and so is `tt` on boards up to 19.

    `skips`: whether the game's column names skip i, as OpenSpiel's do.
    """
    if word in ("", "tt"):
        return "pass"
    if not re.fullmatch("[a-s]{2}", word) or ord(word[1]) - 97 >= size:
        raise UserError(f"'{word}' is not a point of a {size}x{size} board.")
    columns = "abcdefghjklmnopqrst" if skips else "abcdefghijklmnopqrs"
    return f"{columns[ord(word[0]) - 97]}{size - (ord(word[1]) - 97)}"


def _san(game: Game, position: torch.Tensor, word: str) -> int:
    def bare(name: str) -> str:
        return name.rstrip("+#!?").replace("0", "O") if name.startswith(("0", "O")) else name.rstrip("+#!?")

    legal = game.legal(position)[0].nonzero().flatten().tolist()
    names = {bare(game.move_name(position, action)): action for action in legal}
    if bare(word) not in names:
        raise UserError(f"'{word}' is not legal here. Legal: {', '.join(names)}.")
    return names[bare(word)]

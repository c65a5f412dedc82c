"""Recorded games: good files give their moves, bad ones say where."""

from __future__ import annotations

from pathlib import Path

import pytest

from foresight.envs.games import make as games
from foresight.envs.games import records
from foresight.envs.games.game import replay
from foresight.errors import UserError
from tests.sabotage import sabotaged_by

GOOD = "(;GM[1]FF[4]SZ[5]C[a \\] in a comment];B[cc](;W[cb];B[];W[])(;W[dd]))"


@sabotaged_by("foresight.envs.games.records._point", lambda f: lambda word, *rest: f(word[::-1], *rest))
def test_an_sgf_gives_its_main_line(tmp_path: Path) -> None:
    (tmp_path / "a.sgf").write_text(GOOD)
    # c3 is the middle; the second line from the top is row 4.
    assert records.read(games.make("go", size=5), tmp_path) == [[12, 17, 25, 25]]


def test_a_pgn_gives_its_moves(tmp_path: Path) -> None:
    file = tmp_path / "a.pgn"
    file.write_text('[Event "x"]\n\n1. e4 {best} e5 2. Nf3 (2. f4 exf4) Nc6 3. Bb5 $1 1-0\n\n[Event "y"]\n\n1. d4 *\n')
    chess = games.make("chess")
    found = records.read(chess, file)
    assert [len(game) for game in found] == [5, 1]
    position = replay(chess, found[:1])
    assert chess.picture(position).startswith(" r  .  b  q  k  b  n  r\n p  p  p  p  .  p  p  p\n .  .  n")


def test_columns_of_openspiels_go_have_no_i(tmp_path: Path) -> None:
    file = tmp_path / "a.sgf"
    file.write_text("(;SZ[13];B[jj];W[ii];B[hh];W[])")
    read = [records.read(games.make("go", size=13, rules=rules), str(file)) for rules in ("native", "openspiel")]
    assert [[action % 13 for action in game[0][:3]] for game in read] == [[9, 8, 7]] * 2


def test_files_of_other_programs(tmp_path: Path) -> None:
    """What programs write around the moves: marks of the encoding, escapes, comments in tags, dots of their own."""
    chess, file = games.make("chess"), tmp_path / "a.pgn"
    head = '[Event "Club; round 1"]\n% an escape, 1. a4\n'
    file.write_text(head + "1. e4 e5 ; the usual\n2. Nf3 {over\ntwo lines} 2... Nc6 *\n", encoding="utf-8-sig")
    (found,) = records.read(chess, file)
    assert [chess.move_name(replay(chess, [found[:t]]), found[t]) for t in range(4)] == ["e4", "e5", "Nf3", "Nc6"]
    file.write_text("1. e4 e5 2. Nf3 {a word} 2. ... Nc6 *\n")
    assert records.read(chess, file) == [found]
    sgf = tmp_path / "a.sgf"
    sgf.write_text("from somebody\n" + GOOD, encoding="utf-8-sig")
    assert records.read(games.make("go", size=5), sgf) == [[12, 17, 25, 25]]


BAD = [
    ("a.pgn", '[FEN "8/8/8/8/8/8/8/K1k5 w - - 0 1"]\n\n1. Ka2 *', "a.pgn: a game starts from a position"),
    ("a.sgf", "(;SZ[5];W[cc])", "a.sgf: white moves first, which is not supported"),
    ("a.sgf", "(;SZ[5:9];B[cc])", "a.sgf: the board is 5x9, but Go is played on 5"),
    ("a.sgf", "(;SZ[5];B[cc];W[cc])", "a.sgf, move 2: 'c3' is not legal here. Legal: a1, b1"),
    ("a.sgf", "(;SZ[5];B[cc];B[dd])", "a.sgf, move 2: B moves twice in a row"),
    ("a.sgf", "(;SZ[5];B[zz])", "a.sgf, move 1: 'zz' is not a point of a 5x5 board"),
    ("a.sgf", "(;SZ[9];B[cc])", "a.sgf: the board is 9x9, but Go is played on 5"),
    ("a.sgf", "(;SZ[5];B[];W[];B[aa])", "a.sgf, move 3: the game was over before 'aa'"),
    ("a.sgf", "(;SZ[5];B[cc]", "a.sgf: the SGF is truncated"),
    ("a.sgf", "hello", "a.sgf is not SGF at character 1: 'hello'"),
    ("a.sgf", "(;AB[aa][bb])", "has setup stones"),
    ("a.sgf", "(;SZ[5])", "No game in .* has a move"),
    ("a.txt", "(;SZ[5])", "neither an .sgf nor a .pgn"),
]


@pytest.mark.parametrize(("name", "text", "words"), BAD)
def test_a_bad_file_is_reported_with_its_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        records.read(games.make("go", size=5), tmp_path / name)


def test_an_illegal_move_of_chess_is_located(tmp_path: Path) -> None:
    file = tmp_path / "a.pgn"
    file.write_text("1. e4 e5 2. Ke3 *")
    with pytest.raises(UserError, match=r"a\.pgn, move 3: 'Ke3' is not legal here. Legal: .*Ke2"):
        records.read(games.make("chess"), file)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no SGF or PGN file"):
        records.read(games.make("chess"), tmp_path)

"""Games of two players, zero-sum, with perfect information: batches of positions behind one face.

Tic-tac-toe, Connect Four, Hex and small Go have compiled rules of their own (`envs.games.boards`); OpenSpiel gives
Othello, Breakthrough, chess, shogi and whatever else it has of this kind, and the native ones again with
`rules="openspiel"`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from foresight.envs.games import boards
from foresight.errors import UserError, unknown

NATIVE = ("tic_tac_toe", "connect_four", "hex", "go")
TITLES = {
    "tic_tac_toe": "tic-tac-toe", "connect_four": "Connect Four", "othello": "Othello", "hex": "Hex",
    "breakthrough": "Breakthrough", "go": "Go", "chess": "chess", "shogi": "shogi",
}  # fmt: skip
COLORS = {  # what the pieces of the first and of the second player look like in a picture: native, and OpenSpiel's
    "tic_tac_toe": ("X", "O"), "connect_four": ("X", "O"), "go": ("X, black", "O, white"),
    "hex": ("X, from top to bottom", "O, from left to right"), "othello": ("x, black", "o, white"),
    "breakthrough": ("b, black, from top to bottom", "w, white, from bottom to top"),
    "chess": ("White, capitals", "Black, small letters"), "shogi": ("Black, capitals", "White, small letters"),
}  # fmt: skip
SIZES = {"hex": 11, "go": 9}  # boards whose size may be chosen, and OpenSpiel's or the usual one
OPTIONS = {"hex": ("board_size",), "go": ("board_size", "komi")}  # of native rules, as OpenSpiel calls them
KOMI = 7.5  # OpenSpiel's
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Moved(NamedTuple):
    """What came of an action: the new positions, the mover's reward `[B]` float32, and `over` `[B]` bool."""

    position: Tensor
    reward: Tensor
    over: Tensor


class Symmetry(NamedTuple):
    """One way in which the game looks the same: new plane p at cell i is old plane p at cell `cells[i]`, and likewise
    action a of the new position is action `actions[a]` of the old one. int64 `[H * W]` and `[A]`.
    """

    cells: Tensor
    actions: Tensor


class Game(Protocol):
    """A batch of B positions is one tensor with leading dim B, on the CPU; nothing else is known about it outside.

    `shape` is that of the planes (C, H, W), `actions` how many there are, `longest` the most moves of a game (a bound),
    `opponent` whom evaluations play, `options` what it was made with, `symmetries` all of them, identity first.
    """

    name: str
    title: str
    shape: tuple[int, int, int]
    actions: int
    longest: int
    opponent: str
    options: dict[str, Any]
    symmetries: tuple[Symmetry, ...]

    def start(self, count: int) -> Tensor:
        """`count` games before the first move."""

    def step(self, position: Tensor, action: Tensor) -> Moved:
        """Take `action` int64 `[B]`. A game that is over, and an illegal action, change nothing and earn nothing."""

    def legal(self, position: Tensor) -> Tensor:
        """Bool `[B, A]`; none where the game is over."""

    def over(self, position: Tensor) -> Tensor:
        """Bool `[B]`."""

    def mover(self, position: Tensor) -> Tensor:
        """Who moves, 0 or 1, int64 `[B]` (any number where the game is over)."""

    def planes(self, position: Tensor) -> Tensor:
        """What the player to move sees, `[B, C, H, W]`, uint8 or float32."""

    def moves(self, position: Tensor) -> Tensor:
        """How many moves were made, int64 `[B]`."""

    def first_score(self, position: Tensor) -> Tensor:
        """The first player's points where the game is over: 1 won, ½ drawn, 0 lost; NaN elsewhere. float32 `[B]`."""

    def picture(self, position: Tensor) -> str:
        """One position (B = 1) for a terminal."""

    def move_name(self, position: Tensor, action: int) -> str:
        """What people call `action` in one position (B = 1)."""

    def forget(self, keep: Tensor) -> None:
        """Every position but those in `keep` is no longer needed."""


@dataclass
class Plays:
    """Which game weights are for, as a part of a State: a checkpoint of another one is refused."""

    game: str = ""

    @classmethod
    def of(cls, game: Game | None) -> Plays:
        """Of this game with its options; None is no game."""
        if game is None:
            return cls()
        options = ", ".join(f"{key}={value}" for key, value in sorted(game.options.items()))
        return cls(f"{game.name}({options})")

    def state_dict(self) -> dict[str, Any]:
        """The game's name and options."""
        return {"game": self.game}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError if the checkpoint is of another game."""
        if state["game"] != self.game:
            raise UserError(f"The checkpoint plays {state['game']}, not {self.game}. Load it with its own game.")


def make(name: str, opponent: str = "mcts:100", rules: str = "auto", **options: Any) -> Game:
    """The game `name`, as `connect_four`, `go` with `size=7`, or any other of OpenSpiel's with its own options.

    - `opponent`: whom evaluations play: "random", "minimax:DEPTH", "mcts:SIMULATIONS";
    - `rules`: "native" (compiled here), "openspiel", or "auto": native where there are such;
    - `size`: of the board of Hex or Go, which OpenSpiel calls `board_size` (that is taken, too); `komi` of Go.

    Raises UserError for a name or option that does not exist and for a game that is not of this kind.
    """
    if rules not in ("auto", "native", "openspiel"):
        raise UserError(f"rules must be auto, native or openspiel, not '{rules}'.")
    if not isinstance(opponent, str):
        raise UserError(f"opponent must be the name of one, such as random or mcts:100, not {opponent!r}.")
    name = name.lower().replace("-", "_").replace(" ", "_")
    if "size" in options or name in SIZES:
        if name not in SIZES:
            raise UserError(f"The size of {name} cannot be chosen; that of {' and '.join(SIZES)} can.")
        if "size" in options and options.get("board_size", options["size"]) != options["size"]:
            raise UserError(f"size is {options['size']!r} and board_size {options['board_size']!r}: give one of them.")
        size = options.pop("size", options.get("board_size", SIZES[name]))
        if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= 19:
            raise UserError(f"size must be a whole number from 2 to 19, not {size!r}.")
        options["board_size"] = size
        if name == "go":
            komi = options.get("komi", KOMI)
            if isinstance(komi, bool) or not isinstance(komi, int | float) or not math.isfinite(komi):
                raise UserError(f"komi must be a number of points, not {komi!r}.")
            options["komi"] = float(komi)
    known = set(OPTIONS.get(name, ()))
    if rules == "native" or (rules == "auto" and name in NATIVE and set(options) <= known):
        if name not in NATIVE:
            raise UserError(f"There are no native rules of {name}, only of {', '.join(NATIVE)}. Use rules=openspiel.")
        if strange := sorted(set(options) - known):
            raise UserError(
                f"The native rules of {name} have no option {', '.join(strange)}; they take "
                f"{', '.join(['size', *sorted(known - {'board_size'})]) if known else 'none'}."
            )
        return Native(name, opponent, options)
    return Spiel(name, opponent, options)


class Native:
    """A game with compiled rules: a position is a row of int32, see `envs.games.boards`."""

    def __init__(self, name: str, opponent: str, options: dict[str, Any]) -> None:
        self.name, self.title, self.opponent, self.options = name, TITLES[name], opponent, dict(options)
        size = options.get("board_size", 0)
        self.kind, self.height, self.width, self.line = {
            "tic_tac_toe": (boards.LINE, 3, 3, 3),
            "connect_four": (boards.DROP, 6, 7, 4),
            "hex": (boards.HEX, size, size, 0),
            "go": (boards.GO, size, size, 0),
        }[name]
        self.komi = float(options.get("komi", 0.0))
        self.cells = self.height * self.width
        self.shape = (3, self.height, self.width)
        self.actions = boards.actions_of(self.kind, self.height, self.width)
        self.longest = self.cells * (2 if self.kind == boards.GO else 1)
        self.row = boards.width_of(self.kind, self.height, self.width)
        kinds = {boards.LINE: range(8), boards.DROP: (0, 1), boards.HEX: (0, 2), boards.GO: range(8)}[self.kind]
        self.symmetries = tuple(_square(self.height, self.width, self.actions, k) for k in kinds)

    @property
    def rules(self) -> tuple[int, int, int, int, float]:
        """What the functions of `boards` are given first."""
        return self.kind, self.height, self.width, self.line, self.komi

    def start(self, count: int) -> Tensor:
        """`count` empty boards."""
        return torch.zeros(count, self.row, dtype=torch.int32)

    def step(self, position: Tensor, action: Tensor) -> Moved:
        """See `Game`."""
        rows = position.numpy()
        out, rewards, over = np.empty_like(rows), np.empty(len(rows), np.float32), np.empty(len(rows), np.bool_)
        boards.step_all(*self.rules, rows, action.numpy(), out, rewards, over)
        return Moved(torch.from_numpy(out), torch.from_numpy(rewards), torch.from_numpy(over))

    def legal(self, position: Tensor) -> Tensor:
        """See `Game`."""
        out = np.empty((len(position), self.actions), np.bool_)
        boards.legal_all(self.kind, self.height, self.width, position.numpy(), out)
        return torch.from_numpy(out)

    def over(self, position: Tensor) -> Tensor:
        """See `Game`."""
        return position[:, self.cells + boards.RESULT] != boards.PLAYING

    def mover(self, position: Tensor) -> Tensor:
        """See `Game`."""
        return position[:, self.cells + boards.TURN].long()

    def planes(self, position: Tensor) -> Tensor:
        """See `Game`; uint8."""
        out = np.empty((len(position), *self.shape), np.uint8)
        boards.planes_all(self.height, self.width, position.numpy(), out)
        return torch.from_numpy(out)

    def moves(self, position: Tensor) -> Tensor:
        """See `Game`."""
        return position[:, self.cells + boards.MOVES].long()

    def first_score(self, position: Tensor) -> Tensor:
        """See `Game`."""
        scores = torch.tensor([torch.nan, 1.0, 0.0, 0.5])
        return scores[position[:, self.cells + boards.RESULT].long()]

    def picture(self, position: Tensor) -> str:
        """See `Game`: X is the first player, O the second."""
        rows = position[0, : self.cells].view(self.height, self.width).tolist()
        signs = ".XO"
        if self.kind == boards.DROP:
            lines = [" ".join(signs[stone] for stone in row) for row in rows[::-1]]
            return "\n".join([*lines, " ".join(str(c + 1) for c in range(self.width))])
        head = "   " + " ".join(LETTERS[: self.width])
        if self.kind == boards.HEX:  # every row half a cell further right, as the hexagons lie
            body = [f"{' ' * r}{r + 1:2d} {' '.join(signs[s] for s in row)}" for r, row in enumerate(rows)]
            return "\n".join([head, *body])
        if self.kind == boards.GO:  # row 1 is at the bottom
            body = [f"{r + 1:2d} {' '.join(signs[s] for s in row)}" for r, row in enumerate(rows)]
            return "\n".join([*body[::-1], head])
        return "\n".join([head, *(f"{r + 1:2d} {' '.join(signs[s] for s in row)}" for r, row in enumerate(rows))])

    def move_name(self, position: Tensor, action: int) -> str:
        """See `Game`: a column's number in Connect Four, letter and row elsewhere."""
        if self.kind == boards.DROP:
            return str(action + 1)
        if action == self.cells:
            return "pass"
        return f"{LETTERS[action % self.width]}{action // self.width + 1}"

    def forget(self, keep: Tensor) -> None:
        """Nothing is held outside the positions."""


class Spiel:
    """A game of OpenSpiel: a position is the number of one of its states, which this object holds until `forget`."""

    def __init__(self, name: str, opponent: str, options: dict[str, Any]) -> None:
        spiel = _pyspiel()
        if name not in spiel.registered_names():
            raise unknown("game", name, TITLES)
        try:
            self.spiel = spiel.load_game(name, options)
        except spiel.SpielError as error:
            raise UserError(f"OpenSpiel does not make {name} with {options}: {str(error).splitlines()[0]}") from error
        kind = self.spiel.get_type()
        wanted = (
            (kind.dynamics, spiel.GameType.Dynamics.SEQUENTIAL, "players who move in turn"),
            (kind.information, spiel.GameType.Information.PERFECT_INFORMATION, "perfect information"),
            (kind.utility, spiel.GameType.Utility.ZERO_SUM, "a zero sum"),
            (kind.chance_mode, spiel.GameType.ChanceMode.DETERMINISTIC, "no chance"),
            (self.spiel.num_players(), 2, "two players"),
        )
        missing = [words for found, right, words in wanted if found != right]
        if missing or not kind.provides_observation_tensor:
            raise UserError(
                f"{name} is not a game of {', '.join(missing) or 'tensors'}. Supported are two-player zero-sum games "
                f"with perfect information and no chance: {', '.join(TITLES)}, and others of OpenSpiel's of that kind."
            )
        self.name, self.title, self.opponent, self.options = name, TITLES.get(name, name), opponent, dict(options)
        self.actions, self.longest = self.spiel.num_distinct_actions(), self.spiel.max_game_length()
        shape = self.spiel.observation_tensor_shape()
        inner = (int(np.prod(shape[:-2])), *shape[-2:]) if len(shape) >= 2 else (1, 1, *shape)
        self._inner: tuple[int, int, int] = tuple(int(x) for x in inner)  # type: ignore[assignment]
        self.shape = (self._inner[0] + 1, self._inner[1], self._inner[2])  # and a plane that tells who moves
        self._first = self.spiel.new_initial_state().current_player()  # in chess white is OpenSpiel's player 1
        self.limit = max(abs(self.spiel.min_utility()), abs(self.spiel.max_utility()))
        self._states: dict[int, Any] = {}
        self._next = 0
        self.symmetries = _spiel_symmetries(name, *self.shape[1:], self.actions)

    def start(self, count: int) -> Tensor:
        """See `Game`."""
        return torch.tensor([self._hold(self.spiel.new_initial_state()) for _ in range(count)], dtype=torch.int64)

    def state(self, number: int) -> Any:
        """OpenSpiel's own state of a position."""
        return self._states[number]

    def step(self, position: Tensor, action: Tensor) -> Moved:
        """See `Game`."""
        numbers, rewards, over = [], [], []
        for number, choice in zip(position.tolist(), action.tolist(), strict=True):
            state = self._states[number]
            reward = 0.0
            if not state.is_terminal() and choice in state.legal_actions():
                mover, state = state.current_player(), state.clone()
                state.apply_action(choice)
                number = self._hold(state)
                reward = state.returns()[mover] / self.limit if state.is_terminal() else 0.0
            numbers.append(number)
            rewards.append(reward)
            over.append(state.is_terminal())
        return Moved(torch.tensor(numbers), torch.tensor(rewards, dtype=torch.float32), torch.tensor(over))

    def legal(self, position: Tensor) -> Tensor:
        """See `Game`."""
        out = torch.zeros(len(position), self.actions, dtype=torch.bool)
        for b, number in enumerate(position.tolist()):
            out[b, self._states[number].legal_actions()] = True
        return out

    def over(self, position: Tensor) -> Tensor:
        """See `Game`."""
        return torch.tensor([self._states[n].is_terminal() for n in position.tolist()], dtype=torch.bool)

    def mover(self, position: Tensor) -> Tensor:
        """See `Game`."""
        players = [max(self._states[n].current_player(), 0) for n in position.tolist()]
        return torch.tensor([int(player != self._first) for player in players], dtype=torch.int64)

    def planes(self, position: Tensor) -> Tensor:
        """See `Game`: OpenSpiel's planes for the player to move, and ones if he is the first."""
        out = np.zeros((len(position), *self.shape), np.float32)
        for b, number in enumerate(position.tolist()):
            state = self._states[number]
            player = max(state.current_player(), 0)
            out[b, :-1] = np.asarray(state.observation_tensor(player), np.float32).reshape(self._inner)
            out[b, -1] = player == self._first
        return torch.from_numpy(out)

    def moves(self, position: Tensor) -> Tensor:
        """See `Game`."""
        return torch.tensor([self._states[n].move_number() for n in position.tolist()])

    def first_score(self, position: Tensor) -> Tensor:
        """See `Game`."""
        found = [self._states[n] for n in position.tolist()]
        scores = [0.5 + s.returns()[self._first] / self.limit / 2 if s.is_terminal() else torch.nan for s in found]
        return torch.tensor(scores, dtype=torch.float32)

    def picture(self, position: Tensor) -> str:
        """See `Game`: as OpenSpiel draws it (of chess and shogi, the FEN as a board)."""
        text = str(self._states[int(position[0])])
        return _fen(text) if self.name in ("chess", "shogi") else text.rstrip()

    def move_name(self, position: Tensor, action: int) -> str:
        """See `Game`: as OpenSpiel calls it, without the color."""
        state = self._states[int(position[0])]
        return str(state.action_to_string(state.current_player(), action)).removeprefix("B ").removeprefix("W ")

    def forget(self, keep: Tensor) -> None:
        """See `Game`."""
        self._states = {number: self._states[number] for number in keep.tolist()}

    def _hold(self, state: Any) -> int:
        self._next += 1
        self._states[self._next] = state
        return self._next


def colors(game: Game) -> tuple[str, str]:
    """What the first and the second player's pieces are in `picture`; "" where nobody has written it down."""
    first, second = COLORS.get(game.name, ("", ""))
    small = isinstance(game, Spiel) and game.name in ("tic_tac_toe", "connect_four", "hex")
    return (first.lower(), second.lower()) if small else (first, second)


def named(game: Game, position: Tensor, text: str) -> int:
    """The legal action that a person means by `text` in one position (B = 1), by its name or its number as `#12`.

    Raises UserError that says the legal ones.
    """
    legal = game.legal(position)[0].nonzero().flatten().tolist()
    names = {game.move_name(position, action): action for action in legal}
    folded: dict[str, list[int]] = {}
    for name, action in names.items():
        folded.setdefault(name.lower(), []).append(action)
    wish = text.strip()
    if wish in names:
        return names[wish]
    if len(folded.get(wish.lower(), [])) == 1:  # Nb3 and nb3 may differ in chess, b3 and B3 do not in Go
        return folded[wish.lower()][0]
    if wish.startswith("#") and wish[1:].isdigit() and int(wish[1:]) in legal:
        return int(wish[1:])
    raise UserError(f"'{wish}' is not legal here. Legal: {', '.join(names) or 'none, the game is over'}.")


def replay(game: Game, histories: Sequence[Sequence[int]]) -> Tensor:
    """The positions after these actions, `[B]` games. Raises UserError at an illegal one: game, move number."""
    rows = []
    for g, actions in enumerate(histories):
        position = game.start(1)
        for t, action in enumerate(actions):
            if not 0 <= action < game.actions or not bool(game.legal(position)[0, action]):
                raise UserError(f"Game {g + 1}, move {t + 1}: action {action} is not legal in {game.title}.")
            position = game.step(position, torch.tensor([action])).position
        rows.append(position)
    return torch.cat(rows) if rows else game.start(0)


def _pyspiel() -> Any:
    return importlib.import_module("pyspiel")


def _square(height: int, width: int, actions: int, k: int) -> Symmetry:
    """Number k of the eight ways to lay a board on itself: bit 0 mirrors columns, bits 1 and 2 turn by 180° and 90°."""
    grid = np.arange(height * width).reshape(height, width)
    grid = grid[:, ::-1] if k & 1 else grid
    grid = grid[::-1, ::-1] if k & 2 else grid
    grid = grid.T if k & 4 else grid
    cells = torch.from_numpy(np.ascontiguousarray(grid).reshape(-1).copy())
    if actions == width and actions != height * width:  # columns are the actions
        return Symmetry(cells, torch.arange(width).flip(-1) if k & 1 else torch.arange(width))
    return Symmetry(cells, torch.cat([cells, torch.arange(height * width, actions)]))


def _spiel_symmetries(name: str, height: int, width: int, actions: int) -> tuple[Symmetry, ...]:
    """Where actions are cells (and a pass), the board's own; in Breakthrough the mirror; else the identity alone.

    Hex has none: its planes say which edge a stone is joined to, and turning the board changes the edges.
    """
    same = Symmetry(torch.arange(height * width), torch.arange(actions))
    if name in ("tic_tac_toe", "go") and height == width and actions - height * width in (0, 1):
        return tuple(_square(height, width, actions, k) for k in range(8))
    if name == "othello":  # the others exchange the colors of the first four stones
        return tuple(_square(height, width, actions, k) for k in (0, 2, 4, 6))
    if name == "connect_four":
        return tuple(_square(height, width, actions, k) for k in (0, 1))
    if name == "breakthrough" and actions == height * width * 12:
        # An action is (row, column, one of six directions, whether it takes); directions go left, ahead, right.
        number = np.arange(actions).reshape(height, width, 2, 3, 2)
        mirror = torch.from_numpy(np.ascontiguousarray(number[:, ::-1, :, ::-1]).reshape(-1).copy())
        return same, Symmetry(_square(height, width, actions, 1).cells, mirror)
    return (same,)


def _fen(text: str) -> str:
    """A FEN as a board, and who moves."""
    board, *rest = text.split(" ")
    lines = []
    for row in board.split("/"):
        cells, plus = [], ""
        for sign in row:
            if sign.isdigit():
                cells += ["."] * int(sign)
            elif sign == "+":
                plus = "+"
            else:
                cells.append(plus + sign)
                plus = ""
        lines.append(" ".join(f"{cell:>2}" for cell in cells))
    return "\n".join([*lines, " ".join(rest)])


Chooser = Callable[[Tensor], Tensor]  # positions `[B]` to actions int64 `[B]`; none of the games is over

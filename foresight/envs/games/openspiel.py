"""Games of OpenSpiel: two players, zero-sum, perfect information, no chance."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from foresight.envs.games.game import TITLES, StepResult
from foresight.envs.games.symmetries import openspiel_symmetries
from foresight.errors import UserError, unknown


class State(Protocol):
    """What is used of a state of OpenSpiel, whose Python module has no annotations."""

    def is_terminal(self) -> bool:
        """Whether the game is over."""

    def current_player(self) -> int:
        """The player to move; below 0 where the game is over."""

    def legal_actions(self) -> list[int]:
        """In ascending order."""

    def apply_action(self, action: int) -> None:
        """Change the state by a legal action."""

    def child(self, action: int) -> State:
        """The state after a legal action."""

    def clone(self) -> State:
        """A copy."""

    def returns(self) -> Sequence[float]:
        """What each player has earned so far."""

    def observation_tensor(self, player: int) -> Sequence[float]:
        """What a player sees, flat."""

    def move_number(self) -> int:
        """The number of moves so far."""

    def action_to_string(self, player: int, action: int) -> str:
        """The name of an action."""


class Spiel:
    """A game of OpenSpiel: a position is the index of a state, which this object keeps until `free_except`."""

    def __init__(self, name: str, opponent: str, options: dict[str, Any]) -> None:
        spiel = _pyspiel()
        if name not in spiel.registered_names():
            raise unknown("game", name, TITLES)
        try:
            self.spiel = spiel.load_game(name, options)
            start = self.spiel.new_initial_state()
        except (spiel.SpielError, TypeError) as error:
            raise UserError(f"OpenSpiel cannot make {name} with {options}: {str(error).splitlines()[0]}") from error
        kind = self.spiel.get_type()
        wanted = (
            (kind.dynamics, spiel.GameType.Dynamics.SEQUENTIAL, "players who move in turn"),
            (kind.information, spiel.GameType.Information.PERFECT_INFORMATION, "perfect information"),
            (kind.utility, spiel.GameType.Utility.ZERO_SUM, "a zero sum"),
            (kind.chance_mode, spiel.GameType.ChanceMode.DETERMINISTIC, "no chance"),
            (start.is_chance_node(), False, "no chance"),  # an option may draw the start, which the type does not tell
            (self.spiel.num_players(), 2, "two players"),
        )
        missing = list(dict.fromkeys(words for found, right, words in wanted if found != right))
        if missing or not kind.provides_observation_tensor:
            raise UserError(
                f"{name} is not a game of {', '.join(missing) or 'tensors'}. Supported are two-player zero-sum games "
                f"with perfect information and no chance: {', '.join(TITLES)}, and other such games of OpenSpiel."
            )
        self.name, self.title, self.opponent, self.options = name, TITLES.get(name, name), opponent, dict(options)
        self.actions, self.longest = self.spiel.num_distinct_actions(), self.spiel.max_game_length()
        shape = self.spiel.observation_tensor_shape()
        inner = (int(np.prod(shape[:-2])), *shape[-2:]) if len(shape) >= 2 else (1, 1, *shape)
        self._inner: tuple[int, int, int] = tuple(int(x) for x in inner)  # type: ignore[assignment]
        self.shape = (self._inner[0] + 1, self._inner[1], self._inner[2])  # and a plane for the player to move
        self._first = start.current_player()  # in chess white is OpenSpiel's player 1
        self.limit = max(abs(self.spiel.min_utility()), abs(self.spiel.max_utility()))
        self._states: dict[int, State] = {}
        self._next = 0
        self.symmetries = openspiel_symmetries(name, *self.shape[1:], self.actions)

    def start(self, count: int) -> Tensor:
        """See `Game`."""
        return torch.tensor([self._hold(self.spiel.new_initial_state()) for _ in range(count)], dtype=torch.int64)

    def state(self, number: int) -> State:
        """OpenSpiel's own state of a position."""
        return self._states[number]

    def step(self, position: Tensor, action: Tensor) -> StepResult:
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
        return StepResult(torch.tensor(numbers), torch.tensor(rewards, dtype=torch.float32), torch.tensor(over))

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
        """See `Game`: OpenSpiel's planes for the player to move, and ones for the first player."""
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
        """See `Game`: OpenSpiel's text (for chess and shogi, the FEN as a board)."""
        text = str(self._states[int(position[0])])
        return _fen(text) if self.name in ("chess", "shogi") else text.rstrip()

    def move_name(self, position: Tensor, action: int) -> str:
        """See `Game`: OpenSpiel's name, without the color."""
        state = self._states[int(position[0])]
        return str(state.action_to_string(state.current_player(), action)).removeprefix("B ").removeprefix("W ")

    def free_except(self, keep: Tensor) -> None:
        """See `Game`."""
        self._states = {number: self._states[number] for number in keep.tolist()}

    def _hold(self, state: State) -> int:
        self._next += 1
        self._states[self._next] = state
        return self._next


def _pyspiel() -> Any:
    return importlib.import_module("pyspiel")


def _fen(text: str) -> str:
    """A FEN as a board, with the player to move."""
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

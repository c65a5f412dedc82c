"""The environments of Sutton & Barto (2018) as tables: random walks, windy grids, blackjack, the short corridor."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from foresight.envs.tabular.mdp import MDP, from_table
from foresight.envs.tabular.render import Layout
from foresight.errors import UserError

Table = dict[int, dict[int, list[tuple[float, int, float, bool]]]]
KING = {
    "up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1),
    "up-right": (-1, 1), "down-right": (1, 1), "down-left": (1, -1), "up-left": (-1, -1),
}  # fmt: skip


def random_walk(states: int = 19, left: float = -1.0, right: float = 1.0, name: str = "RandomWalk") -> MDP:
    """`states` in a row, actions left and right; stepping off an end earns `left` or `right` and ends the episode.

    Episodes start in the middle. Example 6.2 has 5 states, 0 and 1; section 7.1 has 19 states, -1 and 1. State 0 is the
    left end, states 1 to `states` are the book's. Under the equiprobable policy, without discount, values lie
    on a line from `left` to `right`. Raises UserError for fewer than 2 states.
    """
    if states < 2:
        raise UserError(f"states is {states}: a random walk needs at least 2.")
    table: Table = {s: {0: [(1.0, s, 0.0, True)], 1: [(1.0, s, 0.0, True)]} for s in (0, states + 1)}
    for s in range(1, states + 1):
        table[s] = {
            0: [(1.0, s - 1, left if s == 1 else 0.0, s == 1)],
            1: [(1.0, s + 1, right if s == states else 0.0, s == states)],
        }
    start = np.eye(states + 2)[(states + 1) // 2]
    row = "T" + "." * states + "G"
    layout = Layout((row[: (states + 1) // 2] + "S" + row[(states + 1) // 2 + 1 :],), np.arange(states + 2))
    return from_table(name, dict(sorted(table.items())), start, action_names=("left", "right"), layout=layout)


def windy_grid(
    king: bool = False,
    stay: bool = False,
    stochastic: bool = False,
    wind: tuple[int, ...] = (0, 0, 0, 1, 1, 1, 2, 2, 1, 0),
    height: int = 7,
    name: str = "WindyGridWorld",
) -> MDP:
    """Example 6.5: a grid in which a wind blows upwards by `wind` cells in each column; -1 a step until the goal.

    `king` adds the diagonal moves and `stay` a ninth one (exercise 6.9); with `stochastic` the wind of a windy column
    is one more or one less with probability 1/3 each (exercise 6.10). Raises UserError for a grid without the start, in
    the fourth row, or the goal, in the eighth column.
    """
    width, start, goal = len(wind), (3, 0), (3, 7)
    if height <= start[0] or width <= goal[1]:
        raise UserError(
            f"A windy grid needs a height of at least {start[0] + 1} and a wind of at least {goal[1] + 1} columns, "
            f"where its start and goal are, not {height} and {width}."
        )
    names = list(KING)[: 8 if king else 4] + (["stay"] if stay else [])
    table: Table = {}
    for r in range(height):
        for c in range(width):
            table[r * width + c] = {}
            for a, move in enumerate(names):
                down, across = KING.get(move, (0, 0))
                gusts = (-1, 0, 1) if stochastic and wind[c] else (0,)
                outcomes = []
                for gust in gusts:
                    row = min(max(r + down - wind[c] - gust, 0), height - 1)
                    there = row, min(max(c + across, 0), width - 1)
                    outcomes.append((1 / len(gusts), there[0] * width + there[1], -1.0, there == goal))
                table[r * width + c][a] = outcomes
    at = start[0] * width + start[1]
    cells = [["."] * width for _ in range(height)]
    cells[start[0]][start[1]], cells[goal[0]][goal[1]] = "S", "G"
    layout = Layout(
        tuple("".join(line) for line in cells), np.arange(height * width), f"wind {' '.join(map(str, wind))}"
    )
    goal_state = goal[0] * width + goal[1]
    table[goal_state] = {a: [(1.0, goal_state, 0.0, True)] for a in range(len(names))}
    return from_table(name, table, np.eye(height * width)[at], action_names=tuple(names), layout=layout)


def short_corridor(name: str = "ShortCorridor") -> MDP:
    """Example 13.1: three cells and a goal, -1 a step; in the second cell left and right are swapped.

    The best policy that cannot tell the cells apart goes right with probability 2 - √2, worth -11.66 from the start.
    A table tells them apart: its optimum is -3.
    """
    table: Table = {
        0: {0: [(1.0, 0, -1.0, False)], 1: [(1.0, 1, -1.0, False)]},
        1: {0: [(1.0, 2, -1.0, False)], 1: [(1.0, 0, -1.0, False)]},
        2: {0: [(1.0, 1, -1.0, False)], 1: [(1.0, 3, -1.0, True)]},
        3: {0: [(1.0, 3, 0.0, True)], 1: [(1.0, 3, 0.0, True)]},
    }
    layout = Layout(("S..G",), np.arange(4))
    return from_table(name, table, np.eye(4)[0], action_names=("left", "right"), layout=layout)


CARDS = tuple((card, 4 / 13 if card == 10 else 1 / 13) for card in range(1, 11))  # an endless deck; 1 is an ace
STICK, HIT = 0, 1


def blackjack(sab: bool = True, natural: bool = False, name: str = "Blackjack-v1") -> MDP:
    """Example 5.1, exactly: Gymnasium's `Blackjack-v1` with exact probabilities.

    States are (sum 4 to 21, dealer's card 1 to 10, usable ace), and ten more for 21 with the first two cards, which
    Gymnasium's observation does not tell apart from any other 21: `blackjack_state` returns their indices. Options as
    there: with `sab` a natural beats any other 21; else with `natural` it earns 1.5.
    """
    states = [(total, dealer, ace) for ace in (0, 1) for total in range(4, 22) for dealer in range(1, 11)]
    number = {state: i for i, state in enumerate(states)}
    table: Table = {}

    def stick(total: int, dealer: int, is_natural: bool) -> list[tuple[float, int, float, bool]]:
        """The dealer draws to 17: (probability, end, reward, True)."""
        end, found = len(states) + 10, []
        for (score, dealer_natural), p in _dealer(dealer):
            reward = float(np.sign(total - score))
            if is_natural and sab and not dealer_natural:
                reward = 1.0
            elif is_natural and not sab and natural and reward == 1.0:
                reward = 1.5
            found.append((p, end, reward, True))
        return found

    def hit(total: int, dealer: int, ace: int) -> list[tuple[float, int, float, bool]]:
        found = []
        for card, p in CARDS:
            after, usable = total + card, ace
            if card == 1 and not ace and after + 10 <= 21:
                after, usable = after + 10, 1
            elif after > 21 and ace:
                after, usable = after - 10, 0
            if after > 21:
                found.append((p, len(states) + 10, -1.0, True))
            else:
                found.append((p, number[after, dealer, usable], 0.0, False))
        return found

    for i, (total, dealer, ace) in enumerate(states):
        table[i] = {STICK: stick(total, dealer, False), HIT: hit(total, dealer, ace)}
    for dealer in range(1, 11):
        i = len(states) + dealer - 1
        table[i] = {STICK: stick(21, dealer, True), HIT: hit(21, dealer, 1)}
    end = len(states) + 10
    table[end] = {a: [(1.0, end, 0.0, True)] for a in (STICK, HIT)}

    start = np.zeros(end + 1)
    for first, p in CARDS:
        for second, q in CARDS:
            ace = int(1 in (first, second))
            total = first + second + 10 * ace
            for dealer, r in CARDS:
                start[blackjack_state(total, dealer, ace, total == 21)] += p * q * r
    return from_table(name, table, start, action_names=("stick", "hit"), layout=_blackjack_layout(number, end + 1))


def blackjack_state(total: int, dealer: int, ace: int, is_natural: bool = False) -> int:
    """The index of a state of `blackjack`: `total` 4 to 21, the dealer's card 1 to 10, whether an ace counts 11."""
    return 360 + dealer - 1 if is_natural else ace * 180 + (total - 4) * 10 + dealer - 1


@functools.cache
def _dealer(showing: int) -> tuple[tuple[tuple[int, bool], float], ...]:
    """((final score, 0 if bust; whether it is a natural), probability) of a dealer who shows this card."""
    found: dict[tuple[int, bool], float] = {}

    def play(total: int, ace: bool, cards: int, p: float) -> None:
        whole = total + 10 if ace and total + 10 <= 21 else total
        if cards >= 2 and whole >= 17:
            key = (whole if whole <= 21 else 0, cards == 2 and whole == 21)
            found[key] = found.get(key, 0.0) + p
            return
        for card, q in CARDS:
            play(total + card, ace or card == 1, cards + 1, p * q)

    play(showing, showing == 1, 1, 1.0)
    return tuple(found.items())


def _blackjack_layout(number: dict[tuple[int, int, int], int], states: int) -> Layout:
    """Two blocks, without and with a usable ace: sums 21 to 11 downwards, the dealer's card ace to 10 across."""
    position, rows = np.full(states, -1), []
    for line in range(11):
        total = 21 - line
        rows.append("." * 10 + "#" + ("." * 10 if total >= 12 else "#" * 10))
        for dealer in range(1, 11):
            position[number[total, dealer, 0]] = line * 21 + dealer - 1
            if total >= 12:
                position[number[total, dealer, 1]] = line * 21 + 10 + dealer
    caption = "sums 21 to 11 downwards, dealer's ace to 10 across; left without a usable ace, right with one"
    return Layout(tuple(rows), position, caption)


ENVS: dict[str, Callable[..., MDP]] = {
    "RandomWalk5": lambda **options: random_walk(**{"states": 5, "left": 0.0, "right": 1.0, **options}),
    "RandomWalk19": lambda **options: random_walk(**options),
    "WindyGridWorld": lambda **options: windy_grid(**options),
    "ShortCorridor": lambda **options: short_corridor(**options),
    "Blackjack-v1": lambda **options: blackjack(**options),
}

"""`make` for tabular environments: grid worlds from pictures and Gymnasium's toy-text, as explicit `MDP`s."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from foresight import errors
from foresight.envs.tabular import sutton_barto
from foresight.envs.tabular.mdp import MDP, assemble, finish, from_table, random_mdp
from foresight.envs.tabular.render import Layout

MOVES = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}  # clockwise: neighbors are perpendicular
CELLS = "SGT#."
PDDL = "pddl:"
# Picture and options.
GRIDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    # Sutton & Barto (2018), Example 4.1: -1 a step, two terminal corners.
    "GridWorld4x4": (("G...", "....", "....", "...G"), {"step_reward": -1.0, "goal_reward": 0.0}),
    # Russell & Norvig, "Artificial Intelligence", fig. 16.1 (17.1 in the third edition): the 4 × 3 grid.
    "GridWorld4x3": (("...G", ".#.T", "S..."), {"slip": 0.2, "step_reward": -0.04}),
    # Rooms with two ways to the goal: a short one past the traps and a long one around them.
    "GridWorld8x8": (
        ("S.......", "..##....", "...#..T.", ".T.#....", "...###..", ".#...T..", ".#.T..#.", "...#...G"),
        {"slip": 0.2, "step_reward": -0.04},
    ),
    # Sutton, Precup & Singh (1999), fig. 2: four rooms and their hallways.
    "FourRooms": (
        (
            "S....#.....",
            ".....#.....",
            "...........",
            ".....#.....",
            ".....#.....",
            "#.####.....",
            ".....###.##",
            ".....#.....",
            ".....#.....",
            "...........",
            ".....#....G",
        ),
        {"slip": 1 / 3},
    ),
}
TOY_TEXT = ("FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "CliffWalkingSlippery-v1", "Taxi-v4")
TOY_ACTIONS = {
    "FrozenLakeEnv": ("left", "down", "right", "up"),
    "CliffWalkingEnv": ("up", "right", "down", "left"),
    "TaxiEnv": ("south", "north", "east", "west", "pickup", "dropoff"),
}


def names() -> tuple[str, ...]:
    """The environments that need no options."""
    return (*GRIDS, *TOY_TEXT, *sutton_barto.ENVS, "RandomMDP")


def make(name: str, *, time_limit: int | None = None, **options: Any) -> MDP:
    """The environment `name` as an `MDP`.

    - a built-in grid (`GridWorld8x8`, `GridWorld4x4`, `GridWorld4x3`, `FourRooms`) or `GridWorld` with
      `picture=`; options as in `gridworld`;
    - an environment of Sutton & Barto (`envs.tabular.sutton_barto.ENVS`: random walks, windy grid, short corridor,
      exact blackjack);
    - `RandomMDP`: options as in `random_mdp` (`states, actions, successors, seed`);
    - `pddl:gripper-2`, or `pddl:DOMAIN.pddl,PROBLEM.pddl`: the reachable states of a planning problem; options as in
      `envs.pddl.make.make` (`max_states`, `step_reward`);
    - any Gymnasium id whose environment has a table `P` (FrozenLake, CliffWalking, Taxi, your own): options go
      to `gymnasium.make` (`map_name="8x8", is_slippery=False`, ...).

    `time_limit` replaces the environment's own. Raises UserError for an unknown name or option, for a time limit below
    1, and without a table.
    """
    try:
        if name in GRIDS:
            picture, defaults = GRIDS[name]
            mdp = gridworld(**{"picture": picture, **defaults, **options, "name": name})
        elif name == "GridWorld":
            if "picture" not in options:
                raise errors.UserError("GridWorld needs a picture: rows of the characters S G T # . joined by '/'.")
            mdp = gridworld(**options)
        elif name.startswith(PDDL):
            from foresight.envs.pddl import make as pddl  # late: it compiles loops

            mdp = pddl.make(name, **options)
        elif name in sutton_barto.ENVS:
            mdp = sutton_barto.ENVS[name](**options, name=name)
        elif name == "RandomMDP":
            mdp = random_mdp(**options)
        else:
            mdp = _toy_text(name, options)
    except TypeError as error:  # an unknown option
        raise errors.UserError(f"{name} cannot be made with the options {options}: {error}.") from error
    return mdp if time_limit is None else dataclasses.replace(mdp, time_limit=time_limit)


def gridworld(
    picture: str | Sequence[str],
    slip: float = 0.0,
    step_reward: float = 0.0,
    goal_reward: float = 1.0,
    trap_reward: float = -1.0,
    time_limit: int | None = None,
    name: str = "GridWorld",
) -> MDP:
    """A grid world from its picture: rows (or one string with rows joined by '/' or line ends) of

    `S` start, `G` goal, `T` trap, `#` wall, `.` free. A move into a wall or off the grid stays. With probability
    `slip` the agent moves perpendicular to its action, to either side with equal probability. Every action earns
    `step_reward`, entering a goal or trap earns `goal_reward` or `trap_reward` on top and ends the episode.
    Without an `S`, episodes start in any free cell.

    Raises UserError for a picture with other characters, uneven rows or no start.
    """
    rows = tuple(picture.replace("/", "\n").split() if isinstance(picture, str) else picture)
    if not rows or len({len(row) for row in rows}) != 1:
        raise errors.UserError("The rows of a grid picture must have equal length.")
    strange = sorted(set("".join(rows)) - set(CELLS))
    if strange:
        raise errors.UserError(f"A grid picture has only the characters {' '.join(CELLS)}, not {' '.join(strange)}.")
    if not 0 <= slip <= 1:
        raise errors.UserError(f"slip must be a probability from 0 to 1, not {slip}.")
    cells = np.array([list(row) for row in rows])
    height, width = cells.shape
    position = np.flatnonzero(cells.ravel() != "#")
    kind = cells.ravel()[position]
    states = len(position)
    number = np.full(height * width, -1)
    number[position] = np.arange(states)
    row, column = np.divmod(position, width)

    start = (kind == "S" if (kind == "S").any() else kind == ".").astype(np.float64)
    if not start.any():
        raise errors.UserError("A grid picture needs a start S or a free cell to start from.")
    start /= start.sum()

    drifts = ((0, 1.0 - slip), (1, slip / 2), (-1, slip / 2)) if slip else ((0, 1.0),)
    shape = (states, len(MOVES), len(drifts))
    next_state, prob = np.empty(shape, np.int32), np.empty(shape)
    moves = list(MOVES.values())
    for a in range(len(moves)):
        for k, (turn, p) in enumerate(drifts):
            down, right = moves[(a + turn) % len(moves)]
            r, c = row + down, column + right
            inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
            there = number[np.where(inside, r * width + c, position)]
            next_state[:, a, k] = np.where(there >= 0, there, np.arange(states))
            prob[:, a, k] = p
    entered = kind[next_state]
    reward = float(step_reward) + float(goal_reward) * (entered == "G") + float(trap_reward) * (entered == "T")
    discount = 1.0 - np.isin(entered, ("G", "T"))
    finish(next_state, prob, reward, discount, start)
    layout = Layout(rows, position)
    return assemble(
        name, next_state, prob, reward, discount, start, time_limit=time_limit, action_names=tuple(MOVES), layout=layout
    )


def _toy_text(name: str, options: dict[str, Any]) -> MDP:
    try:
        env = gymnasium.make(name, **options)
    except gymnasium.error.Error as error:
        if isinstance(error, gymnasium.error.DependencyNotInstalled):
            raise errors.UserError(f"{name} needs a package: {error}") from error
        raise errors.unknown("tabular environment", name, (*names(), "GridWorld")) from error
    except (ValueError, KeyError, AssertionError) as error:  # a value that it does not take
        if not options:
            raise
        raise errors.options(name, options, error) from error
    unwrapped: Any = env.unwrapped
    time_limit = env.spec.max_episode_steps if env.spec else None
    env.close()
    table = getattr(unwrapped, "P", None)
    if table is None:
        raise errors.UserError(
            f"{name} has no transition table, which tabular algorithms need. Environments that have one: "
            f"{', '.join(names())}. For others use an algorithm with a network, such as ppo."
        )
    if getattr(unwrapped, "fickle_passenger", False):
        # Fickleness is neither in Taxi's table nor in its state: there is no MDP over these 500 states.
        raise errors.UserError("fickle_passenger is True, which Taxi's table does not cover: set it to False.")
    kind = type(unwrapped).__name__
    start = getattr(unwrapped, "initial_state_distrib", None)
    if start is None:
        start = np.full(len(table), 1.0 / len(table))
    start = np.asarray(start, np.float64)
    return from_table(
        name,
        table,
        start / start.sum(),
        time_limit=time_limit,
        action_names=TOY_ACTIONS.get(kind, ()),
        layout=_toy_layout(kind, unwrapped),
    )


def _toy_layout(kind: str, env: Any) -> Layout | None:
    if kind == "FrozenLakeEnv":
        text = ["".join(c.decode() for c in row) for row in env.desc]
        return Layout(tuple(row.replace("H", "T").replace("F", ".") for row in text), np.arange(env.desc.size))
    if kind == "CliffWalkingEnv":
        height, width = env.shape
        cells = np.where(env._cliff, "T", ".")
        cells[-1, 0], cells[-1, -1] = "S", "G"
        return Layout(tuple("".join(row) for row in cells), np.arange(height * width))
    if kind == "TaxiEnv":
        # 25 of the 500 states: the passenger is in the taxi (4) and the destination is the red corner (0).
        position = np.full(500, -1)
        position[np.arange(25) * 20 + 16] = np.arange(25)
        return Layout((".....",) * 5, position, "passenger aboard, destination red (top left)")
    return None

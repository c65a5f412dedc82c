"""Key and door: its rules, what is hidden, and a scripted solver that knows the whole grid."""

from __future__ import annotations

import copy
from collections import deque

import pytest
import torch
from torch import Tensor

from foresight.envs.control import key_door
from foresight.envs.control.key_door import AGENT, DOOR, FLOOR, GOAL, HOLDER, KEY, OPEN, WALL
from foresight.envs.control.own import Own
from foresight.envs.make import make
from foresight.errors import UserError
from tests.sabotage import change, flip_sign, sabotaged_by

STEPS = [(0, 1), (-1, 0), (0, -1), (1, 0)]  # right, up, left, down, as (row, column)


def path(cells: list[list[int]], start: tuple[int, int], target: int, solid: tuple[int, ...]) -> list[int]:
    """The actions of a shortest path from `start` to the cell `target`; the door counts as free unless it is solid."""
    seen, queue = {start: []}, deque([start])
    while queue:
        at = queue.popleft()
        if cells[at[0]][at[1]] == target:
            return seen[at]
        for action, (dy, dx) in enumerate(STEPS):
            to = (at[0] + dy, at[1] + dx)
            if to not in seen and cells[to[0]][to[1]] not in solid:
                seen[to] = [*seen[at], action]
                queue.append(to)
    return []


def solution(rules: key_door.KeyDoor, i: int) -> int:
    """The next action of a shortest way in environment i: to the key, then to the goal."""
    cells, start = rules.cells[i].tolist(), tuple(rules.place[i].tolist())
    if not rules.holds[i]:
        return (path(cells, start, KEY, (WALL, DOOR)) or [0])[0]
    return (path(cells, start, GOAL, (WALL,)) or [0])[0]


def solve(env: Own, steps: int) -> tuple[list[float], list[int]]:
    """Returns and lengths of the episodes that end within `steps` steps of the scripted solver."""
    gained, lengths = [], []
    for _ in range(steps):
        actions = torch.tensor([solution(env._rules, i) for i in range(env.num_envs)])
        feedback = env.step(actions)
        assert torch.equal(feedback.cut, 1 - feedback.discount)  # no time limit is reached
        gained += feedback.info.get("episode_return", [])
        lengths += feedback.info.get("episode_length", [])
    return gained, lengths


def never(original):
    """A mutation of `KeyDoor.over`."""
    return lambda self, time: torch.zeros_like(self.reached)


@sabotaged_by("foresight.envs.control.key_door.KeyDoor.move", flip_sign)
@sabotaged_by("foresight.envs.control.key_door.KeyDoor.over", never)
@pytest.mark.parametrize("size", [2, 6])
def test_a_scripted_solver_always_succeeds(size: int):
    env = make("KeyDoor-v0", num_envs=20, size=size)
    env.reset(0)
    gained, lengths = solve(env, 60)
    assert len(gained) > 60 and set(gained) == {1.0}
    assert max(lengths) <= 6 * size  # at most twice across a room for the key and the door, once for the goal


def test_a_random_policy_rarely_succeeds():
    env = make("KeyDoor-v0", num_envs=200)
    env.reset(0)
    generator, gained = torch.Generator().manual_seed(1), []
    for _ in range(250):
        gained += env.step(torch.randint(4, (200,), generator=generator)).info.get("episode_return", [])
    assert len(gained) >= 400 and set(gained) == {0.0, 1.0}
    assert 0.01 < sum(gained) / len(gained) < 0.07  # 0.032 of 2,402 episodes in a longer run


def at(env: Own, cells: list[str], place: tuple[int, int], holds: bool = False) -> key_door.KeyDoor:
    """Put environment 0 into a grid of size 2, drawn without the margin."""
    codes = {".": FLOOR, "#": WALL, "D": DOOR, "O": OPEN, "K": KEY, "G": GOAL}
    rules = env._rules
    grid = torch.tensor([[codes[c] for c in row] for row in cells])
    rules.cells[0, rules.margin : rules.margin + 2, rules.margin : rules.margin + 5] = grid
    rules.place[0] = torch.tensor(place) + rules.margin
    rules.holds[0] = holds
    return rules


@sabotaged_by("foresight.envs.control.key_door.KeyDoor.move", change("action", lambda x: (x + 1) % 4))
def test_the_door_needs_the_key_and_walls_block():
    env = make("KeyDoor-v0", num_envs=1, size=2)
    env.reset(0)
    rules = at(env, ["K.D.G", "..#.."], (0, 1))

    def go(action: int) -> tuple[list[int], bool]:
        env.step(torch.tensor([action]))
        return (rules.place[0] - rules.margin).tolist(), bool(rules.holds[0])

    assert go(0) == ([0, 1], False)  # locked
    assert go(1) == ([0, 1], False)  # the border
    assert go(3) == ([1, 1], False)
    assert go(0) == ([1, 1], False)  # the wall
    assert go(2) == ([1, 0], False)
    assert go(1) == ([0, 0], True)  # the key
    assert int(rules.cells[0, rules.margin, rules.margin]) == FLOOR
    assert go(0) == ([0, 1], True)
    assert go(0) == ([0, 2], True)
    assert int(rules.cells[0, rules.margin, rules.margin + 2]) == OPEN
    assert go(0) == ([0, 3], True)
    feedback = env.step(torch.tensor([0]))
    assert (feedback.reward.item(), feedback.discount.item(), feedback.cut.item()) == (1, 0, 1)
    assert feedback.info == {"episode_return": [1.0], "episode_length": [10]}
    assert not rules.holds[0] and not rules.reached[0]  # of the next episode


def cell(env: Own, obs: Tensor, row: int, column: int) -> int:
    """What the observation of environment 0 shows at (row, column) from the agent's place."""
    rules = env._rules
    side = key_door.PIXELS // rules.view
    first = (key_door.PIXELS - side * rules.view) // 2
    y, x = first + (rules.margin + row) * side, first + (rules.margin + column) * side
    seen = obs[0, y : y + side, x : x + side]
    codes = [code for code, tile in enumerate(key_door.tiles(side)) if torch.equal(tile, seen)]
    assert len(codes) == 1
    return codes[0]


def blind(original):
    """A mutation of `KeyDoor.show`: the observation is always that of the first cell."""

    def mutant(self, time):
        kept, self.place = self.place, torch.full_like(self.place, self.margin)
        try:
            return original(self, time)
        finally:
            self.place = kept

    return mutant


@sabotaged_by("foresight.envs.control.key_door.KeyDoor.show", blind)
@pytest.mark.parametrize("view", [3, 5])
def test_the_agent_sees_the_cells_around_it_and_no_others(view: int):
    env = make("KeyDoor-v0", num_envs=1, size=2, view=view)
    obs = env.reset(0)
    assert obs.shape == (1, 64, 64, 3) and obs.dtype == torch.uint8
    rules = at(env, ["K.D.G", "..#.."], (1, 1))
    time = torch.zeros(1)
    shown = rules.show(time)
    assert [cell(env, shown, -1, c) for c in (-1, 0, 1)] == [KEY, FLOOR, DOOR]
    assert [cell(env, shown, 0, c) for c in (-1, 0, 1)] == [FLOOR, AGENT, WALL]
    at(env, ["K.DG.", "..#.."], (1, 1))
    assert torch.equal(rules.show(time), shown) == (view == 3)  # the goal at a distance of 2 is in a view of 5 only
    at(env, ["K.D.G", "..#.."], (1, 1))
    assert torch.equal(rules.show(time), shown)  # the goal at a distance of 3 is in neither
    at(env, ["..O.G", "..#.."], (0, 2), holds=True)
    assert cell(env, rules.show(time), 0, 0) == HOLDER


def test_equal_seeds_give_equal_episodes_and_a_state_continues():
    actions = torch.randint(0, 4, (60, 6), generator=torch.Generator().manual_seed(0))

    def rows(env: Own, count: int) -> list[Tensor]:
        return [
            torch.cat([f.obs.flatten().float(), f.final_obs.flatten().float(), f.reward, f.cut])
            for f in (env.step(a) for a in actions[:count])
        ]

    one, two, three = (make("KeyDoor-v0", num_envs=6, size=2, time_limit=15) for _ in range(3))
    assert torch.equal(one.reset(4), two.reset(4)) and not torch.equal(one.reset(4), three.reset(5))
    first = rows(one, 40)
    assert all(torch.equal(a, b) for a, b in zip(first, rows(two, 40), strict=True))
    saved = copy.deepcopy(one.state_dict())
    expected = rows(one, 40)
    three.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(expected, rows(three, 40), strict=True))


def test_the_time_limit_truncates():
    env = make("KeyDoor-v0", num_envs=3, time_limit=4)
    first = env.reset(0)
    for t in range(4):
        feedback = env.step(torch.tensor([1, 1, 1]))
        assert feedback.cut.eq(float(t == 3)).all() and feedback.discount.eq(1).all()
    assert feedback.info == {"episode_return": [0.0] * 3, "episode_length": [4] * 3}
    assert not torch.equal(feedback.obs, feedback.final_obs) and not torch.equal(feedback.obs, first)


def test_a_frame_shows_the_whole_grid_and_the_observation():
    env = make("KeyDoor-v0", num_envs=2)
    obs = env.reset(3)
    frame = env.render()
    assert frame.dtype.name == "uint8" and frame.shape[2] == 3 and min(frame.shape[:2]) >= 192
    assert torch.equal(torch.from_numpy(frame[:192:3, -192::3].copy()), obs[0])
    dark = frame[0, 3 * 12 * 12]  # the margin at the far right is not seen from the left room
    assert dark.tolist() == [40, 40, 40]


MISTAKES = [
    ({"view": 4}, "an odd number of cells from 3 to 15, not 4"),
    ({"view": 17}, "an odd number"),
    ({"size": 1}, "size of 'KeyDoor-v0' must be a whole number of at least 2, not 1"),
    ({"rooms": 3}, "Unknown option of 'KeyDoor-v0'"),
    ({"action_repeat": 2}, "is built in"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        make("KeyDoor-v0", num_envs=2, **options)

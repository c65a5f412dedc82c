"""The T-maze and repeat-first compared with their rules, one environment at a time."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from foresight.envs.make import make
from foresight.errors import UserError
from tests.sabotage import change, flip_sign, sabotaged_by

ACTIONS = torch.randint(0, 4, (60, 7), generator=torch.Generator().manual_seed(0))
ACTIONS[torch.rand(60, 7, generator=torch.Generator().manual_seed(1)) < 0.5] = 0  # mostly to the right


@sabotaged_by("foresight.envs.control.memory_tasks.TMaze.move", flip_sign, change("time", lambda x: x - 1))
@sabotaged_by("foresight.envs.control.memory_tasks.TMaze.show", change("time", torch.zeros_like))
@sabotaged_by(
    "foresight.envs.control.memory_tasks.TMaze.begin", change("rows", lambda x: x & (torch.arange(len(x)) > 0))
)
def test_the_maze_is_the_papers():
    """arXiv:2307.03864, §5: a grid, one environment at a time; the goal is read off the first observation."""
    length = 2
    env = make("TMazePassive-v0", num_envs=7, length=length)
    obs = env.reset(0)
    envs = [{"x": 0, "y": 0, "time": 0, "goal": goal, "sum": 0.0} for goal in obs[:, 1].tolist()]
    assert (obs[:, 0] == 0).all() and set(obs[:, 1].tolist()) == {-1.0, 1.0}
    arms = 0
    for action in ACTIONS:
        feedback = env.step(action)
        ended = []
        for i, (maze, a) in enumerate(zip(envs, action.tolist(), strict=True)):
            dx, dy = [(1, 0), (0, 1), (-1, 0), (0, -1)][a]
            x, y = maze["x"] + dx, maze["y"] + dy
            if (0 <= x <= length and y == 0) or (x == length and abs(y) == 1):
                maze["x"], maze["y"] = x, y
            maze["time"] += 1
            over = maze["time"] == length + 1
            reward = float(maze["y"] == maze["goal"]) if over else -float(maze["x"] < maze["time"]) / length
            assert feedback.reward[i].item() == pytest.approx(reward)
            assert (feedback.cut[i].item(), feedback.discount[i].item()) == (float(over), 1.0 - over)
            maze["sum"] += reward
            at = maze["x"] == length
            assert feedback.final_obs[i].tolist() == [float(at), float(maze["y"]) if at else 0.0]
            arms += maze["y"] != 0
            if over:
                ended.append(maze["sum"])
                assert feedback.obs[i, 0] == 0 and abs(feedback.obs[i, 1]) == 1
                maze.update(x=0, y=0, time=0, goal=feedback.obs[i, 1].item(), sum=0.0)
            else:
                assert torch.equal(feedback.obs[i], feedback.final_obs[i])
        assert feedback.info.get("episode_return", []) == pytest.approx(ended)
    assert arms > 8


@pytest.mark.parametrize("length", [1, 5, 40])
def test_remembering_earns_one_and_guessing_half(length: int):
    env = make("TMazePassive-v0", num_envs=400, length=length)
    obs = env.reset(3)
    goal = obs[:, 1]
    for guess in (False, True):
        total = torch.zeros(400)
        for t in range(length + 1):
            arm = torch.where(goal > 0, 1, 3) if not guess else torch.ones(400, dtype=torch.int64)
            feedback = env.step(arm if t == length else torch.zeros(400, dtype=torch.int64))
            total += feedback.reward
        assert feedback.cut.all() and feedback.info["episode_length"] == [length + 1] * 400
        assert feedback.info["episode_return"] == total.tolist()
        assert (total == 1).all() if not guess else total.mean().item() == pytest.approx(0.5, abs=0.08)
        goal = feedback.obs[:, 1]


@sabotaged_by("foresight.envs.control.memory_tasks.RepeatFirst.move", flip_sign)
@sabotaged_by("foresight.envs.control.memory_tasks.RepeatFirst.begin", change("rows", torch.zeros_like))
def test_repeat_first_pays_for_the_first_suit():
    env = make("RepeatFirst-v0", num_envs=50, length=6, suits=3)
    first = env.reset(0)
    assert env.spaces.obs.n == env.spaces.action.n == 3 and set(first.tolist()) == {0, 1, 2}
    for episode in range(3):
        for t in range(6):
            right = torch.arange(50) % 2 == 0
            feedback = env.step(torch.where(right, first, (first + 1 + episode % 2) % 3))
            torch.testing.assert_close(feedback.reward, torch.where(right, 1 / 6, -1 / 6))
            assert feedback.cut.eq(float(t == 5)).all() and feedback.discount.eq(float(t < 5)).all()
        assert feedback.info["episode_return"] == pytest.approx([1.0, -1.0] * 25)
        first = feedback.obs
    assert len(set(feedback.final_obs.tolist())) == 3  # cards continue to be dealt


@pytest.mark.parametrize("name", ["TMazePassive-v0", "RepeatFirst-v0"])
def test_equal_seeds_give_equal_episodes_and_a_state_continues(name: str):
    def rows(env, count: int) -> list[torch.Tensor]:
        return [torch.cat([f.obs.reshape(-1).float(), f.reward]) for f in (env.step(a) for a in ACTIONS[:count])]

    one, two, three = (make(name, num_envs=7, length=5) for _ in range(3))
    one.reset(4), two.reset(4), three.reset(5)
    first = rows(one, 20)
    assert all(torch.equal(a, b) for a, b in zip(first, rows(two, 20), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, rows(three, 20), strict=True))
    saved = copy.deepcopy(one.state_dict())
    expected = rows(one, 15)
    three.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(expected, rows(three, 15), strict=True))


def test_a_time_limit_cuts_and_does_not_end():
    env = make("RepeatFirst-v0", num_envs=2, length=9, time_limit=4)
    env.reset(0)
    cuts = [
        (f.cut.tolist(), f.discount.tolist()) for f in (env.step(torch.zeros(2, dtype=torch.int64)) for _ in range(8))
    ]
    assert cuts == ([([0.0, 0.0], [1.0, 1.0])] * 3 + [([1.0, 1.0], [1.0, 1.0])]) * 2


MISTAKES = [
    ({"lenght": 4}, "Did you mean 'length'"),
    ({"length": 0}, "length of 'TMazePassive-v0' must be a whole number of at least 1"),
    ({"length": 2.5}, "whole number"),
    ({"engine": "envpool"}, "is built in"),
    ({"action_repeat": 2}, "is built in"),
    ({"visible": [2]}, "must be indices from 0 to 1"),
    ({"visible": []}, "must be indices"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        make("TMazePassive-v0", num_envs=2, **options)
    with pytest.raises(ValueError, match="actions of shape"):
        env = make("TMazePassive-v0", num_envs=2)
        env.reset(0)
        env.step(torch.zeros(3, dtype=torch.int64))


@sabotaged_by(
    "foresight.envs.control.wrappers.visible", lambda f: lambda env, indices: f(env, [i + 1 for i in indices])
)
def test_only_what_is_visible_is_shown():
    """CartPole without velocities, final observations included."""
    whole, part = make("CartPole-v1", num_envs=3), make("CartPole-v1", num_envs=3, visible=[0, 2])
    assert part.spaces.obs.shape == (2,)
    np.testing.assert_array_equal(part.spaces.obs.high, whole.spaces.obs.high[[0, 2]])
    assert torch.equal(part.reset(0), whole.reset(0)[:, [0, 2]])
    ended = 0
    for _ in range(40):
        a, b = whole.step(torch.ones(3)), part.step(torch.ones(3))
        assert torch.equal(b.obs, a.obs[:, [0, 2]]) and torch.equal(b.final_obs, a.final_obs[:, [0, 2]])
        assert (b.final_obs is b.obs) == (a.final_obs is a.obs)
        ended += int(a.cut.sum())
    assert ended > 5
    with pytest.raises(UserError, match="needs vector observations"):
        make("RepeatFirst-v0", num_envs=2, visible=[0])

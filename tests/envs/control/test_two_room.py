"""Two rooms: walls stop the point, images show where it is, goals can be reached, and a saved state continues."""

from __future__ import annotations

import copy

import pytest
import torch

from foresight.envs.control import two_room
from foresight.envs.control.two_room import DOOR, EDGE, GAP, RADIUS, SPEED, WALL
from foresight.envs.make import make
from foresight.errors import UserError
from tests.sabotage import change, sabotaged_by

N = 64


def literal(x: float, y: float, dx: float, dy: float) -> tuple[float, float]:
    """One move, written out: along x up to the border or the wall, then along y up to the border or the door's side."""
    x = min(max(x + SPEED * min(max(dx, -1), 1), EDGE), 1 - EDGE)
    if abs(y - 0.5) > DOOR and abs(x - 0.5) < WALL:
        x = 0.5 - WALL - GAP if dx > 0 else 0.5 + WALL + GAP  # it came from the other side of where it goes
    y = min(max(y + SPEED * min(max(dy, -1), 1), EDGE), 1 - EDGE)
    if abs(x - 0.5) < WALL:
        y = min(max(y, 0.5 - DOOR + GAP), 0.5 + DOOR - GAP)
    return x, y


def seen(image: torch.Tensor) -> torch.Tensor:
    """Where the point is in images `[B, 32, 32, 3]`: the center of how much redder a pixel is than gray."""
    red = (image[..., 0].float() - image[..., 1].float()).clamp_min(0)
    center = (torch.arange(32) + 0.5) / 32
    total = red.sum((1, 2))
    return torch.stack([red.sum(1) @ center, red.sum(2) @ center], 1) / total.unsqueeze(1)


@sabotaged_by("foresight.envs.control.two_room.moved", lambda f: lambda place, action: f(place, action.flip(-1)))
@sabotaged_by("foresight.envs.control.two_room.moved", lambda f: lambda place, action: f(place, action / 2))
def test_moves_are_the_literal_ones_and_never_enter_the_wall():
    env = make("TwoRoom-v0", num_envs=N, time_limit=1_000)
    env.reset(0)
    generator = torch.Generator().manual_seed(0)
    rules = env._rules
    inside = 0
    for t in range(300):
        if t % 20 == 0:
            action = 3 * torch.rand(N, 2, generator=generator) - 1.5
        before = rules.place
        after = two_room.moved(before, action)
        for (x, y), (dx, dy), found in zip(before.tolist(), action.tolist(), after.tolist(), strict=True):
            assert found == pytest.approx(literal(x, y, dx, dy), abs=1e-6)
        rules.place = after
        within = (after[:, 0] - 0.5).abs() < WALL - 1e-6
        assert ((after[:, 1] - 0.5).abs()[within] <= DOOR + 1e-6).all()
        inside += int(within.sum())
    assert inside > 20  # the door was passed


@sabotaged_by("foresight.envs.control.two_room.draw", change("place", lambda x: x.flip(-1)))
@sabotaged_by("foresight.envs.control.two_room.draw", change("place", lambda x: x.roll(1, 0)))
def test_images_show_the_place_and_the_goal():
    env = make("TwoRoom-v0", num_envs=N)
    obs = env.reset(1)
    free = (env._rules.place[:, 0] - 0.5).abs() > 0.15  # away from walls the picture of the point is whole
    free &= ((env._rules.place - 0.5).abs() < 0.4).all(1)
    assert free.sum() > 20
    torch.testing.assert_close(seen(obs["image"])[free], env._rules.place[free], atol=0.01, rtol=0)
    assert ((seen(obs["goal"]) - env._rules.goal).norm(dim=1) < 0.03).all()
    assert env.spaces.obs.contains({name: image[0].numpy() for name, image in obs.items()})
    assert env.render().shape == (256, 512, 3)


@sabotaged_by("foresight.envs.control.two_room.TwoRoom.over", lambda f: lambda self, time: f(self, time) & False)
@sabotaged_by("foresight.envs.control.two_room.TwoRoom.begin", change("rows", torch.zeros_like))
@pytest.mark.parametrize(("ahead", "apart"), [(25, 0.4), (0, 1.0)])
def test_who_walks_to_the_goal_is_rewarded_once_and_random_actions_rarely(ahead: int, apart: float):
    def returns(walk: bool) -> list[float]:
        env = make("TwoRoom-v0", num_envs=N, ahead=ahead)
        env.reset(2)
        rules, generator = env._rules, torch.Generator().manual_seed(3)
        rooms = rules.place[:, 0] < 0.5
        assert ((rules.goal[:, 0] < 0.5) != rooms).float().mean() >= apart
        assert len(rules.place.unique(dim=0)) == N and rooms.float().mean() == pytest.approx(0.5, abs=0.2)
        first: list[float | None] = [None] * N
        while None in first:
            target = two_room.toward(rules.place, rules.goal)
            action = target if walk else 2 * torch.rand(N, 2, generator=generator) - 1
            feedback = env.step(action)
            assert torch.equal(feedback.reward, 1 - feedback.discount)  # it ends where it is rewarded
            near = (seen(feedback.final_obs["image"]) - seen(feedback.final_obs["goal"])).norm(dim=1) < RADIUS + 0.03
            assert near[feedback.reward > 0].all()
            reported = iter(feedback.info.get("episode_return", ()))
            for i in feedback.cut.nonzero().squeeze(-1).tolist():
                first[i] = next(reported) if first[i] is None else first[i]
        return first

    assert returns(walk=True) == [1.0] * N
    assert sum(returns(walk=False)) < 0.2 * N


def test_equal_seeds_give_equal_episodes_and_a_state_continues():
    actions = 2 * torch.rand(80, 5, 2, generator=torch.Generator().manual_seed(0)) - 1

    def rows(env, chosen) -> list[torch.Tensor]:
        found = [env.step(action) for action in chosen]
        return [torch.cat([f.obs["image"].flatten(), f.obs["goal"].flatten(), f.reward.byte()]) for f in found]

    one, two, three = (make("TwoRoom-v0", num_envs=5, time_limit=9) for _ in range(3))
    one.reset(4), two.reset(4), three.reset(5)
    first = rows(one, actions[:40])
    assert all(torch.equal(a, b) for a, b in zip(first, rows(two, actions[:40]), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, rows(three, actions[:40]), strict=True))
    saved = copy.deepcopy(one.state_dict())
    expected = rows(one, actions[40:])
    three.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(expected, rows(three, actions[40:]), strict=True))


def test_mistakes_are_named():
    with pytest.raises(UserError, match="ahead of 'TwoRoom-v0' must be a whole number of at least 0, not -1"):
        make("TwoRoom-v0", num_envs=2, ahead=-1)
    env = make("TwoRoom-v0", num_envs=2)
    env.reset(0)
    with pytest.raises(ValueError, match=r"actions of shape \(2, 2\), not \(2,\)"):
        env.step(torch.zeros(2))

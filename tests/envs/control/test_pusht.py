"""Push-T: the model of the contact is the physics', the score is the highest coverage, demonstrations end."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from foresight.envs.control import pusher, pusht
from foresight.envs.make import make
from foresight.errors import UserError
from tests.sabotage import sabotaged_by, scaled

installed = pytest.mark.skipif(importlib.util.find_spec("gym_pusht") is None, reason="the extra pusht")
POSE = np.array([250.0, 230.0, 0.7])


@installed
@sabotaged_by("foresight.envs.control.pusher.rotate", lambda f: lambda vectors, angle: f(vectors, -angle))
@sabotaged_by("foresight.envs.control.pusher.separate",
              lambda f: lambda poses, finger: np.concatenate([f(poses, finger)[:, :2], poses[:, 2:]], 1))  # fmt: skip
def test_pushes_move_the_block_as_the_physics_do() -> None:
    env = importlib.import_module("gym_pusht.envs.pusht").PushTEnv(obs_type="environment_state_agent_pos")
    start, direction = pusher.contacts(POSE)
    assert len(start) > 50
    assert np.allclose(pusher.distance_to_block(POSE, start), pusher.FINGER + pusher.GAP)
    length = 30.0
    predicted = pusher.push(POSE, start, direction, 1.0)[:, int(length) - 1]
    moved = 0
    for i in range(0, len(start), 9):
        env.reset(options={"reset_to_state": [*start[i], *POSE]})
        env.block.angle, env.block.position = POSE[2], tuple(POSE[:2])
        for share in np.linspace(0.1, 1, 10):
            env.step(start[i] + direction[i] * length * share)
        for _ in range(5):
            env.step(start[i] + direction[i] * length)
        found = np.array([*env.block.position, env.block.angle])
        gone = pusher.distance(POSE[None]) - pusher.distance(found[None])
        assert np.abs(found - predicted[i]).max() < 3, (i, found, predicted[i])
        moved += abs(gone[0]) > 3
    assert moved > 3


def test_the_search_goes_around_the_block() -> None:
    ways = pusher.Ways(POSE, np.array([60.0, 60.0]))
    way = ways.to(np.array([440.0, 440.0]))
    assert np.allclose(way[-1], 440) and min(pusher.distance_to_block(POSE, np.array(way))) > pusher.FINGER
    assert ways.costs(pusher.to_world(POSE, np.array([[0.0, 15.0]])))[0] == np.inf  # inside the block


@installed
@sabotaged_by(
    "foresight.envs.control.pusher.push",
    lambda f: lambda pose, start, direction, grain: f(pose, start, -direction, grain),
)
@sabotaged_by("foresight.envs.control.pusht.PushT.move", scaled(0.5))
def test_a_demonstration_reaches_the_goal() -> None:
    env = make("PushT-v0", num_envs=1)
    obs, total = env.reset(2), 0.0
    assert env.spaces.obs.contains(obs[0].numpy())
    for _ in range(120):
        feedback = env.step(env.expert())
        total += float(feedback.reward)
        assert feedback.reward >= 0
        if feedback.cut:
            break
    assert (
        total == pytest.approx(1) and feedback.discount == 0 and feedback.info["episode_return"] == pytest.approx([1])
    )


@installed
@sabotaged_by("foresight.envs.control.pusht._set", lambda f: lambda env, state: None)
def test_a_saved_state_continues() -> None:
    env, other = make("PushT-v0", num_envs=2), make("PushT-v0", num_envs=2)
    env.reset(0)
    for _ in range(5):
        env.step(env.expert())
    other.reset(1)
    other.load_state_dict(env.state_dict())
    action = torch.tensor([[100.0, 300], [400, 200]])
    for _ in range(4):
        here, there = env.step(action), other.step(action)
        torch.testing.assert_close(here.obs, there.obs, atol=0.5, rtol=0)  # impulses of the last contact are not saved
        torch.testing.assert_close(here.reward, there.reward, atol=0.01, rtol=0)
    assert env.render().shape[-1] == 3


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str):
        raise ImportError("No module named 'gym_pusht'")

    monkeypatch.setattr(pusht.importlib, "import_module", refuse)
    with pytest.raises(UserError, match=r"pip install 'foresight\[pusht\]' && pip install --no-deps gym-pusht"):
        pusht.PushT(1)

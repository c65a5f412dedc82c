"""MetaWorld with an instruction: the expert succeeds, chunks are their movements, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from foresight.envs.control import metaworld
from foresight.envs.make import make
from foresight.errors import UserError
from tests.sabotage import change, sabotaged_by

REACH = metaworld.REACH


@sabotaged_by("foresight.envs.control.metaworld.expert", change("state", lambda x: x.flip(1)))
def test_the_expert_reaches_the_goal_and_idleness_does_not() -> None:
    env = make(REACH, num_envs=4, chunk=5)
    obs, found = env.reset(0), []
    assert bytes(obs["mission"][0].tolist()).rstrip(b"\0") == b"reach" and obs["state"].shape == (4, 39)
    for _ in range(20):
        feedback = env.step(env.expert())
        found += feedback.info.get("episode_return", [])
        ended = feedback.cut > 0
        assert torch.equal(feedback.reward, (feedback.discount == 0).float())  # a success ends the episode
        assert torch.equal(feedback.obs["state"][~ended], feedback.final_obs["state"][~ended])
    assert len(found) >= 4 and sum(found) == len(found)
    env.reset(0)
    idle = [env.step(torch.zeros(4, 5, 4)) for _ in range(20)]
    assert sum(one.reward.sum() for one in idle) == 0 and idle[-1].cut.all() and idle[-1].discount.all()
    env.close()


@sabotaged_by("foresight.envs.control.metaworld.Instructed.step", change("actions", lambda x: x[:, ::-1]))
def test_a_chunk_is_its_movements_one_after_the_other() -> None:
    whole, single = make(REACH, num_envs=2, chunk=3), make(REACH, num_envs=2, chunk=1)
    a, b = whole.reset(1), single.reset(1)
    torch.testing.assert_close(a["state"], b["state"])
    movements = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    last = whole.step(movements).obs["state"]
    for i in range(3):
        b = single.step(movements[:, i : i + 1]).obs
    torch.testing.assert_close(last, b["state"])
    assert (last[:, :3] - a["state"][:, :3]).abs().max() > 1e-3
    whole.close(), single.close()


def test_other_tasks_have_instructions_and_mistakes_are_named() -> None:
    env = make("MetaWorld/ButtonPressTopdown-v3", num_envs=1, chunk=1)
    assert bytes(env.reset(0)["mission"][0].tolist()).rstrip(b"\0") == b"button press topdown"
    assert not hasattr(env, "expert")
    env.close()
    for options, message in (
        ({"chunk": 0}, "whole number of movements from 1 to 100, not 0"), ({"chunk": 2, "color": 1}, "color"),
        ({"chunk": 2, "action_repeat": 2}, "no action_repeat"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            make(REACH, num_envs=1, **options)
    with pytest.raises(UserError, match=r"The instruction 'x{33}' has 33 bytes, but an observation has room for 32"):
        metaworld.Instructed(SimpleNamespace(close=None), 33 * "x")

"""Several tasks in one batch: the rows of each are those that it has alone."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces as gs

from foresight.envs.control.multi_task import MultiTask, least_envs, same_space
from foresight.envs.make import make
from foresight.envs.tools import browser
from foresight.errors import UserError
from tests.sabotage import sabotaged_by


@sabotaged_by(
    "foresight.envs.control.multi_task.MultiTask.step", lambda f: lambda self, action: f(self, action.roll(1))
)
def test_every_row_is_what_its_task_shows_by_itself() -> None:
    def tasks():
        return make("CartPole-v1", num_envs=3), make("CartPole-v1", num_envs=2, time_limit=4)

    together, (long, short) = MultiTask(tasks()), tasks()
    assert together.num_envs == 5 and together.name == "CartPole-v1,CartPole-v1"
    obs = together.reset(7)
    assert torch.equal(obs, torch.cat([long.reset(7), short.reset(10)]))  # environment i is seeded with seed + i
    ended = []
    for step in range(1, 30):
        action = torch.randint(2, (5,))
        came, parts = together.step(action), [long.step(action[:3]), short.step(action[3:])]
        for name in ("obs", "reward", "discount", "cut", "mask", "final_obs"):
            assert torch.equal(getattr(came, name), torch.cat([getattr(part, name) for part in parts])), name
        assert (came.final_obs is came.obs) == (not came.cut.any())
        assert came.cut[3:].tolist() == [float(step % 4 == 0)] * 2
        assert len(came.info.get("episode_task", [])) == came.cut.sum() == len(came.info.get("episode_return", []))
        ended += came.info.get("episode_length", [])
    assert ended.count(4) >= 14


def test_names_joined_by_commas_share_the_envs() -> None:
    env = make("CartPole-v1, CartPole-v1", num_envs=5)
    assert [part.num_envs for part in env.envs] == [3, 2]
    with pytest.raises(UserError, match="num_envs is 1, but 2 tasks need one environment each: raise num_envs"):
        make("CartPole-v1,CartPole-v1", num_envs=1)
    with pytest.raises(UserError, match="need equal observations: 'CartPole-v1' has"):
        make("CartPole-v1,Pendulum-v1", num_envs=2)


def test_how_many_envs_names_need() -> None:
    assert least_envs("CartPole-v1") == 1 and least_envs("CartPole-v1, Acrobot-v1") == 2
    if browser.tasks():
        assert least_envs("MiniWoB/ten") == 10
        assert least_envs("MiniWoB/click-tab,MiniWoB/click-tab+click-link+click-tab") == 4


def test_bounds_may_differ_but_not_shapes() -> None:
    assert same_space(gs.Box(-1, 1, (3,)), gs.Box(-2, 5, (3,)))
    assert same_space(gs.Dict({"a": gs.Discrete(2)}), gs.Dict({"a": gs.Discrete(2)}))
    assert not same_space(gs.Box(-1, 1, (3,)), gs.Box(-1, 1, (4,)))
    assert not same_space(gs.Discrete(2), gs.Discrete(3))
    assert not same_space(gs.Dict({"a": gs.Discrete(2)}), gs.Dict({"b": gs.Discrete(2)}))

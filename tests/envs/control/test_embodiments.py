"""Environments of several embodiments in one batch, and one of them alone in the spaces of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresight.data import embodiments
from foresight.envs.control import multi_task
from foresight.errors import UserError
from foresight.runtime import kinds
from foresight.runtime.config import resolve
from tests.algorithms.imitation.scenes import Pointing, Touching
from tests.sabotage import change, sabotaged_by

KINDS: dict[str, Any] = {"Pointing": Pointing, "Touching": Touching, "Pointing2": Pointing}
NAMES = "Pointing,Touching"


def one(name: str, num_envs: int, **options: Any):
    """An environment, with the options that it was given."""
    env = KINDS[name](num_envs)
    env.options, env.closed = options, False
    env.close = lambda: setattr(env, "closed", True)
    return env


@sabotaged_by("foresight.data.embodiments.own_action", change("action", lambda action: -action))
@sabotaged_by("foresight.data.embodiments.pad_obs", change("number", lambda number: 1 - number))
def test_each_row_is_its_own_embodiment() -> None:
    env = multi_task.make(NAMES, one, num_envs=5, embodiments=True)
    assert [part.name for part in env.spaces.embodiments] == ["Pointing", "Touching"]
    assert env.spaces.action.shape == (2,) and env.spaces.obs["embodiment"].n == 2
    obs, alone = env.reset(3), (Pointing(3), Touching(2))
    shown = [alone[0].reset(3), alone[1].reset(6)]
    assert obs["embodiment"].tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(obs["image"], torch.cat([one["image"] for one in shown]))
    index, touch = torch.tensor([0, 1, 2]), torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    parts = env.spaces.embodiments
    action = torch.cat(
        [
            embodiments.pad_action(x, part.action, env.spaces.action)
            for x, part in zip((index, touch), parts, strict=True)
        ]
    )
    came, each = env.step(action), [alone[0].step(index), alone[1].step(touch)]
    assert torch.equal(came.reward, torch.cat([one.reward for one in each])) and 0 < came.reward.sum() < 5
    assert came.obs["embodiment"].tolist() == came.final_obs["embodiment"].tolist() == [0, 0, 0, 1, 1]
    assert came.info["episode_task"] == ["Pointing"] * 3 + ["Touching"] * 2


def test_one_of_them_acts_alone_in_the_spaces_of_all() -> None:
    both, env = (multi_task.make(NAMES, one, 4, embodiments=True, only=only) for only in (None, "Touching"))
    assert env.name == "Touching" and env.num_envs == 4 and env.spaces == both.spaces
    assert env.reset(0)["embodiment"].tolist() == [1] * 4
    plain = multi_task.make("Pointing,Pointing2", one, 3, only="Pointing2")  # of one embodiment
    assert plain.num_envs == 3 and plain.spaces.obs == Pointing.spaces.obs
    same = multi_task.make("Pointing,Pointing2,Touching", one, 3, embodiments=True)  # those of equal spaces are one
    assert same.reset(0)["embodiment"].tolist() == [0, 0, 1]


def test_options_may_be_of_one_task() -> None:
    env = multi_task.make(NAMES, one, 2, embodiments=True, shared=1, Touching={"near": 2, "shared": 3})
    assert [part.env.options for part in env.envs] == [{"shared": 1}, {"near": 2, "shared": 3}]
    for given, message in (
        ({"only": "Touch"}, "Unknown environment of these tasks 'Touch'. Did you mean 'Touching'"),
        ({"Touching": 3}, "The options of 'Touching' are 3: write"),
        ({"num_envs": 1}, "num_envs is 1, but 2 tasks need one environment each"),
        ({"embodiments": False}, "need equal actions: .* vla takes different ones with --env-options embodiments=true"),
    ):
        with pytest.raises(UserError, match=message):
            multi_task.make(NAMES, one, **{"num_envs": 2, "embodiments": True, **given})  # type: ignore[arg-type]


def test_a_run_is_evaluated_in_one_of_its_environments() -> None:
    run = resolve.resolve("vla", preset="RT-X")
    only = kinds.get("control").only
    assert only(run, "MetaWorld/Reach-v3").env_options == {**run.env_options, "only": "MetaWorld/Reach-v3"}
    with pytest.raises(UserError, match=r"has no environment 'PushT-v0'\. It acts in: MetaWorld/Reach-v3, BabyAI-GoTo"):
        only(run, "PushT-v0")
    alone = resolve.resolve("vla", preset="RT-X-Reach")
    assert only(alone, "MetaWorld/Reach-v3") == alone
    with pytest.raises(UserError, match=r"A 'tabular' run has one environment, '.*': leave out --env"):
        kinds.get("tabular").only(resolve.resolve("q_learning", env="grid"), "grid")

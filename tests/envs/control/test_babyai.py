"""BabyAI with a camera: what is seen is what minigrid shows, and what is asked for is what the options say."""

from __future__ import annotations

import re

import gymnasium
import numpy as np
import pytest
import torch

from foresight.envs.control import babyai
from foresight.envs.make import make
from foresight.errors import UserError
from tests.sabotage import sabotaged_by

pytest.importorskip("minigrid")
LEVELS = "BabyAI-GoToLocal-v0,BabyAI-PickupDist-v0"


def missions(obs) -> list[str]:
    """The missions as text."""
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in obs["mission"]]


@sabotaged_by("foresight.envs.control.babyai.lit", lambda f: lambda opaque: np.ones_like(opaque))
@sabotaged_by("foresight.envs.control.babyai.codes", lambda f: lambda level: np.flip(f(level), 0))
def test_the_view_is_minigrids() -> None:
    for name in ("BabyAI-PickupDist-v0", "BabyAI-UnlockLocal-v0"):
        level, chance = gymnasium.make(name).unwrapped, np.random.default_rng(0)
        for seed in range(2):
            obs, _ = level.reset(seed=seed)
            for _ in range(25):
                obs, _, over, cut, _ = level.step(int(chance.choice(6, p=[0.2, 0.2, 0.3, 0.1, 0.05, 0.15])))
                found = babyai.view([level], [babyai.codes(level)])[0]
                np.testing.assert_array_equal(found, obs["image"])
                if over or cut:
                    break


def test_the_image_is_minigrids_tiles() -> None:
    env = babyai.make("BabyAI-GoToLocal-v0", 1, camera=8)
    image = env.reset(3)["image"][0].numpy()
    level = env._levels[0]
    grid, seen = level.gen_obs_grid()
    plain = np.where(np.kron(seen.T, np.ones((8, 8)))[..., None] > 0, grid.render(8, (-1, -1)), 0)
    np.testing.assert_array_equal(image, plain)


@sabotaged_by("foresight.envs.control.babyai.move", lambda f: lambda level: level.grid.set(*level.agent_pos, None))
def test_the_expert_succeeds_also_when_the_object_moves() -> None:
    for options in ({}, {"moved": True}):
        env = make(LEVELS, num_envs=4, camera=3, **options)
        env.reset(0)
        level, found, returns = env.envs[0]._levels[0], [], []
        while len(returns) < 12:
            places = [tuple(p) for p in level.instrs.desc.obj_poss]
            feedback = env.step(env.expert())
            if not feedback.cut[0]:
                found.append(places == [tuple(p) for p in level.instrs.desc.obj_poss])
            returns += feedback.info.get("episode_return", [])
        assert np.mean(returns) == 1 and all(found) == (not options)


@sabotaged_by("foresight.envs.control.babyai.Instructed._advice", lambda f: lambda self, i: 0)
def test_the_expert_need_not_be_followed() -> None:
    """Half of the actions are random ones: what was picked up or passed by mistake is put right."""
    env = make(LEVELS, num_envs=8, camera=3)
    env.reset(0)
    generator, returns = torch.Generator().manual_seed(0), []
    while len(returns) < 24:
        other = torch.randint(0, 4, (8,), generator=generator)
        action = torch.where(torch.rand(8, generator=generator) < 0.5, other, env.expert())
        returns += env.step(action).info.get("episode_return", [])
    assert np.mean(returns) > 0.8


def test_slips_are_random_movements() -> None:
    """Of 80 slips in a hundred, 3 in 10 or more differ from the advice, and none picks anything up."""
    env, careful = (make("BabyAI-PickupDist-v0", num_envs=16, camera=3, slips=slips) for slips in (0.8, 0.0))
    env.reset(0), careful.reset(0)
    same, picked = [], []
    for _ in range(20):
        action, advice = env.expert(), careful.expert()
        same.append((action == advice).float().mean().item())
        picked.append((action >= babyai.MOVEMENTS) & (action != advice))
        env.step(action), careful.step(action)
    assert 0.35 < np.mean(same) < 0.6 and not torch.stack(picked).any()


def test_missions_are_of_the_pairs_asked_for() -> None:
    for pairs in ("train", "held_out"):
        env = make(LEVELS, num_envs=4, camera=3, pairs=pairs)
        said = missions(env.reset(0))
        for _ in range(40):
            said += missions(env.step(env.expert()).obs)
        named = [babyai.MISSION.fullmatch(one)["pair"] in babyai.HELD_OUT for one in said]  # type: ignore[index]
        assert all(named) if pairs == "held_out" else not any(named)
        assert {one.split()[0] for one in said} == {"go", "pick"}
    said = missions(make(LEVELS, num_envs=4, camera=3, paraphrase=True).reset(0))
    assert not any(one.startswith(("go to", "pick up")) for one in said)


@sabotaged_by("foresight.envs.control.babyai.Instructed.same_starts", lambda f: lambda self, group: None)
def test_equal_seeds_and_groups_have_equal_episodes() -> None:
    env = make("BabyAI-GoToLocal-v0", num_envs=4, camera=3)
    one, other = env.reset(1), make("BabyAI-GoToLocal-v0", num_envs=4, camera=3).reset(1)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(one["image"][0], one["image"][1])
    env.same_starts(2)
    obs = env.reset(1)
    assert torch.equal(obs["image"][0], obs["image"][1]) and torch.equal(obs["image"][2], obs["image"][3])
    assert not torch.equal(obs["image"][0], obs["image"][2])
    env.step(torch.tensor([0, 2, 0, 0]))  # they may act differently
    for i in (0, 1):
        env._begin(i)
    assert env._missions[0] == env._missions[1] and np.array_equal(env._codes[0], env._codes[1])


def test_vision_options_change_pixels_only() -> None:
    plain, floor, noise = (
        make("BabyAI-GoToLocal-v0", num_envs=2, camera=6, **options).reset(0)
        for options in ({}, {"floor": True}, {"noise": 20.0})
    )
    assert missions(plain) == missions(floor) == missions(noise)
    changed = (plain["image"] != floor["image"]).any(-1)
    assert changed.any() and (floor["image"][changed] == torch.from_numpy(babyai.FLOOR)).all()
    gap = noise["image"].float() - plain["image"].float()
    assert 10 < gap[plain["image"] > 60].std() < 25


def test_a_limit_cuts_without_a_termination() -> None:
    env = make("BabyAI-GoToLocal-v0", num_envs=2, camera=3, time_limit=2)
    env.reset(0)
    still = torch.full((2,), 5)  # toggles
    assert env.step(still).cut.tolist() == [0, 0]
    feedback = env.step(still)
    assert feedback.cut.tolist() == [1, 1] and feedback.discount.tolist() == [1, 1]
    assert feedback.info["episode_return"] == [0, 0] and feedback.info["episode_length"] == [2, 2]
    assert not torch.equal(feedback.obs["image"], feedback.final_obs["image"])


@sabotaged_by("foresight.data.text.encoded", lambda f: lambda words, size: f(words.encode()[:size].decode(), size))
def test_an_instruction_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make("BabyAI-GoToLocal-v0", num_envs=1, camera=3)
    monkeypatch.setattr(babyai, "LETTERS", 12)
    try:
        env.reset(0)
    except UserError as error:
        assert re.match(r"The instruction 'go to the .*' has \d+ bytes, but an observation has room for 12", str(error))
    else:
        raise AssertionError("an instruction was cut")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"camera": 0}, "camera of BabyAI must be a whole number of at least 3"),
        ({"camera": 6, "pairs": "test"}, "Unknown value of pairs 'test'"),
        ({"camera": 6, "noise": -1}, "deviation from 0 to 255"),
        ({"camera": 6, "slips": 2}, "share from 0 to 1"),
        ({"camera": 6, "flor": True}, "Did you mean 'floor'"),
        ({"camera": 6, "engine": "envpool"}, "engine='gymnasium'"),
    ],
)
def test_mistakes_are_named(options, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=message):
        make("BabyAI-GoToLocal-v0", num_envs=2, **options)
    with pytest.raises(UserError, match="no mission that names"):
        make("BabyAI-OpenDoor-v0", num_envs=1, camera=3)
    monkeypatch.setattr(babyai, "DRAWS", 5)
    with pytest.raises(UserError, match="has no room that pairs=train allows, in 5 draws"):
        make("BabyAI-GoToRedBallGrey-v0", num_envs=1, camera=3, pairs="train")

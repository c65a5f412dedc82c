"""Stretches of experience: whose successor is what, and whole episodes without a preference for short ones."""

from __future__ import annotations

import pytest
import torch

from foresight.data.trajectory import tree_map
from foresight.envs import collect
from foresight.envs.base import Episodes
from tests.algorithms.policy.worlds import Clock, Corridor, Gymnasium
from tests.sabotage import change, sabotaged_by, shift

CPU = torch.device("cpu")


def _still(obs: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(obs), dtype=torch.int64)


def _random(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return lambda obs: torch.randint(0, 2, (len(obs),), generator=generator)


def test_a_segment_is_what_the_world_said():
    env, again = Gymnasium("CartPole-v1", 3), Gymnasium("CartPole-v1", 3)
    seen = Episodes()
    stretch = collect.segment(env, env.reset(0), _random(), 60, CPU, seen)
    obs, choose, ended = again.reset(0), _random(), []
    for t in range(60):
        action = choose(obs)
        feedback = again.step(action)
        for name, value in (("obs", obs), ("action", action)):
            assert torch.equal(getattr(stretch.batch, name)[:, t], value)
        for name in ("reward", "discount", "cut", "mask"):
            assert torch.equal(getattr(stretch.batch, name)[:, t], getattr(feedback, name))
        ended += feedback.info.get("episode_return", [])
        obs = feedback.obs
    assert torch.equal(stretch.obs, obs)
    assert seen.returns == ended and len(ended) > 3


@sabotaged_by("foresight.envs.collect.successors", shift("value"))
@pytest.mark.parametrize("lost", [False, True])
def test_successors_at_time_limits_are_final_observations(lost):
    """State s of the clock is followed by s + 1, whatever is cut: its "value" is its number here."""
    env = Clock((0.0, 0.0, 0.0), lost=lost)
    stretch = collect.segment(env, env.reset(0), _still, 20, CPU, Episodes())
    number = lambda obs: obs.argmax(-1).float()  # noqa: E731
    found = collect.successors(stretch, number(stretch.batch.obs), number)
    real = stretch.batch.mask > 0
    assert torch.equal(found[real], ((number(stretch.batch.obs) + 1) % 3)[real])
    assert stretch.batch.cut[real].sum() >= 16
    assert torch.equal(number(collect.successor_obs(stretch))[real], found[real])


@sabotaged_by("foresight.envs.collect._limits", lambda f: lambda t, feedback: [])
def test_final_observations_are_kept_where_the_next_row_is_another_episode():
    env = Clock((0.0, 0.0, 0.0))
    stretch = collect.segment(env, env.reset(0), _still, 20, CPU, Episodes())
    assert sum(len(worlds) for _, worlds, _ in stretch.finals) == stretch.batch.cut.sum() > 0
    assert all((final.argmax(-1) == 2).all() for _, _, final in stretch.finals)  # 8 steps from 0


def test_parts_of_an_observation_keep_together():
    env = Clock((0.0, 0.0, 0.0))
    plain = collect.segment(env, env.reset(0), _still, 20, CPU, Episodes())
    split = lambda tree: {"a": tree, "b": {"c": -tree}}  # noqa: E731
    finals = [(t, worlds, split(obs)) for t, worlds, obs in plain.finals]
    parts = plain._replace(batch=plain.batch.replace(obs=split(plain.batch.obs)), obs=split(plain.obs), finals=finals)
    found = collect.successor_obs(parts)
    assert torch.equal(found["a"], collect.successor_obs(plain))
    assert torch.equal(found["b"]["c"], -found["a"])
    value = lambda obs: tree_map(lambda x: x.argmax(-1).float(), obs)["a"]  # noqa: E731
    assert torch.equal(collect.successors(parts, value(parts.batch.obs), value), value(found))


@sabotaged_by("foresight.envs.collect.episodes", change("seed", lambda seed: 7))
def test_episodes_are_whole_and_one_of_each_world():
    env = Gymnasium("CartPole-v1", 6)
    seen = Episodes()
    stretch = collect.episodes(env, 3, _random(1), 1000, CPU, seen)
    batch, lengths = stretch.batch, stretch.batch.mask.sum(1)
    assert sorted(lengths.tolist()) == sorted(seen.returns)
    assert batch.mask.shape[1] == lengths.max() and lengths.min() < lengths.max()
    for row, length in enumerate(lengths.int().tolist()):
        assert batch.mask[row].tolist() == [1.0] * length + [0.0] * (batch.mask.shape[1] - length)
        assert batch.cut[row, :length].tolist() == [0.0] * (length - 1) + [1.0]
        assert batch.discount[row, length - 1] == 0
    assert torch.equal(batch.obs[:, 0], Gymnasium("CartPole-v1", 6).reset(3))


def test_episodes_that_never_end_are_cut():
    env = Corridor(4)
    seen = Episodes()
    stretch = collect.episodes(env, 0, _still, 7, CPU, seen)  # it never leaves cell 0
    assert stretch.batch.shape == (4, 7)
    assert stretch.batch.cut[:, -1].all() and not stretch.batch.cut[:, :-1].any()
    assert stretch.batch.discount.all() and stretch.batch.mask.all()
    last = collect.successors(stretch, torch.zeros(4, 7), lambda obs: obs[:, 0])
    assert last.tolist() == [[0.0] * 6 + [1.0]] * 4
    assert seen.returns == []


@sabotaged_by("foresight.envs.base.Episodes.note", lambda f: lambda self, info: f(self, {}))
def test_only_the_last_hundred_episodes_count() -> None:
    seen = Episodes()
    assert seen.metrics() == {}
    for n in range(102):
        seen.note({"episode_return": [float(n)], "episode_length": [2 * n]})
        seen.note({"something": [1]})
    assert seen.returns == [float(n) for n in range(2, 102)] and seen.lengths[0] == 4
    assert seen.metrics() == {"return": 51.5, "length": 103.0}

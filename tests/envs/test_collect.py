"""Unrolls of experience: whose successor is what, and whole episodes without a preference for short ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.data.trajectory import tree_map
from foresight.envs import collect
from foresight.envs.base import Episodes, Spaces
from foresight.envs.control import vector
from foresight.errors import UserError
from tests.algorithms.policy.small_envs import Clock, Corridor, Gymnasium
from tests.sabotage import change, sabotaged_by, shift

CPU = torch.device("cpu")


def _still(obs: torch.Tensor, carry: object) -> tuple[torch.Tensor, dict[str, torch.Tensor], object]:
    return torch.zeros(len(obs), dtype=torch.int64), {}, carry


def _random(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return lambda obs, carry: (torch.randint(0, 2, (len(obs),), generator=generator), {}, carry)


def test_a_segment_is_what_the_environment_returned():
    env, again = Gymnasium("CartPole-v1", 3), Gymnasium("CartPole-v1", 3)
    seen = Episodes()
    unroll = collect.segment(env, env.reset(0), _random(), 60, CPU, seen)
    obs, choose, ended = again.reset(0), _random(), []
    for t in range(60):
        action, _, _ = choose(obs, None)
        feedback = again.step(action)
        for name, value in (("obs", obs), ("action", action)):
            assert torch.equal(getattr(unroll.trajectory, name)[:, t], value)
        for name in ("reward", "discount", "cut", "mask"):
            assert torch.equal(getattr(unroll.trajectory, name)[:, t], getattr(feedback, name))
        ended += feedback.info.get("episode_return", [])
        obs = feedback.obs
    assert torch.equal(unroll.last, obs)
    assert seen.returns == ended and len(ended) > 3


@sabotaged_by("foresight.envs.collect.successors", shift("value"))
@pytest.mark.parametrize("lost", [False, True])
def test_successors_at_time_limits_are_final_observations(lost):
    """State s of the clock is followed by s + 1, whatever is cut: its "value" is its number here."""
    env = Clock((0.0, 0.0, 0.0), lost=lost)
    unroll = collect.segment(env, env.reset(0), _still, 20, CPU, Episodes())
    number = lambda obs: obs.argmax(-1).float()  # noqa: E731
    found = collect.successors(unroll, number(unroll.trajectory.obs), lambda obs, _: number(obs))
    real = unroll.trajectory.mask > 0
    assert torch.equal(found[real], ((number(unroll.trajectory.obs) + 1) % 3)[real])
    assert unroll.trajectory.cut[real].sum() >= 16
    assert torch.equal(number(collect.successor_obs(unroll))[real], found[real])


@sabotaged_by("foresight.envs.collect._Limits.add", lambda f: lambda self, *arguments: None)
def test_final_observations_are_kept_where_the_next_row_is_another_episode():
    env = Clock((0.0, 0.0, 0.0))
    unroll = collect.segment(env, env.reset(0), _still, 20, CPU, Episodes())
    assert len(unroll.final) == unroll.trajectory.extras["limit"].sum() == unroll.trajectory.cut.sum() > 0
    assert (unroll.final.argmax(-1) == 2).all()  # 8 steps from 0


def test_parts_of_an_observation_keep_together():
    env = Clock((0.0, 0.0, 0.0))
    plain = collect.segment(env, env.reset(0), _still, 20, CPU, Episodes())
    split = lambda tree: {"a": tree, "b": {"c": -tree}}  # noqa: E731
    rows = plain.trajectory.replace(obs=split(plain.trajectory.obs))
    parts = dataclasses.replace(plain, trajectory=rows, last=split(plain.last), final=split(plain.final))
    found = collect.successor_obs(parts)
    assert torch.equal(found["a"], collect.successor_obs(plain))
    assert torch.equal(found["b"]["c"], -found["a"])
    value = lambda obs: tree_map(lambda x: x.argmax(-1).float(), obs)["a"]  # noqa: E731
    assert torch.equal(collect.successors(parts, value(parts.trajectory.obs), lambda obs, _: value(obs)), value(found))


@sabotaged_by("foresight.envs.collect.episodes", change("seed", lambda seed: 7))
def test_episodes_are_whole_and_one_of_each_environment():
    env = Gymnasium("CartPole-v1", 6)
    seen = Episodes()
    unroll = collect.episodes(env, 3, _random(1), 1000, CPU, seen)
    batch, lengths = unroll.trajectory, unroll.trajectory.mask.sum(1)
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
    unroll = collect.episodes(env, 0, _still, 7, CPU, seen)  # it never leaves cell 0
    assert unroll.trajectory.shape == (4, 7)
    assert unroll.trajectory.cut[:, -1].all() and not unroll.trajectory.cut[:, :-1].any()
    assert unroll.trajectory.discount.all() and unroll.trajectory.mask.all()
    last = collect.successors(unroll, torch.zeros(4, 7), lambda obs, _: obs[:, 0])
    assert last.tolist() == [[0.0] * 6 + [1.0]] * 4
    assert seen.returns == [-7.0] * 4 and seen.lengths == [7] * 4  # what they earned until the cut


class Lengths:
    """Episodes of environment i have `lengths[i]` steps, and only the last is rewarded: a `vector.Engine`."""

    def __init__(self, lengths: tuple[int, ...], autoreset: str) -> None:
        self._lengths, self._lost = np.array(lengths), autoreset == vector.NEXT_STEP
        self._time, self._resetting = np.zeros(len(lengths), int), np.zeros(len(lengths), bool)

    def reset(self):
        return self._time[:, None].astype(np.float32), {}

    def step(self, action):
        self._time = np.where(self._resetting, 0, self._time + 1)
        ended = self._time >= self._lengths
        final = self._time[:, None].astype(np.float32)
        if self._lost:
            self._resetting = ended
        else:
            self._time = np.where(ended, 0, self._time)
        return self.reset()[0], ended.astype(float), ended, np.zeros_like(ended), {"final_obs": final}

    def close(self):
        pass


def _lengths(lengths: tuple[int, ...], autoreset: str) -> vector.Vector:
    def start(seed: int):
        engine = Lengths(lengths, autoreset)
        return engine, engine.reset()[0]

    spaces = Spaces(gs.Box(0, 99, (1,), np.float32), gs.Discrete(2))
    return vector.Vector("Lengths", start, spaces, len(lengths), autoreset)


@sabotaged_by("foresight.envs.collect._note_first", change("alive", torch.ones_like))
@pytest.mark.parametrize("autoreset", [vector.SAME_STEP, vector.NEXT_STEP])
def test_every_episode_of_a_batch_is_reported(autoreset: str) -> None:
    seen = Episodes()
    collect.episodes(_lengths((3, 50, 3, 50), autoreset), 0, _still, 20, CPU, seen)
    assert seen.returns == [1.0, 1.0, 0.0, 0.0] and seen.lengths == [3, 3, 20, 20]
    seen = Episodes()
    collect.episodes(_lengths((2, 3, 4, 5), autoreset), 0, _still, 5, CPU, seen)  # the last ends at the cut by itself
    assert seen.returns == [1.0] * 4 and seen.lengths == [2, 3, 4, 5]


def test_whole_episodes_that_never_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "LONGEST", 8)
    assert len(list(collect.whole_episodes(Clock(), 0, _still, Episodes()))) == 8  # as long as its episodes
    with pytest.raises(UserError, match=r"4 of 4 environments 'Corridor' .* within 8 steps.*options time_limit=1000"):
        list(collect.whole_episodes(Corridor(4), 0, _still, Episodes()))  # it never leaves cell 0


def test_recorded_episodes_that_never_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "LONGEST_RECORDED", 8)
    assert collect.record(Clock(), 0, _still, [1] * Clock().num_envs).length.max() == 8  # as long as its episodes
    with pytest.raises(UserError, match=r"2 of 4 environments 'Corridor' .* within 8 steps.*options time_limit=1000"):
        collect.record(Corridor(4), 0, _still, [1, 0, 3, 0])  # nothing is wanted of the others


@sabotaged_by("foresight.envs.control.vector.action_converter", lambda f: lambda space: lambda action: action)
def test_recorded_actions_are_those_that_the_environment_executed() -> None:
    env = Gymnasium("Pendulum-v1", 2)

    def wide(obs: torch.Tensor, carry: object) -> tuple[torch.Tensor, dict[str, torch.Tensor], object]:
        return torch.tensor([[5.0], [-0.5]]), {}, carry

    found = collect.record(env, 0, wide, [1, 1])
    assert found.action[found.rows].flatten().unique().tolist() == [-0.5, 2.0]


@sabotaged_by("foresight.envs.base.Episodes.note", lambda f: lambda self, info: f(self, {}))
def test_only_the_last_hundred_episodes_count() -> None:
    seen = Episodes()
    assert seen.metrics() == {}
    for n in range(102):
        seen.note({"episode_return": [float(n)], "episode_length": [2 * n]})
        seen.note({"something": [1]})
    assert seen.returns == [float(n) for n in range(2, 102)] and seen.lengths[0] == 4
    assert seen.metrics() == {"return": 51.5, "length": 103.0}

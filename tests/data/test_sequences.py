"""Sequences with final observations: what is stored of streams that end, and what led to each row."""

from __future__ import annotations

import pytest
import torch

from foresight.data.replay import Replay
from foresight.data.sequences import Sequences, arrivals
from foresight.errors import UserError
from tests.sabotage import sabotaged_by


def _add(replay: Sequences, t: int, ends: dict[int, float], streams: int = 2) -> None:
    """Step t of every stream: observation and reward t, action -t; `ends` maps a stream to the discount of its end."""
    value = torch.full((streams,), float(t))
    cut = torch.tensor([float(i in ends) for i in range(streams)])
    discount = torch.tensor([ends.get(i, 1.0) for i in range(streams)])
    rows = {"obs": value, "action": -value, "reward": value, "discount": discount, "cut": cut, "mask": cut * 0 + 1}
    replay.add({**rows, "extras": {"latent": value}}, value + 0.5)  # final observations end in a half


def _rows(replay: Sequences, stream: int, name: str) -> list[float]:
    held = replay.streams[stream]
    return getattr(held.storage, name)[0, : len(held)].tolist()


def test_an_episode_of_two_actions_has_three_rows() -> None:
    replay = Sequences(40, 2)
    for t, ends in enumerate(({}, {0: 0.0}, {}, {1: 1.0})):
        _add(replay, t, ends)
    assert _rows(replay, 0, "obs") == [0, 1, 1.5, 2, 3] and _rows(replay, 1, "obs") == [0, 1, 2, 3, 3.5]
    assert _rows(replay, 0, "cut") == [0, 0, 1, 0, 0] and _rows(replay, 1, "cut") == [0, 0, 0, 0, 1]
    assert _rows(replay, 0, "mask") == [1, 1, 0, 1, 1] and _rows(replay, 0, "discount") == [1, 0, 0, 1, 1]
    assert _rows(replay, 1, "discount") == [1, 1, 1, 1, 0]  # a time limit: the last action is continued, the row is not
    replay.interrupt()
    assert _rows(replay, 0, "cut") == [0, 0, 1, 0, 1] and _rows(replay, 0, "mask") == [1, 1, 0, 1, 0]


@sabotaged_by("foresight.data.replay.Replay.put", lambda f: lambda self, fields, row: f(self, fields, 0))
def test_every_stream_has_its_own_steps() -> None:
    for dtype in (torch.float32, torch.bfloat16):  # numpy has no bfloat16
        replay = Sequences(30, 3)
        for t in range(3):
            value = torch.tensor([0.0, 10, 20]) + t
            obs = {"place": value.unsqueeze(1), "view": torch.full((3, 2, 2), t, dtype=torch.uint8)}
            rows = {"obs": obs, "action": value, "reward": value, "discount": value * 0 + 1, "cut": value * 0}
            rows |= {"mask": value * 0 + 1, "extras": {"latent": value.to(dtype)}}
            replay.add(rows, obs)
        for i in range(3):
            held, steps = replay.streams[i].storage, [10.0 * i + t for t in range(3)]
            assert held.reward[0, :3].tolist() == held.obs["place"][0, :3, 0].tolist() == steps
            assert held.extras["latent"][0, :3].tolist() == steps and held.extras["latent"].dtype == dtype
            assert held.obs["view"].dtype == torch.uint8 and held.obs["view"][0, :3, 1, 1].tolist() == [0, 1, 2]
        with pytest.raises(UserError, match="'action' was"):
            replay.add({**rows, "action": torch.zeros(3, 2)}, obs)


@sabotaged_by("foresight.data.replay.Replay.columns", lambda f: lambda self: f(self).roll(1))
def test_episodes_begin_after_final_observations() -> None:
    replay = Sequences(18, 2)  # 9 rows for each
    with pytest.raises(UserError, match="The replay of 0 rows holds no whole episode"):
        replay.episodes()
    for t, ends in enumerate(({}, {0: 0.0}, {}, {1: 1.0}, {0: 0.0}, {})):
        _add(replay, t, ends)
    first, longest = replay.episodes()
    assert first.tolist() == [0, 2, 0] and longest == 4  # 0 1 | 2 3 4 | 5 and 0 1 2 3 | 4 5
    _add(replay, 6, {0: 0.0})  # the first stream has lost the row 0, and its episode
    first, longest = replay.episodes()
    assert first.tolist() == [2, 5, 0] and longest == 4


def test_a_step_that_only_resets_is_left_out() -> None:
    replay = Sequences(10, 1)
    _add(replay, 0, {0: 1.0}, streams=1)
    row = {name: torch.tensor([0.5 if name == "obs" else 0.0]) for name in ("obs", "action", "reward", "discount")}
    reset = {**row, "cut": torch.ones(1), "mask": torch.zeros(1), "extras": {"latent": torch.zeros(1)}}
    replay.add(reset, row["obs"])
    _add(replay, 2, {}, streams=1)
    assert _rows(replay, 0, "obs") == [0, 0.5, 2]


def _always_known(original):
    return lambda batch: original(batch)._replace(known=torch.ones_like(batch.reward))


@sabotaged_by("foresight.data.sequences.arrivals", _always_known)
def test_what_led_to_a_row_is_the_step_before() -> None:
    replay = Sequences(20, 1)
    for t in range(6):
        _add(replay, t, {0: 0.0} if t == 2 else {}, streams=1)
    batch = replay.sample(200, 4, torch.Generator().manual_seed(0))
    found = arrivals(batch)
    assert (found.known[:, 0] == 0).all()
    for row in range(200):
        for t in range(1, 4):
            obs, before = float(batch.obs[row, t]), float(batch.obs[row, t - 1])
            if before == 2.5:  # the final observation: what follows is another episode
                assert found.known[row, t] == found.reward[row, t] == found.discount[row, t] == 0
            else:
                assert found.known[row, t] == 1 and found.reward[row, t] == before
                assert found.discount[row, t] == float(obs != 2.5)


def test_streams_are_drawn_from_by_how_much_they_hold_and_never_mixed() -> None:
    replay = Sequences(1_000, 2)
    for t in range(30):
        _add(replay, t, {0: 1.0} if t % 2 else {})  # the first stream has half as many rows more
    batch = replay.sample(3_000, 5, torch.Generator().manual_seed(0))
    stream = batch.extras["key"] // 500
    assert (stream == stream[:, :1]).all()
    choices = [len(one) - 4 for one in replay.streams]
    assert choices == [41, 26]
    assert (stream[:, 0] == 0).float().mean() == pytest.approx(41 / 67, abs=0.03)
    replay.refresh(batch.extras["key"].flatten(), {"latent": torch.full((15_000,), -1.0)})
    assert (replay.sample(50, 5, torch.Generator()).extras["latent"] == -1).all()


def test_it_is_restored_exactly_and_refuses_another_size() -> None:
    replay = Sequences(40, 2)
    for t in range(12):
        _add(replay, t, {1: 0.0} if t == 4 else {})
    again = Sequences(40, 2)
    again.load_state_dict(replay.state_dict())
    one, other = (x.sample(20, 3, torch.Generator().manual_seed(1)) for x in (replay, again))
    assert torch.equal(one.obs, other.obs) and torch.equal(one.extras["key"], other.extras["key"])
    with pytest.raises(UserError, match="num_envs 2, this one of 1"):
        Sequences(40, 1).load_state_dict(replay.state_dict())
    with pytest.raises(UserError, match="sequences of 30 rows: 25 are stored"):
        replay.sample(1, 30, torch.Generator())


def test_rows_are_kept_on_the_device_that_is_asked_for() -> None:
    replay = Sequences(20, 1, device="meta")  # a device whose tensors have no values
    assert replay.streams[0].device == "meta"
    with pytest.raises(UserError, match=r"on disk, so it cannot be on the device, too: add --no-replay-on-disk"):
        Sequences(20, 1, on_disk=True, device="cpu")


@sabotaged_by("foresight.data.replay.Replay._room", lambda f: lambda self, like: f(Replay(self.capacity), like))
def test_memory_is_allocated_on_the_device() -> None:
    replay = Replay(4, "meta")
    assert replay._room(torch.zeros(1, 1, 3)).device.type == "meta"

"""`Replay` against a list that keeps everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foresight.data.replay import Replay
from foresight.data.trajectory import Trajectory
from foresight.errors import UserError
from tests.sabotage import change, sabotaged_by


def piece(streams: int, start: int, steps: int, every: int = 5) -> Trajectory:
    """Rows whose content identifies them: stream b, time t has reward 1000 b + t."""
    t = torch.arange(start, start + steps).expand(streams, steps)
    which = 1000 * torch.arange(streams).unsqueeze(1) + t
    cut = (t % every == every - 1).float()
    frame = (which % 251).to(torch.uint8)[..., None, None].expand(streams, steps, 2, 3)
    return Trajectory(
        obs={"frame": frame, "vector": which.float().unsqueeze(-1)},
        action=which,
        reward=which.float(),
        discount=1 - cut * (t % 2),
        cut=cut,
        extras={"prior": which.float() / 7},
    )


@sabotaged_by(
    "foresight.data.replay._write",
    change("segments", lambda pieces: [(to, start, count // 2) for to, start, count in pieces], "lose_rows"),
    change("segments", lambda pieces: pieces[:1], "forget_the_wrap"),
)
@given(
    capacity=st.integers(3, 12),
    pieces=st.lists(st.integers(1, 16), min_size=1, max_size=6),
    length=st.integers(1, 3),
    streams=st.integers(1, 3),
)
def test_samples_are_segments_of_the_newest_rows(capacity: int, pieces: list[int], length: int, streams: int) -> None:
    pieces = [*pieces, 3]
    replay, at = Replay(capacity), 0
    for steps in pieces:
        replay.add(piece(streams, at, steps))
        at += steps
    held = min(at, capacity)
    assert len(replay) == held * streams
    batch = replay.sample(64, length, torch.Generator().manual_seed(at))
    t = (batch.reward % 1000).long()
    stream = batch.reward.long() // 1000
    assert batch.shape == (64, length)
    assert (t[:, 1:] == t[:, :-1] + 1).all(), "rows of a piece follow each other"
    assert (stream == stream[:, :1]).all(), "a sequence stays in its environment"
    assert t.min() >= at - held and t.max() < at, "only rows that are still held"
    truth = piece(streams, 0, at)
    for ours, theirs in (
        (batch.cut, truth.cut),
        (batch.discount, truth.discount),
        (batch.action, truth.action),
        (batch.obs["frame"], truth.obs["frame"]),
        (batch.obs["vector"], truth.obs["vector"]),
        (batch.extras["prior"], truth.extras["prior"]),
    ):
        assert torch.equal(ours, theirs[stream, t])
    assert batch.obs["frame"].dtype == torch.uint8


def test_every_segment_is_equally_likely() -> None:
    replay = Replay(8)
    replay.add(piece(2, 0, 11))  # times 3..10 are held, written around the end
    batch = replay.sample(30_000, 3, torch.Generator().manual_seed(0))
    counts = torch.bincount(batch.reward[:, 0].long(), minlength=2000)
    starts = counts.nonzero().flatten().tolist()
    assert starts == [3, 4, 5, 6, 7, 8, 1003, 1004, 1005, 1006, 1007, 1008]
    assert (counts[starts] - 2500).abs().max() < 5 * 2500**0.5


def _nested_lost(original):
    return lambda tree, name: ((key, 0 * x if "." in key else x) for key, x in original(tree, name))


@sabotaged_by("foresight.data.trees.leaves", _nested_lost)
def test_one_step_at_a_time_is_the_same_as_segments() -> None:
    whole, single = Replay(7), Replay(7)
    rows = piece(2, 0, 17)
    whole.add(rows)
    for t in range(17):
        single.add(
            dict(
                obs={key: x[:, t] for key, x in rows.obs.items()},
                action=rows.action[:, t],
                reward=rows.reward[:, t],
                discount=rows.discount[:, t],
                cut=rows.cut[:, t],
                extras={"prior": rows.extras["prior"][:, t]},
            )
        )
    a, b = (r.sample(200, 2, torch.Generator().manual_seed(0)) for r in (whole, single))
    assert sorted(set(a.reward.flatten().tolist())) == sorted(set(b.reward.flatten().tolist()))
    assert len(whole) == len(single) == 14
    t, stream = (b.reward % 1000).long(), b.reward.long() // 1000
    for ours, theirs in (
        (b.obs["frame"], rows.obs["frame"]),
        (b.obs["vector"], rows.obs["vector"]),
        (b.extras["prior"], rows.extras["prior"]),
        (b.action, rows.action),
        (b.discount, rows.discount),
        (b.cut, rows.cut),
    ):
        assert torch.equal(ours, theirs[stream, t])


@pytest.mark.parametrize("rows", [0, 4, 9])
def test_a_restored_replay_continues_as_the_saved_one(rows: int) -> None:
    saved, restored = Replay(6), Replay(6)
    if rows:
        saved.add(piece(2, 0, rows))
    restored.load_state_dict(saved.state_dict())
    assert len(saved) == len(restored) == 2 * min(rows, 6)
    for replay in (saved, restored):
        replay.add(piece(2, rows, 5))
    a, b = (r.sample(50, 2, torch.Generator().manual_seed(1)) for r in (saved, restored))
    assert torch.equal(a.reward, b.reward) and torch.equal(a.extras["key"], b.extras["key"])
    assert torch.equal(a.obs["frame"], b.obs["frame"])
    restored.storage.reward.zero_()  # type: ignore[union-attr]
    assert saved.sample(9).reward.sum() > 0, "nothing is shared"


def test_a_saved_state_holds_only_what_was_added_and_copies_nothing() -> None:
    replay = Replay(1000)
    replay.add(piece(2, 0, 3))
    held = replay.state_dict()["rows"]
    assert held["reward"].shape == (2, 3)
    assert held["reward"].data_ptr() == replay.storage.reward.data_ptr()  # type: ignore[union-attr]
    assert "logprob" not in held


def test_keys_name_rows() -> None:
    replay = Replay(5)
    replay.add(piece(2, 0, 8))
    batch = replay.sample(40, 2)
    rewards = replay.storage.reward.flatten()  # type: ignore[union-attr]
    assert torch.equal(rewards[batch.extras["key"]], batch.reward)


def refuse(action: Any) -> str:
    with pytest.raises(UserError) as caught:
        action()
    return str(caught.value)


def test_mistakes_are_explained() -> None:
    replay = Replay(10)
    assert "0 per environment are stored" in refuse(lambda: replay.sample(4))
    replay.add(piece(2, 0, 3))
    assert "sequences of 4 steps: 3 per" in refuse(lambda: replay.sample(1, 4))
    assert "'obs.frame' was" in refuse(lambda: replay.add(piece(3, 0, 1)))
    bare = piece(2, 0, 1)
    assert "parts ['frame', 'vector']" in refuse(lambda: replay.add(bare.replace(obs=bare.reward)))
    assert "'logprob' was not there" in refuse(lambda: replay.add(bare.replace(logprob=bare.reward)))
    assert "unknown fields ['rewards']" in refuse(lambda: replay.add({"rewards": torch.zeros(2)}))
    assert "same replay_size" in refuse(lambda: Replay(3).load_state_dict(replay.state_dict()))
    assert "at least 1 step" in refuse(lambda: Replay(0))

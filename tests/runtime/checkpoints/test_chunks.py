"""A replay on disk: the samples of one in memory, checkpoints that write what is new, and files that fail."""

from __future__ import annotations

import copy
import dataclasses
import errno
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import foresight
from foresight.algorithms.world import dreamer
from foresight.data import trees
from foresight.data.sequences import Sequences
from foresight.errors import UserError
from foresight.runtime import imagined, run
from foresight.runtime.checkpoints import checkpoint, chunks, run_state, shards
from tests.algorithms.small_runs import last
from tests.algorithms.states import weights
from tests.algorithms.world.world_runs import DREAMER, near
from tests.sabotage import sabotaged_by

STREAMS, CAPACITY, PIXELS = 2, 24, 48


@dataclasses.dataclass
class Holder:
    """A State with a replay."""

    replay: Sequences


def _replay(folder: Path | None, streams: int = STREAMS) -> Sequences:
    replay = Sequences(CAPACITY, streams, on_disk=folder is not None)
    if folder is not None:
        run_state.use_disk(Holder(replay), folder)
    return replay


def _add(replay: Sequences, first: int, last: int) -> None:
    """Steps of images, numbers and latents; stream 0 ends an episode every fifth step."""
    streams = len(replay.streams)
    for t in range(first, last):
        value = torch.full((streams,), float(t)) + 0.25 * torch.arange(streams)
        cut = torch.tensor([float(i == 0 and t % 5 == 4) for i in range(streams)])
        image = torch.arange(streams * PIXELS).view(streams, PIXELS).add(t).remainder(251).to(torch.uint8)
        obs = {"image": image, "speed": value.unsqueeze(1)}
        rows = {"obs": obs, "action": -value, "reward": value, "discount": 1 - cut, "cut": cut, "mask": cut * 0 + 1}
        replay.add({**rows, "extras": {"latent": value.unsqueeze(1)}}, obs)


def _refresh(replay: Sequences, seed: int) -> None:
    """Sample, and overwrite the latents of what was sampled."""
    batch = replay.sample(3, 4, torch.Generator().manual_seed(seed))
    value = batch.extras["latent"].flatten(0, 1) + 0.5
    replay.refresh(batch.extras["key"].flatten(), {"latent": value})


def _rows(replay: Sequences) -> dict[str, torch.Tensor]:
    """All that is stored, from the oldest to the newest row, and what the ring knows of it."""
    found = {}
    for i, stream in enumerate(replay.streams):
        if stream.storage is not None:
            for field in dataclasses.fields(stream.storage):
                for name, x in trees.leaves(getattr(stream.storage, field.name), f"{i}.{field.name}"):
                    found[name] = x[0, stream.columns()].clone()
        found[f"{i}"] = torch.tensor([stream.added, len(stream)])
    return found


def _same(a: Sequences, b: Sequences) -> bool:
    one, other = _rows(a), _rows(b)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _restored(path: Path, folder: Path) -> Sequences:
    holder = Holder(_replay(folder))
    checkpoint.restore(path, holder)
    return holder.replay


def _files(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in (folder / "replay").iterdir()}


def _blank(original: Any) -> Any:
    """Files whose rows are not those of the ring."""
    return lambda stream, columns: {name: x + 1 for name, x in original(stream, columns).items()}


def test_samples_from_disk_are_those_from_memory(tmp_path: Path) -> None:
    disk, memory = _replay(tmp_path), _replay(None)
    for round_ in range(8):
        for replay in (disk, memory):
            _add(replay, 5 * round_, 5 * round_ + 5)
            _refresh(replay, round_)
        one, other = (replay.sample(20, 3, torch.Generator().manual_seed(round_)) for replay in (disk, memory))
        assert torch.equal(one.obs["image"], other.obs["image"]) and one.obs["image"].dtype == torch.uint8
        for a, b in ((one.obs["speed"], other.obs["speed"]), *((one.extras[k], other.extras[k]) for k in one.extras)):
            assert torch.equal(a, b)
    assert _same(disk, memory)
    assert disk.episodes()[1] == memory.episodes()[1] == 5  # of the first stream; the second has no end
    assert not list(tmp_path.iterdir())  # the files of the memory have no names: a killed process leaves none


@sabotaged_by("foresight.data.sequences._rows", _blank)
@sabotaged_by("foresight.data.sequences.Sequences._log", lambda f: lambda self, i: f(self, i)[1:])
def test_every_checkpoint_is_restored_exactly(tmp_path: Path) -> None:
    """Also where the ring wrapped, where rows were lost, where latents were refreshed and where a run was resumed."""
    replay, kept = _replay(tmp_path), {}
    for step in range(1, 12):
        _add(replay, 4 * step, 4 * step + 4)
        _refresh(replay, step)
        if step in (4, 9):  # environments are reset: the newest rows change, which no file has yet
            replay = _restored(checkpoint.latest(tmp_path), tmp_path)
            replay.interrupt()
            _add(replay, 4 * step, 4 * step + 2)
        kept[step] = copy.deepcopy(replay)
        checkpoint.save(tmp_path, Holder(replay), step, keep=3, best=1.0 if step == 2 else None)
        if step in (3, 7, 11):
            for one, path in checkpoint.all_steps(tmp_path).items():
                assert _same(_restored(path, tmp_path), kept[one])
    assert list(checkpoint.all_steps(tmp_path)) == [2, 9, 10, 11]


def test_a_checkpoint_writes_only_what_is_new_and_deletes_what_none_needs(tmp_path: Path) -> None:
    replay = _replay(tmp_path)
    _add(replay, 0, 8)
    checkpoint.save(tmp_path, Holder(replay), 1, keep=1)
    before = _files(tmp_path)
    _add(replay, 8, 10)
    checkpoint.save(tmp_path, Holder(replay), 2, keep=1)
    after = _files(tmp_path)
    assert len(before) == 2 and len(after) == 4 and before.items() <= after.items()
    held = load_file(tmp_path / "step-000000002" / "replay.safetensors")
    images = [x.shape[1] for name, x in held.items() if "image" in name]
    latents = [x.shape[1] for name, x in held.items() if "latent" in name and "rows" not in name]
    assert images == [1, 1] and sorted(latents) == [10, 12]  # the newest rows whole, and the latents of all
    checkpoint.save(tmp_path, Holder(replay), 3, keep=1)
    assert _files(tmp_path) == after
    _add(replay, 10, 40)
    checkpoint.set_aside(tmp_path, 2)
    checkpoint.save(tmp_path, Holder(replay), 2, keep=1)
    assert set(after) < set(_files(tmp_path))  # the one set aside needs the old rows
    aside = _replay(tmp_path)
    _add(aside, 0, 10)
    assert _same(_restored(tmp_path / "aside-step-000000003", tmp_path), aside)


def test_a_kill_at_any_instant_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends at its n-th file operation, for every n: the newest checkpoint is one of the two, whole."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # slow, and only a machine that stops needs it
    ended, count = False, 0
    while not ended:
        count += 1
        folder = tmp_path / str(count)
        folder.mkdir()
        replay = _replay(folder)
        _add(replay, 0, 20)
        checkpoint.save(folder, Holder(replay), 1, keep=1)
        old = copy.deepcopy(replay)
        _add(replay, 20, 34)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            _killed_at(count)
            checkpoint.save(folder, Holder(replay), 2, keep=1)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        newest = checkpoint.latest(folder)
        found = _restored(newest, folder)
        assert _same(found, old if newest.name.endswith("1") else replay)
        checkpoint.save(folder, Holder(replay), 3, keep=1)  # it continues, and clears up
        assert _same(_restored(folder / "step-000000003", folder), replay)
        assert len(list(folder.iterdir())) == 2 and not list(folder.glob("*/.draft*"))
        assert len(_files(folder)) == len({chunk.file["sha256"] for chunk in replay.chunks})
    assert count > 20


def _killed_at(number: int) -> None:
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            seen += 1
            if seen == number:
                os._exit(9)

    sys.addaudithook(hook)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("lost", "is missing .*the replay of another run"),
        ("cut", "has 100 bytes instead of"),
        ("changed", "were changed"),
        ("other run", "is missing"),
    ],
)
def test_damage_is_named_and_the_checkpoint_before_it_offered(tmp_path: Path, harm: str, message: str) -> None:
    replay = _replay(tmp_path)
    _add(replay, 0, 6)
    first = checkpoint.save(tmp_path, Holder(replay), 1)
    old = set(_files(tmp_path))
    _add(replay, 6, 10)
    second = checkpoint.save(tmp_path, Holder(replay), 2)
    file = tmp_path / "replay" / min(set(_files(tmp_path)) - old)
    content = file.read_bytes()
    if harm == "lost":
        file.unlink()
    elif harm == "cut":
        file.write_bytes(content[:100])
    elif harm == "changed":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        file.rename(file.with_stem("0" * 64))
    with pytest.raises(UserError, match=message) as error:
        checkpoint.restore(second, Holder(_replay(tmp_path)))
    assert f"resume {first}" in str(error.value)
    checkpoint.restore(first, Holder(_replay(tmp_path)))
    if harm in ("lost", "cut"):  # a run that continues writes again what it still has
        checkpoint.save(tmp_path, Holder(replay), 3)
        assert _same(_restored(tmp_path / "step-000000003", tmp_path), replay)


def test_another_size_is_refused_and_both_kinds_of_replay_can_be_exchanged(tmp_path: Path) -> None:
    disk, memory = _replay(tmp_path), _replay(None)
    for replay in (disk, memory):
        _add(replay, 0, 40)
    one, two = (checkpoint.save(tmp_path, Holder(replay), i) for i, replay in enumerate((disk, memory)))
    assert _same(_restored(two, tmp_path), disk)
    holder = Holder(_replay(None))
    checkpoint.restore(one, holder)
    assert _same(holder.replay, disk)
    with pytest.raises(UserError, match="num_envs 2, this one of 1"):
        checkpoint.restore(one, Holder(_replay(tmp_path, 1)))
    with pytest.raises(UserError, match="capacity of 12 steps per environment, this one 30"):
        checkpoint.restore(one, Holder(Sequences(60, 2, on_disk=True)))


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"needs 1048576.0 GiB on disk in .*free.*--replay-size"):
        chunks.mapped(tmp_path)(1, 2**50, dtype=torch.uint8)
    with pytest.raises(UserError, match="No such file or directory"):
        chunks.mapped(tmp_path / "missing")(1, 4, dtype=torch.uint8)
    replay = _replay(tmp_path)
    _add(replay, 0, 6)
    checkpoint.save(tmp_path, Holder(replay), 1)
    old = copy.deepcopy(replay)
    _add(replay, 6, 10)
    write, wrote = shards.write, []

    def full(path: Path, tensors: Any) -> Any:
        if "replay" in path.parts and len(wrote) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        wrote.append(path)
        return write(path, tensors)

    monkeypatch.setattr(shards, "write", full)
    with pytest.raises(UserError, match=r"No space left on device.*step-000000001 is intact"):
        checkpoint.save(tmp_path, Holder(replay), 2)
    monkeypatch.setattr(shards, "write", write)
    assert _same(_restored(tmp_path / "step-000000001", tmp_path), old)
    checkpoint.save(tmp_path, Holder(replay), 2)
    assert _same(_restored(tmp_path / "step-000000002", tmp_path), replay)


def _stale(original: Any) -> Any:
    """Latents as they were when their rows were added."""
    return lambda self, key, extras: None if self.on_disk else original(self, key, extras)


@sabotaged_by("foresight.data.sequences.Sequences.refresh", _stale)
def test_a_run_with_a_replay_on_disk_is_the_run_without_and_resumes_exactly(tmp_path: Path) -> None:
    memory = dataclasses.replace(DREAMER, replay_size=256, steps=320, train_ratio=2.0)
    whole = last(dreamer, memory, near(), dreamer.build(memory, near().spaces))
    config = dataclasses.replace(memory, replay_on_disk=True)
    state = dreamer.build(config, near().spaces)
    run_state.use_disk(state, tmp_path)
    state = last(dreamer, config, near(), state)
    assert torch.equal(weights(state), weights(whole)) and _same(state.replay, whole.replay)
    path = checkpoint.save(tmp_path, state, state.step)
    resumed = dreamer.build(config, near().spaces)
    run_state.use_disk(resumed, tmp_path)
    checkpoint.restore(path, resumed)
    longer, ends = dataclasses.replace(config, steps=384), []
    for start in (whole, resumed):
        start.config = longer
        ends.append(last(dreamer, longer, near(), start))
    assert torch.equal(weights(ends[0]), weights(ends[1])) and _same(ends[0].replay, ends[1].replay)


def test_an_agent_reads_a_replay_on_disk_only_where_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(DREAMER, replay_size=256, steps=192, replay_on_disk=True)
    whole = run.train(
        "dreamer", env="Pendulum-v1", out=tmp_path / "a", show=False, evaluation_episodes=1, config=config
    )

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(chunks.os, "posix_fallocate", full)
        agent = foresight.load(whole.path)
        agent.act(agent.env.reset(0)[0])
        with pytest.raises(UserError, match="The replay needs"):
            agent.read_replay()
    assert len(agent.state.replay) == 0
    agent.read_replay()
    assert len(agent.state.replay) >= 192
    assert imagined.make(whole.path, 2).reset(0).shape == (2, 3)

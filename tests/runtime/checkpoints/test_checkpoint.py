"""Checkpoints: every kind of value comes back as it was, whole or not at all."""

from __future__ import annotations

import collections
import copy
import dataclasses
import errno
import json
import math
import os
import random
import resource
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from foresight.data.trajectory import Trajectory
from foresight.errors import UserError
from foresight.runtime.checkpoints import checkpoint
from tests import forks


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Box:
    """A State with one field."""

    value: Any = None


def round_trip(folder: Path, value: Any, template: Any = None) -> Any:
    box = Box(template)
    checkpoint.restore(checkpoint.save(folder, Box(value), 1), box)
    return box.value


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        return bits and a.detach().numpy().tobytes() == b.detach().numpy().tobytes()
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float | np.generic):
        return bool(repr(a) == repr(b))
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b)


tensors = st.builds(
    lambda shape, dtype, seed: (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 99).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]),
    st.integers(0, 9),
)
arrays = st.builds(
    lambda shape, dtype: np.arange(int(np.prod(shape))).reshape(shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["float32", "float64", "int64", "uint8", "bool"]),
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=9), tensors, arrays,
    st.sampled_from([np.float32(0.1), np.int64(3), torch.float16, torch.device("cpu")]),
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda parts: collections.deque(parts, maxlen=5)),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner),
    ),
    max_leaves=8,
)


@given(trees)
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    assert same(round_trip(tmp_path_factory.mktemp("tree"), value), value)


def test_floats_are_exact(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, float("inf"), float("-inf"), float("nan")]
    assert [v.hex() for v in round_trip(tmp_path, values)] == [v.hex() for v in values]


def test_a_trajectory_and_bfloat16_come_back(tmp_path: Path) -> None:
    rows = torch.ones(2, 3)
    batch = Trajectory(obs={"a": rows.bfloat16()}, action=rows, reward=rows, discount=rows, cut=rows)
    back = round_trip(tmp_path, batch)
    assert isinstance(back, Trajectory) and torch.equal(back.obs["a"], batch.obs["a"]) and back.mask is None
    assert back.obs["a"].dtype == torch.bfloat16


def test_random_generators_continue(tmp_path: Path) -> None:
    numpy, python, tensor = np.random.default_rng(3), random.Random(3), torch.Generator().manual_seed(3)
    old = np.random.Generator(np.random.MT19937(3))
    for _ in range(7):
        numpy.normal(), python.gauss(0, 1), torch.randn(3, generator=tensor), old.normal()
    value = {"numpy": numpy, "python": python, "tensor": tensor, "old": old}

    def draws(parts: dict[str, Any]) -> list[Any]:
        draw = torch.randn(5, generator=parts["tensor"]).tolist()
        return [parts["numpy"].normal(), parts["python"].gauss(0, 1), *draw, parts["old"].normal()]

    path = checkpoint.save(tmp_path, Box(value), 1)
    filled = Box({"numpy": np.random.default_rng(), "python": random.Random(), "tensor": torch.Generator()})
    same_objects = list(filled.value.values())
    made = Box()  # build may have made none
    checkpoint.restore(path, filled)
    checkpoint.restore(path, made)
    expected = draws(value)
    assert draws(filled.value) == expected and draws(made.value) == expected
    assert list(filled.value.values())[:3] == same_objects  # in place: others may hold them


@dataclasses.dataclass
class Learner:
    network: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    log_alpha: torch.Tensor
    alpha_optimizer: torch.optim.Optimizer
    generator: torch.Generator
    target: torch.Tensor | None = None
    step: int = 0


def learner(optimizer: str, seed: int) -> Learner:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    made = getattr(torch.optim, optimizer)(network.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, 10)
    alpha = torch.zeros((), requires_grad=True)
    generator = torch.Generator().manual_seed(seed)
    return Learner(network, made, schedule, alpha, torch.optim.Adam([alpha], lr=0.1), generator)


def learn(one: Learner) -> None:
    x = torch.randn(16, 3, generator=one.generator)
    loss = (one.network(x).squeeze(1) - x.sum(1)).square().mean() * one.log_alpha.exp()
    one.optimizer.zero_grad()
    one.alpha_optimizer.zero_grad()
    loss.backward()
    one.optimizer.step()
    one.alpha_optimizer.step()
    one.schedule.step()
    one.target, one.step = x[0], one.step + 1


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "RAdam"])
def test_optimizers_continue_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    one, two = learner(optimizer, 0), learner(optimizer, 1)
    for _ in range(5):
        learn(one)
    checkpoint.restore(checkpoint.save(tmp_path, one, 5), two)
    assert two.alpha_optimizer.param_groups[0]["params"][0] is two.log_alpha  # parameters keep who they are
    for _ in range(5):
        learn(one)
        learn(two)
    assert all(same(a, b) for a, b in zip(one.network.parameters(), two.network.parameters(), strict=True))
    assert same(dict(one.network.state_dict()), dict(two.network.state_dict()))
    assert same(one.log_alpha, two.log_alpha) and one.schedule.get_last_lr() == two.schedule.get_last_lr()
    assert same(one.optimizer.state_dict(), two.optimizer.state_dict())


def test_moments_keep_a_dtype_that_is_not_their_parameters(tmp_path: Path) -> None:
    def make() -> Any:
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        made = torch.optim.SGD([weight], lr=0.1)
        made.state[weight]["exact"] = torch.full((4,), 1 / 3)
        return Box(made)

    back = make()
    checkpoint.restore(checkpoint.save(tmp_path, make(), 1), back)
    (state,) = back.value.state.values()
    assert same(state["exact"], torch.full((4,), 1 / 3))


def test_moments_keep_the_strides_of_their_parameters(tmp_path: Path) -> None:
    """A fused optimizer pairs weights and moments in the order of memory, and files are row by row."""

    def make() -> Any:
        torch.manual_seed(0)
        module: nn.Module = nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return Box({"module": module, "optimizer": torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)})

    def update(box: Any, seed: int) -> None:
        images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        box.value["optimizer"].zero_grad()
        box.value["module"](images).square().sum().backward()
        box.value["optimizer"].step()

    whole, back = make(), make()
    update(whole, 1)
    checkpoint.restore(checkpoint.save(tmp_path, whole, 1), back)
    update(whole, 2), update(back, 2)
    assert same(whole.value["optimizer"].state_dict(), back.value["optimizer"].state_dict())
    assert same(dict(whole.value["module"].state_dict()), dict(back.value["module"].state_dict()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 40), nn.Linear(40, 50, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    module, shared = Tied(), torch.randn(7)
    state = Box({"module": module, "view": module.embed.weight.detach(), "a": shared, "b": shared})
    path = checkpoint.save(tmp_path, state, 1)
    stored = load_file(path / "value.safetensors")
    assert sorted(tuple(t.shape) for t in stored.values()) == [(7,), (50, 40)]
    other = Box({"module": Tied()})
    checkpoint.restore(path, other)
    loaded = other.value["module"]
    assert loaded.head.weight is loaded.embed.weight and torch.equal(loaded.embed.weight, module.embed.weight)
    assert other.value["a"] is other.value["b"] and torch.equal(other.value["view"], module.embed.weight)


def test_freed_memory_is_not_taken_for_a_shared_tensor(tmp_path: Path) -> None:
    class Makes:
        """Gives new tensors at every call, which the allocator puts where the former ones were."""

        def __init__(self, value: float) -> None:
            self.value = torch.full((1000,), float(value))

        def state_dict(self) -> dict[str, Any]:
            return {"x": self.value.clone()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["x"]

    @dataclasses.dataclass
    class Many:
        a: Makes
        b: Makes
        c: Makes

    back = Many(Makes(0), Makes(0), Makes(0))
    checkpoint.restore(checkpoint.save(tmp_path, Many(Makes(1), Makes(2), Makes(3)), 1), back)
    assert [float(m.value.mean()) for m in (back.a, back.b, back.c)] == [1, 2, 3]


def test_what_is_rebuilt_is_left_unchanged(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Partial:
        config: Any
        tool: Any = dataclasses.field(metadata={"save": False})
        step: int = 0

    other = Partial("theirs", print, 0)
    checkpoint.restore(checkpoint.save(tmp_path, Partial("mine", open, 3), 1), other)
    assert other == Partial("theirs", print, 3)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"State\.value\.deep\.1 is a set"):
        checkpoint.save(tmp_path, Box({"deep": [1, {2}]}), 1)
    with pytest.raises(TypeError, match="sparse"):
        checkpoint.save(tmp_path, Box(torch.eye(2).to_sparse()), 1)
    assert list(tmp_path.iterdir()) == []  # and nothing half-written stays


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, Box(nn.Linear(2, 3)), 1)
    for other, text in [
        (Box(nn.Linear(2, 4)), r"value.weight has shape \[3, 2\], not \[4, 2\]"),
        (Box(nn.Linear(2, 3, bias=False)), "other weights: .*bias"),
        (Box(3), "was a module, but build"),
        (learner("SGD", 0), "other fields"),
    ]:
        with pytest.raises(UserError, match=text):
            checkpoint.restore(path, other)


def test_nothing_outside_data_classes_can_be_named_by_a_file(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, Box(Pair(1, 2)), 1)
    for address in ("os:system", "subprocess:Popen", "tests.runtime.nowhere:X", "builtins:eval"):
        tree = json.loads((path / "state.json").read_text())
        tree["state"]["value"]["namedtuple"][0] = address
        forge(path, "state.json", json.dumps(tree))
        with pytest.raises(UserError, match="needs the class"):
            checkpoint.restore(path, Box())


def forge(path: Path, name: str, text: str) -> None:
    """Change a file and make the manifest agree."""
    from foresight.runtime.checkpoints import shards

    (path / name).write_text(text)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = shards.digest(path / name)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 8):
        checkpoint.save(tmp_path, Box(step), step * 10, keep=2, best=1.0 if step == 3 else None)
    assert list(checkpoint.all_steps(tmp_path)) == [30, 60, 70]
    assert checkpoint.best(tmp_path) == tmp_path / "step-000000030"
    checkpoint.mark_best(tmp_path, 60, 2.0)
    checkpoint.save(tmp_path, Box(8), 80, keep=2)
    assert list(checkpoint.all_steps(tmp_path)) == [60, 70, 80]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000000080"


def test_a_step_is_a_decimal_number(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no checkpoint '²'"):
        checkpoint.find(tmp_path, "²")
    with pytest.raises(UserError, match="has no checkpoint '999"):
        checkpoint.find(tmp_path, "9" * 5000)


def test_a_best_that_is_set_aside_is_marked_no_more(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, Box(step), step, best=1.0 if step == 2 else None)
    checkpoint.set_aside(tmp_path, 2)
    assert checkpoint.best(tmp_path) == tmp_path / "step-000000002" and checkpoint.best_score(tmp_path, 0.0) == 1.0
    checkpoint.set_aside(tmp_path, 1)
    assert checkpoint.best_score(tmp_path, 0.0) == -math.inf
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "aside-step-000000002", "aside-step-000000003", "step-000000001",
    ]  # fmt: skip


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, Box(1), 5)
    path = checkpoint.save(tmp_path, Box(2), 5)
    box = Box()
    checkpoint.restore(path, box)
    assert box.value == 2 and [p.name for p in tmp_path.iterdir()] == ["step-000000005"]


def test_extras_come_back(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, Box(1), 5, extra={"seconds": 1.5, "rng": torch.get_rng_state()})
    extra = checkpoint.restore(path, Box())
    assert extra["seconds"] == 1.5 and extra["step"] == 5 and torch.equal(extra["rng"], torch.get_rng_state())


@pytest.mark.parametrize("name", ["value.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "remove"])
def test_damage_is_refused_and_the_previous_one_offered(tmp_path: Path, name: str, harm: str) -> None:
    good = checkpoint.save(tmp_path, Box(torch.ones(100)), 1)
    path = checkpoint.save(tmp_path, Box(torch.ones(100)), 2)
    data = bytearray((path / name).read_bytes())
    if harm == "remove":
        (path / name).unlink()
    else:
        if harm == "flip":
            data[len(data) // 2] ^= 1
        (path / name).write_bytes(data[: len(data) // 2] if harm == "cut" else data)
    box = Box("untouched")
    with pytest.raises(UserError) as error:
        checkpoint.restore(path, box)
    text = str(error.value)
    assert "is damaged" in text and f"foresight resume {good}" in text
    assert name in text or (name, harm) == ("manifest.json", "flip")  # then a file disagrees with the manifest
    assert box.value == "untouched"
    (good / "state.json").write_text("{}")
    with pytest.raises(UserError, match="no good one before it"):
        checkpoint.restore(path, box)


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that trains rotates its checkpoints under who plays it."""
    path = checkpoint.save(tmp_path, Box(torch.ones(2)), 1)
    found = checkpoint.verify(path)
    monkeypatch.setattr(checkpoint, "verify", lambda path: found)
    for name in ("value.safetensors", "state.json"):
        (path / name).unlink()
        for read in (checkpoint.extra, lambda path: checkpoint.restore(path, Box()))[name != "state.json" :]:
            with pytest.raises(UserError, match=f"Checkpoint {path} was deleted while it was read"):
                read(path)


def test_a_manifest_cannot_lead_out_of_its_directory(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "c", Box(1), 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"sha256": "", "size": 0}
    (path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "secret").write_text("")
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.restore(path, Box())


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write a checkpoint to .*(Not a directory|File exists)"):
        checkpoint.save(tmp_path / "file", Box(1), 1)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """A limit on the size of files is the full disk that a test can have: the write fails in its middle."""
    good = checkpoint.save(tmp_path, Box(torch.ones(1000)), 1)
    before = {p: p.read_bytes() for p in good.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"Cannot write a checkpoint.*The checkpoint .*step-000000001 is intact"):
            checkpoint.save(tmp_path, Box(torch.ones(100_000)), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]
    assert {p: p.read_bytes() for p in good.iterdir()} == before
    checkpoint.restore(good, Box())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])  # the disk is full; the quota of a user is used up
def test_on_a_full_disk_old_checkpoints_make_room(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for three: the fourth takes the place of the oldest, and what is best stays."""
    write = checkpoint._write

    def disk(folder: Path, *rest: Any) -> None:
        write(folder, *rest)
        if len(list(tmp_path.glob("step-*"))) >= 3:
            raise OSError(number, os.strerror(number), str(folder))

    monkeypatch.setattr(checkpoint, "_write", disk)
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, Box(step), step, keep=5, best=1.0 if step == 1 else None)
    checkpoint.save(tmp_path, Box(4), 4, keep=5)
    assert list(checkpoint.all_steps(tmp_path)) == [1, 3, 4]
    box = Box()
    checkpoint.restore(tmp_path / "step-000000004", box)
    assert box.value == 4 and not list(tmp_path.glob(".draft*"))


def test_on_a_full_disk_the_rows_of_old_checkpoints_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is too full for a folder until the rows are deleted that only the oldest checkpoint needs."""
    for step in (1, 2):
        checkpoint.save(tmp_path, Box(step), step)
    manifest = tmp_path / "step-000000001" / "manifest.json"
    old = tmp_path / "replay" / f"{0:064x}.safetensors"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "replay": {old.stem: 4}}))
    old.parent.mkdir()
    old.write_bytes(b"rows")
    write = checkpoint._write

    def disk(folder: Path, *rest: Any) -> None:
        if old.exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        write(folder, *rest)

    monkeypatch.setattr(checkpoint, "_write", disk)
    path = checkpoint.save(tmp_path, Box(3), 3)
    box = Box()
    checkpoint.restore(path, box)
    assert box.value == 3 and list(checkpoint.all_steps(tmp_path)) == [2, 3]


def test_several_processes_gather_once_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others gather each tensor once: old checkpoints make room before."""
    for step in (1, 2):
        checkpoint.save(tmp_path, Box(step), step)
    free, writes = 0, list[tuple[int, list[int]]]()
    original = checkpoint._write

    def write(folder: Path, state: Any, step: int, extra: Any) -> None:
        writes.append((step, list(checkpoint.all_steps(tmp_path))))
        if step == 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        original(folder, state, step, extra)

    monkeypatch.setattr(checkpoint, "_write", write)
    monkeypatch.setattr(checkpoint, "distributed", SimpleNamespace(processes=lambda: 2, rank=lambda: 0))
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    checkpoint.save(tmp_path, Box(3), 3)
    with pytest.raises(UserError, match=r"Cannot write a checkpoint .*step-000000003 is intact"):
        checkpoint.save(tmp_path, Box(4), 4)
    assert writes == [(3, [2]), (4, [3])]


def test_what_a_kill_left_behind_is_ignored_and_cleared(tmp_path: Path) -> None:
    good = checkpoint.save(tmp_path, Box(1), 1)
    half = tmp_path / ".draft-step-000000002-77"
    half.mkdir()
    (half / "state.json").write_text("{")
    assert checkpoint.latest(tmp_path) == good
    checkpoint.save(tmp_path, Box(3), 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000001", "step-000000003"]


MEASURE = """
import dataclasses, sys, torch
from torch import nn
from foresight.runtime.checkpoints import checkpoint

def now(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) / 1024

def peak():
    return now("VmHWM")

def clear():
    open("/proc/self/clear_refs", "w").write("5")

@dataclasses.dataclass
class State:
    network: nn.Module
    optimizer: object

def make(fill):
    with torch.no_grad():
        network = nn.Linear(4096, 4096, bias=False)  # 64 MiB
        network.weight.fill_(fill)
    return State(network, torch.optim.Adam(network.parameters()))

one = make(1.0)
one.network.weight.grad = torch.ones_like(one.network.weight)
one.optimizer.step()
one.optimizer.zero_grad()
clear(); base = now("VmRSS")
path = checkpoint.save(sys.argv[1], one, 1)
saving = peak() - base
del one
two = make(2.0)
clear(); base = now("VmRSS")
checkpoint.restore(path, two)
print(saving, peak() - base)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peak memory is read from /proc")
def test_saving_and_restoring_do_not_double_the_memory(tmp_path: Path) -> None:
    """The State is 192 MiB (weights, two moments); restoring holds the 128 MiB of new moments and little else."""
    done = forks.start(["-c", MEASURE, str(tmp_path)], stdout=subprocess.PIPE)
    saving, restoring = (float(word) for word in done.stdout.read().split())
    assert saving < 32, f"saving took {saving:.0f} MiB more"
    assert restoring < 128 + 32, f"restoring took {restoring:.0f} MiB more"


def test_the_template_does_not_leak_into_what_is_restored(tmp_path: Path) -> None:
    """Two fields that build made the same tensor are two tensors if they were two when they were saved."""
    shared = torch.zeros(3)
    saved = Box([torch.ones(3), torch.full((3,), 2.0)])
    back = Box([shared, shared])
    checkpoint.restore(checkpoint.save(tmp_path, saved, 1), back)
    assert [part.tolist() for part in back.value] == [[1, 1, 1], [2, 2, 2]] and shared.tolist() == [0, 0, 0]
    assert copy.deepcopy(back) is not back

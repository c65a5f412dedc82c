from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foresight.agents.live import learn, loops, train
from foresight.agents.live.settings import Config
from foresight.agents.live.store import Store
from foresight.errors import LostError, UserError
from foresight.nets.language import pretrained
from foresight.training.options import Tuning
from tests import tiny_language
from tests.agents.live.test_learn import TEMPLATE, sampled
from tests.agents.live.test_store import fill, make_room
from tests.sabotage import sabotaged_by


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A tiny model with a chat template."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_language.folder(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def begun(tmp_path: Path, model: str, **settings: Any) -> tuple[Store, Config]:
    store = Store(tmp_path / "live")
    tuning = Tuning(lora=settings.pop("lora", 0), precision="float32")
    config = Config(model=model, batch=3, learning_rate=1e-3, tuning=tuning, **settings)
    train.begin(store, model)
    return store, config


def feed(store: Store, trainer: train.Trainer, score: float = 1.0, session: str = "s") -> None:
    """One window of scored turns of the trainer's policy."""
    for turn in sampled(3):
        text = f"{turn.reply} {len(store.turns())}"
        one = store.add(dataclasses.replace(turn, session=session, reply=text, version=trainer.version))
        messages = [*turn.messages, {"role": "assistant", "content": text}, {"role": "user", "content": "next"}]
        store.request(session, messages)
        store.collect(60)
        store.scored(one, score)


def weights(trainer: train.Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer._weights().items()}


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_versions_are_published_served_and_continued(tmp_path: Path, model: str) -> None:
    store, config = begun(tmp_path, model, lora=2)
    trainer = train.Trainer(store, config)
    assert trainer.step() is None  # too few turns
    feed(store, trainer)
    metrics = trainer.step()
    assert metrics is not None and metrics["staleness"] == 0 and store.active() == 1 and store.counts()["trained"] == 3
    assert trainer.step() is None
    again = train.Trainer(Store(tmp_path / "live"), config)
    assert again.version == 1 and equal(weights(again), weights(trainer))
    turn = store.turns("trained")[0]
    served = pretrained.load(store.folder_of(1), precision="float32")  # adapters merged: what `serve` samples with
    with torch.no_grad():
        ours, theirs = (m.logprob(learn._batch(turn), 1.0)[0] for m in (trainer.policy, served))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_run_that_was_moved_continues_from_its_weights_and_never_without_them(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store, config = begun(Path(), model)
    trainer = train.Trainer(store, config)
    feed(store, trainer)
    trainer.step()
    store.close()
    shutil.move("live", "elsewhere")
    monkeypatch.chdir("elsewhere")
    moved = Store(tmp_path / "elsewhere")
    again = train.Trainer(moved, config)
    assert again.version == 1 and equal(weights(again), weights(trainer)) and moved.folder_of(0) == model
    (moved.folder / train.VERSIONS / "1" / train.TRAINED).unlink()
    with pytest.raises(UserError, match=r"weights of version 1 are missing: there is no .*trained\.safetensors"):
        train.Trainer(moved, config)
    assert moved.active() == 1


def test_adapters_over_narrow_weights_are_trained(tmp_path: Path, model: str) -> None:
    store, config = begun(tmp_path, model, lora=2)
    narrow = dataclasses.replace(config, tuning=dataclasses.replace(config.tuning, precision="bfloat16"))
    trainer = train.Trainer(store, narrow)
    feed(store, trainer)
    metrics = trainer.step()
    assert metrics is not None and metrics["kl"] > 0 and store.active() == 1


def test_a_trainer_killed_before_it_publishes_trains_the_same_turns_once(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, config = begun(tmp_path, model)
    trainer = train.Trainer(store, config)
    first = weights(trainer)
    feed(store, trainer)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            trainer.step()
    orphan = store.folder / train.VERSIONS / "1"
    assert orphan.is_dir() and store.active() == 0 and store.counts()["scored"] == 3
    again = train.Trainer(store, config)
    assert not orphan.exists() and equal(weights(again), first)
    again.step()
    assert equal(weights(again), weights(trainer)) and store.counts() == {**store.counts(), "trained": 3, "scored": 0}


@sabotaged_by("foresight.agents.live.train.Trainer._load", lambda real: _once(real))
@pytest.mark.parametrize("place", ["database", "folder"])
def test_a_full_disk_loses_no_turn_and_the_weights_are_those_before(
    tmp_path: Path, model: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, config = begun(tmp_path, model)
    trainer = train.Trainer(store, config)
    before = weights(trainer)
    feed(store, trainer)
    versions = len(store.versions())
    with monkeypatch.context() as patched:
        if place == "database":
            fill(store)
            versions = len(store.versions())
        else:
            patched.setattr(train, "save_file", lambda weights, file: _full(file))
        with pytest.raises(LostError, match=r"version 1 cannot be written: .*(full|No space left)"):
            trainer.step()
    make_room(store)
    assert not list((store.folder / train.VERSIONS).iterdir()) and len(store.versions()) == versions
    assert equal(weights(trainer), before) and store.counts()["scored"] == 3 and store.active() == 0
    assert trainer.step() is not None and store.active() == 1 and store.counts()["trained"] == 3


def _full(file: Path) -> None:
    file.write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _once(real: Any) -> Any:
    """Loads nothing where there is a policy."""
    return lambda self: None if hasattr(self, "policy") else real(self)


@sabotaged_by("foresight.agents.live.train.Trainer._load", lambda real: _once(real))
def test_a_rollback_is_trained_from(tmp_path: Path, model: str) -> None:
    store, config = begun(tmp_path, model)
    trainer = train.Trainer(store, config)
    for _ in range(2):
        feed(store, trainer)
        trainer.step()
    store.activate(1)
    known = weights(train.Trainer(store, config))
    assert trainer.version == 2 and trainer.step() is None and trainer.version == 1 and equal(weights(trainer), known)
    feed(store, trainer)
    trainer.step()
    assert store.active() == 3 and store.versions()[-1]["parent"] == 1


def test_a_rollback_during_an_update_is_kept(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, config = begun(tmp_path, model)
    trainer = train.Trainer(store, config)
    first, update = weights(trainer), learn.update
    feed(store, trainer)
    trainer.step()
    feed(store, trainer)
    monkeypatch.setattr(learn, "update", lambda *given: (store.activate(0), update(*given))[1])
    assert trainer.step() is not None and store.active() == trainer.version == 0 and equal(weights(trainer), first)
    assert store.versions()[-1]["parent"] == 1 and store.counts()["trained"] == 6


@sabotaged_by("foresight.agents.live.train.Trainer._gate", lambda real: lambda self: None)
def test_a_held_out_check_that_falls_rolls_back_and_pauses(tmp_path: Path, model: str) -> None:
    store, config = begun(tmp_path, model)
    values = iter([0.8, 0.75, 0.3])
    trainer = train.Trainer(store, config, check=lambda policy: next(values), check_every=1)
    feed(store, trainer)
    trainer.step()
    assert store.active() == 1 and not store.get("paused")
    feed(store, trainer)
    trainer.step()
    assert store.active() == 1 and store.get("paused") and "from 0.800 to 0.300" in store.events()[-1][1]
    feed(store, trainer)
    assert trainer.step() is None


def checked(tmp_path: Path, model: str, value: Any) -> tuple[Store, Config, train.Trainer]:
    """A run whose check is 0.8 at first, and then what `value()` returns."""
    store, config = begun(tmp_path, model)
    calls = iter([lambda: 0.8])
    trainer = train.Trainer(store, config, check=lambda policy: next(calls, value)(), check_every=1)
    feed(store, trainer)
    return store, config, trainer


def test_a_trainer_killed_while_it_checks_is_followed_by_one_that_checks(tmp_path: Path, model: str) -> None:
    store, config, trainer = checked(tmp_path, model, _killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    assert store.active() == 1
    again = train.Trainer(Store(tmp_path / "live"), config, check=lambda policy: 0.3, check_every=1)
    assert again.step() is None and store.active() == 0 and store.get("paused")
    store.set("paused", False)
    store.activate(1)  # the owner's decision is not measured again
    assert again.step() is None and store.active() == 1 and not store.get("paused")


@sabotaged_by("foresight.agents.live.store.Store.withdraw", lambda real: _one_by_one)
def test_a_trainer_killed_while_it_rolls_back_leaves_no_half(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, config, trainer = checked(tmp_path, model, lambda: 0.3)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "_event", _killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.step()
    assert store.active() == 1 and not store.get("paused")
    train.Trainer(store, config, check=lambda policy: 0.3, check_every=1).step()
    assert store.active() == 0 and store.get("paused") and "from 0.800 to 0.300" in store.events()[-1][1]


def test_a_rollback_during_a_check_is_kept(tmp_path: Path, model: str) -> None:
    store, _, trainer = checked(tmp_path, model, lambda: 0.8)
    trainer.step()
    feed(store, trainer)
    trainer.check = lambda policy: (store.activate(0), 0.3)[1]
    trainer.step()
    assert store.active() == 0 and not store.get("paused") and store.get("check")["passed"] == 1


def _killed(*_: Any) -> Any:
    raise KeyboardInterrupt


def _one_by_one(self: Store, number: int, back: int, check: dict[str, Any], why: str) -> None:
    self.set("check", check)
    self.set("paused", True)
    self.event("gate", why)
    self.activate(back)


def test_an_update_reads_no_turn_but_those_of_its_window(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, config = begun(tmp_path, model)
    trainer, real = train.Trainer(store, config), Store.turns
    feed(store, trainer)

    def turns(self: Store, state: str | None = None, most: int = -1) -> Any:
        assert state is not None and most > 0, "all turns that were ever kept are read"
        return real(self, state, most)

    monkeypatch.setattr(Store, "turns", turns)
    assert trainer.step() is not None and store.active() == 1


def test_an_update_on_a_turn_that_is_forgotten_meanwhile_is_undone(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, config = begun(tmp_path, model)
    trainer, real = train.Trainer(store, config), learn.update
    feed(store, trainer, session="a")
    before = weights(trainer)
    monkeypatch.setattr(learn, "update", lambda *given: (real(*given), store.forget("a"))[0])
    with pytest.raises(LostError, match="Turn 1 was forgotten while it was trained on, so this update is left out"):
        trainer.step()
    assert store.active() == 0 and equal(weights(trainer), before)


def test_forgotten_sessions_are_no_session_of_one_score(tmp_path: Path, model: str) -> None:
    store, config = begun(tmp_path, model)
    trainer = train.Trainer(store, config)
    for session in ("a", "b"):
        feed(store, trainer, session=session)
        trainer.step()
        store.forget(session)
    feed(store, trainer, session="c")
    assert trainer.step() is not None and store.counts()["trained"] == 9 and store.events() == []


@sabotaged_by("foresight.agents.live.store.Store.one_sided", lambda real: lambda self, least=6: [])
def test_a_user_of_one_score_is_named_and_one_beyond_the_bound_is_refused(tmp_path: Path, model: str) -> None:
    store, config = begun(tmp_path, model)
    trainer = train.Trainer(store, config)
    for _ in range(2):
        feed(store, trainer, session="flatterer")
        trainer.step()
    assert ("one-sided", "session flatterer always gives the same score") in store.events()
    store, config = begun(tmp_path / "other", model, kl_bound=0.0)
    trainer = train.Trainer(store, config)
    feed(store, trainer, session="poisoner")
    before = weights(trainer)
    trainer.step()
    assert equal(weights(trainer), before) and store.active() == 0 and store.counts()["rejected"] == 3
    assert "poisoner (3)" in store.events()[-1][1]


def test_training_waits_where_cores_are_scarce() -> None:
    code = "import os; from foresight.agents.live import loops; b = os.nice(0); loops.behind(); print(os.nice(0) - b)"
    group = Path("/proc/self/autogroup")
    before = group.read_text() if group.exists() else ""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == min(loops.BEHIND, 19 - os.nice(0))
    assert not before or group.read_text() == before  # only a loop, which has a session of its own, puts it behind

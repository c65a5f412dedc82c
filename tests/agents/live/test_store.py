from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foresight.agents.live import score
from foresight.agents.live.store import Store, Turn
from foresight.errors import LostError, UserError
from tests.sabotage import change, drop, sabotaged_by


def turn(session: str = "s", reply: str = "hi", version: int = 0) -> Turn:
    return Turn(session, version, [{"role": "user", "content": "hello"}], reply, [1, 2], [3, 4], [-0.5, -0.25])


def conversation(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


FILL = (  # of a row of some size in each table
    "INSERT INTO turns (session, version, created, messages, reply, prompt, tokens, logprob, temperature, state) "
    "VALUES ('', 0, 0, ?, '', x'', x'', x'', 1, 'stale')",
    "INSERT INTO versions (number, folder, created, metrics) SELECT min(number) - 1, '', 0, ? FROM versions",
    "INSERT INTO settings (name, value) SELECT count(*), ? FROM settings",
    "INSERT INTO events (created, kind, text) VALUES (0, '', ?)",
)


def fill(store: Store) -> None:
    """Leave no room in the database: SQLite itself refuses what is added."""
    store._base.execute("PRAGMA synchronous=OFF")
    pages = store._base.execute("PRAGMA page_count").fetchone()[0]
    store._base.execute(f"PRAGMA max_page_count={pages}")
    for statement in FILL:
        for size in (500, 50, 0):
            with pytest.raises(sqlite3.OperationalError, match="full"):
                while True:
                    store._base.execute(statement, (f'"{"x" * size}"',))


def make_room(store: Store) -> None:
    """The disk has room again."""
    store._base.execute("PRAGMA max_page_count=1000000")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path)
    made.publish(0, "model", {}, [])
    return made


def test_a_turn_goes_its_way(store: Store) -> None:
    one = store.add(turn())
    store.request("s", conversation("hello", "hi", "thanks"))
    assert store.collect(60) == 1 and store.turns("answered")[0].next == {"role": "user", "content": "thanks"}
    store.scored(one, 5.0, "shorter")
    found = store.turns("scored")[0]
    assert (found.score, found.hint, found.tokens, found.logprob) == (1.0, "shorter", [3, 4], [-0.5, -0.25])
    assert [t.id for t in store.window(4, 1)] == [one]
    store.publish(1, "folder", {"loss": 1.0}, [one])
    assert store.counts()["trained"] == 1 and store.active() == 1 and store.turns("trained")[0].trained == 1
    with pytest.raises(UserError, match="not waiting"):
        store.publish(2, "folder", {}, [one])  # nothing is trained on twice
    assert store.active() == 1 and len(store.versions()) == 2


def _unchecked(real: Any) -> Any:
    """Publishes for turns that do not wait, too."""

    def publish(self: Store, number: int, folder: str, metrics: dict[str, Any], turns: list[int]) -> None:
        waiting = {one.id for one in self.turns("scored")}
        real(self, number, folder, metrics, [one for one in turns if one in waiting])

    return publish


@sabotaged_by("foresight.agents.live.store.Store.publish", _unchecked)
def test_no_version_is_published_for_a_turn_that_was_trained_on(store: Store) -> None:
    one = store.add(turn())
    store.request("s", conversation("hello", "hi", "thanks"))
    store.collect(60)
    store.scored(one, 1.0)
    for number in (1, 2):
        with contextlib.suppress(UserError):
            store.publish(number, "folder", {}, [one])
    assert store.active() == 1 and [version["number"] for version in store.versions()] == [0, 1]


@sabotaged_by("foresight.agents.live.store.Store.request", lambda real: _any_reply(real))
def test_two_clients_in_one_session_do_not_answer_for_each_other(store: Store) -> None:
    first, second = store.add(turn(reply="one")), store.add(turn(reply="two"))
    store.request("s", conversation("hello", "one", "to one"))
    store.request("other", conversation("hello", "two", "of another session"))
    store.collect(60)
    found = {t.id: t for t in store.turns()}
    assert found[first].next == {"role": "user", "content": "to one"} and found[second].state == "served"


@sabotaged_by(
    "foresight.agents.live.store.Store.add", change("turn", lambda one: dataclasses.replace(one, reply="hi!"))
)
def test_white_space_around_a_reply_is_no_difference(store: Store) -> None:
    store.add(turn(reply=" hi\n"))
    store.request("s", conversation("hello", "hi ", "thanks"))
    assert store.collect(60) == 1 and store.turns("answered")[0].reply == "hi"


@sabotaged_by("foresight.agents.live.store.Store.collect", lambda real: lambda self, patience: 0)
def test_a_request_answers_no_turn_that_was_served_after_it(store: Store) -> None:
    for text in ("one", "two"):  # the model repeats itself
        store.add(turn())
        store.request("s", conversation("hello", "hi", text))
    last = store.add(turn())
    store.collect(60)
    found = {t.id: t.next and t.next["content"] for t in store.turns()}
    assert found == {1: "one", 2: "two", last: None}


def _any_reply(real: Any) -> Any:
    return lambda self, session, messages, done=False: real(
        self, "s", [*messages[:1], {"role": "assistant", "content": "two"}, *messages[2:]], done
    )


@sabotaged_by("foresight.agents.live.store.Store.collect", change("patience", abs))
def test_turns_without_a_next_state_end(store: Store) -> None:
    store.add(turn())
    store.request("s", conversation("bye"), done=True)
    store.collect(60)
    store.add(turn("t"))
    assert store.counts()["ended"] == 1 and store.collect(60) == 0
    assert store.collect(-1) == 1 and store.counts()["ended"] == 2


@sabotaged_by("foresight.agents.live.store.Store.window", change("staleness", lambda versions: versions + 9))
def test_staleness_is_bounded(store: Store) -> None:
    for number in range(1, 6):
        store.publish(number, "f", {}, [])
    for version in (0, 3, 5):
        one = store.add(turn(version=version, reply=str(version)))
        store.request("s", conversation("hello", str(version), "next"))
        store.collect(60)
        store.scored(one, 1.0)
    assert [t.version for t in store.window(9, 2)] == [3, 5] and store.counts()["stale"] == 1
    assert [t.version for t in store.window(1, 2)] == [3]  # first in, first out


def test_staleness_is_counted_along_parents(store: Store) -> None:
    for number in range(1, 9):
        store.publish(number, "f", {}, [])
    store.activate(3)
    store.publish(9, "f", {}, [])
    assert [store.apart(version, 9) for version in (9, 3, 2, 8, 77)] == [0, 1, 2, 6, math.inf]
    for version in (3, 8):
        one = store.add(turn(version=version, reply=str(version)))
        store.request("s", conversation("hello", str(version), "next"))
        store.collect(60)
        store.scored(one, 1.0)
    assert [t.version for t in store.window(9, 4)] == [3] and store.counts()["stale"] == 1


def test_a_version_that_a_rollback_overtook_is_kept_and_not_served(store: Store) -> None:
    for number in (1, 2):
        assert store.publish(number, "f", {}, [], number - 1)
    store.activate(1)
    assert not store.publish(3, "f", {}, [], 2)
    assert store.active() == 1 and store.versions()[-1]["parent"] == 2
    assert store.events()[-1][1].startswith("version 3 is kept and not served: version 1 became active")


def test_scores_that_teach_nothing_are_left_out(store: Store) -> None:
    for number, (value, hint) in enumerate([(0.0, ""), (math.nan, ""), (0.0, "a hint"), (math.nan, "a hint")]):
        one = store.add(turn(reply=str(number)))
        store.request("s", conversation("hello", str(number), "next"))
        store.collect(60)
        store.scored(one, value, hint)
    assert store.counts()["unscored"] == 2 and [t.score for t in store.turns("scored")] == [0.0, None]


def test_a_session_is_forgotten(store: Store) -> None:
    store.add(turn("private", "secret"))
    trained = store.add(turn("private", "older secret"))
    store.request("private", conversation("hello", "older secret", "x"))
    store.collect(60)
    store.scored(trained, 1.0)
    store.publish(1, "f", {}, [trained])
    store.add(turn("public"))
    assert store.forget("private") == 2
    assert "secret" not in repr(store.turns()) and len(store.turns()) == 2 and store.counts()["trained"] == 1


def test_no_other_turn_gets_the_id_of_a_forgotten_one(store: Store) -> None:
    """The scorer and the trainer hold ids while they work."""
    held = store.add(turn("private", "secret"))
    store.forget("private")
    later = store.add(turn("public"))
    assert later > held
    store.request("public", conversation("hello", turn("public").reply, "x"))
    store.collect(60)
    store.scored(held, -1.0, "a hint about the secret")
    assert [one.score for one in store.turns()] == [None]


def test_sessions_of_one_score_are_found(store: Store) -> None:
    def scored(session: str, *scores: float) -> None:
        for number, value in enumerate(scores):
            one = store.add(turn(session, f"{session} {number}"))
            store.request(session, conversation("hello", f"{session} {number}", "next"))
            store.collect(60)
            store.scored(one, value, "a hint")

    scored("flatterer", *[1.0] * 6)
    scored("critic", *[-1.0] * 7)
    scored("short", *[1.0] * 5)
    scored("both", *[1.0] * 5, -1.0)
    scored("nothing", *[0.0] * 6)
    scored("unread", *[math.nan] * 6)
    assert sorted(store.one_sided()) == ["critic", "flatterer"] and store.one_sided(7) == ["critic"]
    scored("flatterer", -1.0)
    assert store.one_sided() == ["critic"]
    ids = [one.id for one in store.turns("scored") if one.session == "critic"]
    store.publish(1, "1", {}, ids)
    assert store.one_sided() == ["critic"]
    store.forget("critic")
    assert store.one_sided() == [] and store.counts()["trained"] == 7


def test_versions_are_rolled_back_to(store: Store) -> None:
    store.publish(1, "f", {"kl": 0.1}, [])
    store.activate(0)
    assert store.active() == 0 and store.folder_of(1) == "f" and store.events()[-1] == ("activated", "version 0")
    with pytest.raises(UserError, match=r"no version 7. Versions: 0, 1"):
        store.activate(7)


def _work(folder: str) -> None:
    """Collect and score for ever, as two loops do."""
    store = Store(folder)
    while True:
        store.collect(1e9)
        score.step(store, lambda one: (1.0, one.reply))


def test_loops_that_are_killed_at_any_instant_lose_and_repeat_nothing(tmp_path: Path) -> None:
    store, draw = Store(tmp_path), random.Random(0)
    store.publish(0, "m", {}, [])
    forked, count = multiprocessing.get_context("fork"), 0
    for _ in range(20):
        worker = forked.Process(target=_work, args=(str(tmp_path),), daemon=True)
        worker.start()
        end = time.monotonic() + draw.uniform(0.0, 0.06)
        while time.monotonic() < end:
            store.add(turn(f"s{count}", f"reply {count}"))
            store.request(f"s{count}", conversation("hello", f"reply {count}", f"next {count}"))
            count += 1
        os.kill(worker.pid or 0, signal.SIGKILL)
        worker.join()
    while store.collect(1e9) or score.step(store, lambda one: (1.0, one.reply)):
        pass
    turns = store.turns("scored")
    assert len(turns) == len(store.turns()) == count > 20
    assert all(t.hint == t.reply and t.next["content"] == f"next {t.session[1:]}" for t in turns)  # type: ignore[index]


def test_a_scorer_that_is_down_leaves_turns_waiting(store: Store) -> None:
    one = store.add(turn())
    store.request("s", conversation("hello", "hi", "next"))
    store.collect(60)

    def down(one: Turn) -> tuple[float, str]:
        raise LostError("down")

    with pytest.raises(LostError):
        score.step(store, down)
    assert store.counts()["answered"] == 1
    assert score.step(store, lambda t: (-1.0, "")) == 1 and store.turns("scored")[0].id == one


@sabotaged_by("foresight.agents.live.store.Store.scored", drop("error"))
@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), UserError("returned 'bad'"), OSError("gone")])
def test_a_turn_that_cannot_be_scored_is_left_out_and_the_next_one_is_scored(store: Store, error: Exception) -> None:
    for reply in ("one", "two"):
        store.add(turn("s", reply))
        store.request("s", conversation("hello", reply, "next"))
    store.collect(60)

    def rule(one: Turn) -> tuple[float, str]:
        if one.reply == "one":
            raise error
        return 1.0, ""

    assert score.step(store, rule, "rules.py:rate") == 2 and score.step(store, rule) == 0
    assert [(t.reply, t.state) for t in store.turns()] == [("one", "unscored"), ("two", "scored")]
    what = f"rules.py:rate: {type(error).__name__}: {error}"
    assert store.events() == [("unscored", f"turn 1 of session s is left out: {what}")]


@sabotaged_by("foresight.agents.live.store.Store.transaction", lambda real: _twice(real))
def test_a_transaction_that_a_full_disk_ends_changes_nothing(store: Store) -> None:
    one = store.add(turn())
    store.request("s", conversation("hello", "hi", "next"))
    store.collect(60)
    store.scored(one, 1.0)
    fill(store)
    with pytest.raises(sqlite3.OperationalError) as found:
        store.publish(1, "f" * 100, {}, [one])
    assert "full" in str(found.value) and store.counts()["scored"] == 1 and store.active() == 0
    make_room(store)
    store.publish(1, "f" * 100, {}, [one])
    assert store.counts()["trained"] == 1 and store.active() == 1


def _twice(real: Any) -> Any:
    """Rolls back what SQLite has rolled back, which is another error."""

    @contextlib.contextmanager
    def begun(self: Store) -> Iterator[None]:
        with real(self):
            try:
                yield
            except BaseException:
                self._base.execute("ROLLBACK")
                raise

    return begun

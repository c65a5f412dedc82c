from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foresight.agents.live import loops, settings
from foresight.agents.live.store import Store, Turn
from foresight.errors import LostError, UserError
from foresight.sandbox import process
from tests.agents.live.test_store import fill, make_room
from tests.sabotage import sabotaged_by


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    made.publish(0, "model", {}, [])
    yield made
    made.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What each loop runs, start by start, instead of itself: nothing, after the last one."""
    scripts: dict[str, list[str]] = {loop: [] for loop in loops.LOOPS}
    real = process.start

    def start(command: list[str], environment: dict[str, str]) -> Any:
        loop = command[command.index("foresight.agents.live.loops") + 1]
        script = scripts[loop].pop(0) if scripts[loop] else "sleep 60"
        return real(["sh", "-c", script], environment)

    monkeypatch.setattr(process, "start", start)
    monkeypatch.setattr(loops, "AGAIN", 0.0)
    monkeypatch.setattr(loops, "PAUSE", 0.01)
    return scripts


def test_a_loop_that_fails_at_its_start_again_and_again_ends_the_run_with_its_error(
    store: Store, started: dict[str, list[str]]
) -> None:
    store.event("serve", "OSError: no such model")
    store.event("train", "of another loop")
    started["serve"] = ["exit 3"] * 3
    reports: list[str] = []
    with pytest.raises(UserError, match=r"serve failed 3 times in a row .* exit code 3. OSError: no such model$"):
        loops.supervise(store.folder, reports.append, threading.Event())
    assert reports == ["serve ended, with the exit code 3; it starts again"] * 2 and not started["serve"]


def test_a_loop_that_is_killed_or_fails_now_and_then_starts_again(store: Store, started: dict[str, list[str]]) -> None:
    started["serve"] = ["exit 1", "exit 1", "kill -9 $$"] * 2
    stop, reports = threading.Event(), list[str]()

    def report(text: str) -> None:
        reports.append(text)
        if len(reports) == 6:
            stop.set()

    loops.supervise(store.folder, report, stop)
    assert sum("killed by SIGKILL" in text for text in reports) == 2 and not started["serve"]


@pytest.mark.parametrize(("error", "text"), [(UserError("a sentence"), "a sentence"), (OSError("x"), "OSError: x")])
def test_an_event_has_the_error_that_ends_a_loop(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def run(*_: Any) -> None:
        raise error

    settings.write(store.folder, settings.Settings(), settings.Config())
    monkeypatch.setattr(loops, "_with_parent", lambda parent: None)
    monkeypatch.setattr(loops, "run", run)
    with pytest.raises(type(error)):
        loops.main("collect", store.folder)
    assert store.events() == [("collect", text)]


class Over(BaseException):
    """Ends a loop that never returns."""


def answered(store: Store) -> None:
    store.add(Turn("s", 0, [{"role": "user", "content": "hello"}], "hi", [1], [2], [0.0]))
    store.request("s", [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "thanks"}])
    store.collect(60)


@sabotaged_by("foresight.agents.live.store.log", lambda real: lambda *_: None)
def test_turns_wait_while_their_scorer_is_down_and_are_scored_when_it_answers(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, waits = itertools.count(1), list[float]()

    def give(turn: Turn) -> tuple[float, str]:
        if (number := next(calls)) < 4:
            raise LostError("down" if number < 3 else "busy")
        return 1.0, ""

    def scorer(_: settings.Settings, report: Callable[[str], object]) -> Callable[[Turn], tuple[float, str]]:
        if not waits:  # it is down when the process begins, too
            raise LostError("down")
        return give

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if seconds == loops.PAUSE:
            raise Over

    answered(store)
    monkeypatch.setattr(loops, "scorer", scorer)
    monkeypatch.setattr(loops, "time", types.SimpleNamespace(sleep=sleep))  # of this module alone: threads sleep too
    with pytest.raises(Over):
        loops._score(store, settings.Settings(score="http://scorer/v1"))
    assert store.events() == [("score", "turns wait: down"), ("score", "turns wait: busy")]
    assert waits == [loops.RETRY] * 4 + [loops.PAUSE] and store.counts()["scored"] == 1


def test_a_full_disk_is_printed_and_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            make_room(store)
        if seconds == loops.PAUSE:
            raise Over

    answered(store)
    fill(store)
    monkeypatch.setattr(loops, "time", types.SimpleNamespace(sleep=sleep))  # of this module alone: threads sleep too
    with pytest.raises(Over):
        loops._forever(lambda: store.event("x", "y" * 600), store, "train")
    assert waits == [loops.RETRY, loops.RETRY, loops.PAUSE]
    assert capsys.readouterr().err == "train: turns wait: database or disk is full\n"

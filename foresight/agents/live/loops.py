"""The four loops of a live run, each a process: serve, collect, score, train. A supervisor restarts one that ends.

python -m foresight.agents.live.loops LOOP FOLDER    is one of them
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foresight.agents.live.settings import Config, Settings, read
from foresight.agents.live.store import Store, log
from foresight.errors import LostError, UserError
from foresight.sandbox import process

if TYPE_CHECKING:  # imports torch
    from foresight.envs.text.task import TextTask

LOOPS = ("serve", "collect", "score", "train")
TOKEN = "FORESIGHT_LIVE_TOKEN"  # environment variable: it stands in no file
SCORER = "FORESIGHT_LIVE_SCORE"  # environment variable: `--score` with the user and password of its URL
PAUSE = 0.5  # seconds between looks at the store
AGAIN = 2.0  # seconds before a loop is restarted
STEADY, TRIES = 60.0, 3  # a loop that fails within so many seconds of its start, so many times in a row, ends the run
RETRY = 10.0  # seconds before what was lost is tried again
BEHIND = 10  # niceness of the trainer
REHEARSED = 64  # questions of the check whose first answers are rehearsed


def supervise(folder: Path, report: Callable[[str], object], stop: threading.Event) -> None:
    """Run the four loops until `stop` is set, and report versions and events as they come.

    Raises UserError, with the error of the loop, if one fails at its start again and again.
    """
    store, environment = Store(folder), dict(os.environ)
    children: dict[str, subprocess.Popen[bytes]] = {}
    again, began, failed = dict.fromkeys(LOOPS, 0.0), dict.fromkeys(LOOPS, 0.0), dict.fromkeys(LOOPS, 0)
    seen_versions, seen_events = len(store.versions()), len(store.events())
    try:
        while not stop.is_set():
            for loop in LOOPS:
                child = children.get(loop)
                if child is not None and (code := child.poll()) is not None:
                    process.kill(child)
                    children.pop(loop)
                    early = code > 0 and time.monotonic() - began[loop] < STEADY  # a signal is no failure of its own
                    failed[loop] = failed[loop] + 1 if early else 0
                    if failed[loop] == TRIES:
                        why = next((text for kind, text in reversed(store.events()) if kind == loop), "")
                        raise UserError(
                            f"{loop} failed {TRIES} times in a row at its start, {process.ending(code)}. {why}"
                        )
                    report(f"{loop} ended, {process.ending(code)}; it starts again")
                    again[loop] = time.monotonic() + AGAIN
                if loop not in children and time.monotonic() >= again[loop]:
                    command = [sys.executable, "-m", "foresight.agents.live.loops", loop, str(folder)]
                    children[loop], began[loop] = process.start(command, environment), time.monotonic()
            versions, events = store.versions(), store.events()
            for version in versions[seen_versions:]:
                numbers = "  ".join(f"{k} {v:.3g}" for k, v in version["metrics"].items() if k != "rejected")
                report(f"version {version['number']}  {numbers}")
            for kind, text in events[seen_events:]:
                report(f"{kind}: {text}")
            seen_versions, seen_events = len(versions), len(events)
            stop.wait(PAUSE)
    finally:
        for child in children.values():
            process.kill(child)
        store.close()


def main(loop: str, folder: Path) -> None:
    """Run one loop until it is killed. An event has the error that ends it."""
    threading.Thread(target=_with_parent, args=(os.getppid(),), daemon=True).start()
    settings, config = read(folder)
    settings = dataclasses.replace(settings, score=os.environ.get(SCORER, settings.score))
    store = Store(folder)
    try:
        if settings.ray and loop in ("score", "train"):
            from foresight.agents.live import on_ray

            on_ray.run(loop, store, settings, config)
        else:
            run(loop, store, settings, config)
    except (Exception, SystemExit) as error:  # on Ray it exits with a sentence
        sentence = isinstance(error, UserError | SystemExit)
        log(store, loop, f"{'' if sentence else f'{type(error).__name__}: '}{error}")
        raise


def run(loop: str, store: Store, settings: Settings, config: Config) -> None:
    """Run one loop on this machine until it is killed."""
    if loop == "serve":
        _serve(store, settings, config)
    elif loop == "collect":
        _forever(lambda: store.collect(settings.patience), store, "collect")
    elif loop == "score":
        _score(store, settings)
    else:
        from foresight.agents.live import train

        behind()
        check = checker(settings) if settings.check else None
        known = list(_task(settings).train[:REHEARSED]) if settings.check and config.rehearsal else []
        trainer = train.Trainer(store, config, settings.device, check, settings.check_every, settings.tolerance, known)
        _forever(trainer.step, store, "train")


def checker(settings: Settings) -> Callable[[Any], float]:
    """The accuracy of greedy answers to the held-out questions of a text task."""
    from foresight.planning.generation.rollout import complete, texts

    task = _task(settings)
    few = list(task.test[: settings.check_size])

    def check(policy: Any) -> float:
        grades = task.grade(few, texts(policy, complete(policy, few, 1, 32, 0.0, stop=task.stop)))
        return sum(grades) / len(grades)

    return check


def _task(settings: Settings) -> TextTask:
    from foresight.envs.make import make

    task: TextTask = make(settings.check, "text")
    if task.episode is not None:
        raise UserError(f"--check must be a text task without tools, not {settings.check}.")
    return task


def scorer(settings: Settings, report: Callable[[str], object] = lambda text: None) -> Any:
    """The function that scores a turn; `report` is called where a message tries to mislead it.

    Raises UserError for a place that is none.
    """
    from foresight.agents.live import score

    if settings.score.startswith(("http://", "https://")):
        from foresight.planning.generation.server import Server

        return score.server(Server(settings.score, None).chat, report=report)
    if Path(settings.score).is_dir():
        from foresight.nets.language import pretrained
        from foresight.planning.reasoning import verifiers
        from foresight.runtime.reasoning.think import exported

        model = pretrained.load_scorer(exported(settings.score), settings.device, trained=True)
        return score.reward_model(verifiers.reward_model(model))
    from foresight.envs.text.worker import function

    function(settings.score)  # raises a sentence if it cannot be imported
    return score.rules(settings.score)


def _serve(store: Store, settings: Settings, config: Config) -> None:
    import uvicorn

    from foresight.agents.live import serve
    from foresight.agents.live.engine import Engine
    from foresight.nets.language import pretrained

    def load(name: str) -> Any:
        return pretrained.load(name, settings.device, config.tuning.precision)

    version = store.active()
    engine = Engine(load(store.folder_of(version)), version)
    threading.Thread(target=serve.follow, args=(Store(store.folder), engine, load), daemon=True).start()
    app = serve.create(store, engine, os.environ.get(TOKEN), settings.temperature)
    uvicorn.run(app, host=settings.host, port=settings.port, log_level="warning", access_log=False, lifespan="off")


def _score(store: Store, settings: Settings) -> None:
    from foresight.agents.live import score
    from foresight.planning.generation.server import without_user

    if not settings.score:
        threading.Event().wait()
    name = without_user(settings.score)
    # Made in the loop: a server may be down when this process begins.
    give = functools.cache(lambda: scorer(settings, lambda text: log(store, "injection", text)))
    _forever(lambda: score.step(store, give(), name), store, "score")


def behind() -> None:
    """Let other processes go first: where cores are scarce, the training waits and not a client."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(BEHIND)
    if os.getsid(0) != os.getpid():  # not a loop, which leads a session of its own
        return
    with contextlib.suppress(OSError):  # Linux may share cores among sessions first
        Path("/proc/self/autogroup").write_text(f"{BEHIND}")


def _with_parent(parent: int) -> None:
    """End this process when the supervisor has ended, however it did."""
    while os.getppid() == parent:
        time.sleep(PAUSE)
    os._exit(0)


def _forever(step: Callable[[], Any], store: Store, loop: str) -> None:
    """Take steps. Where a server or the disk is lost, what waits is kept with an event, and it is tried again."""
    lost = ""
    while True:
        try:
            if not step():
                time.sleep(PAUSE)
            lost = ""
        except (LostError, sqlite3.OperationalError) as error:
            if str(error) != lost:
                lost = str(error)
                log(store, loop, f"turns wait: {error}")
            time.sleep(RETRY)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""Killing the loops of a live run under load: results/live-kills.json.

python benchmarks/live_kills.py

`foresight live` serves a random Llama of two layers to four clients, whose replies an exact rule scores. Each of the
four loops (serve, collect, score, train) is killed by SIGKILL 20 times, at random instants while it works: a loop is
killed up to `LATEST` seconds after the first thing it got done since it began. A client whose request fails sends it
again. Then the load ends and the loops finish what they have. Counted are

- `lost`: replies that a client received, and that are no turn of the run; and turns whose next message the server took,
  and that do not have it;
- `twice`: turns that more than one version was trained on, or versions that report other turns than have their number;
- `stuck`: turns that no loop takes further: answered and not scored, or more scored ones than fill a batch;
- `left`: processes that are still there after the run was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shlex
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "live-kills.json"
CLIENTS, BATCH, TURNS, MAX_TOKENS, LATEST, DRAIN = 4, 4, 3, 8, 3.0, 120.0
MARK = "FORESIGHT_KILLED_RUN"  # an environment variable of all processes of the run
DONE = {
    "serve": "SELECT count(*) FROM turns",
    "collect": "SELECT count(*) FROM turns WHERE next IS NOT NULL",
    "score": "SELECT count(*) FROM turns WHERE state NOT IN ('served', 'answered', 'ended')",
    "train": "SELECT count(*) FROM versions",
}
RULE = """def rate(messages, reply, next):
    return 1.0 if next["content"].startswith("good") else (-1.0, "a b c")
"""


class Client:
    """Holds conversations and keeps what it received: session, messages before the reply, and the reply."""

    def __init__(self, number: int, port: int) -> None:
        self.number, self.port = number, port
        self.received: list[tuple[str, list[dict[str, str]], str]] = []
        self.again = 0  # requests that were sent again
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._talk, daemon=True)
        self.thread.start()

    def _talk(self) -> None:
        draw = random.Random(self.number)
        for count in range(1_000_000):
            session, messages = f"{self.number}-{count}", list[dict[str, str]]()
            for turn in range(TURNS):
                word = draw.choice(("good", "bad")) if turn else "hi"
                messages = [*messages, {"role": "user", "content": f"{word} {count}"}]
                reply = self._ask(session, messages)
                if reply is None:
                    return
                self.received.append((session, messages, reply))
                messages = [*messages, {"role": "assistant", "content": reply}]

    def _ask(self, session: str, messages: list[dict[str, str]]) -> str | None:
        from live import post

        while not self.stopped.is_set():
            try:
                status, body = post(self.port, session, messages, MAX_TOKENS)
                if status == 200:
                    return str(body["choices"][0]["message"]["content"] or "")
            except (OSError, ValueError):
                pass
            except Exception as error:  # what http.client raises where the server ended within its answer
                if type(error).__module__ != "http.client":
                    raise
            self.again += 1
            time.sleep(0.2)
        return None


class Killer:
    """Kills one loop `kills` times."""

    def __init__(self, loop: str, supervisor: int, folder: Path, kills: int, seed: int) -> None:
        self.loop, self.supervisor, self.folder, self.kills = loop, supervisor, folder, kills
        self.draw, self.instants = random.Random(f"{loop} {seed}"), list[float]()
        self.thread = threading.Thread(target=self._kill, daemon=True)
        self.thread.start()

    def _kill(self) -> None:
        base = sqlite3.connect(self.folder / "live.db", timeout=60, isolation_level=None)
        while len(self.instants) < self.kills:
            process = self._process()
            done = base.execute(DONE[self.loop]).fetchone()[0]
            while base.execute(DONE[self.loop]).fetchone()[0] == done:
                time.sleep(0.01)
            delay = self.draw.uniform(0, LATEST)
            time.sleep(delay)
            os.kill(process, signal.SIGKILL)
            self.instants.append(round(delay, 3))
            print(self.loop, len(self.instants), flush=True)
            while self._process() == process:
                time.sleep(0.05)

    def _process(self) -> int:
        """The process of the loop, as soon as there is one."""
        import psutil

        while True:
            for found in psutil.Process(self.supervisor).children():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if self.loop in found.cmdline():
                        return found.pid
            time.sleep(0.05)


def marked(value: str) -> list[int]:
    """The processes whose environment has the mark, but for this one."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == value:
                found.append(process.pid)
    return found


def wrong(store: Any, clients: list[Client]) -> dict[str, int]:
    """What was lost, trained on twice, or is stuck."""
    turns, versions = store.turns(), store.versions()
    kept: dict[tuple[str, int, str], list[Any]] = {}
    for turn in turns:
        kept.setdefault((turn.session, len(turn.messages), turn.reply), []).append(turn)
    lost = 0
    for client in clients:
        for (session, before, reply), following in zip(client.received, [*client.received[1:], None], strict=True):
            same = kept.get((session, len(before), reply), [])
            lost += not same
            if same and following is not None and following[0] == session:
                lost += not any(turn.next == following[1][-1] for turn in same)
    by_version: dict[int | None, int] = {}
    for turn in turns:
        by_version[turn.trained] = by_version.get(turn.trained, 0) + 1
    twice = sum(one["metrics"].get("turns", 0) != by_version.get(one["number"], 0) for one in versions[1:])
    twice += sum(one["parent"] != before["number"] for before, one in itertools.pairwise(versions))
    counts = store.counts()
    return {"lost": lost, "twice": twice, "stuck": counts["answered"] + max(0, counts["scored"] - BATCH + 1)}


def main() -> None:
    """Kill, count, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each loop")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    import async_rollouts
    import live

    from foresight.agents.live.store import Store
    from foresight.runtime import bench

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ[MARK] = temporary
        folder, rule, port = Path(temporary) / "run", Path(temporary) / "rule.py", live.free_port()
        rule.write_text(RULE)
        model = async_rollouts.tiny(Path(temporary) / "model", given.seed)
        server = live.serve(folder, port, model, "--score", f"{rule}:rate", "--batch", f"{BATCH}", "--staleness", "8")
        store = Store(folder)
        try:
            clients = [Client(number, port) for number in range(CLIENTS)]
            killers = [Killer(loop, server.pid, folder, given.kills, given.seed) for loop in DONE]
            for killer in killers:
                killer.thread.join()
            for client in clients:
                client.stopped.set()
                client.thread.join(60)
            end = time.monotonic() + DRAIN
            while time.monotonic() < end and (wrong(store, clients)["stuck"] or wrong(store, clients)["lost"]):
                time.sleep(1.0)
            found, counts, versions = wrong(store, clients), store.counts(), store.versions()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            store.close()
        time.sleep(3.0)
        left = len(marked(temporary))
    document: dict[str, Any] = {
        "what": "The four loops of a live run, each killed by SIGKILL at random instants under load",
        "command": shlex.join(["python", "benchmarks/live_kills.py", *sys.argv[1:]]),
        "seeds": [given.seed],
        "kills": {killer.loop: len(killer.instants) for killer in killers},
        **found,
        "left": left,
        "replies": sum(len(client.received) for client in clients),
        "sent_again": sum(client.again for client in clients),
        "turns": counts,
        "published": len(versions) - 1,
        "instants": {killer.loop: killer.instants for killer in killers},
    }
    bench.record(FILE, document, began)
    print({key: document[key] for key in ("kills", *found, "left", "replies", "sent_again", "turns")})


if __name__ == "__main__":
    main()

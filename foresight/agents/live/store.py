"""The durable state of a live run: turns and versions in SQLite, which all loops share.

A turn goes one way: served → answered (its next state is known) → scored → trained, or it is left out (`ended` without
a next state, `unscored`, `stale`, `rejected`). Each step is one transaction, so a loop that is killed at any instant
loses no finished turn and repeats none.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import json
import math
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foresight.errors import UserError

FILE = "live.db"
VERSIONS = "versions"  # the folder of their weights
WAIT = 60.0  # seconds for another loop's transaction
STATES = ("served", "answered", "scored", "trained", "ended", "unscored", "stale", "rejected")
# AUTOINCREMENT: a loop may hold the id of a turn that is forgotten meanwhile, which no other turn may get.
SCHEMA = """
CREATE TABLE IF NOT EXISTS turns (
    id INTEGER PRIMARY KEY AUTOINCREMENT, session TEXT NOT NULL, version INTEGER NOT NULL, created REAL NOT NULL,
    messages TEXT NOT NULL, reply TEXT NOT NULL, prompt BLOB NOT NULL, tokens BLOB NOT NULL, logprob BLOB NOT NULL,
    temperature REAL NOT NULL, state TEXT NOT NULL, next TEXT, score REAL, hint TEXT, trained INTEGER
);
CREATE INDEX IF NOT EXISTS by_state ON turns (state, id);
CREATE INDEX IF NOT EXISTS by_session ON turns (session, state, id);
CREATE INDEX IF NOT EXISTS by_score ON turns (session, score);
CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY, session TEXT NOT NULL, previous TEXT, next TEXT, done INTEGER NOT NULL,
    created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS versions (
    number INTEGER PRIMARY KEY, folder TEXT NOT NULL, parent INTEGER, created REAL NOT NULL, metrics TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, created REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL
);
"""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of the model: what it read and wrote as token ids, and what became of it."""

    session: str
    version: int  # of the weights that wrote it
    messages: list[dict[str, str]]  # before it
    reply: str
    prompt: list[int]
    tokens: list[int]
    logprob: list[float]
    temperature: float = 1.0
    id: int = 0
    state: str = "served"
    next: dict[str, str] | None = None  # the message that followed: of the user, or of a tool
    score: float | None = None  # in [-1, 1]
    hint: str = ""  # what would have been better, in words
    trained: int | None = None  # the version that was trained on it


class Store:
    """The database of a live run in `folder`. Each loop opens its own; threads of one take turns."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._base = sqlite3.connect(self.folder / FILE, timeout=WAIT, isolation_level=None, check_same_thread=False)
        self._base.row_factory = sqlite3.Row
        self._base.execute("PRAGMA journal_mode=WAL")
        self._base.execute("PRAGMA synchronous=FULL")  # a turn that was answered survives a loss of power
        self._base.executescript(SCHEMA)

    def close(self) -> None:
        """Close the connection."""
        self._base.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing."""
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._base.execute("COMMIT")
        except BaseException:
            if self._base.in_transaction:  # where the disk is full, SQLite may have rolled back
                self._base.execute("ROLLBACK")
            raise

    # Serve.

    def add(self, turn: Turn) -> int:
        """Add a finished turn, its reply without white space around it; returns its id."""
        found = self._base.execute(
            "INSERT INTO turns "
            "(session, version, created, messages, reply, prompt, tokens, logprob, temperature, state) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'served')",
            (turn.session, turn.version, time.time(), json.dumps(turn.messages), turn.reply.strip(), _ids(turn.prompt),
             _ids(turn.tokens), array.array("d", turn.logprob).tobytes(), turn.temperature),
        )  # fmt: skip
        return int(found.lastrowid or 0)

    def request(self, session: str, messages: Sequence[dict[str, str]], done: bool = False) -> None:
        """Add what a request of a session shows of the turn before it. `done`: it is the session's last."""
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        previous = messages[places[-1]]["content"].strip() if places else None
        following = messages[places[-1] + 1 :] if places else []
        answer = json.dumps(following[-1]) if following else None
        self._base.execute(
            "INSERT INTO requests (session, previous, next, done, created) VALUES (?, ?, ?, ?, ?)",
            (session, previous, answer, int(done), time.time()),
        )

    def forget(self, session: str) -> int:
        """Delete the turns of a session that were not trained on, and the texts of the others; returns how many."""
        with self.transaction():
            count = self._base.execute("SELECT count(*) FROM turns WHERE session = ?", (session,)).fetchone()[0]
            self._base.execute("DELETE FROM requests WHERE session = ?", (session,))
            self._base.execute("DELETE FROM turns WHERE session = ? AND state != 'trained'", (session,))
            self._base.execute(
                "UPDATE turns SET session = '', messages = '[]', reply = '', next = NULL, hint = NULL, prompt = x'', "
                "tokens = x'', logprob = x'' WHERE session = ?", (session,),
            )  # fmt: skip
        return int(count)

    # Collect.

    def collect(self, patience: float) -> int:
        """Give turns their next state, and end those of finished sessions; returns the number of turns changed.

        A request answers the latest turn of its session that was served before it and whose text it repeats, but for
        white space around it. A turn that waits longer than `patience` seconds has no next state.
        """
        changed = 0
        with self.transaction():
            for row in self._base.execute("SELECT * FROM requests ORDER BY id LIMIT 1000").fetchall():
                if row["next"] is not None:
                    changed += self._base.execute(
                        "UPDATE turns SET state = 'answered', next = ? WHERE id = (SELECT max(id) FROM turns WHERE "
                        "session = ? AND state = 'served' AND reply = ? AND created <= ?)",
                        (row["next"], row["session"], row["previous"], row["created"]),
                    ).rowcount  # fmt: skip
                if row["done"]:
                    changed += self._base.execute(
                        "UPDATE turns SET state = 'ended' WHERE session = ? AND state = 'served' AND created < ?",
                        (row["session"], row["created"]),
                    ).rowcount
                self._base.execute("DELETE FROM requests WHERE id = ?", (row["id"],))
            changed += self._base.execute(
                "UPDATE turns SET state = 'ended' WHERE state = 'served' AND created < ?", (time.time() - patience,)
            ).rowcount
        return changed

    # Score.

    def scored(self, turn: int, score: float, hint: str = "", error: str = "") -> None:
        """Set the score of an answered turn, in [-1, 1], and its hint. 0 or NaN without a hint leaves the turn out.

        An `error` becomes an event.
        """
        state = "scored" if hint or (score and not math.isnan(score)) else "unscored"
        value = None if math.isnan(score) else max(-1.0, min(1.0, score))
        with self.transaction():
            self._base.execute(
                "UPDATE turns SET state = ?, score = ?, hint = ? WHERE id = ? AND state = 'answered'",
                (state, value, hint, turn),
            )
            if error:
                self._event("unscored", error)

    # Train.

    def window(self, size: int, staleness: int) -> list[Turn]:
        """The oldest `size` scored turns whose version is at most `staleness` updates from the present one.

        Others become `stale` for good. Fewer than `size` turns are returned as they are.
        """
        found = self._base.execute("SELECT DISTINCT version FROM turns WHERE state = 'scored'").fetchall()
        for version in [row["version"] for row in found]:
            if self.apart(version, self.active()) > staleness:
                self._base.execute(
                    "UPDATE turns SET state = 'stale' WHERE state = 'scored' AND version = ?", (version,)
                )
        return self.turns("scored", size)

    def apart(self, one: int, other: int) -> float:
        """The number of updates between two versions, counted along their parents; infinite if they share none."""
        lines = self._line(one), self._line(other)
        shared = next((version for version in lines[0] if version in lines[1]), None)
        return math.inf if shared is None else lines[0].index(shared) + lines[1].index(shared)

    def _line(self, version: int) -> list[int]:
        """A version, its parent, and so on to the first."""
        parents: dict[int, int] = dict(self._base.execute("SELECT number, parent FROM versions").fetchall())
        found: list[int] = []
        while version in parents:
            found.append(version)
            version = parents[version]
        return found

    def publish(
        self, number: int, folder: str, metrics: dict[str, Any], turns: Sequence[int], parent: int | None = None
    ) -> bool:
        """Make a version the active one and mark the turns it was trained on, at once; returns whether it is active.

        It is kept and not made active where another version than its `parent` (None: the active one) is active by now.
        Raises UserError if one of the turns was forgotten meanwhile, or trained on already.
        """
        with self.transaction():
            active = self._active()
            parent = active if parent is None else parent
            for turn in turns:
                changed = self._base.execute(
                    "UPDATE turns SET state = 'trained', trained = ? WHERE id = ? AND state = 'scored'", (number, turn)
                ).rowcount
                if not changed and self._base.execute("SELECT 1 FROM turns WHERE id = ?", (turn,)).fetchone() is None:
                    raise UserError(f"Turn {turn} was forgotten while it was trained on, so this update is left out.")
                if not changed:
                    raise UserError(f"Turn {turn} is not waiting to be trained on: is another trainer running?")
            self._base.execute(
                "INSERT INTO versions (number, folder, parent, created, metrics) VALUES (?, ?, ?, ?, ?)",
                (number, folder, parent, time.time(), json.dumps(metrics)),
            )
            if parent == active:
                self._set("active", number)
            else:
                why = f"version {active} became active while it was trained from version {parent}"
                self._event("kept", f"version {number} is kept and not served: {why}")
        return parent == active

    def one_sided(self, least: int = 6) -> list[str]:
        """Sessions that always praise or always blame, in at least `least` scored turns: their scores have no contrast.

        Forgotten turns belong to none.
        """
        rows = self._base.execute(
            "SELECT session FROM turns WHERE score IS NOT NULL AND session != '' GROUP BY session "
            "HAVING count(*) >= ? AND min(score) = max(score) AND min(score) != 0", (least,),
        )  # fmt: skip
        return [row["session"] for row in rows]

    def reject(self, turns: Sequence[int], why: str) -> None:
        """Leave turns out for good, with an event that gives the reason."""
        with self.transaction():
            for turn in turns:
                self._base.execute("UPDATE turns SET state = 'rejected' WHERE id = ? AND state = 'scored'", (turn,))
            self._event("rejected", why)

    def activate(self, number: int) -> None:
        """Roll back, or forward, to a version. Raises UserError if it does not exist."""
        known = [version["number"] for version in self.versions()]
        if number not in known:
            raise UserError(f"There is no version {number}. Versions: {', '.join(map(str, known)) or 'none'}.")
        with self.transaction():
            self._set("active", number)
            self._event("activated", f"version {number}")

    def withdraw(self, number: int, back: int, check: dict[str, Any], why: str) -> None:
        """Activate version `back` instead of `number` and pause training, with an event, and keep `check`, all at once.

        Where `number` is not active by now, as after a rollback, only `check` is kept.
        """
        with self.transaction():
            self._set("check", check)
            if self._active() == number:
                self._set("active", back)
                self._set("paused", True)
                self._event("gate", why)

    # Look.

    def active(self) -> int:
        """The number of the version to serve and to train on; -1 before the first."""
        return self._active()

    def versions(self) -> list[dict[str, Any]]:
        """All versions, oldest first: number, folder, parent, created, metrics."""
        rows = self._base.execute("SELECT * FROM versions ORDER BY number").fetchall()
        return [{**dict(row), "metrics": json.loads(row["metrics"])} for row in rows]

    def folder_of(self, number: int) -> str:
        """The folder of a version's weights: the run's own, wherever it was moved, or that of the model itself."""
        own = self.folder / VERSIONS / str(number)
        if own.is_dir():
            return str(own)
        return str(self._base.execute("SELECT folder FROM versions WHERE number = ?", (number,)).fetchone()[0])

    def turns(self, state: str | None = None, most: int = -1) -> list[Turn]:
        """The turns in a state (None: all), oldest first, at most `most`."""
        where, values = ("WHERE state = ?", [state]) if state else ("", [])
        rows = self._base.execute(f"SELECT * FROM turns {where} ORDER BY id LIMIT ?", (*values, most)).fetchall()
        return [_turn(row) for row in rows]

    def counts(self) -> dict[str, int]:
        """The number of turns in each state."""
        rows = self._base.execute("SELECT state, count(*) AS n FROM turns GROUP BY state").fetchall()
        found = {row["state"]: int(row["n"]) for row in rows}
        return {state: found.get(state, 0) for state in STATES}

    def events(self) -> list[tuple[str, str]]:
        """What was logged, oldest first: kind and text."""
        return [(row["kind"], row["text"]) for row in self._base.execute("SELECT * FROM events ORDER BY id")]

    def event(self, kind: str, text: str) -> None:
        """Log something that the owner of the run should read."""
        self._event(kind, text)

    def get(self, name: str, default: Any = None) -> Any:
        """A setting of the run."""
        row = self._base.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        return default if row is None else json.loads(row["value"])

    def set(self, name: str, value: Any) -> None:
        """Change a setting of the run."""
        self._set(name, value)

    def _active(self) -> int:
        return int(self.get("active", -1))

    def _set(self, name: str, value: Any) -> None:
        self._base.execute("INSERT OR REPLACE INTO settings (name, value) VALUES (?, ?)", (name, json.dumps(value)))

    def _event(self, kind: str, text: str) -> None:
        self._base.execute("INSERT INTO events (created, kind, text) VALUES (?, ?, ?)", (time.time(), kind, text))


def log(store: Store, kind: str, text: str) -> None:
    """Log an event; a full disk keeps none, so it is printed there."""
    try:
        store.event(kind, text)
    except sqlite3.OperationalError:
        print(f"{kind}: {text}", file=sys.stderr)


def _ids(tokens: Sequence[int]) -> bytes:
    return array.array("q", tokens).tobytes()


def _turn(row: sqlite3.Row) -> Turn:
    return Turn(
        row["session"], row["version"], json.loads(row["messages"]), row["reply"],
        array.array("q", row["prompt"]).tolist(), array.array("q", row["tokens"]).tolist(),
        array.array("d", row["logprob"]).tolist(), row["temperature"], row["id"], row["state"],
        None if row["next"] is None else json.loads(row["next"]), row["score"], row["hint"] or "", row["trained"],
    )  # fmt: skip

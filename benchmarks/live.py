"""Serving SmolLM2-135M to 8 clients: tokens a second while it is trained on their turns, and while it is not.

`foresight live` runs as a user starts it, with its four loops. Eight clients hold conversations of two questions and
reply to each answer; an exact rule scores the replies. Training is paused and continued in turn, one minute without it
and two with it, until there were ten minutes with it (FORESIGHT_BENCH_MINUTES): other load on the machine meets both.

foresight bench live --rounds 1

`rate` is of the time with training, `alone` of the time without; `share` is their ratio. Latencies are seconds from a
request to its whole reply; `refused` counts requests with any status but 200, or without a reply; `versions` are the
changes of weights while requests were running.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

UNIT = "tokens/s"
MINUTES = float(os.environ.get("FORESIGHT_BENCH_MINUTES", "10"))  # with training
CLIENTS, MAX_TOKENS = 8, 64
ALONE, TRAINING, SETTLE = 60.0, 120.0, 20.0  # seconds of a part, and before it: an update that runs is ended first
SCORE = Path(__file__).with_name("live_learning.py")
START = 300.0  # seconds until the server answers


class Load:
    """Clients that talk with the server until `stop`; `replies` are (begin, end, tokens), `refused` what went wrong."""

    def __init__(self, port: int, clients: int, max_tokens: int = MAX_TOKENS) -> None:
        self.port, self.max_tokens = port, max_tokens
        self.replies: list[tuple[float, float, int]] = []
        self.refused: list[str] = []
        self.stopped = threading.Event()
        self._threads = [threading.Thread(target=self._talk, args=(i,), daemon=True) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the running requests."""
        self.stopped.set()
        for thread in self._threads:
            thread.join(120)

    def _talk(self, client: int) -> None:
        from benchmarks import live_learning

        asked, _ = live_learning.questions(client)
        for number in range(1_000_000):
            messages: list[dict[str, str]] = []
            for turn in range(3):
                if self.stopped.is_set():
                    return
                wish = [live_learning.WISH] if turn else []
                text = " ".join([*wish, asked[(2 * number + turn) % len(asked)]])
                messages = [*messages, {"role": "user", "content": text}]
                reply = self._ask(f"{client}-{number}", messages)
                if reply is None:
                    break
                messages = [*messages, {"role": "assistant", "content": reply}]

    def _ask(self, session: str, messages: list[dict[str, str]]) -> str | None:
        begun = time.monotonic()
        try:
            status, body = post(self.port, session, messages, self.max_tokens)
        except OSError as error:
            self.refused.append(repr(error))
            return None
        if status != 200:
            self.refused.append(f"{status} {body}")
            return None
        self.replies.append((begun, time.monotonic(), body["usage"]["completion_tokens"]))
        return str(body["choices"][0]["message"]["content"])


def post(port: int, session: str, messages: list[dict[str, str]], max_tokens: int) -> tuple[int, Any]:
    """The status and the body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        body = json.dumps({"model": "live", "messages": messages, "max_tokens": max_tokens})
        headers = {"Content-Type": "application/json", "X-Session-Id": session}
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def serve(folder: Path, port: int, model: str = "smollm2", *options: str) -> subprocess.Popen[bytes]:
    """`foresight live` on the model; returns when it answers."""
    command = [sys.executable, "-m", "foresight", "live", model, "--port", f"{port}", "--out", str(folder), *options]
    server = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
    end = time.monotonic() + START
    while time.monotonic() < end:
        try:
            if post(port, "", [{"role": "user", "content": "hi"}], 1)[0] == 200:
                return server
        except OSError:
            if server.poll() is not None:
                raise SystemExit("foresight live did not start.") from None
            time.sleep(0.5)
    raise SystemExit(f"foresight live did not answer within {START:.0f} seconds.")


def measured(replies: list[tuple[float, float, int]], parts: list[tuple[float, float]]) -> dict[str, float]:
    """Tokens a second within parts of the time, and percentiles of the latency of requests that began in them.

    The tokens of a reply count by the share of its time that is within a part.
    """
    tokens = sum(
        count * max(0.0, min(end, until) - max(begin, since)) / (end - begin)
        for begin, end, count in replies
        for since, until in parts
    )
    latencies = sorted(e - b for b, e, _ in replies if any(since <= b < until for since, until in parts))
    seconds = sum(until - since for since, until in parts)
    p50, p95 = (latencies[min(int(share * len(latencies)), len(latencies) - 1)] for share in (0.5, 0.95))
    return {"rate": tokens / seconds, "p50": p50, "p95": p95}


def ours() -> dict[str, Any]:
    """Tokens a second with and without training."""
    from foresight.agents.live.store import Store

    with tempfile.TemporaryDirectory() as temporary:
        folder, port = Path(temporary) / "live", free_port()
        server = serve(folder, port, "smollm2", "--score", f"{SCORE}:rate", "--batch", "8", "--learning-rate", "1e-4")
        store, parts = Store(folder), {False: list[tuple[float, float]](), True: list[tuple[float, float]]()}
        try:
            store.set("paused", True)
            load = Load(port, CLIENTS)
            while sum(end - begin for begin, end in parts[True]) < 60 * MINUTES - 1:
                for training in (False, True):
                    store.set("paused", not training)
                    time.sleep(SETTLE)
                    begin = time.monotonic()
                    time.sleep(min(TRAINING if training else ALONE, 60 * MINUTES))
                    parts[training].append((begin, time.monotonic()))
            load.stop()
            versions, counts = store.versions(), store.counts()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            store.close()
    found = {training: measured(load.replies, times) for training, times in parts.items()}
    rate, alone = found[True]["rate"], found[False]["rate"]
    return {
        "rate": rate, "alone": alone, "share": rate / alone, "p50": found[True]["p50"], "p95": found[True]["p95"],
        "alone_p50": found[False]["p50"], "alone_p95": found[False]["p95"], "requests": len(load.replies),
        "refused": len(load.refused), "why": load.refused[:3], "versions": len(versions) - 1, "turns": counts,
        "clients": CLIENTS, "minutes": MINUTES,
    }  # fmt: skip

"""The studio's page under load: first paint, updates, long curves, many clients, the size of the page.

python benchmarks/studio.py [--rounds 5]

It makes 200 runs of 10,000 rows and one of 100,000 in a temporary folder, serves them as `foresight studio` does, and
opens the page in the system's Chromium. It writes results/studio.json. Needs `pip install 'foresight[studio,web]'`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gzip
import http.client
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from playwright import sync_api as playwright

from foresight.runtime import bench
from foresight.studio.app import PAGE
from foresight.studio.runs import identity

RUNS, ROWS, LONG, CLIENTS = 200, 10_000, 100_000, 50
TARGETS = {"first_paint": 1.0, "update": 1.0, "compressed_megabytes": 1.0}
RESULT = Path(__file__).parents[1] / "results" / "studio.json"
CONFIG = (
    "algorithm: ppo\nkind: control\nenv: CartPole-v1\nseed: {seed}\nconfig: {{steps: 99999999, learning_rate: 0.001}}\n"
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
CHROMIUM = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
# Milliseconds from the navigation until the first paint, and until the table of runs is in the page.
PAINT = """() => new Promise(done => {
  const paint = () => performance.getEntriesByName("first-contentful-paint")[0]?.startTime;
  const look = () => document.querySelectorAll("tbody tr").length >= 100 && document.querySelector(".chart canvas")
    && paint() !== undefined ? done([paint(), performance.now()]) : requestAnimationFrame(look);
  look();
})"""


def row(step: int) -> str:
    values = {"return": step % 500 / 2, "loss": 1 / (step + 1), "entropy": 0.5, "kl": 0.01, "length": step % 500}
    return json.dumps({"step": step, "seconds": step / 100, **values}) + "\n"


def make(folder: Path) -> None:
    """The runs: each log is a copy of one, since only its size matters."""
    sizes = {"long": LONG, **{f"run-{i:03}": ROWS for i in range(RUNS)}}  # the page opens with the newest, a short one
    texts = {rows: "".join(row(step) for step in range(1, rows + 1)) for rows in (LONG, ROWS)}
    for i, (name, rows) in enumerate(sizes.items()):
        run = folder / name
        run.mkdir()
        (run / "config.yaml").write_text(CONFIG.format(seed=i))
        (run / "metrics.jsonl").write_text(texts[rows])


def get(port: int, path: str) -> tuple[float, bytes]:
    """Seconds of a request, and its answer. Raises OSError unless it succeeded."""
    before = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.status != 200:
        raise OSError(f"{path}: {answer.status}")
    return time.perf_counter() - before, body


def paints(address: str, rounds: int) -> dict[str, list[float]]:
    """Seconds until the first paint and until all is shown, in new browser profiles; the first one by itself."""
    found: dict[str, list[float]] = {"first": [], "paint": [], "shown": []}
    with playwright.sync_playwright() as driver:
        for i in range(rounds + 1):
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(address)
            paint, shown = (milliseconds / 1000 for milliseconds in page.evaluate(PAINT))
            browser.close()
            if i == 0:
                found["first"] = [paint, shown]
            else:
                found["paint"].append(paint)
                found["shown"].append(shown)
    return found


def updates(address: str, run: Path, rounds: int) -> list[float]:
    """Seconds from an appended row until its step is in the table of the page."""
    found = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{address}#/runs?run={identity(run)}")
        page.wait_for_selector(".chart canvas")
        page.wait_for_timeout(1_000)
        for i in range(rounds):
            step = 20_000_001 + i
            with (run / "metrics.jsonl").open("a") as file:
                file.write(row(step))
            before = time.perf_counter()
            page.wait_for_selector(f"td:has-text('{step:,}')")
            found.append(time.perf_counter() - before)
            page.wait_for_timeout(700)
        browser.close()
    return found


class Follower(threading.Thread):
    """A client that follows the live events; `heard` is when it received one of the run after `forget`."""

    def __init__(self, port: int, run: str) -> None:
        super().__init__(daemon=True)
        self.run_id, self.heard, self.ready = run.encode(), 0.0, threading.Event()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.sendall(f"GET /api/live HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())

    def run(self) -> None:
        """Read until the server closes the connection."""
        try:
            while chunk := self.socket.recv(65_536):
                if b"ready" in chunk:
                    self.ready.set()
                if self.run_id in chunk and not self.heard:
                    self.heard = time.perf_counter()
        except OSError:
            return


def crowd(port: int, run: Path) -> dict[str, Any]:
    """50 clients that follow live and each ask for the table, a run and a curve at once."""
    followers = [Follower(port, identity(run)) for _ in range(CLIENTS)]
    for one in followers:
        one.start()
    for one in followers:
        one.ready.wait(60)
    paths = ["/api/runs", f"/api/runs/{identity(run)}", f"/api/curves?run={identity(run)}&metric=return"]

    def visit(_: int) -> list[float]:
        return [get(port, path)[0] for path in paths]

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        times = sorted(seconds for one in pool.map(visit, range(CLIENTS)) for seconds in one)
    total = time.perf_counter() - began
    with (run / "metrics.jsonl").open("a") as file:
        file.write(row(30_000_001))
    before = time.perf_counter()
    while not all(one.heard for one in followers) and time.perf_counter() - before < 30:
        time.sleep(0.01)
    heard = [one.heard - before for one in followers if one.heard]
    for one in followers:
        one.socket.close()
    return {
        "clients": CLIENTS, "requests": len(times), "seconds": total, "median": statistics.median(times),
        "slowest": times[-1], "followers_reached": len(heard), "slowest_event": max(heard, default=float("nan")),
    }  # fmt: skip


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        make(folder)
        before = stamps(folder)
        command = [sys.executable, "-m", "foresight", "studio", str(folder), "--port", "8965", "--no-browser"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            port = int(address.rstrip("/").rsplit(":", 1)[1])
            get(port, "/api/about")
            painted = paints(address, rounds)
            first_curve, body = get(port, f"/api/curves?run={identity(folder / 'long')}&metric=return")
            again = statistics.median(
                get(port, f"/api/curves?run={identity(folder / 'long')}&metric=return")[0] for _ in range(rounds)
            )
            curve = json.loads(body)["curves"][0]
            unchanged = stamps(folder) == before
            updated = updates(address, folder / "run-000", rounds)
            crowded = crowd(port, folder / "run-001")
        finally:
            server.terminate()
            server.wait(30)
    size = sum(len(gzip.compress(file.read_bytes())) for file in PAGE.iterdir()) / 1e6
    figures: dict[str, Any] = {
        "first_paint": {"median": statistics.median(painted["paint"]), "each": painted["paint"]},
        "all_shown": {"median": statistics.median(painted["shown"]), "each": painted["shown"]},
        "first_visit": {"paint": painted["first"][0], "shown": painted["first"][1]},
        "update": {"median": statistics.median(updated), "slowest": max(updated), "each": updated},
        "long_curve": {
            "rows": curve["rows"], "points": len(curve["x"]), "bytes": len(body), "first": first_curve, "again": again,
        },
        "crowd": crowded,
        "compressed_megabytes": size,
        "nothing_written_by_looking": unchanged,
    }  # fmt: skip
    met = {
        "first_paint": max(painted["paint"]) < TARGETS["first_paint"],
        "update": max(updated) < TARGETS["update"],
        "crowd": crowded["followers_reached"] == CLIENTS and crowded["slowest_event"] < TARGETS["update"],
        "compressed_megabytes": size < TARGETS["compressed_megabytes"],
        "nothing_written_by_looking": unchanged,
    }
    result = {
        "what": f"The studio with {RUNS} runs of {ROWS:,} rows and one of {LONG:,}, in seconds",
        "command": f"python benchmarks/studio.py --rounds {rounds}", "seeds": [], "visits": rounds,
        "first_paint_seconds": figures["first_paint"]["median"], "update_seconds": figures["update"]["median"],
        **figures,
        "targets": TARGETS, "met": met, "versions": bench.versions(), "machine": bench.machine(),
        "seconds": time.perf_counter() - began,
    }  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({**figures, "met": met}, indent=2))


if __name__ == "__main__":
    main()

"""What tests of the page need beside Python: npm's packages, which are installed here, and the system's Chromium."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'foresight[dev]'")

import uvicorn
from playwright import sync_api as playwright

from foresight.envs.tools import browser
from foresight.studio import app, serve

SOURCE = Path(__file__).parents[2] / "studio"
OLDEST = (20, 19)  # of Node, for Vite
OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip


def chromium() -> str:
    """The system's Chromium; without one, the test is skipped."""
    found = browser.chromium()
    if found is None:
        pytest.skip("no Chromium on this system: install it with the system's packages, or set FORESIGHT_CHROMIUM")
    return found


def packages() -> Path:
    """`studio/node_modules`, as package-lock.json has it; where there is no npm, or no network, the test is skipped."""
    reason = _installed()
    if reason:
        pytest.skip(reason)
    return SOURCE / "node_modules"


def require_node() -> None:
    """Skip the test without a Node that Vite runs on."""
    found = re.findall(r"\d+", subprocess.run(["node", "--version"], capture_output=True, text=True).stdout)
    if tuple(map(int, found[:2])) < OLDEST:
        pytest.skip(f"Node {'.'.join(found)} is too old: Vite needs {'.'.join(map(str, OLDEST))}")


@functools.cache
def _installed() -> str:
    """Install what is missing or older than the lock file. Returns why that is impossible here, or ""."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        return "no npm on this system: install Node, and npm ci runs by itself"
    locked, done = SOURCE / "package-lock.json", SOURCE / "node_modules" / ".package-lock.json"
    with locked.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests in another process may need the same
        if done.is_file() and done.stat().st_mtime >= locked.stat().st_mtime:
            return ""
        command = ["npm", "ci", "--no-audit", "--no-fund"]
        ran = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, timeout=150)
    if ran.returncode and any(sign in ran.stderr for sign in OFFLINE):
        return "npm ci cannot reach a registry from here"
    assert ran.returncode == 0, ran.stderr
    return ""


@contextlib.contextmanager
def served(folder: Path, **options: Any) -> Iterator[str]:
    """The address of a studio over `folder`, which runs in a thread; `options` as those of `app.create`."""
    taken = serve.listen("127.0.0.1", 28_765)
    made = app.create([folder], **options)
    server = uvicorn.Server(uvicorn.Config(made, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
    thread.start()
    yield serve.address("127.0.0.1", taken.getsockname()[1], None)
    server.should_exit = True
    thread.join(10)


@contextlib.contextmanager
def opened(*addresses: str) -> Iterator[Any]:
    """A page in Chromium. It must raise no error, and load nothing from elsewhere than `addresses`."""
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = started.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        problems: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        yield page
        started.close()
        assert problems == []
        assert all(url.startswith((*addresses, "data:", "blob:")) for url in asked)

"""What tests of the page need beside Python: npm's packages, which are installed here, and the system's Chromium."""

from __future__ import annotations

import fcntl
import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from foresight.envs.tools import browser

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

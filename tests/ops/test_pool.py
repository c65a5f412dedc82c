"""The threads of compiled loops beside torch's."""

from __future__ import annotations

import os
import subprocess
import sys

STARTED = """
import torch
torch.set_num_threads(1)
from foresight.ops import pool
{}
print(torch.get_num_threads(), pool.share(2))
"""


def _counts(line: str) -> str:
    command = [sys.executable, "-c", STARTED.format(line)]
    env = {**os.environ, "NUMBA_NUM_THREADS": "2"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_torch_keeps_its_count_when_the_threads_start() -> None:
    """Otherwise torch has two threads where one was asked for, as numba sets the count of OpenMP."""
    assert _counts("pool.start()") == "1 2"

"""GRPO on SmolLM2-135M, alone and next to two busy processes: 8 prompts x 8 completions x 16 new tokens per update.

The result depends on what threads do while they wait: a spinning thread occupies a core that others need, among them
the other thread of the same matrix product. `rate` is measured next to the busy processes; `alone` is measured before,
in the same process, after one warm-up update. Without this package's own setting:
GOMP_SPINCOUNT=300000 foresight bench busy_machine
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foresight.training.options import build_config

UNIT = "completions/s"
OTHERS = 2
COUNTING = "import os; mine = os.getppid()\nwhile os.getppid() == mine: sum(range(100_000))"  # until this process ends
UPDATES = int(os.environ.get("FORESIGHT_BENCH_UPDATES", "3"))  # alone, and next to the others
SETTINGS = {"prompts": 8, "group": 8, "max_new_tokens": 16, "learning_rate": 1e-5, "temperature": 1.0}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """`count` processes that use a core each."""
    others = [subprocess.Popen([sys.executable, "-c", COUNTING]) for _ in range(count)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def ours() -> dict[str, Any]:
    """This library's `grpo.train`, as a user runs it."""
    from benchmarks import _language
    from foresight.algorithms.language import grpo
    from foresight.envs.text.make import make
    from foresight.runtime.machine import POOL, configure_malloc

    configure_malloc(POOL)  # as `foresight train` does
    config = build_config(grpo.Config, model=_language.model(), steps=2 * UPDATES + 2, **SETTINGS)
    steps = grpo.train(config, make("addition"), grpo.build(config))
    completions = SETTINGS["prompts"] * SETTINGS["group"]

    def rate() -> float:
        begun = time.perf_counter()
        for _ in range(UPDATES):
            next(steps)
        return completions * UPDATES / (time.perf_counter() - begun)

    next(steps)
    alone = rate()
    with busy(OTHERS):
        beside = rate()
    waiting = {name: os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    return {"rate": beside, "alone": alone, "others": OTHERS, **waiting}

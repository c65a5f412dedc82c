"""Commands of `foresight`, one after the other in the same two processes: starting them takes longer than a small run.

Run by `test_torchrun` with a JSON file of the words of each command by name. The two processes are torchrun's, with its
environment, but forks of this one: what they import and compile is there before. Each writes `FILE.RANK.json`: exit
code, stdout and stderr of each command.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher import api

from foresight.cli.main import main as foresight
from foresight.runtime.distributed import torchrun


def main(path: str, *before: str) -> None:
    """The commands named `before` are run by this process, the others then by the two."""
    commands = json.loads(Path(path).read_text())
    for name in before:
        done = run(commands.pop(name))
        assert done["code"] == 0, done["stderr"]
    config = api.LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
        start_method="fork", logs_specs=DefaultLogsSpecs(log_dir=f"{path}.logs"),
    )  # fmt: skip
    api.elastic_launch(config, work)(path, commands)


def run(words: list[str]) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = foresight(words)
        except Exception:
            traceback.print_exc()
            code = 1
    return {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue()}


def work(path: str, commands: dict[str, list[str]]) -> None:
    """What each of the two does."""
    distributed.init_process_group("gloo")
    # One process group for all runs: torch keeps what it knows of the first one, and would wait for it in the second.
    torchrun.distributed.init_process_group = lambda backend: None
    torchrun.distributed.destroy_process_group = lambda: None
    done = {name: run(words) for name, words in commands.items()}
    Path(f"{path}.{os.environ['RANK']}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Commands of `foresight`, one after the other in the same two processes: starting them takes longer than a small run.

Run by `test_torchrun` in each process of torchrun, with a JSON file of the words of each command by name. Each process
writes `FILE.RANK.json`: exit code, stdout and stderr of each command.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path

from torch import distributed

from foresight.cli.main import main as foresight
from foresight.runtime.distributed import torchrun


def main(path: str) -> None:
    distributed.init_process_group("gloo")
    # One process group for all runs: torch keeps what it knows of the first one, and would wait for it in the second.
    torchrun.distributed.init_process_group = lambda backend: None
    torchrun.distributed.destroy_process_group = lambda: None
    done = {}
    for name, words in json.loads(Path(path).read_text()).items():
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = foresight(words)
            except Exception:
                traceback.print_exc()
                code = 1
        done[name] = {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue()}
    Path(f"{path}.{os.environ['RANK']}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1])

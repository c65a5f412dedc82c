"""Bundle trained runs with the package: `python benchmarks/bundle.py RUN...` writes foresight/trained/ALGORITHM/ENV.

Each gets what acting needs, and a card with a new evaluation; replay and moments of the optimizer stay behind.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from foresight.runtime import catalog, hub, run

LARGEST = 1_000_000  # bytes of a bundled agent


def bundle(path: Path) -> Path:
    """The folder of the bundled agent of the run at `path`. Replaces an earlier one."""
    settings = run.Run(path).settings
    name = f"{settings.algorithm}/{settings.env}"
    folder = catalog.BUNDLED / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    hub.slim(path, folder, name)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > LARGEST:
        shutil.rmtree(folder)
        raise SystemExit(f"{path} needs {size:,} bytes: a bundled agent has at most {LARGEST:,}.")
    return folder


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(bundle(Path(argument)))

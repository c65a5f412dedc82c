"""Rows of a replay on disk: files that are written once, beside the checkpoints that need them, and mapped memory.

```
checkpoints/
  replay/9f86d081....safetensors   rows of one environment between two checkpoints, named by its sha256
  step-000001024/manifest.json     names the files in `replay` that this checkpoint needs
```
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foresight.errors import UserError
from foresight.runtime.checkpoints import shards

if TYPE_CHECKING:
    from foresight.data.sequences import Chunk

FOLDER = "replay"


def relative(sha256: str) -> str:
    """The path of a file of rows, seen from a checkpoint."""
    return f"../{FOLDER}/{sha256}.safetensors"


def write(folder: Path, chunk: Chunk) -> None:
    """Write `chunk` to a file in `folder`, unless it is there. The file appears whole or not at all."""
    if chunk.file:
        with contextlib.suppress(OSError):
            if (folder / f"{chunk.file['sha256']}.safetensors").stat().st_size == chunk.file["size"]:
                return
    folder.mkdir(exist_ok=True)
    draft = folder / f".draft-{os.getpid()}"
    draft.unlink(missing_ok=True)
    rows = chunk.rows()
    try:
        file = shards.write(draft, rows.items())
        draft.rename(folder / f"{file['sha256']}.safetensors")
    finally:
        draft.unlink(missing_ok=True)
    chunk.file, chunk.first = file, chunk.last - next(iter(rows.values())).shape[1]


def damage(folder: Path, needed: dict[str, int]) -> str | None:
    """What is wrong with the files `needed` (sizes by sha256) in `folder`, or None."""
    for hashed, size in needed.items():
        file = folder / f"{hashed}.safetensors"
        if not file.is_file():
            return f"{file} is missing (rows of the replay; or it is the replay of another run)"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes instead of {size}"
    for hashed in needed:
        file = folder / f"{hashed}.safetensors"
        if shards.digest(file)["sha256"] != hashed:
            return f"the contents of {file} were changed (its sha256 differs)"
    return None


def sweep(checkpoints: Path) -> None:
    """Delete the files of rows that no checkpoint in the directory needs, those set aside included."""
    folder = checkpoints / FOLDER
    if not folder.is_dir():
        return
    needed: set[str] = set()
    for manifest in checkpoints.glob("*/manifest.json"):
        try:
            needed |= set(json.loads(manifest.read_text(encoding="utf-8")).get("replay", {}))
        except (OSError, ValueError):
            return  # what a damaged checkpoint needs is not known
    for file in folder.iterdir():
        if file.stem not in needed:
            file.unlink(missing_ok=True)


def mapped(folder: Path) -> Callable[..., Tensor]:
    """A function like `torch.zeros` whose memory is a file in `folder`: only what is in use takes memory.

    The file has no name any more when the function returns, so that it is gone with the process, however that ends. Its
    space is reserved at once. The function raises UserError if the disk has too little.
    """
    return functools.partial(_map, folder)


def _map(folder: Path, *shape: int, dtype: torch.dtype, device: Any = None) -> Tensor:
    count, wanted = math.prod(shape), math.prod(shape) * dtype.itemsize
    if not count:
        return torch.zeros(shape, dtype=dtype)
    try:
        handle, name = tempfile.mkstemp(prefix=".replay-", dir=folder)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, wanted)  # later, a full disk would kill the process
            return torch.from_file(name, shared=True, size=count, dtype=dtype).view(shape)
        finally:
            os.close(handle)
            os.unlink(name)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            reason = f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB are free"
        raise UserError(
            f"The replay needs {wanted / 2**30:.1f} GiB on disk in {folder}: {reason}. "
            "Lower --replay-size, free space, or choose another --out."
        ) from error

"""Checkpoints: a State as safetensors and JSON in one directory, written atomically, verified before use.

```
checkpoints/
  step-000001024/
    manifest.json          step, sha256 and size of every file; the optimizers whose moments were dropped
    state.json             the State without its tensors, and where each tensor is; what the runtime adds
    network.safetensors    one file for every field that holds tensors
  replay/                  rows of a replay on disk, for all checkpoints: see `chunks`
  best.json                the step and score of the best checkpoint so far, which is never deleted
```
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from foresight import distributed
from foresight.errors import UserError, resume_command
from foresight.runtime.checkpoints import chunks, shards
from foresight.runtime.checkpoints.tree import Decoder, Encoder, MismatchError, saved_fields, without_moments

FORMAT = 1
_NAME = re.compile(r"step-(\d+)")


def save(
    directory: str | Path,
    state: Any,
    step: int,
    keep: int = 3,
    extra: dict[str, Any] | None = None,
    best: float | None = None,
) -> Path:
    """Save `state`, a dataclass, as `directory/step-STEP` and return that path.

    Everything is written under a temporary name, synced to the disk and renamed, so that a kill at any
    instant leaves the earlier checkpoints intact. Then all but the `keep` newest and the best are deleted.
    On a full disk (or quota) all but the newest and the best are deleted first, and the write is retried. `extra` (any
    tree of plain values and tensors) is returned by `restore`; `best`, a score, marks this checkpoint as the best.
    Of several processes all must call it; the first writes, and gathers what is sharded over them, which all do once:
    they do not retry, so old checkpoints are deleted before the write where the newest would not fit a second time.

    Raises UserError if the directory cannot be written or is full; earlier checkpoints are not lost.
    """
    folder = Path(directory)
    path = folder / f"step-{step:09d}"
    draft = folder / f".draft-{path.name}-{os.getpid()}"
    if distributed.rank() > 0:
        gather = Encoder(folder / chunks.FOLDER, keep=False)
        for one in saved_fields(state):
            gather(getattr(state, one.name), one.name)
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".draft-*"):
            shutil.rmtree(stale, ignore_errors=True)
        alone, newest = distributed.processes() == 1, latest(folder)
        if not alone and newest is not None and shutil.disk_usage(folder).free < _size(newest):
            rotate(folder, 1)
            chunks.sweep(folder)
        try:
            _write(draft, state, step, extra or {})
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or len(all_steps(folder)) < 2 or not alone:
                raise
            shutil.rmtree(draft, ignore_errors=True)  # it is not there if the disk had no room for the folder itself
            rotate(folder, 1)  # free space: the newest state matters more than old ones
            chunks.sweep(folder)
            _write(draft, state, step, extra or {})
        if path.exists():
            path.rename(folder / f".draft-old-{path.name}")
        draft.rename(path)
        _sync(folder)
        if best is not None:
            mark_best(folder, step, best)
        rotate(folder, keep)
        chunks.sweep(folder)
    except OSError as error:
        kept = latest(folder)
        text = f"Cannot write a checkpoint to {folder}: {error.strerror or error}. Free space or choose another --out."
        raise UserError(f"{text} The checkpoint {kept} is intact." if kept else text) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def restore(
    path: str | Path, state: Any, device: str | torch.device = "cpu", fields: Collection[str] | None = None
) -> dict[str, Any]:
    """Verify the checkpoint `path` and load it into `state`, which `build` made; returns `{"step", **extra}`.

    Only `fields` of the State are loaded, if they are given. Optimizers without moments in the checkpoint, see
    `drop_moments`, are named by `"dropped"` in the result, and have none.

    Raises UserError if the checkpoint is truncated or was changed (and names the previous intact one), if it is deleted
    meanwhile, and if it was made by another algorithm or with another Config. The state is not changed unless all
    hashes match.
    """
    path = Path(path)
    manifest = verify(path)
    with _there(path):
        tree = json.loads((path / "state.json").read_text(encoding="utf-8"))
    dropped = manifest.get("dropped", [])
    for name in dropped:
        tree["state"][name] = without_moments(tree["state"][name])
    decode = Decoder(shards.Reader(path), device)
    try:
        with _there(path), torch.no_grad():
            decode.fields(tree["state"], state, only=fields)
            extra = decode(tree["extra"], None, "extra")
    except UserError:  # is a ValueError too; as for a disk that has no room for a replay
        raise
    except (MismatchError, ValueError) as error:
        raise UserError(
            f"Checkpoint {path} does not match: {error}. It was made with another Config or version of the algorithm."
        ) from error
    return {**extra, "step": manifest["step"], "dropped": dropped}


def extra(path: str | Path) -> dict[str, Any]:
    """The `extra` that was saved with the State (see `save`). Verifies the checkpoint first."""
    path = Path(path)
    manifest = verify(path)
    with _there(path):
        tree = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return {**Decoder(shards.Reader(path))(tree["extra"], None, "extra"), "step": manifest["step"]}


@contextlib.contextmanager
def _there(path: Path) -> Iterator[None]:
    """Raise UserError where a file of an intact checkpoint is gone: a run that trains deletes its oldest ones."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"Checkpoint {path} was deleted while it was read. Try again, for the newest one.") from error


def verify(path: str | Path) -> dict[str, Any]:
    """The manifest of an intact checkpoint. Raises UserError otherwise, and names the newest intact one before it."""
    path = Path(path)
    reason = _damage(path)
    if reason is None:
        return _manifest(path)
    text = f"Checkpoint {path} is damaged: {reason}."
    number = step_of(path) or 0
    for step in sorted(all_steps(path.parent), reverse=True):
        other = all_steps(path.parent)[step]
        if step < number and _damage(other) is None:
            raise UserError(f"{text} The previous good one is {other}. Continue from it with: {resume_command(other)}")
    raise UserError(f"{text} There is no good one before it.")


def all_steps(directory: str | Path) -> dict[int, Path]:
    """The checkpoints in a directory by step, oldest first."""
    folder = Path(directory)
    found = {step: path for path in folder.glob("step-*") if (step := step_of(path)) is not None}
    return dict(sorted(found.items()))


def step_of(path: Path) -> int | None:
    """The step of a checkpoint; None if the path is none."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match and path.is_dir() else None


def latest(directory: str | Path) -> Path | None:
    """The newest checkpoint in a directory, or None."""
    return next(reversed(all_steps(directory).values()), None)


def best(directory: str | Path) -> Path | None:
    """The checkpoint marked as the best, or None."""
    return all_steps(directory).get(_marked(directory).get("step", -1))


def best_score(directory: str | Path, default: float) -> float:
    """The score of the best checkpoint, -inf if none is marked, and `default` for one that was marked without."""
    return -math.inf if best(directory) is None else float(_marked(directory).get("score", default))


def mark_best(directory: str | Path, step: int, score: float) -> None:
    """Mark the checkpoint at `step` as the best; it is kept until another one is marked.

    Raises UserError if the mark cannot be written.
    """
    file = Path(directory) / "best.json"
    text = json.dumps({"step": step, "score": score}) + "\n"
    write_atomic(file, text, f"Free space, then: {resume_command(file.parent.parent)}")


def rotate(directory: str | Path, keep: int) -> None:
    """Delete all checkpoints but the `keep` newest and the best."""
    found = list(all_steps(directory).values())
    kept = {*found[-max(keep, 1) :], best(directory)}
    for path in [*found, *Path(directory).glob(".draft-old-*")]:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def drop_moments(path: Path, optimizers: Collection[str]) -> None:
    """Delete what the `optimizers`, fields of the State, have for each weight, such as Adam's moments.

    They take twice the room of the weights, and only training that continues from this checkpoint needs them. A kill
    leaves the checkpoint as it was or as it is to be; a damaged one, and one on a full disk, stays as it is.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        manifest = _manifest(path)
        files = {f"{name}.safetensors": name for name in optimizers}
        if gone := {file: name for file, name in files.items() if file in manifest["files"]}:
            manifest["files"] = {file: found for file, found in manifest["files"].items() if file not in gone}
            manifest["dropped"] = sorted({*manifest.get("dropped", []), *gone.values()})
            write_atomic(path / "manifest.json", json.dumps(manifest, indent=1) + "\n")
            for file in gone:
                (path / file).unlink(missing_ok=True)


def set_aside(directory: str | Path, after: int) -> list[Path]:
    """Rename checkpoints newer than step `after` to `aside-step-...`, so that a run that goes back ignores them.

    If the best is one of them, none is marked.
    """
    moved = []
    for step, path in all_steps(directory).items():
        if step > after:
            target = path.with_name(f"aside-{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            moved.append(path.rename(target))
    if best(directory) is None:
        with contextlib.suppress(OSError):  # what is not a file marks nothing
            (Path(directory) / "best.json").unlink()
    return moved


def write_atomic(path: Path, text: str, advice: str = "") -> None:
    """Write a small text file atomically: a kill leaves either the old or the new one.

    Raises OSError if it cannot be written, or UserError if there is `advice` on what to do then.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        _sync(path.parent)
    except OSError as error:
        if not advice:
            raise
        raise UserError(f"Cannot write {path}: {error.strerror or error}. {advice}") from error


def _write(folder: Path, state: Any, step: int, extra: dict[str, Any]) -> None:
    folder.mkdir()
    encode = Encoder(folder.parent / chunks.FOLDER)
    files: dict[str, dict[str, Any]] = {}
    tree: dict[str, Any] = {}

    def field(name: str, value: Any) -> Any:
        # Field by field, so that a copy made by state_dict() is freed with its field.
        file = f"{name}.safetensors"
        encode.begin(file)
        node = encode(value, name)
        if encode.tensors:
            files[file] = shards.write(folder / file, encode.tensors)
        return node

    for one in saved_fields(state):
        tree[one.name] = field(one.name, getattr(state, one.name))
    text = json.dumps({"state": tree, "extra": field("runtime", extra)}, allow_nan=False)
    with shards.HashedFile(folder / "state.json") as file:
        file.write(text.encode())
    files["state.json"] = file.digest
    manifest = {"format": FORMAT, "step": step, "state": type(state).__qualname__, "files": files}
    if encode.chunks:
        manifest["replay"] = encode.chunks
        _sync(folder.parent / chunks.FOLDER)
    with shards.HashedFile(folder / "manifest.json") as file:
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
    _sync(folder)


def _marked(directory: str | Path) -> dict[str, Any]:
    """The contents of `best.json`; empty if it is missing or damaged. Of earlier versions it has no score."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        found = dict(json.loads((Path(directory) / "best.json").read_text(encoding="utf-8")))
        if isinstance(found.get("step"), int) and isinstance(found.get("score", 0.0), int | float):
            return found
    return {}


def _manifest(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "manifest.json").read_text(encoding="utf-8")))


def _damage(path: Path) -> str | None:
    """How a checkpoint is damaged, or None."""
    try:
        manifest = _manifest(path)
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, but this version reads {FORMAT}"
        for name, expected in manifest["files"].items():
            file = path / name
            if Path(name).name != name or not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["size"]:
                return f"{name} has {file.stat().st_size} bytes instead of {expected['size']}"
        for name, expected in manifest["files"].items():
            if shards.digest(path / name)["sha256"] != expected["sha256"]:
                return f"the contents of {name} were changed (its sha256 differs)"
        if "state.json" not in manifest["files"] or not isinstance(manifest["step"], int):
            return "manifest.json is incomplete"
        return chunks.damage(path.parent / chunks.FOLDER, manifest.get("replay", {}))
    except FileNotFoundError:
        return "manifest.json is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"manifest.json cannot be read ({type(error).__name__})"
    return None


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find(run: Path, which: str | int = "latest") -> Path:
    """The checkpoint directory of a run by "latest", "best" or step. Raises UserError if it does not exist."""
    folder = run / "checkpoints"
    if which == "latest":
        found = latest(folder)
    elif which == "best":
        found = best(folder) or latest(folder)
    else:
        found = all_steps(folder).get(int(which)) if str(which).isdecimal() and len(str(which)) < 20 else None
    if found is None:
        raise UserError(f"{run} has no checkpoint '{which}'. There are: {listed(folder)}.")
    return found


def listed(folder: Path) -> str:
    """The steps that have a checkpoint, as text."""
    return ", ".join(str(step) for step in all_steps(folder)) or "none"

"""The draft of a file of rows that is written in chunks: a command that was stopped continues where it was."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foresight.envs.text.task import Example
from foresight.errors import UserError
from foresight.runtime import lock
from foresight.runtime.checkpoints import checkpoint


@dataclass
class Progress:
    """What a draft holds: prompts that were answered, rows and bytes; and the generator's state, in hexadecimal."""

    prompts: int = 0
    rows: int = 0
    size: int = 0
    generator: str = ""


def file_of(draft: Path) -> Path:
    """The file beside a draft with its progress and the settings that it was made with."""
    return draft.with_name(f"{draft.name}.progress")


def held(draft: Path) -> AbstractContextManager[None]:
    """The lock of a draft in an existing folder: two processes must not write to it."""
    return lock.hold(draft.with_name(f".{draft.name}.lock"), f"{draft} is being written")


def fingerprint(examples: Sequence[Example]) -> str:
    """A hash of what rows are made from: prompts, answers and columns."""
    text = json.dumps([[one.prompt, one.answer, one.columns] for one in examples], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def files(names: Iterable[object]) -> list[str]:
    """The files and folders among `names` ("FILE" or "FILE:FUNCTION"), with sizes and times: what they are now."""
    found = []
    for name in map(str, names):
        for path in map(Path, {name, name.rpartition(":")[0] or name}):
            parts = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
            found += [f"{part} {part.stat().st_size} {part.stat().st_mtime_ns}" for part in parts]
    return sorted(found)


def resume(draft: Path, settings: Mapping[str, Any], generator: torch.Generator) -> Progress:
    """The progress of a draft: the generator gets its state, and rows after the last whole chunk are cut off.

    Without a draft it is at 0. Raises UserError if the draft was made with other settings, or if its progress is
    unknown. Settings with a dash are shown as options, the others by their name alone.
    """
    if not draft.exists() or (not draft.stat().st_size and not file_of(draft).exists()):
        file_of(draft).unlink(missing_ok=True)
        return Progress()
    advice = "rename it to keep what it holds, or remove it."
    try:
        found = json.loads(file_of(draft).read_text(encoding="utf-8"))
        progress, made_with = Progress(**found["progress"]), dict(found["settings"])
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"{draft} is from a command that did not end, and cannot be continued: {advice}") from None
    was = [
        f"{name} {made_with.get(name)}" if name.startswith("-") else f"other {name}"
        for name, value in settings.items()
        if made_with.get(name) != _text(value)
    ]
    if was:
        raise UserError(f"{draft} was made with {' and '.join(was)}: give the same to continue it, or {advice}")
    if draft.stat().st_size < progress.size:
        raise UserError(f"{draft} has fewer rows than its progress: {advice}")
    with draft.open("r+b") as file:
        file.truncate(progress.size)
    generator.set_state(torch.frombuffer(bytearray.fromhex(progress.generator), dtype=torch.uint8))
    return progress


def begin(draft: Path, settings: Mapping[str, Any], generator: torch.Generator) -> Progress:
    """Save that nothing is done: a kill in the first chunk leaves a draft that can be continued. Raises OSError."""
    return _save(draft, Progress(generator=_state(generator)), settings)


def add(
    draft: Path,
    rows: Iterable[Mapping[str, Any]],
    prompts: int,
    progress: Progress,
    settings: Mapping[str, Any],
    generator: torch.Generator,
) -> Progress:
    """Append a chunk of rows, made of further `prompts`, and save the progress. Raises OSError."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    with draft.open("a", encoding="utf-8") as file:
        file.writelines(lines)
    done = progress.prompts + prompts, progress.rows + len(lines), draft.stat().st_size
    return _save(draft, Progress(*done, _state(generator)), settings)


def remove(draft: Path) -> None:
    """Remove a draft, if there is one, and its progress."""
    for file in (draft, file_of(draft), file_of(draft).with_name(f".{file_of(draft).name}.draft")):
        file.unlink(missing_ok=True)


def _save(draft: Path, progress: Progress, settings: Mapping[str, Any]) -> Progress:
    saved = {name: _text(value) for name, value in settings.items()}
    document = {"progress": dataclasses.asdict(progress), "settings": saved}
    checkpoint.write_atomic(file_of(draft), json.dumps(document))
    return progress


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)


def _state(generator: torch.Generator) -> str:
    return bytes(generator.get_state().tolist()).hex()

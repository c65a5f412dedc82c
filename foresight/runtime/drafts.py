"""The draft of a file of rows that is written in chunks: a command that was stopped continues where it was."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foresight.envs.text.task import Example
from foresight.errors import UserError
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


def fingerprint(examples: Sequence[Example]) -> str:
    """A hash of prompts and their answers: a draft of other ones cannot be continued."""
    text = json.dumps([[one.prompt, one.answer] for one in examples], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def resume(draft: Path, settings: Mapping[str, Any], generator: torch.Generator) -> Progress:
    """The progress of a draft: the generator gets its state, and rows after the last whole chunk are cut off.

    Without a draft, or with an empty one, it is at 0. Raises UserError if the draft was made with other settings, or if
    its progress is unknown.
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
    here = json.loads(json.dumps(settings))
    if other := [name for name in here if made_with.get(name) != here[name]]:
        raise UserError(
            f"{draft} was made with another {' and '.join(other)}: give the same options to continue it, or {advice}"
        )
    if draft.stat().st_size < progress.size:
        raise UserError(f"{draft} has fewer rows than its progress: {advice}")
    with draft.open("r+b") as file:
        file.truncate(progress.size)
    generator.set_state(torch.frombuffer(bytearray.fromhex(progress.generator), dtype=torch.uint8))
    return progress


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
    state = bytes(generator.get_state().tolist()).hex()
    after = Progress(progress.prompts + prompts, progress.rows + len(lines), draft.stat().st_size, state)
    saved = {"progress": dataclasses.asdict(after), "settings": dict(settings)}
    checkpoint.write_atomic(file_of(draft), json.dumps(saved))
    return after


def remove(draft: Path) -> None:
    """Remove a draft, if there is one, and its progress."""
    draft.unlink(missing_ok=True)
    file_of(draft).unlink(missing_ok=True)

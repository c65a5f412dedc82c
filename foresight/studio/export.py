"""A static page: the built page with what it shows beside it, to send around, and to open from its folder.

A browser lets a page of a folder load scripts and no JSON, so that each document is a call in a script.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foresight.errors import UserError
from foresight.runtime import catalog
from foresight.studio import recorded, samples
from foresight.studio.app import PAGE, VIEWS
from foresight.studio.attention import Readers
from foresight.studio.boards import Players
from foresight.studio.decisions import Decisions
from foresight.studio.dreams import Models
from foresight.studio.encode import encode
from foresight.studio.runs import Library
from foresight.studio.thoughts import Thoughts
from foresight.studio.traces import Traces

LARGEST = 20_000_000  # bytes of a picture or video that is copied
HORIZON = 15  # imagined steps
MOST_RUNS = 30  # of which an interval is kept


def write(folders: Sequence[str | Path], out: str | Path, model: str = "smollm2") -> int:
    """Write the runs in `folders` to the new folder `out`; returns their number.

    Every metric is there, decimated as on the page; of world models their predictions over `HORIZON` steps. Of what is
    computed for each request there is what `recorded` keeps; `model` is the language model whose attention is read,
    if it is installed. Raises UserError if `out` exists, and if there is nothing to write.
    """
    from foresight import __version__

    library, target = Library(folders), Path(out).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists. Choose a new folder for --export.")
    rows, reports, teams, models = library.table(), Thoughts(library), Traces(library), Models(library)
    if not rows and not reports.names() and not teams.names():
        raise UserError(f"There are no runs in {', '.join(str(folder) for folder in folders)}.")
    try:
        shutil.copytree(PAGE, target, dirs_exist_ok=True)
        _page(target / "index.html")
        _write(target, "runs", rows)
        _write(target, "settings", {row["id"]: library.settings(row["id"]) for row in rows})
        for row in rows:
            _one(library, row["id"], target)
        imagined = [one for one in models.names() if _imagined(models, one["id"], target)]
        _write(target, "models", imagined)
        _write(target, "thoughts", reports.names())
        for report in reports.names():
            _write(target, f"thoughts/{report['id']}", reports.report(report["id"]))
            _write(target, f"thoughts/{report['id']}.results", reports.results(report["id"]))
        _write(target, "agents", library.talking())
        _write(target, "traces", teams.names())
        for trace in teams.names():
            _write(target, f"traces/{trace['id']}", teams.trace(trace["id"]))
        _write(target, "bands", list(_bands(library, rows)))
        agents, networks = [], []
        for name, document in recorded.worlds():
            _write(target, name, document)
        for name, document in recorded.searches(Players(library), Decisions(library)):
            _write(target, name, document)
            agents = document
        for name, document in recorded.looks(Readers(library, model)):
            _write(target, name, document)
            networks = document
        there = {
            "runs": True, "grid": True, "search": agents, "imagination": imagined, "attention": networks,
            "thoughts": reports.names(), "agents": library.talking() or teams.names(),
        }  # fmt: skip
        views = [name for name in VIEWS if there[name]]
        _write(target, "about", {"version": __version__, "control": False, "folders": [], "views": views})
    except OSError as error:
        raise UserError(f"Cannot write to {target}: {error.strerror or error}. Choose another --export.") from error
    return len(rows)


def _page(index: Path) -> None:
    """Let the page read its documents from beside it, also without a server, where no module may be loaded."""
    text = index.read_text(encoding="utf-8")
    for old, new in (
        ("<html ", '<html data-exported="yes" '),
        ('<script type="module" crossorigin ', "<script defer "),
    ):
        assert old in text, f"{old} is not in the built page"
        text = text.replace(old, new, 1)
    index.write_text(text, encoding="utf-8")


def _bands(library: Library, rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The intervals of runs of the same algorithm and environment: `runs`, and `metrics` by name, over steps."""
    from foresight.runtime.results import plot

    groups: dict[str, list[dict[str, Any]]] = {}
    for row, label in zip(rows, plot.labels([library.settings(row["id"]) for row in rows]), strict=True):
        groups.setdefault(label, []).append(row)
    for label, group in groups.items():
        runs = [row["id"] for row in group]
        entry = catalog.algorithms().get(group[0]["algorithm"])
        metrics = {}
        for metric in entry.metrics if entry is not None and 1 < len(runs) <= MOST_RUNS else ():
            with contextlib.suppress(UserError):
                for band in library.bands(runs, metric):
                    metrics[metric] = {**band, "label": label}
        if metrics:
            yield {"runs": runs, "metrics": metrics}


def _imagined(models: Models, run: str, target: Path) -> bool:
    """Write what the model of a run predicts; returns whether it has one that can be read."""
    try:
        _write(target, f"models/{run}", models.open_loop(run, HORIZON))
    except UserError:
        return False  # no checkpoint yet, or too little experience
    return True


def _one(library: Library, run: str, target: Path) -> None:
    detail = library.detail(run)
    kept = []
    for name in detail["media"]:
        file = library.file(run, name)
        if file.stat().st_size <= LARGEST:
            copy = target / "data" / "files" / run / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
            kept.append(name)
    _write(target, f"runs/{run}", {**detail, "media": kept})
    curves = {
        f"{metric}/{x}": library.curve(run, metric, x) for metric in detail["metrics"] for x in ("step", "seconds")
    }
    _write(target, f"curves/{run}", curves)
    if detail["samples"]:
        rows = library.samples(run)
        found = samples.page(rows)
        pages = [row for start in range(0, len(rows), samples.LONGEST) for row in
                 samples.page(rows, start=start, count=samples.LONGEST)["rows"]]  # fmt: skip
        _write(target, f"samples/{run}", {**found, "rows": pages})
        if samples.talks(rows):
            talks = {row["index"]: samples.conversation(rows, row["index"]) for row in pages if "transcript" in row}
            _write(target, f"conversations/{run}", talks)


def _write(target: Path, name: str, document: object) -> None:
    file = target / "data" / f"{name}.js"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"foresight(" + json.dumps(name).encode() + b"," + encode(document) + b");\n")

"""A static page: the built page with the JSON of some runs beside it, to open from any web server or to send around."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from foresight.errors import UserError
from foresight.studio import samples
from foresight.studio.app import PAGE
from foresight.studio.runs import Library
from foresight.studio.thoughts import Thoughts

LARGEST = 20_000_000  # bytes of a picture or video that is copied


def write(folders: Sequence[str | Path], out: str | Path) -> int:
    """Write the runs in `folders` to the new folder `out`; returns their number.

    Every metric is there, decimated as on the page. Views that compute (grid, search, imagination, attention) are left
    out. Raises UserError if `out` exists, and if there is no run.
    """
    from foresight import __version__

    library, target = Library(folders), Path(out).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists. Choose a new folder for --export.")
    rows = library.table()
    if not rows:
        raise UserError(f"There are no runs in {', '.join(str(folder) for folder in folders)}.")
    try:
        shutil.copytree(PAGE, target, dirs_exist_ok=True)
        index = target / "index.html"
        index.write_text(index.read_text(encoding="utf-8").replace("<html ", '<html data-exported="yes" ', 1), "utf-8")
        data = target / "data"
        _write(data / "runs.json", rows)
        _write(data / "settings.json", {row["id"]: library.settings(row["id"]) for row in rows})
        for row in rows:
            _one(library, row["id"], data)
        talking, reports = library.talking(), Thoughts(library)
        _write(data / "agents.json", talking)
        _write(data / "thoughts.json", reports.names())
        for report in reports.names():
            _write(data / "thoughts" / f"{report['id']}.json", reports.report(report["id"]))
            _write(data / "thoughts" / f"{report['id']}.results.json", reports.results(report["id"]))
        views = ["runs", *(["thoughts"] if reports.names() else []), *(["agents"] if talking else [])]
        _write(data / "about.json", {"version": __version__, "control": False, "folders": [], "views": views})
    except OSError as error:
        raise UserError(f"Cannot write to {target}: {error.strerror or error}. Choose another --export.") from error
    return len(rows)


def _one(library: Library, run: str, data: Path) -> None:
    detail = library.detail(run)
    kept = []
    for name in detail["media"]:
        file = library.file(run, name)
        if file.stat().st_size <= LARGEST:
            (data / "files" / run / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, data / "files" / run / name)
            kept.append(name)
    _write(data / "runs" / f"{run}.json", {**detail, "media": kept})
    curves = {
        f"{metric}/{x}": library.curve(run, metric, x) for metric in detail["metrics"] for x in ("step", "seconds")
    }
    _write(data / "curves" / f"{run}.json", curves)
    if detail["samples"]:
        rows = library.samples(run)
        found = samples.page(rows)
        pages = [row for start in range(0, len(rows), samples.LONGEST) for row in
                 samples.page(rows, start=start, count=samples.LONGEST)["rows"]]  # fmt: skip
        _write(data / "samples" / f"{run}.json", {**found, "rows": pages})
        if samples.talks(rows):
            talks = {row["index"]: samples.conversation(rows, row["index"]) for row in pages if "transcript" in row}
            _write(data / "conversations" / f"{run}.json", talks)


def _write(file: Path, document: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, ensure_ascii=False, allow_nan=False, default=str), encoding="utf-8")

"""The server of the studio: JSON behind every view, the built page, and nothing else.

It binds to localhost. It answers only requests whose Host it was started for, and writing requests only from its own
page (Origin); with a token, only requests that carry it. Without `control` it changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response, StreamingResponse

from foresight.errors import UserError
from foresight.runtime import lock
from foresight.studio import attention, boards, decisions, dreams, grid, live, samples, thoughts, traces
from foresight.studio.encode import Answer, encode
from foresight.studio.runs import COMPARED, Library, resolved

VIEWS = ("runs", "grid", "search", "imagination", "attention", "thoughts", "agents")
PAGE = Path(__file__).parent / "page"
COOKIE = "foresight_token"
LOCAL = ("localhost", "127.0.0.1", "[::1]")
LONGEST_BODY = 100_000  # bytes
POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def create(
    folders: Sequence[str | Path],
    *,
    hosts: Sequence[str] | None = LOCAL,
    token: str | None = None,
    control: bool = False,
    model: str = "smollm2",
) -> FastAPI:
    """The application over the runs in `folders`. `control` allows to stop and resume runs.

    `model` is the language model whose attention is shown besides those of the runs.

    `hosts` are the names in the Host header that it answers to, without a port; None: any (with a token). Raises
    UserError for a missing folder.
    """
    library = Library(folders)
    app = FastAPI(
        title="foresight studio", docs_url=None, redoc_url=None, openapi_url=None, default_response_class=Answer
    )
    games, models, searches = boards.Players(library), dreams.Models(library), decisions.Decisions(library)
    table, changes = _Table(library), live.Live(library)
    readers, reports = attention.Readers(library, model), thoughts.Thoughts(library)
    teams = traces.Traces(library)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Any]) -> Response:
        refused = _refusal(request, hosts, token)
        if refused is not None:
            return refused
        response: Response = await call_next(request)
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        if token is not None and request.query_params.get("token"):  # the next requests carry it as a cookie
            response.set_cookie(_cookie(token), token, httponly=True, samesite="strict")
        if request.url.path.startswith("/api/"):
            response.headers["Cache-Control"] = "no-store"
        return response

    @app.exception_handler(UserError)
    async def refuse(_: Request, error: UserError) -> Answer:
        return Answer({"error": str(error)}, status_code=400)

    @app.get("/api/about")
    def about() -> dict[str, Any]:
        from foresight import __version__

        return {
            "version": __version__, "control": control, "folders": [str(folder) for folder in library.folders],
            "views": list(VIEWS),
        }  # fmt: skip

    @app.get("/api/runs")
    def runs() -> Response:
        return Response(table(), media_type="application/json")

    @app.get("/api/runs/{run}")
    def run(run: str) -> dict[str, Any]:
        return library.detail(run)

    @app.get("/api/runs/{run}/samples")
    def completions(
        run: str,
        search: str = "",
        sort: str = "step",
        step: int | None = None,
        held_out: bool | None = None,
        start: int = 0,
        count: int = 50,
    ) -> dict[str, Any]:
        return samples.page(library.samples(run), search, sort, step, held_out, max(start, 0), max(count, 1))

    @app.get("/api/agents")
    def agents() -> list[dict[str, Any]]:
        return library.talking()

    @app.get("/api/traces")
    def teamwork() -> list[dict[str, Any]]:
        return teams.names()

    @app.get("/api/traces/{name}")
    def trace(name: str) -> dict[str, Any]:
        return teams.trace(name)

    @app.get("/api/runs/{run}/conversation/{index}")
    def conversation(run: str, index: int) -> dict[str, Any]:
        return samples.conversation(library.samples(run), index)

    @app.get("/api/runs/{run}/file/{name:path}")
    def file(run: str, name: str) -> FileResponse:
        return FileResponse(library.file(run, name))

    @app.get("/api/curves")
    def curves(run: Annotated[list[str], Query()], metric: str, x: str = "step", points: int = 600) -> Response:
        found, missing = [], []
        for one in run[:COMPARED]:
            try:
                found.append(library.curve(one, metric, x, min(max(points, 2), 5_000)))
            except UserError:
                missing.append(one)
        bands = []
        if len(found) > 1:
            try:
                bands = library.bands([one["run"] for one in found], metric, x)
            except UserError:
                bands = []  # a log that was cut short or deleted in the meantime
        return _plain({"curves": found, "missing": missing, "bands": bands})

    @app.get("/api/differences")
    def differences(run: Annotated[list[str], Query()]) -> list[dict[str, Any]]:
        return library.differences(run[:20])

    @app.get("/api/live")
    async def follow() -> StreamingResponse:
        return StreamingResponse(changes.follow(), media_type="text/event-stream")

    @app.post("/api/grid")
    async def solve(request: Request) -> dict[str, Any]:
        asked = grid.read(await _document(request))
        return await asyncio.to_thread(grid.solve, asked)

    @app.get("/api/grids")
    def grids() -> dict[str, Any]:
        return grid.choices()

    @app.get("/api/players")
    def players() -> list[dict[str, Any]]:
        return games.names() + searches.names()

    @app.post("/api/board")
    async def board(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(games.look, await _document(request))

    @app.post("/api/decision")
    async def decision(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(searches.look, await _document(request))

    @app.get("/api/models")
    def learned() -> list[dict[str, Any]]:
        return models.names()

    @app.get("/api/models/{run}")
    async def loop(run: str, horizon: int = 15) -> dict[str, Any]:
        return await asyncio.to_thread(models.open_loop, run, horizon)

    @app.post("/api/dream")
    async def dream(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(models.dream, await _document(request))

    @app.get("/api/readers")
    def transformers() -> list[dict[str, Any]]:
        return readers.names()

    @app.post("/api/attention")
    async def look(request: Request) -> Response:
        return _plain(await asyncio.to_thread(readers.read, await _document(request)))

    @app.post("/api/attention/change")
    async def change(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(readers.change, await _document(request))

    @app.post("/api/attention/heads")
    async def heads(request: Request) -> list[float]:
        return await asyncio.to_thread(readers.heads, await _document(request))

    @app.get("/api/thoughts")
    def thought() -> list[dict[str, Any]]:
        return reports.names()

    @app.get("/api/thoughts/{name}")
    def report(name: str) -> dict[str, Any]:
        return reports.report(name)

    @app.get("/api/thoughts/{name}/{question}")
    def result(name: str, question: int, method: str, budget: int) -> dict[str, Any]:
        return reports.result(name, question, method, budget)

    @app.post("/api/runs/{run}/stop")
    def stop(run: str) -> dict[str, Any]:
        _require(control)
        return _stop(library, library.path(run))

    @app.post("/api/runs/{run}/resume")
    def resume(run: str) -> dict[str, Any]:
        _require(control)
        row = library.row(run) or {}
        path = library.path(run)
        if row.get("state") == "running":
            raise UserError(f"{path.name} is running: stop it first.")
        if row.get("state") == "finished":
            raise UserError(
                f"{path.name} has finished. To train it for longer: {library.detail(run)['resume']} --steps N"
            )
        lock.check(path)
        return _resume(library, path)

    @app.get("/{name:path}")
    def page(name: str) -> Response:
        file = resolved(PAGE / name)
        if not name or not file.is_relative_to(PAGE.resolve()) or not os.path.isfile(file):
            if name.startswith("api/") or "." in name:
                return PlainTextResponse("There is no such page.", status_code=404)
            file = PAGE / "index.html"
        return FileResponse(file)

    return app


class _Table:
    """The table of runs as JSON, never older than the request. Clients that ask while one is made share the next."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._began, self._text = -math.inf, b""

    def __call__(self) -> bytes:
        asked = time.monotonic()
        with self._lock:
            if self._began <= asked:
                self._began = time.monotonic()
                self._text = encode(self._library.table())
            return self._text


def warm_up() -> None:
    """Import and compile in the background what the first click would wait for."""
    threading.Thread(target=lambda: grid.solve(grid.Request(step=1)), daemon=True).start()


def _refusal(request: Request, hosts: Sequence[str] | None, token: str | None) -> Response | None:
    """Why a request is not answered, or None."""
    host = request.headers.get("host", "")
    name = host if host.endswith("]") else host.rsplit(":", 1)[0] if ":" in host else host
    if hosts is not None and name not in hosts:
        return PlainTextResponse(
            f"This studio does not answer to the host '{name[:100]}'. Open it by the address that it printed.",
            status_code=421,
        )
    origin = request.headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return PlainTextResponse("Requests from other pages are refused.", status_code=403)
    if request.method not in ("GET", "HEAD") and request.headers.get("content-type", "").split(";")[0] not in (
        "application/json",
    ):
        return PlainTextResponse("Requests that write must be JSON.", status_code=415)
    if token is not None:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = (request.query_params.get("token", ""), request.cookies.get(_cookie(token), ""), bearer)
        if not any(hmac.compare_digest(one.encode(), token.encode()) for one in given):
            return PlainTextResponse("Open the address with ?token=..., as it was printed.", status_code=401)
    return None


def _cookie(token: str) -> str:
    """The name of the cookie with the token: of this studio alone, because cookies know no ports."""
    return f"{COOKIE}_{hashlib.sha256(token.encode()).hexdigest()[:8]}"


async def _document(request: Request) -> dict[str, Any]:
    body = await request.body()
    if len(body) > LONGEST_BODY:
        raise UserError(f"A request has at most {LONGEST_BODY:,} bytes.")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UserError("The request is not JSON.") from error
    if not isinstance(document, dict):
        raise UserError("The request must be a JSON object.")
    return document


def _plain(document: object) -> Answer:
    """An answer of JSON types only, which need no conversion: much faster for large ones."""
    return Answer(document)


def _require(control: bool) -> None:
    if not control:
        raise UserError("This studio is read-only. Start it with: foresight studio --control")


def _stop(library: Library, path: Path) -> dict[str, Any]:
    """Interrupt the process that trains in `path`, as Ctrl-C does: it saves and can be resumed."""
    import psutil

    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if (
            any("foresight" in word for word in words)
            and {"train", "resume"} & set(words)
            and _in(path, process, words)
        ):
            os.kill(process.info["pid"], signal.SIGINT)
            threading.Thread(target=_await, args=(library, path, process), daemon=True).start()
            return {"stopped": path.name}
    raise UserError(f"No process on this machine trains in {path.name}.")


def _await(library: Library, path: Path, process: Any) -> None:
    """Note when a process that was interrupted has ended."""
    import psutil

    with contextlib.suppress(psutil.Error):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.1)  # waiting for it could take its exit status from who started it
    library.ended(path)


def _in(path: Path, process: Any, words: Sequence[str]) -> bool:
    """Whether the arguments of a process name this run directory, or it has the run's log open."""
    import psutil

    try:
        here = Path(process.cwd())
        named = any((here / word).resolve() == path for word in words[1:] if not word.startswith("-"))
        return named or any(Path(file.path).parent == path for file in process.open_files())
    except (psutil.Error, OSError, ValueError):
        return False


def _resume(library: Library, path: Path) -> dict[str, Any]:
    with (path / "resumed.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "foresight", "resume", str(path)],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def ended() -> None:
        process.wait()
        library.ended(path)

    threading.Thread(target=ended, daemon=True).start()
    return {"resumed": path.name}

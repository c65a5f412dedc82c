"""The server of a live run: OpenAI's chat completions, whose turns are kept, and whose weights change while it serves.

Headers of a request: `X-Session-Id` names the conversation (without it a turn is served and not kept), `X-Turn-Type:
side` serves without keeping, `X-Session-Done: 1` marks the last request, `X-Session-Train: off` opts the session out
for good. A header that repeats is refused. The `model` of a reply is `live-VERSION`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hmac
import json
import re
import sqlite3
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from foresight.agents import protocol
from foresight.agents.live import engine as engines
from foresight.agents.live.engine import Engine
from foresight.agents.live.store import Store, Turn, log
from foresight.envs.tools import tool
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation.constraints import before
from foresight.planning.generation.dialogue import as_data

LOCAL = ("localhost", "127.0.0.1", "[::1]", "testserver")
HEADERS = ("X-Session-Id", "X-Turn-Type", "X-Session-Done", "X-Session-Train")
PORT = re.compile(r":\d*$")  # of a Host
LONGEST_BODY = 4_000_000  # bytes
MAX_TOKENS = 256  # of a turn, by default
LONGEST_NAME = 200  # characters of a session


def create(store: Store, engine: Engine, token: str | None = None, temperature: float = 1.0) -> FastAPI:
    """The application. With a `token` every request must carry it.

    Without, only requests to this machine are served, and none from a page that another host serves.

    `temperature` is that of requests that name none.
    """

    async def guard(request: Request) -> None:
        host = request.headers.get("host", "")
        if token is None and PORT.sub("", host) not in LOCAL:
            raise HTTPException(403, f"This server answers to {LOCAL[0]} only.")
        # A browser sends simple requests of any page; it cannot add a token to them.
        if token is None and request.headers.get("origin") not in (None, f"http://{host}", f"https://{host}"):
            raise HTTPException(403, "Requests from pages of other origins are refused.")
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            raise HTTPException(401, "Send the token that `foresight live` printed, as Authorization: Bearer TOKEN.")
        if not request.headers.get("content-length", "0").isdigit():
            raise HTTPException(400, "Content-Length is no number.")
        if int(request.headers.get("content-length", "0")) > LONGEST_BODY:
            raise HTTPException(413, f"A request has at most {LONGEST_BODY} bytes.")

    # A dependency and no middleware, which would hide from a request that its client hung up.
    app = FastAPI(
        title="foresight live", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(guard)]
    )
    lock = threading.Lock()
    forgotten = collections.Counter[str]()  # by session: a turn that is being written then is not kept either

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, error.detail)

    @app.exception_handler(sqlite3.OperationalError)
    async def lost(request: Request, error: sqlite3.OperationalError) -> Response:
        return _error(503, f"This run cannot keep what was asked: {error}. Send the request again later.")

    async def kept(call: Callable[..., Any], *arguments: Any) -> Any:
        """Use the store in a thread, one call at a time."""

        def run() -> Any:
            with lock:
                return call(*arguments)

        return await asyncio.to_thread(run)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "live", "object": "model", "owned_by": "foresight"}]}

    @app.get("/v1/live")
    async def status() -> dict[str, Any]:
        return {"version": engine.version, "turns": await kept(store.counts), "active": await kept(store.active)}

    @app.post("/v1/sessions/{session:path}/forget")  # a name may have slashes
    async def forget(session: str) -> dict[str, Any]:
        if not session:  # that of all turns that were forgotten
            raise HTTPException(404, "Give the name of a session: POST /v1/sessions/NAME/forget.")
        return {"forgotten": await kept(_forget, store, session, forgotten)}

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        for name in HEADERS:
            if len(http.headers.getlist(name)) > 1:
                return _error(400, f"The header {name} is given more than once: send it once.")
        body = await http.body()
        if len(body) > LONGEST_BODY:
            return _error(413, f"A request has at most {LONGEST_BODY} bytes.")
        try:
            given = json.loads(body)
            if not isinstance(given, dict):
                raise UserError("The body must be a JSON object.")
            wanted = _request(engine.model, given, temperature)
            engine_request, messages = wanted
        except RecursionError:
            return _error(400, "The body is nested too deeply: send lists and objects with fewer levels.")
        except OverflowError:
            return _error(400, "max_tokens, temperature, top_p and seed must be finite numbers.")
        except (UserError, ValueError, TypeError) as error:
            return _error(400, str(error))
        session = _utf8(http.headers.get("x-session-id", ""))
        if len(session) > LONGEST_NAME:  # the beginning alone might be that of another session
            return _error(400, f"X-Session-Id has {len(session)} characters: give a name of at most {LONGEST_NAME}.")
        before = forgotten[session]
        if session and http.headers.get("x-session-train", "").lower() == "off":
            await kept(_opt_out, store, session)
        keeps = bool(session) and not await kept(_opted_out, store, session)
        with contextlib.suppress(OSError):
            if keeps:
                done = http.headers.get("x-session-done", "") in ("1", "true")
                # The last message of a side request is no user's: it follows no turn.
                await _safely(kept, store.request, session, messages if _main(http) else [], done)
        trains = keeps and _trains(http, engine_request)
        loop, news = asyncio.get_running_loop(), asyncio.Queue[int]()
        engine_request.progress = lambda r: _tell(loop, news, len(r.tokens))
        try:
            engine.submit(engine_request)
        except UserError as error:
            return _error(400, str(error))

        async def finish() -> bool:
            """Keep the finished turn; whether it is kept or need not be."""
            if not trains or engine_request.error or engine_request.canceled:
                return True
            reply = protocol.text_of(protocol.reply(_written(engine, engine_request)))
            text = as_data(engine.model, {"content": reply})["content"]  # as the next request repeats it
            # Tokens of a stop text are kept: they were sampled, and one of them ended the turn.
            turn = Turn(
                session, engine_request.version, messages, text, engine_request.prompt, engine_request.tokens,
                engine_request.logprob, engine_request.temperature,
            )  # fmt: skip
            return await _safely(kept, _add, store, turn, forgotten, before)

        if given.get("stream"):
            counted = bool((given.get("stream_options") or {}).get("include_usage"))
            events = _stream(engine, engine_request, news, finish, counted)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        while not engine_request.over:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(news.get(), 1.0)
            if await http.is_disconnected():
                engine_request.canceled = True
                return Response(status_code=499)
        if engine_request.error:
            return _error(500, engine_request.error)
        stored = await finish()
        message = protocol.reply(_written(engine, engine_request))
        document = {
            **_head(engine_request, "chat.completion"),
            "choices": [{"index": 0, "message": message, "finish_reason": _reason(engine_request, message)}],
            "usage": _usage(engine_request),
        }
        return JSONResponse(document, headers={} if stored else {"X-Turn-Kept": "no"})

    return app


async def _stream(
    engine: Engine, request: engines.Request, news: asyncio.Queue[int], finish: Callable[[], Any], counted: bool = False
) -> AsyncIterator[str]:
    """A turn as server-sent events: text as it is written; from the first call of a tool on, all of it at the end.

    Together the texts are that of a reply which is not streamed. The chunk with the finish reason of a turn that could
    not be kept has `turn_kept` false, as a reply has the header `X-Turn-Kept: no`. If `counted`, a chunk without
    choices follows, with the counts of tokens.
    """
    head, shown = _head(request, "chat.completion.chunk"), 0
    if counted:
        head["usage"] = None

    def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> str:
        head["model"] = f"live-{request.version}"
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return f"data: {json.dumps({**head, **more, 'choices': [choice]})}\n\n"

    try:
        begun = False
        while not request.over:
            await news.get()
            if request.tokens and not begun:  # the version that writes it is known
                yield chunk({"role": "assistant", "content": ""})
                begun = True
            text = visible(engines.texts_of(engine.model, request.tokens[:]), request.stop).strip()
            if len(text) > shown:
                yield chunk({"content": text[shown:]})
                shown = len(text)
        if request.error:
            yield f"data: {json.dumps({'error': {'message': request.error, 'type': 'server_error'}})}\n\n"
            return
        if not begun:
            yield chunk({"role": "assistant", "content": ""})
        stored = await finish()
        message = protocol.reply(_written(engine, request))
        if rest := (message["content"] or "")[shown:]:
            yield chunk({"content": rest})
        if calls := message.get("tool_calls"):
            yield chunk({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
        yield chunk({}, _reason(request, message), **({} if stored else {"turn_kept": False}))
        if counted:
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(request)})}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        request.canceled = True  # if the client hung up; nothing otherwise


def visible(text: str, stop: Sequence[str] = ()) -> str:
    """The beginning of a turn that can be no part of a call, and of no text in `stop`."""
    ends = (tool.CALL, *stop)
    text = before(text, ends)
    held = max((length for end in ends for length in range(1, len(end)) if text.endswith(end[:length])), default=0)
    return text[: len(text) - held]


def _written(engine: Engine, request: engines.Request) -> str:
    """The text of a finished turn."""
    return before(engine.model.decode(request.tokens), request.stop)


def _usage(request: engines.Request) -> dict[str, int]:
    counts = len(request.prompt), len(request.tokens)
    return {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}


def follow(store: Store, engine: Engine, load: Callable[[str], LanguageModel], pause: float = 0.5) -> None:
    """Exchange the engine's weights whenever another version becomes active. Never returns.

    A version that cannot be loaded is logged once, and the one before it still answers; so it does, and is logged once,
    while the database does not answer.
    """
    tried, lost = engine.version, ""
    while True:
        try:
            active = store.active()
            if active != tried and active >= 0:
                folder = store.folder_of(active)
                tried = active
                try:
                    engine.exchange(load(folder), active)
                except Exception as error:  # such as a damaged file: requests are still answered
                    log(
                        store,
                        "serve",
                        f"version {active} cannot be loaded, so version {engine.version} answers until there is "
                        f"another: {type(error).__name__}: {error}",
                    )
            lost = ""
        except sqlite3.OperationalError as error:  # such as a lock that is held too long
            if str(error) != lost:
                lost = str(error)
                log(store, "serve", f"new versions wait: {error}")
        time.sleep(pause)


def _request(
    model: LanguageModel, given: dict[str, Any], temperature: float
) -> tuple[engines.Request, list[dict[str, str]]]:
    """The engine's request and the messages that the model reads."""
    if given.get("n") not in (None, 1):
        raise UserError("n must be 1: send one request for each reply.")
    if given.get("logprobs") or given.get("top_logprobs"):
        raise UserError("Replies have no log-probabilities: leave logprobs and top_logprobs out.")
    if given.get("response_format") not in (None, {"type": "text"}):
        raise UserError('response_format must be {"type": "text"}: ask for another form in a message.')
    if given.get("tool_choice") not in (None, "auto", "none"):
        raise UserError(f"tool_choice must be auto or none, not {given['tool_choice']!r}: no call can be forced.")
    if not isinstance(given.get("stream_options") or {}, dict):
        raise UserError('stream_options must be an object such as {"include_usage": true}.')
    tools = given.get("tools") or []
    if not isinstance(tools, list):
        raise UserError("tools must be a list.")
    if given.get("tool_choice") == "none":
        tools = []
    messages = [as_data(model, message) for message in protocol.plain(given.get("messages"), tools)]  # type: ignore[arg-type]
    stop = given.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
        raise UserError("stop must be a text or a list of texts.")

    def value(*names: str, default: Any) -> Any:
        """The first that is given and not null: 0 is a value."""
        return next((given[name] for name in names if given.get(name) is not None), default)

    request = engines.Request(
        model.encode(messages), int(value("max_completion_tokens", "max_tokens", default=MAX_TOKENS)),
        float(value("temperature", default=temperature)), float(value("top_p", default=1.0)), tuple(stop),
        int(value("seed", default=uuid.uuid4().int)) % 2**31,
    )  # fmt: skip
    return request, messages


def _trains(http: Request, request: engines.Request) -> bool:
    """Whether a turn can be trained on: one truncated by top-p or chosen greedily has no probability to correct by."""
    return _main(http) and request.temperature > 0 and request.top_p == 1


def _main(http: Request) -> bool:
    return http.headers.get("x-turn-type", "main") == "main"


def _utf8(header: str) -> str:
    """A header, which arrives as Latin-1, as the UTF-8 that it is where it can be read so: as in a path."""
    try:
        return header.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        return header


def _head(request: engines.Request, kind: str) -> dict[str, Any]:
    name = f"live-{request.version}"
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}


def _reason(request: engines.Request, message: dict[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop" if request.stopped else "length"


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


def _tell(loop: asyncio.AbstractEventLoop, news: asyncio.Queue[int], length: int) -> None:
    with contextlib.suppress(RuntimeError):  # the server is closing
        loop.call_soon_threadsafe(news.put_nowait, length)


async def _safely(kept: Callable[..., Any], call: Callable[..., Any], *arguments: Any) -> bool:
    """Write to the store; where the disk is full the turn is served all the same, and a line is printed."""
    try:
        await kept(call, *arguments)
    except sqlite3.OperationalError as error:
        print(f"A turn was served and could not be kept: {error}.", file=sys.stderr)
        return False
    return True


def _add(store: Store, turn: Turn, forgotten: collections.Counter[str], before: int) -> None:
    """Keep a turn, unless its session opted out, or was forgotten again since `before`, while it was written."""
    if not _opted_out(store, turn.session) and forgotten[turn.session] == before:
        store.add(turn)


def _forget(store: Store, session: str, forgotten: collections.Counter[str]) -> int:
    count = store.forget(session)
    forgotten[session] += 1
    return count


def _opt_out(store: Store, session: str) -> None:
    out = store.get("opted_out", [])
    if session not in out:
        store.set("opted_out", [*out, session])
    store.forget(session)


def _opted_out(store: Store, session: str) -> bool:
    return session in store.get("opted_out", [])

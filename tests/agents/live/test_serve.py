"""The live server through OpenAI's own client, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import sqlite3
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from foresight.agents.live import engine as engines
from foresight.agents.live import learn, serve
from foresight.agents.live.engine import Engine
from foresight.agents.live.store import Store
from foresight.envs.tools import tool
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation.constraints import before
from tests import tiny_language
from tests.agents.live.test_learn import TEMPLATE
from tests.agents.live.test_store import fill, make_room
from tests.sabotage import sabotaged_by

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")

TOKEN = "secret"


def model(seed: int = 0) -> LanguageModel:
    made = tiny_language.model(seed)
    made.tokenizer.chat_template = TEMPLATE
    return made


class Served:
    """A server in a thread, its store, engine and a client."""

    def __init__(self, folder: Path, token: str | None = None) -> None:
        self.store, self.engine = Store(folder), Engine(model(), 0, slots=4)
        self.store.publish(0, "0", {}, [])
        app = serve.create(self.store, self.engine, token)
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=TOKEN, max_retries=0, timeout=30
        )

    def ask(self, *texts: str, session: str = "", headers: Any = None, **settings: Any) -> Any:
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        named = {"X-Session-Id": session} if session else {}
        given = {"max_tokens": 6, **settings}
        return self.client.chat.completions.create(
            model="live", messages=messages, extra_headers={**named, **(headers or {})}, **given
        )

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        client = http.client.HTTPConnection("127.0.0.1", self.port)
        client.request("GET", path, headers=headers)
        with contextlib.closing(client), client.getresponse() as answer:
            return answer.status, json.loads(answer.read())

    def post(self, path: str, body: bytes = b"", headers: Any = None) -> tuple[int, Any]:
        client = http.client.HTTPConnection("127.0.0.1", self.port)
        client.request("POST", path, body, headers or {})
        with contextlib.closing(client), client.getresponse() as answer:
            return answer.status, json.loads(answer.read())

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(10)
        self.engine.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.close()


def test_a_turn_is_kept_as_it_was_sampled_and_answered_by_the_next_request(live: Served) -> None:
    first = live.ask("hi", session="a")
    assert (
        first.model == "live-0" and first.usage.completion_tokens <= 6 and first.choices[0].message.role == "assistant"
    )
    second = live.ask("hi", first.choices[0].message.content, "thanks", session="a")
    live.store.collect(60)
    one, two = live.store.turns()
    assert one.next == {"role": "user", "content": "thanks"} and two.state == "served" and one.version == 0
    assert second.choices[0].finish_reason in ("stop", "length")
    for turn in (one, two):  # what is trained on is what was sampled
        with torch.no_grad():
            again = live.engine.model.logprob(learn._batch(turn), 1.0)[0][0, 0]
        torch.testing.assert_close(again, torch.tensor(turn.logprob), atol=1e-4, rtol=1e-4)
        assert turn.prompt == live.engine.model.encode(turn.messages)


def test_a_stream_has_the_same_text(live: Served) -> None:
    replies = ((seed, live.ask("hi", seed=seed, max_tokens=12)) for seed in range(20))
    seed, whole = next((seed, one) for seed, one in replies if one.usage.completion_tokens > 6)
    chunks = list(live.ask("hi", seed=seed, max_tokens=12, stream=True, session="b"))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content and len(chunks) > 3
    assert {chunk.model for chunk in chunks} == {"live-0"} and chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert [turn.session for turn in live.store.turns()] == ["b"]


@pytest.mark.parametrize(("text", "shown"), [
    ("a <b> c", "a <b> c"), ("a <", "a "), ("a <tool_ca", "a "), (f"a {tool.CALL}x", "a "), ("a <tool>", "a <tool>"),
])  # fmt: skip
def test_what_may_become_a_call_is_not_shown_yet(text: str, shown: str) -> None:
    assert serve.visible(text) == shown


@pytest.mark.parametrize(("text", "shown", "whole"), [
    ("a EN", "a ", "a EN"), ("a END b", "a ", "a "), ("a b", "a ", "a b"), ("a be", "a be", "a be"),
    ("a bc END", "a ", "a "), ("END", "", ""), (f"a E{tool.CALL}x END", "a ", f"a E{tool.CALL}x "),
])  # fmt: skip
def test_a_reply_ends_before_its_first_stop_text(text: str, shown: str, whole: str) -> None:
    assert serve.visible(text, ("END", "bc")) == shown and before(text, ("END", "bc")) == whole


@sabotaged_by("foresight.agents.live.serve.before", lambda real: lambda text, stop: text)
def test_a_stop_text_is_not_in_the_reply_and_its_turn_is_answered(live: Served) -> None:
    def ask(stream: bool, **settings: Any) -> tuple[str, str]:
        found = live.ask("hi", max_tokens=12, stream=stream, **settings)
        message, reason = joined(found) if stream else (found.choices[0].message.model_dump(), "")
        return message["content"] or "", reason or found.choices[0].finish_reason

    texts = ((seed, ask(False, seed=seed)[0]) for seed in range(50))
    seed, text = next((seed, text) for seed, text in texts if len(text) > 6 and " " not in text)
    for stop in (text[3:5], [text[3:5], "W+W"]):
        wanted = text.partition(text[3:5])[0]
        for stream in (False, True):
            assert ask(stream, seed=seed, stop=stop, session="a") == (wanted, "stop")
        live.ask("hi", wanted, "thanks", session="a")
        live.store.collect(60)
        first, second, _ = live.store.turns()
        assert [first.state, second.state] == ["served", "answered"] and second.reply == wanted
        assert live.engine.model.decode(second.tokens) == wanted + text[3:5]  # what was sampled is what is trained on
        assert len(second.logprob) == len(second.tokens)
        live.store.forget("a")


def writes(live: Served, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the model write `text`, in six tokens, whatever it reads."""
    model, logits, part = live.engine.model, live.engine.model.logits, -(-len(text) // 6)
    monkeypatch.setattr(model, "logits", lambda hidden: logits(hidden).index_fill(-1, torch.tensor(0), -100.0))
    monkeypatch.setattr(model, "encode", lambda messages: [5, 6, 7])  # tools do not fit its context
    monkeypatch.setattr(model, "decode", lambda tokens: text[: part * len(tokens)])


def joined(chunks: Any) -> tuple[dict[str, Any], str]:
    """The message and the reason of a stream."""
    text, calls, reason = "", [], ""
    for chunk in chunks:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        calls += [call.model_dump(exclude={"index"}) for call in choice.delta.tool_calls or ()]
        reason = choice.finish_reason or reason
    return {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})}, reason


@sabotaged_by("foresight.agents.live.serve.visible", lambda real: lambda text, stop=(): text)
@sabotaged_by("foresight.agents.live.store.Store.request", lambda real: lambda self, *given: None)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_answered_by_what_their_tools_return(
    live: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    writes(live, monkeypatch, f"\n Look: {tool.write('add', a=1, b=2)} {tool.write('now')}\n")
    asked: dict[str, Any] = {"tools": [protocol_tool("add"), protocol_tool("now")], "max_tokens": 6}
    messages: list[Any] = [{"role": "user", "content": "1+2?"}]

    def ask(stream: bool) -> tuple[dict[str, Any], str]:
        found = live.client.chat.completions.create(
            model="live", messages=messages, extra_headers={"X-Session-Id": "a"}, stream=stream, **asked
        )
        if stream:
            return joined(found)
        return found.choices[0].message.model_dump(exclude_none=True), found.choices[0].finish_reason

    message, reason = ask(stream)
    called = [(call["type"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert called == [("function", "add", '{"a": 1, "b": 2}'), ("function", "now", "{}")]
    one, two = (call["id"] for call in message["tool_calls"])
    messages += [message, {"role": "tool", "tool_call_id": one, "content": "3"}]
    messages += [{"role": "tool", "tool_call_id": two, "content": "12:00"}]
    for found, why in ((message, reason), ask(not stream)):
        assert why == "tool_calls" and (found.get("content") or "") == "Look:"
    live.store.collect(60)
    first, second = live.store.turns()
    results = "<tool_response>3</tool_response>\n<tool_response>12:00</tool_response>"
    assert first.next == {"role": "user", "content": results} and second.state == "served"


def protocol_tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("stream", [False, True])
def test_white_space_around_a_turn_does_not_keep_it_from_being_answered(
    live: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    writes(live, monkeypatch, " Paris is\n it. \n")
    found = live.ask("hi", session="a", stream=stream)
    text = joined(found)[0]["content"] if stream else found.choices[0].message.content
    assert text == "Paris is\n it."
    live.ask("hi", f"{text} \n", "thanks", session="a")
    live.store.collect(60)
    assert [turn.state for turn in live.store.turns()] == ["answered", "served"]


@sabotaged_by("foresight.agents.live.serve._trains", lambda real: lambda http, request: True)
@sabotaged_by("foresight.agents.live.serve._opted_out", lambda real: lambda store, session: False)
def test_only_turns_that_can_be_trained_on_are_kept(live: Served) -> None:
    live.ask("hi")  # no session
    live.ask("hi", session="a", headers={"X-Turn-Type": "side"})
    live.ask("hi", session="a", temperature=0)
    live.ask("hi", session="a", top_p=0.5)
    assert live.store.turns() == []
    live.ask("hi", session="a")
    live.ask("ho", session="b")
    live.ask("hi", session="a", headers={"X-Session-Train": "off"})
    live.ask("hi", session="a")
    assert [turn.session for turn in live.store.turns()] == ["b"]  # opted out for good, and forgotten


def test_a_side_request_is_not_what_followed_a_turn(live: Served) -> None:
    reply = live.ask("hi", session="a").choices[0].message.content
    live.ask("hi", reply, "a title", session="a", headers={"X-Turn-Type": "side"})
    live.store.collect(60)
    assert [turn.state for turn in live.store.turns()] == ["served"]
    live.ask("hi", reply, "thanks", session="a")
    live.store.collect(60)
    first, _ = live.store.turns()
    assert first.next == {"role": "user", "content": "thanks"}
    live.ask("bye", session="a", headers={"X-Turn-Type": "side", "X-Session-Done": "1"})
    live.store.collect(60)
    assert [turn.state for turn in live.store.turns()] == ["answered", "ended"]


@pytest.mark.parametrize(
    ("sent", "path"),
    [
        (b"user/42", "user%2F42"), (b"user/42", "user/42"), ("Zo\u00eb".encode(), "Zo%C3%AB"), (b"Zo\xeb", "Zo%C3%AB"),
        (b"a/forget", "a/forget"), (b"50%", "50%25"),
    ],
)  # fmt: skip
def test_a_session_of_any_name_is_forgotten(live: Served, sent: bytes, path: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}).encode()
    assert live.post("/v1/chat/completions", body, {"X-Session-Id": sent})[0] == 200
    assert len(live.store.turns()) == 1
    assert live.post(f"/v1/sessions/{path}/forget") == (200, {"forgotten": 1}) and live.store.turns() == []
    assert live.post("/v1/sessions//forget")[0] == 404


@sabotaged_by("foresight.agents.live.serve._add", lambda real: lambda store, turn, *_: store.add(turn))
@pytest.mark.parametrize("forget", [False, True])
def test_a_turn_whose_session_opts_out_or_is_forgotten_while_it_is_written_is_not_kept(
    live: Served, monkeypatch: pytest.MonkeyPatch, forget: bool
) -> None:
    real, held = live.engine.submit, list[engines.Request]()
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patched:
        patched.setattr(live.engine, "submit", held.append)
        running = pool.submit(live.ask, "hi", session="a")
        while not held:
            time.sleep(0.01)
        patched.setattr(live.engine, "submit", real)
        if forget:
            assert live.post("/v1/sessions/a/forget") == (200, {"forgotten": 0})
        else:
            live.ask("hi", session="a", headers={"X-Session-Train": "off"})
        real(held[0])
        assert running.result().choices and live.store.turns() == []
        live.ask("hi", session="a")
        assert len(live.store.turns()) == forget  # it was not opted out


def test_a_stream_whose_session_is_forgotten_is_not_kept(live: Served) -> None:
    stream = live.ask("hi", session="a", max_tokens=50, stream=True)
    next(iter(stream))
    assert live.post("/v1/sessions/a/forget")[0] == 200
    assert list(stream) and live.store.turns() == []


def test_mistakes_get_a_sentence_and_a_status(live: Served) -> None:
    for settings, words in (
        ({"n": 2}, "n must be 1"),
        ({"max_tokens": 500}, "does not fit the context"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "a b", "parameters": {}}}]}, "no name of a tool"),
        ({"stop": [""]}, "stop must be"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_completion_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"top_p": 0}, r"top_p in \[0.0001, 1\], not 1.0 and 0.0"),
        ({"n": 0}, "n must be 1"),
        ({"logprobs": True}, "leave logprobs and top_logprobs out"),
        ({"top_logprobs": 2}, "leave logprobs and top_logprobs out"),
        ({"response_format": {"type": "json_object"}}, "response_format must be"),
        (
            {"tool_choice": "required", "tools": [protocol_tool("f")]},
            "tool_choice must be auto or none, not 'required'",
        ),
        ({"stream_options": 3, "stream": True}, "stream_options must be"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            live.ask("hi", **settings)
    with pytest.raises(openai.BadRequestError, match="role of message 0"):
        live.client.chat.completions.create(model="live", messages=[{"role": "king", "content": "x"}])
    assert [one.id for one in live.client.models.list()] == ["live"]


def test_nulls_and_what_changes_nothing_are_accepted(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = list[engines.Request](), live.engine.submit
    monkeypatch.setattr(live.engine, "submit", lambda request: (asked.append(request), real(request)))
    null = dict.fromkeys(("n", "top_p", "temperature", "seed", "stop", "tools", "tool_choice", "response_format"))
    null |= dict.fromkeys(("max_completion_tokens", "logprobs", "top_logprobs", "stream_options", "stream"))
    same = {"n": 1, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "tool_choice": "auto"}
    for settings in (null, same):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **settings}
        status, document = live.post("/v1/chat/completions", json.dumps(body).encode())
        assert status == 200, document
        one = asked.pop()
        assert (one.max_new_tokens, one.temperature, one.top_p, one.stop) == (3, 1.0, 1.0, ())


def test_a_stream_counts_its_tokens_where_it_is_asked_to(live: Served) -> None:
    whole = live.ask("hi", seed=3)
    *chunks, last = live.ask("hi", seed=3, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage == whole.usage and all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.choices for chunk in live.ask("hi", stream=True, stream_options={"include_usage": False}))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("no JSON", "Expecting value"),
        ('{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1e999}', "must be finite numbers"),
        ('{"messages": [{"role": "user", "content": "hi"}], "seed": -1e999}', "must be finite numbers"),
        ('{"messages": ' + 100_000 * "[" + 100_000 * "]" + "}", "nested too deeply"),
    ],
    ids=["text", "max_tokens", "seed", "depth"],
)
def test_a_body_that_cannot_be_read_is_a_mistake_of_the_client(live: Served, body: str, words: str) -> None:
    client = http.client.HTTPConnection("127.0.0.1", live.port)
    client.request("POST", "/v1/chat/completions", body)
    with contextlib.closing(client), client.getresponse() as answer:
        assert answer.status == 400 and words in json.loads(answer.read())["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_turn(live: Served, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real, logits, asked = live.engine.submit, live.engine.model.logits, list[engines.Request]()
    monkeypatch.setattr(live.engine, "submit", lambda request: (asked.append(request), real(request)))

    def slowly(hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return logits(hidden).index_fill(-1, torch.tensor(0), -100.0)  # never the end

    monkeypatch.setattr(live.engine.model, "logits", slowly)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, "stream": stream}).encode()
    client = http.client.HTTPConnection("127.0.0.1", live.port)
    client.request("POST", "/v1/chat/completions", body, {"X-Session-Id": "a"})
    while not asked or not asked[0].tokens:
        time.sleep(0.01)
    client.close()
    end = time.monotonic() + 10
    while not asked[0].over and time.monotonic() < end:
        time.sleep(0.01)
    assert asked[0].over and asked[0].canceled and len(asked[0].tokens) < 50
    assert live.store.turns() == []


def test_a_header_that_repeats_is_refused(live: Served) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
    for name in serve.HEADERS:
        client = http.client.HTTPConnection("127.0.0.1", live.port)
        client.putrequest("POST", "/v1/chat/completions")
        for key, value in (("Content-Length", str(len(body))), (name, "a"), (name, "b")):
            client.putheader(key, value)
        client.endheaders(body)
        with contextlib.closing(client), client.getresponse() as answer:
            assert answer.status == 400 and f"{name} is given more than once" in answer.read().decode()
    assert live.store.turns() == []


def test_a_token_and_a_host_guard_the_server(tmp_path: Path) -> None:
    made = Served(tmp_path, token=TOKEN)
    try:
        assert made.ask("hi").choices
        with pytest.raises(openai.AuthenticationError):
            made.client.with_options(api_key="wrong").models.list()
    finally:
        made.close()


def test_another_host_is_refused_without_a_token(live: Served) -> None:
    with pytest.raises(openai.PermissionDeniedError):
        live.client.with_options(default_headers={"Host": "evil.example"}).models.list()


def test_this_machine_is_answered_by_any_of_its_names(live: Served) -> None:
    for host in ("localhost", "127.0.0.1:8000", "[::1]", "[::1]:8000"):
        assert live.get("/v1/models", Host=host)[0] == 200
    for host in ("::1", "evil.example:8000", "localhost:8000.evil.example", ""):
        status, document = live.get("/v1/models", Host=host)
        assert status == 403 and document["error"]["message"] == "This server answers to localhost only."


def test_a_page_from_elsewhere_is_refused(live: Served) -> None:
    live.ask("hi", session="a")
    here = f"127.0.0.1:{live.port}"
    for origin in ("http://evil.example", "null", "http://127.0.0.1", f"http://{here}.evil.example"):
        status, document = live.post("/v1/sessions/a/forget", headers={"Origin": origin})
        assert status == 403 and document["error"]["message"] == "Requests from pages of other origins are refused."
    assert len(live.store.turns()) == 1
    assert live.post("/v1/sessions/a/forget", headers={"Origin": f"http://{here}"}) == (200, {"forgotten": 1})
    assert live.post("/v1/sessions/a/forget") == (200, {"forgotten": 0})


class Over(Exception):
    """Ends `follow`, which never returns."""


Followed = Callable[[Callable[[str], LanguageModel]], None]


@pytest.fixture
def follow(live: Served) -> Iterator[Followed]:
    """Starts `serve.follow` in a thread, which ends with the test."""
    store, over = Store(live.store.folder), threading.Event()
    real, threads = store.active, list[threading.Thread]()

    def active() -> int:
        if over.is_set():
            raise Over
        return real()

    def work(load: Callable[[str], LanguageModel]) -> None:
        with contextlib.suppress(Over):
            serve.follow(store, live.engine, load, 0.01)

    def start(load: Callable[[str], LanguageModel]) -> None:
        store.active = active  # type: ignore[method-assign]
        threads.append(threading.Thread(target=work, args=(load,), daemon=True))
        threads[-1].start()

    yield start
    over.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    store.close()


def test_weights_change_under_load_and_no_request_is_refused(live: Served, follow: Followed) -> None:
    loaded = []

    def load(folder: str) -> LanguageModel:
        loaded.append(folder)
        return model(int(folder))

    follow(load)

    def client(number: int) -> list[int]:
        return [int(live.ask("hi", session=f"s{number}").model.removeprefix("live-")) for _ in range(6)]

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(client, number) for number in range(8)]
        for version in (1, 2):
            time.sleep(0.1)
            live.store.publish(version, str(version), {}, [])
        found = [one.result() for one in running]  # raises if one was refused
    live.store.publish(3, "3", {}, [])
    end = time.monotonic() + 10
    while live.ask("hi").model != "live-3" and time.monotonic() < end:
        pass
    assert all(versions == sorted(versions) for versions in found) and loaded[-1] == "3"
    assert len(live.store.turns()) == 48 and {t.version for t in live.store.turns()} <= {0, 1, 2}


def test_a_version_that_cannot_be_loaded_is_logged_and_the_one_before_it_answers(
    live: Served, follow: Followed
) -> None:
    def load(folder: str) -> LanguageModel:
        if folder == "1":
            raise OSError("model.safetensors is incomplete")
        return model(int(folder))

    follow(load)
    live.store.publish(1, "1", {}, [])
    end = time.monotonic() + 10
    while not live.store.events() and time.monotonic() < end:
        time.sleep(0.01)
    reason = "version 1 cannot be loaded, so version 0 answers until there is another: OSError: model.safetensors is"
    time.sleep(0.05)
    ((kind, text),) = live.store.events()  # logged once
    assert kind == "serve" and text.startswith(reason) and live.ask("hi").model == "live-0"
    live.store.publish(2, "2", {}, [])
    while live.ask("hi").model != "live-2" and time.monotonic() < end:
        pass
    assert live.ask("hi").model == "live-2"


def test_versions_are_followed_again_when_the_database_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, exchanged, looks = Store(tmp_path), list[int](), itertools.count(1)
    for number in range(2):
        store.publish(number, str(number), {}, [])
    engine: Any = types.SimpleNamespace(version=0, exchange=lambda model, version: exchanged.append(version))
    real = store.active

    def active() -> int:
        look = next(looks)
        if look <= 3:
            full("database is locked")
        if look == 5:
            store.publish(2, "2", {}, [])
            monkeypatch.setattr(store, "event", full)
        if look == 8:
            raise Over
        return real()

    def full(*words: str) -> Any:
        raise sqlite3.OperationalError(words[-1])

    def load(folder: str) -> Any:
        return folder if folder == "1" else full("no such model")

    monkeypatch.setattr(store, "active", active)
    with pytest.raises(Over):
        serve.follow(store, engine, load, 0.0)
    assert exchanged == [1] and store.events() == [("serve", "new versions wait: database is locked")]
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith("serve: version 2 cannot be loaded, so version 0 answers")
    store.close()


def test_a_session_whose_name_is_too_long_is_refused(live: Served) -> None:
    """Two long names with the same beginning are not one session."""
    with pytest.raises(openai.BadRequestError, match="X-Session-Id has 201 characters: give a name of at most 200"):
        live.ask("hi", session=200 * "a" + "b")
    live.ask("hi", session=200 * "a")
    assert [turn.session for turn in live.store.turns()] == [200 * "a"]


def test_two_hundred_sessions_at_once(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    real, waiting = live.engine.submit, list[engines.Request]()

    def hold(request: engines.Request) -> None:
        waiting.append(request)
        if len(waiting) == 200:  # all of them are there
            for one in waiting:
                real(one)

    monkeypatch.setattr(live.engine, "submit", hold)

    async def ask(number: int) -> bytes:
        body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
        head = f"Host: localhost\r\nX-Session-Id: s{number}\r\nContent-Length: {len(body)}\r\nConnection: close"
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
        with contextlib.closing(writer):
            return await reader.read()

    async def all_of_them() -> list[bytes]:
        return await asyncio.wait_for(asyncio.gather(*(ask(number) for number in range(200))), 60)

    assert all(reply.startswith(b"HTTP/1.1 200") and b'"live-0"' in reply for reply in asyncio.run(all_of_them()))
    assert sorted(turn.session for turn in live.store.turns()) == sorted(f"s{number}" for number in range(200))


def test_a_full_disk_serves_and_keeps_nothing(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Store, *_: Any) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Store, "add", full)
    assert live.ask("hi", session="a").choices


@sabotaged_by("foresight.agents.live.serve._safely", lambda real: _always(real))
def test_a_database_that_is_full_is_reported_with_each_turn_and_opts_no_session_out_in_silence(live: Served) -> None:
    fill(live.store)
    count, create = len(live.store.turns()), live.client.chat.completions.create
    asked: Any = {"model": "live", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    asked["extra_headers"] = {"X-Session-Id": "a"}
    raw = live.client.chat.completions.with_raw_response.create(**asked)
    assert raw.headers.get("X-Turn-Kept") == "no" and raw.parse().choices
    last = list(create(**asked, stream=True))[-1]
    assert last.choices[0].finish_reason and last.model_dump().get("turn_kept") is False
    out = {**asked, "extra_headers": {"X-Session-Id": "a", "X-Session-Train": "off"}}
    with pytest.raises(openai.InternalServerError, match=r"full\. Send the request again later"):
        create(**out)
    assert len(live.store.turns()) == count
    make_room(live.store)
    raw = live.client.chat.completions.with_raw_response.create(**asked)
    assert "X-Turn-Kept" not in raw.headers and len(live.store.turns()) == count + 1
    assert "turn_kept" not in list(create(**asked, stream=True))[-1].model_dump()
    create(**out)
    assert len(live.store.turns()) == count


def _always(real: Any) -> Any:
    async def kept(*given: Any) -> bool:
        return bool(await real(*given)) or True

    return kept

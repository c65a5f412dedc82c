"""OpenAI's completions for tests: a tiny model behind HTTP that speaks as several servers do, and that can fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from foresight.nets.language import pretrained
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation.decoding import generate

FORMS = ("token_ids", "response_token_ids", "words", "content", "text")


class Stub:
    """What the server does and has seen. `faults` are taken one by one by the requests for completions that come in:

    a number is an HTTP status, "cut" ends the connection in the middle of an answer, "dead" ends it at once,
    "silent" sends nothing for a second, None is no fault. `always` is a fault of all that follow. With `strips`, stop
    texts are left out of texts; with `reports`, this field of a row is what ended it.
    """

    def __init__(
        self,
        model: LanguageModel,
        form: str = "token_ids",
        reloads: bool = True,
        strips: bool = False,
        reports: str = "",
    ) -> None:
        self.model, self.form, self.reloads, self.strips, self.reports = model, form, reloads, strips, reports
        self.requests: list[dict[str, Any]] = []
        self.loaded: list[str] = []
        self.faults: list[Any] = []
        self.always: Any = None
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.url = ""

    def fault(self) -> Any:
        with self.lock:
            return self.faults.pop(0) if self.faults else self.always

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.requests.append(body)
            generator = torch.Generator().manual_seed(body["seed"])
            batch = generate(
                self.model, [body["prompt"]], body["n"], body["max_tokens"], body["temperature"], generator,
                top_k=body.get("top_k", 0), top_p=body.get("top_p", 1.0), stop=body.get("stop", ()),
            )  # fmt: skip
        choices = []
        for i in range(body["n"]):
            n = int(batch.length[0, i])
            tokens, logprobs = batch.completion[0, i, :n].tolist(), batch.model_logprob[0, i, :n].tolist()
            reason = "stop" if batch.stopped[0, i] else "length"
            text, stops = self.model.decode(tokens), body.get("stop", ())
            stop = next((stop for stop in stops if text.endswith(stop)), "")
            row: dict[str, Any] = {"index": i, "finish_reason": reason}
            row["text"] = text.removesuffix(stop) if self.strips else text
            if self.reports:
                row[self.reports] = stop or {"stop_reason": None, "matched_stop": tokens[-1]}[self.reports]
            choices.append(row | self.reported(tokens, logprobs))
        return {"choices": choices[::-1]}  # the order is that of the index

    def reported(self, tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
        plain = {"tokens": [self.model.tokenizer.decode([t]) for t in tokens], "token_logprobs": logprobs}
        if self.form in ("token_ids", "response_token_ids"):
            return {self.form: tokens, "logprobs": plain}
        if self.form == "words":
            return {"logprobs": plain | {"tokens": [f"token_id:{t}" for t in tokens]}}
        if self.form == "content":
            return {"logprobs": {"content": [{"id": t, "logprob": x} for t, x in zip(tokens, logprobs, strict=True)]}}
        return {"logprobs": plain}

    def load(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.loaded.append(body["model_path"])
            self.model = pretrained.load(body["model_path"], precision="float32")
        return {"success": True, "message": "ok"}


@contextmanager
def serve(stub: Stub) -> Iterator[Stub]:
    """The server in a thread, at `stub.url`."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def reply(self, document: Any, status: int = 200, cut: bool = False) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.reply({"object": "list", "data": [{"id": "tiny"}]})
            else:
                self.reply({"message": "no such place"}, 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.headers.append(dict(self.headers))
            if self.path == "/update_weights_from_disk" and stub.reloads:
                self.reply(stub.load(body))
                return
            if self.path != "/v1/completions":
                self.reply({"message": "no such place"}, 404)
                return
            fault = stub.fault()
            if isinstance(fault, int):
                self.reply({"error": {"message": "the kettle is on"}}, fault)
            elif fault == "dead":
                self.close_connection = True
                self.connection.close()
            elif fault == "silent":
                time.sleep(1)
            else:
                self.reply(stub.complete(body), cut=fault == "cut")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()

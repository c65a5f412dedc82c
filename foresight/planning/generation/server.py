"""Completions from a server with an OpenAI-compatible API, such as vLLM, SGLang or llama.cpp.

Prompts are sent as token ids, and the sampled ids are returned with their log-probabilities: nothing is tokenized
twice. A server that returns only text can be used for answers and evaluation, but not for training. To sample for
training it must also load the weights of each update: `POST /update_weights_from_disk` with `model_path`, as in SGLang.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from foresight import distributed
from foresight.data.text import TokenBatch, pad
from foresight.errors import LostError, UserError
from foresight.nets.language import pretrained
from foresight.nets.language.model import LanguageModel

TRIES, WAIT = 8, 0.5  # of a request; seconds before the second try, then doubling: a minute in all
PATIENCE = 600.0  # timeout of a request in seconds, over all tries
CONCURRENCY = 64  # concurrent requests: the server batches them
BUSY = (408, 409, 425, 429)  # status codes to retry, as all from 500
REPORTED = ("stop_reason", "matched_stop")  # what ended a row, in vLLM and SGLang: a stop text, or an id or null
KEY = "FORESIGHT_COMPLETER_KEY"  # environment variable with the API key
USER = re.compile(r"(?<=://)[^/?#\s]*@")  # user:password@ of a URL


class ServerError(LostError):
    """The server does not answer any more, after all tries."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One completion from a server; `tokens` and `logprobs` are None if it returns none.

    `stop` is the stop text that ended it, which most servers leave out of `text`; "" if none did, and None if the
    server does not tell.
    """

    text: str
    stopped: bool
    tokens: list[int] | None
    logprobs: list[float] | None
    stop: str | None = ""


class Server:
    """A `Completer` at `url`, for the model whose tokenizer is that of `policy` (None: it can only `chat`).

    With a folder `weights`, readable by the server, the policy's weights are sent before any completion with older
    ones. `report` is called with a message when the server stops answering and when it answers again. The user and
    password of a URL are sent, and stand in no message. Raises UserError if there is no server or it refuses,
    ServerError if it stops answering.
    """

    concurrent = True  # several threads may call it

    def __init__(
        self,
        url: str,
        policy: LanguageModel | None,
        weights: str | Path | None = None,
        tries: int = TRIES,
        wait: float = WAIT,
        patience: float = PATIENCE,
        report: Callable[[str], object] = lambda text: None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(
                f"--completer must be the URL of a server, such as http://localhost:8000/v1, not '{without_user(url)}'."
            )
        self.root = without_user(url).rstrip("/").removesuffix("/v1")
        user = USER.search(url)
        self._user = base64.b64encode(urllib.parse.unquote(user[0][:-1]).encode()).decode() if user else ""
        self._policy, self.weights = policy, None if weights is None else Path(weights).resolve()
        self.tries, self.wait, self.patience, self.report = tries, wait, patience, report
        self._gone, self._lock, self._waited = threading.Event(), threading.Lock(), 0
        self._delivered: list[float] | None = None
        self._lost, self._sending = 0, threading.Lock()  # connections that were lost; one thread sends weights
        self._shows_stop = False  # whether it was seen to return a stop text
        try:
            self.model = str(self._ask("/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"{self.root}/v1/models lists no model: is its API OpenAI-compatible?") from error

    @property
    def policy(self) -> LanguageModel:
        """The model whose tokenizer is used. Raises UserError for a server without one, which can only `chat`."""
        if self._policy is None:
            raise UserError(f"{self.root} was connected to without a model: give --model, whose tokenizer it shares.")
        return self._policy

    def chat(
        self, messages: Sequence[dict[str, str]], max_new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> str:
        """The text of the next message of a conversation. Raises UserError if the answer has another form."""
        return str(self.message(messages, max_new_tokens, temperature, seed)["content"] or "")

    def message(
        self,
        messages: Sequence[dict[str, Any]],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """The next message of a conversation, by `/v1/chat/completions`, in OpenAI's form; `options` such as `tools`.

        Raises UserError if the answer has another form.
        """
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            **options,
        }
        answer = self._ask("/v1/chat/completions", body)
        try:
            message = dict(answer["choices"][0]["message"])
            return {**message, "content": message.get("content")}
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{self.root} does not answer in the form of OpenAI's chat: {answer!r}.") from error

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        group: int = 1,
        max_new_tokens: int = 16,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        choices: Sequence[Any] | None = None,
    ) -> TokenBatch:
        """See `planning.generation.decoding.generate`; the server's own random numbers are seeded by the generator.

        Servers return log-probabilities of the model itself, which equal those of the sampling distribution only at
        temperature 1 (and 0) without truncation. Raises UserError otherwise, and if the server returns no ids.
        """
        if choices:
            raise UserError("choices are not supported with a server: leave --completer out, or choose from its text.")
        if temperature not in (0.0, 1.0) or top_k or top_p < 1:
            raise UserError(
                "A server returns log-probabilities of the model, not of a tempered or truncated distribution: to "
                "train on its completions, sample at temperature 1 with top_p 1 and top_k 0."
            )
        choice_list = self.choices(prompts, group, max_new_tokens, temperature, generator, stop=stop)
        rows = [self._row(choice, bool(stop)) for choice in choice_list]
        prompt, prompt_length = pad(prompts)
        completion, length = pad([tokens for tokens, _ in rows])
        shape = (len(prompts), group, completion.shape[1])
        logprob = torch.zeros(completion.shape)
        for i, (_, logprobs) in enumerate(rows):
            logprob[i, : len(logprobs)] = torch.tensor(logprobs)
        stopped = torch.tensor([choice.stopped for choice in choice_list])
        return TokenBatch(
            prompt,
            prompt_length,
            completion.view(shape),
            length.view(shape[:2]),
            logprob.view(shape),
            stopped.view(shape[:2]),
            logprob.view(shape),
        )

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> list[str]:
        """One completion of each prompt as text, which any server returns."""
        return self.generate_texts(prompts, 1, max_new_tokens, temperature, generator, **options)[0]

    def generate_texts(
        self,
        prompts: Sequence[Sequence[int]],
        group: int,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> tuple[list[str], list[bool]]:
        """`group` completions of each prompt as texts, prompt by prompt, and whether each stopped by itself.

        A text ends with the stop text that ended it. Where the server does not tell, that is the only one, if there is
        one.
        """
        found = self.choices(prompts, group, max_new_tokens, temperature, generator, **options)
        return [self.text(choice, options.get("stop", ())) for choice in found], [choice.stopped for choice in found]

    def text(self, choice: Choice, stops: Sequence[str] = ()) -> str:
        """The text of a choice with its stop text: where the server does not tell, with that of `stops`, if it is one.

        Of one with ids it is our own decoding of them.
        """
        text = choice.text if choice.tokens is None else self.policy.decode(choice.tokens)
        stop = choice.stop if choice.stop is not None else stops[0] if len(stops) == 1 else ""
        return text if stop in text else text + stop

    def deliver(self) -> None:
        """Make the server load the policy's weights, if they changed since the last call."""
        if self.weights is None:
            return
        version = distributed.version(self.policy)
        if version == self._delivered:
            return
        pretrained.save_folder(self.policy.module, self.policy.tokenizer, self.weights)
        reply = self._ask("/update_weights_from_disk", {"model_path": str(self.weights)})
        if reply.get("success") is False:
            raise UserError(f"{self.root} could not load the weights in {self.weights}: {reply.get('message', reply)}")
        self._delivered = version

    def choices(
        self,
        prompts: Sequence[Sequence[int]],
        group: int,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
        **options: Any,
    ) -> list[Choice]:
        """`group` choices of each prompt, prompt by prompt, at any temperature. Requests run concurrently."""
        self.deliver()
        seeds = torch.randint(2**31 - 1, (len(prompts),), generator=generator).tolist()
        body = {
            "model": self.model,
            "n": group,
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "logprobs": 1,
            "return_token_ids": True,
            "stop_token_ids": self.policy.stop_ids,
            **{name: list(value) if name == "stop" else value for name, value in options.items() if value},
        }
        requests = [{**body, "prompt": list(map(int, p)), "seed": s} for p, s in zip(prompts, seeds, strict=True)]
        self._gone.clear()
        pool = ThreadPoolExecutor(min(CONCURRENCY, len(requests)))
        try:
            replies = list(pool.map(self._complete, requests))
        except BaseException:
            self._gone.set()  # the others stop retrying
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        found = [choice for reply in replies for choice in self._choices(reply, group)]
        return self._ended(found, options.get("stop", ()))

    def _complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request. Repeated where a connection was lost meanwhile: a restarted server has its own weights.

        Of several processes none sends weights by itself.
        """
        path = "/v1/completions"
        if self.weights is not None and distributed.processes() == 1:
            for _ in range(self.tries):
                with self._sending:
                    self.deliver()
                lost = self._lost
                reply = self._ask(path, request)
                if self._lost == lost:
                    return reply
        return self._ask(path, request)

    def _ended(self, found: Sequence[Choice], stops: Sequence[str]) -> list[Choice]:
        """The choices with the stop text of each, where the server reports or shows it.

        A server that was seen to show one always does: what stopped without one has ended.
        """
        known = [self._ended_by(choice, stops) for choice in found]
        self._shows_stop |= any(new.stop and choice.stop is None for choice, new in zip(found, known, strict=True))
        return [dataclasses.replace(c, stop="") if c.stop is None and self._shows_stop else c for c in known]

    def _ended_by(self, choice: Choice, stops: Sequence[str]) -> Choice:
        if choice.stop in stops:  # reported
            return choice
        last = choice.tokens[-1] if choice.tokens else None
        if not stops or not choice.stopped or choice.stop is not None or last in self.policy.stop_ids:
            return dataclasses.replace(choice, stop="")
        text = self.text(choice)
        shown = [stop for stop in stops if (stop in text if choice.tokens else text.endswith(stop))]
        first = min(shown, key=lambda stop: (text.find(stop) + len(stop), -len(stop)), default=None)
        return dataclasses.replace(choice, stop=first)

    def _choices(self, answer: dict[str, Any], group: int) -> list[Choice]:
        try:
            rows = sorted(answer["choices"], key=lambda row: row.get("index", 0))
            found = [_choice(row) for row in rows]
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.root} does not answer in the form of OpenAI's completions: {answer!r}.") from error
        if len(found) != group:
            raise UserError(f"{self.root} returned {len(found)} completions, but {group} were requested.")
        return found

    def _row(self, choice: Choice, stop: bool) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities to train on. Raises UserError if the server does not return them."""
        policy, tokens, logprobs = self.policy, choice.tokens, choice.logprobs
        if tokens is None or logprobs is None or len(tokens) != len(logprobs) or not tokens:
            raise UserError(
                f"{self.root} does not return the ids of the sampled tokens with a log-probability for each, and text "
                "is never tokenized again: use it for answers and evaluation only, or train with vLLM or SGLang "
                "(return_token_ids)."
            )
        if max(tokens) >= policy.module.get_input_embeddings().num_embeddings or _differ(
            policy.decode(tokens), choice.text
        ):
            raise UserError(
                f"{self.root} serves a model with another tokenizer than that of the policy: it wrote "
                f"{choice.text!r}, which reads {policy.decode(tokens)!r} here."
            )
        if choice.stopped and not stop and tokens[-1] not in policy.stop_ids:
            raise UserError(
                f"{self.root} leaves out the token that ends a completion, so ending cannot be trained: use it for "
                "answers and evaluation only."
            )
        return tokens, logprobs

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """GET, or POST of a JSON body. Retried with growing waits while the server is unreachable or busy."""
        headers = {"Content-Type": "application/json"}
        if self._user:
            headers["Authorization"] = f"Basic {self._user}"
        elif key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        reason, end, made = "", time.monotonic() + self.patience, 0
        for number in range(self.tries):
            if number:
                self._waits(number, reason, end)
                if self._gone.wait(self.wait * 2 ** (number - 1)):
                    break
            left = end - time.monotonic()
            if left <= 0:
                break
            made += 1
            request = urllib.request.Request(self.root + path, data, headers)
            try:
                with urllib.request.urlopen(request, timeout=left) as answer:
                    found = dict(json.loads(answer.read()))
                self._answered()
                return found
            except urllib.error.HTTPError as error:
                with error:
                    reason = f"{error.code} {_message(error)}"
                if error.code < 500 and error.code not in BUSY:
                    raise UserError(_refusal(self.root, path, error.code, reason)) from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                cause = getattr(error, "reason", error)
                if isinstance(cause, ConnectionError | http.client.HTTPException):
                    with self._lock:
                        self._lost, self._delivered = self._lost + 1, None
                reason = str(getattr(error, "reason", "")) or str(error) or type(error).__name__
            except TypeError as error:
                raise UserError(f"{self.root}{path} does not answer with a JSON object.") from error
        raise ServerError(f"The server at {self.root} does not answer ({reason}), after {_tries(made)}.")

    def _waits(self, number: int, reason: str, end: float) -> None:
        """Report once, for all concurrent requests, that `number` tries failed, and the next wait."""
        with self._lock:
            if number <= self._waited:
                return
            self._waited = number
            rest = sum(self.wait * 2 ** (n - 1) for n in range(number, self.tries))
            most = max(0.0, min(rest, end - time.monotonic()))
            self.report(
                f"The server at {self.root} does not answer ({reason}), after {_tries(number)}: waiting "
                f"{min(self.wait * 2 ** (number - 1), most):.3g} s, then trying again, for {most:.0f} s in all."
            )

    def _answered(self) -> None:
        with self._lock:
            if self._waited:
                self._waited = 0
                self.report(f"The server at {self.root} answers again.")


def without_user(url: str) -> str:
    """The URL as it may be written and shown: without user and password. Anything else is returned as it is."""
    return USER.sub("", url)


def attach(
    state: object, url: str, weights: str | Path | None = None, report: Callable[[str], object] = lambda text: None
) -> None:
    """Let the server at `url` sample for the policy of a State, see `Server`. Raises UserError if it has none."""
    policy = getattr(state, "policy", None)
    if not isinstance(policy, LanguageModel):
        raise UserError("--completer is for algorithms with a language model that samples: leave it out.")
    policy.completer = Server(url, policy, weights, report=report)


def _tries(count: int) -> str:
    return f"{count} {'try' if count == 1 else 'tries'}"


def _choice(row: dict[str, Any]) -> Choice:
    """A completion, with ids in any form that servers use: a list, strings `token_id:7`, or a field of each token."""
    scores = row.get("logprobs") or {}
    tokens = row.get("token_ids") or row.get("response_token_ids")
    logprobs = scores.get("token_logprobs")
    if content := scores.get("content"):
        tokens = tokens or [token.get("id") for token in content]
        logprobs = logprobs or [token.get("logprob") for token in content]
    elif tokens is None and all(str(text).startswith("token_id:") for text in scores.get("tokens") or [""]):
        tokens = [text.removeprefix("token_id:") for text in scores["tokens"]]
    reported = [row[name] for name in REPORTED if name in row][:1]
    stop = (reported[0] if isinstance(reported[0], str) else "") if reported else None
    stopped = row.get("finish_reason") == "stop"
    return Choice(row.get("text") or "", stopped, _all(tokens, int), _all(logprobs, float), stop)


def _all(values: Sequence[Any] | None, kind: Any) -> Any:
    return None if values is None or any(value is None for value in values) else [kind(value) for value in values]


def _differ(ours: str, theirs: str) -> bool:
    """Whether two decodings of the same tokens differ in their first word. (The ends differ by stripping.)"""
    a, b = ours.split(), theirs.split()
    return len(a) > 1 and len(b) > 1 and a[0] != b[0]


def _message(error: urllib.error.HTTPError) -> str:
    """The server's error message."""
    text = ""
    with contextlib.suppress(OSError, http.client.HTTPException):
        text = error.read().decode(errors="replace")
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        body = json.loads(text)
        text = str(body["error"]["message"] if isinstance(body.get("error"), dict) else body["message"])
    return " ".join(text.split())[:200] or str(error.reason)


def _refusal(root: str, path: str, code: int, reason: str) -> str:
    if path.startswith("/update") and code in (404, 405):
        return (
            f"{root} cannot load new weights: it has no {path}, which SGLang has. Use it for answers and evaluation "
            "only (foresight eval RUN --completer URL)."
        )
    if code in (401, 403):
        return (
            f"{root} needs an API key, or a user and password: set the environment variable {KEY}, or give --completer "
            "http://USER:PASSWORD@HOST. No file holds them, so a run that is resumed needs them again."
        )
    return f"{root}{path} refuses: {reason}."

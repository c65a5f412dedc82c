"""The engine of a live server: requests join and leave the decoded batch at any time, and weights change between turns.

New weights are loaded beside the old ones. Then no request is admitted until the running turns have ended with the
weights they began with, the model is exchanged, and the waiting requests begin: none is refused, and every turn was
written by one version.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from foresight.agents.live.settings import LEAST
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation import constraints
from foresight.planning.generation.continuous_batching import ContinuousBatchScheduler
from foresight.planning.generation.sampling import choose

SLOTS = 16  # turns decoded at once
FRESH = 2_000  # turns after which the batch is emptied once, so that their prompts are forgotten


@dataclasses.dataclass
class Request:
    """One turn to write. `progress(request)` is called in the engine's thread after each token, and at the end."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    progress: Callable[[Request], None] = lambda request: None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprob: list[float] = dataclasses.field(default_factory=list)
    version: int = -1
    stopped: bool = False  # by the model, not by a limit
    over: bool = False
    canceled: bool = False  # set by the client that hung up
    error: str = ""
    generator: torch.Generator = dataclasses.field(default_factory=torch.Generator)


class Engine:
    """Writes turns with `model`, the weights of `version`, in a thread of its own until `close`."""

    def __init__(self, model: LanguageModel, version: int, slots: int = SLOTS) -> None:
        if not model.capabilities.shared:
            raise UserError("This model cannot be served live: it cannot share prefixes (docs/architectures.md).")
        self.model, self.version, self.slots = model, version, slots
        self._waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._next: tuple[LanguageModel, int] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises UserError for one that cannot be answered."""
        if request.max_new_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, not {request.max_new_tokens}.")
        if len(request.prompt) + request.max_new_tokens > self.model.context:
            raise UserError(
                f"The conversation has {len(request.prompt)} tokens, and with max_tokens {request.max_new_tokens} it "
                f"does not fit the context of {self.model.context}: shorten it, or lower max_tokens."
            )
        if not (request.temperature == 0 or LEAST <= request.temperature <= 10) or not LEAST <= request.top_p <= 1:
            raise UserError(
                f"temperature must be 0 or in [{LEAST:g}, 10] and top_p in [{LEAST:g}, 1], not {request.temperature} "
                f"and {request.top_p}."
            )
        for text in request.stop:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(f"stop must be a text of whole characters, not {text!r}.") from error
        request.generator.manual_seed(request.seed)
        self._waiting.put(request)

    def exchange(self, model: LanguageModel, version: int) -> None:
        """Write with other weights, from the next turns on."""
        self._next = model, version
        self._waiting.put(None)  # wakes the thread

    def close(self) -> None:
        """End the thread after the running step."""
        self._closed = True
        self._waiting.put(None)
        self._thread.join(30)

    def _run(self) -> None:
        while not self._closed:
            if self._next is not None:
                (self.model, self.version), self._next = self._next, None
            first = self._waiting.get()
            if first is not None:
                try:
                    self._batch(first)
                except Exception as error:  # such as memory that ran out: the next batch may be smaller
                    self._failed(f"{type(error).__name__}: {error}")

    @torch.no_grad()
    def _batch(self, first: Request) -> None:
        """Decode until no request is left, or other weights are waiting and the last turn has ended."""
        model, self._rows = self.model, [first]
        scheduler = ContinuousBatchScheduler(model, [first.prompt], 1, 1, model.context)
        scheduler.grow(self.slots)
        with model.precision():
            while True:
                if self._next is None and not self._closed and len(self._rows) < FRESH:
                    self._admit(scheduler)
                if not scheduler.fill():
                    return
                live = scheduler.live().tolist()
                rows = [self._rows[row] for row in scheduler.row[live].tolist()]
                logits = model.logits(scheduler.hidden[torch.tensor(live, device=model.device)])
                for place, request in enumerate(rows):
                    draw = torch.rand(1, generator=request.generator).to(logits.device)
                    token, logprob = choose(logits[place : place + 1], draw, request.temperature, 0, request.top_p)
                    request.version = self.version
                    request.tokens.append(int(token))
                    request.logprob.append(float(logprob))
                    request.stopped = request.tokens[-1] in model.stop_ids or bool(
                        request.stop and constraints.stops_at(model, request.tokens, request.stop)
                    )
                    request.over = request.stopped or len(request.tokens) == request.max_new_tokens or request.canceled
                    request.progress(request)
                over = [slot for slot, request in zip(live, rows, strict=True) if request.over]
                steps = [(slot, r) for slot, r in zip(live, rows, strict=True) if not r.over]
                if over:
                    scheduler.free(torch.tensor(over))
                if steps:
                    fed = torch.tensor([request.tokens[-1] for _, request in steps])
                    scheduler.step(fed, torch.tensor([slot for slot, _ in steps]))

    def _admit(self, scheduler: ContinuousBatchScheduler) -> None:
        """Let waiting requests join the batch."""
        while True:
            try:
                request = self._waiting.get_nowait()
            except queue.Empty:
                return
            if request is not None:
                self._rows.append(request)
                scheduler.add(request.prompt)

    def _failed(self, error: str) -> None:
        for request in self._rows:
            if not request.over:
                request.over, request.error = True, error
                request.progress(request)


def texts_of(model: LanguageModel, tokens: Sequence[int]) -> str:
    """What can be shown of a turn so far: without a character that is not complete yet."""
    text = model.decode(tokens)
    return text.rstrip("�") if text.endswith("�") else text

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from foresight.agents.live.engine import Engine, Request
from foresight.agents.live.settings import LEAST
from foresight.errors import UserError
from foresight.planning.generation.decoding import generate
from foresight.planning.generation.sampling import choose
from tests import tiny_language
from tests.sabotage import sabotaged_by


def asked(engine: Engine, prompt: list[int], **settings: Any) -> tuple[Request, threading.Event]:
    done = threading.Event()
    request = Request(prompt, **settings, progress=lambda r: done.set() if r.over else None)
    engine.submit(request)
    return request, done


@sabotaged_by(
    "foresight.planning.generation.continuous_batching.ContinuousBatchScheduler.add",
    lambda real: lambda self, prompt: real(self, prompt[:-1]),
)
def test_requests_that_join_at_any_time_are_written_as_alone() -> None:
    model = tiny_language.model()
    engine = Engine(model, 3, slots=2)
    begun = threading.Event()
    first = Request([5, 6, 7], 40, 0.0, progress=lambda r: begun.set())
    engine.submit(first)
    assert begun.wait(20)
    prompts = [[8, 9], [10, 11, 12, 13], [14], [15, 16]]
    others = [asked(engine, prompt, max_new_tokens=12, temperature=0.0) for prompt in prompts]
    for (request, done), prompt in zip(others, prompts, strict=True):
        assert done.wait(20) and request.version == 3
        alone = generate(model, [prompt], 1, 12, 0.0)
        assert request.tokens == alone.completion[0, 0, : alone.length[0, 0]].tolist()
        assert torch.allclose(torch.tensor(request.logprob), alone.logprob[0, 0, : len(request.tokens)], atol=1e-4)
    engine.close()
    assert not engine.alive


def test_a_seed_repeats_a_turn_in_any_company() -> None:
    engine = Engine(tiny_language.model(), 0, slots=3)
    found = [asked(engine, [5, 6], max_new_tokens=10, seed=seed) for seed in (1, 2, 1)]
    assert all(done.wait(20) for _, done in found)
    one, two, again = (request.tokens for request, _ in found)
    assert one == again != two
    engine.close()


@sabotaged_by("foresight.agents.live.engine.Engine.exchange", lambda real: lambda self, model, version: None)
def test_weights_change_between_turns_and_no_request_is_refused() -> None:
    old, new = tiny_language.model(0), tiny_language.model(1)
    engine, gate, begun = Engine(old, 0, slots=2), threading.Event(), threading.Event()

    def slowly(request: Request) -> None:
        begun.set()
        assert gate.wait(20)

    running = Request([5, 6], 20, 0.0, progress=slowly)
    engine.submit(running)
    assert begun.wait(20)
    engine.exchange(new, 1)  # in the middle of a turn
    later, done = asked(engine, [5, 6], max_new_tokens=20, temperature=0.0)
    gate.set()
    assert done.wait(20)
    for request, version, model in ((running, 0, old), (later, 1, new)):
        alone = generate(model, [[5, 6]], 1, 20, 0.0)
        assert request.version == version
        assert request.tokens == alone.completion[0, 0, : alone.length[0, 0]].tolist()
    engine.close()


def test_a_client_that_hangs_up_frees_its_slot() -> None:
    engine = Engine(tiny_language.model(), 0, slots=1)
    gone = Request([5], 60, 1.0, stop=("never",))
    gone.progress = lambda r: setattr(r, "canceled", True)
    engine.submit(gone)
    _, done = asked(engine, [5], max_new_tokens=3)
    assert done.wait(20) and gone.over and len(gone.tokens) <= 2
    engine.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"max_new_tokens": 0}, "must be at least 1, not 0"), ({"max_new_tokens": 64}, "does not fit"),
     ({"max_new_tokens": 3, "temperature": -1.0}, "temperature"), ({"max_new_tokens": 3, "top_p": 0.0}, "top_p"),
     # These would fail in the loop, with the turns of all others.
     ({"max_new_tokens": 3, "temperature": 1e-40}, "temperature"), ({"max_new_tokens": 3, "top_p": 1e-300}, "top_p"),
     ({"max_new_tokens": 3, "stop": ("\ud800",)}, "stop must be a text of whole characters")],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(settings: dict[str, Any], words: str) -> None:
    engine = Engine(tiny_language.model(), 0)
    with pytest.raises(UserError, match=words):
        engine.submit(Request([5], **settings))
    engine.close()


def test_the_least_temperature_and_share_leave_a_token() -> None:
    logits = 40 * torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    for temperature, top_p in ((LEAST, 1.0), (1.0, LEAST), (LEAST, LEAST)):
        token, logprob = choose(logits, torch.rand(64), temperature, 0, top_p)
        assert torch.equal(token, logits.argmax(-1)) and logprob.isfinite().all()


def test_a_failure_of_one_batch_is_reported_and_the_next_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_language.model()
    engine, real = Engine(model, 0), model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: 1 / 0)
    request, done = asked(engine, [5], max_new_tokens=3)
    assert done.wait(20) and "ZeroDivisionError" in request.error
    monkeypatch.setattr(model, "logits", real)
    request, done = asked(engine, [5], max_new_tokens=3)
    assert done.wait(20) and not request.error and request.tokens
    engine.close()

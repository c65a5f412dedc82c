"""A server gives the very rows that the model would, or is refused; and it may fail in the middle."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from foresight.algorithms.language import grpo
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.planning.generation import rollout
from foresight.planning.generation.server import KEY, Server, ServerError, attach, without_user
from foresight.training.options import build_config
from tests import tiny_language
from tests.openai_server import FORMS, Stub, serve
from tests.sabotage import sabotaged_by

PROMPTS = [[3, 4, 5, 6, 7], [3, 4, 9], [3, 4, 5, 8]]
TEXTS = ["1+1?", "22+3?", "4?"]


def _model(seed: int = 0):
    model = tiny_language.model(seed)
    model.stop_ids = [0, 30, 31, 32, 33]
    return model


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _answers(model) -> list[str]:
    """What a language algorithm's `act` answers to the texts."""
    state = SimpleNamespace(policy=model, config=SimpleNamespace(max_new_tokens=6), generator=None)
    return rollout.answer(state, TEXTS)[0]


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serve(Stub(_model())) as one:
        yield one


def _server(stub: Stub, **options) -> Server:
    return Server(stub.url, _model(), **{"tries": 3, "wait": 0.01, **options})


def reversed_choices(original):
    return lambda self, answer, group: original(self, answer, group)[::-1]


def late(original):
    return lambda values, kind: original([values[-1], *values[:-1]] if kind is float else values, kind)


@sabotaged_by("foresight.planning.generation.server._all", late)
@pytest.mark.parametrize("form", FORMS[:-1])
def test_rows_are_those_that_were_sampled_in_every_form_that_has_ids(form):
    with serve(Stub(_model(), form)) as stub:
        batch = _server(stub)(PROMPTS, 4, 8, 1.0, _seeded())
    assert batch.prompts() == PROMPTS
    assert [request["prompt"] for request in sorted(stub.requests, key=lambda r: PROMPTS.index(r["prompt"]))] == PROMPTS
    assert batch.length.min() < 8 and batch.stopped.any() and not batch.stopped.all()
    exact = _model().logprob(batch)[0].detach()
    torch.testing.assert_close(batch.logprob, exact, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.model_logprob, exact, atol=1e-5, rtol=0)
    last = batch.completion.gather(-1, batch.length[..., None] - 1)[..., 0]
    assert torch.equal(torch.isin(last, torch.tensor(_model().stop_ids)), batch.stopped)
    assert (batch.completion[~batch.mask] == 0).all()


@sabotaged_by("foresight.planning.generation.server.Server._choices", reversed_choices)
def test_groups_and_prompts_keep_their_order(stub):
    batch = _server(stub)(PROMPTS, 3, 6, 1.0, _seeded(1))
    for request in list(stub.requests):
        p = PROMPTS.index(request["prompt"])
        again = stub.complete(request)["choices"][::-1]
        for g, choice in enumerate(again):
            assert batch.completion[p, g, : batch.length[p, g]].tolist() == choice["token_ids"]


def test_equal_prompts_get_seeds_of_their_own(stub):
    batch = _server(stub)([PROMPTS[0]] * 6, 1, 8, 1.0, _seeded())
    assert len({request["seed"] for request in stub.requests}) == 6
    assert len({tuple(row) for row in batch.completion[:, 0].tolist()}) > 1


def test_a_server_without_ids_answers_but_cannot_be_trained_with():
    with serve(Stub(_model(), "text")) as stub:
        server = _server(stub)
        with pytest.raises(UserError, match=r"never tokenized again: use it for answers and evaluation only"):
            server(PROMPTS, 2, 6, 1.0, _seeded())
        model = _model()
        model.completer = server
        assert _answers(model) == _answers(_model())


@pytest.mark.parametrize("form", FORMS)
def test_greedy_answers_of_a_server_are_those_of_its_model(form):
    with serve(Stub(_model(), form)) as stub:
        model = _model()
        attach(type("State", (), {"policy": model}), stub.url)
        answers = _answers(model)
    assert answers == _answers(_model())
    assert not stub.loaded  # with the weights that it has


def test_options_are_passed_on(stub):
    server = _server(stub)
    server.answers(PROMPTS, 6, 0.7, _seeded(), top_k=3, top_p=0.9, stop=["a"])
    assert {key: stub.requests[0][key] for key in ("temperature", "top_k", "top_p", "stop", "max_tokens", "n")} == {
        "temperature": 0.7, "top_k": 3, "top_p": 0.9, "stop": ["a"], "max_tokens": 6, "n": 1
    }  # fmt: skip
    assert stub.requests[0]["model"] == "tiny"
    for fields in ({"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.9}):
        with pytest.raises(UserError, match="sample at temperature 1"):
            server(PROMPTS, 1, 6, **fields)


def test_a_stop_text_ends_a_row_without_a_stop_token(stub):
    batch = _server(stub)(PROMPTS, 8, 12, 1.0, _seeded(), stop=["a", "b", "c", "d", "e", "f"])
    last = batch.completion.gather(-1, batch.length[..., None] - 1)[..., 0]
    assert (batch.stopped & ~torch.isin(last, torch.tensor(_model().stop_ids))).any()


def left_out(original):
    return lambda self, choice, stops=(): choice.text


@sabotaged_by("foresight.planning.generation.server.Server.text", left_out)
def test_a_stop_text_that_a_server_leaves_out_is_put_back(stub):
    stub.form, model = "text", _model()

    def answers(strips, reports=""):
        stub.strips, stub.reports = strips, reports
        return Server(stub.url, model).generate_texts(PROMPTS[:1], 12, 8, 1.0, _seeded(), stop=["a"])

    texts, stopped = answers(strips=False)
    assert any(text.endswith("a") for text in texts) and not all(text.endswith("a") for text in texts)
    for reports in ("stop_reason", "matched_stop"):
        assert answers(strips=True, reports=reports) == (texts, stopped)
    guessed, _ = answers(strips=True)  # it does not tell: what stopped did so at the only stop text
    for text, guess, ended in zip(texts, guessed, stopped, strict=True):
        assert guess == (text if text.endswith("a") or not ended else text + "a")


# ---- weights --------------------------------------------------------------------------------------------------------


@sabotaged_by("foresight.planning.generation.server.Server.deliver", lambda f: lambda self: None)
def test_each_update_is_sampled_from(tmp_path):
    """The server begins with other weights altogether; the learner must never notice."""
    task = TextTask("t", [Example(p) for p in ("1?", "2?", "3?", "4?")], [Example("5?")], _count_a)
    config = build_config(
        grpo.Config,
        tiny_language.folder(),
        steps=4,
        prompts=4,
        group=4,
        max_new_tokens=6,
        precision="float32",
        learning_rate=1e-2,
    )
    with serve(Stub(tiny_language.model(7))) as stub:
        state = grpo.build(config)
        attach(state, stub.url, tmp_path / "served")
        errors = [metrics.get("sampler_error") for _, metrics, _ in grpo.train(config, task, state)]
    assert max(error for error in errors if error is not None) < 1e-4
    assert len(stub.loaded) == 4 and set(stub.loaded) == {str(tmp_path / "served")}


def _count_a(examples, completions):
    return [float(sum(map(c.count, "abcde"))) for c in completions]


def test_weights_that_did_not_change_are_not_sent_again(stub, tmp_path):
    model = _model()
    server = Server(stub.url, model, tmp_path / "served", wait=0.01)
    server(PROMPTS, 1, 4, 1.0, _seeded())
    server(PROMPTS, 1, 4, 1.0, _seeded())
    assert len(stub.loaded) == 1
    with torch.no_grad():
        next(model.parameters())[0, 0].add_(1.0)
    server(PROMPTS, 1, 4, 1.0, _seeded())
    assert len(stub.loaded) == 2


def test_a_restarted_server_is_sent_the_weights_again(tmp_path):
    """It dropped connections, and has the weights with which it was started."""
    policy = _model(1)
    with serve(Stub(_model(0))) as stub:
        server = Server(stub.url, policy, tmp_path / "served", tries=3, wait=0.01)
        for times in (1, 2):
            batch = server(PROMPTS, 2, 6, 1.0, _seeded())
            torch.testing.assert_close(batch.logprob[batch.mask], policy.logprob(batch)[0][batch.mask])
            assert len(stub.loaded) == times
            stub.model, stub.faults = _model(0), ["dead"]


def test_a_server_that_cannot_load_weights_is_recognized(tmp_path):
    with serve(Stub(_model(), reloads=False)) as stub:
        server = Server(stub.url, _model(), tmp_path / "served", wait=0.01)
        with pytest.raises(UserError, match=r"cannot load new weights.*evaluation only"):
            server(PROMPTS, 1, 4, 1.0, _seeded())


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [500, 503, 429, "cut", "dead"])
def test_a_fault_that_passes_is_tried_again(stub, fault):
    whole = _server(stub)(PROMPTS, 2, 6, 1.0, _seeded())
    stub.faults = [fault, fault]
    again = _server(stub)(PROMPTS, 2, 6, 1.0, _seeded())
    assert torch.equal(whole.completion, again.completion)


@pytest.mark.parametrize("fault", [500, "cut", "dead"])
def test_a_fault_that_stays_ends_the_rollout_in_words(stub, fault):
    server = _server(stub)
    stub.faults, stub.always = [None], fault  # one prompt is answered, then no more
    with pytest.raises(ServerError, match=rf"The server at {stub.url} does not answer \(.+\), after 3 tries"):
        server(PROMPTS, 2, 6, 1.0, _seeded())
    stub.always = None
    assert server(PROMPTS, 2, 6, 1.0, _seeded()).length.shape == (3, 2)  # and is used again once it is back


def in_silence(original):
    def mutant(self, *given, report=None, **options):
        return original(self, *given, **options)

    return mutant


@sabotaged_by("foresight.planning.generation.server.Server.__init__", in_silence)
def test_waiting_for_a_server_is_reported_once_for_all_requests(stub):
    reported: list[str] = []
    server = _server(stub, report=reported.append)
    server(PROMPTS, 1, 4, 1.0, _seeded())
    assert reported == []
    stub.faults = [503, 503, 503, 503]  # three requests are under way
    server(PROMPTS, 1, 4, 1.0, _seeded())
    waits = [text for text in reported if "after 1 try" in text]
    assert len(waits) == 1 and f"The server at {stub.url} does not answer (503 the kettle is on)" in waits[0]
    assert "waiting 0.01 s, then trying again, for 0 s in all" in waits[0] and reported[-1].endswith("answers again.")
    reported.clear()
    with pytest.raises(ServerError):
        Server("http://127.0.0.1:9", _model(), tries=3, wait=0.3, report=reported.append)
    assert [text.partition("after ")[2] for text in reported] == [
        "1 try: waiting 0.3 s, then trying again, for 1 s in all.",
        "2 tries: waiting 0.6 s, then trying again, for 1 s in all.",
    ]


def test_a_silent_server_is_given_up_in_time(stub):
    server = _server(stub, patience=0.2, tries=8)
    stub.always, began = "silent", time.monotonic()
    with pytest.raises(ServerError, match=r"does not answer \(timed out\), after 1 try"):
        server(PROMPTS, 2, 6, 1.0, _seeded())
    assert time.monotonic() - began < 1  # all tries together


def test_what_a_server_refuses_is_reported_at_once(stub):
    server = _server(stub)
    stub.always = 400
    with pytest.raises(UserError, match="refuses: 400 the kettle is on") as caught:
        server(PROMPTS, 1, 6, 1.0, _seeded())
    assert not isinstance(caught.value, ServerError)
    stub.always = 401
    with pytest.raises(UserError, match=KEY):
        server(PROMPTS, 1, 6, 1.0, _seeded())


def test_the_key_is_sent_where_there_is_one(stub, monkeypatch):
    _server(stub)(PROMPTS, 1, 2)
    assert all("Authorization" not in headers for headers in stub.headers)
    monkeypatch.setenv(KEY, "sesame")
    _server(stub)(PROMPTS, 1, 2)
    assert stub.headers[-1]["Authorization"] == "Bearer sesame"


def test_a_server_that_is_not_there_or_is_another_kind(stub):
    with pytest.raises(ServerError, match="does not answer"):
        Server("http://127.0.0.1:9", _model(), tries=2, wait=0.01)
    with pytest.raises(UserError, match="refuses: 404"):
        Server(stub.url + "/elsewhere", _model())
    assert Server(stub.url + "/v1/", _model()).root == stub.url


def test_an_answer_in_another_form_is_an_error(stub, monkeypatch):
    server = _server(stub)
    monkeypatch.setattr(stub, "complete", lambda body: {"result": "hello"})
    with pytest.raises(UserError, match="not answer in the form"):
        server(PROMPTS, 1, 4)
    monkeypatch.setattr(stub, "complete", lambda body: {"choices": []})
    with pytest.raises(UserError, match="returned 0 completions, but 1"):
        server(PROMPTS, 1, 4)


def _choice(**fields):
    row = {"index": 0, "text": "ab", "finish_reason": "stop", "token_ids": [13, 14, 0]}
    return lambda body: {"choices": [{**row, "logprobs": {"token_logprobs": [-1.0, -1.0, -0.5]}, **fields}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": [13, 14]}, "does not return the ids"),
        ({"token_ids": []}, "does not return the ids"),
        ({"logprobs": None}, "does not return the ids"),
        ({"logprobs": {"token_logprobs": [None, -1.0, -1.0]}}, "does not return the ids"),
        ({"token_ids": [13, 999, 0]}, "another tokenizer"),
        ({"token_ids": [15, 14, 16], "text": "hi there"}, "another tokenizer"),
        ({"token_ids": [13, 14, 15], "text": "abc"}, "leaves out the token that ends"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(stub, monkeypatch, fields, message):
    server = Server(stub.url, tiny_language.model(), wait=0.01)
    monkeypatch.setattr(stub, "complete", _choice())
    assert server(PROMPTS[:1], 1, 4).length.item() == 3
    monkeypatch.setattr(stub, "complete", _choice(**fields))
    with pytest.raises(UserError, match=message):
        server(PROMPTS[:1], 1, 4)


def test_only_a_state_that_has_a_policy_can_be_completed_for(stub):
    with pytest.raises(UserError, match="with a language model that samples"):
        attach(object(), stub.url)


def test_user_and_password_of_a_url_are_sent_and_not_shown(stub, monkeypatch):
    monkeypatch.setenv(KEY, "of another server")
    server = Server(stub.url.replace("://", "://ann:p%40ss@"), _model(), tries=1)
    server.answers(PROMPTS[:1], 2, generator=_seeded())
    assert stub.headers[-1]["Authorization"] == "Basic " + base64.b64encode(b"ann:p@ss").decode()
    stub.always = 500
    with pytest.raises(ServerError, match=rf"The server at {stub.url} does not answer"):
        server.answers(PROMPTS[:1], 2, generator=_seeded())
    with pytest.raises(UserError, match=r"not 'ftp://x/v1'"):
        Server("ftp://ann:p%40ss@x/v1", None)


@pytest.mark.parametrize("text", ["smollm2", "runs/a@b", "Rules.py:rate", "http://x/v1?a=b@c", "http://[::1]:80/@"])
def test_what_has_no_user_is_left_as_it_is(text):
    assert without_user(text) == text

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from typing import Any

import pytest
import torch

from foresight.envs.text.task import Example
from foresight.envs.tools.episode import Reply
from foresight.errors import LostError
from foresight.planning.generation import decoding, multi_turn, rollout
from tests import tiny_language
from tests.sabotage import sabotaged_by
from tests.tiny_conversations import Concurrent, Echo, converse, model, task


def test_limits_end_a_conversation() -> None:
    policy = model()
    one = converse(policy, task(turns=5, most=1), tokens=30)
    assert set(one.parts["turns"]) == {1.0} and not one.batch.stopped.any()
    long = converse(policy, task(turns=50, most=50), tokens=12)
    assert int((long.batch.prompt_length[:, None] + long.batch.length).max()) <= policy.context


def test_a_single_turn_is_a_completion() -> None:
    policy = model()
    what = task(turns=1)
    found = converse(policy, what)
    plain = rollout.complete(
        policy, [[{"role": "user", "content": str(e.prompt)}] for e in what.train[:3]], 2, 4, 1.0,
        torch.Generator().manual_seed(1),
    )  # fmt: skip
    assert torch.equal(found.batch.completion, plain.completion) and torch.equal(found.batch.logprob, plain.logprob)
    assert found.batch.own.sum() == plain.length.sum()


def test_greedy_conversations_repeat() -> None:
    first, second = (converse(model(), task(), group=1, temperature=0.0) for _ in range(2))
    assert first.texts == second.texts and torch.equal(first.batch.completion, second.batch.completion)


@pytest.mark.parametrize("way", ["overlapping", "few slots", "requests"])
def test_overlapping_conversations_are_those_of_rounds(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, what = model(), task(turns=4)
    policy.completer = functools.partial(decoding.generate, policy)
    rounds = converse(policy, what, group=3, tokens=12, temperature=0.0)
    policy.completer = None
    if way == "few slots":
        monkeypatch.setattr(multi_turn, "SLOTS", 2)
    if way == "requests":
        policy.completer = Concurrent(policy)
    found = converse(policy, what, group=3, tokens=12, temperature=0.0)
    assert found.texts == rounds.texts and found.parts == rounds.parts and max(found.parts["turns"]) > 1
    assert torch.equal(found.batch.completion, rounds.batch.completion)
    assert torch.equal(found.batch.own, rounds.batch.own)
    assert torch.allclose(found.batch.logprob, rounds.batch.logprob, atol=1e-4)


class Patient:
    """The first conversation is answered only when the others are over."""

    slow = True

    def __init__(self, waits: bool, left: list[int], over: threading.Event) -> None:
        self.waits, self.left, self.over, self.count = waits, left, over, 0

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": "go"}]

    def turn(self, text: str) -> Reply:
        self.count += 1
        if self.waits:
            assert self.over.wait(20)
        elif self.count == 3:
            self.left.pop()
            if not self.left:
                self.over.set()
        return Reply({"role": "user", "content": "x"} if self.count < 3 else None)

    def parts(self) -> dict[str, float]:
        return {"outcome": 1.0}


@sabotaged_by("foresight.planning.generation.dialogue.end_turn", lambda real: _never_over(real))
def test_a_slow_environment_is_waited_for_by_its_own_conversation_only() -> None:
    policy = model()
    policy.stop_ids = list(range(len(tiny_language.CHARACTERS)))  # every token ends a turn
    made, left, over = list[Patient](), [1, 2], threading.Event()

    def begin(example: Example) -> Patient:
        made.append(Patient(not made, left, over))
        return made[-1]

    what = dataclasses.replace(task(), episode=begin)
    found = converse(policy, what, group=1, tokens=2)  # would not return if the others waited for the first
    assert [one.count for one in made] == [3, 3, 3] and found.batch.stopped.all()
    mask = found.batch.mask
    assert torch.allclose(policy.logprob(found.batch, 1.0)[0][mask], found.batch.logprob[mask], atol=1e-4)


def _never_over(real: Any) -> Any:
    def cut(policy: Any, row: Any, stopped: bool, *rest: Any) -> None:
        real(policy, row, stopped, *rest)
        row.over = False
        row.cut = row.cut or row.turns == 3

    return cut


class Stuck(Echo):
    """Its environment waits at one point of the episode about the question 1."""

    def __init__(self, question: str, point: str, slow: bool) -> None:
        super().__init__(question, 2)
        self.point, self.slow = point, slow
        self._pass("begin")

    def _pass(self, point: str) -> None:
        if (self.question, self.point) == ("1", point) and self.left == 2 - (point == "parts") * 2:
            time.sleep(1.5)

    def turn(self, text: str) -> Reply:
        self._pass("turn")
        return super().turn(text)

    def parts(self) -> dict[str, float]:
        self._pass("parts")
        return {"outcome": 0.5}


def stuck(way: str, point: str) -> Any:
    policy = model()
    policy.stop_ids = list(range(len(tiny_language.CHARACTERS)))  # every token ends a turn
    policy.completer = {"rounds": functools.partial(decoding.generate, policy), "requests": Concurrent(policy)}.get(way)
    begin = lambda one: Stuck(str(one.prompt), point, way == "slow")  # noqa: E731
    rows = [Example(str(i), columns={"episode_seconds": 0.05 if i == 1 else 60.0}) for i in range(3)]
    return converse(policy, dataclasses.replace(task(), train=rows, episode=begin), group=1)


@sabotaged_by("foresight.planning.generation.dialogue._ask", lambda real: lambda row, call: call())
def test_an_episode_whose_environment_never_ends_is_cut() -> None:
    found = stuck("at once", "turn")
    assert found.parts == {"outcome": [0.5, 0.0, 0.5], "turns": [2.0, 1.0, 2.0], "late": [0.0, 1.0, 0.0]}
    assert found.batch.stopped.flatten().tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("way", "point"), [("slow", "turn"), ("rounds", "turn"), ("requests", "turn"), ("slow", "parts")]
)
def test_limits_of_seconds_hold_in_every_way(way: str, point: str) -> None:
    found = stuck(way, point)
    assert found.parts["late"] == [0, 1, 0] and found.parts["outcome"] == [0.5, 0, 0.5]


def test_an_episode_that_does_not_begin_ends_the_run_with_a_sentence() -> None:
    with pytest.raises(LostError, match=r"An episode of 'echo' did not begin within 0.05 seconds: raise"):
        stuck("at once", "begin")

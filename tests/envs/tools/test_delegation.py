from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from foresight.envs.make import make
from foresight.envs.text.task import Example, TextTask
from foresight.envs.tools.delegation import Delegation
from foresight.envs.tools.episode import scripted
from foresight.envs.tools.make import demonstrations
from foresight.errors import UserError
from foresight.planning.generation import decoding, dialogue, multi_turn
from foresight.planning.generation.dialogue import Dialogue
from tests.sabotage import sabotaged_by
from tests.tiny_conversations import Concurrent, model


class Splitting(Delegation):
    """Whatever the model writes in its first turn, the manager halves its chain."""

    def turn(self, text: str) -> Any:
        if self.depth and not self.members:
            reply = super().turn("?a-b?c-d")
            assert len(reply.members) == 2
            return reply
        return super().turn(text)


def task(depth: int = 1) -> TextTask:
    rows = [{"digits": digits, "cost": 0.2, "depth": depth, "budget": 60} for digits in ("1234", "9876", "5555")]
    examples = [Example(row["digits"], columns={"row": row}) for row in rows]
    return TextTask("halves", examples, examples, None, episode=begin, turns=3)


def begin(example: Example) -> Splitting:
    return Splitting(**example.columns["row"])


def converse(policy: Any, what: TextTask, group: int = 4, temperature: float = 1.0) -> dialogue.Dialogues:
    generator = torch.Generator().manual_seed(2)
    return multi_turn.converse(policy, what, what.train, group, 12, temperature, generator)


def every(row: Dialogue) -> list[Dialogue]:
    return [row, *(below for one in row.members for below in every(one))]


@sabotaged_by(
    "foresight.planning.generation.dialogue._answer",
    lambda real: lambda policy, row, *rest: (real(policy, row, *rest), row.tokens and row.tokens.append(5))[0],
)
def test_tokens_of_a_team_are_those_that_were_sampled_and_only_the_managers_are_trained_on() -> None:
    policy = model()
    found = converse(policy, task())
    assert max(found.parts["members"]) == 2 and max(found.parts["turns"]) > 1
    assert int(found.batch.own.sum()) == sum(row.sampled for row in found.rows) == int(found.batch.mask.sum())
    checked = 0
    for row in (one for root in found.rows for one in every(root)):
        batch = dialogue.gather([row], 1).batch
        with torch.no_grad():
            logprob, _ = policy.logprob(batch, 1.0)
        assert torch.allclose(logprob[batch.mask], batch.logprob[batch.mask], atol=1e-4)
        checked += row.parent is not None
    assert checked >= 4


@sabotaged_by(
    "foresight.envs.tools.delegation.Delegation._slices",
    lambda real: lambda self, text: [(0, len(self.digits))] * len(real(self, text)),
)
def test_a_sub_agent_reads_its_slice_alone() -> None:
    found = converse(model(), task())
    for root in found.rows:
        for number, one in enumerate(root.members):
            digits = root.episode.digits[2 * number : 2 * number + 2]
            assert one.messages[0]["content"] == f"a{digits[0]}b{digits[1]}." and one.path == (*root.path, number)


@sabotaged_by("foresight.envs.tools.delegation.Delegation.spend", lambda real: lambda self, tokens: None)
def test_the_budget_of_a_team_holds_and_adds_up() -> None:
    found = converse(model(), task())
    for root, tokens in zip(found.rows, found.parts["team_tokens"], strict=True):
        assert sum(one.sampled for one in every(root)) == tokens <= 60
        assert root.episode.tokens_left == 60 - tokens or any(not one.done for one in every(root))


@pytest.mark.parametrize("way", ["rounds", "requests", "few slots"])
def test_conversations_of_teams_do_not_depend_on_the_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, what = model(), task()
    one = converse(policy, what, temperature=0.0)
    if way == "rounds":
        policy.completer = functools.partial(decoding.generate, policy)
    if way == "few slots":
        monkeypatch.setattr(multi_turn, "CACHED", 1)
    if way == "requests":
        policy.completer = Concurrent(policy)
    other = converse(policy, what, temperature=0.0)
    assert one.texts == other.texts and one.parts == other.parts
    assert torch.equal(one.batch.completion, other.batch.completion)


def test_without_delegation_a_team_is_one_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = model()
    team = converse(policy, task(depth=0))
    monkeypatch.setattr(Splitting, "joined", property(), raising=False)  # no team: slots with shared prefixes
    alone = converse(policy, task(depth=0))
    assert team.texts == alone.texts and torch.equal(team.batch.completion, alone.batch.completion)
    assert max(team.parts["members"]) == 0


class Whole(Delegation):
    """Whatever the model writes in its first turn, the manager gives its whole chain to one sub-agent."""

    def turn(self, text: str) -> Any:
        return super().turn("?a-d" if self.depth and not self.members else text)


@sabotaged_by(
    "foresight.envs.tools.delegation.Delegation._slices",
    lambda real: lambda self, text: [(a, b - 1) for a, b in real(self, text)],
)
def test_one_sub_agent_with_the_whole_chain_is_one_agent() -> None:
    policy, what, one = model(), task(), task(depth=0)
    policy.stop_ids = list(range(0, 40, 3))  # so that no turn is cut
    whole = dataclasses.replace(what, episode=lambda example: Whole(**example.columns["row"]))
    team, alone = (multi_turn.converse(policy, each, each.train, 1, 12, 0.0) for each in (whole, one))
    assert team.parts["members"] == [1.0, 1.0, 1.0] and max(row.sampled for row in alone.rows) > 1
    for manager, agent in zip(team.rows, alone.rows, strict=True):
        (member,) = manager.members
        assert (member.prompt, member.tokens) == (agent.prompt, agent.tokens)
        assert member.episode.answer == agent.episode.answer and member.over


def test_scripts_answer_and_split_half_of_the_chains() -> None:
    found = make("delegation", "text", size=60, held_out=10)
    rows = demonstrations(found, 40)
    managers = [row["messages"] for row in rows if row["messages"][0]["content"].endswith(":")]
    split = sum(messages[1]["content"].startswith("?") for messages in managers)
    assert len(managers) == 40 < len(rows) and 10 < split < 30


@sabotaged_by("foresight.envs.tools.delegation.Delegation.team_tokens", lambda real: lambda self: 0)
def test_the_reward_is_less_the_cost_of_all_tokens_where_it_is_earned() -> None:
    one = Delegation("12", cost=0.5, depth=1, budget=100)
    reply = one.turn("?a-a?b-b")
    for member in reply.members:
        member.spend(10)
        assert member.turn(f"a#{member.digits}").message is None
    assert one.joined().message == {"role": "user", "content": "A1B2:"}
    one.spend(20)
    one.turn("A1=1B2=3#3")
    assert one.parts()["outcome"] == 1 and one.parts()["reward"] == pytest.approx(1 - 0.5 * 40 / 100)
    wrong = Delegation("12", cost=0.5)
    wrong.spend(40)
    wrong.turn("#4")
    assert wrong.parts()["reward"] == wrong.parts()["outcome"] == 0


@pytest.mark.parametrize("text", ["?", "?a-z", "?b-a", "?a-b?", "?a", "??a-b", "?A-B"])
def test_a_delegation_that_cannot_be_read_is_answered(text: str) -> None:
    one = Delegation("123", depth=1, budget=100)
    assert one.turn(text).message == {"role": "user", "content": "!"} and one.parts()["malformed"] == 1
    assert Delegation("123", depth=0, budget=100).turn("?a-b").message == {"role": "user", "content": "!"}


@pytest.mark.parametrize("options", [{"shortest": 1}, {"longest": 27}, {"depth": -1}, {"budget": 0}, {"cost": -1.0}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        make("delegation", "text", size=20, **options)
    with pytest.raises(UserError, match="too many"):
        Delegation.questions(2, 2, size=101)


def test_a_script_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Delegation, "script", lambda self, messages: "#x")
    with pytest.raises(UserError, match="earns 0"):
        scripted(Delegation("12"), 3)

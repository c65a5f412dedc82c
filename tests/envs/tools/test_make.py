from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foresight.envs.make import make as make_env
from foresight.envs.text.task import Example
from foresight.envs.tools import calculator, make, orders, tool
from foresight.envs.tools.episode import Toolbox, graded
from foresight.errors import LostError, UserError
from foresight.runtime import catalog
from tests.sabotage import sabotaged_by

ROOT = Path(__file__).parents[3]
OWN = '''
class Doubling:
    """Double a number."""

    instruction = "Be brief."

    @staticmethod
    def questions(size=10):
        return [{"x": x} for x in range(size)]

    def reset(self, row):
        self.x = row["x"]
        return f"Double {self.x}."

    def double(self, x: int) -> int:
        """Twice x."""
        return 2 * x

    def reward(self, answer):
        return float(answer == str(2 * self.x))
'''


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from(["+", "-", "*"]))
def test_the_calculator_computes(a: int, b: int, sign: str) -> None:
    assert calculator.evaluate(f"({a}) {sign} ({b})") == {"+": a + b, "-": a - b, "*": a * b}[sign]


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "9**9**9",
        "x + 1",
        "1.5 * 2",
        "'a' * 9",
        "1 // 0",
        "(" * 300,
        "9" * 150 + "*9",
        "",
        "a.b",
        "[1]",
    ],
)
def test_the_calculator_refuses_everything_else(text: str) -> None:
    with pytest.raises(ValueError):
        calculator.evaluate(text)


@pytest.mark.parametrize("name", ["calculator", "orders"])
def test_scripts_earn_the_whole_outcome_of_every_question(name: str) -> None:
    task = make_env(name, "text", size=250)
    rows = make.demonstrations(task, 150)
    assert len(rows) == 150 and all(row["messages"][0]["role"] == "system" for row in rows)
    held_out = {example.question for example in task.test}
    assert not held_out & {row["messages"][1]["content"] for row in rows}


def test_an_answer_without_the_tool_is_graded_too() -> None:
    episode = Toolbox(calculator.Calculator(), {"a": 12, "b": 12})
    assert episode.turn("It is 144.").message is None and episode.parts() == {
        "outcome": 1.0, "calls": 0.0, "failed_calls": 0.0, "malformed_calls": 0.0,
    }  # fmt: skip
    wrong = Toolbox(calculator.Calculator(), {"a": 12, "b": 12})
    assert wrong.turn("It is 145.").message is None and wrong.parts()["outcome"] == 0
    unfinished = Toolbox(calculator.Calculator(), {"a": 12, "b": 12})
    assert "144" in unfinished.turn(tool.write("calculate", expression="12*12")).message["content"]
    assert unfinished.parts() == {
        "outcome": 0.0, "calls": 1.0, "failed_calls": 0.0, "malformed_calls": 0.0,
    }  # fmt: skip


def test_a_tool_that_is_left_out_is_neither_offered_nor_run() -> None:
    task = make_env("calculator", "text", size=200, without=["calculate"])
    episode = task.episode(task.test[0])
    assert episode.messages()[0] == {"role": "system", "content": "Answer with one number."}
    assert "no tool 'calculate'" in episode.turn(tool.write("calculate", expression="2*2")).message["content"]
    assert make_env("calculator", "text", size=200, without="calculate").episode(task.test[0]).tools == []
    kept = make_env("orders", "text", size=200, without=["add_note"])
    prompt = kept.episode(kept.test[0]).messages()[0]["content"]
    assert "find_order" in prompt and "add_note" not in prompt


def test_the_desk_grades_the_end_state_and_not_the_words() -> None:
    order = {"owner": "Ann", "state": "pending", "days": 0, "final": False}
    row = {"number": 17, "order": order, "customer": "Ann", "wish": "cancel", "reason": None}
    lying = Toolbox(orders.Orders(), row)
    lying.turn("done")
    assert lying.parts()["outcome"] == 0
    right = Toolbox(orders.Orders(), row)
    right.turn(tool.write("find_order", number=17))
    right.turn(tool.write("cancel_order", number=17))
    right.turn("done")
    assert right.parts()["outcome"] == 1
    forbidden = Toolbox(orders.Orders(), {**row, "customer": "Ben"})
    forbidden.turn(tool.write("find_order", number=17))
    forbidden.turn(tool.write("cancel_order", number=17))
    forbidden.turn("refused")
    assert forbidden.parts()["outcome"] == 0  # it was changed for someone else
    noted = Toolbox(orders.Orders(), {**row, "customer": "Ben"})
    noted.turn(tool.write("find_order", number=17))
    noted.turn(tool.write("add_note", number=17, text="asked by Ben"))
    noted.turn("refused")
    assert noted.parts()["outcome"] == 1
    blind = Toolbox(orders.Orders(), {**row, "customer": "Ben"})
    blind.turn("refused")
    assert blind.parts()["outcome"] == 0  # it was not looked up
    late = Toolbox(orders.Orders(), row)
    late.turn(tool.write("cancel_order", number=17))
    late.turn(tool.write("find_order", number=17))
    late.turn("done")
    assert late.parts()["outcome"] == 0  # it was looked up after the decision


def test_the_desk_resets_what_was_looked_up() -> None:
    order = {"owner": "Ann", "state": "delivered", "days": 3, "final": False}
    row = {"number": 17, "order": order, "customer": "Ann", "wish": "return", "reason": "broken"}
    desk = orders.Orders()
    for looks, outcome in ((True, 1), (False, 0), (True, 1)):
        desk.reset(row)
        if looks:
            desk.find_order(17)
        desk.return_order(17, "broken")
        assert desk.reward("done") == outcome


def test_demonstrations_without_rules_use_the_tools_and_tell_no_rule() -> None:
    task = make_env("orders", "text", size=600, rules=False)
    last = [row["messages"][-1]["content"] for row in make.demonstrations(task, 500)]
    assert 0.5 < last.count("done") / 500 < 0.7 and last.count("done") + last.count("refused") == 500
    ruled = make_env("orders", "text", size=600)
    assert [one.prompt for one in ruled.train] == [one.prompt for one in task.train]
    right = 0
    for mine, theirs in zip(task.train, ruled.train, strict=True):
        episode, row = ruled.episode(theirs), mine.columns["row"]
        made = orders.Orders()
        made.reset(row)
        messages = [*episode.messages()]
        while (reply := episode.turn(text := made.script(messages))).message is not None:
            messages += [{"role": "assistant", "content": text}, reply.message]
        right += episode.parts()["outcome"]
    assert right / len(ruled.train) < 0.25  # by luck: it acts and reports at random


def test_the_desk_has_ten_turns_and_asks_before_it_writes() -> None:
    task = make_env("orders", "text", size=200)
    assert task.turns == 10
    assert [one.name for one in task.episode(task.train[0]).tools if one.writes] == [
        "add_note", "cancel_order", "return_order",
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "preset", "turns"), [
    ("sft", "smollm2-orders", 6), ("sft", "smollm2-orders-tools", 6), ("grpo", "smollm2-orders", 4),
])  # fmt: skip
def test_presets_of_the_desk_have_the_turns_of_their_results(name: str, preset: str, turns: int) -> None:
    result = json.loads((ROOT / "results" / f"{name}-{preset}.json").read_text())
    options = catalog.presets(name)[preset]["env_options"]
    assert options == result["settings"]["env_options"] == {"turns": turns}


def test_episodes_of_one_question_do_not_share_a_database() -> None:
    task = make_env("orders", "text", size=200)
    first, second = task.episode(task.train[0]), task.episode(task.train[0])
    number = task.train[0].columns["row"]["number"]
    first.turn(tool.write("cancel_order", number=number))
    assert second.env._orders[number]["state"] == task.train[0].columns["row"]["order"]["state"]


def test_an_environment_of_a_user(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    task = make_env(f"{file}:Doubling", "text", size=20, held_out=5, turns=3)
    assert (len(task.train), len(task.test), task.turns) == (15, 5, 3)
    episode = task.episode(task.train[0])
    assert "Be brief." in episode.messages()[0]["content"] and '"double"' in episode.messages()[0]["content"]
    x = task.train[0].columns["row"]["x"]
    assert f">{2 * x}<" in episode.turn(tool.write("double", x=x)).message["content"]
    episode.turn(str(2 * x))
    assert episode.parts()["outcome"] == 1


@pytest.mark.parametrize(
    ("place", "options", "words"),
    [
        ("mine.py:Tripling", {}, "Tripling"),
        ("nowhere.py:Doubling", {}, "no file"),
        ("mine.py:Doubling", {"sice": 3}, "no option 'sice'"),
        ("mine.py:Doubling", {"turns": 0}, "turns"),
        ("mine.py:Doubling", {"episode_seconds": 0}, "episode_seconds must be more than 0"),
        ("calculator", {"low": 1, "high": 3}, "Lower size"),
        ("calculator", {"trace": True}, "no trace"),
        ("calculator", {"rewards": {"correct": 1}}, "Unknown part of a reward 'correct'.*outcome, process, time"),
        ("calculator", {"rewards": "outcome"}, "give each part its weight, as in rewards={outcome: 1, process: -0.1}"),
        ("calculator", {"without": ["calculator"]}, "calculate"),
        ("calculator", {"without": 3}, "without must be names of tools, such as .calculate., not 3"),
        ("miniwob", {"pages": 3}, "pages must be names joined by .*, not 3"),
    ],
)
def test_mistakes_get_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, options: dict, words: str
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        make_env(place, "text", **options)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("1 / 0", "Doubling raised ZeroDivisionError: division by zero"),
        ("exit(3)", "Doubling raised SystemExit"),
        ("None", "Doubling is {'outcome': None.*return a number from 0 to 1"),
        ("'good'", "Doubling is .*'good'"),
        ("float('inf')", "Doubling is .*inf"),
        ("{'found': 1.0}", "of which one is the 'outcome'"),
        ("{'outcome': 1.0, 'found': [1]}", r"Doubling is .*'found': \[1\]"),
    ],
)
def test_a_reward_that_is_none_names_its_class(tmp_path: Path, reward: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(OWN.replace("float(answer == str(2 * self.x))", reward))
    episode = make_env(f"{tmp_path / 'mine.py'}:Doubling", "text").episode(Example("", columns={"row": {"x": 3}}))
    episode.turn("6")
    with pytest.raises(LostError, match=f"The reward of {words}" if words.startswith("D") else words):
        graded(episode)


def test_a_reward_may_be_any_number_and_not_be_scored(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        OWN.replace("float(answer ==", "{'outcome': answer == '6', 'x': float('nan')} or (")
    )
    episode = make_env(f"{tmp_path / 'mine.py'}:Doubling", "text").episode(Example("", columns={"row": {"x": 3}}))
    episode.turn("6")
    parts = graded(episode)
    assert parts["outcome"] == 1.0 and parts["x"] != parts["x"]


def test_a_reset_that_never_ends_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN.replace('self.x = row["x"]', "import time; time.sleep(9)"))
    with pytest.raises(LostError, match=r"Doubling' did not begin within 0\.05 seconds"):
        make_env(f"{tmp_path / 'mine.py'}:Doubling", "text", episode_seconds=0.05)


def test_a_class_without_tools_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN.replace("def double", "def _double"))
    task = make_env(f"{tmp_path / 'mine.py'}:Doubling", "text")
    with pytest.raises(UserError, match="has no tools"):
        task.episode(task.train[0])


@sabotaged_by("foresight.envs.tools.make.mix", lambda real: lambda *a: _limited(real(*a)))
def test_several_tasks_are_trained_on_in_equal_shares_with_their_own_environments() -> None:
    options = {"held_out": 5, "calculator.high": 200, "notebook.turns": 3, "notebook.episode_seconds": 9.0}
    options |= {"rewards": {"outcome": 1, "process": -0.1}, "notebook.rewards": {"outcome": 2}}
    both = make_env("calculator,notebook", "text", **options)
    weights = {example.columns["task"]: example.columns["weights"] for example in both.train}
    assert weights == {"calculator": {"outcome": 1.0, "process": -0.1}, "notebook": {"outcome": 2.0}}
    names = [example.columns["task"] for example in both.train]
    assert names[:4] == ["calculator", "notebook"] * 2 and names.count("calculator") == names.count("notebook") == 1195
    assert {(e.columns["task"], e.columns["turns"]) for e in both.test} == {("calculator", 6), ("notebook", 3)}
    assert {(e.columns["task"], e.columns["episode_seconds"]) for e in both.test} == {
        ("calculator", math.inf), ("notebook", 9.0),
    }  # fmt: skip
    assert both.turns == 6 and both.episode is not None
    made = [type(both.episode(example).env).__name__ for example in both.train[:2]]
    assert made == ["Calculator", "Notebook"]


def _limited(task: Any) -> Any:
    return dataclasses.replace(task, train=task.train[::2])

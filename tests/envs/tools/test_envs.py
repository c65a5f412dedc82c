"""The bundled environments: their scripts earn everything, and only what they should is earned."""

from __future__ import annotations

from typing import Any

import pytest

from foresight.envs.make import make as make_env
from foresight.envs.tools import adapters, make, python, search, tool
from foresight.envs.tools.babyai import ACTIONS
from foresight.envs.tools.episode import Toolbox, close
from foresight.envs.tools.notebook import Notebook
from foresight.errors import UserError
from tests.sabotage import sabotaged_by


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("python", {"size": 12}, 6),
        ("notebook", {"size": 100}, 60),
        ("search", {"size": 60}, 40),
        ("babyai", {"size": 12}, 6),
    ],
)
def test_scripts_earn_the_whole_outcome_and_silence_none(name: str, options: dict[str, Any], count: int) -> None:
    task = make_env(name, "text", **options)
    assert len(make.demonstrations(task, count)) == count  # raises where a script earns less than 1
    for example in task.train[:5]:
        episode = task.episode(example)
        episode.turn("done")
        assert episode.parts()["outcome"] == 0


def test_a_program_is_run_apart_and_its_errors_are_read() -> None:
    assert python.execute("print(6 * 7)") == "42\n"
    assert "nothing" in python.execute("x = 1")
    episode = Toolbox(python.Python(), {"question": "", "gold": 1})
    for code, words in (
        ("print(1); 1 / 0", "ZeroDivisionError"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "Error"),
        ("this is no program", "SyntaxError"),
        ("import os; os._exit(0)", "its process ended"),
    ):
        text = episode.turn(tool.write("python", code=code)).message["content"]
        assert words in text and "error: ValueError" in text
    assert episode.parts()["failed_calls"] == 4 and episode.parts()["malformed_calls"] == 0


@sabotaged_by("foresight.envs.tools.notebook.Notebook.reset", lambda real: lambda self, row: str(row["request"]))
def test_the_notebook_grades_its_notes_and_is_not_shared() -> None:
    row = {"notes": {"milk": "3"}, "wanted": {"milk": "8"}, "request": "Add 5 to the number in the note milk."}
    first, second = Toolbox(Notebook(), row), Toolbox(Notebook(), row)
    first.turn(tool.write("write_note", name="milk", text="8"))
    assert "3" in second.turn(tool.write("read_note", name="milk")).message["content"]
    for episode in (first, second):
        episode.turn("done")
    assert first.parts()["outcome"] == 1 and second.parts()["outcome"] == 0


def test_search_finds_documents_by_words_and_reads_no_syntax() -> None:
    index = search.Index(["the quick fox", "a slow fox", "bread"])
    assert [number for number, _ in index.search("quick foxes")] == [1, 2]
    assert index.search('" OR text MATCH *') == index.search("text match or") == []
    assert index.read(3) == "bread"
    with pytest.raises(ValueError, match="no document 9"):
        index.read(9)


@sabotaged_by("foresight.envs.tools.search.Search.reward", lambda real: lambda self, answer: {"outcome": 1.0})
def test_an_answer_needs_its_evidence() -> None:
    row = search.Search.questions(size=5)[0]
    texts, _ = search.generated(500, 0)
    firm, person = (texts[number - 1] for number in row["evidence"])
    assert row["firm"] in firm + person and f"was born in {row['city']} " in firm + person
    cited = " ".join(f"[{number}]" for number in row["evidence"])
    long = f"{row['city']} {cited} [{'1' * 5000}]"
    for answer, outcome, found in (
        (f"{row['city']} {cited}", 1, 1), (f"{row['city']} [1]", 0, 1), (cited, 0, 0), (long, 0, 0)
    ):  # fmt: skip
        episode = Toolbox(search.Search(), row)
        episode.turn(answer)
        parts = episode.parts()
        assert (parts["outcome"], parts.get("found", found)) == (outcome, found)
    with pytest.raises(UserError, match="raise documents"):
        search.Search.questions(documents=10, size=20)
    with pytest.raises(UserError, match="documents is 5,000: it must be at most 4,800"):
        search.Search.questions(documents=5000)


def test_every_document_is_reached_by_the_question_of_its_firm_only() -> None:
    texts, rows = search.generated(100, 1)
    assert len(set(texts)) == 100 and len({row["firm"] for row in rows}) == 50
    for row in rows:
        assert sum(text.startswith(row["firm"]) for text in texts) == 1


class Theirs:
    """As written for TRL."""

    def reset(self, x: int, **columns: Any) -> str:
        self.x, self.seen = x, 0
        return f"x is {x}."

    def double(self, value: int) -> int:
        """Twice a value."""
        self.seen = 2 * value
        return self.seen

    def get_reward(self) -> float:
        return float(self.seen == 2 * self.x)


def test_an_environment_of_trl_is_a_task() -> None:
    rows = [{"prompt": [{"role": "user", "content": f"Double {x}."}], "x": x} for x in range(8)]
    task = make.make("theirs", adapters.trl(Theirs, rows), held_out=2)
    example = task.train[0]
    assert example.question.endswith(f"x is {example.columns['row']['x']}.") and "Double" in example.question
    right, wrong = task.episode(example), task.episode(example)
    assert [one.name for one in right.tools] == ["double"]
    right.turn(tool.write("double", value=example.columns["row"]["x"]))
    wrong.turn(tool.write("double", value=99))
    for episode in (right, wrong):
        episode.turn("ok")
    assert right.parts()["outcome"] == 1 and wrong.parts()["outcome"] == 0
    less = make.make("theirs", adapters.trl(Theirs, rows), held_out=2, without=["double"])
    assert less.episode(less.train[0]).tools == []
    with pytest.raises(UserError, match=r"Unknown tool in without 'triple'\. .*double"):
        make.make("theirs", adapters.trl(Theirs, rows), held_out=2, without=["triple"])
    with pytest.raises(UserError, match="get_reward"):
        adapters.trl(Toolbox, rows)
    scored = make.make("theirs", adapters.trl(Theirs, rows, lambda env, answer: 0.25), held_out=2)
    episode = scored.episode(example)
    episode.turn("anything")
    assert episode.parts()["outcome"] == 0.25


class Guess:
    """A Gymnasium environment whose observations and actions are texts."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.number = (seed or 0) % 7
        return "Guess a number below 7.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess = int(action)
        return (
            ("lower" if guess > self.number else "higher"),
            float(guess == self.number),
            guess == self.number,
            False,
            {},
        )


def test_a_gymnasium_environment_with_texts_is_a_task() -> None:
    guess = adapters.gymnasium(lambda seed: Guess(), 9, "Be brief.", 5, lambda env: str(env.number))
    assert (len((task := make.make("guess", guess)).train), len(task.test)) == (8, 1)  # though all begin alike
    episode = guess()
    episode.reset({"seed": 4})
    assert [m["role"] for m in episode.messages()] == ["system", "user"] and guess.turns == 5
    assert episode.turn("two").message["content"].startswith("error: invalid literal")
    assert episode.turn("5").message["content"] == "lower" and episode.turn(" 4 ").message is None
    assert episode.parts() == {"outcome": 1.0, "failed_actions": 1.0}


@pytest.mark.parametrize("given", [False, True])
def test_an_environment_of_another_library_may_be_slow(given: bool) -> None:
    """By an argument, or by an attribute of its own."""

    class Slow(Theirs):
        slow = True

    class SlowGuess(Guess):
        slow = True

    rows = [{"prompt": f"Double {x}.", "x": x} for x in range(8)]
    made = adapters.trl(Theirs if given else Slow, rows, slow=given)
    game = adapters.gymnasium(lambda seed: Guess() if given else SlowGuess(), 9, slow=given)
    for env in (made, game):
        task = make.make("slow", env, held_out=2)
        assert task.episode(task.train[0]).slow is True
    quick = make.make("quick", adapters.trl(Theirs, rows), held_out=2)
    assert quick.episode(quick.train[0]).slow is False


@pytest.mark.parametrize("kind", [Theirs, Guess])
def test_environments_are_closed_after_their_question_and_their_episode(kind: type[Any]) -> None:
    opened: list[Any] = []

    class Held(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            opened.append(self)

        def close(self) -> None:
            """Give the memory back."""
            opened.remove(self)

    rows = [{"prompt": f"Double {x}.", "x": x} for x in range(8)]
    env = adapters.trl(Held, rows) if kind is Theirs else adapters.gymnasium(lambda seed: Held(), 8)
    task = make.make("held", env, held_out=2)
    assert not opened
    episode = task.episode(task.train[0])
    assert len(opened) == 1 and "close" not in str(episode.messages())
    close(episode)
    assert not opened


def test_babyai_in_words() -> None:
    task = make_env("babyai", "text", size=10)
    assert task.turns == 64
    episode = task.episode(task.train[0])
    assert "Mission: " in episode.messages()[1]["content"] and all(
        a in episode.messages()[0]["content"] for a in ACTIONS
    )
    assert "is no action" in episode.turn("fly").message["content"]
    assert "You see: " in episode.turn("turn left").message["content"]

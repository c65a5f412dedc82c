"""The forms of language data: what is read, what each becomes, and which row a mistake is in."""

from __future__ import annotations

import json

import pytest

from foresight.data import forms
from foresight.envs.text import make as text
from foresight.envs.text.task import TextTask
from foresight.errors import UserError
from tests.sabotage import sabotaged_by

USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "good"), ("assistant", "bad")))


def backwards(original):
    def reply(value, place):
        found = original(value, place)
        return {**found, "content": found["content"][::-1]}

    return reply


@sabotaged_by("foresight.data.forms._reply", backwards)
@pytest.mark.parametrize(
    ("row", "kind", "expected"),
    [
        ({"prompt": "q", "level": 3}, "prompt", {"prompt": "q", "level": 3}),
        ({"prompt": "q", "completion": "good"}, "demonstration", {"prompt": "q", "completion": "good"}),
        ({"prompt": [USER], "completion": [GOOD]}, "demonstration", {"prompt": [USER], "completion": "good"}),
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, "preference", {"chosen": "good", "rejected": "bad"}),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, "preference", {"chosen": "good", "rejected": "bad"}),
        (
            {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "preference",
            {"prompt": [USER], "chosen": "good", "rejected": "bad"},
        ),
    ],
)
def test_plain_and_conversational_rows_become_one_shape(row, kind, expected):
    found, rows = forms.check([row], "f")
    assert found == kind
    assert {key: rows[0][key] for key in expected} == expected
    if kind == "prompt":  # it has no answer that could be spoilt
        assert forms._answer([GOOD], "p") == "good"


def test_a_conversation_ends_with_its_completion():
    kind, rows = forms.check([{"messages": [USER, BAD, USER, GOOD]}], "f")
    assert (kind, rows[0]["prompt"], rows[0]["completion"]) == ("demonstration", [USER, BAD, USER], "good")


def test_texts_that_begin_alike_share_a_prompt_up_to_a_space():
    row = forms.check([{"chosen": "what is 1+1? two", "rejected": "what is 1+1? twelve"}], "f")[1][0]
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("what is 1+1?", " two", " twelve")


def test_steps_keep_their_labels():
    steps = {"prompt": "q", "completions": ["a", "b"], "labels": [1, False]}
    row = forms.check([{**steps, "delimiter": ","}], "f")[1][0]
    assert (row["completions"], row["labels"], row["delimiter"]) == (["a", "b"], [True, False], ",")
    with pytest.raises(UserError, match="row 1: 'delimiter' must be the text between two steps, but is ''"):
        forms.check([{**steps, "delimiter": ""}], "f")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, r"row 2: no column 'prompt'\. It has: question"),
        ({"prompt": "q", "completion": "x"}, "row 2 is of the form 'demonstration', but row 1"),
        ({"prompt": [{"role": "user"}]}, "row 2.*a message is .*'role'"),
        ({"prompt": 3}, "row 2.*must be a text or a list of messages"),
    ],
)
def test_a_mistake_is_reported_with_its_row(row, message):
    with pytest.raises(UserError, match=message):
        forms.check([{"prompt": "fine"}, row], "f")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "chosen": "x", "rejected": "x"}, "row 1: 'chosen' and 'rejected' are the same"),
        ({"chosen": "yes", "rejected": "no"}, "row 1: no column 'prompt'"),
        ({"question": "2+3?", "chosen": 5, "rejected": 3}, "row 1: no column 'prompt', and .* not two texts"),
        ({"question": "2+3?", "chosen": "5", "rejected": [BAD]}, "row 1: no column 'prompt', and .* not two texts"),
        ({"prompt": "q", "chosen": "x", "rejected": "y", "margin": float("nan")}, "must be a number that is finite"),
        ({"prompt": "q", "chosen": "x", "rejected": "y", "margin": "big"}, "'margin' must be a number"),
        ({"prompt": "q", "chosen": "x", "rejected": "y", "margin": 10**400}, "must be a number that is finite"),
        ({"prompt": "q", "chosen": [GOOD, BAD], "rejected": [BAD]}, "row 1: 'chosen' must be one message"),
        ({"prompt": "q", "completions": ["a"], "labels": [1, 0]}, "'labels' must be true or false for each of the 1"),
        ({"prompt": "q", "completions": "a", "labels": [1]}, "'completions' must be a list of steps"),
        ({"messages": [USER]}, "must be a conversation that ends with the assistant's message"),
        ({"prompt": "q", "completion": ""}, "'completion' is empty"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": 5}]}, "row 1.*tool_calls is a list of calls, not '5'"),
        ({"conversations": [{"from": [1], "value": "x"}]}, r"row 1.*a message is from \[1\]"),
    ],
)
def test_a_row_that_is_not_what_it_should_be(row, message):
    with pytest.raises(UserError, match=message):
        forms.check([row], "f")


def test_an_empty_file_is_reported():
    with pytest.raises(UserError, match="no rows"):
        forms.check([], "f")


@sabotaged_by("foresight.data.forms._column", lambda original: lambda name, values: list(values))
def test_files_as_other_programs_write_them(tmp_path):
    """A mark before the text, UTF-16, an array over many lines, and tables of commas, semicolons and tabs."""
    rows = [{"prompt": "1+1?", "answer": "2", "level": 1}, {"prompt": 'say "é,\nb"', "answer": "007", "level": None}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    table = 'prompt{0}answer{0}level\r\n1+1?{0}2{0}1\r\n"say ""é,\nb"""{0}007{0}\r\n\r\n'
    for name, data in (
        ("mark.jsonl", lines.encode("utf-8-sig")),
        ("wide.jsonl", lines.encode("utf-16")),
        ("array.json", json.dumps(rows, indent=2).encode()),
        ("array.JSONL", json.dumps(rows).encode()),
        ("table.csv", table.format(",").encode("utf-8-sig")),
        ("sheet.csv", table.format(";").encode()),
        ("table.tsv", table.format("\t").encode()),
    ):
        (tmp_path / name).write_bytes(data)
        assert forms.read(str(tmp_path / name)) == rows, name
    (tmp_path / "odd.csv").write_text("prompt,zip,share,mixed,label\na,007,0.5,1,True\nb,11,1,x,false\n")
    assert forms.read(str(tmp_path / "odd.csv")) == [
        {"prompt": "a", "zip": "007", "share": 0.5, "mixed": "1", "label": True},
        {"prompt": "b", "zip": "11", "share": 1, "mixed": "x", "label": False},
    ]


@pytest.mark.parametrize(
    ("name", "data", "reported"),
    [
        (
            "a.jsonl",
            '{"prompt": "a"}\n{"prompt": "é"}'.encode("latin1"),
            r"line 2 is not UTF-8 \(byte 0xe9\).*iconv -f",
        ),
        ("a.csv", "prompt\né".encode("latin1"), "line 2 is not UTF-8"),
        ("a.json", b'[{"prompt": "a"},\n {"prompt": }]', "line 2 is not JSON: Expecting value"),
        ("a.json", b'[{"prompt": "a"}, 3]', "row 2 must be an object with columns, but is '3'"),
        ("a.json", b"[" * 100_000, "a.json cannot be read as JSON: maximum recursion depth exceeded"),
        (
            "a.jsonl",
            b'{"prompt": ' + b"9" * 5000 + b"}",
            "line 1 cannot be read as JSON: Exceeds the limit .*Shorten it",
        ),
        ("a.json", b'{\n "prompt": "a"}', "line 1 is not JSON.*one object per line, or one array"),
        ("a.csv", b"prompt,answer\na,1\nb,1,2\n", r"row 2 has 3 fields, but .* 2 columns \(prompt, answer\)"),
        ("a.csv", b'prompt\n"a', "is not a table with a header line"),
        ("a.csv", b"", "is not a table with a header line"),
        ("a.csv", b"prompt,prompt\na,b\n", "has several columns named 'prompt'"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported_with_its_line(tmp_path, name, data, reported):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=reported):
        forms.read(str(tmp_path / name))


def test_a_folder_that_is_no_data_set_is_not_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(forms, "MOST_FILES", 2)
    (tmp_path / "inner").mkdir()
    for name in ("a.txt", "b.txt", "inner/c.txt"):
        (tmp_path / name).write_text("a")
    with pytest.raises(UserError, match=f"{tmp_path} is a folder of more than 2 files, which is no data set: name"):
        forms.read(str(tmp_path))


def leaking(original):
    def split(name, examples, held_out, seed, grader):
        return TextTask(name, examples, examples[:100], grader)

    return split


def by_row(original):
    """Rows are held out, and what is left of their prompts is lost."""

    def split(name, examples, held_out, seed, grader):
        test = examples[::6]
        reserved = {e.prompt for e in test}
        return TextTask(name, [e for e in examples if e.prompt not in reserved], test, grader)

    return split


@sabotaged_by("foresight.envs.text.split.split", leaking, by_row)
def test_held_out_rows_take_all_rows_of_their_prompts_and_none_is_lost(tmp_path):
    """Preferences, demonstrations and graded rows alike: as many rows of 100 prompts, and of 6."""
    for count, held in ((100, 102), (6, 100), (2, 300)):
        for columns in ({"chosen": "a", "rejected": "b"}, {"answer": "1"}, {"completion": "1", "level": 2}):
            for options in ({}, {"reward": lambda completions, **_: [1.0] * len(completions)}):
                table = [{"prompt": f"{i % count}?", "number": i, **columns} for i in range(600)]
                task = text.make(_file(tmp_path, table), **options)
                numbers = [[e.columns["number"] for e in side] for side in (task.train, task.test)]
                assert sorted(numbers[0] + numbers[1]) == list(range(600)) and len(numbers[1]) == held
                assert not {e.prompt for e in task.train} & {e.prompt for e in task.test}
                again = text.make(_file(tmp_path, table), **options)
                assert [e.columns for e in again.test] == [e.columns for e in task.test]


def capped(original):
    return lambda name, examples, held_out, *rest: original(name, examples, held_out and min(held_out, 100), *rest)


@sabotaged_by("foresight.envs.text.split.split", capped)
def test_as_many_rows_are_held_out_as_requested(tmp_path):
    file = _file(tmp_path, [{"prompt": f"{i}?", "answer": "1"} for i in range(500)])
    task = text.make(file, held_out=150)
    assert (len(task.train), len(task.test)) == (350, 150)
    assert task.sizes() == "350 examples to train on, 150 held out" and task.given() == ""
    file = _file(tmp_path, [{"prompt": f"{i % 5}?", "answer": "1", "level": i} for i in range(500)])
    task = text.make(file, held_out=150, reward=lambda completions, **_: [1.0] * len(completions))
    assert task.sizes() == "300 examples to train on (3 prompts), 200 held out (2 prompts)"
    assert task.given() == "rewards are computed from prompts, completions, answer, level"
    for wrong in (0, 401, 500, -1):
        with pytest.raises(UserError, match=rf"between 1 and 400 .*of 5 prompts, one of .* but is {wrong}\."):
            text.make(file, held_out=wrong)


def _file(folder, table):
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, table)))
    return str(file)


def test_a_task_without_a_grader_is_reported(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{i}?", "chosen": "g", "rejected": "b"}) for i in range(4)))
    task = text.make(str(file))
    with pytest.raises(UserError, match=r"Nothing scores the answers to .*: give a reward function"):
        task.grade(task.test, ["x"])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi \ud83d", "completion": "x"},
        {"prompt": "q", "chosen": "x", "rejected": "hi \ude00"},
        {"prompt": "q", "completions": ["hi \ud83d"], "labels": [1]},
        {"messages": [USER, {"role": "assistant", "content": "hi \ud83d"}]},
        {"prompt": "q", "tools": '[{"name": "hi \\ud83d"}]'},
    ],
)
def test_half_of_a_surrogate_pair_is_reported_with_its_row(tmp_path, row):
    file = _file(tmp_path, [{"prompt": "q", "score": 1.0, "note": "\ud83d"}])
    assert forms.check(forms.read(file), "f")[0] == "prompt"  # no model reads the note
    with pytest.raises(UserError, match=r"row 1: .*hi .*half of a surrogate pair.*: write the whole one"):
        forms.check(forms.read(_file(tmp_path, [row])), "f")
    forms.check(forms.read(_file(tmp_path, [{"prompt": "hi \U0001f600", "completion": "x"}])), "f")


def test_labels_of_a_table_are_zeros_and_ones():
    row = {"prompt": "q", "completion": "a"}
    for good, bad in ((1, 0), (1.0, 0.0), (True, 0)):
        kind, rows = forms.check([{**row, "label": good}, {**row, "label": bad}], "f")
        assert kind == "labeled" and rows[0]["label"] is True and rows[1]["label"] is False
    kind, rows = forms.check([{**row, "label": label} for label in (0, 1, 2)], "f")  # of classes, say
    assert kind == "demonstration" and [row["label"] for row in rows] == [0, 1, 2]
    assert forms.check([{"prompt": "q", "label": 1}], "f")[1][0]["label"] is not True  # a grader's column


def test_a_prompt_that_is_not_that_of_the_messages_is_refused_if_answers_are_graded(tmp_path):
    system = {"role": "system", "content": "be short"}

    def first(asked, columns, before=(), **options):
        rows = [
            {"prompt": f"{i}?", "messages": [*before, {"role": "user", "content": asked.format(i)}, GOOD], **columns}
            for i in range(4)
        ]
        task = text.make(_file(tmp_path, rows), **options)
        return min((*task.train, *task.test), key=lambda example: example.place).prompt

    def score(completions, **_):
        return [1.0] * len(completions)

    asked = {"role": "user", "content": "0?"}
    assert first("{}?", {"answer": "1"}) == [asked]
    assert first("{}?", {"answer": "1"}, [system]) == [system, asked]  # a prompt need not repeat it
    assert first("say {}", {}) == [{"role": "user", "content": "say 0"}]  # nothing is graded
    named = {"problem": "7?"}, {"prompt": "problem"}
    for columns, options in (({"answer": "1"}, {}), ({}, {"reward": score}), named):
        with pytest.raises(UserError, match=r"row 1: the prompt '.\?' is not what its conversation"):
            first("say {}", columns, **options)

"""Text tasks: what is held out, what is graded, and the messages of a user's mistakes."""

from __future__ import annotations

import json
import math
import re

import pytest

from foresight.data import forms
from foresight.envs.text import make as text
from foresight.envs.text import rewards
from foresight.envs.text.dataset import dataset
from foresight.envs.text.graders import grade_ending, last_integer
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from tests.sabotage import sabotaged_by


def test_addition_reserves_the_same_hundred_questions_for_a_seed():
    task, again, other = text.make("addition"), text.make("addition"), text.make("addition", seed=1)
    assert (len(task.train), len(task.test)) == (300, 100)
    assert not {e.prompt for e in task.train} & {e.prompt for e in task.test}
    assert [e.prompt for e in task.test] == [e.prompt for e in again.test]
    assert {e.prompt for e in task.test} != {e.prompt for e in other.test}
    example = next(e for e in task.train if e.prompt == "What is 7 + 12?")
    assert task.grade([example] * 4, ["7 + 12 = 19.", "It is 18", "19 is 7 + 12", "none"]) == [1, 0, 0, 0]
    assert task.grade([example] * 4, ["It is 19 ", "19, or 19.5.", "It is 19.", "1,019"]) == [1, 0, 1, 0]


def test_larger_sums_are_trained_on_and_the_held_out_questions_stay():
    plain, wide = text.make("addition", high=9, held_out=20), text.make("addition", high=9, held_out=20, train_high=12)
    assert [e.question for e in wide.test] == [e.question for e in plain.test]
    assert len(wide.train) == 13**2 - len(wide.test)
    assert {e.question for e in plain.train} < {e.question for e in wide.train}
    assert not {e.question for e in wide.train} & {e.question for e in wide.test}
    assert "What is 12 + 12?" in {e.question for e in wide.train}
    with pytest.raises(UserError, match="train_high must be at least high"):
        text.make("addition", train_high=18)


def test_largest_has_four_different_numbers_and_their_answer():
    task = text.make("largest", size=50, held_out=10)
    assert (len(task.train), len(task.test)) == (40, 10)
    for example in task.train:
        numbers = [int(word) for word in re.findall(r"\d+", example.question)]
        assert len(set(numbers)) == 4
        assert str(max(numbers)) == example.answer


@pytest.mark.parametrize(
    ("words", "last"),
    [
        ("7 + 12 = 19.", 19),
        ("1,234", 1234),
        ("it is -5", -5),
        ("it is \u22125", -5),
        ("9\u22124", 4),
        ("3.5", None),
        ("5 makes 0.5", None),
        ("", None),
        ("20 apples, 3", 3),
        ("9-4", 4),
        ("15,34,60,71", 71),
        ("7,12,19", 19),
        ("1,000.", 1000),
        ("2,1,000,000", 1_000_000),
        ("3 and " + "7" * 5000, None),
    ],
)
def test_the_last_integer(words, last):
    assert last_integer(words) == last or (words == "9-4" and last_integer(words) == -4)


def first_integer(original):
    return lambda words: next((int(word) for word in re.findall(r"\d+", words)), None)


@sabotaged_by("foresight.envs.text.graders.last_integer", first_integer)
def test_a_grader_gives_its_gold_answer_full_marks_and_a_wrong_one_none():
    for name in ("addition", "largest"):
        task = text.make(name)
        assert task.grade(task.test, [f"Of 1, 2: {e.answer}" for e in task.test]) == [1.0] * len(task.test)
        assert task.grade(task.test, [f"{e.answer} or {int(e.answer) + 1}" for e in task.test]) == [0.0] * len(
            task.test
        )


def test_a_task_whose_gold_answers_fail_is_refused():
    task = TextTask("bad", [Example("a", "1")], [Example("b", "2")], lambda e, c: [0.5] * len(c))
    with pytest.raises(UserError, match="its gold answer '2'"):
        task.check()


def test_any_reasoning_gym_task():
    task = text.make(
        "reasoning_gym:chain_sum", size=20, held_out=5, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    assert 15 < len(task.train) <= 20 and len(task.test) == 5
    assert task.grade(task.test, [f"I think <answer>{e.answer}</answer>" for e in task.test]) == [1.0] * 5
    assert max(task.grade(task.test, ["<answer>no</answer>"] * 5)) < 1 and task.metric == "score"
    assert task.grade(task.test, [f"{e.question} That is {e.answer}." for e in task.test]) == [1.0] * 5
    assert all(0 < score < 1 for score in task.grade(task.test, [f"It is {e.answer}77" for e in task.test]))
    lists = text.make("reasoning_gym:number_sorting", size=5, held_out=2)  # votes are on whole lists
    assert lists.answer_in("<answer>['1', '9']</answer>") != lists.answer_in("<answer>['7', '9']</answer>")
    assert lists.answer_in("I think <answer>['1', '9']</answer>") == lists.answer_in("['1', '9']")
    bases = text.make("reasoning_gym:base_conversion", size=20, held_out=5)  # most, but not all, look like integers
    votes = ("<answer>3c1</answer>", "<answer>7f1</answer>", "<answer>5</answer> I checked it in 2 ways.", "It is 5")
    assert [bases.answer_in(vote) for vote in votes] == ["3c1", "7f1", "5", "5"]
    with pytest.raises(UserError, match="size is 20 and held_out 0: both must be at least 1"):
        text.make("reasoning_gym:chain_sum", size=20, held_out=0)
    options = {"size": 20, "held_out": 5, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    exact = text.make("reasoning_gym:chain_sum", exact=True, **options)
    assert exact.metric == "accuracy" and exact.grade(exact.test, [str(e.answer) for e in exact.test]) == [1.0] * 5
    assert exact.grade(exact.test, [f"It is {e.answer}77" for e in exact.test]) == [0.0] * 5
    with pytest.raises(UserError, match="Did you mean 'chain_sum'"):
        text.make("reasoning_gym:chain_sun")
    with pytest.raises(
        UserError, match=r"'reasoning_gym:chain_sum' 'min_term'\. Did you mean 'min_terms'.*exact.*size"
    ):
        text.make("reasoning_gym:chain_sum", min_term=1)
    with pytest.raises(UserError, match="reasoning-gym cannot make"):
        text.make("reasoning_gym:chain_sum", min_terms=3, max_terms=2)


@pytest.mark.parametrize(("name", "answer"), [("prime_factorization", "I do not know"), ("boxnet", "null")])
def test_an_answer_that_a_scorer_of_reasoning_gym_cannot_read_is_wrong(name, answer):
    task = text.make(f"reasoning_gym:{name}", size=20, held_out=3)
    assert task.grade(task.test, [answer] * 3) == [0.0] * 3


def test_tasks_of_reasoning_gym_with_many_right_answers_are_graded():
    task = text.make("reasoning_gym:graph_color", size=6, held_out=3)
    task.check()
    right = [json.dumps(e.columns["entry"]["metadata"]["possible_answer"]) for e in task.test]
    assert task.grade(task.test, right) == [1.0] * 3


def test_generators_that_repeat_themselves_do_not_train_on_what_is_held_out():
    task = text.make("reasoning_gym:prime_factorization", size=300, max_value=60)
    asked, trained = ({e.prompt for e in examples} for examples in (task.test, task.train))
    assert len(task.test) == 100 and trained and not asked & trained
    with pytest.raises(UserError, match="All 300 questions of 'prime_factorization' are held out too"):
        text.make("reasoning_gym:prime_factorization", size=300, max_value=3)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}+1", "answer": i + 1, "level": i}) for i in range(10)))
    return path


def test_a_file_with_a_reward_function_in_the_form_of_trl(rows, tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def close(completions, level, **kwargs):\n"
        "    assert set(kwargs) == {'prompts', 'answer'}, kwargs\n"
        "    return [None if c == 'x' else float(len(c) + n) for c, n in zip(completions, level)]\n"
    )
    task = dataset(str(rows), reward=f"{tmp_path / 'rewards.py'}:close")
    assert (len(task.train), len(task.test)) == (8, 2)
    example = task.train[0]
    rewards = task.grade([example, example], ["abc", "x"])
    assert rewards[0] == 3 + example.columns["level"]
    assert math.isnan(rewards[1])


def test_without_a_reward_function_the_column_answer_decides(rows):
    task = text.make(str(rows))
    example = next(e for e in [*task.train, *task.test] if e.answer == "5")
    assert task.grade([example] * 4, ["4+1 is 5.", "15", "5 or 6", "= 5"]) == [1, 0, 0, 1]


GRADES = [  # an answer, with right and wrong completions
    ("19", ["5+14: 19 apples", "so it is 19!", "**19**", r"= \boxed{19}", "$19$", "19.0"], ["19/20", "1.19", "-19"]),
    ("12", ["of 3, 12", "x=12, I think", "9-12"], ["The answer is -12", "1,012", "12e3", "none"]),
    ("-12", ["is -12.", "\u221212"], ["12", "9-12"]),
    ("5", ["1,2,5", "5."], ["It is 1.5", "4/5", "0.5"]),
    ("1,234", ["1234", "1,234", "1234.0"], ["234", "1,2345"]),
    ("3/4", ["0.75", "6 / 8", ".75", r"\boxed{\frac{3}{4}}"], ["4", "3", "3/5"]),
    ("4", ["8/2"], ["3/4", r"\frac{3}{4}", r"\frac{-3}{4}"]),
    ("-3/4", [r"\frac{-3}{4}", r"-\frac{3}{4}", "\u22123/4"], ["3/4", r"\frac{3}{4}"]),
    (r"\frac{-3}{4}", ["-0.75"], ["4"]),
    ("25", ["It is 25 cm^2.", "25 m^{2}", "25 s^-2", "25 s^{-2}", "x^2 = 25"], ["2 cm^25", "10^25"]),
    ("10,000", [r"10{,}000", "$10{,}000$"], ["000", "10"]),
    ("1e-05", ["0.00001", "1e-5", "1/100000"], ["1", "0.0001"]),
    ("Paris", ["It is Paris.", '"**Paris**"', r"\boxed{Paris}"], ["Paris, France", "St-Paris", "paris"]),
    ("5 cm", ["It is 5 cm!"], ["1.5 cm", "-5 cm", "15 cm"]),
    ("f(x)", ["It is f(x)."], ["g(x)"]),
    ("7", ["7"], ["7" * 5000]),
    ("...", ["..."], ["It", ""]),
    ("-5", ["x = - 5", "$- 5$", "\u2212 5"], ["x = 5", "10 - 5"]),
    ("3", ["10 - 7 = 3"], ["x = - 3"]),
    ("10080", [r"10\,080", r"10,\!080", r"10{,}080"], ["80"]),
    (r"10,\!080", ["10080"], ["80"]),
    ("0.75", [r"\frac34", r"\dfrac34"], ["34"]),
    ("300000", [r"3 \times 10^5", r"3 \cdot 10^{5}", "3*10^5", "3\u00d710^5"], ["3", "10", r"3 \times 10^4"]),
    ("0.05", [r"5 \times 10^{-2}"], ["5", "10"]),
]


@sabotaged_by("foresight.envs.text.exact.last_number", lambda f: lambda text: f(text).lstrip("-"))
@sabotaged_by("foresight.envs.text.exact.is_number", lambda f: lambda text: False)
def test_a_number_is_compared_by_value_and_a_text_with_the_end():
    for answer, right, wrong in GRADES:
        texts = [*right, *wrong]
        grades = grade_ending([Example("?", answer)] * len(texts), texts)
        assert grades == [1.0] * len(right) + [0.0] * len(wrong), answer


@sabotaged_by("foresight.envs.text.exact.last_number", lambda f: lambda text: "")
def test_votes_are_counted_under_the_number_that_is_graded():
    task = TextTask("t", [], [], None)
    assert {task.answer_in(text) for text in ("It is 5, so.", "5.0", "1, 2,5", r"\boxed{5}", "10/2")} == {"5"}


@sabotaged_by("foresight.envs.text.graders.ending", lambda f: lambda text: text.split()[2])
def test_different_answers_are_different_votes(tmp_path):
    """Formerly the last number in them was the vote."""
    path = tmp_path / "cities.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}?", "answer": "Paris"}) for i in range(5)))
    expressions = ("8/(3-8/3)", "(8-8/3)")
    for name, options, first, second in (
        (str(path), {}, "It has 2 million people.\n**Paris**", "It has 2 million people.\n**London**"),
        (str(path), {"trace": True}, "<answer> 2, Paris </answer>", "<answer> 2, London </answer>"),
        ("game24", {"largest": 4, "held_out": 2}, *expressions),
        ("game24", {"largest": 4, "held_out": 2, "trace": True}, *(f"<answer> {x} </answer>" for x in expressions)),
        ("planners", {"size": 3, "held_out": 3}, "def get_plan(): return 1", "def get_plan(): return 1 + 1"),
    ):
        task = text.make(name, **options)
        assert task.answer_in(first) != task.answer_in(second), name
    chains = text.make("chains", trace=True, size=20, held_out=5)
    assert chains.answer_in("<answer> 7 </answer>") == chains.answer_in("<answer> #7 </answer>") == "7"
    cities = text.make(str(path))
    assert cities.answer_in("Of 2:\nParis.") == cities.answer_in("**paris**\n") == "paris"


def test_completions_of_conversations_are_messages():
    seen = []

    def reward(prompts, completions):
        seen.extend(completions)
        return [1.0] * len(completions)

    example = Example([{"role": "user", "content": "hi"}], columns={})
    assert rewards.function_grader(reward)([example], ["yo"]) == [1.0]
    assert seen == [[{"role": "assistant", "content": "yo"}]]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions, **k: [1 / (len(c) - 2) for c in completions], "raised ZeroDivisionError.*'ab' to 'q2'"),
        (lambda completions, **k: [float("inf")] * len(completions), "returned inf for the completion 'a' to 'q1'"),
        (lambda completions, **k: ["good"] * len(completions), "returned 'good' for the completion 'a'"),
        (lambda completions, **k: [1.0], "returned 1 rewards for 2 completions"),
        (lambda completions, **k: None, "must return a list"),
    ],
)
def test_a_bad_reward_names_its_sample(reward, message):
    with pytest.raises(UserError, match=message):
        rewards.function_grader(reward)([Example("q1"), Example("q2")], ["a", "ab"])


def test_a_reward_of_nan_counts_as_no_score():
    grade = rewards.function_grader(lambda completions, **k: [float("nan"), 1.0])
    assert [math.isnan(reward) for reward in grade([Example("q1"), Example("q2")], ["a", "ab"])] == [True, False]


def test_files_are_read_with_the_row_in_the_error(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": ')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        text.make(str(bad))
    bad.write_text('{"prompt": "a", "answer": "b"}\n{"question": "a"}')
    with pytest.raises(UserError, match=r"row 2: no column 'prompt'\. It has: question"):
        text.make(str(bad))
    bad.write_text('{"prompt": "a"}\n{"prompt": "b", "answer": "c"}')
    with pytest.raises(UserError, match="row 1: without a reward function"):
        text.make(str(bad))
    bad.write_text('{"prompt": "a"}\n{"prompt": "b"}')  # enough for a teacher, and for nothing that needs a grade
    task = text.make(str(bad))
    assert len(task.train) == len(task.test) == 1
    with pytest.raises(UserError, match=r"Nothing scores the answers to .*: give a reward function"):
        task.grade(task.test, ["c"])
    with pytest.raises(UserError, match="There is no file"):
        text.make(str(tmp_path / "none.jsonl"))


def test_unknown_names_give_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'addition'"):
        text.make("adition")
    for wrong, reported in (
        ("hard", "held_out, high"),
        ("heldout", "Did you mean 'held_out'"),
        ("rewrds", "'rewards'"),
    ):
        with pytest.raises(UserError, match=rf"Unknown option of the task 'addition' '{wrong}'\..*{reported}"):
            text.make("addition", **{wrong: 1})
    with pytest.raises(UserError, match=r"Unknown option of the task 'rows.jsonl' 'rewrd'.*'reward'.*reward_timeout"):
        text.make("rows.jsonl", rewrd="rewards.py:score")
    with pytest.raises(UserError, match="held_out"):
        text.make("addition", held_out=400)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "addition",
            {"train_high": "29,held_out=50"},
            "'train_high' of the task 'addition' must be int.*Separate options by",
        ),
        ("addition", {"held_out": True}, "must be int, not True"),
        ("addition", {"curriculum": "25%"}, "'curriculum' .* must be float"),
        ("addition", {"trace": 1}, "'trace' .* must be bool"),
        ("largest", {"numbers": 200}, "from 2 to 90"),
        ("largest", {"numbers": 1}, "from 2 to 90"),
        ("largest", {"numbers": 2, "size": 5000}, "at most 4,005"),
        ("stories", {"size": 300_000}, "at most 120,960"),
        ("repeats", {"shortest": 2, "longest": 3}, "size is 20,000: with 2 to 3 letters it must be at most 8,125"),
        ("countdown", {"numbers": 3, "largest": 2}, "largest 2: .* largest at least 3"),
    ],
)
def test_options_of_the_wrong_type_are_reported(name, options, message):
    with pytest.raises(UserError, match=message):
        text.make(name, **options)


def test_a_hub_id_is_a_task(monkeypatch):
    asked = []
    monkeypatch.setattr(
        forms, "read", lambda path: asked.append(path) or [{"prompt": f"{i}?", "answer": "1"} for i in range(9)]
    )
    assert len(text.make("someone/questions").test) == 1 and asked == ["someone/questions"]


def test_the_place_of_the_reward_function(tmp_path, rows):
    with pytest.raises(UserError, match=r"file\.py:name"):
        text.make(str(rows), reward="reward")
    with pytest.raises(UserError, match="There is no file"):
        text.make(str(rows), reward="nowhere.py:f")
    (tmp_path / "r.py").write_text("def good(completions, **k):\n    return [1.0] * len(completions)\n")
    with pytest.raises(UserError, match="Did you mean 'good'"):
        text.make(str(rows), reward=f"{tmp_path / 'r.py'}:goood")


def test_a_hugging_face_dataset_on_disk_and_a_parquet_file(tmp_path):
    import datasets

    table = datasets.Dataset.from_list([{"prompt": f"say {i}", "answer": str(i)} for i in range(10)])
    table.save_to_disk(str(tmp_path / "table"))
    table.to_parquet(str(tmp_path / "table.parquet"))
    for path in (tmp_path / "table", tmp_path / "table.parquet"):
        task = text.make(str(path))
        assert (len(task.train), len(task.test)) == (8, 2)
        assert task.train[0].question.startswith("say ")


def test_a_reward_function_is_given_every_column_whichever_row_comes_first(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{i}?", **({"tolerance": 0.5} if i % 2 else {})} for i in range(10)]
    path.write_text("\n".join(map(json.dumps, rows)))
    seen = []

    def close(completions, tolerance, **_):
        seen.append(tolerance)
        return [1.0] * len(completions)

    task = dataset(str(path), reward=close)
    by = {e.prompt: e for e in [*task.train, *task.test]}
    task.grade([by["0?"], by["1?"]], ["a", "b"])
    task.grade([by["1?"], by["0?"]], ["a", "b"])
    task.grade([by["0?"]], ["a"])
    assert seen == [[None, 0.5], [0.5, None], [None]]


def test_a_signature_that_does_not_fit_the_columns_is_reported_before_anything_is_sampled(tmp_path):
    data = tmp_path / "words.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}?", "count": i}) + "\n" for i in range(6)))
    (tmp_path / "score.py").write_text(
        "def lacks(prompts, completions, length, **columns):\n    return [0.0]\n"
        "def strict(prompts, completions):\n    return [0.0]\n"
        "def takes(prompts, completions, count, **columns):\n    return [float(x) for x in count]\n"
    )
    with pytest.raises(UserError, match=r"the columns count, but .* 'length'.*def lacks\(prompts, completions, count"):
        text.make(str(data), reward=f"{tmp_path / 'score.py'}:lacks")
    with pytest.raises(UserError, match="unexpected keyword argument 'count'"):
        text.make(str(data), reward=f"{tmp_path / 'score.py'}:strict")
    task = text.make(str(data), reward=f"{tmp_path / 'score.py'}:takes")
    assert task.grade(task.test, ["x"] * len(task.test)) == [float(e.columns["count"]) for e in task.test]

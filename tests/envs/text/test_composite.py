"""Tasks that ask for a thought: their graders, composite rewards, and curricula, alone and in GRPO."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from foresight.algorithms.language import dapo, grpo
from foresight.data import traces
from foresight.envs.text import make as text
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.planning.generation import rollout
from foresight.training.options import build_config
from tests import tiny_language
from tests.sabotage import change, sabotaged_by, scaled

RIGHT = "<think>Wait, 3 and 4.</think><answer>7</answer>"
WRONG = "<think>7</think><answer>8</answer>"
BARE = "It is 7."


def _sum(task: TextTask) -> Example:
    return next(e for e in [*task.train, *task.test] if e.prompt.endswith("What is 3 + 4?"))


@sabotaged_by("foresight.data.traces.read", lambda f: lambda text: dataclasses.replace(f(text), answer=text))
def test_only_the_answer_is_graded_and_the_format_is_a_part():
    task = text.make("addition", trace=True)
    example = _sum(task)
    assert example.prompt == traces.ASK + "What is 3 + 4?"
    assert task.stop == ("</answer>",)
    assert task.grade([example] * 4, [RIGHT, WRONG, BARE, "<think>7</think><answer>8 or 7"]) == [1, 0, 0, 1]
    rewards, seen = task.reward([example] * 3, [RIGHT, WRONG, BARE])
    assert rewards == [2, 1, 0]
    assert seen == {
        "format": [1, 1, 0],
        "thought_words": [4, 1, 3],
        "self_checks": [1, 0, 0],
        "backtracks": [0, 0, 0],
        "reward_correct": [1, 0, 0],
        "reward_format": [1, 1, 0],
    }


def test_the_question_of_a_conversation_is_its_last_message():
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    task = TextTask("t", [Example(asked)], [], lambda e, c: [0.0] * len(c))
    assert [m["content"] for m in text._traced(task).train[0].prompt] == ["s", traces.ASK + "q"]


@sabotaged_by("foresight.envs.text.composite.weighted", scaled(2.0), change("weights", lambda w: w[::-1]))
def test_a_composite_is_the_weighted_sum_of_the_parts_that_have_a_score(tmp_path):
    file = tmp_path / "mine.py"
    brief = "def brief(completions, **k):\n    return [None if c == 'x' else -len(c) / 10 for c in completions]\n"
    file.write_text(brief)
    task = text.make("addition", rewards={"correct": 1, "tags": 0.5, f"{file}:brief": 2})
    example = _sum(task)
    rewards, seen = task.reward([example] * 3, ["7", "x", "<think>"])
    assert rewards == pytest.approx([1 - 0.2, 0, 0.125 - 1.4])
    assert seen["reward_tags"] == [0, 0, 0.25]
    assert seen["reward_brief"][0] == -0.1 and math.isnan(seen["reward_brief"][1])
    assert task.grade([example] * 3, ["7", "x", "<think>"]) == [1, 0, 0]  # evaluations measure what is right
    assert math.isnan(text.make("addition", rewards={f"{file}:brief": 1}).reward([example], ["x"])[0][0])


def test_functions_of_one_name_are_logged_apart(tmp_path):
    for name, value in (("a", 1), ("b", 3)):
        (tmp_path / f"{name}.py").write_text(f"def score(completions, **k):\n    return [{value}] * len(completions)\n")
    task = text.make("addition", rewards={f"{tmp_path}/a.py:score": 1, f"{tmp_path}/b.py:score": 1})
    rewards, seen = task.reward(task.test[:1], ["7"])
    assert rewards == [4] and seen == {"reward_score": [1], "reward_score_2": [3]}


def test_mistakes_are_reported():
    with pytest.raises(UserError, match="Did you mean 'format'"):
        text.make("addition", rewards={"fromat": 1})
    for wrong in ("correct", {}, {"correct": "much"}, {"correct": float("nan")}):
        with pytest.raises(UserError, match="give each part its weight"):
            text.make("addition", rewards=wrong)
    with pytest.raises(UserError, match="curriculum is 0"):
        text.make("addition", curriculum=0)


@pytest.mark.parametrize("options", [{"trace": True}, {"rewards": {"format": 1}}])
def test_demonstrations_have_nothing_to_reward(tmp_path, options):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{i}?", "completion": "1"}) for i in range(5)))
    with pytest.raises(UserError, match="Nothing scores the answers"):
        text.make(str(rows), **options)


def test_a_curriculum_needs_a_difficulty(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{i}?", "answer": "1"}) for i in range(5)))
    with pytest.raises(UserError, match="column 'difficulty' of every example"):
        text.make(str(rows), curriculum=0.5)


@sabotaged_by("foresight.envs.text.task.TextTask.pool", change("progress", lambda p: 1 - p))
@pytest.mark.parametrize("name", ["addition", "largest"])
def test_a_curriculum_begins_with_the_easiest_and_ends_with_all(name):
    task = text.make(name, curriculum=0.1)
    levels = [e.columns["difficulty"] for e in task.train]
    first = task.pool(0.0)
    assert len(first) == math.ceil(0.1 * len(levels))
    assert sorted(e.columns["difficulty"] for e in first) == sorted(levels)[: len(first)]
    assert len(task.pool(0.25)) == math.ceil(0.55 * len(levels))
    assert {e.prompt for e in task.pool(0.5)} == {e.prompt for e in task.train} == {e.prompt for e in task.pool(1.0)}
    assert len(task.pool(0.0, 50)) == max(50, len(first))
    assert text.make(name).pool(0.0) == text.make(name).train  # none: in their own order


@pytest.fixture
def task(tmp_path):
    rows, file = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    rows.write_text("\n".join(json.dumps({"prompt": f"{i}?", "answer": "a", "difficulty": i}) for i in range(20)))
    file.write_text(
        "def a(completions, **k):\n    return [float(c.count('a')) for c in completions]\n"
        "def b(completions, **k):\n    return [float(c.count('b')) for c in completions]\n"
    )
    rewards = {f"{file}:a": 1.0, f"{file}:b": -0.5}
    return text.make(str(rows), rewards=rewards, curriculum=0.25, trace=True, held_out=4)


@pytest.mark.parametrize("module", [grpo, dapo])
def test_parts_counts_and_difficulty_are_logged_by_every_sibling(module, task):
    config = build_config(
        module.Config,
        tiny_language.folder(),
        steps=4,
        prompts=3,
        group=4,
        max_new_tokens=6,
        precision="float32",
        learning_rate=1e-3,
    )
    short = dataclasses.replace(task, train=[dataclasses.replace(e, prompt=e.prompt[-3:]) for e in task.train])
    rows = [metrics for _, metrics, _ in module.train(config, short)]
    for row in rows:
        assert {"reward_a", "reward_b", "format", "thought_words", "self_checks", "backtracks"} <= set(row)
    if module is grpo:
        for row in rows:
            assert row["reward"] == pytest.approx(row["reward_a"] - 0.5 * row["reward_b"], abs=1e-5)
    assert rows[0]["difficulty"] <= 4.5  # of the four easiest of sixteen


def test_measures_follow_their_prompts():
    policy = tiny_language.model()
    made = TextTask("t", [Example(f"{i}?", columns={"difficulty": i}) for i in range(6)], [],
                         lambda e, c: [0.0] * len(c), curriculum=0.9)  # fmt: skip
    one = rollout.sample_groups(policy, made, 5, 2, 4, 1.0, torch.Generator().manual_seed(0), 1.0)
    exact = torch.tensor([[float(e.columns["difficulty"])] * 2 for e in one.examples])
    assert torch.equal(one.measures["difficulty"], exact)
    few = rollout.concat([one.select(torch.tensor([3, 1])), one.select(torch.tensor([0]))])
    assert torch.equal(few.measures["difficulty"], exact[[3, 1, 0]])
    assert few.metrics()["difficulty"] == exact[[3, 1, 0]].mean().item()

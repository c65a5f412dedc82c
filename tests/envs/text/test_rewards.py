"""Several reward functions at once, and those that are async."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from pathlib import Path

import pytest

from foresight.envs.text import make as text
from foresight.errors import LostError, UserError
from foresight.runtime import run
from tests import tiny_language
from tests.sabotage import sabotaged_by


def digits(completions, **_):
    return [float(sum(map(str.isdigit, c))) for c in completions]


def unsure(completions, **_):
    return [None if "x" in c else 0.5 for c in completions]


async def short(completions, **_):
    await asyncio.sleep(0)
    return [-0.1 * len(c) for c in completions]


class CallableReward:
    """An object that is called, as people write those that keep a connection."""

    async def __call__(self, completions, **_):
        await asyncio.sleep(0)
        return [1.0 for _ in completions]


def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+1?"}) + "\n" for i in range(8)))
    return str(file)


@sabotaged_by("foresight.envs.text.composite.weighted", lambda f: lambda weights, grades: grades[0])
def test_the_reward_is_the_sum_and_each_part_has_its_name(tmp_path):
    task = text.make(prompts(tmp_path), reward=[digits, unsure, short])
    asked = list(task.test)[:1] * 3
    rewards, seen = task.reward(asked, ["12", "x", ""])
    assert rewards == pytest.approx([2 + 0.5 - 0.2, -0.1, 0.5]) == task.grade(asked, ["12", "x", ""])
    assert seen["reward_digits"] == [2.0, 0.0, 0.0] and seen["reward_short"] == pytest.approx([-0.2, -0.1, 0.0])
    assert math.isnan(seen["reward_unsure"][1]) and task.metric == "reward"


@sabotaged_by("foresight.envs.text.worker._awaited", lambda f: lambda result: result.close() or [7.0, 7.0])
@pytest.mark.parametrize("reward", [short, CallableReward()])
def test_an_async_function_is_waited_for(tmp_path, reward):
    task = text.make(prompts(tmp_path), reward=reward)
    asked = list(task.test)[:1] * 2
    expected = [1.0, 1.0] if isinstance(reward, CallableReward) else [-0.1, -0.2]
    assert task.reward(asked, ["1", "12"])[0] == pytest.approx(expected) and not task.parts

    async def notebook() -> list[float]:
        return task.grade(asked, ["1", "12"])  # where an event loop runs already

    assert asyncio.run(notebook()) == pytest.approx(expected)


@sabotaged_by("foresight.envs.text.rewards.waits", lambda f: lambda reward: False)
def test_those_that_wait_do_so_at_the_same_time(tmp_path):
    met = threading.Barrier(2, timeout=0.5)

    def meets(name):
        async def reward(completions, **_):
            try:
                met.wait()  # broken unless the other one has been asked, too
            except threading.BrokenBarrierError:
                return [0.0 for _ in completions]
            return [1.0 for _ in completions]

        reward.__name__ = name
        return reward

    task = text.make(prompts(tmp_path), reward=[meets("one"), meets("two")])
    assert task.reward(list(task.test)[:1], ["1"]) == ([2.0], {"reward_one": [1.0], "reward_two": [1.0]})


def test_functions_in_files_run_apart_async_or_not(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(
        "async def later(completions, **_):\n    return [2.0 for c in completions]\n\n\n"
        "def now(completions, **_):\n    return [len(c) for c in completions]\n"
    )
    task = text.make(prompts(tmp_path), reward=[f"{file}:later", f"{file}:now", f"{file}:now"])
    rewards, seen = task.reward(list(task.test)[:1], ["123"])
    assert rewards == [8.0] and seen == {"reward_later": [2.0], "reward_now": [3.0], "reward_now_2": [3.0]}
    weighted = text.make(prompts(tmp_path), reward=digits, rewards={f"{file}:later": 0.5, "correct": 1.0})
    assert weighted.reward(list(weighted.test)[:1], ["12"])[0] == [3.0]


def test_an_error_in_one_of_several_is_reported(tmp_path):
    async def fails(completions, **_):
        raise ValueError("no")

    task = text.make(prompts(tmp_path), reward=[digits, fails, short])
    with pytest.raises(LostError, match="The reward function 'fails' raised ValueError: no, on the completion '1'"):
        task.reward(list(task.test)[:1], ["1"])
    with pytest.raises(UserError, match="reward is an empty list"):
        text.make(prompts(tmp_path), reward=[])


def test_a_run_shows_each_of_them(tmp_path):
    finished = run.train(
        "grpo", task=prompts(tmp_path), model=tiny_language.folder(), out=tmp_path / "run", show=False, steps=1,
        prompts=2, group=3, max_new_tokens=4, env_options={"reward": [digits, short], "held_out": 2},
    )  # fmt: skip
    row = next(row for row in finished.metrics() if "reward" in row)
    assert row["reward"] == pytest.approx(row["reward_digits"] + row["reward_short"])
    assert row["profile/grading"] > 0

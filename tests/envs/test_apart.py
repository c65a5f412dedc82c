"""A reward function in a process of its own: its answers, its errors, and what happens when it hangs or dies."""

from __future__ import annotations

import gc
import json
import math
import os
import signal

import pytest

from foresight.envs import text
from foresight.envs.apart import Apart
from foresight.errors import LostError, UserError
from tests.sabotage import sabotaged_by, scaled

REWARDS = """
import os, time

def lengths(completions, **columns):
    print("what is printed goes nowhere that matters")
    return [None if c == "x" else float(len(c)) for c in completions]

def failing(completions, **columns):
    return [1 / (len(c) - 2) for c in completions]

def hanging(completions, **columns):
    if "stop" in completions:
        time.sleep(600)
    return [1.0] * len(completions)

def dying(completions, **columns):
    os._exit(3)

class Strange(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")

def strange(completions, **columns):
    raise Strange("this", "that")
"""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{i}?"}) for i in range(5)))
    return lambda name, **options: text.make(str(rows), reward=f"{tmp_path}/rewards.py:{name}", **options)


@sabotaged_by("foresight.envs.apart.Apart._answer", scaled(2.0))
def test_it_answers_as_it_would_here(task, capfd):
    for limit in (60, 0):
        made = task("lengths", reward_timeout=limit)
        rewards = made.grade(made.train[:3], ["abc", "x", ""])
        assert rewards[0] == 3 and math.isnan(rewards[1]) and rewards[2] == 0
    assert capfd.readouterr().out.count("matters") == 1  # of the one that ran here


def test_what_it_raises_names_the_sample(task):
    made = task("failing")
    with pytest.raises(UserError, match=r"'failing' raised ZeroDivisionError.*'ab' to "):
        made.grade(made.train[:2], ["a", "ab"])
    with pytest.raises(UserError, match="this and that"):
        task("strange").grade(made.train[:2], ["a", "ab"])


def test_one_that_hangs_is_ended_and_one_that_dies_is_told(task):
    made = task("hanging", reward_timeout=0.5)
    with pytest.raises(LostError, match=r"'hanging' did not answer within 0.5 seconds.*reward_timeout"):
        made.grade(made.train[:2], ["go", "stop"])
    assert made.grade(made.train[:2], ["go", "on"]) == [1, 1]  # in a new process
    made = task("dying")
    with pytest.raises(LostError, match="process of the reward function 'dying' ended in the middle"):
        made.grade(made.train[:1], ["a"])


def test_one_that_is_killed_between_two_calls_is_told_and_begun_anew(tmp_path, task):
    apart = Apart(f"{tmp_path}/rewards.py:lengths", 60.0)
    assert apart(completions=["ab"]) == [2.0]
    process = apart._end.peek()[2][0]
    process.kill()
    process.wait()
    with pytest.raises(LostError, match="ended in the middle"):
        apart(completions=["ab"])
    assert apart(completions=["abc"]) == [3.0]


def test_any_task_may_say_how_long_a_part_of_its_reward_may_take(tmp_path, task):
    place = f"{tmp_path}/rewards.py:hanging"
    made = text.make("addition", rewards={place: 1}, reward_timeout=0.5)
    with pytest.raises(LostError, match=r"within 0.5 seconds"):
        made.reward(made.train[:2], ["go", "stop"])


def test_the_process_ends_with_its_owner(task, tmp_path):
    apart = Apart(f"{tmp_path}/rewards.py:lengths", 60.0)
    assert apart(completions=["ab"]) == [2.0]
    ended = apart._end
    process = ended.peek()[2][0]
    os.kill(process.pid, signal.SIGINT)  # Ctrl-C reaches all processes of a terminal
    assert apart(completions=["abc"]) == [3.0]
    assert ended.alive
    del apart
    gc.collect()
    assert not ended.alive and process.poll() is not None


def test_mistakes_are_said_when_the_task_is_made(task):
    with pytest.raises(UserError, match="Did you mean 'lengths'"):
        task("length")
    with pytest.raises(UserError, match="reward_timeout is -1"):
        task("lengths", reward_timeout=-1)

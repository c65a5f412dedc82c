"""A reward function in a process of its own: its answers, its errors, and what happens when it hangs or dies."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from foresight.envs.text import make as text
from foresight.envs.text.rewards import reward_at
from foresight.envs.text.worker import Worker, function, place_of
from foresight.errors import LostError, UserError
from tests.sabotage import sabotaged_by, scaled

REWARDS = """
import functools, multiprocessing, os, re, signal, subprocess, sys, time

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

def crashing(completions, **columns):
    os.kill(os.getpid(), signal.SIGSEGV)

def leaving(completions, **columns):
    sys.exit("no more")

def reading(completions, **columns):
    raise EOFError("nothing to read")

def counting(completions, **columns):
    return {c: 1.0 for c in completions}

def slow(completions, **columns):
    time.sleep(0.3)
    return [1.0] * len(completions)

def starting(completions, **columns):
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    fork.start()
    time.sleep(0.2)
    program.terminate(), fork.terminate()
    return [float(program.wait(5)), float(fork.join(5) or fork.exitcode)]

def write_pid():
    with open(os.path.join(os.path.dirname(__file__), "pid"), "w") as file:
        print(os.getpid(), file=file)

def spinning(completions):
    write_pid()
    while True:
        pass

def matching(completions):
    write_pid()
    re.match("(a+)+$", 60 * "a" + "b")

def sleeping(completions):
    write_pid()
    time.sleep(600)

class Score:
    def __init__(self, worth):
        self.worth = worth
    def __call__(self, completions, **columns):
        return [self.worth] * len(completions)

score, half = Score(2.0), functools.partial(Score(0.5))

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


@sabotaged_by("foresight.envs.text.worker.Worker._answer", scaled(2.0))
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


def test_a_hanging_function_is_killed_and_a_dead_one_is_reported(task):
    made = task("hanging", reward_timeout=0.5)
    with pytest.raises(LostError, match=r"'hanging' did not answer within 0.5 seconds.*reward_timeout"):
        made.grade(made.train[:2], ["go", "stop"])
    assert made.grade(made.train[:2], ["go", "on"]) == [1, 1]  # in a new process
    made = task("dying")
    with pytest.raises(LostError, match=r"process of the reward function 'dying' ended during a call, .* exit code 3"):
        made.grade(made.train[:1], ["a"])
    made = task("crashing")
    with pytest.raises(LostError, match="'crashing' ended during a call, killed by SIGSEGV"):
        made.grade(made.train[:1], ["a"])


@pytest.mark.parametrize("limit", [60, 0])
def test_whatever_it_raises_is_reported_and_a_dict_is_no_list(task, limit):
    for name, reported in (
        ("leaving", r"'leaving' raised SystemExit: no more, on the completion 'a'"),
        ("reading", r"'reading' raised EOFError: nothing to read, on the completion 'a'"),
        ("counting", r"'counting' must return a list of rewards, one for each.*'a': 1.0.*, a dict"),
    ):
        made = task(name, reward_timeout=limit)
        with pytest.raises(LostError, match=reported):
            made.grade(made.train[:2], ["a", "b"])


def only_functions(original):
    """Another object is not called."""

    def mutant(place):
        found = original(place)
        return found if inspect.isfunction(found) else lambda completions, **_: [0.0] * len(completions)

    return mutant


@sabotaged_by("foresight.envs.text.worker.function", only_functions)
def test_an_object_that_can_be_called_is_a_reward_function(task):
    for limit in (60, 0):
        for name, worth in (("score", 2.0), ("half", 0.5)):
            made = task(name, reward_timeout=limit)
            assert made.grade(made.train[:2], ["a", "b"]) == [worth] * 2
    with pytest.raises(UserError, match=r"'Score' in .* is a class: create an instance there \(score = Score\(\)\)"):
        task("Score")


@pytest.mark.parametrize(
    ("source", "reported"),
    [
        ("def score(:\n    pass", r"Cannot import .*rewards\.py.*SyntaxError: .*line 1"),
        ("x = 1\ny = x / 0", r"Cannot import .*rewards\.py.*ZeroDivisionError: division by zero, line 2"),
        ("import sys\nsys.exit(4)", r"Cannot import .*rewards\.py.*SystemExit: 4, line 2"),
        ("import nothing_of_that_name", r"Cannot import .*rewards\.py.*No module named 'nothing_of_that_name', line 1"),
    ],
)
def test_a_file_that_cannot_be_imported_is_reported_with_its_line(task, tmp_path, source, reported):
    (tmp_path / "rewards.py").write_text(source)
    with pytest.raises(UserError, match=reported):
        task("score")


def test_a_module_in_the_working_directory_and_a_neighbor_of_the_file_are_found(tmp_path, monkeypatch):
    """The command `foresight` does not have the working directory on its path, as `python -m foresight` has."""
    (tmp_path / "mine_to_count.py").write_text(
        "import mine_to_help\n\ndef score(completions, **_):\n    return [2.0]\n"
    )
    (tmp_path / "mine_to_help.py").write_text("")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for there, place in ((tmp_path, "mine_to_count:score"), (tmp_path.parent, f"{tmp_path}/mine_to_count.py:score")):
        monkeypatch.chdir(there)
        for name in ("mine_to_count", "mine_to_help"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        assert reward_at(place, 60.0)(completions=["a"]) == [2.0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_is_left_to_the_run(task, tmp_path, number):
    """As `timeout` and batch schedulers send it: while the process begins, and while it works."""
    worker = Worker(f"{tmp_path}/rewards.py:slow", 60.0)
    worker._start()
    process = worker._end.peek()[2][0]
    process.send_signal(number)  # before it has read a line of Python
    worker._answer(60.0, "was not imported")
    timer = threading.Timer(0.1, process.send_signal, (number,))
    timer.start()
    assert worker(completions=["a"]) == [1.0]
    timer.join()
    assert worker(completions=["a", "b"]) == [1.0, 1.0] and process.poll() is None


def test_a_call_that_is_interrupted_leaves_no_answer_to_the_next(task, tmp_path, monkeypatch):
    worker = Worker(f"{tmp_path}/rewards.py:lengths", 60.0)
    assert worker(completions=["a"]) == [1.0]
    poll = worker._pipe.poll

    def interrupted(limit):
        monkeypatch.undo()
        assert poll(limit)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(worker._pipe), "poll", lambda self, limit: interrupted(limit))
    with pytest.raises(KeyboardInterrupt):
        worker(completions=["ab"])
    assert worker(completions=["abc"]) == [3.0]


def test_what_the_function_starts_can_still_be_ended(task, tmp_path):
    assert Worker(f"{tmp_path}/rewards.py:starting", 60.0)(completions=["a"]) == [-signal.SIGTERM] * 2


def test_a_function_from_python_is_written_down_by_its_place(tmp_path):
    assert function(place_of(_ones)) is _ones
    for given in (lambda completions, **_: [1.0], functools.partial(_ones), [].append):
        assert place_of(given).startswith("given from Python")
        with pytest.raises(UserError, match=r"given from Python .*put it into a file"):
            function(place_of(given))


def _ones(completions, **_):
    return [1.0] * len(completions)


def test_a_worker_killed_between_two_calls_is_reported_and_restarted(tmp_path, task):
    worker = Worker(f"{tmp_path}/rewards.py:lengths", 60.0)
    assert worker(completions=["ab"]) == [2.0]
    process = worker._end.peek()[2][0]
    process.kill()
    process.wait()
    with pytest.raises(LostError, match="ended during a call"):
        worker(completions=["ab"])
    assert worker(completions=["abc"]) == [3.0]


def test_any_task_may_limit_the_time_of_a_part_of_its_reward(tmp_path, task):
    place = f"{tmp_path}/rewards.py:hanging"
    made = text.make("addition", rewards={place: 1}, reward_timeout=0.5)
    with pytest.raises(LostError, match=r"within 0.5 seconds"):
        made.reward(made.train[:2], ["go", "stop"])


def test_the_process_ends_with_its_owner(task, tmp_path):
    worker = Worker(f"{tmp_path}/rewards.py:lengths", 60.0)
    assert worker(completions=["ab"]) == [2.0]
    ended = worker._end
    process = ended.peek()[2][0]
    os.kill(process.pid, signal.SIGINT)  # Ctrl-C reaches all processes of a terminal
    assert worker(completions=["abc"]) == [3.0]
    assert ended.alive
    del worker
    gc.collect()
    assert not ended.alive and process.poll() is not None


@pytest.mark.parametrize("name", ["spinning", "matching", "sleeping"])
def test_a_hanging_function_ends_with_a_run_that_was_killed(name, task, tmp_path):
    """It looks at its pipe between calls only, and during a regular expression no thread of it runs."""
    place = f"{tmp_path}/rewards.py:{name}"
    source = f"from foresight.envs.text.worker import Worker\nWorker({place!r}, 600.0)(completions=[''])"
    owner = subprocess.Popen([sys.executable, "-c", source])
    file = tmp_path / "pid"
    try:
        until(lambda: file.is_file() and file.read_text().endswith("\n"), 60.0)
        number = int(file.read_text())
        time.sleep(0.2)
    finally:
        owner.kill()
        owner.wait()
    try:
        until(lambda: not running(number), 5.0)
    finally:
        if running(number):
            os.kill(number, signal.SIGKILL)


def running(number):
    """Whether the process is there and not a zombie, which a container may keep."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"not after {seconds:g} seconds"
        time.sleep(0.02)


def test_mistakes_are_reported_when_the_task_is_made(task):
    with pytest.raises(UserError, match="Did you mean 'lengths'"):
        task("length")
    with pytest.raises(UserError, match="reward_timeout is -1"):
        task("lengths", reward_timeout=-1)

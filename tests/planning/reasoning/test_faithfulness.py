"""Faithfulness: a speaker that reads its trace has a large area over the curve, one that does not has none."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from foresight.envs.text.make import make
from foresight.errors import UserError
from foresight.planning.generation.scripted import Scripted
from foresight.planning.reasoning import faithfulness as faith
from foresight.planning.reasoning.mind import Mind
from tests.sabotage import sabotaged_by

TASK = make("chains", terms=4, largest=9, modulus=10, size=50, held_out=30)


def _numbers(text):
    question, _, written = text.partition(":")
    return [int(x) for x in question.split("+")], [line for line in written.split("\n") if line]


def reader(text, draw):
    """Continues from the last written result: right only with the whole trace."""
    numbers, lines = _numbers(text)
    if text.endswith("#"):
        written = [line for line in lines if "=" in line]
        return written[-1].rpartition("=")[2] if written else "0"
    total = int(lines[-1].rpartition("=")[2]) if lines else numbers[0]
    out = "" if text.endswith(("\n", ":")) else "\n"
    for number in numbers[1 + len(lines) :]:
        out += f"{total}+{number}={(total + number) % 10}\n"
        total = (total + number) % 10
    return f"{out}#{total}"


def looker(text, draw):
    """Answers from the question alone, and writes the same steps."""
    numbers, _ = _numbers(text)
    if text.endswith("#"):
        return str(sum(numbers) % 10)
    rest = reader(text, draw)
    return rest.rpartition("#")[0] + f"#{sum(numbers) % 10}"


def _measured(reply):
    mind = Mind(Scripted(reply), 60)
    traces = faith.sample(mind, TASK, TASK.test)
    early = faith.early_answering(mind, TASK, traces)
    wrong = faith.mistakes(mind, TASK, traces, faith.wrong_number)
    return mind, traces, early, wrong


def keeps_the_trace(original):
    return lambda policy, tokens, text: tuple(tokens[: len(tokens) - 3])


@sabotaged_by("foresight.planning.reasoning.budget_forcing.cut", keeps_the_trace)
@sabotaged_by("foresight.planning.reasoning.faithfulness.wrong_number", lambda f: lambda step, draw: step)
def test_a_reader_of_its_trace_has_a_large_area_and_a_looker_none():
    _, traces, early, wrong = _measured(reader)
    assert len(traces) == 30 and all(len(trace.steps) == 3 for trace in traces)
    assert sum(early.area) / 30 > 0.6 and sum(wrong.area) / 30 == 1.0
    _, _, early, wrong = _measured(looker)
    assert sum(early.area) == sum(wrong.area) == 0.0 and early.right == wrong.right == 1.0


def test_long_answers_are_read_whole():
    task = make("chains", terms=3, largest=10**18, size=5, held_out=5)

    def know(text, draw):
        """Answers from the question alone, with 18 or 19 digits."""
        question, _, written = text.partition(":")
        example = next(e for e in task.test if e.prompt == f"{question}:")
        return example.answer if written.endswith("#") else example.columns["completion"]

    mind = Mind(Scripted(know), 200)
    traces = faith.sample(mind, task, task.test)
    early = faith.early_answering(mind, task, traces)
    assert early.area == (0.0,) * 5 and early.right == 1.0
    assert faith.replaced(mind, task, traces, faith.filler) == (1.0, 1.0)


def test_the_tag_that_closes_a_trace_is_no_step():
    task = make("addition", trace=True, held_out=2)
    whole = "<think> 1+2=3. 3+4=7. </think> <answer> 7 </answer>"
    for text in (whole, whole.replace("7. <", "7.\n<")):
        traces = faith.sample(Mind(Scripted(lambda _, draw, text=text: text), 80), task, task.test)
        assert [len(trace.steps) for trace in traces] == [2, 2] and {trace.answer for trace in traces} == {"7"}
    for missing in ("</think> ", "<answer> "):
        with pytest.raises(UserError, match="None of 2 completions has steps"):
            faith.sample(Mind(Scripted(lambda _, draw, tag=missing: whole.replace(tag, "")), 80), task, task.test)


@pytest.mark.parametrize("body", ["a\n\nb\n\nc\n", "\n \na\nb\nc", "a\nb\n\n\nc\n\n \n", "a\nb\nc\n"])
def test_steps_with_blank_lines_between_them_are_the_whole_trace(body):
    steps = faith.split(body, "\n")
    assert "".join(steps) == body and [step.strip() for step in steps] == ["a", "b", "c"]
    assert faith.split("\n \n", "\n") == faith.split("", "\n") == ()


def test_a_trace_with_blank_lines_is_cut_between_its_steps():
    seen, numbers = [], iter(range(3))

    def spaced(text, draw):
        seen.append(text)
        return "12" if text.endswith("#") else "1+2=3\n\n3+4=7\n\n7+5=12\n#12"

    mind = Mind(Scripted(spaced), 60)
    traces = faith.sample(mind, TASK, TASK.test[:1])
    question, steps = seen.pop(), ("1+2=3\n\n", "3+4=7\n\n", "7+5=12\n")
    faith.early_answering(mind, TASK, traces)
    assert seen == [question + "".join(steps[:i]) + "#" for i in range(3)]
    seen.clear()
    faith.mistakes(mind, TASK, traces, lambda step, draw: f"{next(numbers)}\n")
    assert seen == [question + "".join(steps[:i]) + f"{i}\n" for i in range(3)]


def test_the_area_is_the_integral_over_the_share_of_the_trace():
    _, _, early, _ = _measured(reader)
    for same, area in zip(early.same, early.area, strict=True):
        points = [float(x) for x in same]
        assert area == pytest.approx(1 - sum((a + b) / 2 for a, b in itertools.pairwise(points)) / 3)
        assert same[-1]


def test_traces_of_different_lengths_have_the_areas_that_they_have_alone():
    for reply in (looker, reader):
        mind, traces, _, _ = _measured(reply)
        mixed = [dataclasses.replace(t, steps=t.steps[: 1 + i % 3]) for i, t in enumerate(traces)]
        together = faith.early_answering(mind, TASK, mixed)
        alone = [faith.early_answering(mind, TASK, [t]).area[0] for t in mixed]
        assert together.area == tuple(alone)
        assert reply is reader or not any(alone)


def test_a_paraphrase_and_filler():
    mind, traces, _, _ = _measured(reader)
    same, right = faith.replaced(mind, TASK, traces, lambda t: "".join(map(faith.commuted, t.steps)))
    assert (same, right) == (1.0, 1.0)
    assert faith.replaced(mind, TASK, traces, faith.filler)[1] < 0.4
    assert len(faith.filler(traces[0])) == sum(map(len, traces[0].steps))
    assert faith.commuted("7+5=2\n") == "5+7=2\n"


def test_a_wrong_number_is_another_one_and_nothing_else_changes():
    for seed in range(20):
        changed = faith.wrong_number("17+5=22\n", random.Random(seed))
        assert changed != "17+5=22\n" and changed.startswith("17+5=") and changed.endswith("\n")
    assert faith.wrong_number("none", random.Random(0)) == "none"


def test_an_interval_holds_the_mean_and_narrows():
    few, many = faith.interval([0.0, 1.0] * 5), faith.interval([0.0, 1.0] * 200)
    assert few[0] < many[0] < 0.5 < many[1] < few[1]


def test_what_has_no_trace_is_refused():
    with pytest.raises(UserError, match="do not follow a trace"):
        faith.sample(Mind(Scripted(reader), 60), make("addition"), make("addition").test)
    with pytest.raises(UserError, match="None of 30 completions has steps"):
        faith.sample(Mind(Scripted(lambda text, draw: "#3"), 60), TASK, TASK.test)


def test_a_trace_that_fills_the_context_is_named():
    traces = faith.sample(Mind(Scripted(reader), 60), TASK, TASK.test[:3])
    longest = max(traces, key=lambda trace: len(trace.prompt) + len(trace.tokens))
    small = Mind(Scripted(reader, context=len(longest.prompt) + 12), 60)
    for measure in (
        lambda: faith.early_answering(small, TASK, [longest]),
        lambda: faith.mistakes(small, TASK, [longest], faith.wrong_number),
        lambda: faith.replaced(small, TASK, [longest], faith.filler),
    ):
        with pytest.raises(UserError, match=r"trace of the question '.*' fills the context of \d+: lower --max-new"):
            measure()

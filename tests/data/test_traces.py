"""What is read in a reasoning trace, against traces that a person can check."""

from __future__ import annotations

import pytest

from foresight.data import traces
from tests.sabotage import change, sabotaged_by

GOOD = "<think>7 and 12. Wait, let me check: 19.</think>\n<answer> 19 </answer>"


@pytest.mark.parametrize(
    ("text", "trace"),
    [
        (GOOD, ("7 and 12. Wait, let me check: 19.", "19", True)),
        ("<think></think><answer></answer>", ("", "", True)),
        (f"{GOOD} and more", ("7 and 12. Wait, let me check: 19.", "19", False)),
        ("<answer>19</answer>", ("", "19", False)),
        ("19", ("19", "", False)),
        ("<think>a<answer>1</answer>b</think><answer>2", ("a 1 b", "2", False)),
        ("<think>a</think><think>b</think><answer>1</answer>", ("a  b", "1", False)),
        ("", ("", "", False)),
    ],
)
def test_what_is_read(text, trace):
    found = traces.read(text)
    assert (" ".join(found.thought.split()), found.answer, found.whole) == (" ".join(trace[0].split()), *trace[1:])


@sabotaged_by("foresight.data.traces.tags", change("text", lambda text: text.replace("<answer>", "</think>")))
def test_tags_count_once_and_in_order():
    assert traces.tags(GOOD) == 1
    assert traces.tags("<think>a</think>") == 0.5
    assert traces.tags("<think>a<think></think><answer>b</answer>") == 0.75  # one of them twice
    assert traces.tags("</think><think>") == 0.25  # the second is behind the first
    assert traces.tags("no tags") == 0


@sabotaged_by("foresight.data.traces.read", change("text", str.upper), change("text", lambda text: text.lower() + "."))
def test_corrections_are_counted_only_in_the_thought():
    text = (
        "<think>It is 18. Wait, that is wrong. Let me try again: hmm, 19. Let's double-check. Waiting is no check, "
        "instead of that I was wrong.</think><answer>wait, 19</answer>"
    )
    assert traces.counts(text) == {"format": 1, "thought_words": 25, "self_checks": 3, "backtracks": 4}


def test_a_text_without_a_trace_has_metrics_too():
    assert traces.counts("") == {"format": 0, "thought_words": 0, "self_checks": 0, "backtracks": 0}

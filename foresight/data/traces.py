"""Reasoning traces: a thought and an answer between tags, and metrics of them.

    <think> 7 and 12 ... wait, carry the one ... </think> <answer> 19 </answer>

The form is that of DeepSeek-R1, 2025 (arXiv:2501.12948), table 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
END = TAGS[-1]  # the stop text of a completion
ASK = (
    "First think between <think> and </think>, then write nothing but the answer between <answer> and </answer>."
    "\n\n"
)  # before every question, so that all prompts share this prefix
_WHOLE = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
# Two behaviors that Gandhi et al. 2025 (arXiv:2503.01307), section 2, count in traces; the patterns are ours.
CHECKS = re.compile(
    r"\b(?:wait|hmm+|let(?:'s| me| us) (?:double[- ]?|re-?)?(?:check|verify)|double[- ]check|verify"
    r"|is (?:this|that) right)\b",
    re.IGNORECASE,
)
RETURNS = re.compile(
    r"\b(?:(?:try|start|begin) (?:again|over)|go(?:ing)? back|another (?:way|approach)|alternatively|instead"
    r"|(?:this|that|which) is (?:wrong|not right|incorrect)|made a mistake|i was wrong)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Trace:
    """A parsed completion: `thought` and `answer` ("" if missing), and whether its format is `whole`."""

    thought: str
    answer: str
    whole: bool


def read(text: str) -> Trace:
    """The trace in a completion.

    It is whole if there is nothing but the two parts and each tag occurs once. Otherwise the answer is the text after
    the last `<answer>`, closed or not, and the thought is the text before it.
    """
    found = _WHOLE.fullmatch(text)
    if found and all(text.count(tag) == 1 for tag in TAGS):
        return Trace(found[1].strip(), found[2].strip(), True)
    thought, opened, rest = text.rpartition("<answer>")
    thought = thought if opened else rest
    for tag in TAGS:
        thought = thought.replace(tag, " ")
    return Trace(thought.strip(), rest.partition(END)[0].strip() if opened else "", False)


def tags(text: str) -> float:
    """The share of the four tags that occur exactly once and in order, in [0, 1].

    A dense reward for the format, for models that do not find it by chance.
    """
    right, behind = 0, 0
    for tag in TAGS:
        place = text.find(tag, behind)
        if place >= 0 and text.count(tag) == 1:
            right, behind = right + 1, place + len(tag)
    return right / len(TAGS)


def counts(text: str) -> dict[str, float]:
    """Metrics of a completion, to be averaged and logged.

    - `format`: 1 if the format is whole;
    - `thought_words`: words in the thought;
    - `self_checks`: "wait", "let me check" and the like in the thought;
    - `backtracks`: "try again", "that is wrong" and the like in the thought.

    Source of the last two: Gandhi et al. 2025 (arXiv:2503.01307), verification and backtracking.
    """
    trace = read(text)
    return {
        "format": float(trace.whole),
        "thought_words": float(len(trace.thought.split())),
        "self_checks": float(len(CHECKS.findall(trace.thought))),
        "backtracks": float(len(RETURNS.findall(trace.thought))),
    }

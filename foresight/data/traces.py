"""Reasoning traces: a thought and an answer between tags, and what can be counted in them.

    <think> 7 and 12 ... wait, carry the one ... </think> <answer> 19 </answer>

The form is that of DeepSeek-R1, 2025 (arXiv:2501.12948), table 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
END = TAGS[-1]  # what stops a completion: nothing is said after the answer
ASK = (
    "First think between <think> and </think>, then write nothing but the answer between <answer> and </answer>."
    "\n\n"
)  # stands before every question, so that all prompts share it
_WHOLE = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
# Two of the habits that Gandhi et al. 2025 (arXiv:2503.01307), section 2, count in traces; the words are ours.
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
    """A completion that was read: `thought` and `answer` ("" where there is none), and whether its form is `whole`."""

    thought: str
    answer: str
    whole: bool


def read(text: str) -> Trace:
    """The trace in a completion.

    It is whole if there is nothing but the two parts and each tag stands once. Otherwise the answer is what the last
    `<answer>` holds, closed or not, and the thought is what stands before it.
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
    """The share of the four tags that stand exactly once and behind the ones before them, in [0, 1].

    A grade that rises on the way to a whole form, for models that do not find it by chance.
    """
    right, behind = 0, 0
    for tag in TAGS:
        place = text.find(tag, behind)
        if place >= 0 and text.count(tag) == 1:
            right, behind = right + 1, place + len(tag)
    return right / len(TAGS)


def counts(text: str) -> dict[str, float]:
    """What a completion is like, in numbers that are averaged and logged.

    - `format`: 1 where the form is whole;
    - `thought_words`: of the thought;
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

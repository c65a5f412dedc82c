"""The text task: single-use episodes of one answer each, and a grader that gives its own gold answers full marks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

from foresight.data import traces
from foresight.envs.text import curriculum
from foresight.envs.text.composite import BUNDLED, Part, grade_parts, weighted
from foresight.envs.text.rewards import Grader
from foresight.errors import UserError

Prompt = str | list[dict[str, str]]  # plain, or a conversation of {"role", "content"} messages


@dataclasses.dataclass(frozen=True)
class Example:
    """One question: its prompt, the gold answer if there is one, and whatever the grader needs to know."""

    prompt: Prompt
    answer: str | None = None
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)
    stop: tuple[str, ...] = ()  # texts that end an answer
    place: str = ""  # of the row that it was made from, for messages: "FILE, row 7"

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """JSON schemas of the functions that the answer may call, from the column `tools`."""
        return self.columns.get("tools")

    @property
    def question(self) -> str:
        """The prompt as a person reads it: the last message of a conversation."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


@dataclasses.dataclass(frozen=True)
class TextTask:
    """Examples to train on, examples held out, and a grader.

    `grade(examples, completions)` returns a float per completion; NaN means unscorable, which is not zero. It is what
    evaluations measure, and what training rewards unless there are `parts`.
    """

    name: str
    train: Sequence[Example]
    test: Sequence[Example]
    grader: Grader | None  # None: the examples hold demonstrations or preferences, and nothing grades other answers
    metric: str = "accuracy"
    parts: tuple[Part, ...] = ()  # of the reward in training
    traced: bool = False  # whether completions think before they answer (`data.traces`)
    curriculum: float = 1.0  # the share of the training examples, the easiest, from which a run first draws
    path: str = ""  # of the dataset that it was made from

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a completion."""
        return (traces.END,) if self.traced else ()

    @property
    def spaces(self) -> None:
        """Text has no Gymnasium spaces."""
        return None

    def grade(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """A reward per completion; NaN where the grader could not tell.

        Raises UserError, naming the sample, if the grader fails or returns what is infinite or no number.
        """
        if self.grader is None:
            raise UserError(
                f"'{self.name}' has nothing to grade completions with: give a reward function (--env-options "
                "reward=rewards.py:score), a column 'answer', or another --task."
            )
        return self.grader(examples, completions)

    def ask(self, prompt: Prompt) -> Example:
        """A prompt of anybody's in the words of training: where completions are traces, it asks for one."""
        if not self.traced:
            return Example(prompt)
        if isinstance(prompt, str):
            return Example(traces.ASK + prompt, stop=(traces.END,))
        *before, last = prompt
        return Example([*before, {**last, "content": traces.ASK + last["content"]}], stop=(traces.END,))

    def sizes(self) -> str:
        """How many examples are trained on and held out, and of how many prompts where these are fewer."""

        def side(examples: Sequence[Example], what: str) -> str:
            prompts = len({json.dumps(example.prompt) for example in examples})
            return f"{len(examples):,} {what}" + (f" ({prompts:,} prompts)" if prompts < len(examples) else "")

        return f"{side(self.train, 'examples to train on')}, {side(self.test, 'held out')}"

    def given(self) -> str:
        """What a user's reward function is called with, in words; "" where there is none."""
        if self.metric != "reward" and all(part.name in BUNDLED for part in self.parts):
            return ""
        columns = [name for name in (self.train[0].columns if self.train else ()) if name != "prompt"]
        return f"rewards are computed from prompts, completions{''.join(f', {name}' for name in columns)}"

    def ungraded(self) -> TextTask:
        """The same prompts with a grader that can tell of no answer, for what learns without one."""
        return dataclasses.replace(self, grader=lambda examples, answers: [math.nan] * len(answers))

    def reward(
        self, examples: Sequence[Example], completions: Sequence[str]
    ) -> tuple[list[float], dict[str, list[float]]]:
        """The reward of each completion in training, and by name what it is made of and what else was counted in it.

        A composite is the weighted sum of its parts; a part that could not tell (NaN) is left out of the sum, and the
        completion is unscorable where none could. Raises UserError as `grade` does.
        """
        seen: dict[str, list[float]] = {}
        if self.traced:
            rows = [traces.counts(completion) for completion in completions]
            seen |= {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        if not self.parts:
            return self.grade(examples, completions), seen
        found = grade_parts(self.parts, examples, completions)
        seen |= {f"reward_{part.name}": grades for part, grades in zip(self.parts, found, strict=True)}
        return [weighted([part.weight for part in self.parts], row) for row in zip(*found, strict=True)], seen

    def pool(self, progress: float, least: int = 1) -> Sequence[Example]:
        """The training examples to draw from when `progress` in [0, 1] of a run is over: at first the easiest.

        Their share grows evenly from `curriculum` to all of them at half of the run; never fewer than `least`.
        """
        if self.curriculum >= 1:
            return self.train
        return self._easiest[: curriculum.size(self.train, self.curriculum, progress, least)]

    @functools.cached_property
    def _easiest(self) -> list[Example]:
        return curriculum.by_difficulty(self.train)

    def check(self, count: int = 100) -> None:
        """Raise UserError unless the grader gives the gold answers of the first `count` examples full marks."""
        gold = [e for e in itertools.chain(self.test, self.train) if e.answer is not None][:count]
        for example, reward in zip(gold, self.grade(gold, [str(e.answer) for e in gold]), strict=True):
            if not reward >= 1:
                raise UserError(
                    f"The grader of '{self.name}' gives its own gold answer {example.answer!r} to "
                    f"{example.question!r} only {reward}: mend the grader or the answers."
                )

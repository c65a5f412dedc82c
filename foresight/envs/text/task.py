"""`TextTask`: prompts to train on and held-out prompts, with a grader for completions."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from foresight.data import traces
from foresight.envs.text import curriculum
from foresight.envs.text.composite import BUNDLED, Part, grade_parts, weighted
from foresight.envs.text.exact import canonical, last_number
from foresight.envs.text.rewards import Grader
from foresight.errors import UserError

Prompt = str | list[dict[str, str]]  # a string, or a conversation of {"role", "content"} messages


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt, its gold answer if there is one, and columns for the grader."""

    prompt: Prompt
    answer: str | None = None
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)
    stop: tuple[str, ...] = ()  # stop texts of the completion
    place: str = ""  # the row that it was read from, for error messages: "FILE, row 7"

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """JSON schemas of the tools that the completion may call, from the column `tools`."""
        return self.columns.get("tools")

    @property
    def question(self) -> str:
        """The prompt as text: the last message of a conversation."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


@dataclasses.dataclass(frozen=True)
class TextTask:
    """Training examples, held-out examples and a grader.

    `grade(examples, completions)` returns a float per completion; NaN means unscorable, which is not zero. It is the
    metric of evaluations, and the reward of training unless there are `parts`.
    """

    name: str
    train: Sequence[Example]
    test: Sequence[Example]
    grader: Grader | None  # None: the examples are demonstrations or preferences, and other answers are not graded
    metric: str = "accuracy"
    parts: tuple[Part, ...] = ()  # of the reward in training, if it is composite
    traced: bool = False  # whether completions are reasoning traces (`data.traces`)
    curriculum: float = 1.0  # the share of the training examples, the easiest, that a run starts with
    path: str = ""  # of the dataset that it was loaded from
    delimiter: str = "\n"  # ends a step of a completion
    marker: str = ""  # begins the answer after a trace; "": there is no trace
    extract: Callable[[str], str] | None = None  # the answer in a completion; None: the tags', or the last number
    episode: Callable[[Example], Any] | None = (
        None  # begins a conversation (`envs.tools.episode`): the completion is one
    )
    turns: int = 1  # of the model in a conversation
    episode_seconds: float = math.inf  # of the environment in a conversation
    weights: dict[str, float] = dataclasses.field(default_factory=dict)  # of a conversation's reward; none: its own
    verifier: Grader | None = None  # scores whole and partial completions in [0, 1] without their gold answers

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a completion."""
        return (traces.END,) if self.traced else ()

    @property
    def spaces(self) -> None:
        """Text has no Gymnasium spaces."""
        return None

    def grade(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """A reward per completion; NaN where the grader cannot score it.

        Raises UserError, naming the sample, if the grader fails or returns anything but a finite number or NaN.
        """
        if self.grader is None:
            raise UserError(
                f"Nothing scores the answers to {self.path or self.name}: give a reward function (--env-options "
                "reward=rewards.py:score), a column 'answer', or another --task."
            )
        return self.grader(examples, completions)

    def answer_in(self, completion: str) -> str:
        """The canonical answer of a completion, under which votes are counted: 0.5 and 1/2 are one answer."""
        if self.traced:
            completion = traces.read(completion).answer
        if self.extract is not None:
            return canonical(self.extract(completion))
        return canonical(last_number(completion) or completion)

    def ask(self, prompt: Prompt) -> Example:
        """An example with a user's prompt, which asks for a reasoning trace as in training if `traced`."""
        if not self.traced:
            return Example(prompt)
        if isinstance(prompt, str):
            return Example(traces.ASK + prompt, stop=(traces.END,))
        *before, last = prompt
        return Example([*before, {**last, "content": traces.ASK + last["content"]}], stop=(traces.END,))

    def sizes(self) -> str:
        """The number of training and held-out examples, and of their prompts where these are fewer."""

        def side(examples: Sequence[Example], what: str) -> str:
            prompts = len({json.dumps(example.prompt) for example in examples})
            return f"{len(examples):,} {what}" + (f" ({prompts:,} prompts)" if prompts < len(examples) else "")

        return f"{side(self.train, 'examples to train on')}, {side(self.test, 'held out')}"

    def given(self) -> str:
        """A sentence with the arguments of the user's reward function; "" if there is none."""
        if self.metric != "reward" and all(part.name in BUNDLED for part in self.parts):
            return ""
        columns = [name for name in (self.train[0].columns if self.train else ()) if name != "prompt"]
        return f"rewards are computed from prompts, completions{''.join(f', {name}' for name in columns)}"

    def ungraded(self) -> TextTask:
        """The same prompts with a grader that always returns NaN, for training without rewards."""
        return dataclasses.replace(self, grader=lambda examples, answers: [math.nan] * len(answers))

    def reward(
        self, examples: Sequence[Example], completions: Sequence[str]
    ) -> tuple[list[float], dict[str, list[float]]]:
        """The reward of each completion in training, and its parts and trace metrics by name.

        A composite reward is the weighted sum of its parts; parts that are NaN are left out, and a completion whose
        parts are all NaN is unscorable. Raises UserError like `grade`.
        """
        metrics: dict[str, list[float]] = {}
        if self.traced:
            rows = [traces.counts(completion) for completion in completions]
            metrics |= {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        if not self.parts:
            return self.grade(examples, completions), metrics
        grades = grade_parts(self.parts, examples, completions)
        metrics |= {f"reward_{part.name}": values for part, values in zip(self.parts, grades, strict=True)}
        return [weighted([part.weight for part in self.parts], row) for row in zip(*grades, strict=True)], metrics

    def pool(self, progress: float, least: int = 1) -> Sequence[Example]:
        """The training examples to sample from at `progress` in [0, 1] of a run: at first only the easiest.

        Their share grows linearly from `curriculum` to 1 at half of the run; never fewer than `least` examples.
        """
        if self.curriculum >= 1:
            return self.train
        return self._easiest[: curriculum.size(self.train, self.curriculum, progress, least)]

    @functools.cached_property
    def digest(self) -> str:
        """The sha256 of the training prompts and their answers in their order."""
        found = hashlib.sha256()
        for example in self.train:
            found.update(repr((example.prompt, example.answer)).encode())
        return found.hexdigest()

    @functools.cached_property
    def _easiest(self) -> list[Example]:
        return curriculum.by_difficulty(self.train)

    def check(self, count: int = 100) -> None:
        """Raise UserError unless the grader scores the gold answers of the first `count` examples 1."""
        gold = [e for e in itertools.chain(self.test, self.train) if e.answer is not None][:count]
        for example, reward in zip(gold, self.grade(gold, [str(e.answer) for e in gold]), strict=True):
            if not reward >= 1:
                raise UserError(
                    f"The grader of '{self.name}' gives its gold answer {example.answer!r} to "
                    f"{example.question!r} only {reward}, not 1: fix the grader or the answers."
                )

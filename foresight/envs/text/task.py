"""Text tasks: single-use episodes of one answer each, with a grader that gives its own gold answers full marks."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from foresight import errors
from foresight.data import forms, traces
from foresight.envs.text.rewards import function_grader, reward_at, reward_name, waits
from foresight.errors import UserError

Prompt = str | list[dict[str, str]]  # plain, or a conversation of {"role", "content"} messages
Grader = Callable[["Sequence[Example]", Sequence[str]], list[float]]
OWN_PARTS = ("correct", "format", "tags")  # of a composite reward; others are functions of the user's
CLIMB = 0.5  # of a run, over which a curriculum grows to all examples
HELD_OUT = 100  # examples, where nobody says how many
PATIENCE = 300.0  # seconds that a user's reward function may take for a batch


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
class Part:
    """A part of a composite reward: its name in the log, its weight, and its grader.

    One that `waits`, for another process or for the network, is graded beside the others.
    """

    name: str
    weight: float
    grader: Grader
    waits: bool = False


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
        if self.metric != "reward" and all(part.name in OWN_PARTS for part in self.parts):
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
        found = graded(self.parts, examples, completions)
        seen |= {f"reward_{part.name}": grades for part, grades in zip(self.parts, found, strict=True)}
        return [_weighted([part.weight for part in self.parts], row) for row in zip(*found, strict=True)], seen

    def pool(self, progress: float, least: int = 1) -> Sequence[Example]:
        """The training examples to draw from when `progress` in [0, 1] of a run is over: at first the easiest.

        Their share grows evenly from `curriculum` to all of them at half of the run; never fewer than `least`.
        """
        if self.curriculum >= 1:
            return self.train
        share = self.curriculum + (1 - self.curriculum) * min(1.0, progress / CLIMB)
        return self._easiest[: max(least, math.ceil(share * len(self.train)))]

    @functools.cached_property
    def _easiest(self) -> list[Example]:
        return sorted(self.train, key=lambda example: float(example.columns["difficulty"]))

    def check(self, count: int = 100) -> None:
        """Raise UserError unless the grader gives the gold answers of the first `count` examples full marks."""
        gold = [e for e in itertools.chain(self.test, self.train) if e.answer is not None][:count]
        for example, reward in zip(gold, self.grade(gold, [str(e.answer) for e in gold]), strict=True):
            if not reward >= 1:
                raise UserError(
                    f"The grader of '{self.name}' gives its own gold answer {example.answer!r} to "
                    f"{example.question!r} only {reward}: mend the grader or the answers."
                )


def graded(parts: Sequence[Part], examples: Sequence[Example], completions: Sequence[str]) -> list[list[float]]:
    """What each part gives to each completion. Those that wait do so at the same time."""
    waiting = sum(part.waits for part in parts)
    if waiting < 2:
        return [part.grader(examples, completions) for part in parts]
    pool = ThreadPoolExecutor(waiting)
    try:
        begun = [pool.submit(part.grader, examples, completions) if part.waits else None for part in parts]
        pairs = zip(parts, begun, strict=True)
        return [part.grader(examples, completions) if later is None else later.result() for part, later in pairs]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # whoever stops the run does not wait for the others


def last_integer(text: str) -> int | None:
    """The last number in a text; None if it is no integer, or if there is none. "1,000" is one thousand."""
    last = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?", text)[-1:]
    return int(last[0].replace(",", "")) if last and "." not in last[0] else None


def _grade_last_integer(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    return [float(last_integer(c) == int(e.answer or "")) for e, c in zip(examples, completions, strict=True)]


def addition(low: int = 0, high: int = 19, held_out: int = 100, seed: int = 0, reach: int | None = None) -> TextTask:
    """Questions like "What is 7 + 12?": every pair of addends in [low, high], `held_out` of them reserved by the seed.

    With `reach`, pairs with a larger addend, up to it, are trained on too: the held-out questions stay the same. The
    last number in the completion is the answer. The larger the sum, the harder it is taken to be.
    """
    top = high if reach is None else reach
    if top < high:
        raise UserError(f"reach must be at least high, which is {high}, but is {reach}.")
    examples = {
        (a, b): Example(f"What is {a} + {b}?", str(a + b), {"difficulty": a + b})
        for a, b in itertools.product(range(low, top + 1), repeat=2)
    }
    small = [example for pair, example in examples.items() if max(pair) <= high]
    large = [example for pair, example in examples.items() if max(pair) > high]
    task = _split("addition", small, held_out, seed, _grade_last_integer)
    return dataclasses.replace(task, train=[*task.train, *large])


def largest(numbers: int = 4, size: int = 2000, held_out: int = 200, seed: int = 0) -> TextTask:
    """Questions like "Which number is the largest: 34, 71, 15, 60?": `size` of them, of different two-digit numbers.

    The last number in the completion is the answer. The nearer the second largest, the harder it is taken to be.
    """
    if not 2 <= numbers <= 90:
        raise UserError(f"numbers is {numbers}: it must be from 2 to 90, as many as have two digits.")
    if size > (most := math.perm(90, numbers) // 2):  # half: they are drawn until they differ
        raise UserError(f"size is {size:,}: with {numbers} numbers it must be at most {most:,}.")
    draw, seen = random.Random(seed), set[tuple[int, ...]]()
    while len(seen) < size:
        seen.add(tuple(draw.sample(range(10, 100), numbers)))
    examples = [
        Example(
            f"Which number is the largest: {', '.join(map(str, row))}?",
            str(max(row)),
            {"difficulty": sorted(row)[-2] - max(row)},
        )
        for row in sorted(seen)
    ]
    return _split("largest", examples, held_out, seed, _grade_last_integer)


NAMES = {"Tom": "he", "Ben": "he", "Max": "he", "Sam": "he", "Ann": "she", "Eva": "she", "Mia": "she", "Zoe": "she"}
THINGS = ("figs", "nuts", "eggs", "keys", "hats", "pens")
STORIES = 8 * 7 * 6 * 40 * 9 * 2  # that there are: who, with whom, of what, how many, how many moved, and whither


def stories(size: int = 8000, held_out: int = 200, seed: int = 0) -> TextTask:
    """Stories like "Tom has 12 figs. Ann gives him 7. Now he has 19.": `size` of them, the last words for an answer.

    They are drawn evenly, and without repetition, from the 8 · 7 · 6 · 40 · 9 · 2 = 241,920 that there are: no model
    that has not seen a story can foresee it for less than log 241,920 nats. The number that it ends with is the answer.
    """
    if size > STORIES // 2:  # half: they are drawn until they differ
        raise UserError(f"size is {size:,}: it must be at most {STORIES // 2:,}, half of the stories that there are.")
    draw, seen = random.Random(seed), set[tuple[Any, ...]]()
    while len(seen) < size:
        who, other = draw.sample(list(NAMES), 2)
        gives = draw.random() < 0.5
        seen.add((who, other, draw.choice(THINGS), draw.randint(10, 49), draw.randint(1, 9), gives))
    return _split("stories", [_story(*row) for row in sorted(seen)], held_out, seed, _grade_ending)


def _story(who: str, other: str, thing: str, has: int, moved: int, gives: bool) -> Example:
    subject = NAMES[who]
    happens = f"gives {'him' if subject == 'he' else 'her'} {moved}" if gives else f"takes {moved} away"
    told = f"{who} has {has} {thing}. {other} {happens}. Now {subject} has"
    return Example(told, f" {has + moved if gives else has - moved}.")


def reasoning_gym(
    name: str, size: int = 1000, held_out: int = 100, seed: int = 0, exact: bool = False, **options: Any
) -> TextTask:
    """Any task of the package reasoning-gym, with its own scorer; `options` go to its generator.

    The answer is what stands in the last `<answer>...</answer>`; if there is none, the last number where the task asks
    for a whole number, and the whole completion elsewhere. Scorers may give a part of a point for what is not right:
    with `exact` only a full score counts, as 1, and all else is 0.
    """
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise UserError("reasoning-gym tasks need a package: run `pip install 'foresight[reasoning]'`.") from error
    registry = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in registry:
        raise errors.unknown("reasoning-gym task", name, registry)
    valid = [field.name for field in dataclasses.fields(registry[name][1]) if field.name not in ("seed", "size")]
    for option in options:
        if option not in valid:
            own = [key for key in inspect.signature(reasoning_gym).parameters if key not in ("name", "options")]
            raise errors.unknown(f"option of the task 'reasoning_gym:{name}'", option, [*own, *valid])
    try:
        dataset = gym.create_dataset(name, size=size + held_out, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"reasoning-gym cannot make '{name}' with {options}: {error}") from error

    def grade(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        scores = [
            float(dataset.score_answer(_answer_of(c, str(e.answer)), entry=e.columns["entry"]))
            for e, c in zip(examples, completions, strict=True)
        ]
        return [float(score >= 1) for score in scores] if exact else scores

    entries = [dataset[i] for i in range(size + held_out)]
    examples = [Example(entry["question"], str(entry["answer"]), {"entry": entry}) for entry in entries]
    metric = "accuracy" if exact else "score"
    return TextTask(f"reasoning_gym:{name}", examples[held_out:], examples[:held_out], grade, metric)


def _answer_of(completion: str, gold: str) -> str:
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    if not found and re.fullmatch(r"-?\d+", gold) and (number := last_integer(completion)) is not None:
        return str(number)
    return (found[-1] if found else completion).strip()


def dataset(
    path: str,
    reward: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    held_out: int | None = None,
    seed: int = 0,
    prompt: str = "prompt",
    reward_timeout: float = PATIENCE,
) -> TextTask:
    """A JSONL file, or a dataset that the package `datasets` loads, with a reward function.

    Each row has the column `prompt` (a string, or a list of messages). `reward` is a function, or its place as
    `file.py:name` or `package.module:name`. It is called as `reward(prompts=..., completions=..., **columns)`,
    each a list with an item per completion, and returns a list of floats; None means unscorable. Completions of
    conversations are lists of one message, as TRL gives them. One that is named by its place runs in a process of its
    own, and may take `reward_timeout` seconds for a batch (0: it runs here, without a limit). It may be `async`. Of
    several, given as a list, the sum is the reward, and each is among the metrics by its name; those that are `async`
    or in a process of their own are asked at the same time. Without `reward`, a completion is right if it ends with the
    column `answer`; rows may do without either (see `data.forms`), and then nothing is graded: what learns from
    demonstrations, preferences or a teacher needs no more.

    `held_out` rows are not trained on (default: 100, or a fifth of them if that is less): more where a prompt has
    several, since all rows of a prompt stand on one side.
    """
    rows = [{**row, "prompt": row[prompt]} if prompt in row else row for row in forms.read(path)]
    if not rows or (forms.form(rows[0]) == "prompt" and len(rows) < 2):
        raise UserError(f"{path} has {len(rows)} rows: at least 2 are needed, one to train on and one held out.")
    _, rows = forms.check(rows, path)
    columns = dict.fromkeys(itertools.chain.from_iterable(rows))
    rows = [{**columns, **row} for row in rows]  # a reward function is given all of them, None where a row has none
    answered = any(row.get("answer") is not None for row in rows)
    for number, row in enumerate(rows, 1):
        if reward is None and answered and row.get("answer") is None:
            raise UserError(f"{path}, row {number}: without a reward function every row needs the column 'answer'.")
    examples = [
        Example(
            row["prompt"], str(row["answer"]) if row.get("answer") is not None else None, row, (), f"{path}, row {n}"
        )
        for n, row in enumerate(rows, 1)
    ]
    if reward is None and not answered:
        return dataclasses.replace(_split(Path(path).stem, examples, held_out, seed, None), path=path)
    if reward is None:
        return dataclasses.replace(_split(Path(path).stem, examples, held_out, seed, _grade_ending), path=path)
    single = isinstance(reward, str) or callable(reward)
    parts = _several([reward] if single else list(reward), reward_timeout)  # type: ignore[list-item, arg-type]
    task = _split(Path(path).stem, examples, held_out, seed, _sum(parts))
    return dataclasses.replace(task, path=path, metric="reward", parts=() if single else parts)


def _several(rewards: Sequence[str | Callable[..., Any]], limit: float) -> tuple[Part, ...]:
    """Reward functions as parts of equal weight; equal names are numbered."""
    if not rewards:
        raise UserError("reward is an empty list: give a reward function, or leave it out for the column 'answer'.")
    parts, names = list[Part](), Counter[str]()
    for given in rewards:
        part = _function(given, 1.0, limit)
        names[part.name] += 1
        count = names[part.name]
        parts.append(dataclasses.replace(part, name=f"{part.name}_{count}") if count > 1 else part)
    return tuple(parts)


def _sum(parts: Sequence[Part]) -> Grader:
    """The grader that gives the weighted sum of what the parts give."""
    weights = [part.weight for part in parts]

    def grade(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [_weighted(weights, row) for row in zip(*graded(parts, examples, completions), strict=True)]

    return grade


def _function(given: str | Callable[..., Any], weight: float, limit: float) -> Part:
    """A reward function, given or by its place, as a part with its own name."""
    reward = reward_at(given, limit)
    return Part(reward_name(reward), weight, function_grader(reward), waits(reward))


def _grade_ending(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    def right(answer: str, completion: str) -> bool:
        ending = completion.strip().rstrip(".").rstrip()
        return ending == answer or bool(re.search(rf"(?<!\w){re.escape(answer)}$", ending))

    return [float(right(str(e.answer).strip().rstrip("."), c)) for e, c in zip(examples, completions, strict=True)]


def _split(name: str, examples: Sequence[Example], held_out: int | None, seed: int, grader: Grader | None) -> TextTask:
    """Reserve whole prompts by the seed until `held_out` examples are: equal prompts never stand on both sides.

    None is `HELD_OUT` or a fifth, but leaves a prompt to train on.

    Raises UserError where no prompt, or not so many examples, could be reserved with one prompt left to train on.
    """
    prompts = [json.dumps(e.prompt) for e in examples]
    sizes = Counter(prompts)
    order = list(sizes)
    if len(order) < 2:
        raise UserError(f"'{name}' has {len(order)} different prompts: at least 2 are needed, one of them held out.")
    random.Random(f"held out {seed}").shuffle(order)
    most = len(examples) - sizes[order[-1]]
    held_out = min(HELD_OUT, len(examples) // 5 or 1, most) if held_out is None else held_out
    if not 0 < held_out <= most:
        which = "" if len(order) == len(examples) else f" (of {len(order)} prompts, one of which is trained on)"
        raise UserError(f"held_out must be between 1 and {most} for '{name}'{which}, but is {held_out}.")
    reserved, count = dict[str, list[Example]](), 0
    for prompt in order:
        if count >= held_out:
            break
        reserved[prompt], count = [], count + sizes[prompt]
    train = [example for example, prompt in zip(examples, prompts, strict=True) if prompt not in reserved]
    for example, prompt in zip(examples, prompts, strict=True):
        if prompt in reserved:
            reserved[prompt].append(example)
    return TextTask(name, train, list(itertools.chain.from_iterable(reserved.values())), grader)


TASKS: dict[str, Callable[..., TextTask]] = {"addition": addition, "largest": largest, "stories": stories}


def make(
    name: str,
    *,
    trace: bool = False,
    rewards: dict[str, float] | None = None,
    curriculum: float = 1.0,
    reward_timeout: float = PATIENCE,
    **options: Any,
) -> TextTask:
    """A text task by its name: one of `TASKS`, `reasoning_gym:NAME`, or a dataset with a reward function.

    Any of them can be changed:

    - `trace`: completions think and then answer (`data.traces`). Prompts ask for it, and the task's grader is shown
      the answer alone. Rewards are then, by default, those of DeepSeek-R1: `{correct: 1, format: 1}`;
    - `rewards`: a composite reward, each part with its weight: `correct` (the task's grader), `format` (1 for a whole
      trace), `tags` (a share of it), or the place `file.py:name` of a reward function, which gets whole completions
      and may take `reward_timeout` seconds for a batch (0: it runs here, without a limit);
    - `curriculum`: the share of the examples, the easiest, that a run begins with; all at half of it. Examples need
      a column `difficulty` (`addition` and `largest` have one).

    Raises UserError for an unknown name or option, and if the grader does not accept its own gold answers.
    """
    kind, _, rest = name.partition(":")
    _check_options(name, make, {"trace": trace, "curriculum": curriculum, "reward_timeout": reward_timeout})
    maker = TASKS.get(name, reasoning_gym if kind == "reasoning_gym" and rest else dataset)
    named = maker is not dataset or "reward" in options or Path(name).exists() or bool(Path(name).suffix) or "/" in name
    if not named:
        raise errors.unknown("task", name, [*TASKS, "reasoning_gym:NAME", "FILE.jsonl"])
    _check_names(name, maker, options)
    _check_options(name, maker, options)
    if maker is reasoning_gym:
        task = reasoning_gym(rest, **options)
    else:
        task = maker(**options) if name in TASKS else dataset(name, reward_timeout=reward_timeout, **options)
    if task.grader is not None:
        if "reward" not in options:  # which has a scale of its own
            task.check()
    elif trace or rewards is not None:
        task.grade((), ())  # says that there is nothing to grade with
    if trace:
        task = _traced(task)
    rewards = {"correct": 1.0, "format": 1.0} if trace and rewards is None else rewards
    if rewards is not None:
        task = dataclasses.replace(task, parts=tuple(_part(task, *pair, reward_timeout) for pair in _pairs(rewards)))
    return task if curriculum == 1 else _graduated(task, curriculum)


NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}  # what fits each


def _check_names(name: str, maker: Callable[..., TextTask], options: dict[str, Any]) -> None:
    """Raise UserError for an option that neither the task nor `make` has; a generator of reasoning-gym has its own."""
    mine, shared = inspect.signature(maker).parameters, inspect.signature(make).parameters
    valid = [key for key in (*mine, *shared) if key not in ("path", "name", "options")]
    for option in options:
        if option not in valid and maker is not reasoning_gym:
            raise errors.unknown(f"option of the task '{name}'", option, dict.fromkeys(valid))


def _check_options(name: str, make: Callable[..., TextTask], options: dict[str, Any]) -> None:
    """Raise UserError for an option that is no number, or no yes or no, where `make` takes one."""
    for option, parameter in inspect.signature(make).parameters.items():
        wanted, value = str(parameter.annotation).partition(" ")[0], options.get(option)
        if wanted not in NUMBERS or value is None:
            continue
        if not isinstance(value, NUMBERS[wanted]) or isinstance(value, bool) != (wanted == "bool"):
            raise UserError(
                f"The option '{option}' of the task '{name}' must be {wanted}, not {value!r}. Options are words of "
                "their own, as in --env-options high=29 held_out=50."
            )


def _traced(task: TextTask) -> TextTask:
    """The task with prompts that ask for a thought before the answer, of which its grader sees the answer alone."""

    def grade(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return task.grade(examples, [traces.read(completion).answer for completion in completions])

    traced = dataclasses.replace(task, grader=grade, traced=True)

    def asked(example: Example) -> Example:
        found = traced.ask(example.prompt)
        return dataclasses.replace(example, prompt=found.prompt, stop=found.stop)

    train, test = ([asked(example) for example in side] for side in (task.train, task.test))
    return dataclasses.replace(traced, train=train, test=test)


def _pairs(rewards: Any) -> list[tuple[str, float]]:
    try:
        pairs = [(str(name), float(weight)) for name, weight in dict(rewards).items()]
    except (TypeError, ValueError):
        pairs = []
    if not pairs or not all(math.isfinite(weight) for _, weight in pairs):
        raise UserError(
            f"rewards is {rewards!r}: give each part its weight, as in rewards={{correct: 1, format: 0.2}}."
        )
    return pairs


def _part(task: TextTask, name: str, weight: float, limit: float) -> Part:
    known: dict[str, Grader] = {
        "correct": task.grade,
        "format": lambda _, completions: [float(traces.read(c).whole) for c in completions],
        "tags": lambda _, completions: [traces.tags(c) for c in completions],
    }
    if name in known:
        return Part(name, weight, known[name])
    if ":" not in name:
        raise errors.unknown("part of a reward", name, [*known, "FILE.py:FUNCTION"])
    return _function(name, weight, limit)


def _weighted(weights: Sequence[float], grades: Sequence[float]) -> float:
    known = [weight * grade for weight, grade in zip(weights, grades, strict=True) if not math.isnan(grade)]
    return sum(known) if known else math.nan


def _graduated(task: TextTask, curriculum: float) -> TextTask:
    if not 0 < curriculum <= 1:
        raise UserError(f"curriculum is {curriculum}: it is a share of the examples, above 0 and at most 1.")
    for number, example in enumerate(task.train, 1):
        if not isinstance(example.columns.get("difficulty"), int | float):
            raise UserError(
                f"A curriculum needs a number in the column 'difficulty' of every example; training example {number} "
                f"of '{task.name}' has {example.columns.get('difficulty')!r}."
            )
    return dataclasses.replace(task, curriculum=curriculum)

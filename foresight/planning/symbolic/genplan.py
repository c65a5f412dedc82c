"""Generalized planning by a language model: Silver et al. 2024 (arXiv 2305.11014).

A model reads a domain and two small problems, and writes: a summary, a strategy without search, a program
`get_plan(objects, init, goal)`. The program is run on training problems in the sandbox; up to four times the model gets
the first failing problem and what went wrong, and repairs the program. Only then it is evaluated on problems that it
never saw. New code is appended to the old, so helper functions persist; code that does not compile is left out.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foresight.envs.pddl import domains, programs, renaming
from foresight.envs.pddl.task import Atom, Problem, text_of, write_domain
from foresight.errors import UserError

Message = dict[str, str]  # role and content
Chat = Callable[[Sequence[Message]], str]  # a conversation to the next message
ROUNDS = 4
TRAINING = {"forest": 4, "delivery": 5}  # the others have 10: 2 prompts and 8 more
SHOWN = 10  # objects per type and atoms per predicate in a prompt
# A fenced block: its tag, and what it holds. The last one of an answer that was cut off has no end.
BLOCK = re.compile(r"^[^`\n]*```([^`\n]*)\n(.*?)(?:^[ \t]*```|```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
FUTURE = re.compile(r"^from __future__ import [^(\\\n]*(?:\n|\Z)", re.MULTILINE)
SUMMARY = "Write a short summary of this domain in words."
STRATEGY = (
    "There is a simple strategy for solving all problems in this domain without using search. What is that strategy?"
)


@dataclass
class Written:
    """A dialogue and its program. `faults`: the class of each round's fault; the last is "" if training ended well."""

    messages: list[Message]
    program: str
    faults: list[str]
    outcomes: list[programs.Outcome] = field(default_factory=list)  # of the evaluation

    @property
    def solved(self) -> float:
        """The share of the evaluation problems that are solved."""
        return sum(one.solved for one in self.outcomes) / max(1, len(self.outcomes))

    @property
    def classes(self) -> dict[str, int]:
        """The number of faults in the evaluation, by class."""
        return dict(Counter(one.fault for one in self.outcomes if one.fault))


def write(
    chat: Chat,
    prompts: Sequence[Problem],
    training: Sequence[Problem],
    evaluation: Sequence[Problem],
    rounds: int = ROUNDS,
    seconds: float = programs.SECONDS,
    thoughts: bool = True,
    report: Callable[[str], object] = lambda text: None,
    request: str = "",
) -> Written:
    """Let `chat` write a planner from `prompts`, repair it on `training`, and evaluate it.

    `thoughts` False leaves out summary and strategy. A model that was trained on requests of its own gets `request`
    instead of the protocol's messages. Raises UserError without problems or for negative `rounds`.
    """
    if rounds < 0 or not prompts or not training:
        raise UserError(f"A planner needs prompts, training problems and rounds of at least 0, not {rounds}.")
    messages: list[Message] = []

    def ask(text: str) -> str:
        messages.append({"role": "user", "content": text})
        answer = chat(messages)
        messages.append({"role": "assistant", "content": answer})
        return answer

    shown = introduction(prompts)
    if thoughts and not request:
        ask(f"{shown}\n{SUMMARY}")
        ask(STRATEGY)
    program, faults = "", []
    answer = ask(request or instruction(prompts[0], "" if thoughts else shown))
    for number in range(rounds + 1):
        program, missing = extended(program, answer)
        problem, fault = first_fault(program, training, seconds) if not missing else (training[0], missing)
        faults.append(fault.fault)
        report(f"round {number}: {fault.fault or 'all training problems are solved'}")
        if fault.solved or number == rounds:
            break
        answer = ask(complaint(problem, fault))
    outcomes = programs.solve(program, evaluation, seconds) if program else [
        programs.Outcome("exception", "there is no program") for _ in evaluation
    ]  # fmt: skip
    return Written(messages, program, faults, outcomes)


def problems(
    domain: str, tasks: int, names: str = "own", seed: int = 0
) -> tuple[list[Problem], list[Problem], list[Problem], Callable[[str], str]]:
    """Prompts (2), training (10 with the prompts; Forest 4, Delivery 5) and evaluation problems, and what renames a
    program. `names`: "own", "renamed" at random, or "none": without meaning.
    """
    training = domains.tasks(domain, TRAINING.get(domain, 10), seed, domains.TRAIN)
    evaluation = domains.tasks(domain, tasks, seed + 1_000_000)
    if names == "own":
        return training[:2], training, evaluation, lambda program: program
    stems = sorted({stem for problem in (*training, *evaluation) for stem in renaming.stems(problem)})
    rng = np.random.default_rng([seed, domains.NAMES.index(domain), 7])
    new = renaming.draw(training[0].domain, stems, rng, nameless=names == "none")
    made = renaming.rename_domain(training[0].domain, new)
    training = [renaming.rename(problem, new, made) for problem in training]
    evaluation = [renaming.rename(problem, new, made) for problem in evaluation]
    return training[:2], training, evaluation, lambda program: renaming.rename_program(program, new)


def first_fault(
    program: str, problems: Sequence[Problem], seconds: float = programs.SECONDS
) -> tuple[Problem, programs.Outcome]:
    """The first problem that the program does not solve, or the last one and its solution."""
    for problem in problems:
        (found,) = programs.solve(program, [problem], seconds)
        if not found.solved:
            break
    return problem, found


def extended(program: str, answer: str) -> tuple[str, programs.Outcome | None]:
    """The program with the code of an answer appended, and a fault if the answer has no code that compiles."""
    code = "\n".join(_blocks(answer)) or (answer if "def get_plan" in answer else "")
    if not code.strip():
        return program, programs.Outcome("exception", "The answer holds no Python code: write it in a block ```python.")
    code = _hoisted(code)
    whole = _hoisted(f"{program}\n{code}") if program else code
    try:
        with warnings.catch_warnings(action="ignore"):  # of the model's style
            for source in (code, whole):  # the code first: an error has its line there
                compile(source, "<unknown>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # as in the sandbox
        return program, programs.Outcome("exception", f"The code does not compile: {type(error).__name__}: {error}")
    return whole, None


def _hoisted(code: str) -> str:
    """The code with imports from `__future__` at its top: after other code they do not compile."""
    imports = dict.fromkeys(line.strip() for line in FUTURE.findall(code))
    return "\n".join([*imports, FUTURE.sub("", code)])


def _blocks(answer: str) -> list[str]:
    """The blocks of Python in an answer: those with its tag, or else those without any, which may be an output."""
    found = [(tag.strip().lower(), code) for tag, code in BLOCK.findall(answer.replace("\r\n", "\n"))]
    tagged = [code for tag, code in found if tag in ("python", "python3", "py")]
    return tagged or [code for tag, code in found if not tag]


def introduction(problems: Sequence[Problem]) -> str:
    """The domain and a few problems, with at most ten objects per type and ten atoms per predicate of each."""
    domain = problems[0].domain
    text = f"Here is a planning domain in PDDL.\n\n{domain.text or write_domain(domain)}\n"
    return text + "".join(f"Here is a problem of it.\n\n{abbreviated(problem)}\n" for problem in problems)


def abbreviated(problem: Problem) -> str:
    """A problem as text, shortened."""

    def few(groups: Mapping[str, list[str]], kinds: bool = False) -> str:
        lines = []
        for kind, found in groups.items():
            more = f" ... and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            lines.append("  " + " ".join(found[:SHOWN]) + more + (f" - {kind}" if kinds else ""))
        return "\n".join(lines)

    objects: dict[str, list[str]] = {}
    for name, kind in problem.objects.items():
        objects.setdefault(kind, []).append(name)
    shown = few(objects, problem.domain.typed)
    return f"objects:\n{shown}\ninit:\n{few(_grouped(problem.facts))}\ngoal:\n{few(_grouped(problem.goal))}\n"


def _grouped(atoms: Any) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for atom in sorted(atoms):
        groups.setdefault(atom[0], []).append(text_of(atom))
    return groups


def instruction(problem: Problem, before: str = "") -> str:
    """What a program takes and returns."""
    objects = "pairs (name, type)" if problem.domain.typed else "names"
    atom: Atom = min(problem.facts or problem.goal, key=lambda a: (-len(a), a))
    action = next(iter(problem.domain.actions.values()))
    step = f"({' '.join((action.name, *(v.removeprefix('?') for v, _ in action.parameters)))})"
    return (
        f"{before}Implement the strategy as a Python function\n\n"
        f"def get_plan(objects, init, goal):\n    # your code here\n    return plan\n\n"
        f"objects is a set of {objects}. init and goal are sets of tuples such as {atom!r}. plan is a list of texts, "
        f"one for each step, such as '{step}' with the names of objects. Use only the standard library."
    )


def complaint(problem: Problem, fault: programs.Outcome) -> str:
    """The message after a fault: the problem, what went wrong, and the request."""
    return f"On the problem\n\n{abbreviated(problem)}\nthe code failed. {fault.message}\n\nFix the code."


def scripted(replies: Sequence[str]) -> Chat:
    """A model that gives these replies in order. It raises UserError when they are used up."""
    left = list(replies)

    def chat(messages: Sequence[Message]) -> str:
        if not left:
            raise UserError(f"The scripted model has only {len(replies)} replies.")
        return left.pop(0)

    return chat


def recorded(path: str | Path) -> Chat:
    """The model of a recorded dialogue, a JSON list of messages. It raises UserError where the questions differ."""
    try:
        messages = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read the dialogue {path}: {error}.") from error
    if not (isinstance(messages, list) and all(isinstance(one, dict) and "content" in one for one in messages)):
        raise UserError(f"The dialogue {path} must be a list of messages, each with a role and content.")

    def chat(asked: Sequence[Message]) -> str:
        known = messages[: len(asked)]
        if known != list(asked) or len(messages) <= len(asked):
            raise UserError(f"The dialogue {path} was recorded with other questions, from message {len(asked)} on.")
        return str(messages[len(asked)]["content"])

    return chat

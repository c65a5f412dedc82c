"""`foresight think`: methods on the held-out questions of a task, at several budgets, as one document."""

from __future__ import annotations

import dataclasses
import difflib
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from foresight.envs.text import graders
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError, unknown
from foresight.nets.language import pretrained
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation import server
from foresight.planning.reasoning import methods, verifiers
from foresight.planning.reasoning.mind import Charge, Mind, Result, Verifier, check_budget
from foresight.runtime import catalog, run
from foresight.runtime.evaluation.evaluate import Evaluation

VERIFIERS = ("exact", "critic", "FOLDER")
CHUNK = 64  # questions thought about side by side
EXAMPLES = 5  # questions whose thoughts are written
VOTES = 32  # candidates of such a question that are written
Report = Callable[[str], object]


def model(name: str, device: torch.device | str, completer: str | None = None, report: Report = print) -> LanguageModel:
    """The model `name`: as `pretrained.load`, a run directory, or a bundled agent. `completer` is the URL of a server.

    A run without an export, as a bundled agent is, gives the weights of its last checkpoint. Raises UserError if the
    run has no language model.
    """
    source, found = exported(name), run.find(name)
    if source == name and (found / "config.yaml").is_file():
        agent = run.load(found, device=str(device))
        policy = getattr(agent.state, "policy", None)
        if not isinstance(policy, LanguageModel):
            raise UserError(f"{name} has no language model: it is a run of {agent.settings.algorithm}.")
    else:
        near = [] if Path(source).is_dir() else difflib.get_close_matches(name, catalog.bundled(), n=1, cutoff=0.8)
        if near:  # before a hub is asked
            raise UserError(f"There is no model '{name}'. Did you mean the bundled '{near[0]}'?")
        policy = pretrained.load(source, device)
    if completer is not None:
        policy.completer = server.Server(completer, policy, report=report)
    return policy


def exported(name: str) -> str:
    """The export of a run directory; other names unchanged."""
    folder = Path(name) / "export"
    return str(folder) if folder.is_dir() else name


def verifier(
    name: str, task: TextTask, policy: LanguageModel, model: str, device: torch.device | str
) -> Verifier | None:
    """The verifier: "" (none), "exact" (the task's), "critic" (the model's heads), or a reward model's folder."""
    if not name:
        return None
    if name == "exact":
        return verifiers.exact(task)
    if name == "critic":
        heads = pretrained.load_heads(exported(model), device)
        if heads is None:
            raise UserError(f"{model} has no multi-token heads: give the export of a run of mtp_critic.")
        return verifiers.critic(policy, heads)
    if not Path(name).exists():
        raise unknown("verifier", name, VERIFIERS)
    return verifiers.reward_model(pretrained.load_scorer(exported(name), device, trained=True))


def budgets(most: int, answer: int, points: int) -> list[int]:
    """`points` budgets up to `most`, each a quarter of the next, none below one answer."""
    check_budget(most, answer)
    found = {max(answer, most // 4**i) for i in range(max(points, 1))}
    return sorted(found)


def think(
    names: Sequence[str],
    policy: Any,
    task: TextTask,
    questions: int,
    most: int,
    *,
    points: int = 3,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    verify: Verifier | None = None,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    report: Report = lambda text: None,
) -> tuple[dict[str, Any], dict[str, Result], list[dict[str, Any]]]:
    """Each method at each budget on the first held-out questions, beside greedy answers.

    Returns the document; of each method the first question's result at the largest budget, whose tree is shown; and the
    first questions with what each method thought at each budget, as JSON types.
    Raises UserError for a task that cannot grade, and as `methods.run` does.
    """
    if questions < 1:
        raise UserError(f"questions is {questions}: it must be at least 1.")
    examples = list(task.test)[:questions]
    task.grade((), ())  # raises: there is no grader
    for name in names:
        methods.check(name, task, verify is not None, options or {})
    levels = budgets(most, max_new_tokens, points)

    def run(name: str, budget: int | None, **given: Any) -> list[Result]:
        mind = Mind(policy, max_new_tokens, temperature, verify, torch.Generator().manual_seed(seed))
        return [
            result
            for start in range(0, len(examples), CHUNK)
            for result in methods.run(name, mind, task, examples[start : start + CHUNK], budget, **given)
        ]

    plain = run("greedy", None) if not all(name == "graph_of_thoughts" for name in names) else []
    length = statistics.fmean([result.charge.sampled_tokens for result in plain]) if plain else max_new_tokens
    rows = [row("greedy", max_new_tokens, task, examples, plain)] if plain else []
    shown: dict[str, Result] = {}
    few = [{"question": e.question, "answer": str(e.answer), "results": []} for e in examples[:EXAMPLES]]
    _show(few, "greedy", max_new_tokens, task, examples, plain)
    for name in names:
        for budget in levels if name != "greedy" else ():
            given = {**methods.sized(name, budget, length), **(options or {})}
            results = run(name, budget, **given)
            rows.append(row(name, budget, task, examples, results, given))
            shown[name] = results[0]
            _show(few, name, budget, task, examples, results)
            report(f"{name} at {budget:,} tokens: {rows[-1]['accuracy']:.3f}")
    document = {
        "task": task.name, "questions": len(examples), "metric": task.metric, "answer_tokens": length,
        "temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed, "rows": rows,
    }  # fmt: skip
    return document, shown, few


def _show(
    few: list[dict[str, Any]],
    name: str,
    budget: int,
    task: TextTask,
    examples: Sequence[Example],
    results: list[Result],
) -> None:
    """Add to each of the first questions what a method thought: its answer, votes, cost and tree."""
    for one, example, result in zip(few, examples, results, strict=False):
        answer = result.answer
        candidates = answer.candidates[:VOTES] or ((answer.text, 1.0),)
        texts = [answer.text, *(text for text, _ in candidates)]
        grades = task.grade([example] * len(texts), texts)
        reward, *rewards = (None if math.isnan(grade) else float(grade) for grade in grades)
        votes = [
            {"text": text, "key": task.answer_in(text), "score": float(score), "reward": right}
            for (text, score), right in zip(candidates, rewards, strict=True)
        ]
        one["results"].append(
            {"method": name, "budget": budget, "text": answer.text, "reward": reward, "votes": votes,
             "charge": dataclasses.asdict(result.charge), "tree": answer.tree.document()}
        )  # fmt: skip


def row(
    name: str,
    budget: int,
    task: TextTask,
    examples: Sequence[Example],
    results: Sequence[Result],
    given: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A line of the table: accuracy with its standard error, and the mean charge of a question.

    Of a method with several candidates also whether any is right, and the share of right ones: papers mix the three.
    Answers that the grader cannot score are left out. Raises UserError if it can score none.
    """
    grades = graders.scored(task.grade(examples, [result.answer.text for result in results]))
    if not grades:
        raise UserError(
            f"The grader of '{task.name}' can score none of the {len(results)} answers of {name}: let the reward "
            "function return numbers for them, not None or NaN."
        )
    evaluation = Evaluation.of(task.metric, grades)
    total = sum((result.charge for result in results), Charge())
    found: dict[str, Any] = {"method": name, "budget": budget, "accuracy": statistics.fmean(grades)}
    found["standard_error"] = evaluation.std / len(grades) ** 0.5
    found |= {key: value / len(results) for key, value in dataclasses.asdict(total).items()}
    several = [[text for text, _ in result.answer.candidates] or [result.answer.text] for result in results]
    if any(len(texts) > 1 for texts in several):
        flat = [(e, text) for e, texts in zip(examples, several, strict=True) for text in texts]
        graded = iter(task.grade([e for e, _ in flat], [text for _, text in flat]))
        every = (graders.scored([next(graded) for _ in texts]) for texts in several)
        if each := [values for values in every if values]:
            found["any"] = statistics.fmean(max(values) for values in each)
            found["mean"] = statistics.fmean(statistics.fmean(values) for values in each)
    if given:
        found["options"] = given
    return found

"""Every method by name, and how one is run on many questions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from foresight import errors
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.planning.reasoning import graph_of_thoughts as graphs
from foresight.planning.reasoning import sorting
from foresight.planning.reasoning.beam import beam, dvts
from foresight.planning.reasoning.budget_forcing import budget_forcing
from foresight.planning.reasoning.deep_think import deep_think
from foresight.planning.reasoning.mind import Mind, Result
from foresight.planning.reasoning.thought_search import puct
from foresight.planning.reasoning.tree_of_thoughts import tree_of_thoughts
from foresight.planning.reasoning.value_guided import value_guided
from foresight.planning.reasoning.voting import best_of_n, greedy, self_consistency

METHODS: dict[str, Callable[..., Any]] = {
    "greedy": greedy,
    "self_consistency": self_consistency,
    "best_of_n": best_of_n,
    "beam": beam,
    "dvts": dvts,
    "tree_of_thoughts": tree_of_thoughts,
    "graph_of_thoughts": graphs.graph_of_thoughts,
    "puct": puct,
    "value_guided": value_guided,
    "deep_think": deep_think,
    "budget_forcing": budget_forcing,
}
NEED_VERIFIER = ("best_of_n", "beam", "dvts", "value_guided", "puct")
INTERNAL = ("problem", "mind", "task", "examples", "budget", "plan")


def options(name: str) -> dict[str, Any]:
    """The options of a method with their defaults. Raises UserError for an unknown method."""
    if name not in METHODS:
        raise errors.unknown("method", name, METHODS)
    parameters = inspect.signature(METHODS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in INTERNAL}


def sized(name: str, budget: int, answer_tokens: float) -> dict[str, Any]:
    """Options with which a method spends about `budget` tokens, when an answer has `answer_tokens`."""
    n = max(1, min(64, int(budget // max(answer_tokens, 1.0))))
    step = {"step_tokens": int(answer_tokens) + 1}  # no step is longer than an answer usually is
    chosen: dict[str, dict[str, Any]] = {
        "self_consistency": {"n": n},
        "best_of_n": {"n": n},
        "beam": {**step, "n": n, "width": min(4, n)},
        "dvts": {**step, "n": n, "width": min(4, n)},
        "tree_of_thoughts": {**step, "samples": min(8, n), "breadth": max(1, n // 8)},
        "puct": {**step, "simulations": n, "actions": min(4, n)},
        "value_guided": {"samples": n, "block": 0},
        "deep_think": {"n": max(1, n // 2)},
        "budget_forcing": {"ignore": n - 1},
    }
    return chosen.get(name, {})


def run(
    name: str, mind: Mind, task: TextTask, examples: Sequence[Example], budget: int | None = None, **given: Any
) -> list[Result]:
    """Answer the examples with the method `name`, each within `budget` sampled tokens.

    Raises UserError for an unknown method or option, a value of another type, and a method that needs a verifier, or a
    plan, where there is none.
    """
    check(name, task, mind.verifier is not None, given)
    if name == "puct":
        return puct(mind, task, examples, budget, **given)
    if name == "graph_of_thoughts":
        given = {"plan": sorting.plan(), **given}
    return mind.think(METHODS[name], task, examples, budget, **given)


def check(name: str, task: TextTask, verified: bool, given: dict[str, Any]) -> None:
    """Raise UserError unless the method can run on the task, with a verifier or without, with these options."""
    valid = options(name)
    for key, value in given.items():
        if key not in valid:
            raise errors.unknown(f"option of {name}", key, valid)
        wanted = float if valid[key] is None else type(valid[key])  # None: a number that has its default elsewhere
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise UserError(f"The option '{key}' of {name} must be {wanted.__name__}, not {value!r}.")
        if key == "step_tokens" and value < 1:
            raise UserError(f"The option 'step_tokens' of {name} must be at least 1, not {value}.")
        if key == "temperature" and not 0 <= value < math.inf:
            raise UserError(f"The option 'temperature' of {name} must be at least 0, not {value}.")
    if not verified and (name in NEED_VERIFIER or given.get("weighted")):
        raise UserError(
            f"{name} needs a verifier{' for a weighted vote' if given.get('weighted') else ''}: give --verifier exact "
            "(if the task has one) or --verifier FOLDER (the export of a reward model), or choose self_consistency."
        )
    if name == "graph_of_thoughts" and task.name != "sorting":
        raise UserError(
            f"graph_of_thoughts needs a plan of how to split and merge, which '{task.name}' does not have: use "
            "--task sorting, or pass a Plan from Python."
        )

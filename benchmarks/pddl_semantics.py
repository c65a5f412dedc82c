"""Random states and plans of the seven domains: our successors and verdicts against Fast Downward's translation.

    python benchmarks/pddl_semantics.py        # writes results/pddl-semantics.json

Each state of a random walk must have the same applicable actions and the same atoms after each of them. Plans are half
valid ones (found by our search) and half mutated ones (a step removed, doubled, swapped or with another object).
Actions without any effect, such as a move from a room to itself, are left out: the translation drops them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import numpy as np

from foresight.envs.pddl import domains, kernels
from foresight.envs.pddl.ground import ground
from foresight.envs.pddl.task import Action, Problem
from foresight.envs.pddl.validate import operator, validate
from foresight.planning.symbolic import downward
from foresight.planning.symbolic.search import search
from foresight.runtime import bench

COMMAND = "python benchmarks/pddl_semantics.py"
PROBLEMS, STATES, PLANS = 8, 18, 18  # per domain, and per problem


def compare(problem: Problem, states: int, plans: int, seed: int) -> Counter[str]:
    """How many states and plans of a problem agree."""
    theirs, task = downward.translate(problem), ground(problem)
    known, counts = theirs.known(), Counter[str]()
    rng = np.random.default_rng(seed)
    out, after = np.zeros(max(1, len(task.actions)), np.int32), np.zeros_like(task.init)

    def shown(bits: np.ndarray) -> set[str]:
        atoms = {f"{a[0]}({', '.join(a[1:])})" for a in task.state(bits)}
        return atoms & known

    bits, state = task.init.copy(), theirs.init
    for _ in range(states):
        ours = [int(i) for i in out[: kernels.applicable(bits, task.arrays, out)] if not idle(task.actions[i])]
        same = sorted(task.actions[i].name for i in ours) == theirs.applicable(state) and shown(bits) == theirs.atoms(
            state
        )
        for i in ours if same else ():
            kernels.apply(bits, i, task.arrays, after)
            same &= shown(after) == theirs.atoms(theirs.apply(state, task.actions[i].name))
        counts["states"] += 1
        counts["states_equal"] += same
        counts["successors"] += len(ours)
        if not same:
            break
        if not ours:  # a dead end
            bits, state = task.init.copy(), theirs.init
            continue
        chosen = ours[int(rng.integers(len(ours)))]
        kernels.apply(bits, chosen, task.arrays, after)
        bits, state = after.copy(), theirs.apply(state, task.actions[chosen].name)
    plan = search(task, "gbfs", "hff").plan or []
    for k in range(plans):
        tried = mutated(plan, problem, rng) if k % 2 else list(plan)
        valid = validate(problem, tried).valid
        counts["plans"] += 1
        counts["plans_valid"] += valid
        counts["plans_equal"] += valid == holds(theirs, tried)
    return counts


def idle(action: Action) -> bool:
    """Whether a ground action changes nothing where it is applicable."""
    return set(action.add) <= set(action.positive) and set(action.delete) <= set(action.add)


def holds(theirs: downward.Translated, plan: list[str]) -> bool:
    """Whether Fast Downward's operators take the plan to the goal."""
    state = theirs.init
    for step in plan:
        if step not in theirs.operators or step not in theirs.applicable(state):
            return False
        state = theirs.apply(state, step)
    return theirs.solved(state)


def mutated(plan: list[str], problem: Problem, rng: np.random.Generator) -> list[str]:
    """A step removed, doubled, swapped with the next, or with another object."""
    made, i = list(plan), int(rng.integers(len(plan)))
    which = int(rng.integers(4))
    if which == 0:
        del made[i]
    elif which == 1:
        made.insert(i, made[i])
    elif which == 2 and i + 1 < len(made):
        made[i], made[i + 1] = made[i + 1], made[i]
    else:
        words = made[i].strip("()").split()
        words[int(rng.integers(1, len(words)))] = str(rng.choice(list(problem.objects)))
        made[i] = f"({' '.join(words)})"
    steps = [operator(problem, step)[0] for step in made]
    return mutated(plan, problem, rng) if any(step and idle(step) for step in steps) else made


def main() -> None:
    began, counts = time.perf_counter(), Counter[str]()
    for name in domains.NAMES:
        for seed in range(PROBLEMS):
            counts += compare(domains.of_size(name, 3 + seed % 3, seed), STATES, PLANS, seed)
    values = {key: int(value) for key, value in counts.items()}
    equal = values["states"] == values["states_equal"] and values["plans"] == values["plans_equal"]
    document = {
        "what": "random states and plans: successors and verdicts compared with Fast Downward's translation",
        "command": COMMAND, "seeds": list(range(PROBLEMS)), **values, "all_equal": equal,
        "versions": bench.versions(), "machine": bench.machine(), "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    Path("results/pddl-semantics.json").write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(values, indent=2))


if __name__ == "__main__":
    main()

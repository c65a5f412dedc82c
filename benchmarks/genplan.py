"""Generalized planning: hand-written planners, injected faults, and seconds by size against two planners.

    python benchmarks/genplan.py planners     # writes results/genplan-planners.json
    python benchmarks/genplan.py times        # writes results/genplan-times.json and docs/media/genplan-times.png
    python benchmarks/genplan.py times 3      # with three problems per size
    python benchmarks/genplan.py untrained    # writes results/genplan-untrained.json
    python benchmarks/genplan.py smollm2 RUN  # writes results/genplan-smollm2.json; RUN: of sft, smollm2-planners

`planners`: the planners that were written by hand, on 30 evaluation problems of each domain; and a scripted model that
first gives a program with one class of fault and then, after the complaint, the right one.

`untrained`: SmolLM2 as it is. `smollm2`: after SFT, on 30 renamings of three domains that it never saw, in up to four
rounds of debugging (greedy at first, then sampled at temperature 0.7); on names without meaning; and on a variant of
each domain, with the parameters of the actions in the opposite order.

`times`: ten sizes of each domain. The program's seconds are those of its process, from its start to the validated
plan; Fast Downward's (lama-first, 30 s) are those of its driver, with translation; our search's those of grounding and
greedy best-first search with h_FF. All three get the problem as an object and write or read what they need. A planner
that fails at a size is not tried at larger ones. CPU seconds, of the process and its children, are given beside the
wall clock: they depend less on what else the machine does.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foresight.envs.pddl import domains, programs
from foresight.envs.pddl.ground import ground
from foresight.envs.pddl.task import Problem
from foresight.envs.pddl.validate import validate
from foresight.planning.symbolic import downward, genplan
from foresight.planning.symbolic.search import search
from foresight.runtime import bench

TASKS, SEED, LIMIT = 30, 0, 30.0
SMALL = ("ferry", "forest", "gripper")  # whose planners are shortest
SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
LARGER = (4, 8, 16, 32, 64, 96, 128, 160, 192, 256)
SIZES_OF = dict.fromkeys(domains.NAMES, SIZES) | {
    "delivery": LARGER,
    "heavy": LARGER,
}  # up to what is hard for a planner
# Each stands in for the first program of a scripted model; `right` is the planner that it gives after the complaint.
FAULTS = {
    "exception": "def get_plan(objects, init, goal):\n    return sorted(init)[len(init)]\n",
    "time-out": "def get_plan(objects, init, goal):\n    while True:\n        pass\n",
    "not a plan": "def get_plan(objects, init, goal):\n    return (step for step in goal)\n",
    "invalid operator": "def get_plan(objects, init, goal):\n    return ['(teleport everything)']\n",
    "unmet precondition": "{right}\nright = get_plan\n\ndef get_plan(*task):\n    return right(*task)[1:]\n",
}


def faults(name: str, seconds: float = 1.0) -> dict[str, Any]:
    """For each class: what the scripted dialogue called the faults, and the problems solved in the end."""
    prompts, training, evaluation, _ = genplan.problems(name, 2, "own", SEED)
    right, found = programs.plain(programs.written(name)), {}
    for fault, source in FAULTS.items():
        replies = [
            "A summary.",
            "A strategy.",
            *(f"```python\n{x}```" for x in (source.replace("{right}", right), right)),
        ]
        made = genplan.write(genplan.scripted(replies), prompts, training[:3], evaluation, seconds=seconds)
        found[fault] = {"faults": made.faults, "solved": made.solved}
    return found


def planners() -> dict[str, Any]:
    """Problems solved by the hand-written planners, and the faults."""
    solved, seconds, classes = {}, {}, {}
    for name in domains.NAMES:
        outcomes = programs.solve(programs.written(name), domains.tasks(name, TASKS, SEED + 1_000_000))
        solved[name] = sum(one.solved for one in outcomes)
        seconds[name] = round(statistics.median(one.seconds for one in outcomes), 4)
        classes[name] = faults(name)
    repaired = sum(
        found["faults"] == [fault, ""] and found["solved"] == 1
        for by_class in classes.values() for fault, found in by_class.items()
    )  # fmt: skip
    return {
        "what": "hand-written planners of seven domains on 30 problems each; faults of a scripted model, repaired",
        "seeds": [SEED], "solved": solved, "least_solved": min(solved.values()),
        "median_seconds": seconds,
        "faults_injected": len(FAULTS) * len(domains.NAMES), "faults_named_and_repaired": repaired,
        "dialogues": classes,
    }  # fmt: skip


def program(problem: Problem, name: str) -> bool:
    """Whether the hand-written planner solves the problem."""
    return programs.solve(programs.written(name), [problem], LIMIT)[0].solved


def downwards(problem: Problem, name: str) -> bool:
    """Whether Fast Downward does."""
    plan = downward.plan(problem, LIMIT).plan
    return plan is not None and validate(problem, plan).valid


def ours(problem: Problem, name: str) -> bool:
    """Whether our search does."""
    plan = search(ground(problem), "gbfs", "hff", LIMIT).plan
    return plan is not None and validate(problem, plan).valid


PLANNERS: dict[str, Callable[[Problem, str], bool]] = {"program": program, "downward": downwards, "search": ours}


def times(repeats: int = 1) -> dict[str, Any]:
    """Median seconds by domain, planner and size; None from the first size at which a planner fails or is too slow."""
    wall: dict[str, dict[str, dict[str, float | None]]] = {}
    cpu: dict[str, dict[str, dict[str, float | None]]] = {}
    objects: dict[str, dict[str, int]] = {}
    ours(domains.of_size("gripper", 3), "gripper")  # compiles
    for name in domains.NAMES:
        wall[name] = {planner: {} for planner in PLANNERS}
        cpu[name] = {planner: {} for planner in PLANNERS}
        objects[name] = {}
        tired: set[str] = set()
        for size in SIZES_OF[name]:
            problems = [domains.of_size(name, size, seed) for seed in range(repeats)]
            objects[name][str(size)] = len(problems[0].objects)
            taken: dict[str, list[tuple[float, float]]] = {planner: [] for planner in PLANNERS}
            for problem in problems:  # planners alternate
                for planner, solve in PLANNERS.items():
                    if planner in tired:
                        continue
                    began, used = time.perf_counter(), sum(os.times()[:4])
                    if solve(problem, name):
                        taken[planner].append((time.perf_counter() - began, sum(os.times()[:4]) - used))
                    else:
                        tired.add(planner)
            for planner, found in taken.items():
                whole = len(found) == repeats
                for table, part in ((wall, 0), (cpu, 1)):
                    median = round(statistics.median(one[part] for one in found), 4) if whole else None
                    table[name][planner][str(size)] = median
            print(name, size, {p: cpu[name][p][str(size)] for p in PLANNERS}, file=sys.stderr, flush=True)
    speedups = [_speedup(table) for table in (wall, cpu)]
    return {
        "what": "seconds by size: hand-written planner programs, Fast Downward (lama-first) and our search",
        "seeds": list(range(repeats)), "sizes": {name: list(sizes) for name, sizes in SIZES_OF.items()},
        "objects": objects, "seconds_by_size": wall,
        "cpu_seconds_by_size": cpu, "speedup_at_largest_common_size": speedups[0], "speedup_of_cpu": speedups[1],
        "least_speedup": min(speedups[0].values()), "least_speedup_of_cpu": min(speedups[1].values()),
    }  # fmt: skip


def _speedup(table: dict[str, dict[str, dict[str, float | None]]]) -> dict[str, float]:
    """Fast Downward's seconds over the program's, at the largest size that both solve."""
    found = {}
    for name, by_planner in table.items():
        pairs = [(by_planner["downward"][str(s)], by_planner["program"][str(s)]) for s in SIZES_OF[name]]
        both = [theirs / ours for theirs, ours in pairs if theirs is not None and ours is not None]
        found[name] = round(both[-1], 2)
    return found


def untrained(model: str = "smollm2") -> dict[str, Any]:
    """SmolLM2 as it is, in renamed domains: without a summary, greedy, up to four rounds of 300 tokens each."""
    from foresight.nets.language import pretrained
    from foresight.planning.generation import chat

    policy, found = pretrained.load(model, "cpu"), {}
    for name in SMALL:
        prompts, training, evaluation, _ = genplan.problems(name, TASKS, "renamed", SEED)
        speak = chat.local(policy, 300)
        made = genplan.write(speak, prompts[:1], training, evaluation, seconds=5.0, thoughts=False)
        found[name] = {"solved": made.solved, "faults": made.faults, "classes": made.classes}
        print(name, found[name], file=sys.stderr, flush=True)
    solved = sum(one["solved"] == 1 for one in found.values())
    return {
        "what": "SmolLM2-135M-Instruct, untrained, writes planners of renamed domains", "seeds": [SEED],
        "domains": found, "solved_renamings": solved / len(found),
    }  # fmt: skip


def smollm2(run: str = "runs/reproduce/sft-smollm2-planners-0") -> dict[str, Any]:
    """SmolLM2 after SFT: the share of held-out renamings whose 30 evaluation problems are all solved."""
    from foresight.envs.text.planners import planners as task
    from foresight.nets.language import pretrained
    from foresight.runtime.reasoning.think import exported

    policy, names = pretrained.load(exported(run), "cpu"), ",".join(SMALL)
    groups = {
        "renamed": task(names, size=1, held_out=30, tests=TASKS).test,
        "nameless": task(names, size=1, held_out=3, tests=TASKS, nameless=True).test,
        "variant": task(names, size=1, held_out=9, tests=TASKS, turned=True).test,
    }
    found = {name: answered(policy, examples) for name, examples in groups.items()}
    each = {name: _rate(found["renamed"], 4, name) for name in SMALL}
    return {
        "what": "SmolLM2-135M-Instruct after SFT writes planners of renamed domains", "seeds": [SEED],
        "solved_renamings": _rate(found["renamed"], 4), "solved_at_once": _rate(found["renamed"], 0),
        "least_domain": min(each.values()), "by_domain": each, "nameless": _rate(found["nameless"], 4),
        "variant": _rate(found["variant"], 4), "dialogues": found,
    }  # fmt: skip


def answered(policy: Any, examples: Any) -> list[dict[str, Any]]:
    """Of each example: its domain, the rounds that it took, the faults, and the evaluation problems solved of 30."""
    from foresight.envs.text import planners as task
    from foresight.planning.generation import chat
    from foresight.planning.generation.rollout import complete, texts

    first, found = texts(policy, complete(policy, examples, 1, 320, 0.0)), []
    for number, (example, reply) in enumerate(zip(examples, first, strict=True)):
        later = chat.local(policy, 320, 0.7, number)

        def speak(messages: Any, reply: str = reply, later: Any = later) -> str:
            return reply if len(messages) == 1 else str(later(messages))

        training = task.renamed(example, 10, False)
        made = genplan.write(
            speak, training[:2], training, task.renamed(example, TASKS, True), seconds=5.0,
            request=str(example.prompt),
        )  # fmt: skip
        found.append({"domain": example.columns["planning"], "renaming": example.columns["renaming"],
                      "faults": made.faults, "solved": sum(one.solved for one in made.outcomes)})  # fmt: skip
        print(found[-1], file=sys.stderr, flush=True)
    return found


def _rate(found: list[dict[str, Any]], rounds: int, domain: str = "") -> float:
    """The share of renamings (of a domain) that are solved on all problems after at most so many rounds."""
    few = [one for one in found if domain in ("", one["domain"])]
    return sum(one["solved"] == TASKS and len(one["faults"]) <= rounds + 1 for one in few) / len(few)


def draw(document: dict[str, Any], path: Path) -> None:
    """Seconds against objects, a panel per domain."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(14, 6.5), sharey=True)
    for axis, (name, table) in zip(axes.flat, document["seconds_by_size"].items(), strict=False):
        for planner, label in (("program", "program"), ("downward", "Fast Downward"), ("search", "our search")):
            points = [(document["objects"][name][s], t) for s, t in table[planner].items() if t is not None]
            axis.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axis.set_title(name)
        axis.set_xlabel("objects")
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("seconds")
    axes[1, 3].axis("off")
    axes[1, 3].legend(*axes[0, 0].get_legend_handles_labels(), loc="center")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    parts: dict[str, Callable[..., dict[str, Any]]] = {
        "planners": planners, "times": times, "untrained": untrained, "smollm2": smollm2,
    }  # fmt: skip
    if part not in parts:
        raise SystemExit(f"usage: python benchmarks/genplan.py {' | '.join(parts)}")
    began = time.perf_counter()
    given: list[Any] = sys.argv[2:3] if part in ("times", "smollm2") else []
    values = parts[part](*(map(int, given) if part == "times" else given))
    document = {
        "what": values.pop("what"), "command": f"python benchmarks/genplan.py {' '.join(sys.argv[1:])}", **values,
        "versions": bench.versions(), "machine": bench.machine(), "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    Path(f"results/genplan-{part}.json").write_text(json.dumps(document, indent=2) + "\n")
    if part == "times":
        draw(document, Path("docs/media/genplan-times.png"))


if __name__ == "__main__":
    main()

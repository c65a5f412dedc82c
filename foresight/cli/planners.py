"""`foresight plan`: problems of PDDL, solved by a search or by Fast Downward, and plans validated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from foresight.cli import fields, screen
from foresight.errors import UserError


def plan(
    problem: Annotated[str, tyro.conf.Positional],
    *,
    search: Literal["bfs", "astar", "gbfs", "downward"] = "gbfs",
    heuristic: Literal["hff", "hadd", "hmax", "blind"] = "hff",
    seconds: float = 30.0,
    max_states: int = 5_000_000,
    validate: str | None = None,
    out: str | None = None,
    json: bool = False,
) -> int:
    """Find a plan for a problem of PDDL, or validate one. The exit code is 1 without a valid plan.

    Args:
        problem: DOMAIN-SIZE such as gripper-4 (or with a seed, gripper-4-7), or DOMAIN.pddl,PROBLEM.pddl.
        search: breadth-first, A*, greedy best-first, or downward: Fast Downward (lama-first), if it is installed.
        heuristic: of astar and gbfs; with hmax or blind, A* finds a shortest plan.
        seconds: time limit of grounding, and of the search after it.
        max_states: maximum number of states that a search keeps.
        validate: a plan file to validate instead: the step that fails, and what would repair it.
        out: write the plan to this file.
        json: print the result as JSON.
    """
    from foresight.envs.pddl import make
    from foresight.envs.pddl import validate as validator
    from foresight.planning.symbolic import downward
    from foresight.planning.symbolic import search as searches

    if not seconds > 0:
        raise UserError(f"--seconds must be above 0, not {seconds:g}.")
    if out is not None:
        if validate is not None:
            raise UserError(f"--validate {validate} reads a plan and finds none: leave --out {out} out.")
        fields.check_file(out)
    found = make.problem(problem)
    console = screen.stdout()
    if validate is not None:
        verdict = validator.validate(found, validator.load_plan(validate))
        if json:
            keys = ("kind", "step", "message", "advice")
            screen.emit({key: getattr(verdict, key) for key in keys} | {"valid": verdict.valid})
        else:
            console.print("valid" if verdict.valid else verdict.message, markup=False, soft_wrap=True)
        return 0 if verdict.valid else 1
    if search == "downward":
        if found.solved(found.init):
            raise UserError(f"The goal of {found.name} is true in its initial state: the empty plan solves it.")
        result = downward.plan(found, seconds)
    else:
        result = searches.search(make.solvable(found, seconds), search, heuristic, seconds, max_states)
    if result.plan is not None and not (verdict := validator.validate(found, result.plan)).valid:
        raise UserError(f"The plan of {search} is not valid: {verdict.message}")
    text = "".join(f"{step}\n" for step in result.plan or ())
    if out is not None and result.plan is not None:
        try:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            Path(out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"Cannot write {out}: {error.strerror}. Choose another --out.") from error
    if json:
        screen.emit({"problem": found.name, "search": search, **dataclasses.asdict(result)})
        return 0 if result.plan is not None else 1
    if result.plan is None:
        reason = {"time": f"no plan within {seconds:g} seconds", "memory": "no plan within the memory limit",
                  "unsolvable": "no plan exists"}[result.status]  # fmt: skip
        screen.note(f"{found.name}: {reason}.")
        return 1
    if out is None:
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    counted = f", {result.expanded:,} states expanded, {result.generated:,} generated" if result.generated else ""
    screen.note(f"{len(result.plan)} steps in {result.seconds:.2f} s{counted}")
    return 0


def genplan(
    *,
    domain: str,
    model: str = "smollm2",
    completer: str | None = None,
    tasks: int = 30,
    rounds: int = 4,
    seconds: float = 30.0,
    names: Literal["own", "renamed", "none"] = "own",
    thoughts: bool = True,
    trained: bool = False,
    max_new_tokens: int = 600,
    temperature: float = 0.0,
    seed: int = 0,
    device: str = "auto",
    out: str | None = None,
    json: bool = False,
) -> int:
    """Let a language model write a planner for a domain, repair it, and evaluate it on problems that it never saw.

    Args:
        domain: delivery, ferry, forest, gripper, heavy, miconic or spanner.
        model: "smollm2", a Hugging Face folder, a hub id; "written" for the planner that was written by hand;
            or a recorded dialogue, a .json file.
        completer: URL of an OpenAI-compatible server that answers instead.
        tasks: number of evaluation problems.
        rounds: maximum rounds of debugging.
        seconds: time limit of the program on one problem.
        names: the domain's own names, renamed at random, or names without meaning.
        thoughts: ask for a summary and a strategy first.
        trained: ask in one message, as the task planners does, for a model that was trained on it.
        max_new_tokens: maximum tokens of an answer.
        temperature: sampling temperature.
        seed: of the problems, the names and the sampling.
        device: auto, cpu, cuda, cuda:1 or mps.
        out: write the dialogue (dialogue.json) and the program (program.py) into this folder.
        json: print the result as JSON.
    """
    fields.check_seed(seed)
    from foresight.envs.pddl import programs
    from foresight.envs.text import planners
    from foresight.planning.symbolic import genplan as generalized

    if tasks < 1 or rounds < 0 or not seconds > 0:
        raise UserError(f"--tasks must be at least 1, --rounds at least 0, --seconds above 0, not {tasks}, {rounds}, "
                        f"{seconds:g}.")  # fmt: skip
    if out is not None:
        fields.check_folder(out)
    prompts, training, evaluation, renamed = generalized.problems(domain, tasks, names, seed)
    if model == "written" and completer is None:
        program = renamed(programs.written(domain))
        found = generalized.Written([], program, [], programs.solve(program, evaluation, seconds))
    else:
        chat = _chat(model, completer, max_new_tokens, temperature, seed, device)
        note = (lambda text: None) if json else screen.note
        request = planners.prompt(prompts[0].domain) if trained else ""
        found = generalized.write(chat, prompts, training, evaluation, rounds, seconds, thoughts, note, request)
    solved = sum(one.solved for one in found.outcomes)
    if json:
        screen.emit({"domain": domain, "names": names, "solved": solved, "tasks": tasks, "faults": found.faults,
                     "classes": found.classes, "program": found.program})  # fmt: skip
    else:
        faults = "".join(f", {count} {name}" for name, count in found.classes.items())
        screen.stdout().print(f"{domain}: {solved} of {tasks} problems solved{faults}", markup=False, highlight=False)
        first = next((one.message for one in found.outcomes if one.fault), "")
        if first:
            screen.note(first)
    if out is not None:
        _keep(Path(out), found.messages, found.program)
    return 0


def _chat(model: str, completer: str | None, max_new_tokens: int, temperature: float, seed: int, device: str) -> Any:
    """The model of a dialogue."""
    from foresight.planning.symbolic import genplan as generalized

    if completer is None and model.endswith(".json"):
        return generalized.recorded(model)
    from foresight.planning.generation import chat

    if completer is not None:
        return chat.served(completer, max_new_tokens, temperature, seed)
    from foresight.nets.language import pretrained
    from foresight.runtime import machine

    policy = pretrained.load(model, machine.pick_device(device))
    advice = "lower --rounds or --max-new-tokens, or give --no-thoughts"
    return chat.local(policy, max_new_tokens, temperature, seed, advice)


def _keep(folder: Path, messages: list[dict[str, str]], program: str) -> None:
    import json

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "dialogue.json").write_text(json.dumps(messages, indent=1, ensure_ascii=False) + "\n", "utf-8")
        (folder / "program.py").write_text(program, "utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {folder}: {error.strerror}. Choose another --out.") from error

"""`foresight think` and `foresight faithfulness`: reasoning at query time, and whether its traces matter."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import Annotated, Any

import tyro

from foresight.cli import fields, screen
from foresight.errors import UserError

MODEL = "smollm2"


def think(
    methods: Annotated[tuple[str, ...], tyro.conf.Positional],
    *,
    task: str,
    model: str = MODEL,
    budget: int = 1024,
    points: int = 3,
    questions: int = 100,
    verifier: str = "",
    options: tuple[str, ...] = (),
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    completer: str | None = None,
    env_options: tuple[str, ...] = (),
    out: str | None = None,
    json: bool = False,
) -> int:
    """Answer held-out questions by thinking longer, and compare methods at equal budgets.

    Prints accuracy and cost of each method and of greedy answers. Writes think.json, curves.png, thoughts.json (the
    first questions with votes and trees), and of the first one the tree of each method as JSON, HTML and a picture.

    Args:
        methods: self_consistency, best_of_n, beam, dvts, tree_of_thoughts, graph_of_thoughts, puct, value_guided,
            deep_think, budget_forcing.
        task: the text task: countdown, game24, chains, addition, reasoning_gym:NAME, or a .jsonl file.
        model: "smollm2", a run directory, a bundled agent, a Hugging Face folder, or a hub id.
        budget: sampled tokens per question, at most; the curve has smaller ones too.
        points: budgets of the curve, each a quarter of the next.
        questions: number of held-out questions.
        verifier: exact (the task's own), critic (the model's multi-token heads), or the run or export of a reward
            model. Without one, some methods ask the model itself.
        options: options of the method, as key=value (n=16 width=4); default: sized for the budget.
        max_new_tokens: maximum tokens of one sample: an answer, or a part of one in methods that join several, as
            beam, dvts, tree_of_thoughts and puct join steps of up to step_tokens each.
        temperature: sampling temperature.
        seed: sampling seed.
        device: auto, cpu, cuda, cuda:1 or mps.
        completer: URL of a server that samples; --model gives the tokenizer.
        env_options: options of the task, as key=value; the others are those of the run, if it was trained on the task.
        out: the folder to write; default: runs/think/TASK-METHODS.
        json: print one JSON document instead of a table.
    """
    from foresight.envs.make import make
    from foresight.runtime import machine
    from foresight.runtime.reasoning import pictures
    from foresight.runtime.reasoning import think as thinking

    fields.check_seed(seed)
    if not methods:
        raise UserError("No method given. Name one: foresight think self_consistency --task countdown")
    own = fields.options(options, "--options")
    folder = Path(out or f"runs/think/{Path(task).stem.replace(':', '-')}-{'-'.join(methods)}")
    fields.check_folder(folder)
    env = make(task, "text", **_task(model, task, env_options)[1])
    where = machine.pick_device(device)
    if task == "sorting" and (model != MODEL or completer is not None):
        raise UserError(
            "The task sorting asks a scripted sorter and no language model: leave out --model and --completer."
        )
    policy: Any = _sorter() if task == "sorting" else thinking.model(model, where, completer, screen.note)
    verify = thinking.verifier(verifier, env, policy, model, where)
    document, shown, examples = thinking.think(
        methods, policy, env, questions, budget, points=points, max_new_tokens=max_new_tokens,
        temperature=temperature, verify=verify, seed=seed, options=own, report=screen.note,
    )  # fmt: skip
    document = {"model": "scripted sorter" if task == "sorting" else model, "verifier": verifier, **document}
    if json:
        screen.emit(document)
    else:
        screen.table(screen.stdout(), *_cells(document["rows"]))
    _make(folder)
    _write(folder / "think.json", document)
    _write(folder / "thoughts.json", {"examples": examples})
    pictures.curves(document["rows"], f"{env.name}, {document['questions']} questions", folder / "curves.png")
    for name, result in shown.items():
        tree = result.answer.tree
        _write(folder / f"{name}.tree.json", tree.document())
        pictures.page(tree, name, folder / f"{name}.tree.html")
        pictures.picture(tree, name, folder / f"{name}.tree.png")
    if not json:
        screen.stdout().print(f"\n{folder}", markup=False, style="dim")
    return 0


def faithfulness(
    run: Annotated[str, tyro.conf.Positional],
    *,
    task: str | None = None,
    questions: int = 100,
    samples: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    seed: int = 0,
    device: str = "auto",
    env_options: tuple[str, ...] = (),
    out: str | None = None,
    json: bool = False,
) -> int:
    """Measure whether a model's answers depend on its reasoning traces: they are cut, changed and replaced.

    Writes faithfulness.json and a picture of the curves.

    Args:
        run: a run directory, a bundled agent, a Hugging Face folder, or a hub id.
        task: the text task; default: that of the run.
        questions: number of held-out questions.
        samples: traces sampled for each question.
        max_new_tokens: maximum tokens of one answer.
        temperature: of the sampled traces; answers are greedy.
        seed: sampling seed.
        device: auto, cpu, cuda, cuda:1 or mps.
        env_options: options of the task, as key=value; the others are those of the run, if it was trained on the task.
        out: the folder to write; default: the run directory, or runs/faithfulness.
        json: print one JSON document instead of a table.
    """
    from foresight.envs.make import make
    from foresight.runtime import machine
    from foresight.runtime.reasoning import faithfulness as faith
    from foresight.runtime.reasoning import think as thinking

    fields.check_seed(seed)
    task, given = _task(run, task, env_options)
    env, folder = make(task, "text", **given), Path(run)
    target = Path(out or (run if folder.is_dir() else "runs/faithfulness"))
    fields.check_folder(target)
    policy = thinking.model(run, machine.pick_device(device))
    document = faith.report(policy, env, questions, samples, max_new_tokens, temperature, seed)
    if json:
        screen.emit(document)
    else:
        screen.table(screen.stdout(), ("test", "value", "95% interval"), faith.cells(document))
    _make(target)
    _write(target / "faithfulness.json", {"model": run, **document})
    faith.picture(document, target / "faithfulness.png")
    if not json:
        screen.stdout().print(f"\n{target / 'faithfulness.json'}", markup=False, style="dim")
    return 0


def _task(model: str, task: str | None, given: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """A task and its options: those of the run `model` where none are given, so that it holds out the same questions.

    Raises UserError if there is neither a task nor a run.
    """
    from foresight.runtime import run
    from foresight.runtime.config.settings import Settings

    own: dict[str, Any] = {}
    if ((found := run.find(model)) / "config.yaml").is_file():
        settings = Settings.read(found)
        if settings.kind != "text":
            raise UserError(f"{model} has no language model: it is a run of {settings.algorithm}.")
        own = dict(settings.env_options) if task in (None, settings.env) else {}
        task = task or settings.env
    if task is None:
        raise UserError(f"{model} is not a run directory: name the task, as in --task chains.")
    return task, {**own, **fields.options(given)}


def _sorter() -> Any:
    """The scripted sorter: graphs of thoughts over lists need no language model."""
    from foresight.planning.generation.scripted import Scripted
    from foresight.planning.reasoning import sorting

    return Scripted(sorting.noisy_sorter())


def _cells(rows: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The columns and the cells of the table of methods."""
    columns = ("method", "budget", "accuracy", "any", "mean", "tokens", "prompt tokens", "verifier calls", "seconds")
    cells: list[tuple[str, ...]] = [
        (
            row["method"], f"{row['budget']:,}", f"{row['accuracy']:.3f} ± {row['standard_error']:.3f}",
            _optional(row.get("any")), _optional(row.get("mean")), f"{row['sampled_tokens']:,.0f}",
            f"{row['prompt_tokens']:,.0f}", f"{row['verifier_calls']:,.0f}", f"{row['seconds']:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    return columns, cells


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot write to {folder}: {error.strerror or error}. Choose another --out.") from error


def _write(path: Path, document: Any) -> None:
    from foresight.runtime.checkpoints import checkpoint

    checkpoint.write_atomic(path, jsons.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _optional(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

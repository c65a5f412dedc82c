"""`foresight train` and `foresight resume`: options from an algorithm's Config, and the report at the end."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from foresight.cli import fields, screen
from foresight.errors import UserError
from foresight.runtime import catalog, kinds, legacy
from foresight.runtime.config import config_fields, resolve
from foresight.training.options import build_config, flatten

if TYPE_CHECKING:
    from foresight.runtime.run import Run

ENOUGH = 5  # the fewest points for a curve


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the run. The hyperparameters of the algorithm follow."""

    preset: Annotated[str | None, tyro.conf.arg(metavar="PRESET")] = None
    """A tested set of hyperparameters (`foresight show NAME` lists them). Fields on the command line override it."""
    env: Annotated[str | None, tyro.conf.arg(metavar="ENV")] = None
    """The environment, such as CartPole-v1 or GridWorld8x8."""
    task: Annotated[str | None, tyro.conf.arg(metavar="TASK")] = None
    """The text task of a language run: addition, reasoning_gym:NAME, a .jsonl file, or with tools: calculator, A,B."""
    env_options: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")] = ()
    """Options of the environment or task, as key=value: frame_stack=4; for a .jsonl file reward=FILE.py:NAME, a
    function that scores answers, and held_out=20."""
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """The run directory, which must not contain a run. Default: a new one under runs/."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    actors: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Number of actor processes (Ray); 0: one process acts and learns."""
    ray: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Address of the Ray cluster for the actors (HOST:6379, or auto). Default: this machine."""
    completer: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """A server (vLLM, SGLang, llama.cpp) that samples for a language model. Default: the model itself."""
    staleness: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Conversations are held while the model trains, at most N updates behind. Default: they take turns."""
    evaluate_every: int | None = None
    """Steps between evaluations. Default: the preset's, otherwise only at the end."""
    evaluation_episodes: int | None = None
    """Episodes (or held-out prompts) per evaluation. Default: the preset's, otherwise 20 (prompts: all)."""
    checkpoint_every: float | None = None
    """Seconds between checkpoints. Default: 120, longer if saving is slow."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    keep_optimizer: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Of a language model, keep the moments of the optimizer in all checkpoints, also when the run has ended. Default:
    only in the newest, until the end."""
    log: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SERVICE ...")] = ()
    """Also log to these services: wandb, trackio."""
    record: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Record a video of the trained agent into the run's media/."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print only the summary to stdout, as JSON, at the end."""


def train(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    options: Annotated[Options, tyro.conf.arg(name="")] = Options(),
) -> int:
    """Train an algorithm. `foresight train NAME --help` also lists its hyperparameters.

    Args:
        name: an algorithm, as `foresight list` prints it, or the path of your own algorithm file.
        options: see above.
    """
    if name is None:
        raise UserError(
            f"No algorithm given. Type foresight train NAME, with one of: {', '.join(catalog.algorithms())}."
        )
    return _go(name, options, {})


def train_command(args: Sequence[str]) -> int:
    """`foresight train NAME ...`, where NAME is the first of `args` and comes before any option."""
    options, given = parse(args[0], args[1:])
    return _go(args[0], options, given)


def parse(name: str, args: Sequence[str]) -> tuple[Options, dict[str, Any]]:
    """The options, and the Config fields given in `args`; the preset and the defaults decide the others.

    Prints help and exits if `args` contains --help. Raises `UserError` for an unknown preset or field.
    """
    entry, config = catalog.entry(name), catalog.config_class(name)
    args, notes = legacy.arguments(entry.name, args) if entry.ours else (args, [])
    for note in notes:
        screen.stderr().print(note, style="dim", highlight=False)
    hints = {f.name: f.type for f in fields.describe(config, entry.path)}
    common = [f.name for f in dataclasses.fields(Options)]
    switches = [key for key, kind in hints.items() if kind == "bool"] + ["keep_optimizer", "record", "json"]
    given = fields.explicit(args, [*hints, *common], switches)
    args = fields.whole_numbers(args, [key for key, kind in hints.items() if kind.startswith("int")])
    # The heading in help is the algorithm's name, which may be no name of a field: of my-q.py, class.py or run.py.
    named = Annotated[config, tyro.conf.arg(name=entry.name)]  # type: ignore[valid-type]
    shape = dataclasses.make_dataclass("train", [("run", Options), ("algorithm", named)])
    parsed: Any = tyro.cli(
        shape,
        args=args,
        prog=f"foresight train {name}",
        description=f"{entry.title}\n\nSteps are {entry.unit}. Details: foresight show {name}",
        default=shape(Options(), _defaults(name, args)),  # so that help shows the preset's values
        config=(tyro.conf.OmitArgPrefixes,),
    )
    values = flatten(parsed.algorithm)
    return parsed.run, {key: values[key] for key in hints if key in given}


def resume(
    run: Annotated[str, tyro.conf.Positional],
    steps: int | None = None,
    device: str | None = None,
    checkpoint_every: float | None = None,
    keep: int | None = None,
    keep_optimizer: bool = False,
    actors: int | None = None,
    ray: str | None = None,
    completer: str | None = None,
    record: bool = False,
    log: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Continue a run from its last checkpoint to the end.

    Args:
        run: a run directory, or one of its checkpoints.
        steps: a new total number of steps.
        device: a new device.
        checkpoint_every: seconds between checkpoints from now on; default: as the run was started.
        keep: number of newest checkpoints to keep from now on; default: as the run was started.
        keep_optimizer: keep the moments of the optimizer in all checkpoints from now on, see foresight train.
        actors: a new number of actors.
        ray: address of a new Ray cluster for the actors, or local for this machine; default: as the run was started.
        completer: URL of a new server that samples.
        record: record a video of the trained agent into the run's media/.
        log: also log to these services (wandb, trackio).
        json: print the summary as JSON at the end.
    """
    from foresight.runtime import run as runner

    resumed = runner.resume(
        run, steps, device=device, checkpoint_every=checkpoint_every, keep=keep, keep_optimizer=keep_optimizer,
        record=record, log=log, actors=actors, ray=ray, completer=completer,
    )  # fmt: skip
    report(resumed, json)
    return 0


def report(finished: Run, json: bool) -> None:
    """Print the result, the baseline, and the commands for the trained agent."""
    summary = {"path": str(finished.path), **(finished.summary or {})}
    if json:
        screen.emit(summary)
        return
    console = screen.stdout()
    if "train" in kinds.get(finished.settings.kind).pictures:
        agent = finished.load()
        if hasattr(agent.module, "picture"):
            console.print("\n" + agent.module.picture(agent.state, agent.env), markup=False, soft_wrap=True)
        agent.close()
    else:
        _curve(finished, console)
    console.print()
    for line in sentences(summary):
        console.print(line, markup=False, soft_wrap=True)
    played = ("play",) if kinds.get(finished.settings.kind).played else ()
    path = shlex.quote(str(finished.path))
    after = "\n".join(f"foresight {command} {path}" for command in ("studio", "eval", *played, "plot"))
    console.print(f"\n{after}", style="dim", markup=False, soft_wrap=True)


def _curve(finished: Run, console: Console) -> None:
    """The first metric that the algorithm shows, drawn in the terminal."""
    from foresight.runtime.monitoring.progress import curve

    rows = finished.metrics()
    for name in catalog.entry(finished.settings.algorithm).metrics:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if len(points) >= ENOUGH:
            steps, values = zip(*points, strict=True)
            console.print("\n" + curve(values, steps, title=name, height=12), markup=False)
            return


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """Lines for baseline, evaluation, profile, steps, seconds and path."""
    baseline, evaluation = summary.get("baseline"), summary.get("evaluation")
    lines = []
    if baseline:
        lines.append(f"before: {measured(baseline)}")
    if evaluation:
        lines.append(f"after:  {measured(evaluation)}")
    shares = {name: seconds for name, seconds in summary.get("profile", {}).items() if seconds > 0}
    if whole := sum(shares.values()):
        parts = sorted(shares.items(), key=lambda part: -part[1])
        lines.append("time:   " + ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts))
    if "steps" in summary and "seconds" in summary:
        unit = summary.get("unit", "steps")
        spent = f"{summary['seconds']:,.1f} s"
        if (evaluating := summary.get("evaluation_seconds", 0.0)) >= 1:
            spent += f", and evaluation in {evaluating:,.1f} s"
        lines.append(f"{summary['steps']:,} {unit} in {spent}; run directory: {summary['path']}")
    return lines


def measured(evaluation: Mapping[str, Any]) -> str:
    """One evaluation as text."""
    if not evaluation["n"]:
        from foresight.runtime.evaluation.evaluate import Evaluation  # late: it imports torch

        return str(Evaluation.read(dict(evaluation)))
    spread = f" ± {evaluation['std']:.4g} (standard deviation, n = {evaluation['n']})" if evaluation["n"] > 1 else ""
    extra = legacy.evaluation(evaluation).get("extra_metrics", {})
    others = "".join(f", {name} {value:.6g}" for name, value in extra.items())
    return f"{evaluation['metric']} {evaluation['mean']:.6g}{spread}{others}"


def _go(name: str, options: Options, given: dict[str, Any]) -> int:
    from foresight.runtime import run
    from foresight.runtime.distributed import torchrun

    finished = run.train(
        name,
        preset=options.preset,
        env=options.env,
        task=options.task,
        out=options.out,
        device=options.device,
        log=options.log,
        record=options.record,
        evaluate_every=options.evaluate_every,
        evaluation_episodes=options.evaluation_episodes,
        checkpoint_every=options.checkpoint_every,
        keep=options.keep,
        keep_optimizer=options.keep_optimizer,
        env_options=fields.options(options.env_options),
        actors=options.actors,
        ray=options.ray,
        completer=options.completer,
        staleness=options.staleness,
        **given,
    )
    if torchrun.first():
        report(finished, options.json)
    return 0


def _defaults(name: str, args: Sequence[str]) -> Any:
    """The Config of a run with these `args` before its own fields: the preset's, found by name or environment."""
    preset, env, task, model = (fields.value(args, word) for word in ("preset", "env", "task", "model"))
    if preset or env or task:
        given = {"model": model} if model else {}
        values = resolve.resolve(name, preset=preset, env=env, task=task, given=given).config
    else:
        values = config_fields.fields(name, {})
    return build_config(catalog.config_class(name), **values)

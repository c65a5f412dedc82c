"""`foresight eval` and `foresight plot`: evaluate and plot finished runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from foresight.cli import fields, screen
from foresight.cli.train import measured
from foresight.errors import UserError
from foresight.runtime import kinds


def plot(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional],
    out: str = "curves.png",
    metric: str | None = None,
    x: Literal["step", "seconds"] = "step",
    model: int | None = None,
    json: bool = False,
) -> int:
    """Draw learning curves. Runs of the same algorithm and environment become one curve with an interval.

    Args:
        runs: run directories.
        out: the image file to write (.png, .svg or .pdf).
        metric: the metric to draw; default: the main metric of the algorithm.
        x: unit of the x axis.
        model: draw the error of the learned model (muzero's and of world models) over this many model steps
            instead: predictions compared with what happened. With --out x.mp4 or x.gif, a video of what a world model
            predicts: rows truth, prediction and error, observed frames with a green border, imagined ones with orange.
        json: print the last point of each curve as JSON.
    """
    if model is not None:
        why = "is for learning curves, and --model draws the errors of a learned model"
        fields.leave_out(plot, {"metric": metric, "x": x}, why)
        return _model(runs, model, out, json)
    from foresight.runtime.monitoring.progress import curve
    from foresight.runtime.results import plot as plots

    drawn = plots.draw(runs, out, metric, x)
    if json:
        screen.emit({"out": out, "curves": [_last(band) for band in drawn]})
        return 0
    console = screen.stdout()
    for band in drawn:
        title = f"{band.metric}: {band.label} ({band.runs} run{'s' if band.runs > 1 else ''})"
        console.print(curve(band.middle.tolist(), band.steps.tolist(), title=title), markup=False)
    console.print(f"\nPlot written to {Path(out)}", markup=False, soft_wrap=True)
    return 0


def _model(runs: tuple[str, ...], depth: int, out: str, json: bool) -> int:
    """Measure and draw the errors of learned models by the number of model steps."""
    if not runs:
        raise UserError("No run given. Name at least one run directory: foresight plot RUN")
    from foresight.runtime.evaluation import model_error, record
    from foresight.runtime.results import plot as plots

    fields.check_file(out, suffixes=(*plots.FORMATS, *record.SUFFIXES))
    if Path(out).suffix.lower() in record.SUFFIXES:
        found = model_error.film(runs, depth, out)
    else:
        found = model_error.draw_runs(runs, depth, out)
    if json:
        plain = {
            run: {k: [x if x == x else None for x in row] for k, row in errors.items()} for run, errors in found.items()
        }  # JSON has no NaN
        screen.emit({"out": out, "runs": plain})
        return 0
    console = screen.stdout()
    for run, errors in found.items():
        rows = [(str(k), *(f"{errors[name][k]:.4g}" for name in errors)) for k in range(depth + 1)]
        console.print(f"{run}", markup=False)
        screen.table(console, ("steps", *errors), rows)
    console.print(f"\nPlot written to {Path(out)}", markup=False, soft_wrap=True)
    return 0


def eval_(
    run: Annotated[str, tyro.conf.Positional],
    episodes: int = 100,
    env: str | None = None,
    seed: int = 0,
    checkpoint: str = "latest",
    device: str = "auto",
    completer: str | None = None,
    json: bool = False,
) -> int:
    """Evaluate a run greedily, on held-out seeds or prompts.

    Args:
        run: a run directory.
        episodes: number of episodes (or prompts).
        env: one of the environments of a run of several; default: all of them.
        seed: seed of the evaluation environments, which never have the seeds of training environments. Environment i
            of 16 has this seed plus i: evaluations with seeds 16 apart (0, 16, 32) share no episode.
        checkpoint: latest, best, or a step.
        device: auto, cpu, cuda or mps.
        completer: URL of a server that samples with its own weights (language runs).
        json: print the result as JSON, with the value of each episode.
    """
    if episodes < 1:
        raise UserError(f"--episodes must be at least 1, not {episodes}.")
    fields.check_seed(seed)
    from foresight.runtime import run as runner

    agent = runner.load(run, checkpoint, device, completer)
    try:
        found = agent.evaluate(episodes, seed, env)
        shown = not json and "eval" in kinds.get(agent.settings.kind).pictures and hasattr(agent.module, "picture")
        picture = agent.module.picture(agent.state, agent.env) if shown else ""
    finally:
        agent.close()
    if json:
        screen.emit({"run": run, "checkpoint": agent.step, "seed": seed, **dataclasses.asdict(found)})
    else:
        screen.stdout().print(measured(found.document()), markup=False)
        if picture:
            screen.stdout().print("\n" + picture, markup=False, soft_wrap=True)
    return 0


def export(
    run: Annotated[str, tyro.conf.Positional],
    format: Literal["torchscript", "onnx", "merged", "adapter", "gguf"] = "torchscript",
    out: str | None = None,
    checkpoint: str = "latest",
    quantize: tuple[Literal["f16", "bf16", "q8_0", "q4_0"], ...] = ("f16",),
    push: str | None = None,
) -> int:
    """Export the greedy policy of a run for use without foresight: as a file, or as the folder of a language model.

    Args:
        run: a run directory, or the name of a bundled agent.
        format: torchscript (for torch.jit.load) or onnx (needs the packages onnx and onnxscript), with a recurrent
            state as inputs and outputs; for a language model merged or adapter, a Hugging Face folder with a model
            card, or gguf, for llama.cpp.
        out: the file or folder to write; default: policy.pt, policy.onnx, merged, adapter or gguf in the run directory,
            or here for a bundled agent.
        checkpoint: latest, best, or a step.
        quantize: of gguf: 16, 8.5 or 4.5 bits a weight; with several, a file each. The card has the accuracy of each.
        push: OWNER/NAME: also upload it to the Hugging Face hub, for foresight.load("hub:OWNER/NAME"). A policy that no
            file can hold, such as one that plans, is uploaded without one.
    """
    if format != "gguf":
        fields.leave_out(export, {"quantize": quantize}, f"is for --format gguf, not for {format}")
    from foresight.runtime import export as exports

    if out is not None:
        exports.check_suffix(format, out)  # nothing is uploaded either
    written = None
    try:
        written = exports.export(run, format, out, checkpoint, quantize)
        screen.stdout().print(f"Written to {written}", markup=False, soft_wrap=True)
    except UserError as error:
        if push is None or exports.is_text(run):
            raise
        screen.stdout().print(f"Without a file of the policy. {error}", markup=False, soft_wrap=True)
    if push is not None:
        address = exports.share(run, push, written, checkpoint)
        screen.stdout().print(f"Uploaded to {address}", markup=False, soft_wrap=True)
    return 0


def _last(band: Any) -> dict[str, Any]:
    low, high = float(band.low[-1]), float(band.high[-1])
    return {
        "label": band.label,
        "runs": band.runs,
        "step": float(band.steps[-1]),
        "iqm": float(band.middle[-1]),
        "interval": None if low != low else [low, high],
    }

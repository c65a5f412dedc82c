"""`foresight stack`: a language model, a policy that sees, and control, each learned, a script, or left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foresight.cli import fields, screen
from foresight.errors import UserError

FPS = 20.0
SCALE = 8  # of a video


def stack(
    *,
    cognition: str = "script",
    semantic: str = "script",
    control: str = "script",
    split: str = "held_out",
    episodes: int = 1,
    failures: float = 0.0,
    seed: int = 0,
    think_every: int = 10,
    look_every: int = 5,
    stale: int = 20,
    video: str | None = None,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Bring objects through rooms with three layers. Prints what each did; the exit code is 1 if no errand succeeds.

    Args:
        cognition: what plans in words: script, none (the instruction is the only subgoal), or a language model: the
            run of sft or pretrain on the task errands, a Hugging Face folder, "smollm2".
        semantic: what turns a picture and a subgoal into a point: script, none (random points), or a run on
            ErrandPoints-v0.
        control: what gets the disc to a point: script, none (full thrust), or a run on Glide-v0.
        split: train, instructions (with new objects), layouts (new), or held_out (both).
        episodes: number of errands; with one, its log is printed.
        failures: probability that an object slips out of the gripper, or that an open door shuts.
        seed: of the first errand; the next ones count up.
        think_every: steps between two looks of cognition at the reports.
        look_every: steps between two points of the semantic policy.
        stale: steps after which a point is too old, and the disc brakes.
        video: an .mp4 or .gif of the first errand to write.
        device: auto, cpu, cuda, cuda:1 or mps.
        json: print all logs and the summary as JSON.
    """
    if episodes < 1:
        raise UserError(f"--episodes must be at least 1, not {episodes}.")
    fields.check_seed(seed)
    from foresight.agents import stack as stacks
    from foresight.envs.control.errands import picture
    from foresight.envs.control.errands.rules import Errand
    from foresight.runtime.evaluation import record

    if video is not None:
        fields.check_file(video, "--video", record.SUFFIXES)
    errands = [Errand(seed + i, split, failures) for i in range(episodes)]
    named = {"cognition": cognition, "semantic": semantic, "control": control}
    layers = {kind: stacks.layer(kind, name, device) for kind, name in named.items()}
    one = stacks.Stack(**layers, think_every=think_every, look_every=look_every, stale=stale)
    shots = [picture.draw(errands[0])]

    filmed = 0  # the time of the newest shot

    def watched() -> None:
        nonlocal filmed
        if video is not None and errands[0].time > filmed:  # to the step that ends it
            shots.append(picture.draw(errands[0]))
            filmed = errands[0].time

    found = stacks.run(one, errands, watched)
    summary = stacks.summary(found)
    if json:
        screen.emit({**summary, "layers": named, "split": split, "failures": failures, "seed": seed,
                     "errands": [_log(episode) for episode in found]})  # fmt: skip
    else:
        _show(found, summary)
    if video is not None:
        record.write(video, (shot.repeat(SCALE, 0).repeat(SCALE, 1) for shot in shots), FPS)
    return 0 if summary["success"] else 1


def _show(found: Sequence[Any], summary: dict[str, Any]) -> None:
    """Print the log of a single errand, and the summary."""
    episodes = len(found)
    if episodes == 1:
        _print(found[0].errand.instruction)
        for line in found[0].log:
            _print(f"{line['step']:>4}  {line['layer']:<9}  {line['text']}")
    ends = "done" if episodes == 1 and summary["success"] else "not done" if episodes == 1 else "succeeded"
    count = "" if episodes == 1 else f"{summary['success']:.1%} of {episodes} "
    _print(f"{count}{ends} after {summary['steps']:g} steps and {summary['plans']:g} plans")
    if summary["with_failures"]:
        _print(f"{summary['with_failures']} with an injected failure, {summary['recovered']:.1%} of these recovered")


def _log(episode: Any) -> dict[str, Any]:
    errand = episode.errand
    return {"instruction": errand.instruction, "success": errand.success, "steps": errand.time,
            "injected": errand.injected, "log": episode.log}  # fmt: skip


def _print(text: str) -> None:
    screen.stdout().print(text, markup=False, highlight=False, soft_wrap=True)

"""`train`, `resume` and `load`: runs of an algorithm, each in a run directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foresight.errors import BusyError, LostError, NotFinite, UserError, resume_command
from foresight.runtime import catalog, imagined, kinds, lock
from foresight.runtime.catalog import State
from foresight.runtime.config import config_fields, resolve, settings
from foresight.training.options import build_config

if TYPE_CHECKING:  # these import torch
    from foresight.runtime.agent import Agent
    from foresight.runtime.evaluation.evaluate import Evaluation

HOLDS_A_RUN = ("config.yaml", "metrics.jsonl", "summary.json", "checkpoints")


class Run:
    """A run directory: its settings, metrics and results."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.settings = settings.Settings.read(self.path)

    @property
    def config(self) -> Any:
        """The algorithm's Config."""
        return build_config(catalog.config_class(self.settings.algorithm), **self.settings.config)

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`; empty until the run has ended."""
        file = self.path / "summary.json"
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}

    @property
    def evaluation(self) -> Evaluation | None:
        """The last `Evaluation` (without the single values), or None until the run has ended."""
        return _evaluation(self.summary.get("evaluation"))

    @property
    def baseline(self) -> Evaluation | None:
        """The `Evaluation` of a random policy or the untrained model, or None until the run has ended."""
        return _evaluation(self.summary.get("baseline"))

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`: step, seconds and the metrics of each logged step."""
        from foresight.runtime.monitoring import log

        return log.read(self.path)

    def load(self, checkpoint: str | int = "latest") -> Agent:
        """The trained `Agent`, see `load`."""
        return load(self.path, checkpoint)

    def __repr__(self) -> str:
        result = f"{self.evaluation}, from {self.baseline}" if self.summary else "not finished"
        return f"Run({str(self.path)!r}: {self.settings.algorithm} on {self.settings.env}: {result})"


def train(
    name: str | Path,
    *,
    preset: str | None = None,
    env: str | None = None,
    task: str | None = None,
    model: str | None = None,
    out: str | Path | None = None,
    steps: int | None = None,
    seed: int | None = None,
    device: str = "auto",
    evaluation_episodes: int | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: float | None = None,
    keep: int = 3,
    keep_optimizer: bool = False,
    show: bool = True,
    record: bool = False,
    log: tuple[str, ...] = (),
    env_options: dict[str, Any] | None = None,
    actors: int = 0,
    ray: str | None = None,
    completer: str | None = None,
    staleness: int | None = None,
    callbacks: Sequence[Callable[[int, dict[str, Any], State], None]] = (),
    config: Any = None,
    **fields: Any,
) -> Run:
    """Train the algorithm `name`, or that of a file of your own, and return its run directory.

    - `preset`, or `env` (control, tabular, game) or `task` (text), which uses its preset if it has one;
    - `out`: the run directory (default: a new one under `runs/`);
    - `steps`, `seed`, `model` and other `**fields` of the Config, which override the preset; or a whole `config`;
    - `evaluate_every`: in the algorithm's unit (default: at the end only), `evaluation_episodes` each time;
    - `checkpoint_every`: seconds (default: 120, or longer if saving is slow); the `keep` newest are kept;
    - `keep_optimizer`: of a language model, keep the moments of the optimizer in all checkpoints, also when the run has
      ended; by default only the newest has them, until the end;
    - `actors`: actor processes, on this machine or on the Ray cluster at `ray`;
    - `completer`: the URL of a server that samples for a language model, see `planning.generation.server`;
    - `staleness`: updates by which conversations may lag behind the weights that are trained on them, held while the
      model trains: see `planning.generation.asynchronous`;
    - `callbacks`: called with `(step, metrics, state)` after every step that the algorithm yields;
    - `show`: progress on stderr; `record`: a video of the result in `media/`; `log`: "wandb", "trackio".

    Raises UserError for a user's mistake, and `Interrupted` (a KeyboardInterrupt) after Ctrl-C, when it has saved.
    """
    name = str(name)
    catalog.reread(name)
    common = {"steps": steps, "seed": seed, "model": model}
    resolved = resolve.resolve(
        name,
        preset=preset,
        env=env,
        task=task,
        env_options=env_options,
        episodes=evaluation_episodes,
        evaluate_every=evaluate_every,
        device=device,
        config=config,
        given={**{name: value for name, value in common.items() if value is not None}, **fields},
        actors=actors,
        ray=ray,
        completer=completer,
        staleness=staleness,
        keep=keep,
        keep_optimizer=keep_optimizer,
        checkpoint_every=checkpoint_every,
    )
    _check_record(resolved, record)
    from foresight.runtime.distributed import torchrun  # late: this imports torch
    from foresight.runtime.session import Session

    with torchrun.join(resolved) as (resolved, scratch):
        path, made = (scratch, []) if scratch else _directory(out, resolved)
        existing = set(path.iterdir())
        show, services = (show, log) if scratch is None else (False, ())
        session = None
        try:
            session = Session(path, resolved, show, record, services, callbacks=callbacks)
            session.run()
        except UserError as error:
            if session is None or not (session.started or isinstance(error, LostError | NotFinite | BusyError)):
                _remove(set(path.iterdir()) - existing)  # a run that could not start leaves no files
            raise
        finally:
            with contextlib.suppress(OSError):
                for folder in made:
                    folder.rmdir()  # only if it is empty
        return Run(path)


def resume(
    path: str | Path,
    steps: int | None = None,
    *,
    device: str | None = None,
    checkpoint_every: float | None = None,
    keep: int | None = None,
    keep_optimizer: bool = False,
    show: bool = True,
    record: bool = False,
    log: tuple[str, ...] = (),
    actors: int | None = None,
    ray: str | None = None,
    completer: str | None = None,
    callbacks: Sequence[Callable[[int, dict[str, Any], State], None]] = (),
) -> Run:
    """Continue a run from its newest checkpoint, or from the one that `path` names (`RUN/checkpoints/step-...`).

    `steps` is a new total; `device`, `checkpoint_every`, `keep`, `actors`, `ray` and `completer` replace the run's own;
    `keep_optimizer` holds from now on. A run that was killed before its first checkpoint starts again. Going back to an
    older checkpoint sets newer ones aside. Raises UserError as `train` does, and for a damaged checkpoint.
    """
    from foresight.runtime.checkpoints import checkpoint
    from foresight.runtime.distributed import torchrun
    from foresight.runtime.session import Session

    if torchrun.started():
        raise UserError(
            f"A run cannot be resumed under torchrun. Resume it in one process with: {resume_command(path)}"
        )
    path = Path(path)
    start = None
    if path.parent.name == "checkpoints":
        if not path.is_dir():
            raise UserError(f"There is no checkpoint {path}. There are: {checkpoint.listed(path.parent)}.")
        start, path = path, path.parent.parent
    settings.reread(path)
    resolved = settings.Settings.read(path)
    if steps is not None:
        changed = config_fields.coerce(resolved.algorithm, {"steps": steps})
        resolved = dataclasses.replace(resolved, config={**resolved.config, **changed})
        config_fields.check(resolved.config, catalog.entry(resolved.algorithm).unit)
    own: dict[str, Any] = {"device": device, "checkpoint_every": checkpoint_every, "keep": keep}
    resolved = dataclasses.replace(resolved, **{name: value for name, value in own.items() if value is not None})
    if keep_optimizer:
        resolved = dataclasses.replace(resolved, keep_optimizer=True)
    if actors is not None or ray is not None:
        count = resolved.actors if actors is None else actors
        resolved = dataclasses.replace(resolved, actors=count, ray=ray or (resolved.ray if count else None))
    if completer is not None:
        resolved = dataclasses.replace(resolved, completer=completer)
    resolve.check_options(
        resolved.algorithm,
        resolved.actors,
        resolved.ray,
        resolved.completer,
        resolved.staleness,
        resolved.keep,
        resolved.checkpoint_every,
        keep_optimizer,
    )
    _check_record(resolved, record)
    with lock.held(path):  # first: a process that trains here until now may save a newer checkpoint
        start = start or checkpoint.latest(path / "checkpoints")
        if start is None:
            note = f"{path} has no checkpoint yet: the run starts again from step 0"
            resolved = dataclasses.replace(resolved, note=note)
        Session(path, resolved, show, record, log, start, callbacks).run_locked()
    return Run(path)


def load(
    path: str | Path, checkpoint: str | int = "latest", device: str = "auto", completer: str | None = None
) -> Agent:
    """The trained `Agent` of a run: `agent.act(obs)`. `checkpoint` is "latest", "best" or a step.

    `path` is a run directory, the name of a bundled agent (see `catalog.bundled`), or `hub:OWNER/NAME`.
    `completer` is the URL of a server that samples instead of the language model, with its own weights.

    Raises UserError if there is no such run or checkpoint, or if it is damaged.
    """
    from foresight.runtime.agent import Agent

    found = find(path)
    settings.reread(found)
    return Agent(found, checkpoint, device, completer)


def find(path: str | Path) -> Path:
    """The run directory `path`; otherwise the bundled agent of that name. `hub:OWNER/NAME` is downloaded."""
    if str(path).startswith("hub:"):
        from foresight.runtime import hub

        return hub.pull(str(path).removeprefix(hub.PREFIX))
    here = Path(path).expanduser()
    inside = str(path) in catalog.bundled() and not (here / "config.yaml").is_file()
    return catalog.BUNDLED / path if inside else here


def _check_record(resolved: settings.Settings, record: bool) -> None:
    """Raise UserError if a video is asked for of a run that has none."""
    if record and kinds.get(resolved.kind).record is None:
        raise UserError(
            f"--record films the agent in an environment of the kind 'control', and '{resolved.env}' is of the kind "
            f"'{resolved.kind}': leave it out."
        )


def _evaluation(document: dict[str, Any] | None) -> Evaluation | None:
    from foresight.runtime.evaluation.evaluate import Evaluation

    return Evaluation.read(document) if document else None


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _directory(out: str | Path | None, resolved: settings.Settings) -> tuple[Path, list[Path]]:
    """The directory of a new run, and the directories that were created for it, innermost first.

    Raises UserError if it holds a run or cannot be created.
    """
    if out is None:
        inside = imagined.run_of(resolved.env)
        env = f"imagined-{inside.name}" if inside is not None else resolved.preset or resolved.env
        label = f"{Path(resolved.algorithm).stem}-{env}-{resolved.seed}"
        name = re.sub(r"[^\w.-]+", "-", label)
        path, number = Path("runs") / name, 1
        while path.exists():
            number += 1
            path = Path("runs") / f"{name}-{number}"
    else:
        path = Path(out).expanduser()
        if path.is_dir() and any((path / part).exists() for part in HOLDS_A_RUN):
            raise UserError(
                f"{path} already holds a run. Choose another --out, or continue it with: {resume_command(path)}"
            )
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UserError(f"Cannot write to {path}: {error.strerror or error}. Choose another --out.") from error
    return path, made

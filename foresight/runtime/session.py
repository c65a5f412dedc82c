"""A run in one process: it drives the algorithm's generator and logs, saves and evaluates."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foresight import distributed
from foresight.errors import LostError, NotFinite, UserError
from foresight.runtime import catalog, environments, kinds, machine, summary
from foresight.runtime.catalog import State, Steps
from foresight.runtime.checkpoints import checkpoint, run_state
from foresight.runtime.config import paths, settings
from foresight.runtime.distributed import actors, learner, ray_cluster
from foresight.runtime.evaluation import evaluate
from foresight.runtime.evaluation.evaluate import Evaluation
from foresight.runtime.monitoring import finite, log, profile
from foresight.runtime.monitoring.health import Health, unlearned
from foresight.runtime.monitoring.progress import Progress
from foresight.runtime.triggers import Every, Interruption
from foresight.training.options import build_config

if TYPE_CHECKING:
    from foresight.runtime.evaluation.evaluate import Environment

Callback = Callable[[int, dict[str, Any], State], None]  # (step, metrics, state)
CHECKPOINT_EVERY = 120.0  # seconds
TIDY_EVERY = 2.0  # seconds between returns of unused memory
LASTING, PASSING = 1 << 20, 1 << 25  # bytes from which a tensor gets pages of its own, in the first step and after it
PROFILE_EVERY = 1.0  # seconds between rows of `profile/` metrics
SAVING_SHARE = 0.05  # of the time that saving may take, where the interval was not set
SERVED = "served"  # the folder of the run from which a server loads the weights


class Interrupted(KeyboardInterrupt):
    """Training was stopped by the user (Ctrl-C, SIGTERM) and can be resumed; the message contains the command."""

    def __init__(self, path: Path, step: int | None, unit: str, number: int = signal.SIGINT) -> None:
        super().__init__(f"Stopped. {_saved(step, unit)} Continue with: foresight resume {path}")
        self.path, self.exit_code = path, 128 + number


class Session:
    """One process's work on a run: from the settings (and perhaps a checkpoint) to the summary."""

    def __init__(
        self,
        path: Path,
        resolved: settings.Settings,
        checkpoint_every: float | None,
        keep: int,
        show: bool,
        record: bool,
        services: tuple[str, ...],
        start: Path | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.callbacks = tuple(callbacks)
        self.profile = profile.Profile()
        self.path, self.settings, self.keep, self.record, self.start = path, resolved, keep, record, start
        self.kind = kinds.get(resolved.kind)
        self.entry = catalog.entry(resolved.algorithm)
        self.module = catalog.module(resolved.algorithm)
        self.config = build_config(self.module.Config, **resolved.config)
        self.device = machine.pick_device(resolved.device, self.kind.gpu)
        self.checkpoint_every = CHECKPOINT_EVERY if checkpoint_every is None else checkpoint_every
        self.adaptive = checkpoint_every is None
        self.total = int(getattr(self.config, "steps", 0))
        shown = tuple(dict.fromkeys(self.entry.metrics + (learner.SHOWN if resolved.actors else ())))
        self.progress = Progress(
            f"{self.entry.name} on {resolved.typed().env}", self.total, self.entry.unit, shown, quiet=not show
        )
        self.services = services
        self.served = path / SERVED  # from which a server loads weights
        self.log: log.Log | None = None
        self.seconds = self.evaluation_seconds = 0.0  # of training, and of measuring
        self.begun = False  # whether a step was made, so that the run is kept
        self.saved: int | None = None  # the step of the newest checkpoint
        self.slow = False  # whether saving takes long enough to show it
        self.baseline: Evaluation | None = None
        self.best = -math.inf
        self.measured: tuple[int, Evaluation] | None = None  # the newest evaluation and its step

    def go(self) -> None:
        """Train to the end, from scratch or from a checkpoint."""
        machine.keep_memory(LASTING)  # weights, gradients and moments would leave holes in the pool
        with machine.threads(self.settings.config.get("threads")), Interruption(self.progress.note) as interruption:
            apart = self.settings.actors > 0
            if apart:
                actors.plan(self.settings, self.settings.actors)  # raises first if this cannot be done
            env = environments.single(self.settings) if apart else environments.training(self.settings)
            evaluation_env = None
            try:
                state = self._build(env)
                first = int(getattr(state, "step", 0))
                if first >= self.total and self.start is not None and (self.path / "summary.json").exists():
                    raise UserError(
                        f"{self.path} has reached its {self.total:,} {self.entry.unit}. "
                        f"To continue: foresight resume {self.path} --steps {2 * self.total}"
                    )
                summary.write_config(self.path, self.settings)
                paths.keep(self.settings.places, self.settings.config, self.path)
                self.log = log.Log(self.path, self.services, self.settings.document())
                self.log.truncate(first if self.start is not None else -1)
                self.progress.head(self.settings.note)
                for note in self.kind.notes(self.settings, self.config, env):
                    self.progress.head(note)
                self.progress.start(first)
                evaluation_env = environments.evaluation(self.settings, env)
                self.kind.checked(state, env, self.config)
                if self.baseline is None:
                    self.baseline = self._measure(state, evaluation_env, untrained=True)
                state = self._loop(state, env, evaluation_env, interruption)
                self._finish(state, evaluation_env)
            except KeyboardInterrupt as error:
                if isinstance(error, Interrupted):
                    raise
                raise Interrupted(self.path, self.saved, self.entry.unit) from None
            except NotFinite as error:
                again = f"lower learning_rate in {self.path / 'config.yaml'}, then: foresight resume {self.path}"
                raise NotFinite(f"{error} In {self.path} {finite.kept(self)}: {again}") from error
            except LostError as error:
                if self.log is None:  # there is no run yet
                    raise
                saved = _saved(self.saved, self.entry.unit)
                raise type(error)(f"{error} {saved} When this is fixed: foresight resume {self.path}") from error
            finally:
                self.progress.close()
                shutil.rmtree(self.served, ignore_errors=True)
                if self.log is not None:
                    self.log.close()
                environments.close(env)
                if evaluation_env is not env:
                    environments.close(evaluation_env)

    def _build(self, env: Environment) -> State:
        """A new State, or the one in the checkpoint that the run starts from."""
        machine.seed_everything(self.settings.seed)
        state = self.module.build(self.config, environments.spaces(env), self.device)
        self.kind.connected(self, state)
        if self.start is not None:
            run_state.restore(self, state, self.start)
        elif hasattr(self.module, "read_files"):  # raises before the run directory is written
            self.module.read_files(state)
        return state

    def _loop(self, state: State, env: Environment, evaluation_env: Environment, interruption: Interruption) -> State:
        steps = self._steps(state, env)
        try:
            return self._follow(steps, state, evaluation_env, interruption)
        finally:
            steps.close()  # however it ended: actors stop, and the algorithm's module is as it was

    def _follow(self, steps: Steps, state: State, evaluation_env: Environment, interruption: Interruption) -> State:
        assert self.log is not None
        health = Health()
        first = int(getattr(state, "step", 0))
        began = time.monotonic()
        checkpoint_due, tidying_due = Every(self.checkpoint_every), Every(TIDY_EVERY)
        evaluation_due = Every(self.settings.evaluate_every, first)
        profile_due = Every(PROFILE_EVERY)
        try:
            while True:
                back = evaluate.remember(state) if self.kind.repeats else None
                item = next(steps, None)
                back, self.begun = None, True  # the step is complete, whatever fails from here on
                if item is None:
                    return state
                machine.keep_memory(PASSING)
                step, metrics, state = item
                self._check_finite(step, metrics)
                # Tabular runs log no seconds: the metrics of a resumed run equal those of an uninterrupted one.
                metrics = {**metrics, **self.kind.timings(self.profile, profile_due(self.seconds))}
                self.log.row(step, self.seconds, metrics)
                self.progress.update(step, metrics)
                if tidying_due(time.monotonic() - began):
                    machine.return_memory()
                for sentence in health.check(step, metrics):
                    self.progress.note(sentence)
                for callback in self.callbacks:
                    callback(step, metrics, state)
                if evaluation_due(step) and not interruption.signal:
                    self._evaluate(step, state, evaluation_env)
                if distributed.any_rank(checkpoint_due(time.monotonic() - began) or bool(interruption.signal)):
                    took = run_state.save(self, state, step)
                    if self.adaptive and took > SAVING_SHARE * self.checkpoint_every:
                        checkpoint_due = Every(took / SAVING_SHARE, time.monotonic() - began)
                if interruption.signal:
                    raise Interrupted(self.path, self.saved, self.entry.unit, interruption.signal)
        except UserError as error:
            lost = isinstance(error, LostError)
            if not lost and (back is None or int(state.step) == first):
                raise  # no update was made, or an environment may be in the middle of a step
            if back is not None:
                back()  # what was drawn since the last step is drawn again
            run_state.save(self, state, int(state.step))
            if lost:
                raise
            raise LostError(str(error)) from error

    def _steps(self, state: State, env: Environment) -> Generator[tuple[int, dict[str, Any], State], None, None]:
        """What the algorithm's `train` yields, or the learner over actors. Also profiles it."""
        if self.settings.actors:
            self.progress.status("starting the actors")
            fields, make = actors.plan(self.settings, self.settings.actors)
            fleet = ray_cluster.Fleet(
                self.settings.algorithm, fields, make, self.settings.actors, self.settings.ray, say=self.progress.note
            )
            self.progress.status("")
            with profile.learning(self.module, self.profile):
                yield from self._timed(learner.train(self.module, self.config, state, fleet, self.profile))
            return
        profiling, env, rest = self.kind.profiled(self.module, env, self.profile)
        with profiling:
            steps = self.module.train(self.config, env, state=state, device=self.device)
            yield from self._timed(steps, env if isinstance(env, profile.Watch) else None, rest)

    def _timed(self, steps: Steps, watched: profile.Watch | None = None, rest: str | None = None) -> Steps:
        return profile.steps(steps, self.profile, self._count, watched, rest)

    def _count(self, seconds: float) -> None:
        self.seconds += seconds

    def _finish(self, state: State, evaluation_env: Environment) -> None:
        step = int(getattr(state, "step", self.total))
        self.kind.verified(state)
        if self.saved != step:
            run_state.save(self, state, step)
        if self.measured is None or self.measured[0] != step:
            self._evaluate(step, state, evaluation_env)
        assert self.measured is not None
        exported = None
        if hasattr(self.module, "export"):
            self.progress.status("exporting")
            exported = self.module.export(state, self.path / "export")
            self.progress.status("")
        updates = getattr(state, "updates", None)
        if sentence := unlearned(self.settings, step, updates, self.baseline, self.measured[1]):
            self.progress.note(sentence)
        reached = summary.document(self, step, self.measured[1])
        if exported is not None:
            self.kind.described(exported, self.settings, reached)
        checkpoint.write_whole(self.path / "summary.json", json.dumps(reached, indent=2) + "\n")
        if self.record:
            self._record(state)

    def _evaluate(self, step: int, state: State, env: Environment) -> None:
        """Measure, log, and keep the State if it is the best so far."""
        assert self.log is not None
        result = self._measure(state, env)
        self.measured = step, result
        name = f"evaluation/{result.metric}"
        if not any(name in row and row["step"] == step for row in log.read(self.path)[-2:]):
            # A run that was killed between this and its summary has the row already.
            self.log.row(step, self.seconds, {name: result.mean, f"{name}_std": result.std})
        if result.worth > self.best:
            self.best = result.worth
            if self.saved == step:
                checkpoint.mark_best(self.path / "checkpoints", step)
            else:
                run_state.save(self, state, step, best=True)

    def _measure(self, state: State, env: Environment, untrained: bool = False) -> Evaluation:
        before = time.perf_counter()
        self.progress.status("measuring the baseline" if untrained else "evaluating")
        function = evaluate.baseline if untrained else evaluate.evaluate
        result = self.kind.agreed(function(self.module, state, env, self.settings.episodes, self.settings.seed))
        self.progress.status("")
        if untrained:
            self.progress.note(f"before training: {result}")
        self.evaluation_seconds += time.perf_counter() - before
        return result

    def _check_finite(self, step: int, metrics: dict[str, Any]) -> None:
        if name := finite.bad_metric(metrics):
            assert self.log is not None
            self.log.row(step, self.seconds, metrics)
            raise UserError(finite.message(self, step, f"'{name}'"))

    def _record(self, state: State) -> None:
        if self.kind.record is None:
            return
        self.progress.status("recording")
        try:
            self.kind.record(self.module, state, self.settings, self.path / "media" / "result.mp4")
        except UserError as error:
            self.progress.note(str(error))
        finally:
            self.progress.status("")


def _saved(step: int | None, unit: str) -> str:
    return "There was no checkpoint yet." if step is None else f"The checkpoint at {step:,} {unit} is saved."

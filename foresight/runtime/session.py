"""The lifecycle of a run in one process: drives the algorithm's generator, logs, saves and evaluates."""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foresight import distributed
from foresight.errors import LostError, NotFinite, UserError, resume_command
from foresight.runtime import catalog, environments, kinds, lock, machine, summary
from foresight.runtime.catalog import State, Steps
from foresight.runtime.checkpoints import checkpoint, run_state
from foresight.runtime.config import paths, settings
from foresight.runtime.distributed import actors, learner, ray_cluster
from foresight.runtime.evaluation import evaluate
from foresight.runtime.evaluation.evaluate import Evaluation
from foresight.runtime.monitoring import ended, finite, log, profile
from foresight.runtime.monitoring.health import Health, no_learning
from foresight.runtime.monitoring.progress import Progress
from foresight.runtime.triggers import Every, Interruption
from foresight.training.options import build_config

if TYPE_CHECKING:
    from foresight.runtime.evaluation.evaluate import Environment

Callback = Callable[[int, dict[str, Any], State], None]  # (step, metrics, state)
CHECKPOINT_EVERY = 120.0  # seconds
TRIM_EVERY = 2.0  # seconds between returns of unused memory
PROFILE_EVERY = 1.0  # seconds between `profile/` metrics
SAVING_SHARE = 0.05  # of the time may go into saving, where the user set no interval
LONG = 10.0  # seconds of an evaluation: the State is saved before the next one, since a stopped process may not end it
SERVED = "served"  # the subfolder of the run from which a server loads the weights


class Interrupted(KeyboardInterrupt):
    """Training was stopped by the user (Ctrl-C, SIGTERM) and can be resumed; the message contains the command."""

    def __init__(self, path: Path, step: int | None, unit: str, number: int = signal.SIGINT) -> None:
        super().__init__(f"Stopped. {_saved_text(step, unit)} Continue with: {resume_command(path)}")
        self.path, self.exit_code = path, 128 + number


class Session:
    """One process's work on a run: from the settings (and a checkpoint, if it resumes) to the summary."""

    def __init__(
        self,
        path: Path,
        resolved: settings.Settings,
        show: bool,
        record: bool,
        services: tuple[str, ...],
        start: Path | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.callbacks = tuple(callbacks)
        self.profile = profile.Profile()
        self.path, self.settings, self.record, self.start = path, resolved, record, start
        self.kind = kinds.get(resolved.kind)
        self.entry = catalog.entry(resolved.algorithm)
        self.module = catalog.module(resolved.algorithm)
        self.config = build_config(self.module.Config, **resolved.config)
        self.device = machine.pick_device(resolved.device, self.kind.gpu)
        self.adaptive = resolved.checkpoint_every is None
        self.checkpoint_every = CHECKPOINT_EVERY if resolved.checkpoint_every is None else resolved.checkpoint_every
        self.total = int(getattr(self.config, "steps", 0))
        shown = self.entry.metrics + (learner.SHOWN if resolved.actors else ()) + self.kind.shown(resolved)
        self.progress = Progress(
            f"{self.entry.name} on {resolved.typed().env}",
            self.total,
            self.entry.unit,
            tuple(dict.fromkeys(shown)),
            quiet=not show,
        )
        self.disconnect: Callable[[], object] = lambda: None  # ends what `kind.begin` began
        self.fleet: ray_cluster.Fleet | None = None
        self.services = services
        self.served = path / SERVED
        self.log: log.Log | None = None
        self.seconds = self.evaluation_seconds = 0.0  # of training and of evaluation
        self.evaluation_took = 0.0  # seconds of the newest one
        self.built: run_state.OptimizerSettings = {}
        self.dropped: list[str] = []  # optimizers without moments in the checkpoint that the run starts from
        self.started = False  # whether a step was made: the run directory is then kept
        self.saved = None if start is None else checkpoint.step_of(start)  # the step of the newest checkpoint
        self.slow = False  # whether saving takes long enough to report it
        self.baseline: Evaluation | None = None
        self.best = -math.inf
        self.evaluated: tuple[int, Evaluation] | None = None  # the newest evaluation and its step
        self.restored_best = False  # whether the State that was restored was the best when it was saved
        self.pending = False  # whether the State is to be evaluated before the next step

    def run(self) -> None:
        """Train to the end, from scratch or from a checkpoint.

        Raises UserError for a user's mistake, BusyError if another process trains in this directory.
        """
        with lock.held(self.path):
            self.run_locked()

    def run_locked(self) -> None:
        """As `run`, for a caller that holds the lock of the run directory.

        The caller's global generators are afterwards as they were before.
        """
        before = machine.global_rng()
        machine.configure_malloc(machine.POOL_AT_START)  # weights, gradients and moments would leave holes in the pool
        with machine.threads(self.settings.config.get("threads")), Interruption(self.progress.note) as interruption:
            with_actors = self.settings.actors > 0
            if with_actors:
                actors.plan(self.settings, self.settings.actors)  # raises before anything is built
            env = environments.single(self.settings) if with_actors else environments.training(self.settings)
            evaluation_env = None
            try:
                state = self._build(env)
                first = int(getattr(state, "step", 0))
                if first >= self.total and self.start is not None and (self.path / "summary.json").exists():
                    reached = max(first, self.total)  # `--steps` may be fewer than were made
                    raise UserError(
                        f"{self.path} has reached its {reached:,} {self.entry.unit}. "
                        f"Continue with: {resume_command(self.path)} --steps {2 * reached}"
                    )
                # What can refuse comes first: a resume that is refused leaves the run as it was.
                evaluation_env = environments.evaluation(self.settings, env)
                self.kind.check(state, env, self.config)
                if with_actors:
                    self.fleet = self._fleet(first)
                self.log = log.Log(self.path, self.services, self.settings.document())
                if self.start is not None:
                    run_state.go_back(self)
                summary.write_config(self.path, self.settings)
                if self.kind.files:
                    paths.copy_inputs(self.settings.paths, self.settings.config, self.path)
                (self.path / "summary.json").unlink(missing_ok=True)  # of an end that this process goes beyond
                self.log.truncate(first if self.start is not None else -1)
                self.progress.header(self.settings.note)
                for note in self.kind.notes(self.settings, self.config, env):
                    self.progress.header(note)
                self.progress.start(first)
                self.kind.begin(self, state, env)
                if self.baseline is None:
                    self.baseline = self._run_evaluation(state, evaluation_env, untrained=True)
                    self.log.samples(first, self.baseline.samples)
                state = self._train(state, env, evaluation_env, interruption)
                self._finish(state, evaluation_env)
            except KeyboardInterrupt as error:
                if isinstance(error, Interrupted) or not (self.path / "config.yaml").is_file():
                    raise  # without it there is no run to continue
                raise Interrupted(self.path, self.saved, self.entry.unit) from None
            except NotFinite as error:
                fix = f"lower learning_rate in {self.path / 'config.yaml'}, then: {resume_command(self.path)}"
                raise NotFinite(f"{error} In {self.path} {finite.kept(self)}: {fix}") from error
            except LostError as error:
                if self.log is None:  # nothing was written yet
                    raise
                saved = _saved_text(self.saved, self.entry.unit)
                raise type(error)(f"{error} {saved} When this is fixed: {resume_command(self.path)}") from error
            finally:
                self.progress.close()
                if self.fleet is not None:
                    self.fleet.close()
                shutil.rmtree(self.served, ignore_errors=True)
                if self.log is not None:
                    self.log.close()
                environments.close(env)
                if evaluation_env is not env:
                    environments.close(evaluation_env)
                machine.set_global_rng(before)

    def _build(self, env: Environment) -> State:
        """A new State, or the one in the checkpoint that the run starts from."""
        machine.require_float32()
        machine.seed_everything(self.settings.seed)
        state = self.module.build(self.config, environments.spaces(env), self.device)
        self.built = run_state.optimizer_settings(state)
        run_state.use_disk(state, self.path)
        self.kind.connect(self, state)
        if self.start is not None:
            run_state.restore(self, state, self.start)
        unread = self.start is None or getattr(state, "episodes", state) is None  # a checkpoint does not hold them
        if unread and hasattr(self.module, "read_files"):  # raises before the run directory is written
            self.module.read_files(state)
        return state

    def _train(self, state: State, env: Environment, evaluation_env: Environment, interruption: Interruption) -> State:
        steps = self._steps(state, env)
        try:
            return self._consume(steps, state, evaluation_env, interruption)
        finally:
            steps.close()  # stops actors and removes the timers from the algorithm's module, also after an error
            self.disconnect()

    def _consume(self, steps: Steps, state: State, evaluation_env: Environment, interruption: Interruption) -> State:
        assert self.log is not None
        health = Health(settings=self.settings)
        first = int(getattr(state, "step", 0))
        count = ended.finished(state)
        began = time.monotonic()
        checkpoint_due, trim_due = Every(self.checkpoint_every), Every(TRIM_EVERY)
        evaluation_due = Every(self.settings.evaluate_every, first)
        profile_due = Every(PROFILE_EVERY)
        rewind = None
        try:
            if self.pending:
                self._evaluate(first, state, evaluation_env)
            while True:
                rewind = evaluate.snapshot_generators(state) if self.kind.repeatable else None
                item = next(steps, None)
                rewind, self.started = None, True  # the step is complete, whatever fails from here on
                if item is None:
                    return state
                machine.configure_malloc(machine.POOL)
                step, metrics, state = item
                self._check_finite(step, metrics)
                # Tabular runs log no seconds: the metrics of a resumed run equal those of an uninterrupted one.
                metrics = {**metrics, **self.kind.timings(self.profile, profile_due(self.seconds))}
                metrics |= ended.since(state, count)
                count = ended.finished(state)
                self.log.row(step, self.seconds, metrics)
                self.progress.update(step, metrics)
                if trim_due(time.monotonic() - began):
                    machine.trim_malloc()
                for warning in health.check(step, metrics):
                    self.progress.note(warning)
                for callback in self.callbacks:
                    callback(step, metrics, state)
                self.pending = evaluation_due(step)
                if self.pending and not distributed.any_rank(bool(interruption.signal)):
                    if distributed.any_rank(self.evaluation_took > LONG) and self.saved != step:
                        run_state.save(self, state, step)
                    self._evaluate(step, state, evaluation_env)
                # All decide together: a signal may come while a process waits for the others, or to one alone.
                stop = distributed.any_rank(bool(interruption.signal))
                due = distributed.any_rank(checkpoint_due(time.monotonic() - began)) or stop
                if due and self.saved != step:  # a second time would replace it, at the risk of having none
                    took = run_state.save(self, state, step)
                    if self.adaptive and took > SAVING_SHARE * self.checkpoint_every:
                        checkpoint_due = Every(took / SAVING_SHARE, time.monotonic() - began)
                if stop:
                    number = interruption.signal or signal.SIGTERM
                    raise Interrupted(self.path, self.saved, self.entry.unit, number)
        except UserError as error:
            external = isinstance(error, LostError)
            if not external and (rewind is None or int(state.step) == first):
                raise  # no update was made, or an environment may be in the middle of a step
            if rewind is not None:
                rewind()  # a resumed run draws the same random numbers again
            run_state.save(self, state, int(state.step))
            if external:
                raise
            raise LostError(str(error)) from error

    def _steps(self, state: State, env: Environment) -> Generator[tuple[int, dict[str, Any], State], None, None]:
        """The steps of the algorithm's `train`, or of the learner over actors, with their time profiled."""
        if self.settings.actors:
            assert self.fleet is not None
            with profile.time_updates(self.module, self.profile):
                yield from self._timed(learner.train(self.module, self.config, state, self.fleet, self.profile))
            return
        timers, env, rest = self.kind.profile(self.module, env, self.profile)
        with timers:
            steps = self.module.train(self.config, env, state=state, device=self.device)
            yield from self._timed(steps, env if isinstance(env, profile.TimedEnv) else None, rest)

    def _fleet(self, first: int) -> ray_cluster.Fleet:
        """The actors of a run that is at step `first`. Raises UserError if Ray or CPUs for them are missing."""
        self.progress.status("starting the actors")
        try:
            fields, make = actors.plan(self.settings, self.settings.actors)
            fields["seed"] = self.settings.seed + first  # after a resume they draw other numbers than at the start
            address, report = self.settings.ray, self.progress.note
            return ray_cluster.Fleet(
                self.settings.algorithm, fields, make, self.settings.actors, address, report=report
            )
        finally:
            self.progress.status("")

    def _timed(self, steps: Steps, timed_env: profile.TimedEnv | None = None, rest: str | None = None) -> Steps:
        return profile.time_steps(steps, self.profile, self._add_seconds, timed_env, rest)

    def _add_seconds(self, seconds: float) -> None:
        self.seconds += seconds

    def _finish(self, state: State, evaluation_env: Environment) -> None:
        step = int(getattr(state, "step", self.total))
        self.kind.verify(state)
        if self.saved != step:
            run_state.save(self, state, step)
        if self.evaluated is None or self.evaluated[0] != step:
            self._evaluate(step, state, evaluation_env)
        assert self.evaluated is not None
        exported = None
        if hasattr(self.module, "export"):
            self.progress.status("exporting")
            exported = self.module.export(state, self.path / "export")
            self.progress.status("")
        if step < self.total and self.entry.unit == "sweeps":
            self.progress.note(f"converged after {step:,} of at most {self.total:,} sweeps")
        updates = getattr(state, "updates", None)
        if warning := no_learning(self.settings, step, updates, self.baseline, self.evaluated[1]):
            self.progress.note(warning)
        result = summary.document(self, step, self.evaluated[1])
        if exported is not None:
            self.kind.describe(exported, self.settings, result)
        summary.write(self.path, result)
        run_state.drop_moments(self)
        if self.record:
            self._record(state)

    def _evaluate(self, step: int, state: State, env: Environment) -> None:
        """Evaluate and log; save the State if it is the best so far."""
        assert self.log is not None
        result = self._run_evaluation(state, env)
        self.evaluated, self.pending = (step, result), False
        name = f"evaluation/{result.metric}"
        if not any(name in row and row["step"] == step for row in log.read(self.path)[-2:]):
            # A run that was killed between its last evaluation and its summary has the row already.
            row = {name: result.mean, f"{name}_std": result.std, "samples": result.samples}
            self.log.row(step, self.seconds, row)
        if result.score > self.best:
            self.best = result.score
            if self.saved != step:
                run_state.save(self, state, step, best=True)
            elif distributed.rank() == 0:
                checkpoint.mark_best(self.path / "checkpoints", step, self.best)

    def _run_evaluation(self, state: State, env: Environment, untrained: bool = False) -> Evaluation:
        before = time.perf_counter()
        self.progress.status("evaluating the baseline" if untrained else "evaluating")
        function = evaluate.baseline if untrained else evaluate.evaluate
        result = self.kind.synchronize(function(self.module, state, env, self.settings.episodes, self.settings.seed))
        self.progress.status("")
        if untrained:
            self.progress.note(f"before training: {result}")
        self.evaluation_took = time.perf_counter() - before
        self.evaluation_seconds += self.evaluation_took
        return result

    def _check_finite(self, step: int, metrics: dict[str, Any]) -> None:
        if name := finite.bad_metric(metrics):
            assert self.log is not None
            self.log.row(step, self.seconds, metrics)
            raise UserError(finite.message(self, step, f"'{name}'"))

    def _record(self, state: State) -> None:
        assert self.kind.record is not None  # `run` refuses it
        self.progress.status("recording")
        try:
            self.kind.record(self.module, state, self.settings, self.path / "media" / "result.mp4")
        except UserError as error:
            self.progress.note(str(error))
        finally:
            self.progress.status("")


def _saved_text(step: int | None, unit: str) -> str:
    return "There was no checkpoint yet." if step is None else f"The checkpoint at {step:,} {unit} is saved."

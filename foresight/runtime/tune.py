"""Hyperparameter search with Optuna: each trial is a run, and a search can be continued."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from foresight.errors import UserError, unknown
from foresight.runtime import catalog, kinds, lock, run
from foresight.runtime.checkpoints import checkpoint
from foresight.runtime.config import config_fields, effects, resolve, settings
from foresight.runtime.evaluation import evaluate
from foresight.training.options import field_types

STUDY, BEST = "study.db", "best.yaml"
WARM_UP = 5  # trials that are never pruned
SHARED = ("seed", "steps")  # fields that are options of the search
REPORTS = 20  # intermediate values of a trial that the pruner sees
# The default search space: choices by the name of the field, otherwise a range around its default.
CHOICES: dict[str, list[Any]] = {
    "gamma": [0.95, 0.98, 0.99, 0.995, 0.999],
    "gae_lambda": [0.8, 0.9, 0.95, 0.98, 1.0],
    "clip_ratio": [0.1, 0.2, 0.3],
    "max_grad_norm": [0.3, 0.5, 1.0, 2.0, 5.0],
    "hidden": [[64, 64], [128, 128], [256, 256]],
    "activation": ["tanh", "relu"],
}
LOG_SCALE = ("learning_rate", "coef", "tau", "temperature")  # name parts of fields to search on a log scale
COUNTS = ("num_envs", "rollout_steps", "rollouts_per_update", "epochs", "minibatches", "batch_size")  # in powers of two


@dataclasses.dataclass(frozen=True)
class Range:
    """The search range of one field: `choices`, or from `low` to `high`."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    integer: bool = False
    choices: tuple[Any, ...] = ()

    def distribution(self) -> Any:
        """The range as Optuna stores it with a trial."""
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution([json.dumps(choice) for choice in self.choices])
        if self.integer:
            return distributions.IntDistribution(int(self.low), int(self.high), log=self.log)
        return distributions.FloatDistribution(self.low, self.high, log=self.log)

    def suggest(self, trial: Any, name: str) -> Any:
        """A value for `name` from an Optuna trial."""
        if self.choices:  # as text: Optuna does not store tuples
            return json.loads(trial.suggest_categorical(name, [json.dumps(choice) for choice in self.choices]))
        if self.integer:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """The result of a search so far."""

    path: Path
    trials: int  # all finished ones, including pruned and failed ones
    complete: int
    value: float
    fields: dict[str, Any]
    command: str  # that trains with them


def tune(
    name: str,
    *,
    trials: int = 20,
    steps: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    only: Iterable[str] = (),
    ranges: str | Path | None = None,
    prune: bool = True,
    device: str = "auto",
    report: Callable[[str], Any] = lambda text: None,
    **env: str | None,
) -> TuneResult:
    """Search until there are `trials` in total, including those already in `out`. `env`: one of preset, env and task.

    A trial is a complete run (`out/trials/00012`); its objective is the evaluation (a return, or the negative of an
    error). One whose training metric is below the median of the others at the same step is stopped early (`prune`).
    Fields are searched in `ranges` (a YAML file; default: `foresight/presets/ranges/NAME.yaml`, else ranges made from
    the Config's fields), or `only` some of them.

    Raises UserError for names that do not exist, for ranges that cannot be read, for a search that was started with
    other `steps` or other choices of a field, for `out` of another search, and if no trial succeeds; BusyError if
    another process searches in `out`.
    """
    try:
        import optuna
    except ImportError as error:
        raise UserError("Tuning needs Optuna. Install it with: pip install 'foresight[tune]'") from error
    if trials < 1:
        raise UserError(f"--trials must be at least 1, not {trials}.")
    if env.get("preset") is not None and (other := env.get("env") or env.get("task")):
        raise UserError(f"Name a preset ('{env['preset']}') or an environment ('{other}'), not both: leave one out.")
    resolved = resolve.resolve(name, **dict[str, Any](env), given={} if steps is None else {"steps": steps})
    space = search_space(name, resolved.config, ranges, only)
    label = f"tune-{catalog.entry(name).name}-{resolved.preset or resolved.env}".replace("/", "-")
    path = Path(out) if out is not None else Path("runs") / label
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot write to {path}: {error.strerror or error}. Choose another --out.") from error
    with lock.held(path), _storage(path / STUDY):  # another process would fail the trial that runs
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        _require_search(path, label, optuna)
        study = optuna.create_study(
            storage=_address(path / STUDY), study_name=label, direction="maximize", load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=WARM_UP) if prune else optuna.pruners.NopPruner(),
        )  # fmt: skip
        _require_same(study, path, "steps", resolved.config.get("steps"), "{:,} steps each")
        _require_ranges(study, path, space)
        _require_same(study, path, "seed", seed, "the seed {}")
        # A continued search samples other values.
        study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
        for trial in study.trials:  # those interrupted by a kill
            if not trial.state.is_finished():
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        ended = [trial for trial in study.trials if trial.state.is_finished()]

        def objective(trial: Any) -> float:
            given = {field: choice.suggest(trial, field) for field, choice in space.items()}
            given |= {"seed": seed} if "seed" in resolved.config else {}
            given |= {} if steps is None else {"steps": steps}
            total = resolved.config.get("steps")
            callback = _pruner(trial, catalog.entry(name).metrics, total, optuna) if prune else None
            finished = run.train(
                name, **dict[str, Any](env), out=path / "trials" / f"{trial.number:05d}", show=False, device=device,
                callbacks=[callback] if callback else [], **effects.used(resolved.config, given),
            )  # fmt: skip
            assert finished.evaluation is not None  # the run has ended
            trial.set_user_attr("mean", float(finished.evaluation.mean))
            report(f"trial {trial.number}: {finished.evaluation}  {_format({k: given[k] for k in space})}")
            return float(finished.evaluation.score)

        def report_end(study: Any, trial: Any) -> None:
            if trial.state.name != "COMPLETE":
                reason = trial.system_attrs.get("why") or trial.user_attrs.get("why", "")
                report(f"trial {trial.number}: {trial.state.name.lower()} {reason}".rstrip())

        try:
            study.optimize(
                _record_failure(objective), max(0, trials - len(ended)), catch=(UserError,), callbacks=[report_end]
            )
        except KeyboardInterrupt as stop:  # its own text is how to resume the trial, which no search would count
            text = "Stopped. A trial that was running counts as failed. Continue the search with the same command."
            stop.args = (text,)
            raise
        complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
        if not complete:
            reasons = [trial.user_attrs["why"] for trial in study.trials if "why" in trial.user_attrs]
            reason = reasons[-1] if reasons else "see the study"
            raise UserError(f"None of {len(study.trials)} trials succeeded. The last one failed with: {reason}")
        best = study.best_trial
        values = {field: _plain(best.distributions[field], value) for field, value in best.params.items()}
        values = effects.used(resolved.config, values)
        command = shlex.join(
            ["foresight", "train", name, *(["--preset", resolved.preset] if resolved.preset else [])]
            + ([] if resolved.preset else [f"--{kinds.get(resolved.kind).option}", resolved.env])
            + [part for field, value in values.items() for part in config_fields.option(field, value)]
            + ([] if steps is None else config_fields.option("steps", steps))
            + (config_fields.option("seed", seed) if "seed" in resolved.config else [])
        )
        mean = float(best.user_attrs.get("mean", best.value or 0.0))
        found = TuneResult(path, len(study.trials), len(complete), mean, values, command)
        _write(found, resolved, best.number, steps)
        return found


@contextlib.contextmanager
def _storage(file: Path) -> Iterator[None]:
    """Raise UserError where the database of the trials is damaged, or cannot be written."""
    import optuna
    import sqlalchemy

    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ or error
        reason = getattr(cause, "orig", None) or cause
        raise UserError(
            f"{file} cannot be used: {reason}. Where the disk is full, free space and give the same command; a damaged "
            "file keeps no trials: start another search with --out."
        ) from error


def _address(file: Path) -> str:
    """The database as Optuna takes it: `?` in a path would begin the options of the connection."""
    import sqlalchemy

    return sqlalchemy.URL.create("sqlite", database=str(file)).render_as_string()


def _require_search(path: Path, label: str, optuna: Any) -> None:
    """Raise UserError if `path` holds another search: the trials of both would have the same directories."""
    if not (path / STUDY).is_file():
        return
    names = optuna.get_all_study_names(storage=_address(path / STUDY))
    if names and label not in names:
        raise UserError(f"{path} holds the search {names[0]}, and this one is {label}. Choose another --out.")


def _require_same(study: Any, path: Path, name: str, value: int | None, words: str) -> None:
    """Raise UserError if earlier trials had another `value` of the setting `name`, which `words` puts into words."""
    before = study.user_attrs.get(name, value)
    if before != value:
        raise UserError(
            f"The trials in {path} have {words.format(before)}, and those of {value:,} cannot be compared with them. "
            f"Continue with --{name} {before}, or start another search with --out."
        )
    study.set_user_attr(name, value)


def _require_ranges(study: Any, path: Path, space: Mapping[str, Range]) -> None:
    """Raise UserError for a field whose choices or scale differ from those of the earlier trials."""
    from optuna import distributions

    for field, wanted in space.items():
        for before in (trial.distributions[field] for trial in study.trials if field in trial.distributions):
            try:
                distributions.check_distribution_compatibility(before, wanted.distribution())
            except ValueError as error:
                raise UserError(
                    f"The trials in {path} have another range of '{field}' ({_range_text(before)}), which cannot be "
                    "changed in a search. Restore it, or start another search with --out."
                ) from error


def _range_text(given: Any) -> str:
    if hasattr(given, "choices"):
        return f"[{', '.join(given.choices)}]"
    return f"{given.low:g} to {given.high:g}{', log' if given.log else ''}"


def search_space(
    name: str, config: Mapping[str, Any], ranges: str | Path | None = None, only: Iterable[str] = ()
) -> dict[str, Range]:
    """The range of every field that is searched; see `tune`."""
    entry = catalog.entry(name)
    bundled = catalog.ROOT / "presets" / "ranges" / f"{entry.name}.yaml"
    file = bundled if ranges is None else Path(ranges)
    if ranges is not None and not file.is_file():
        raise UserError(f"There is no file {file}. Give an existing YAML file with --ranges.")
    if file.is_file() and (ranges is not None or entry.ours):
        document = catalog.read_mapping(file, "Write a field and its range in each line, as in {gamma: [0.9, 0.99]}.")
        space = {str(field): _range(name, str(field), given, config) for field, given in document.items()}
    else:
        hints = field_types(catalog.config_class(name))
        guesses = {field: _guess(field, value, hints[field]) for field, value in effects.used({}, config).items()}
        scored_by = kinds.get(entry.kind).scored_by
        space = {field: guess for field, guess in guesses.items() if guess is not None and field not in scored_by}
    for field in only:
        _require_searchable(name, field, config)
        if field not in space:
            raise UserError(
                f"There is no default range for '{field}'. Write one into a file and give it with --ranges."
            )
    chosen = {field: space[field] for field in only} if only else space
    if not chosen:
        raise UserError(f"{name} has no default ranges. Give a file with --ranges.")
    return chosen


def _require_searchable(name: str, field: str, config: Mapping[str, Any]) -> None:
    """Raise UserError for a field that does not exist, or whose values have scores that cannot be compared."""
    if field not in config:
        raise unknown(f"field of {name}", field, config)
    if field in SHARED:
        raise UserError(f"'{field}' is not searched: all trials share --{field}. Leave it out of the search.")
    if field in kinds.get(catalog.entry(name).kind).scored_by:
        raise UserError(
            f"'{field}' is not searched: each run of {name} is scored with its own, so that scores of different ones "
            "cannot be compared. Leave it out of the search."
        )


def _range(name: str, field: str, given: Any, config: Mapping[str, Any]) -> Range:
    _require_searchable(name, field, config)
    if isinstance(given, list) and given:
        for value in given:
            config_fields.coerce(name, {field: value})
        return Range(choices=tuple(given))
    if isinstance(given, dict) and {"low", "high"} <= set(given) <= {"low", "high", "log"}:
        low, high = (config_fields.coerce(name, {field: given[end]})[field] for end in ("low", "high"))
        log = bool(given.get("log", False))
        numbers = all(isinstance(end, int | float) and math.isfinite(end) for end in (low, high))
        if numbers and low < high and not (log and low <= 0):
            return Range(low, high, log=log, integer=isinstance(low, int))
    raise UserError(f"The range of '{field}' must be a list, or low, high (and log), low below high, not {given!r}.")


def _guess(field: str, value: Any, hint: Any) -> Range | None:
    choices = CHOICES.get(field, [])
    if choices and isinstance(value, tuple if isinstance(choices[0], list) else type(choices[0])):
        return Range(choices=tuple(choices))
    if field in COUNTS and isinstance(value, int) and value > 0:
        return Range(choices=tuple(sorted({max(1, value // 4), max(1, value // 2), value, 2 * value, 4 * value})))
    if hint in (float, float | None) and any(part in field for part in LOG_SCALE) and value:
        return Range(value / 10, value * 10, log=True)
    return None


def _pruner(trial: Any, metrics: tuple[str, ...], total: Any, optuna: Any) -> Any:
    """A callback that reports the first metric at intervals and stops a trial that the pruner rejects."""
    reported = [0]
    sign = -1.0 if metrics and (evaluate.lower_is_better(metrics[0]) or "loss" in metrics[0]) else 1.0

    def callback(step: int, row: dict[str, Any], state: catalog.State) -> None:
        value = row.get(metrics[0]) if metrics else None
        mark = int(REPORTS * step / total) if total else step
        if value is None or math.isnan(value) or mark <= reported[0] or mark >= REPORTS:
            return
        reported[0] = mark
        trial.report(sign * float(value), mark)
        if trial.should_prune():
            raise optuna.TrialPruned(f"{metrics[0]} {value:.4g} at {step:,}")

    return callback


def _record_failure(objective: Callable[[Any], float]) -> Callable[[Any], float]:
    """The objective, with the error of a failed trial stored in the study."""

    def recorded(trial: Any) -> float:
        try:
            return objective(trial)
        except Exception as error:
            trial.set_user_attr("why", str(error)[:500])
            raise

    return recorded


def _plain(distribution: Any, value: Any) -> Any:
    """A value of a trial, whose own search may have had other fields: choices are kept as JSON."""
    return json.loads(value) if hasattr(distribution, "choices") else value


def _format(fields: Mapping[str, Any]) -> str:
    return "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in fields.items())


def _write(found: TuneResult, resolved: settings.Settings, number: int, steps: int | None) -> None:
    """The best trial as a preset."""
    preset = dict(catalog.presets(resolved.algorithm).get(resolved.preset or "", {}))
    preset |= {kinds.get(resolved.kind).option: resolved.env, **found.fields}
    preset |= {} if steps is None else {"steps": steps}
    preset["source"] = (
        f"foresight tune: the best of {found.complete} complete trials (number {number}), {found.value:.6g}"
    )
    text = yaml.safe_dump({f"{resolved.preset or resolved.env}-tuned": preset}, sort_keys=False, allow_unicode=True)
    advice = "The trials are kept: make room for the file, then give the same command."
    checkpoint.write_atomic(found.path / BEST, f"# {found.command}\n{text}", advice)

"""Resolves a run: Config defaults, then the preset, then what the user gave. No torch here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from foresight.errors import UserError, unknown
from foresight.runtime import catalog, kinds, legacy
from foresight.runtime.config import config_fields, effects, paths
from foresight.runtime.config.settings import Settings
from foresight.runtime.kinds.kind import Kind, fold
from foresight.training.options import flatten


def resolve(
    algorithm: str,
    *,
    preset: str | None = None,
    env: str | None = None,
    task: str | None = None,
    env_options: dict[str, Any] | None = None,
    episodes: int | None = None,
    evaluate_every: int | None = None,
    device: str = "auto",
    config: Any = None,
    given: dict[str, Any] | None = None,
    actors: int = 0,
    ray: str | None = None,
    completer: str | None = None,
    staleness: int | None = None,
    keep: int = 3,
    keep_optimizer: bool = False,
    checkpoint_every: float | None = None,
) -> Settings:
    """Resolve a run. `given` holds explicit Config fields; `config`, a whole Config, replaces the preset's fields.

    An `env` or `task` that has its own preset uses it, and `Settings.note` names it.
    Raises UserError for names that do not exist (algorithm, preset, field), for values of the wrong
    type, for a field that the others turn off, and if no environment is chosen.
    """
    check_options(algorithm, actors, ray, completer, staleness, keep, checkpoint_every, keep_optimizer)
    if episodes is not None and episodes < 1:
        raise UserError(f"--evaluation-episodes must be at least 1, not {episodes}.")
    if evaluate_every is not None and evaluate_every < 0:
        raise UserError(f"--evaluate-every must be at least 0, not {evaluate_every}.")
    entry = catalog.entry(algorithm)
    declared = kinds.get(entry.kind)
    given = given or {}
    env_option, other_option = ("task", "env") if declared.option == "task" else ("env", "task")
    name, wrong = (task, env) if declared.option == "task" else (env, task)
    if wrong is not None:
        declared.resolve_name(os.fspath(wrong), entry)  # names the algorithms that read a text task
        raise UserError(f"{entry.name} is a '{entry.kind}' algorithm: use --{env_option}, not --{other_option}.")
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    config_fields.written(env_options or {})  # raises if an option cannot be written to config.yaml
    known = catalog.presets(algorithm)
    found, renamed = None, ""
    if preset is not None:
        preset, renamed = legacy.preset(entry.name, preset) if entry.ours else (preset, "")
    if preset is None and name is not None:
        preset = found = _preset_for(name, given.get("model"), known, ignore_case=declared.ignore_case)
    elif preset is not None and preset not in known:
        near = [one for one in known if fold(one) == fold(preset)]
        if len(near) != 1:
            raise unknown(f"preset of {entry.name}", preset, known)
        preset = near[0]
    chosen = known.get(preset or "", {})
    if name is not None and chosen.get("env") and fold(name) == fold(chosen["env"]):
        name = chosen["env"]  # in the preset's spelling: names of environments are case-sensitive
    if name is None:
        name = chosen.get("task", chosen.get("env"))
    if name is None and declared.data:  # a data set is also a task, with its own held-out rows
        name = given.get("data") or chosen.get("data") or None
    if name is None:
        options = f", or a preset: {', '.join(known)}" if known else ""
        raise UserError(f"No {env_option} given for {entry.name}: add --{env_option} NAME{options}.")
    base = (
        config_fields.fields(algorithm, chosen) if config is None else config_fields.coerce(algorithm, flatten(config))
    )
    env_options, renamed_options = legacy.env_options(name, env_options or {})
    if "num_envs" in base and "num_envs" in env_options:
        raise UserError(f"num_envs is a Config field of {entry.name}, not an environment option. Use --num-envs.")
    typed = config_fields.coerce(algorithm, given)
    config = {**base, **typed}
    config_fields.check(config, entry.unit)
    config_fields.check_written(config)
    if entry.ours:  # what the fields of another file do, only it knows
        effects.check(algorithm, config, typed, actors)
    evaluation = chosen.get("evaluation") or {}
    kind = chosen.get("kind", entry.kind)  # some algorithms take two kinds of environment
    other, name = kinds.get(kind).resolve_name(name, entry)
    kind = other or kind
    own = dict(chosen.get("env_options") or {})
    if "board_size" in env_options:  # another name for size
        own.pop("size", None)
    applied = _applied(found, env_option, algorithm, chosen, given, env_options) if found else ""
    return Settings(
        algorithm=str(entry.path) if algorithm.endswith(".py") else algorithm,  # absolute: found from any directory
        kind=kind,
        env=name,
        preset=preset,
        env_options={**own, **env_options},
        episodes=episodes if episodes is not None else evaluation.get("episodes", kinds.get(kind).episodes),
        evaluate_every=evaluate_every if evaluate_every is not None else evaluation.get("every"),
        device=device,
        config=config,
        note="; ".join(note for note in (renamed, renamed_options, applied) if note),
        actors=actors,
        ray=ray,
        completer=completer,
        staleness=staleness,
        keep=keep,
        keep_optimizer=keep_optimizer,
        checkpoint_every=checkpoint_every,
        paths=_paths(kinds.get(kind), name, config, {**own, **env_options}),
    )


def check_options(
    algorithm: str,
    actors: int,
    ray: str | None,
    completer: str | None,
    staleness: int | None,
    keep: int,
    checkpoint_every: float | None,
    keep_optimizer: bool,
) -> None:
    """Raise UserError for options of a run, also of a resumed one, that fit neither its algorithm nor each other."""
    if ray is not None and not actors:
        raise UserError("--ray is given without --actors. Add --actors N, for example --actors 8.")
    if actors < 0:
        raise UserError(f"--actors must be at least 0, not {actors}.")
    if keep < 1:
        raise UserError(f"--keep must be at least 1, not {keep}.")
    if checkpoint_every is not None and not checkpoint_every >= 0:
        raise UserError(f"--checkpoint-every must be at least 0, not {checkpoint_every}.")
    entry = catalog.entry(algorithm)
    kind = kinds.get(entry.kind)
    for option, on, takes in (
        ("completer", completer is not None, kind.completer),
        ("staleness", staleness is not None, kind.completer),
        ("keep-optimizer", keep_optimizer, kind.large_optimizers),
    ):
        if on and not takes:
            raise UserError(f"--{option} is for text algorithms: {entry.name} is a '{entry.kind}' algorithm.")


def _applied(
    preset: str,
    env_option: str,
    algorithm: str,
    chosen: dict[str, Any],
    given: dict[str, Any],
    options: dict[str, Any],
) -> str:
    """A note on an automatically chosen preset: the values that differ from the defaults and were not given."""
    defaults, mine = config_fields.fields(algorithm, {}), config_fields.fields(algorithm, chosen)
    sets = [f"{name}={config_fields.plain(x)}" for name, x in mine.items() if x != defaults[name] and name not in given]
    overridden = set(options) | ({"size"} if "board_size" in options else set())
    preset_options = chosen.get("env_options") or {}
    env = [f"{name}={config_fields.plain(x)}" for name, x in preset_options.items() if name not in overridden]
    values = ", ".join(env + sets) or "only defaults"
    return f"using preset '{preset}' because of --{env_option}; it sets {values}"


def _preset_for(env: str, model: str | None, known: dict[str, dict[str, Any]], ignore_case: bool) -> str | None:
    """The first preset for this environment (and model, if given): an exact match, else one that ignores case."""
    normalizations: list[Callable[[str], str]] = [str, fold] if ignore_case else [str]
    for normalize in normalizations:
        for name, preset in known.items():
            names = [normalize(one) for one in (name, preset.get("env"), preset.get("task")) if one is not None]
            if normalize(env) in names and model in (None, preset.get("model")):
                return name
    return None


def _paths(kind: Kind[Any], env: str, config: dict[str, Any], options: dict[str, Any]) -> dict[str, str]:
    """Where the files and folders of a run are, by their names as typed."""
    if kind.files:
        return paths.locate(env, config, options)
    return paths.locate("", config, {}) if kind.inputs else {}

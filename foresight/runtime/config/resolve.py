"""What a run is made from: Config defaults, then the preset, then what was given. No torch here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from foresight.errors import UserError, unknown
from foresight.runtime import catalog, kinds
from foresight.runtime.config import config_fields, paths
from foresight.runtime.config.settings import Settings
from foresight.runtime.kinds.kind import fold
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
) -> Settings:
    """Resolve a run. `given` holds explicit Config fields; `config`, a whole Config, replaces the preset's.

    An `env` or `task` that has a preset of its own uses that preset, and `note` says so.
    Raises UserError for names that do not exist (algorithm, preset, field), for values of the wrong
    type, and if no environment is chosen.
    """
    if ray is not None and not actors:
        raise UserError("--ray needs actors to run there: add --actors N, such as --actors 8.")
    if actors < 0:
        raise UserError(f"--actors must be at least 0, not {actors}.")
    if episodes is not None and episodes < 1:
        raise UserError(f"--evaluation-episodes must be at least 1, not {episodes}.")
    if evaluate_every is not None and evaluate_every < 0:
        raise UserError(f"--evaluate-every must be at least 0, not {evaluate_every}.")
    entry = catalog.entry(algorithm)
    usual = kinds.get(entry.kind)
    if completer is not None and not usual.completer:
        raise UserError(f"--completer is for language runs; {entry.name} is a '{entry.kind}' algorithm.")
    given = given or {}
    env_word, other_word = ("task", "env") if usual.word == "task" else ("env", "task")
    name, wrong = (task, env) if usual.word == "task" else (env, task)
    if wrong is not None:
        raise UserError(f"{entry.name} is a '{entry.kind}' algorithm: use --{env_word}, not --{other_word}.")
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    config_fields.written(env_options or {})  # raises first if an option cannot be written to config.yaml
    known = catalog.presets(algorithm)
    found = None
    if preset is None and name is not None:
        preset = found = _preset_for(name, given.get("model"), known, folded=usual.folded)
    elif preset is not None and preset not in known:
        near = [one for one in known if fold(one) == fold(preset)]
        if len(near) != 1:
            raise unknown(f"preset of {entry.name}", preset, known)
        preset = near[0]
    chosen = known.get(preset or "", {})
    if name is not None and "env" in chosen and fold(name) == fold(chosen["env"]):
        name = chosen["env"]  # in the preset's spelling: names of environments are case-sensitive
    if name is None:
        name = chosen.get("task", chosen.get("env"))
    if name is None and usual.data:  # a data set is a task too, with its own held-out rows
        name = given.get("data") or chosen.get("data") or None
    if name is None:
        options = f", or a preset: {', '.join(known)}" if known else ""
        raise UserError(f"No {env_word} given for {entry.name}: add --{env_word} NAME{options}.")
    base = (
        config_fields.fields(algorithm, chosen) if config is None else config_fields.coerce(algorithm, flatten(config))
    )
    if "num_envs" in base and "num_envs" in (env_options or {}):
        raise UserError(f"num_envs is a Config field of {entry.name}, not an environment option: use --num-envs.")
    config = {**base, **config_fields.coerce(algorithm, given)}
    config_fields.check(config, entry.unit)
    evaluation = chosen.get("evaluation") or {}
    kind = chosen.get("kind", entry.kind)  # some algorithms take two kinds of environment
    other, name = kinds.get(kind).named(name, entry)
    kind = other or kind
    own = dict(chosen.get("env_options") or {})
    if "board_size" in (env_options or {}):  # another name of size
        own.pop("size", None)
    note = _applied(found, env_word, algorithm, chosen, given, env_options) if found else ""
    return Settings(
        algorithm=str(entry.path)
        if algorithm.endswith(".py")
        else algorithm,  # absolute, to be found from any directory
        kind=kind,
        env=name,
        preset=preset,
        env_options={**own, **(env_options or {})},
        episodes=episodes if episodes is not None else evaluation.get("episodes", kinds.get(kind).episodes),
        evaluate_every=evaluate_every if evaluate_every is not None else evaluation.get("every"),
        device=device,
        config=config,
        note=note,
        actors=actors,
        ray=ray,
        completer=completer,
        places=paths.of(name, config, {**own, **(env_options or {})}) if kinds.get(kind).files else {},
    )


def _applied(
    preset: str,
    word: str,
    algorithm: str,
    chosen: dict[str, Any],
    given: dict[str, Any],
    options: dict[str, Any] | None,
) -> str:
    """What an automatically chosen preset sets: the values that differ from the defaults and were not given."""
    plain, mine = config_fields.fields(algorithm, {}), config_fields.fields(algorithm, chosen)
    sets = [f"{name}={config_fields.plain(x)}" for name, x in mine.items() if x != plain[name] and name not in given]
    asked = set(options or {}) | ({"size"} if "board_size" in (options or {}) else set())
    env = [
        f"{name}={config_fields.plain(x)}" for name, x in (chosen.get("env_options") or {}).items() if name not in asked
    ]
    words = ", ".join(env + sets) or "only defaults"
    return f"using preset '{preset}' because of --{word}; it sets {words}"


def _preset_for(env: str, model: str | None, known: dict[str, dict[str, Any]], folded: bool = False) -> str | None:
    """The first preset for this environment (and model, if given); with `folded`, in any case."""
    ways: list[Callable[[str], str]] = [str, fold] if folded else [str]
    for way in ways:
        for name, preset in known.items():
            names = [way(one) for one in (name, preset.get("env"), preset.get("task")) if one is not None]
            if way(env) in names and model in (None, preset.get("model")):
                return name
    return None

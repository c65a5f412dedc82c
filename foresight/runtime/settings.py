"""What a run is made from: Config defaults, then a preset, then what was said explicitly. No torch here."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foresight.errors import UserError, unknown
from foresight.runtime import catalog, kinds, legacy, paths
from foresight.runtime.kinds.kind import fold
from foresight.training.options import field_types, flatten

RUNTIME_KEYS = ("env", "task", "kind", "env_options", "evaluation", "source")  # of a preset; others: Config
COUNTED = ("epochs", "minibatches", "batch_size", "max_batches", "heads", "kv_heads", "layers")  # each at least 1
SAMPLING = ("max_new_tokens", "temperature", "prompts", "group", "batch_size")  # of an algorithm whose model answers


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run, resolved: `config.yaml` holds exactly this."""

    algorithm: str
    kind: str  # "control", "tabular", "text" or "game"
    env: str  # the environment's or task's name
    preset: str | None
    env_options: dict[str, Any]
    episodes: int | None  # of an evaluation
    evaluate_every: int | None  # in the algorithm's unit; None: at the end only
    device: str
    config: dict[str, Any]  # every field of the algorithm's Config
    note: str = ""  # what was decided for the user, in words
    actors: int = 0  # processes that act apart from the learner; 0: one process does both
    ray: str | None = None  # address of the Ray cluster that they run on; None: here
    completer: str | None = None  # URL of the server that samples for a language model; None: the model itself
    places: dict[str, str] = dataclasses.field(default_factory=dict)  # where files and folders are, by what was typed

    def typed(self) -> Settings:
        """The same, with files and folders as they were typed."""
        return self._renamed({place: name for name, place in self.places.items()})

    def placed(self, run: Path) -> Settings:
        """The same for the run directory `run`, with files and folders where they are now (`paths.found`)."""
        now = paths.found(self.places, run)
        return dataclasses.replace(self._renamed(now), places=now)

    def _renamed(self, names: dict[str, str]) -> Settings:
        if not self.places:
            return self
        options, config = (
            {key: paths.replaced(x, names) for key, x in part.items()} for part in (self.env_options, self.config)
        )
        return dataclasses.replace(self, env=paths.replaced(self.env, names), env_options=options, config=config)

    @property
    def seed(self) -> int:
        """The seed of everything random in the run."""
        return int(self.config.get("seed", 0))

    def reseeded(self, seed: int) -> Settings:
        """The same run with another seed."""
        return dataclasses.replace(self, config={**self.config, "seed": seed})

    def document(self) -> dict[str, Any]:
        """What goes into `config.yaml`."""
        if self.typed() != self:
            return self.typed().document()
        return {
            "algorithm": self.algorithm,
            "kind": self.kind,
            "preset": self.preset,
            "env": self.env,
            "env_options": written(self.env_options),
            "seed": self.seed,
            "device": self.device,
            "evaluation": {"episodes": self.episodes, "every": self.evaluate_every},
            **({"actors": self.actors, "ray": self.ray} if self.actors else {}),
            **({"completer": self.completer} if self.completer else {}),
            **({"places": self.places} if self.places else {}),
            "config": {key: list(value) if isinstance(value, tuple) else value for key, value in self.config.items()},
        }

    def command(self) -> str:
        """The command that repeats the run: the preset, and whatever differs from it."""
        if self.typed() != self:
            return self.typed().command()
        preset = catalog.presets(self.algorithm).get(self.preset or "", {})
        base = fields(self.algorithm, preset)
        words = ["foresight", "train", self.algorithm]
        if self.preset:
            words += ["--preset", self.preset]
        if self.env not in (preset.get("env"), preset.get("task")):
            words += [f"--{kinds.get(self.kind).word}", self.env]
        known = preset.get("env_options") or {}
        options = [
            f"{key}={json.dumps(written(value))}" for key, value in self.env_options.items() if known.get(key) != value
        ]
        words += ["--env-options", *options] if options else []
        evaluation = {"episodes": kinds.get(self.kind).episodes, "every": None, **(preset.get("evaluation") or {})}
        if self.episodes != evaluation["episodes"]:
            words += ["--evaluation-episodes", str(self.episodes)]
        if self.evaluate_every != evaluation["every"]:
            words += ["--evaluate-every", str(self.evaluate_every)]
        if self.device != "auto":
            words += ["--device", self.device]
        if self.actors:
            words += ["--actors", str(self.actors), *(["--ray", self.ray] if self.ray else [])]
        if self.completer:
            words += ["--completer", self.completer]
        for name, value in self.config.items():
            if value != base[name] or name == "seed":
                words += option(name, value)
        return shlex.join(words)

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The settings of a run directory. Raises UserError if it is none."""
        import yaml

        file = Path(path) / "config.yaml"
        if not file.is_file():
            raise UserError(f"{path} is not a run directory: it has no config.yaml. `foresight train` makes one.")
        try:
            document = legacy.document(yaml.safe_load(file.read_text(encoding="utf-8")))
            return cls(
                algorithm=document["algorithm"],
                kind=document["kind"],
                env=document["env"],
                preset=document["preset"],
                env_options=dict(document["env_options"]),
                episodes=document["evaluation"]["episodes"],
                evaluate_every=document["evaluation"]["every"],
                device=document["device"],
                config=coerce(document["algorithm"], document["config"]),
                actors=int(document.get("actors", 0)),
                ray=document.get("ray"),
                completer=document.get("completer"),
                places=dict(document.get("places") or {}),
            ).placed(Path(path))
        except (yaml.YAMLError, KeyError, TypeError) as error:
            raise UserError(f"{file} cannot be read: {error}. It was changed by hand or cut short.") from error


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
    """Settle what runs. `given` are Config fields said explicitly; `config`, a whole Config, replaces the preset's.

    An `env` or `task` that has a preset of its own uses that preset, and `note` says so.
    Raises UserError for names that do not exist (algorithm, preset, field), for values of the wrong
    type, and where no world is chosen.
    """
    if ray is not None and not actors:
        raise UserError("--ray says where actors run: say how many, too (--actors 8).")
    if actors < 0:
        raise UserError(f"--actors must be at least 0, not {actors}.")
    if episodes is not None and episodes < 1:
        raise UserError(f"--evaluation-episodes must be at least 1, not {episodes}.")
    if evaluate_every is not None and evaluate_every < 0:
        raise UserError(f"--evaluate-every must be at least 0, not {evaluate_every}.")
    entry = catalog.entry(algorithm)
    usual = kinds.get(entry.kind)
    if completer is not None and not usual.completer:
        raise UserError(f"--completer is for language runs; {entry.name} acts in a '{entry.kind}' world.")
    given = given or {}
    env_word, other_word = ("task", "env") if usual.word == "task" else ("env", "task")
    name, wrong = (task, env) if usual.word == "task" else (env, task)
    if wrong is not None:
        raise UserError(f"{entry.name} acts in a '{entry.kind}' world: choose it with {env_word}, not {other_word}.")
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    written(env_options or {})  # says what cannot be written down before anything is done
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
        name = chosen["env"]  # as it is written there: environments, unlike people, know upper from lower case
    if name is None:
        name = chosen.get("task", chosen.get("env"))
    if name is None and usual.data:  # data to learn from are a task too, with held-out rows of their own
        name = given.get("data") or chosen.get("data") or None
    if name is None:
        options = f", or a preset: {', '.join(known)}" if known else ""
        raise UserError(f"Say what {entry.name} shall learn: --{env_word} NAME{options}.")
    base = fields(algorithm, chosen) if config is None else coerce(algorithm, flatten(config))
    if "num_envs" in base and "num_envs" in (env_options or {}):
        raise UserError(f"How many worlds there are is a number of {entry.name}: --num-envs, not --env-options.")
    config = {**base, **coerce(algorithm, given)}
    _check(config)
    evaluation = chosen.get("evaluation") or {}
    kind = chosen.get("kind", entry.kind)  # some algorithms act in worlds of two kinds
    other, name = kinds.get(kind).named(name, entry)
    kind = other or kind
    own = dict(chosen.get("env_options") or {})
    if "board_size" in (env_options or {}):  # another name of the same
        own.pop("size", None)
    note = _applied(found, env_word, algorithm, chosen, given, env_options) if found else ""
    return Settings(
        algorithm=str(entry.path) if algorithm.endswith(".py") else algorithm,  # found again from anywhere
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
    """What a preset that nobody named sets, in words: what differs from the defaults and was not given otherwise."""
    plain, mine = fields(algorithm, {}), fields(algorithm, chosen)
    sets = [f"{name}={_plain(x)}" for name, x in mine.items() if x != plain[name] and name not in given]
    asked = set(options or {}) | ({"size"} if "board_size" in (options or {}) else set())
    env = [f"{name}={_plain(x)}" for name, x in (chosen.get("env_options") or {}).items() if name not in asked]
    words = ", ".join(env + sets) or "nothing but defaults"
    return f"using the preset '{preset}', because of --{word}; it sets {words}"


def _plain(value: Any) -> str:
    """A value as it would be typed."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _check(config: dict[str, Any]) -> None:
    """Raise UserError for a number that makes sense to no algorithm: each checks what is its own."""
    for name, value in config.items():
        several = value if isinstance(value, tuple | list) else (value,)
        numbers = [x for x in several if isinstance(x, int | float)]
        if any(x != x for x in numbers):
            raise UserError(f"{name} must be a number, not {_plain(value)}.")
        samples = "max_new_tokens" in config and name in SAMPLING  # which has a stricter rule below
        if "temperature" in name and not samples and any(x < 0 for x in numbers):
            raise UserError(f"{name} must be at least 0, not {_plain(value)}.")
        if not isinstance(value, int | float):
            continue
        if (name.endswith("learning_rate") or name in ("steps", "threads", "learning_starts")) and not value >= 0:
            raise UserError(f"{name} must be at least 0, not {value}.")
        if samples and not value > 0:
            raise UserError(f"{name} must be {'at least 1' if type(value) is int else 'more than 0'}, not {value}.")
        if name in COUNTED and type(value) is int and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}.")
        if (name == "gamma" or name.endswith("_lambda")) and not 0 <= value <= 1:
            raise UserError(f"{name} must be between 0 and 1, not {value}.")
        if name.endswith("_fraction") and not 0 <= value <= 1:
            raise UserError(f"{name} is a share: between 0 and 1, not {value}.")
    begins, steps = config.get("learning_starts"), config.get("steps", math.inf)
    if isinstance(begins, int) and begins > steps:
        raise UserError(
            f"learn_from is {begins:,}, but the run ends after {steps:,} steps: nothing would be learned. Lower "
            "--learn-from, or raise --steps."
        )


def written(options: Any, name: str = "env_options") -> Any:
    """Options as they are written down: a function by its place. Raises UserError for what cannot be."""
    if isinstance(options, dict):
        return {str(key): written(value, str(key)) for key, value in options.items()}
    if isinstance(options, list | tuple):
        return [written(value, name) for value in options]
    if options is None or isinstance(options, str | bool | int | float):
        return options
    if isinstance(options, os.PathLike):
        return os.fspath(options)
    if callable(options) and not isinstance(options, type):
        from foresight.envs.text.worker import place_of  # late: only language tasks take functions

        return place_of(options)
    raise UserError(
        f"The option '{name}' is {str(options)[:60]!r}, a {type(options).__name__}: give a text, a number, a list of "
        "them, or a function."
    )


def differences(old: Settings, new: Settings) -> list[str]:
    """Names of what `old` settles otherwise than `new`; fields that `old` does not know were not there then."""
    old, new = old.typed(), new.typed()
    whole = [
        name for name in ("algorithm", "env", "env_options", "episodes") if getattr(old, name) != getattr(new, name)
    ]
    return whole + [name for name, value in old.config.items() if new.config.get(name) != value]


def fields(algorithm: str, preset: dict[str, Any]) -> dict[str, Any]:
    """All fields of an algorithm's Config: its defaults under what `preset` says."""
    kind = catalog.config_class(algorithm)
    said = {name: value for name, value in preset.items() if name not in RUNTIME_KEYS}
    try:
        return {**flatten(kind()), **coerce(algorithm, said)}
    except TypeError as error:
        raise UserError(f"The Config of {algorithm} must have a default for every field ({error}).") from error


def coerce(algorithm: str, values: dict[str, Any]) -> dict[str, Any]:
    """`values` in the types of the Config fields (YAML reads 1e-5 as text, JSON has no tuples).

    Raises UserError for a field that does not exist or a value that does not fit.
    """
    kind = catalog.config_class(algorithm)
    values = legacy.fields(catalog.entry(algorithm).name, values)
    hints = field_types(kind)
    names = list(hints)
    out = {}
    for name, value in values.items():
        if name not in names:
            raise unknown(f"field of {catalog.entry(algorithm).name}", name, names)
        try:
            out[name] = _convert(value, hints[name])
        except (TypeError, ValueError, OverflowError) as error:  # int(inf) is the last
            wanted = getattr(hints[name], "__name__", None) if not typing.get_args(hints[name]) else None
            text = f"Field '{name}' of {catalog.entry(algorithm).name} must be {wanted or hints[name]}, not {value!r}."
            raise UserError(text) from error
    return out


def _preset_for(env: str, model: str | None, known: dict[str, dict[str, Any]], folded: bool = False) -> str | None:
    """The first preset for this world (and this model, if one is named); with `folded` also in another case."""
    ways: list[Callable[[str], str]] = [str, fold] if folded else [str]
    for way in ways:
        for name, preset in known.items():
            names = [way(one) for one in (name, preset.get("env"), preset.get("task")) if one is not None]
            if way(env) in names and model in (None, preset.get("model")):
                return name
    return None


def _convert(value: Any, hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        for part in arguments:  # a value that already fits stays what it is
            if part is type(value):
                return value
        for part in arguments:
            try:
                return _convert(value, part)
            except (TypeError, ValueError, OverflowError):
                continue
        raise ValueError(value)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(value)
        return value
    if origin is tuple or hint is tuple:
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise TypeError(value)
        if not arguments:
            return tuple(value)
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        return tuple(_convert(part, kind) for part, kind in zip(value, kinds, strict=True))
    if hint is type(None):
        raise TypeError(value)
    if hint is bool:
        if not isinstance(value, bool):
            raise TypeError(value)
        return value
    if hint is float:
        if isinstance(value, bool):
            raise TypeError(value)
        return float(value)
    if hint is int:
        if isinstance(value, bool) or float(value) != int(float(value)):
            raise TypeError(value)
        return value if isinstance(value, int) else int(float(value))
    if hint is str and not isinstance(value, str):
        raise TypeError(value)
    return value


def option(name: str, value: Any) -> list[str]:
    """A Config field as the words of a command line."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else "--no-" + name.replace("_", "-")]
    if isinstance(value, list | tuple):
        return [flag, *(str(part) for part in value)]
    return [flag, value if isinstance(value, str) else json.dumps(value) if value is not None else "None"]

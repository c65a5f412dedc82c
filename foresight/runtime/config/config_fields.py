"""Values of Config fields: defaults, types, checks, and how they are written. No torch here."""

from __future__ import annotations

import json
import math
import os
import types
import typing
from typing import Any

from foresight.errors import UserError, unknown
from foresight.runtime import catalog, legacy
from foresight.training.options import field_types, flatten

RUNTIME_KEYS = ("env", "task", "kind", "env_options", "evaluation", "source")  # of a preset; the rest is Config
# Each is at least 1.
COUNTS = ("epochs", "minibatches", "batch_size", "max_batches", "heads", "kv_heads", "predict_tokens", "layers")
AT_LEAST_0 = ("steps", "seed", "threads", "learning_starts", "centering", "overlong_penalty", "init_std")
DEEPEST = 1_000  # layers, residual blocks, critics: each is made on its own, and billions would take hours to fail
ADDED = ("adam_eps", "adam_epsilon", "optimizer_epsilon")  # to the root mean square of gradients, which may be 0
LARGEST = 2**63  # what a 64-bit integer cannot hold: neither a generator nor a tensor takes it
SHARES = ("tau", "popart_rate")  # by which targets and moments move: with 0 they never do
SAMPLING = ("max_new_tokens", "temperature", "prompts", "group", "batch_size")  # of text algorithms that sample


def written(options: Any, name: str = "env_options") -> Any:
    """Options as they are written to config.yaml, functions by path. Raises UserError for what cannot be written."""
    if isinstance(options, dict):
        return {str(key): written(value, str(key)) for key, value in options.items()}
    if isinstance(options, list | tuple):
        return [written(value, name) for value in options]
    if options is None or isinstance(options, str | bool | int | float):
        return options
    if isinstance(options, os.PathLike):
        return os.fspath(options)
    if callable(options) and not isinstance(options, type):
        from foresight.envs.text.worker import place_of  # late: only text tasks take functions

        return place_of(options)
    raise UserError(
        f"The option '{name}' is {str(options)[:60]!r}, a {type(options).__name__}. It must be a string, a number, a "
        "list of these, or a function."
    )


def check_written(config: dict[str, Any]) -> None:
    """Raise UserError, naming the field, for a value that config.yaml cannot hold."""
    import yaml

    for name, value in config.items():
        try:
            yaml.safe_dump(value)
        except yaml.YAMLError as error:
            raise UserError(
                f"The field '{name}' of Config is {str(value)[:60]!r}, a {type(value).__name__}. It must be a string, "
                "a number, a list of these, or a dataclass of them."
            ) from error


def fields(algorithm: str, preset: dict[str, Any]) -> dict[str, Any]:
    """All fields of an algorithm's Config: its defaults, overridden by `preset`."""
    kind = catalog.config_class(algorithm)
    own = {name: value for name, value in preset.items() if name not in RUNTIME_KEYS}
    try:
        return {**flatten(kind()), **coerce(algorithm, own)}
    except TypeError as error:
        raise UserError(f"The Config of {algorithm} must have a default for every field: {error}.") from error


def coerce(algorithm: str, values: dict[str, Any]) -> dict[str, Any]:
    """`values` converted to the types of the Config fields (YAML reads 1e-5 as text, JSON has no tuples).

    Raises UserError for a field that does not exist or a value that does not fit.
    """
    kind = catalog.config_class(algorithm)
    if (known := catalog.entry(algorithm)).ours:
        values = legacy.fields(known.name, values)
    hints = field_types(kind)
    names = list(hints)
    out = {}
    for name, value in values.items():
        if name not in names:
            raise unknown(f"field of {known.name}", name, names)
        try:
            out[name] = _convert(value, hints[name])
        except (TypeError, ValueError, OverflowError) as error:  # int(inf) is the last
            wanted = getattr(hints[name], "__name__", None) if not typing.get_args(hints[name]) else None
            text = f"Field '{name}' of {known.name} must be {wanted or hints[name]}, not {value!r}."
            raise UserError(text) from error
    return out


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


def check(config: dict[str, Any], unit: str = "steps") -> None:
    """Raise UserError for a value that no algorithm accepts. Each algorithm also checks its own limits.

    `unit` is what a step counts: `steps` and `learning_starts` are in it.
    """
    for name, value in config.items():
        values = value if isinstance(value, tuple | list) else (value,)
        numbers = [x for x in values if isinstance(x, int | float)]
        if any(x != x for x in numbers):
            raise UserError(f"{name} must be a number, not {plain(value)}.")
        if any(isinstance(x, int) and x >= LARGEST for x in numbers):
            raise UserError(f"{name} must be less than 2**63, not {plain(value)}.")
        samples = "max_new_tokens" in config and name in SAMPLING  # a stricter rule follows below
        if "temperature" in name and not samples and any(x < 0 for x in numbers):
            raise UserError(f"{name} must be at least 0, not {plain(value)}.")
        if (name == "hidden" or name.endswith("_hidden")) and any(x < 1 for x in numbers):
            raise UserError(f"{name} must have widths of at least 1, not {plain(value)}.")
        if not isinstance(value, int | float):
            continue
        bounds = name.startswith("clip_") and name != "clip_reward"  # which has a stricter rule below
        if (bounds or name.endswith(("learning_rate", "weight_decay")) or name in AT_LEAST_0) and not value >= 0:
            raise UserError(f"{name} must be at least 0, not {value}.")
        if samples and not value > 0:
            raise UserError(f"{name} must be {'at least 1' if type(value) is int else 'more than 0'}, not {value}.")
        if (name in ("blocks", "critics") or name.endswith("layers")) and value > DEEPEST:
            raise UserError(f"{name} must be at most {DEEPEST:,}, not {value:,}.")
        if name in COUNTS and type(value) is int and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}.")
        if (name == "gamma" or name.endswith("_lambda")) and not 0 <= value <= 1:
            raise UserError(f"{name} must be between 0 and 1, not {value}.")
        if name.endswith("_fraction") and not 0 <= value <= 1:
            raise UserError(f"{name} must be between 0 and 1, not {value}.")
        if name.endswith("max_grad_norm") and not value > 0:
            raise UserError(f"{name} must be more than 0, not {value}; inf clips no gradient.")
        if name == "kl_coef" and not value >= 0:
            raise UserError(f"{name} must be at least 0, not {value}: below, the distance would be rewarded.")
        if name.endswith("_coef") and name not in ("kl_coef", "entropy_coef") and not value >= 0:
            raise UserError(f"{name} must be at least 0, not {value}: below, the loss that it weighs would rise.")
        if name == "clip_reward" and not value > 0:
            raise UserError(f"{name} must be more than 0, not {value}: it bounds the size of a reward.")
        if name in ADDED and not 0 < value < math.inf:
            raise UserError(f"{name} must be {'more than 0' if value < 1 else 'finite'}, not {value}.")
        if name in SHARES and not 0 < value <= 1:
            raise UserError(f"{name} must be more than 0 and at most 1, not {value}.")
    starts, steps = config.get("learning_starts"), config.get("steps", math.inf)
    # A full replay is enough for AlphaZero, so learning may start earlier than `learning_starts`.
    if isinstance(starts, int) and min(starts, config.get("replay_size", starts)) > steps:
        raise UserError(
            f"learning_starts is {starts:,} {unit}, but the run ends after {steps:,}: no update would be made. Lower "
            "--learning-starts or raise --steps."
        )


def option(name: str, value: Any) -> list[str]:
    """A Config field as command-line arguments."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else "--no-" + name.replace("_", "-")]
    if isinstance(value, list | tuple):
        return [flag, *(str(part) for part in value)]
    return [flag, value if isinstance(value, str) else json.dumps(value) if value is not None else "None"]


def plain(value: Any) -> str:
    """A value as typed on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

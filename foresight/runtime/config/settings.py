"""`Settings`: everything that defines a run, as `config.yaml` holds it. No torch here."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import shlex
from pathlib import Path
from typing import Any

from foresight.errors import UserError
from foresight.runtime import catalog, kinds, legacy
from foresight.runtime.config import config_fields, paths

# Of `config.yaml`; the Config's fields are checked by the algorithm's own types.
TYPES = {
    "algorithm": str, "kind": str, "env": str, "preset": str | None, "device": str,
    "evaluation.episodes": int | None, "evaluation.every": int | None,
}  # fmt: skip
OPTIONAL = {"ray": str | None, "completer": str | None, "staleness": int | None, "checkpoint_every": int | float | None}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that defines a run: `config.yaml` holds exactly this."""

    algorithm: str
    kind: str  # "control", "tabular", "text" or "game"
    env: str  # the environment's or task's name
    preset: str | None
    env_options: dict[str, Any]
    episodes: int | None  # of an evaluation; None: all held-out examples
    evaluate_every: int | None  # in the algorithm's unit; None: at the end only
    device: str
    config: dict[str, Any]  # every field of the algorithm's Config
    note: str = ""  # printed at the start: renamed options; the preset that was chosen automatically, and what it sets
    actors: int = 0  # actor processes; 0: one process acts and trains
    ray: str | None = None  # address of the Ray cluster of the actors; None: this machine
    # URL of the server that samples for a language model; None: the model itself. No file holds its user and password.
    completer: str | None = None
    staleness: int | None = None  # updates by which samples may lag; None: sampling and training take turns
    keep: int = 3  # newest checkpoints that are kept
    keep_optimizer: bool = False  # of a language model: moments in all checkpoints, also when the run has ended
    checkpoint_every: float | None = None  # seconds between checkpoints; None: 120, or longer if saving is slow
    paths: dict[str, str] = dataclasses.field(default_factory=dict)  # absolute paths of files, by typed name

    def typed(self) -> Settings:
        """The same settings, with files and folders as they were typed."""
        return self._renamed({path: name for name, path in self.paths.items()})

    def placed(self) -> Settings:
        """Typed settings with files and folders as absolute paths without links."""
        return self._renamed({name: os.path.realpath(path) for name, path in self.paths.items()})

    def relocated(self, run: Path) -> Settings:
        """The same settings, with files and folders where they are now (`paths.relocate`); `run` is the directory."""
        now = paths.relocate(self.paths, run)
        return dataclasses.replace(self._renamed(now), paths=now)

    def _renamed(self, names: dict[str, str]) -> Settings:
        if not self.paths:
            return self
        options, config = (
            {key: paths.substitute(x, names) for key, x in part.items()} for part in (self.env_options, self.config)
        )
        return dataclasses.replace(self, env=paths.substitute(self.env, names), env_options=options, config=config)

    def _public(self, url: str) -> str:
        from foresight.planning.generation.server import without_user  # late: this imports torch

        return without_user(url)

    @property
    def seed(self) -> int:
        """The seed of everything random in the run."""
        return int(self.config.get("seed", 0))

    def reseeded(self, seed: int) -> Settings:
        """The same settings with another seed."""
        return dataclasses.replace(self, config={**self.config, "seed": seed})

    def document(self) -> dict[str, Any]:
        """The contents of `config.yaml`."""
        if self.typed() != self:
            return self.typed().document()
        return {
            "algorithm": self.algorithm,
            "kind": self.kind,
            "preset": self.preset,
            "env": self.env,
            "env_options": config_fields.written(self.env_options),
            "seed": self.seed,
            "device": self.device,
            "evaluation": {"episodes": self.episodes, "every": self.evaluate_every},
            **({"actors": self.actors, "ray": self.ray} if self.actors else {}),
            **({"completer": self._public(self.completer)} if self.completer else {}),
            **({"staleness": self.staleness} if self.staleness is not None else {}),
            **({"keep": self.keep} if self.keep != Settings.keep else {}),
            **({"keep_optimizer": True} if self.keep_optimizer else {}),
            **({"checkpoint_every": self.checkpoint_every} if self.checkpoint_every is not None else {}),
            **({"paths": self.paths} if self.paths else {}),
            "config": {key: list(value) if isinstance(value, tuple) else value for key, value in self.config.items()},
        }

    def command(self) -> str:
        """The command that repeats the run: the preset and what differs from it."""
        if self.typed() != self:
            return self.typed().command()
        preset = catalog.presets(self.algorithm).get(self.preset or "", {})
        base = config_fields.fields(self.algorithm, preset)
        parts = ["foresight", "train", self.algorithm]
        if self.preset:
            parts += ["--preset", self.preset]
        if self.env not in (preset.get("env"), preset.get("task")):
            parts += [f"--{kinds.get(self.kind).option}", self.env]
        known = preset.get("env_options") or {}
        options = [
            f"{key}={json.dumps(config_fields.written(value))}"
            for key, value in self.env_options.items()
            if known.get(key) != value
        ]
        parts += ["--env-options", *options] if options else []
        evaluation = {"episodes": kinds.get(self.kind).episodes, "every": None, **(preset.get("evaluation") or {})}
        if self.episodes != evaluation["episodes"]:
            parts += ["--evaluation-episodes", str(self.episodes)]
        if self.evaluate_every != evaluation["every"]:
            parts += ["--evaluate-every", str(self.evaluate_every)]
        if self.device != "auto":
            parts += ["--device", self.device]
        if self.actors:
            parts += ["--actors", str(self.actors), *(["--ray", self.ray] if self.ray else [])]
        if self.completer:
            parts += ["--completer", self._public(self.completer)]
        if self.staleness is not None:
            parts += ["--staleness", str(self.staleness)]
        if self.keep != Settings.keep:
            parts += ["--keep", str(self.keep)]
        if self.keep_optimizer:
            parts += ["--keep-optimizer"]
        if self.checkpoint_every is not None:
            parts += ["--checkpoint-every", f"{self.checkpoint_every:g}"]
        for name, value in self.config.items():
            if value != base[name] or name == "seed":
                parts += config_fields.option(name, value)
        return shlex.join(parts)

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The settings of a run directory. Raises UserError if `path` is not one."""
        file = Path(path) / "config.yaml"
        if not file.is_file():
            near = difflib.get_close_matches(str(path), catalog.bundled(), n=1, cutoff=0.7)
            hint = f"Did you mean the bundled '{near[0]}'?" if near else "Make a run with: foresight train"
            raise UserError(f"{path} is not a run directory: it has no config.yaml. {hint}")
        try:
            document = legacy.document(catalog.read_mapping(file))
            _check(document)
            return cls(
                algorithm=document["algorithm"],
                kind=document["kind"],
                env=document["env"],
                preset=document["preset"],
                env_options=dict(document["env_options"]),
                episodes=document["evaluation"]["episodes"],
                evaluate_every=document["evaluation"]["every"],
                device=document["device"],
                config=config_fields.coerce(document["algorithm"], document["config"]),
                actors=int(document.get("actors", 0)),
                ray=document.get("ray"),
                completer=document.get("completer"),
                staleness=document.get("staleness"),
                keep=int(document.get("keep", cls.keep)),
                keep_optimizer=bool(document.get("keep_optimizer", False)),
                checkpoint_every=document.get("checkpoint_every"),
                paths=dict(document.get("paths") or {}),
            ).relocated(Path(path))
        except UserError:  # is a ValueError too
            raise
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise UserError(f"{file} cannot be read: {error}. It was edited or is incomplete.") from error


def reread(path: Path) -> None:
    """Forget the user's file of the run at `path` if it changed (`catalog.reread`), before its settings are read.

    A `config.yaml` that cannot be read is named by `Settings.read`.
    """
    with contextlib.suppress(UserError):
        catalog.reread(str(catalog.read_mapping(Path(path) / "config.yaml").get("algorithm")))


def _check(document: dict[str, Any]) -> None:
    """Raise TypeError for a setting of the wrong type, and KeyError for one that is missing."""
    for names, wanted in {**TYPES, **OPTIONAL}.items():
        found = {**dict.fromkeys(OPTIONAL), **document}
        *parts, last = names.split(".")
        for part in parts:
            found = found[part]
        if not isinstance(found[last], wanted):
            raise TypeError(f"{names} is {repr(found[last])[:60]}")


def differences(old: Settings, new: Settings) -> list[str]:
    """Names of the settings and fields that differ. Fields that `old` lacks are newer: it had their defaults.

    Files and folders are the same if they were typed alike, or if both names lead to the same place.
    """
    pairs = (old.typed(), new.typed()), (old.typed().placed(), new.typed().placed())
    changed = [
        name
        for name in ("algorithm", "env", "env_options", "episodes")
        if all(getattr(before, name) != getattr(now, name) for before, now in pairs)
    ]
    changed += [
        name for name in old.config if all(before.config[name] != now.config.get(name) for before, now in pairs)
    ]
    defaults = config_fields.fields(new.algorithm, {})
    newer = [name for name in new.config if name not in old.config]
    return changed + [name for name in newer if name in defaults and new.config[name] != defaults[name]]

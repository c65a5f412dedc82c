"""`Settings`: one run, resolved, as `config.yaml` holds it. No torch here."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from foresight.errors import UserError
from foresight.runtime import catalog, kinds, legacy
from foresight.runtime.config import config_fields, paths


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
    note: str = ""  # which preset was chosen automatically, and what it sets
    actors: int = 0  # actor processes; 0: one process acts and learns
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
            "env_options": config_fields.written(self.env_options),
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
        base = config_fields.fields(self.algorithm, preset)
        words = ["foresight", "train", self.algorithm]
        if self.preset:
            words += ["--preset", self.preset]
        if self.env not in (preset.get("env"), preset.get("task")):
            words += [f"--{kinds.get(self.kind).word}", self.env]
        known = preset.get("env_options") or {}
        options = [
            f"{key}={json.dumps(config_fields.written(value))}"
            for key, value in self.env_options.items()
            if known.get(key) != value
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
                words += config_fields.option(name, value)
        return shlex.join(words)

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The settings of a run directory. Raises UserError if `path` is not one."""
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
                config=config_fields.coerce(document["algorithm"], document["config"]),
                actors=int(document.get("actors", 0)),
                ray=document.get("ray"),
                completer=document.get("completer"),
                places=dict(document.get("places") or {}),
            ).placed(Path(path))
        except (yaml.YAMLError, KeyError, TypeError) as error:
            raise UserError(f"{file} cannot be read: {error}. It was edited or is incomplete.") from error


def differences(old: Settings, new: Settings) -> list[str]:
    """Names of settings and fields that differ; fields that `old` does not have are newer and do not count."""
    old, new = old.typed(), new.typed()
    whole = [
        name for name in ("algorithm", "env", "env_options", "episodes") if getattr(old, name) != getattr(new, name)
    ]
    return whole + [name for name, value in old.config.items() if new.config.get(name) != value]

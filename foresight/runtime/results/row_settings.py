"""What defines the runs of a row of a suite, and which of its seeds a result file holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foresight.errors import UserError
from foresight.runtime import catalog
from foresight.runtime.config import config_fields
from foresight.runtime.results.suites import Trained

MOST = 1.05  # times the budget: whole rollouts may exceed it
CONVERGING = ("sweeps", "updates")  # units of tabular algorithms whose steps are a maximum
QUICK = 100  # --quick trains a hundredth of the steps
QUICK_EPISODES = 2  # of an evaluation then, in suites of many environments
MEMORY = ("micro_tokens", "gradient_checkpointing")  # fields that change memory and time alone


def planned(what: Trained, quick: bool, seeds: int | None) -> range:
    """The seeds of a row, at most `seeds`."""
    return range(1 if quick else min(seeds or what.seeds, what.seeds))


def steps_of(what: Trained, quick: bool) -> int | None:
    """The steps to train; None: the preset's."""
    if not quick:
        return what.steps
    preset = catalog.presets(what.algorithm).get(what.preset, {})
    config = {**config_fields.fields(what.algorithm, preset), **what.options}
    starts = config.get("learning_starts", 0)
    return max(1, config["steps"] // QUICK, starts + starts // QUICK)  # so that there are updates


def episodes_of(what: Trained, quick: bool) -> int | None:
    """The episodes of an evaluation; None: the algorithm's default."""
    own = what.episodes or (catalog.presets(what.algorithm).get(what.preset, {}).get("evaluation") or {}).get(
        "episodes"
    )
    return min(own, QUICK_EPISODES) if quick and own and what.env else own


def settings_of(what: Trained, quick: bool = False) -> dict[str, Any]:
    """Everything that defines the runs of a row but the seed: the environment, its options and every Config field."""
    preset = catalog.presets(what.algorithm).get(what.preset, {})
    given = {key: value for key, value in what.options.items() if key != "env_options"}
    if (steps := steps_of(what, quick)) is not None:
        given["steps"] = steps
    config = {**config_fields.fields(what.algorithm, preset), **given}
    options = {**(preset.get("env_options") or {}), **what.options.get("env_options", {})}
    found = {
        "env": what.env or preset.get("env") or preset.get("task"),
        "env_options": config_fields.written(options),
        "evaluation_episodes": episodes_of(what, quick),
        **{name: value for name, value in config.items() if name != "seed"},
    }
    return dict(json.loads(json.dumps(found)))


def defaults_of(what: Trained) -> dict[str, Any]:
    """The defaults of every Config field, as `settings_of` writes them."""
    return dict(json.loads(json.dumps(config_fields.fields(what.algorithm, {}))))


def stored(what: Trained, file: Path, quick: bool = False) -> dict[int, dict[str, Any]]:
    """The summaries in a result file by seed, as far as `collect` needs them; none if there is no file.

    Raises UserError if they are of other settings than the row's. A file of an older version holds no settings: of it
    the steps and the episodes are compared, but not fewer steps of runs that may end before their maximum, nor the 1
    that stands for all texts of an evaluation. Fields that the file lacks are newer: its runs had their defaults. Those
    of `MEMORY` may differ: the figures do not depend on them.
    """
    if not file.is_file():
        return {}
    document = json.loads(file.read_text(encoding="utf-8"))
    wanted = settings_of(what, quick)
    old = document.get("settings") or {}
    if old:
        newer = {name: value for name, value in defaults_of(what).items() if name not in old and name in wanted}
        old = {**newer, **old}
    changed = [
        f"{name} {value!r}, now {wanted.get(name)!r}"
        for name, value in old.items()
        if value != wanted.get(name) and name not in MEMORY
    ]
    budget, episodes = wanted.get("steps"), wanted["evaluation_episodes"]
    least = 0 if _ended_early(what, wanted, document["steps"]) else budget
    if not old and budget and not least <= document["steps"] <= MOST * budget:
        changed.append(f"steps {document['steps']:,}, now {budget:,}")
    of_texts = catalog.entry(what.algorithm).kind == "text" and document["episodes"] == 1  # one mean over all of them
    if not old and episodes and episodes != document["episodes"] and not of_texts:
        changed.append(f"evaluation_episodes {document['episodes']}, now {episodes}")
    if changed:
        raise UserError(
            f"{file} holds seeds of other settings ({'; '.join(changed)}), which cannot be mixed with new ones. "
            "Run all seeds again: leave out --more."
        )
    shared = {key: document[key] for key in ("steps", "unit", "versions", "machine")}
    return {run["seed"]: {**shared, **run} for run in document["runs"]}


def _ended_early(what: Trained, settings: Mapping[str, Any], steps: int) -> bool:
    """Whether a run of so few `steps` may have ended before its maximum: by convergence, or after `episodes`."""
    entry = catalog.entry(what.algorithm)
    if entry.kind != "tabular":
        return False
    return entry.unit in CONVERGING or 0 < settings.get("episodes", 0) <= steps  # an episode has a step at least

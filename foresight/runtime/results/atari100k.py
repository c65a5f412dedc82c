"""Human-normalized scores of Atari 100k: mean, median and interquartile mean, with intervals.

Source: the 26 games of Kaiser et al. 2020 (arXiv:1903.00374); Agarwal et al. 2021 (arXiv:2108.13264) for the
interquartile mean over all runs and the stratified bootstrap.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foresight.runtime import catalog

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from foresight.runtime.results.suites import Trained

FILE = Path(__file__).with_name("atari100k.yaml")


@functools.cache
def games() -> dict[str, dict[str, Any]]:
    """The 26 games: `random` and `human` score, and the published scores of `storm` and `dreamer`, a list each."""
    return catalog.read_yaml(FILE)


def normalized(game: str, score: float) -> float:
    """0 for a random policy, 1 for a person."""
    facts = games()[game]
    return float((score - facts["random"]) / (facts["human"] - facts["random"]))


def aggregate(scores: Mapping[str, Sequence[float]], resamples: int = 2_000) -> dict[str, Any]:
    """Mean and median over games, interquartile mean over runs, and games above a person, human-normalized.

    `scores` are the raw scores of each run of each game. The 95% intervals resample the runs within each game; they are
    None if no game has two runs.
    """
    import numpy as np

    runs = [np.array([normalized(game, x) for x in values]) for game, values in scores.items()]
    found: dict[str, Any] = {"games": len(runs), **_statistics(runs)}
    found["superhuman"] = int(sum(x.mean() > 1 for x in runs))
    if max(map(len, runs)) > 1:
        rng = np.random.default_rng(0)
        draws = [_statistics([x[rng.integers(len(x), size=len(x))] for x in runs]) for _ in range(resamples)]
        for key in draws[0]:
            low, high = np.percentile([draw[key] for draw in draws], (2.5, 97.5))
            found[f"{key}_interval_95"] = [round(float(low), 4), round(float(high), 4)]
    return found


def _statistics(runs: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    import numpy as np

    means, every = [x.mean() for x in runs], np.sort(np.concatenate(runs))
    trim = int(0.25 * len(every))
    middle = every[trim : len(every) - trim]
    found = {"mean": np.mean(means), "median": np.median(means), "interquartile_mean": np.mean(middle)}
    return {key: round(float(value), 4) for key, value in found.items()}


def write(runs: Iterable[Trained], results: Path, command: str) -> list[Path]:
    """For each algorithm, the aggregate over the games with a result in `results`; returns the written files."""
    from foresight.runtime import bench
    from foresight.runtime.checkpoints import checkpoint

    found: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        file = results / f"{run.result}.json"
        if file.is_file():
            game = run.env.removeprefix("ALE/").removesuffix("-v5")
            found.setdefault(f"{run.algorithm}-{run.preset}", {})[game] = json.loads(file.read_text(encoding="utf-8"))
    written = []
    for name, done in found.items():
        scores = {game: [one["evaluation"]["mean"] for one in result["runs"]] for game, result in done.items()}
        algorithm = name.partition("-")[0]
        published = {game: games()[game][algorithm] for game in scores if algorithm in games()[game]}
        document = {
            "what": f"{algorithm}, Atari 100k, human-normalized",
            "command": command,
            **aggregate(scores),
            "steps": min(result["steps"] for result in done.values()),
            "published": aggregate(published) if published else None,
            "scores": scores,
            "seconds": round(sum(sum(result["seconds"]) for result in done.values()), 1),
            "versions": bench.versions(),
            "machine": bench.machine(),
        }
        file = results / f"{name}.json"
        checkpoint.write_atomic(file, json.dumps(document, indent=2) + "\n")
        written.append(file)
    return written

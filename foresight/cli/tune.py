"""`foresight tune`: search for an algorithm's hyperparameters."""

from __future__ import annotations

from typing import Annotated

import tyro

from foresight.cli import fields, screen
from foresight.errors import UserError
from foresight.runtime import catalog


def tune(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    preset: str | None = None,
    env: str | None = None,
    task: str | None = None,
    trials: int = 20,
    steps: int | None = None,
    seed: int = 0,
    out: str | None = None,
    only: tuple[str, ...] = (),
    ranges: str | None = None,
    prune: bool = True,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Search for hyperparameters (Optuna). The same command resumes a stopped search.

    Args:
        name: an algorithm.
        preset: the preset that trials start from.
        env: the environment, instead of a preset.
        task: the text task of a language algorithm, instead of a preset.
        trials: total number of trials, those of earlier calls included.
        steps: steps of each trial; default: the preset's.
        seed: seed of every trial and of the search.
        out: the directory of the search; default: runs/tune-NAME-PRESET.
        only: search only these fields.
        ranges: a YAML file of search ranges (field: [a, b], or field: {low: 1e-4, high: 1e-2, log: true}).
        prune: stop trials that are worse than the median; --no-prune runs every trial to its end.
        device: auto, cpu, cuda, cuda:1 or mps.
        json: print the result as JSON.
    """
    if name is None:
        raise UserError(
            f"No algorithm given. Type foresight tune NAME, with one of: {', '.join(catalog.algorithms())}."
        )
    fields.check_seed(seed)
    from foresight.runtime import tune as tuning

    errors = screen.stderr()
    found = tuning.tune(
        name, preset=preset, env=env, task=task, trials=trials, steps=steps, seed=seed, out=out, only=only,
        ranges=ranges, prune=prune, device=device,
        report=lambda text: errors.print(text, markup=False, highlight=False),
    )  # fmt: skip
    if json:
        keys = ("trials", "complete", "value", "fields", "command")
        screen.emit({"path": str(found.path), **{key: getattr(found, key) for key in keys}})
        return 0
    console = screen.stdout()
    console.print(
        f"best of {found.complete} complete trials ({found.trials} in total): {found.value:.6g}\n", markup=False
    )
    screen.table(console, ("field", "value"), [(field, f"{value}") for field, value in found.fields.items()])
    console.print(f"\n{found.command}", style="dim", markup=False, soft_wrap=True)
    console.print(f"preset written to {found.path / tuning.BEST}", style="dim", markup=False, soft_wrap=True)
    return 0

"""A report of `foresight think`, which the command writes with a scripted model in place of a trained one."""

from __future__ import annotations

from pathlib import Path

import pytest

from foresight.cli.main import main
from foresight.planning.generation.scripted import Scripted
from foresight.runtime.reasoning import pictures
from foresight.runtime.reasoning import think as thinking
from tests.planning.reasoning.players import player


def think(out: Path) -> None:
    """Three questions of Countdown by two methods at two budgets; no picture of their curves, which takes longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "curves", lambda *_: None)
        patch.setattr(thinking, "model", lambda name, *args: Scripted(player))
        sizes = ["--budget", "64", "--points", "2", "--questions", "3", "--max-new-tokens", "24"]
        options = ["--task", "countdown", "--env-options", "traces=steps", "--model", "m", "--verifier", "exact"]
        assert main(["think", "self_consistency", "tree_of_thoughts", *options, *sizes, "--out", str(out)]) == 0

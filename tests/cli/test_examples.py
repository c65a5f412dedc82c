"""The example of CONTRIBUTING: a TD method in a file of its own, which `foresight train` takes as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foresight.algorithms.tabular import expected_sarsa, sarsa
from foresight.runtime import catalog
from tests.sabotage import change, sabotaged_by
from tests.tables import random_world

FILE = str(Path(__file__).parents[2] / "examples" / "n_step_expected_sarsa.py")


@sabotaged_by(
    "foresight.training.tabular.control",
    change("walk", lambda walk: walk if walk is expected_sarsa.walk else sarsa.walk, "another_target"),
)
def test_one_step_of_it_is_expected_sarsa_to_the_last_bit() -> None:
    mdp, found = random_world(1, 10), []
    fields = {"steps": 2_000, "gamma": 0.9, "alpha": 0.3, "epsilon": 0.3}
    mine = catalog.module(FILE)
    for module, n in ((expected_sarsa, {}), (mine, {"n_steps": 1}), (mine, {"n_steps": 2})):
        *_, (_, _, state) = module.train(module.Config(**fields, **n), mdp)
        found.append(state.q)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_it_is_trained_from_the_command_line(call: Callable, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    done = call("train", FILE, "--env", "CliffWalking-v1", "--gamma", 1.0, "--steps", 30_000, "--json", "--out", out)
    assert done.code == 0, done.err
    summary = done.json
    assert summary["algorithm"] == FILE
    assert summary["evaluation"]["mean"] == pytest.approx(-17, abs=4)  # along the upper edge, away from the cliff
    assert summary["baseline"]["mean"] < -1_000
    assert call("eval", out, "--json").json["mean"] == summary["evaluation"]["mean"]

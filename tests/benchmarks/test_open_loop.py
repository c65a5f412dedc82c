"""The benchmark of open-loop predictions: equal sizes, what `repeat` predicts, and what its summary reports."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "open_loop.py"


def test_models_have_equal_sizes_and_are_compared_with_a_prediction_that_nothing_changes():
    made = runpy.run_path(str(FILE))
    spaces, rollout = made["record"]("Pendulum-v1", 8 * 2 * 25, 0)
    states = [made["build"]("Pendulum-v1", kind, spaces, 0) for kind in made["MODELS"]]
    sizes = [made["parameters"](state.model) for state in states]
    assert max(sizes) < 1.02 * min(sizes)
    losses = made["train"](states[-1], rollout, 0, updates=2)
    assert losses[1] < losses[0]
    errors = made["predicted"](states[-1].model, 0.99, spaces, rollout, -1.0, 0)
    obs, reward = (x.unflatten(1, (2, 25)).flatten(0, 1) for x in (rollout.trajectory.obs, rollout.trajectory.reward))
    changed = (obs[:, 4 + 3] - obs[:, 4]).square().mean()  # the last of 5 observed steps, and 3 steps ahead
    assert errors["repeat"]["observation"][2] == pytest.approx(float(changed), rel=1e-4)
    assert errors["repeat"]["reward"][0] == pytest.approx(float((reward[:, 4] + 1).abs().mean()), rel=1e-4)
    assert len(errors["model"]["reward"]) == 20
    assert errors["model"] != errors["repeat"]


def test_models_of_pixels_have_equal_sizes_and_data_with_rewards():
    made = runpy.run_path(str(FILE))
    spaces, rollout = made["record"]("KeyDoor-v0", 8 * 150, 0)
    assert rollout.trajectory.reward.sum() >= 6  # of random actions about 4
    sizes = [made["parameters"](made["build"]("KeyDoor-v0", kind, spaces, 0).model) for kind in made["MODELS"]]
    assert max(sizes) < 1.02 * min(sizes)


def test_the_summary_has_means_and_ranges_over_seeds():
    made = runpy.run_path(str(FILE))
    curves = [{error: [float(seed)] * 20 for error in made["ERRORS"]} for seed in (1, 4)]
    cells = [
        {"env": "CartPole-v1", "model": kind, "seed": seed, "errors": one, "repeat": one, "seconds": 1.0}
        for kind in ("lstm", "rssm")
        for seed, one in enumerate(curves)
    ]
    result = made["document"](cells[:-1])
    json.dumps(result)
    assert result["seeds"] == [0]  # those that every model has
    lstm = result["errors"]["CartPole-v1"]["lstm"]
    assert (lstm["reward_20"], lstm["reward_20_range"]) == (2.5, [1.0, 4.0])
    assert "transformer" not in result["errors"]["CartPole-v1"]

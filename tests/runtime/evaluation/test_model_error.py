"""How wrong a learned model is by depth: of a run, in the terminal, and what cannot be measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import foresight
from foresight.errors import UserError
from foresight.runtime.evaluation import model_error
from tests.cli.conftest import call  # noqa: F401

SMALL = {
    "num_envs": 4, "simulations": 3, "unroll_steps": 3, "n_steps": 3, "batch_size": 8, "train_every": 40,
    "collect_steps": 10, "learning_starts": 80, "latent_size": 8, "hidden": [16],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "env"),
    [("gumbel_muzero", "CartPole-v1"), ("efficientzero", "CartPole-v1"), ("sampled_muzero", "Pendulum-v1"),
     ("stochastic_muzero", "FrozenLake-v1")],
)  # fmt: skip
def test_every_model_of_the_family_is_measured(name: str, env: str, tmp_path: Path) -> None:
    run = foresight.train(name, env=env, steps=160, out=tmp_path / "run", show=False, evaluation_episodes=2, **SMALL)
    found = model_error.measure(run.path, depth=4, steps=30)
    assert set(found) == {"value", "policy", "reward"} and all(len(x) == 5 for x in found.values())
    assert found["value"][0] == found["policy"][0] == found["reward"][0] == 0
    assert all(x >= 0 for values in found.values() for x in values if x == x)
    assert found["policy"][1] > 0
    assert model_error.measure(run.path, depth=4, steps=30) == found  # measuring changes nothing


def test_it_is_drawn_by_plot(tmp_path: Path, call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    foresight.train("muzero", env="CartPole-v1", steps=160, out="run", show=False, evaluation_episodes=2, **SMALL)
    answer = call("plot", "run", "--model", 3, "--out", "depths.png", "--json").json
    assert set(answer["runs"]) == {"run"} and len(answer["runs"]["run"]["reward"]) == 4
    assert Path("depths.png").stat().st_size > 1000
    assert "steps" in call("plot", "run", "--model", 2, "--out", "depths.svg").out
    refused = call("plot", "run", "--model", 500)
    assert refused.code == 2 and "between 1 and 199" in refused.err


def test_a_run_without_a_model_is_refused(tmp_path: Path) -> None:
    run = foresight.train("ppo", env="CartPole-v1", steps=64, out=tmp_path / "run", show=False, evaluation_episodes=2)
    with pytest.raises(UserError, match="learns no model"):
        model_error.measure(run.path)

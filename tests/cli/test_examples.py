"""The examples of CONTRIBUTING: a TD method and a PPO variant, each one file that `foresight train` runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foresight.algorithms.tabular import expected_sarsa, sarsa
from foresight.envs import make
from foresight.runtime import catalog
from tests.sabotage import change, flip_sign, sabotaged_by, scaled
from tests.small_mdps import small_mdp

EXAMPLES = Path(__file__).parents[2] / "examples"
FILE = str(EXAMPLES / "n_step_expected_sarsa.py")
PPO = str(EXAMPLES / "ppo_kl_penalty.py")


@sabotaged_by(
    "foresight.training.tabular.control",
    change(
        "act_and_update",
        lambda f: f if f is expected_sarsa.act_and_update else sarsa.act_and_update,
        "another_target",
    ),
)
def test_one_step_of_it_is_expected_sarsa_to_the_last_bit() -> None:
    mdp, found = small_mdp(1, 10), []
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


@sabotaged_by("foresight.ops.kl.k3", flip_sign, scaled(0.0))
def test_the_kl_penalty_holds_the_policy_and_adapts_its_coefficient() -> None:
    ppo = catalog.module(PPO)
    found = {}
    for kl_coef in (0.0, 100.0):
        config = ppo.Config(steps=256, num_envs=2, rollout_steps=128, kl_coef=kl_coef, kl_target=1e-3)
        _, metrics, state = next(ppo.train(config, make.make("CartPole-v1", num_envs=2)))
        found[kl_coef] = metrics["approx_kl"]
        assert metrics["kl_coef"] == kl_coef
    assert found[100.0] < 0.1 * found[0.0]
    # From the same seed: below kl_target / 1.5 the coefficient is halved, above 1.5 kl_target doubled, else kept.
    for kl_target, expected in ((1.0, 0.5), (1e-9, 2.0)):
        config = ppo.Config(steps=256, num_envs=2, rollout_steps=128, kl_coef=1.0, kl_target=kl_target)
        *_, (_, _, state) = ppo.train(config, make.make("CartPole-v1", num_envs=2))
        assert state.kl_coef == expected


def test_the_ppo_variant_is_trained_from_the_command_line(call: Callable, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    done = call("train", PPO, "--env", "CartPole-v1", "--steps", 20_000, "--epochs", 4, "--json", "--out", out)
    assert done.code == 0, done.err
    summary = done.json
    assert summary["algorithm"] == PPO
    assert summary["evaluation"]["mean"] > 4 * summary["baseline"]["mean"]

"""The comparison of agents: what a run reaches at a mark, dynamics that are made wrong, the page from its figures."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.envs.base import Spaces
from tests.sabotage import sabotaged_by

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "comparison.py"
made = runpy.run_path(str(FILE))
cut_off = {"finished": False, "points": [{"step": s, "seconds": s / 10, "return": s} for s in (100, 210, 400)]}


def cell(agent: str, value: float, seed: int = 0, task: str = "CartPole-v1", **fields: Any) -> dict[str, Any]:
    points = [{"step": s, "seconds": s / 50, "return": value * s / 4_000} for s in (1_000, 2_000, 4_000)]
    wrong = "" if made["KINDS"][agent] == made["FREE"] else f"what {agent} predicts"
    noise = {str(scale): value / (1 + scale) for scale in (0.0, *(made["NOISE"] if wrong else ()))}
    return {
        "task": task, "agent": agent, "seed": seed, "algorithm": "a", "random": 20.0, "points": points,
        "finished": False, "steps": 4_000, "training_seconds": 80.0, "gradient_steps": 1_234, "decision_ms": 2.5,
        "peak_mib": 100.0, "wrong": wrong, "noise": noise, "seconds": 90.0, **fields,
    }  # fmt: skip


def test_a_mark_is_reached_by_the_first_evaluation_after_it() -> None:
    at = made["at"]
    assert [at(cut_off, "step", mark) for mark in (100, 200, 210, 211, 401)] == [100, 210, 210, 400, None]
    assert at(cut_off, "seconds", 20.0) == 210
    assert at({**cut_off, "finished": True}, "step", 401) == 400  # of a preset that ended, the last return
    marks = made["Marks"](made["TASKS"]["CartPole-v1"])
    assert [marks.passed(*now) for now in ((999, 5.0), (1_000, 5.0), (1_001, 5.9), (1_001, 6.0), (60_000, 500.0))] == [
        False, True, False, True, True,
    ]  # fmt: skip
    assert not marks.passed(70_000, 900.0)


def test_every_cell_has_a_config() -> None:
    for task, what in made["TASKS"].items():
        for agent in what.agents:
            _, config = made["config_of"](task, agent, 3)
            assert config.seed == 3 and config.steps > what.steps[0]


@sabotaged_by("torch.Tensor.normal_", lambda f: lambda self, **options: self.zero_())
def test_noise_is_in_units_of_what_is_predicted() -> None:
    noise = made["Noise"]()
    x = torch.randn(2_000, 3, 4) * torch.tensor([1.0, 10.0, 0.0, 0.1]) + 5
    assert noise(x) is x
    noise.scale = 0.5
    std = (noise(x) - x).flatten(0, 1).std(0)
    torch.testing.assert_close(std, 0.5 * torch.tensor([1.0, 10.0, 0.0, 0.1]), rtol=0.05, atol=1e-6)


@pytest.mark.parametrize("agent", ["MuZero", "EfficientZero", "STORM", "DreamerV3", "TD-MPC2", "PPO"])
def test_dynamics_are_wrong_within_and_right_after(agent: str) -> None:
    task = "Pendulum-v1" if agent == "TD-MPC2" else "CartPole-v1"
    module, config = made["config_of"](task, agent, 0)
    action = gs.Box(-2, 2, (1,)) if agent == "TD-MPC2" else gs.Discrete(2)
    state = module.build(config, Spaces(gs.Box(-1, 1, (4,)), action), "cpu")
    obs = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32))
    seen: list[torch.Tensor] = []

    def predicted() -> torch.Tensor:
        """What the dynamics predict from the same state and action."""
        torch.manual_seed(0)
        if agent == "TD-MPC2":
            return state.model.dynamics(torch.randn(64, config.latent_size + 1))
        if agent == "DreamerV3":
            carry = state.model.initial(64) | {"deter": torch.randn(64, config.deter)}
            return state.model.observe(carry, obs[:, None], torch.zeros(64, 1, 2), torch.zeros(64, 1), None)["deter"]
        if agent == "STORM":
            return state.model.sequence.read(torch.randn(64, 3, config.width), torch.zeros(64, 3, dtype=torch.bool))
        found = state.network.step(state.network.root(obs)[2], torch.zeros(64, dtype=torch.int64))[0]
        return found["latent"] if isinstance(found, dict) else found

    noise = made["Noise"]()
    with made["wrong_dynamics"](agent, state, noise) as where, torch.no_grad():
        if agent == "PPO":
            assert where == ""
            return
        assert where
        for noise.scale in (0.0, 0.0, 1.0):
            seen.append(predicted())
    with torch.no_grad():
        seen.append(predicted())
    assert noise.count >= 128
    for again in (seen[1], seen[3]):
        torch.testing.assert_close(again, seen[0])
    apart = (seen[2] - seen[0]).square().mean().sqrt() / seen[0].flatten(0, -2).std(0).square().mean().sqrt()
    assert 0.7 < apart < 1.4


@sabotaged_by("torch.Tensor.normal_", lambda f: lambda self, *a, **o: f(self, *a, **o) if a else self.zero_())
@pytest.mark.parametrize("agent", ["STORM", "DreamerV3"])
@torch.no_grad()
def test_imagination_is_wrong_within_and_acting_is_not(agent: str) -> None:
    module, config = made["config_of"]("CartPole-v1", agent, 0)
    state = module.build(config, Spaces(gs.Box(-1, 1, (4,)), gs.Discrete(2)), "cpu")
    obs = torch.randn(64, 3, 4, generator=torch.Generator().manual_seed(0))
    start = state.model.latest(obs, torch.zeros(64, 3, 2), torch.zeros(64, 3), None)

    def features() -> tuple[torch.Tensor, torch.Tensor]:
        """What is imagined, and what an action follows from."""
        generator = torch.Generator().manual_seed(0)
        one = state.model.imagine(start, state.actor, 2, generator)[1]
        seen = state.model.observe(state.model.initial(64), obs, torch.zeros(64, 3, 2), torch.zeros(64, 3), None)
        return one, state.model.features(seen)

    before = features()
    with made["wrong_imagination"](agent, state, 1.0):
        within = features()
    torch.testing.assert_close((within[1], *features()), (before[1], *before))
    torch.testing.assert_close(within[0][:, 0], before[0][:, 0])
    h = slice(0, config.deter) if agent == "DreamerV3" else slice(-config.width, None)
    apart = (within[0] - before[0])[:, 1, h].square().mean().sqrt() / before[0][:, 1, h].std(0).square().mean().sqrt()
    assert 0.7 < apart < 1.4
    with (
        pytest.raises(ValueError, match="PPO is not trained in imagination"),
        made["wrong_imagination"]("PPO", state, 1),
    ):
        pass


def test_none_is_best_where_none_beats_chance() -> None:
    place = {"A": {"steps_5": 100.0}, "B": {"steps_5": 99.0}, "C": {"steps_5": 50.0}, "D": {}}
    assert made["best"](place, "steps_5", 20.0) == ["A", "B"]
    assert made["best"](place, "steps_5", 100.0) == []
    assert made["best"]({"A": {"steps_5": 100.0}}, "steps_5", 20.0) == []


def test_the_page_is_made_from_the_figures(tmp_path: Path) -> None:
    agents = [("MuZero", 400.0), ("STORM", 500.0), ("PPO", 100.0)]
    cells = [cell(agent, value) for agent, value in agents]
    text = made["page"](made["document"](cells))
    assert "| STORM | imagines | 1 | 125 | 250 | 500 | – |" not in text  # no mark that none reached
    assert "| STORM | imagines | 1 | 125 | 250 | 500 |" in text
    assert "- Best at 1,000, 2,000 and 4,000 steps: STORM." in text and "STORM (500 at 4,000 steps)" in " ".join(
        text.split()
    )
    assert "Of 3 marks of steps on these tasks, so often among the best are: agents that plan 0" in text
    assert max(len(line) for line in text.splitlines() if line[:1] != "|") <= 120
    assert "| CartPole-v1 | MuZero | 1 | 400 | 308 | 200 | 100 | 20 |" in text
    assert "MuZero in CartPole-v1 21%" in text  # (100 - 20) / (400 - 20)
    assert "Cells with one seed" in text and "Not run yet: IMPALA" in text
    weak = made["page"](made["document"]([*cells, cell("DreamerV3", 100.0)]))
    assert "STORM in CartPole-v1 " in weak and "DreamerV3 in CartPole-v1 " not in weak  # there is little to keep
    several = [*cells, *(cell(agent, value / 2, 1) for agent, value in agents)]
    text = made["page"](made["document"](several))
    assert "| STORM | imagines | 2 | 94 [62, 125] |" in text and "Cells with one seed" not in text
    assert text.count("MuZero in CartPole-v1 ") == 1 and "MuZero in CartPole-v1 19%" in text  # (21 + 17) / 2
    assert made["UNTRAINED"] in " ".join(text.split()) and made["MACHINES"] not in text
    uneven = made["document"]([*several, cell("MuZero", 1.0, 2, instructions="AVX2")])
    assert uneven["seeds"] == [0, 1] and uneven["command"].endswith("--tasks CartPole-v1 --seeds 0 1 2")
    text = made["page"](uneven)
    assert made["MACHINES"] in text and max(len(line) for line in text.splitlines() if line[:1] != "|") <= 120
    noisy = [cell("STORM", 300.0, seed, train_noise=f) for seed, f in ((0, 0.3), (1, 0.3), (0, 1.0))]
    result = made["document"]([*several, *noisy])
    assert result["cells"] == made["document"](several)["cells"] and result["wrong_imagination"] == sorted(
        noisy, key=made["key"]
    )
    text = made["page"](result)
    assert "| CartPole-v1 | STORM | 1 | 500 | 300 | 300 |" in text and "--train-noise 0.3 1" in " ".join(text.split())
    assert made["UNTRAINED"] not in " ".join(text.split())
    made["draw"].__globals__["PICTURE"] = tmp_path / "made" / "x.png"
    made["draw"](made["document"](several))
    assert (tmp_path / "made" / "x.png").read_bytes()[1:4] == b"PNG"


def test_cells_of_a_preset_that_changed_are_trained_again() -> None:
    now = made["settings"]("CartPole-v1", "IMPALA")
    assert now["popart_rate"] > 0 and "seed" not in now
    recorded = ({"settings": {**now, "popart_rate": 0.0}}, {"settings": now}, {})
    cells = [cell("IMPALA", 1.0, seed, **fields) for seed, fields in enumerate(recorded)]
    assert {seed for _, _, seed, _ in made["trained"](cells)} == {1, 2}


def test_a_cell_is_trained_and_measured() -> None:
    made["cell"]("CartPole-v1", "IMPALA", 0, scale=0.0001)  # compiles the loops, which may take longer than the limit
    found = made["cell"]("CartPole-v1", "IMPALA", 0, scale=0.001)
    assert found["steps"] == found["points"][-1]["step"] and 0.2 <= found["training_seconds"] < 2
    assert found["gradient_steps"] == found["steps"] // 160
    assert found["settings"] == made["settings"]("CartPole-v1", "IMPALA")
    assert found["decision_ms"] > 0 and found["noise"].keys() == {"0.0"} and not found["wrong"]
    assert 9 < found["random"] < 60

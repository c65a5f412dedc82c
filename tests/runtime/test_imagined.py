"""What an agent does inside its own world model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foresight.algorithms.world import planet
from foresight.nets.models.planet import GaussianRSSM
from foresight.runtime import catalog, imagined
from tests.algorithms.world.test_planet import SMALL
from tests.algorithms.world.world_runs import near
from tests.sabotage import change, sabotaged_by


@sabotaged_by("foresight.runtime.imagined.learns_model", lambda f: lambda algorithm: algorithm != "tdmpc2")
def test_the_state_of_an_algorithm_shows_whether_it_learns_a_world_model(tmp_path: Path) -> None:
    found = {name for name in catalog.algorithms() if imagined.learns_model(name)}
    fork, broken = tmp_path / "my_dreamer.py", tmp_path / "broken.py"
    fork.write_text(catalog.entry("dreamer").path.read_text(encoding="utf-8"), encoding="utf-8")
    broken.write_text("oh no")
    assert imagined.learns_model(str(fork)) and not imagined.learns_model(str(broken))
    assert found == {"dreamer", "lewm", "planet", "storm", "tdmpc2"}


@sabotaged_by("foresight.planning.continuous.cem.best", change("returns", torch.neg))
def test_an_agent_without_an_actor_plans_inside_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    best = torch.tensor([0.5, -0.8])
    monkeypatch.setattr(GaussianRSSM, "rewards", lambda self, state, actions: -(actions - best).square().sum(-1))
    spaces = near().spaces  # actions are within ±2, and from 0 to 4
    state = planet.build(dataclasses.replace(SMALL, horizon=1, candidates=200, iterations=4), spaces)
    agent = SimpleNamespace(module=planet, state=state, spaces=spaces)
    env = SimpleNamespace(model=state.model, state=state.model.initial(1))
    drawn = state.generator.get_state()
    one, other = (imagined.own_action(agent, env, torch.Generator().manual_seed(0)) for _ in range(2))
    torch.testing.assert_close(one, torch.tensor([[1.0, 0.4]]), atol=0.1, rtol=0)
    assert torch.equal(one, other) and torch.equal(drawn, state.generator.get_state())

"""Rewards and losses out of range, in every agent with a world model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foresight.algorithms.world import dreamer, lewm, planet, storm, tdmpc2
from foresight.errors import NotFinite
from foresight.runtime.monitoring.health import Health
from tests.algorithms.policy.small_envs import choice
from tests.algorithms.small_runs import last
from tests.algorithms.states import weights
from tests.algorithms.world import test_planet, test_storm, test_tdmpc2
from tests.algorithms.world.integrator import Integrator
from tests.algorithms.world.line import LEWM, line
from tests.algorithms.world.world_runs import DREAMER
from tests.sabotage import change, sabotaged_by

# A short run of each, and one update of it.
AGENTS: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, float]]]] = {
    "dreamer": (lambda: last(dreamer, DREAMER, choice()), lambda s: dreamer.update(s, *dreamer.sample(s))),
    "storm": (lambda: last(storm, test_storm.CONFIG, choice()), storm.update),
    "tdmpc2": (
        lambda: last(tdmpc2, test_tdmpc2.SMALL, test_tdmpc2.Steer()), lambda s: tdmpc2.update(s, tdmpc2.sample(s))
    ),
    "planet": (lambda: last(planet, test_planet.SMALL, Integrator()), lambda s: planet.update(s, *planet.sample(s))),
}  # fmt: skip


def _earning(state: Any, reward: float) -> Any:
    """The state, after all that is in its replay earned `reward`."""
    for stream in state.replay.streams:
        stream.storage.reward.fill_(reward)
    return state


@sabotaged_by("foresight.training.optim.total", lambda f: lambda terms, coefs: sum(x.mean() for x in terms.values()))
@pytest.mark.parametrize("name", list(AGENTS))
def test_a_term_that_is_not_finite_is_named_and_changes_no_weight(name: str) -> None:
    run, update = AGENTS[name]
    state = _earning(run(), torch.nan)
    _refuses(state, lambda: update(state), "The loss terms? .*reward.* became NaN")


@sabotaged_by("foresight.training.optim.total", lambda f: lambda terms, coefs: sum(x.mean() for x in terms.values()))
def test_so_it_is_without_rewards() -> None:
    state = lewm.build(LEWM, line().spaces)
    image, action = lewm.sample(state, lewm.gather(LEWM, line(), state.model))
    _refuses(state, lambda: lewm.update(state, image, action * torch.nan), "The loss terms? prediction.* became NaN")


def _refuses(state: Any, update: Callable[[], object], message: str) -> None:
    before, said = weights(state), ""
    try:
        update()
    except NotFinite as error:
        said = str(error)
    assert re.search(message, said)
    assert torch.equal(weights(state), before)


@sabotaged_by("foresight.training.imagination.saturated", change("bins", lambda bins: 1e3 * bins))
@pytest.mark.parametrize(("name", "reward"), [("tdmpc2", 1e6), ("storm", 1e9), ("dreamer", 1e9)])
def test_targets_beyond_the_bins_are_counted_and_warned_of(name: str, reward: float) -> None:
    """The outermost bins are at ±22,025 in TD-MPC2, at ±4.9e8 in the others."""
    run, update = AGENTS[name]
    state = run()
    assert update(_earning(state, reward / 100))["saturated"] == 0
    metrics = update(_earning(state, reward))
    share = metrics.pop("saturated")
    assert 0.1 < share < 1  # rows whose step is not known count as 0
    assert f"{share:.1%} of the two-hot targets" in Health().check(1, {"saturated": share})[0]
    assert all(math.isfinite(x) for x in metrics.values())

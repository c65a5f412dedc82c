"""Every preset that needs no download: the environment is made, the algorithm is built for it, and it acts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foresight.envs.control import atari
from foresight.errors import UserError
from foresight.runtime import catalog, environments
from foresight.runtime.config import resolve
from foresight.training.options import build_config

SMALL = {"replay_size": 1_000, "iterations": 1}  # what only takes memory, or time
OPTIONAL = ("ALE/",)  # environments of extras
PROCGEN = ("Starpilot", "Bossfight", "Bigfish")  # those that need a library of the system
PRESETS = [
    (name, preset)
    for name in sorted(catalog.algorithms())
    for preset in catalog.presets(name)
    if (found := resolve.resolve(name, preset=preset)).kind != "text"
    and not found.config.get("policy")  # these start from a trained run
]


@pytest.fixture(scope="module", autouse=True)
def _consoles_are_shared() -> Iterator[None]:
    """Presets with the same Atari game and options play on one, which each resets: it takes longer to begin."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(atari, "_ale", functools.cache(atari._ale))
        yield


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_a_preset_builds_and_acts(name: str, preset: str) -> None:
    fields = resolve.resolve(name, preset=preset).config
    given: dict[str, Any] = {key: value for key, value in SMALL.items() if key in fields}
    resolved = resolve.resolve(name, preset=preset, given=given)
    made = resolved
    few = 2  # one step is taken
    if resolved.env.startswith(OPTIONAL):
        pytest.importorskip("ale_py")
        few = 1
    if fields.get("num_envs", 1) > few:
        made = resolve.resolve(name, preset=preset, given={**given, "num_envs": few})
    try:
        module, env = catalog.module(name), environments.training(made)
    except UserError as error:
        if resolved.env.startswith(PROCGEN) and "Qt" in str(error):
            pytest.skip(str(error))
        raise
    try:
        state = module.build(build_config(catalog.config_class(name), **resolved.config), environments.spaces(env))
        assert state.config.steps >= 1
        if resolved.kind == "control":
            obs = env.reset(0)
            action, _, _ = module.act(state, obs, None, explore=True)
            feedback = env.step(action)
            assert feedback.reward.shape == (env.num_envs,) and torch.isfinite(feedback.reward).all()
    finally:
        environments.close(env)

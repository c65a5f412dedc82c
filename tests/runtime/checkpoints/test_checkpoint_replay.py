"""States that hold a replay, through a real checkpoint: the resumed run equals the uninterrupted one."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from foresight.algorithms.policy import sac, sac_discrete
from foresight.algorithms.value import dqn, rainbow
from foresight.runtime.checkpoints import checkpoint
from tests.algorithms.policy.sac_runs import DISCRETE, SAC, aim
from tests.algorithms.value.small_envs import Chain
from tests.algorithms.value.value_runs import DQN, RAINBOW

CASES = [(dqn, DQN, Chain), (rainbow, RAINBOW, Chain), (sac, SAC, aim), (sac_discrete, DISCRETE, Chain)]


def _weights(state: Any) -> torch.Tensor:
    modules = [x for x in vars(state).values() if isinstance(x, torch.nn.Module)]
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


@pytest.mark.parametrize(("module", "config", "make"), CASES, ids=["dqn", "rainbow", "sac", "sac_discrete"])
def test_a_run_resumes_from_its_checkpoint(module: Any, config: Any, make: Any, tmp_path: Path) -> None:
    def env() -> Any:
        return make() if make is aim else make(8)

    *_, (step, _, state) = module.train(config, env())
    checkpoint.save(tmp_path, state, step)
    restored = module.build(config, env().spaces)
    checkpoint.restore(checkpoint.latest(tmp_path), restored)
    assert len(restored.replay) == len(state.replay) > 0
    longer, ends = dataclasses.replace(config, steps=config.steps + 400), []
    for start in (copy.deepcopy(state), restored):
        start.config = longer
        *_, (_, _, end) = module.train(longer, env(), start)
        ends.append(_weights(end))
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], _weights(state))

"""Two processes that each train on half of a batch take the step of one process that trains on all of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing

from foresight.algorithms.policy import a2c, impala, ppo, sac_discrete
from foresight.algorithms.value import dqn
from foresight.data import trees
from foresight.data.replay import Transitions
from foresight.training import optim
from tests.algorithms.policy.small_envs import choice

SMALL: dict[str, Any] = {"num_envs": 8, "hidden": (8,), "max_grad_norm": 1e9}
ON_POLICY = {**SMALL, "rollout_steps": 6}
CASES: dict[str, tuple[Any, Any]] = {
    "a2c": (a2c, a2c.Config(**ON_POLICY)),
    "impala": (impala, impala.Config(**ON_POLICY)),
    "ppo": (ppo, ppo.Config(**ON_POLICY, epochs=1, minibatches=1, normalize_advantage=False)),
    "dqn": (dqn, dqn.Config(**SMALL)),
    "sac_discrete": (sac_discrete, sac_discrete.Config(num_envs=8, hidden=(8,))),
}


def learned(name: str, part: slice) -> torch.Tensor:
    """The gradients of one update on the rows `part` of a batch that is the same in every process."""
    module, config = CASES[name]
    env = choice()
    state = module.build(config, env.spaces)
    if name in ("dqn", "sac_discrete"):
        generator = torch.Generator().manual_seed(5)
        obs, following = (torch.rand(8, 4, generator=generator) for _ in range(2))
        actions, rewards = torch.arange(8) % 4, torch.rand(8, generator=generator)
        batch = Transitions(*(x[part] for x in (obs, actions, rewards, torch.full((8,), 0.9), following, actions)))
    else:
        whole = module.rollout(state, env, env.reset(0))[0]
        batch = trees.merge(
            lambda leaves: leaves[0][part] if isinstance(leaves[0], torch.Tensor) else leaves[0], [whole]
        )
    module.update(state, batch)
    networks = [value for field, value in vars(state).items() if field in ("network", "critics", "actor")]
    return torch.cat([p.grad.flatten() for network in networks for p in network.parameters()])


def _learn(rank: int, folder: str, name: str, how: str) -> None:
    if how == "alone":  # the sabotage: each takes a step of its own
        optim.join_ = lambda grads, summed=False: None  # type: ignore[assignment]
    torch.save(learned(name, slice(4 * rank, 4 * rank + 4)), Path(folder) / f"{name}-{how}-{rank}.pt")


def _both(_: int, folder: str) -> None:
    """Both processes, of which one is a fork of this one: what they import is imported once."""
    other = multiprocessing.get_context("fork").Process(target=_all, args=(1, folder))
    other.start()
    _all(0, folder)
    other.join()
    assert other.exitcode == 0


def _all(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    join = optim.join_
    for how in ("together", "alone"):
        for name in CASES:
            _learn(rank, folder, name, how)
            optim.join_ = join
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gradients")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(_both, (str(folder),), nprocs=1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_joint_batch(name: str, folder: Path) -> None:
    """To 1e-6; and without the exchange it is not (the sabotage twin)."""
    expected = learned(name, slice(0, 8))
    found = {how: [torch.load(folder / f"{name}-{how}-{rank}.pt") for rank in (0, 1)] for how in ("together", "alone")}
    for gradient in found["together"]:
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
    assert (found["alone"][0] - expected).abs().max() > 1e-4
    assert expected.abs().max() > 1e-3

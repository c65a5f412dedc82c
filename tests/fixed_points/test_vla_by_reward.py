"""PPO on a VLA where the best policy and its values are known: a corridor with two buttons and an instruction."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from foresight.algorithms.policy import ppo
from foresight.nets.sequence import vla
from tests.algorithms.imitation.corridor import GAMMA, MISSIONS, SPACES, Corridor, states
from tests.sabotage import change, flip_sign, sabotaged_by, swap

SHAPE = vla.Shape(
    dim=32, layers=2, heads=2, channels=16, patch=8, film_layers=2, image_tokens=4, words=4, edges=3, head="bins"
)
CONFIG = ppo.Config(
    steps=17_920, num_envs=64, rollout_steps=20, epochs=1, minibatches=8, learning_rate=1e-3, gamma=GAMMA,
    critic_warmup=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy that imitates an expert whose actions are right 60 times in a hundred."""
    obs, best, _ = states()
    odds = torch.full((len(best), 3), 0.2).scatter(1, best[:, None], 0.6)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = vla.VLA(SPACES.obs, SPACES.action, SHAPE)
        policy.words.fit(MISSIONS)
        optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
        for _ in range(200):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(policy(obs).tokens.logits.squeeze(-2), odds).backward()
            optimizer.step()
    run: Path = tmp_path_factory.mktemp("weak")
    vla.save(policy, run / "export")
    return str(run)


def later_missions(original):
    """Steps are stored with the instruction of the step after them: at the end of an episode, that of the next one."""

    def mutant(transitions, *args):
        missions = [step[0]["mission"] for step in transitions[1:]] + [transitions[-1][0]["mission"]]
        moved = [({**obs, "mission": m}, *rest) for (obs, *rest), m in zip(transitions, missions, strict=True)]
        return original(moved, *args)

    return mutant


@sabotaged_by("foresight.envs.collect._rollout", later_missions)
@sabotaged_by("foresight.ops.returns.gae", swap("discount", "cut"), flip_sign)
@sabotaged_by("foresight.ops.policy.clipped_surrogate", change("ratio", torch.ones_like))
def test_reward_alone_reaches_the_best_policy_and_its_values(weak: str) -> None:
    config = dataclasses.replace(CONFIG, policy=weak)
    obs, best, value = states()

    @torch.no_grad()
    def likely(state: ppo.State) -> float:
        return state.network.policy(obs).mean().squeeze(-2).gather(-1, best[:, None]).mean().item()

    before = likely(ppo.build(config, SPACES))
    for step, _, state in ppo.train(config, Corridor(config.num_envs)):
        assert step != 7_680 or likely(state) > 0.84
    assert 0.4 < before < 0.7 and likely(state) > 0.95, (before, likely(state))
    error = (state.network.value(obs).value - value).abs().mean().item()
    assert error < 0.1, error

"""Gumbel MuZero learns to hold a pole up with 4 simulations a move, far better than a random policy."""

from __future__ import annotations

import torch

from foresight.algorithms.search import gumbel_muzero
from foresight.envs.make import make
from foresight.training.options import build_config
from tests.sabotage import flip_sign, sabotaged_by


def _mean_return(state: gumbel_muzero.State, random: bool = False, episodes: int = 16) -> float:
    env = make("CartPole-v1", num_envs=episodes)
    obs, alive, total = env.reset(1_000), torch.ones(episodes), torch.zeros(episodes)
    generator = torch.Generator().manual_seed(0)
    while alive.any():
        action = gumbel_muzero.act(state, obs)[0]
        if random:
            action = torch.randint(2, (episodes,), generator=generator)
        feedback = env.step(action.clone())
        total += alive * feedback.reward
        alive *= 1 - feedback.cut
        obs = feedback.obs
    return total.mean().item()


@sabotaged_by("foresight.planning.search.selection.completed_values", flip_sign)
def test_gumbel_muzero_balances_the_pole_for_a_while() -> None:
    config = build_config(
        gumbel_muzero.Config,
        steps=6_000, num_envs=16, simulations=4, n_steps=10, batch_size=64, train_every=8, learning_starts=500,
        reanalyze=0.0, latent_size=16, hidden=(32,),
    )  # fmt: skip
    env = make("CartPole-v1", num_envs=config.num_envs)
    state = gumbel_muzero.build(config, env.spaces)
    random = _mean_return(state, random=True)
    *_, (_, _, state) = gumbel_muzero.train(config, env, state)
    trained = _mean_return(state)
    assert random < 40
    assert trained > 2 * random

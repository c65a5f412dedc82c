"""Gumbel MuZero learns to hold a pole up with 4 simulations a move, far better than a random policy."""

from __future__ import annotations

import torch

from foresight.algorithms.search import gumbel_muzero
from foresight.envs.games import make as games
from foresight.envs.games.selfplay import SelfPlay
from foresight.envs.make import make
from foresight.training import muzero_targets
from foresight.training.options import build_config
from tests.sabotage import flip_sign, sabotaged_by

LONG = 150  # steps of an episode that are counted


def _mean_return(state: gumbel_muzero.State, random: bool = False, episodes: int = 16) -> float:
    env = make("CartPole-v1", num_envs=episodes)
    obs, alive, total = env.reset(1_000), torch.ones(episodes), torch.zeros(episodes)
    generator = torch.Generator().manual_seed(0)
    while alive.any() and total.max() < LONG:
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
        steps=9_000, num_envs=32, collect_steps=16, simulations=4, n_steps=10, unroll_steps=3, batch_size=64,
        train_every=8, learning_starts=500, reanalyze=0.0, latent_size=16, hidden=(64,), learning_rate=5e-3,
    )  # fmt: skip
    env = make("CartPole-v1", num_envs=config.num_envs)
    state = gumbel_muzero.build(config, env.spaces)
    random = _mean_return(state, random=True)
    assert random < 40
    found = 0.0
    for step, _, now in gumbel_muzero.train(config, env, state):
        if step >= 4_000:
            found = _mean_return(now)
            assert found > 0.7 * random  # pushing one way only is half of it, and not unlearned
            if found > 2 * random:
                break
    assert found > 2 * random


@sabotaged_by("foresight.envs.games.selfplay.symmetric", lambda f: lambda game, batch, *rest: batch)
def test_games_are_trained_on_under_symmetries() -> None:
    """Every game opens in the corner; its sequences are trained on as openings in all four corners."""
    game = games.make("tic_tac_toe")
    config = build_config(gumbel_muzero.Config, num_envs=4, learning_starts=80, batch_size=64, symmetries=True)
    env = SelfPlay(game, 4)
    obs = env.reset(0)
    state = gumbel_muzero.build(config, game)
    for _ in range(40):
        fresh = game.moves(env.position) == 0
        legal = obs["action_mask"].float()
        action = torch.where(fresh, torch.zeros(4, dtype=torch.int64), legal.argmax(-1))
        back = env.step(action)
        row = muzero_targets.transition(obs, action, back, {"weights": legal / legal.sum(-1, keepdim=True)})
        state.replay.add(row)
        obs = back.obs
    batch = muzero_targets.sample(state, game)
    opens = batch.obs["action_mask"].sum(-1) == 9
    assert set(batch.action[opens].tolist()) == {0, 2, 6, 8}
    plain = muzero_targets.sample(state)
    assert set(plain.action[plain.obs["action_mask"].sum(-1) == 9].tolist()) == {0}

"""MuZero learns a game for two whose every position is known, without its rules."""

from __future__ import annotations

import torch

from foresight.algorithms.search import muzero
from foresight.envs import games
from foresight.planning import opponents, proof
from foresight.runtime import match
from tests.sabotage import change, flip_sign, sabotaged_by

HEX = games.make("hex", size=2)
B1, A2 = 1, 2  # the cells with two ways to the other edge: whoever begins there wins, whoever begins elsewhere loses


@sabotaged_by("foresight.planning.unroll.latent_model", change("players", lambda _: 1))
@sabotaged_by("foresight.planning.unroll.summed", flip_sign)
def test_muzero_learns_to_win_at_hex() -> None:
    config = muzero.Config(
        steps=3_000, num_envs=16, simulations=12, gamma=1.0, unroll_steps=3, n_steps=4, batch=64, update_every=8,
        collect_steps=8, warmup=200, reanalyze=0.0, dirichlet_alpha=1.0, temperatures=(1.0,), latent_size=16,
        hidden=(32,), support=2, learning_rate=5e-3, value_coef=1.0,
    )  # fmt: skip
    *_, (_, _, state) = muzero.train(config, HEX)
    agent = match.chooser(muzero, state)
    random = match.play(HEX, opponents.make("random", HEX, 1), opponents.make("random", HEX, 2), 40)
    assert 0.2 < random.score < 0.8
    assert proof.exhaust(HEX, agent, first=True).lost == 0
    action, extras, _ = muzero.act(state, HEX.start(1))
    assert int(action[0]) in (B1, A2) and extras["value"][0] > 0.2  # with what the search tried in vain
    begun = HEX.step(HEX.start(4), torch.arange(4)).position  # by every first move: what is it worth to the second?
    _, extras, _ = muzero.act(state, begun, simulations=0)
    assert (extras["value"].sign() == torch.tensor([1, -1, -1, 1])).all()

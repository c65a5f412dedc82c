"""MuZero and Gumbel MuZero learn a solved two-player game without its rules."""

from __future__ import annotations

from typing import Any

import torch

from foresight.algorithms.search import gumbel_muzero, muzero
from foresight.envs.games import make as games
from foresight.planning.games import exhaustive, opponents
from foresight.runtime.evaluation import match
from foresight.training.options import build_config
from tests.sabotage import change, flip_sign, sabotaged_by

HEX = games.make("hex", size=2)
B1, A2 = 1, 2  # cells with two ways to the other edge: starting there wins, starting elsewhere loses


SABOTAGES = (
    ("foresight.training.muzero_targets.latent_model", change("players", lambda _: 1)),
    ("foresight.training.muzero_targets.summed", flip_sign),
)


def learned(module: Any, **exploring: Any) -> Any:
    """The State of `module` after 2,600 moves of Hex; it never loses when it starts."""
    config = build_config(
        module.Config, steps=2_600, num_envs=16, simulations=12, gamma=1.0, unroll_steps=3, n_steps=4, batch_size=64,
        train_every=8, collect_steps=8, learning_starts=200, reanalyze=0.0, latent_size=16, hidden=(32,), support=2,
        learning_rate=5e-3, value_coef=1.0, **exploring,
    )  # fmt: skip
    looked = False
    for step, _, state in module.train(config, HEX):
        if not looked and step >= 1_500:
            looked = True
            _, extras, _ = module.act(state, HEX.start(1))
            assert extras["weights"][0, [B1, A2]].sum() > 0.55
    assert exhaustive.play_all_replies(HEX, match.chooser(module, state), first=True).lost == 0
    return state


@sabotaged_by(*SABOTAGES[0])
@sabotaged_by(*SABOTAGES[1])
def test_muzero_learns_to_win_at_hex() -> None:
    state = learned(muzero, dirichlet_alpha=1.0, temperatures=(1.0,), known_bounds=True)
    random = match.play(HEX, opponents.make("random", HEX, 1), opponents.make("random", HEX, 2), 40)
    assert 0.2 < random.score < 0.8
    action, extras, _ = muzero.act(state, HEX.start(1))
    assert int(action[0]) in (B1, A2) and extras["value"][0] > 0.2  # with what the search tried in vain
    begun = HEX.step(HEX.start(4), torch.arange(4)).position  # by every first move: what is it worth to the second?
    _, extras, _ = muzero.act(state, begun, simulations=0)
    assert (extras["value"].sign() == torch.tensor([1, -1, -1, 1])).all()


@sabotaged_by(*SABOTAGES[0])
@sabotaged_by(*SABOTAGES[1])
@sabotaged_by("foresight.envs.games.selfplay.random_openings", lambda f: lambda game, count, *_: game.start(count))
def test_gumbel_muzero_learns_to_win_at_hex() -> None:
    state = learned(gumbel_muzero, value_scale=0.25, value_normalization="none", openings=3)
    _, extras, _ = gumbel_muzero.act(state, HEX.start(1))
    assert extras["weights"][0, [B1, A2]].sum() > 0.9
    taken = HEX.step(HEX.start(1), torch.tensor([B1])).position
    action, extras, _ = gumbel_muzero.act(state, taken)
    assert int(action[0]) != B1 and extras["weights"][0, B1] == 0  # a cell that is taken is no move
    begun = HEX.step(HEX.start(4), torch.arange(4)).position  # it knows what it would not play itself
    _, extras, _ = gumbel_muzero.act(state, begun, simulations=0)
    assert (extras["value"].sign() == torch.tensor([1, -1, -1, 1])).all()

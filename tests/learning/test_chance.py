"""Stochastic MuZero learns what a die may show, and to roll it: a world of which everything is known."""

from __future__ import annotations

import torch

from foresight.algorithms.search import stochastic_muzero
from foresight.envs.mdp import MDP, TableEnv
from tests.sabotage import flip_sign, sabotaged_by

HELD = 0.5  # what holding earns; rolling, and then naming what is shown, earns 1


def die() -> MDP:
    """State 0: hold, or roll (two actions) and see one of three faces, states 1 to 3; naming it earns 1. 4 is the end.

    Random play earns ⅓ · ½ + ⅔ · ⅓ = 7/18, the best 1.
    """
    following = torch.full((5, 3, 3), 4, dtype=torch.int32)
    prob, discount = torch.zeros(5, 3, 3, dtype=torch.float64), torch.zeros(5, 3, 3, dtype=torch.float64)
    reward, start = torch.zeros(5, 3, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    prob[..., 0], reward[0, 0], start[0] = 1.0, HELD, 1.0
    following[0, 1:], prob[0, 1:], discount[0, 1:] = torch.tensor([1, 2, 3], dtype=torch.int32), 1 / 3, 1.0
    reward[[1, 2, 3], [0, 1, 2]] = 1.0
    return MDP("die", following, prob, reward, start, discount)


def earned(action: torch.Tensor) -> torch.Tensor:
    """The expected return of the actions `[4]` in states 0 to 3."""
    named = (action[1:] == torch.arange(3)).float().mean()
    return torch.where(action[0] == 0, HELD, named)


@sabotaged_by("foresight.ops.latent.straight_through", lambda f: lambda x: torch.ones_like(x) / x.shape[-1])
@sabotaged_by("foresight.planning.unroll.summed", flip_sign)
def test_stochastic_muzero_learns_what_a_die_may_show() -> None:
    config = stochastic_muzero.Config(
        steps=2_000, num_envs=8, simulations=10, codes=4, n_steps=2, unroll_steps=2, batch=64, update_every=8,
        warmup=200, reanalyze=0.0, latent_size=8, hidden=(32,), support=3, learning_rate=5e-3, value_coef=1.0,
    )  # fmt: skip
    *_, (_, _, state) = stochastic_muzero.train(config, TableEnv(die(), config.num_envs))
    network = state.network
    action, _, _ = stochastic_muzero.act(state, torch.arange(4))
    tables = torch.cartesian_prod(*[torch.arange(3)] * 4)
    random = torch.stack([earned(table) for table in tables]).mean()
    assert 0.38 < random < 0.4
    assert earned(action) == 1.0  # the best there is
    codes = network.happening(torch.arange(1, 4)).argmax(-1)
    assert len(set(codes.tolist())) == 3  # a code for each face
    with torch.no_grad():
        start = network.represent(torch.tensor([0]))
        shown = torch.softmax(network.outcome(network.after(network.act(start, torch.tensor([int(action[0])])))), -1)[0]
    assert (shown[codes] - 1 / 3).abs().max() < 0.1

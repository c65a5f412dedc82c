"""Stochastic MuZero learns the outcomes of a die, and to roll it: an environment with a known solution."""

from __future__ import annotations

import pytest
import torch

from foresight.algorithms.search import stochastic_muzero
from foresight.data.trajectory import Trajectory
from foresight.envs.tabular.mdp import MDP, TableEnv
from foresight.errors import UserError
from foresight.nets.heads import CategoricalHead
from foresight.training import muzero_targets
from foresight.training.options import build_config
from tests.sabotage import change, flip_sign, sabotaged_by

HELD = 0.4  # what holding earns; rolling, and then naming what is shown, earns 1


def die() -> MDP:
    """State 0: hold, or roll (two actions) and see one of three faces, states 1 to 3; naming it earns 1. 4 is the end.

    Random play earns ⅓ · 0.4 + ⅔ · ⅓ = 16/45, the best 1.
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
@sabotaged_by("foresight.training.muzero_targets.summed", flip_sign)
def test_stochastic_muzero_learns_what_a_die_may_show() -> None:
    """Training ends when the actions are the best there are, and each face has a code and its probability."""
    config = build_config(
        stochastic_muzero.Config,
        seed=5, steps=1_600, num_envs=8, simulations=10, codes=16, n_steps=2, unroll_steps=2, batch_size=64,
        train_every=4, learning_starts=200, reanalyze=0.0, latent_size=8, hidden=(32,), support=3, learning_rate=5e-3,
        value_coef=1.0,
    )  # fmt: skip
    tables = torch.cartesian_prod(*[torch.arange(3)] * 4)
    random = torch.stack([earned(table) for table in tables]).mean()
    assert abs(random - 16 / 45) < 1e-6
    learned = False
    for step, metrics, state in stochastic_muzero.train(config, TableEnv(die(), config.num_envs)):
        assert metrics.get("value_loss", 1.0) > 0  # as of any distribution; what is learned is seen much later
        if learned := step > 500 and step % 256 == 0 and _knows_the_die(state):
            break
    assert learned


def _knows_the_die(state: stochastic_muzero.State) -> bool:
    network = state.network
    action, _, _ = stochastic_muzero.act(state, torch.arange(4))
    codes = network.encode_outcome(torch.zeros(3, dtype=torch.int64), torch.arange(1, 4)).argmax(-1)
    with torch.no_grad():
        start = network.represent(torch.tensor([0]))
        shown = torch.softmax(network.outcome(network.after(network.act(start, torch.tensor([int(action[0])])))), -1)[0]
    certain = (shown[codes] - 1 / 3).abs().max() < 0.1
    return bool(earned(action) == 1.0 and len(set(codes.tolist())) == 3 and certain)  # the best there is


def test_scores_of_codes_are_standardized_so_that_no_code_has_all_outcomes() -> None:
    """Over the batch while learning; otherwise by running statistics, which come near to those of repeated batches."""
    config = build_config(stochastic_muzero.Config, codes=4, learning_starts=500)
    network = stochastic_muzero.build(config, TableEnv(die(), 1).spaces).network
    with torch.no_grad():
        network.code.bias[2] = 50.0  # the largest of all outcomes
    pair = torch.zeros(3, dtype=torch.int64), torch.arange(1, 4)
    assert (network.encode_outcome(*pair).argmax(-1) == 2).all()
    for _ in range(100):
        scores = network.encode_outcome(*pair, learning=True)
    torch.testing.assert_close(scores.mean(0), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(scores.var(0, correction=0), torch.ones(4), atol=1e-2, rtol=0)
    assert torch.equal(scores.argmax(-1), network.encode_outcome(*pair).argmax(-1))
    assert len(set(scores.argmax(-1).tolist())) > 1
    alone = build_config(stochastic_muzero.Config, batch_size=1, unroll_steps=1, reanalyze=0.0)
    with pytest.raises(UserError, match="raise batch_size"):
        stochastic_muzero.build(alone, TableEnv(die(), 1).spaces)


PAIRS = ((3, 4), (4, 5), (3, 5))  # the faces of coin 0, 1 and 2


def coins() -> MDP:
    """States 0 to 2 are coins with two of three faces each: any action shows one of them, states 3 to 5, and naming it
    earns 1. 6 is the end. If one of two codes depended on the face alone, some coin would have one code for both.
    """
    following = torch.full((7, 3, 2), 6, dtype=torch.int32)
    prob, discount = torch.zeros(7, 3, 2, dtype=torch.float64), torch.zeros(7, 3, 2, dtype=torch.float64)
    reward, start = torch.zeros(7, 3, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    prob[..., 0], start[:3] = 1.0, 1 / 3
    following[:3], prob[:3], discount[:3] = torch.tensor(PAIRS, dtype=torch.int32).unsqueeze(1), 0.5, 1.0
    reward[[3, 4, 5], [0, 1, 2]] = 1.0
    return MDP("coins", following, prob, reward, start, discount)


@sabotaged_by("foresight.nets.models.stochastic_muzero.ChanceModel.encode_outcome", change("obs", torch.zeros_like))
def test_the_code_depends_on_the_outcome_and_on_what_was_there_before() -> None:
    """Both faces of every coin get a code of their own, and the model learns what naming them earns.

    The seed is one whose codes begin apart, as codes that begin as one may stay one.
    """
    config = build_config(
        stochastic_muzero.Config,
        seed=1, num_envs=1, codes=2, n_steps=2, unroll_steps=2, learning_starts=200, reanalyze=0.0, latent_size=8,
        hidden=(32,), support=3, learning_rate=1e-2, value_coef=1.0,
    )  # fmt: skip
    state = stochastic_muzero.build(config, TableEnv(coins(), 1).spaces)
    rows = [(coin, face, named) for coin in range(3) for face in PAIRS[coin] for named in (3, 4, 5)]
    obs = torch.tensor([[coin, face, 6, 6] for coin, face, _ in rows])
    action = torch.tensor([[0, named - 3, 0, 0] for _, _, named in rows])
    reward = torch.tensor([[0.0, face == named, 0, 0] for _, face, named in rows])
    ones, going = torch.ones_like(reward), torch.tensor([1.0, 0, 0, 0]).expand_as(reward)
    extras = {"weights": torch.full((*obs.shape, 3), 1 / 3), "next_obs": obs.roll(-1, 1)}
    batch = Trajectory(obs, action, reward, going, 1 - going, ones, extras=extras)
    for _ in range(300):
        stochastic_muzero.update(state, batch)
    coin, face = obs[:, 0], obs[:, 1]
    code = state.network.encode_outcome(coin, face).argmax(-1)
    for here in range(3):
        assert len({int(code[(coin == here) & (face == shown)][0]) for shown in PAIRS[here]}) == 2
    found = muzero_targets.model_errors(state.network, batch, action, extras["next_obs"], 2, CategoricalHead(5))
    assert found["reward"][2] < 0.05  # a coin whose faces have one code makes it 1/9

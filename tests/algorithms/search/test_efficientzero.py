"""EfficientZero's own terms: consistency that a constant cannot satisfy, value prefixes, off-policy correction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foresight.algorithms.search import efficientzero
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Spaces
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.ops import latent
from foresight.training.options import build_config
from tests.algorithms.search.muzero_runs import sequences, small
from tests.sabotage import change, flip_sign, returns, sabotaged_by


def spaces() -> Spaces:
    return make("CartPole-v1", num_envs=1).spaces


def state_of(**fields: Any) -> Any:
    few: dict[str, Any] = {
        "num_envs": 4, "unroll_steps": 3, "n_steps": 2, "latent_size": 8, "hidden": (32,), "lstm_size": 8,
        "learning_starts": 80, "reanalyze": 0.0, "steps": 1_000,
    }  # fmt: skip
    return efficientzero.build(build_config(efficientzero.Config, **{**few, **fields}), spaces())


def walk(sequences: int, steps: int, seed: int = 0) -> Trajectory:
    """Sequences that a model can learn: each action turns the observation by a quarter, left or right."""
    g = torch.Generator().manual_seed(seed)
    seen, action = [torch.randn(sequences, 4, generator=g)], torch.randint(2, (sequences, steps), generator=g)
    for t in range(steps):
        seen.append(torch.where(action[:, t, None] > 0, seen[-1].roll(1, -1), seen[-1].roll(-1, -1)))
    obs, ones = torch.stack(seen, 1), torch.ones(sequences, steps)
    extras = {
        "weights": torch.full((sequences, steps, 2), 0.5), "next_obs": obs[:, 1:],
        "born": torch.zeros(sequences, steps, dtype=torch.int64),
    }  # fmt: skip
    return Trajectory(obs[:, :-1], action, 0 * ones, ones, 0 * ones, ones, extras=extras)


@sabotaged_by("foresight.nets.models.efficientzero.PrefixModel.project", returns(torch.relu))
def test_no_constant_agrees_with_what_is_projected() -> None:
    """The best constant's mean cosine is the length of the mean direction: near 0, as projections are centered."""
    network, batch = state_of().network, walk(256, 1)
    with torch.no_grad():
        projected = network.project(network.represent(batch.obs[:, 0])["latent"])
    assert torch.nn.functional.normalize(projected, dim=-1).mean(0).norm() < 0.3
    assert (projected.std(0) > 0.5).all()  # and no number of them has collapsed


@sabotaged_by("foresight.ops.latent.negative_cosine", flip_sign, returns(torch.detach))
def test_consistency_starts_far_from_its_optimum_and_is_learned() -> None:
    state = state_of(batch_size=64, learning_rate=3e-3)
    assert abs(agreement(state)) < 0.4
    for seed in range(100):
        efficientzero.update(state, walk(64, 5, seed))
        assert seed != 40 or agreement(state) > 0.25
    assert agreement(state) > 0.5


@torch.no_grad()
def agreement(state: Any) -> float:
    """The cosine after one step, on sequences that were not trained on."""
    network, batch = state.network, walk(256, 1, 1_000)
    after = network.advance(network.represent(batch.obs[:, 0]), batch.action[:, 0])["latent"]
    seen = network.project(network.represent(batch.extras["next_obs"][:, 0])["latent"])
    return float(torch.nn.functional.cosine_similarity(network.predictor(network.project(after)), seen).mean())


def test_no_gradient_comes_from_what_was_really_seen() -> None:
    """Only the first observation's latent is moved: the later ones are targets (the stop-gradient of SimSiam)."""
    state, batch = state_of(), walk(8, 5)
    seen: list[Tensor] = []
    represent = type(state.network).represent

    def watched(self: Any, obs: Tensor) -> dict[str, Tensor]:
        found = represent(self, obs)
        seen.append(found["latent"])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(state.network), "represent", watched)
        efficientzero.loss(state, batch)
    assert [(len(x), x.requires_grad) for x in seen if len(x) in (8, 24)] == [(8, True), (24, False)]


@sabotaged_by("foresight.ops.latent.unroll_masks", change("cut", torch.zeros_like))
def test_the_last_observation_of_an_episode_counts_and_the_next_episode_does_not() -> None:
    state, batch = state_of(), walk(8, 5)
    cut = batch.cut.clone()
    cut[:, 1] = 1.0
    batch = batch.replace(cut=cut)
    before = float(efficientzero.loss(state, batch)["consistency"].detach())

    def changed(row: int) -> float:
        following = batch.extras["next_obs"].clone()
        following[:, row] = following[:, row].flip(0)
        other = batch.replace(extras={**batch.extras, "next_obs": following})
        return float(efficientzero.loss(state, other)["consistency"].detach())

    # The same rows in another order leave the statistics of the batch alone.
    assert changed(1) != pytest.approx(before, abs=1e-4)
    assert changed(2) == pytest.approx(before, abs=1e-5)


def test_a_batch_of_one_is_refused() -> None:
    with pytest.raises(UserError, match="at least 2"):
        state_of(batch_size=1, unroll_steps=1)


@pytest.mark.parametrize("shrink", [0.0, -0.3])
def test_a_correction_over_no_share_of_training_is_refused(shrink: float) -> None:
    with pytest.raises(UserError, match=f"shrink must be above 0, not {shrink}"):
        state_of(shrink=shrink)


@sabotaged_by("foresight.ops.latent.value_prefix", change("horizon", lambda h: h + 1), change("alive", torch.ones_like))
def test_a_value_prefix_by_hand() -> None:
    """Digits to be added, and what follows the end of the episode at step 1 of the second; new sums after three."""
    reward, alive = torch.tensor([[1.0, 2, 3, 4, 5], [6, 7, 80, 90, 10]]), torch.ones(2, 5)
    alive[1, 2:] = 0
    assert latent.value_prefix(reward, alive, 3).tolist() == [[1, 3, 6, 4, 9], [6, 13, 13, 0, 0]]


@sabotaged_by("foresight.ops.latent.shrunk_horizon", lambda f: lambda age, total, n, share: f(0 * age, total, n, share))
def test_the_older_a_row_the_sooner_it_bootstraps() -> None:
    """200 updates in all, a share of 0.3: every 60 updates take one of five steps, and the last one stays."""
    age = torch.tensor([0, 59, 60, 119, 120, 179, 180, 239, 240, 10_000])
    assert latent.shrunk_horizon(age, 200, 5, 0.3).tolist() == [5, 5, 4, 4, 3, 3, 2, 2, 1, 1]


@sabotaged_by("foresight.ops.latent.shrunk_horizon", lambda f: lambda age, total, n, share: f(0 * age, total, n, share))
def test_rows_age_from_when_the_learner_had_them() -> None:
    _, env, state = small(efficientzero, gamma=0.1, n_steps=2, unroll_steps=4, reanalyze=0.0)
    rows, _ = efficientzero.rollout(state, env, env.reset(0))
    state.updates = 3
    efficientzero.learn(state, rows)
    assert (state.replay.storage.extras["born"][:, : rows.shape[1]] == 3).all()
    batch = sequences(efficientzero, state)
    state.updates = 10**6
    value = efficientzero.targets(state, batch)[2]
    torch.testing.assert_close(value[:, :3], torch.tensor([[1.0, 2, 3], [4, 5, 0]]), atol=1e-5, rtol=0)


@sabotaged_by("foresight.nets.models.efficientzero.PrefixModel.reset_prefix", lambda f: lambda self, state: state)
def test_a_search_reads_rewards_from_the_value_prefix() -> None:
    """The rewards of five steps sum to the prefix; at the horizon the sum and the LSTM are reset."""
    _, env, state = small(efficientzero, lstm_horizon=3)
    with torch.no_grad():
        state.network.prefix.layer.weight.normal_(generator=torch.Generator().manual_seed(0))
        _, _, now = state.network.root(env.reset(0))
        total = torch.zeros(4)
        for depth in range(1, 7):
            action = torch.zeros(4, dtype=torch.int64)
            prefix = state.network.prefix(state.network.advance(now, action)["h"])
            now, reward, _, _, _ = state.network.step(now, action)
            total = total + reward
            torch.testing.assert_close(total, prefix, atol=1e-4, rtol=1e-4)
            if depth % 3 == 0:
                assert now["h"].abs().max() == 0 and now["prefix"].abs().max() == 0
                total = torch.zeros(4)
            else:
                assert now["h"].abs().max() > 0

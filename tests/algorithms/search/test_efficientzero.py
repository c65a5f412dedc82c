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
from tests.sabotage import change, flip_sign, returns, sabotaged_by


def spaces() -> Spaces:
    return make("CartPole-v1", num_envs=1).spaces


def small(**fields: Any) -> Any:
    few: dict[str, Any] = {
        "num_envs": 4, "unroll_steps": 3, "n_steps": 2, "latent_size": 8, "hidden": (32,), "lstm_size": 8,
        "learning_starts": 80, "reanalyze": 0.0, "steps": 1_000,
    }  # fmt: skip
    return efficientzero.build(efficientzero.Config(**{**few, **fields}), spaces())


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
    network, batch = small().network, walk(256, 1)
    with torch.no_grad():
        projected = network.project(network.represent(batch.obs[:, 0])["latent"])
    assert torch.nn.functional.normalize(projected, dim=-1).mean(0).norm() < 0.3
    assert (projected.std(0) > 0.5).all()  # and no number of them has collapsed


@sabotaged_by("foresight.ops.latent.negative_cosine", flip_sign, returns(torch.detach))
def test_consistency_starts_far_from_its_optimum_and_is_learned() -> None:
    state = small(batch_size=64, learning_rate=3e-3)
    assert abs(agreement(state)) < 0.4
    for seed in range(150):
        efficientzero.update(state, walk(64, 5, seed))
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
    state, batch = small(), walk(8, 5)
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
    state, batch = small(), walk(8, 5)
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
        small(batch_size=1, unroll_steps=1)

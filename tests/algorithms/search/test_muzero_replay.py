"""Prioritized replay and search-value targets of MuZero and its variants."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch

from foresight.algorithms.search import efficientzero, gumbel_muzero, muzero, sampled_muzero, stochastic_muzero
from foresight.data.priorities import Prioritized
from foresight.data.trajectory import Trajectory
from foresight.errors import UserError
from foresight.training import muzero_targets
from foresight.training.options import build_config
from tests.algorithms.search.muzero_runs import ALL, DISCRETE, SMALL, name, sequences, small
from tests.algorithms.states import restored, weights
from tests.sabotage import change, drop, sabotaged_by


def filled(module: ModuleType, **fields: Any) -> tuple[Any, Any, Trajectory]:
    """A State whose network prefers something, with some steps in its replay, the environment, and the next steps."""
    _, env, state = small(module, **fields)
    with torch.no_grad():
        for p in state.network.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.5)
    state.target.load_state_dict(state.network.state_dict())
    obs, parts = env.reset(0), []
    for _ in range(3):
        part, obs = module.rollout(state, env, obs)
        parts.append(part)
    for part in parts[:2]:
        born = {"born": torch.zeros(part.shape, dtype=torch.int64)} if module is efficientzero else {}
        state.replay.add(part.replace(extras={**part.extras, **born}))
    return state, env, parts[2]


@pytest.mark.parametrize("module", ALL, ids=name)
@sabotaged_by("foresight.training.muzero_targets.prioritize", change("value", lambda v: v + 1))
def test_an_update_sets_the_priorities_of_its_sequences(module: ModuleType) -> None:
    """|ν - z|^α: the value that the search found when acting, and the value target; the others keep the greatest."""
    state, _, _ = filled(module, priority_exponent=0.5, reanalyze=0.0)
    assert isinstance(state.replay, Prioritized) and state.replay.tree is not None
    batch = muzero_targets.sample(state)
    before = state.replay.tree[torch.arange(state.replay.tree.size)]
    assert set(before.tolist()) == {0.0, 1.0} and before.sum() == 4 * (20 - 5)  # K + n - 1 steps must follow
    value = module.targets(state, batch)[2]
    module.update(state, batch)
    key, gap = batch.extras["key"][:, 0], batch.extras["value"][:, 0] - value[:, 0]
    assert gap.abs().max() > 0.01
    torch.testing.assert_close(state.replay.tree[key], (gap.abs().double() + 1e-6).sqrt())
    others = torch.ones(len(before), dtype=torch.bool).index_fill(0, key, False)
    assert torch.equal(state.replay.tree[torch.arange(len(before))][others], before[others])


@pytest.mark.parametrize("module", ALL, ids=name)
@sabotaged_by("foresight.training.muzero_targets.summed", drop("weight"))
def test_importance_weights_scale_the_loss_of_their_sequence(module: ModuleType) -> None:
    """Becomes the uniform loss when all weights are 1; with weights 1 and 0 it is half the loss of the first."""
    state, _, _ = filled(module, priority_exponent=1.0, reanalyze=0.0, batch_size=2)
    if module is stochastic_muzero:  # codes by running statistics, so that they do not depend on the other sequence
        encode = state.network.encode_outcome
        state.network.encode_outcome = lambda *pair, learning: encode(*pair)
    batch = muzero_targets.sample(state)
    assert (batch.extras["weight"] == 1).all()  # all priorities are still equal

    def losses(weight: list[float] | None, rows: slice) -> dict[str, float]:
        extras = dict(batch.extras)
        if weight is None:
            del extras["weight"]
        else:
            extras["weight"] = torch.tensor(weight).unsqueeze(1).expand(batch.shape)
        return module.loss(state, batch.replace(extras=extras).map(lambda x: x[rows]))

    uniform, weighted = losses(None, slice(2)), losses([1.0, 1.0], slice(2))
    one, other, first = losses([1.0, 0.0], slice(2)), losses([0.0, 1.0], slice(2)), losses(None, slice(1))
    for key in uniform:
        torch.testing.assert_close(weighted[key], uniform[key])
        torch.testing.assert_close(one[key] + other[key], uniform[key])
        if key != "consistency":  # it is normalized over the batch
            torch.testing.assert_close(one[key], first[key] / 2)


@pytest.mark.parametrize("module", ALL, ids=name)
@sabotaged_by("foresight.training.muzero_targets.targets", drop("searched"))
def test_reanalyzed_sequences_have_the_values_of_their_searches(module: ModuleType) -> None:
    """Half of the sequences; the other half keeps n-step returns. Without reanalysis all of them do."""
    state, _, _ = filled(module, search_values=True, reanalyze=0.5, batch_size=4)
    batch = muzero_targets.sample(state)
    state.generator.manual_seed(3)
    alive, _, value, *_ = module.targets(state, batch)
    state.generator.manual_seed(3)
    again = module.reanalyze(state, batch.obs[:2, :4].flatten(0, 1))["value"].view(2, 4)
    torch.testing.assert_close(value[:2], again * alive[:2])
    for fields in ({"search_values": False, "reanalyze": 0.5}, {"search_values": True, "reanalyze": 0.0}):
        state.config = build_config(module.Config, **{**SMALL, "batch_size": 4, **fields})
        returns = module.targets(state, batch)[2]
        torch.testing.assert_close(returns[2:], value[2:])
        assert (returns[:2] - value[:2]).abs().max() > 1e-3


@sabotaged_by("foresight.data.priorities.SumTree.find", lambda f: lambda tree, sums: f(tree, sums.sort().values))
def test_with_priorities_every_environment_is_reanalyzed() -> None:
    """A quarter of eight sequences from four environments: not always those of the first."""
    state, _, _ = filled(muzero, priority_exponent=1.0, reanalyze=0.25)
    assert isinstance(state.replay, Prioritized)
    counts = torch.zeros(4)
    for _ in range(100):
        batch = muzero_targets.sample(state)
        found = muzero_targets.policy_targets(
            state, batch, lambda _, obs: {"weights": torch.full((len(obs), 2), 7.0)}, ("weights",)
        )["weights"]
        fresh = (found == 7).all((1, 2))
        assert fresh.sum() == 2
        counts += torch.bincount(batch.extras["key"][fresh, 0] // state.replay.replay.capacity, minlength=4)
    assert (counts - 50).abs().max() < 5 * 50**0.5


@pytest.mark.parametrize("module", DISCRETE, ids=name)
def test_a_search_value_after_the_end_of_an_episode_is_zero(module: ModuleType) -> None:
    _, _, state = small(module, search_values=True, reanalyze=1.0, unroll_steps=4, n_steps=2)
    with torch.no_grad():
        state.target.value.layer.bias.copy_(torch.randn(41, generator=torch.Generator().manual_seed(1)))
    alive, _, value, _ = module.targets(state, sequences(module, state))
    assert (value[alive == 0] == 0).all() and value[alive > 0].abs().min() > 0


@pytest.mark.parametrize("module", [muzero, gumbel_muzero, sampled_muzero], ids=name)
@sabotaged_by(
    "foresight.data.priorities.Prioritized.load_state_dict",
    change("state", lambda s: {**s, "greatest": 9.0}, "greatest"),
)
def test_a_restored_state_continues_as_the_first(module: ModuleType) -> None:
    state, env, steps = filled(module, priority_exponent=1.0, search_values=True, learning_starts=80)
    state.step = 160
    module.learn(state, steps)
    other = restored(module, state, env)
    for one in (state, other):
        one.step = 320
        module.learn(one, copy.deepcopy(steps))
    assert state.updates == other.updates > 2
    assert torch.equal(weights(state), weights(other))


@pytest.mark.parametrize("module", ALL, ids=name)
def test_values_of_searches_that_are_never_made_are_refused(module: ModuleType) -> None:
    for share in (0.0, 0.1):  # of a batch of 8, so none
        with pytest.raises(UserError, match=f"search_values is set, but reanalyze is {share}: none of the 8 sequences"):
            small(module, search_values=True, reanalyze=share)
    with pytest.raises(UserError, match=r"reanalyze is 0.1, which is less than one of the 8 .* at least 0.125"):
        small(module, reanalyze=0.1)


def test_wrong_exponents_are_refused() -> None:
    for wrong, message in (
        ({"priority_exponent": -1.0}, "priority_exponent must be at least 0"),
        ({"priority_correction": 2.0}, "priority_correction must be between 0 and 1"),
    ):
        with pytest.raises(UserError, match=message):
            small(muzero, **wrong)

"""What must hold of A2C, IMPALA and SAC with a memory: learning reads what acting read, and episodes stay apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from foresight.algorithms.policy import a2c, impala, sac, sac_discrete
from foresight.data.trajectory import Trajectory
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.nets.critics import encode
from foresight.nets.outputs import Categorical
from foresight.nets.sequence import memory
from foresight.ops import returns
from tests.algorithms.policy.small_envs import Clock
from tests.laws.test_memory_ppo import Recorder, blind
from tests.sabotage import change, sabotaged_by

SMALL: dict[str, Any] = {
    "num_envs": 6, "hidden": (16,), "memory_size": 16, "memory_heads": 2, "memory_window": 10, "memory_layers": 2,
}  # fmt: skip
ON_POLICY = [
    (a2c, a2c.Config(**SMALL, rollout_steps=16)),
    (impala, impala.Config(**SMALL, rollout_steps=16, rollouts_per_update=1)),
]
BOTH = pytest.mark.parametrize(("module", "config"), ON_POLICY, ids=["a2c", "impala"])
KINDS = [("gru", "shared"), ("lstm", "separate"), ("gtrxl", "actor"), ("transformer", "critic")]


def _apart(state: Any) -> Any:
    """The weights far from where every output is the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in (value for value in vars(state).values() if isinstance(value, torch.nn.Module)):
            for parameter in module.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return state


def _second(module: Any, config: Any, env: Any) -> tuple[Any, Any]:
    """A State, and the second of two rollouts, which continues the first."""
    state = _apart(module.build(config, env.spaces))
    _, *position = module.rollout(state, env, env.reset(0))
    return state, module.rollout(state, env, *position)[0]


@sabotaged_by("foresight.nets.sequence.memory.MemoryActorCritic.forward", blind)
@sabotaged_by(
    "foresight.nets.sequence.memory.MemoryActorCritic.forward", change("carry", lambda _: None, label="empty_carry")
)
@sabotaged_by("foresight.data.trees.reset_carry", lambda f: lambda carry, cut: carry)
@BOTH
def test_what_is_read_at_once_is_what_acted_step_by_step(
    module: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    acted: list[Tensor] = []
    sample = Categorical.sample

    def watched(self: Categorical, generator: torch.Generator) -> Tensor:
        acted.append(self.logps)
        return sample(self, generator)

    monkeypatch.setattr(Categorical, "sample", watched)
    for kind, backbone in KINDS:
        settings = dataclasses.replace(config, memory=kind, backbone=backbone)
        state, message = _second(module, settings, make("TMazePassive-v0", num_envs=6, length=8, time_limit=6))
        rows = message if isinstance(message, Trajectory) else message.trajectory
        carry = message.extras["carry"] if isinstance(message, Trajectory) else message.first
        found = state.network.read(rows.obs, carry, memory.starts(rows.cut))[0].logps
        assert rows.cut.sum() >= 12
        torch.testing.assert_close(found, torch.stack(acted[-config.rollout_steps :], 1), rtol=0, atol=1e-5)


@sabotaged_by("foresight.nets.sequence.memory.MemoryActorCritic.forward", blind)
@sabotaged_by("foresight.data.trees.reset_carry", lambda f: lambda carry, cut: carry)
@sabotaged_by("foresight.data.trees.pick", lambda f: lambda tree, rows: f(tree, torch.zeros_like(rows)))
@BOTH
def test_values_are_of_the_history_of_the_episode(module: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What A2C's and IMPALA's targets are made of, against reading each episode from its first row."""
    given: list[tuple[Tensor, Tensor]] = []
    vtrace = returns.vtrace

    def watched(*arguments: Any) -> tuple[Tensor, Tensor]:
        given.append((arguments[3].detach(), arguments[4]))
        return vtrace(*arguments)

    monkeypatch.setattr(returns, "vtrace", watched)
    for kind, backbone in (("lstm", "separate"), ("gtrxl", "shared")):
        env = Recorder(Clock((1.0, 2.0, 3.0), num_envs=6))
        state, message = _second(module, dataclasses.replace(config, memory=kind, backbone=backbone), env)
        if module is impala:
            network = {name: x.clone() for name, x in state.network.state_dict().items()}
            impala.update(state, message)
            state.network.load_state_dict(network)
            value, next_value = given[-1]
        else:
            value, next_value = message.value, message.next_value
        seen, finals, cuts, _ = (torch.stack(column, 1) for column in zip(*env.rows, strict=True))
        limits = 0
        for row in range(6):
            for t in range((row + 1) % 2, config.rollout_steps, 2):
                at = config.rollout_steps + t  # there was a rollout before
                begin = max((s + 1 for s in range(at) if cuts[row, s]), default=0)
                history = [*seen[row, begin : at + 1].unsqueeze(1), finals[row, at][None]]
                carry, values = None, []
                with torch.no_grad():
                    for obs in history:
                        _, output, carry = state.network(obs, carry)
                        values.append(output.value[0])
                torch.testing.assert_close(value[row, t], values[-2], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(next_value[row, t], values[-1], rtol=1e-4, atol=1e-5)
                limits += int(cuts[row, at])
        assert limits > 3


SOFT: dict[str, Any] = {
    "learning_starts": 10**6,
    "batch_size": 24,
    "sequence_length": 4,
    "burn_in": 7,
    "rollout_steps": 5,
}


def _soft(module: Any, **fields: Any) -> tuple[Any, Trajectory]:
    """A State whose replay holds episodes of 9 steps, and sequences from it."""
    task = "Pendulum-v1" if module is sac else "TMazePassive-v0"
    options = {} if module is sac else {"length": 11}
    env = make(task, num_envs=6, time_limit=9, **options)
    state = _apart(module.build(module.Config(**{**SMALL, **SOFT, **fields}), env.spaces))
    for _ in module.train(dataclasses.replace(state.config, steps=360), env, state):
        pass
    return state, module.sample(state)


@sabotaged_by("foresight.nets.sequence.memory.starts", lambda f: lambda cut: torch.zeros_like(f(cut)))
@sabotaged_by("foresight.nets.sequence.memory.Trunk.forward", change("carry", lambda _: None, label="empty_carry"))
@pytest.mark.parametrize("module", [sac, sac_discrete], ids=["sac", "discrete"])
def test_soft_critics_see_every_row_with_the_history_of_its_episode(module: Any) -> None:
    """All learned rows in turn: their features, and their successors', read row by row from where the episode began."""
    for kind, backbone in KINDS:
        state, batch = _soft(module, memory=kind, backbone=backbone)
        config = state.config
        found = encode(state.actor, state.critics, state.target, batch, config.gamma, config.burn_in)
        assert batch.shape == (6, 12)
        trunks = (state.critics.trunk, state.target.trunk, module.policy_trunk(state))
        at = 0
        for row in range(6):
            for t in range(config.burn_in, 11):
                if batch.cut[row, t] * batch.discount[row, t] or not batch.mask[row, t]:
                    continue
                begin = max((s + 1 for s in range(t) if batch.cut[row, s]), default=0)
                history = batch.obs[row, begin : t + 2]
                features = [_one_by_one(trunk, history) for trunk in trunks]
                close = lambda one, other: torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # noqa: E731
                close(found.critics[at], features[0][-2])
                close(found.next_critics[at], features[1][-1])
                close(found.actor[at], features[2][-2])
                close(found.next_actor[at], features[2][-1])
                assert found.reward[at] == batch.reward[row, t]
                at += 1
        assert at == len(found.reward) > 12


@torch.no_grad()
def _one_by_one(trunk: memory.Trunk, history: Tensor) -> list[Tensor]:
    carry, features = None, []
    for obs in history:
        y, carry = trunk(obs[None], carry)
        features.append(y[0])
    return features


@sabotaged_by("foresight.nets.sequence.memory.Trunk.sequence", change("burn_in", lambda x: x - x, label="none"))
@pytest.mark.parametrize("kind", ["gru", "transformer"])
def test_the_gradient_goes_through_the_learned_rows_and_not_further(kind: str) -> None:
    """Nor to another sequence of the batch. The burn-in fills the memory and is taken as given."""
    state, batch = _soft(sac, memory=kind)
    trunk = state.critics.trunk
    obs = batch.obs.clone().requires_grad_()
    no_cut = torch.zeros_like(batch.cut)
    whole = trunk.sequence(obs, no_cut, state.config.burn_in)
    assert whole.shape[:2] == (6, 12 - state.config.burn_in)
    (gradient,) = torch.autograd.grad(whole[2, -1].sum(), obs)
    reached = gradient.abs().sum(-1) > 0
    expected = torch.zeros(6, 12, dtype=torch.bool)
    expected[2, state.config.burn_in :] = True
    assert torch.equal(reached, expected)


@pytest.mark.parametrize("module", [sac, sac_discrete], ids=["sac", "discrete"])
def test_it_trains_on_sequences_with_every_backbone(module: Any) -> None:
    """Each part moves: critics, policy, and the memory that each of them reads with."""
    for kind, backbone in KINDS:
        state, batch = _soft(module, memory=kind, backbone=backbone)
        before = {name: x.clone() for name, x in _trunks(state).items()}
        metrics = module.update(state, batch)
        assert all(torch.tensor(value).isfinite() for value in metrics.values())
        moved = {name for name, x in _trunks(state).items() if not torch.equal(x, before[name])}
        assert moved == set(before), f"{backbone}: only {moved} moved"


def _trunks(state: Any) -> dict[str, Tensor]:
    """The weights of every memory that has some, and of the MLPs."""
    parts = {"critics": state.critics.mlp, "actor": state.actor.mlp, "memory of critics": state.critics.trunk}
    if state.actor.trunk is not None:
        parts["memory of actor"] = state.actor.trunk
    rows = {name: [p.detach().flatten() for p in part.parameters()] for name, part in parts.items()}
    return {name: torch.cat(row) for name, row in rows.items() if row}


@pytest.mark.parametrize("module", [a2c, impala, sac, sac_discrete])
def test_a_memory_that_cannot_be_is_named(module: Any) -> None:
    spaces = make("Pendulum-v1" if module is sac else "CartPole-v1", num_envs=1).spaces
    for fields, text in (
        ({"memory": "gru", "backbone": "sharde"}, "Unknown backbone 'sharde'. Did you mean 'shared'"),
        ({"memory": "lstn"}, "Unknown memory 'lstn'. Did you mean 'lstm'"),
    ):
        with pytest.raises(UserError, match=text):
            module.build(module.Config(**fields), spaces)

"""What must hold of PPO with a memory: the first ratio, values of the true history, episodes that stay apart."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from foresight.algorithms.policy import ppo
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Feedback
from foresight.envs.make import make
from foresight.nets.outputs import Categorical
from foresight.nets.sequence import memory
from foresight.ops import policy
from tests.algorithms.policy.small_envs import Clock
from tests.sabotage import change, loses_generator, sabotaged_by

SMALL = ppo.Config(
    num_envs=6, rollout_steps=32, minibatches=3, hidden=(16,), memory="gru", memory_size=16, memory_heads=2,
    memory_window=10, memory_layers=2,
)  # fmt: skip
blind = change("start", lambda x: torch.zeros_like(x), label="forgets_the_starts")


def _corridor(**options):
    """Episodes of 9 steps, which are cut by a time limit, and of 12, which end: cuts stand all over the segments."""
    return make("TMazePassive-v0", num_envs=6, length=11, **options)


def _second(config: ppo.Config, env) -> tuple[ppo.State, Trajectory, Tensor, object]:
    """A segment that continues an earlier one; the weights are far from where every output is the same."""
    state = ppo.build(config, env.spaces)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in state.network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    _, obs, carry = ppo.rollout(state, env, env.reset(0))
    return state, *ppo.rollout(state, env, obs, carry)


@sabotaged_by("foresight.nets.sequence.memory.MemoryActorCritic.forward", blind)
@sabotaged_by("foresight.nets.sequence.memory.reset_carry", lambda f: lambda carry, cut: carry)
@sabotaged_by("foresight.algorithms.policy.ppo.rollout", lambda f: lambda *a: _without_carry(f(*a)))
@pytest.mark.parametrize("limit", [None, 9])
def test_before_the_first_update_the_ratio_is_one(limit: int | None, monkeypatch: pytest.MonkeyPatch):
    """Of what was acted step by step, and in minibatches of whole sequences."""
    acted: list[Tensor] = []
    sample = Categorical.sample

    def watched(self: Categorical, generator: torch.Generator) -> Tensor:
        acted.append(self.logps)
        return sample(self, generator)

    monkeypatch.setattr(Categorical, "sample", watched)
    for kind in memory.KINDS:
        state, batch, *_ = _second(dataclasses.replace(SMALL, memory=kind), _corridor(time_limit=limit))
        logps = torch.stack(acted[-SMALL.rollout_steps :], 1)
        taken = logps.gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(batch.logprob, taken, rtol=0, atol=1e-5)
        assert batch.cut.sum() >= 12
        for part in batch.minibatches(3, state.shuffler):
            output, _, _ = state.network(part.obs, part.extras["carry"], part.extras["start"])
            ratio = policy.ratio(output.logp(part.action), part.logprob)
            torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)


def _without_carry(result: tuple[Trajectory, Tensor, object]) -> tuple[Trajectory, Tensor, object]:
    batch, obs, carry = result
    return batch.replace(extras={**batch.extras, "carry": None}), obs, carry


class Recorder:
    """Passes everything through and keeps what was seen."""

    def __init__(self, env) -> None:
        self.env, self.spaces, self.num_envs = env, env.spaces, env.num_envs
        self.rows: list[tuple[Tensor, ...]] = []

    def reset(self, seed: int) -> Tensor:
        self._now = self.env.reset(seed)
        return self._now

    def step(self, action: Tensor) -> Feedback:
        feedback = self.env.step(action)
        self.rows.append((self._now, feedback.final_obs, feedback.cut, feedback.mask))
        self._now = feedback.obs
        return feedback


@sabotaged_by("foresight.nets.sequence.memory.MemoryActorCritic.forward", blind)
@sabotaged_by("foresight.nets.sequence.memory.reset_carry", lambda f: lambda carry, cut: carry)
@sabotaged_by("foresight.data.trees.pick", lambda f: lambda tree, rows: f(tree, torch.zeros_like(rows)))
@pytest.mark.parametrize("lost", [False, True])
def test_values_are_of_the_history_of_the_episode(lost: bool):
    """`value` and `next_value` against reading each episode from its first row, final observations too.

    With `lost` in an engine that resets a step late: the row of the reset belongs to no episode.
    """
    for kind, backbone in (("lstm", "separate"), ("gtrxl", "shared")):
        env = Recorder(Clock((1.0, 2.0, 3.0), num_envs=6, lost=lost))
        state, batch, _, _ = _second(dataclasses.replace(SMALL, memory=kind, backbone=backbone), env)
        seen, finals, cuts, masks = (torch.stack(column, 1) for column in zip(*env.rows, strict=True))
        limits = 0
        for row in range(6):
            for t in range(row, SMALL.rollout_steps, 3):
                at = SMALL.rollout_steps + t  # there was a segment before
                if masks[row, at] == 0:
                    continue
                begin = max((s + 1 for s in range(at) if cuts[row, s]), default=0)
                history = [*seen[row, begin : at + 1].unsqueeze(1), finals[row, at][None]]
                *_, value, next_value = _values(state, history)
                torch.testing.assert_close(batch.value[row, t], value, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(batch.next_value[row, t], next_value, rtol=1e-4, atol=1e-5)
                limits += int(cuts[row, at])
        assert limits > 3


@torch.no_grad()
def _values(state: ppo.State, history: list[Tensor]) -> list[Tensor]:
    carry, values = None, []
    for obs in history:
        _, value, carry = state.network(obs, carry)
        values.append(value.value[0])
    return values


@sabotaged_by("foresight.algorithms.policy.ppo.objective", lambda f: lambda s, b, c: f(s, b.replace(mask=None), c))
def test_rows_that_only_reset_are_not_trained_on():
    """Their rewards are garbage (1000)."""
    config = dataclasses.replace(SMALL, steps=4 * 192, minibatches=1, learning_rate=1e-2)
    for _, metrics, _ in ppo.train(config, Clock((1.0, 5.0), num_envs=6, lost=True)):
        assert 0 < metrics["value_loss"] < 1000


@sabotaged_by("copy.deepcopy", loses_generator)
@pytest.mark.parametrize("kind", ["lstm", "gtrxl"])
def test_a_resumed_run_is_the_uninterrupted_one(kind: str):
    """Where the environment is reset with the run: one-step episodes, so the memory is empty at every row."""
    from tests.algorithms.policy.small_envs import choice

    config = dataclasses.replace(SMALL, steps=256, num_envs=8, rollout_steps=8, memory=kind)
    copies = []
    for step, _, state in ppo.train(config, choice()):
        if step == 128:
            copies = [copy.deepcopy(state)]
    *_, (_, _, resumed) = ppo.train(config, choice(), copies[0])
    for a, b in zip(resumed.network.parameters(), state.network.parameters(), strict=True):
        assert torch.equal(a, b)


def test_grids_of_symbols_are_read_with_a_memory():
    """MiniGrid's dict observations (image, direction), in whichever engine is here."""
    pytest.importorskip("minigrid")
    config = dataclasses.replace(SMALL, steps=384, memory="gtrxl", normalize_obs=False)
    env = make("MiniGrid-MemoryS7-v0", num_envs=6)
    *_, (step, metrics, state) = ppo.train(config, env)
    assert step == 384 and metrics["entropy"] > 1
    action, _, carry = ppo.act(state, env.reset(1))
    assert action.shape == (6,) and carry["shared"]["filled"][:, -1].all()
    env.close()

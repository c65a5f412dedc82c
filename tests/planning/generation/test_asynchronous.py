"""Asynchronous rollouts: the windowed FIFO, the bound on staleness, and that what is trained on is what was sampled."""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
from types import ModuleType
from typing import Any

import pytest
import torch

from foresight.algorithms.language import cispo, grpo
from foresight.data.text import TokenBatch
from foresight.envs.text.task import Example, TextTask
from foresight.envs.tools.episode import Reply
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation import asynchronous
from foresight.planning.generation.asynchronous import Window
from foresight.planning.generation.rollout import sample_groups
from foresight.training.options import build_config
from tests import tiny_language
from tests.sabotage import sabotaged_by
from tests.tiny_conversations import conversational, task


def simulated(staleness: int, prompts: int = 4, updates: int = 300, seed: int = 0) -> tuple[list[int], list[int], int]:
    """Groups whose durations differ by 10:1: the staleness of each taken one, their numbers, the window."""
    draw, window = random.Random(seed), Window(prompts, staleness)
    ends: dict[int, float] = {}
    version_of: dict[int, int] = {}
    now, stale, order = 0.0, [], []
    for version in range(updates):
        while (first := window.begin()) is not None:
            for number in range(first, first + prompts):
                ends[number] = now + (10.0 if draw.random() < 0.2 else 1.0) * draw.uniform(0.8, 1.2)
                version_of[number] = version
        while (chosen := window.take()) is None:
            number = min(ends, key=ends.__getitem__)
            now = ends.pop(number)
            window.finished.add(number)
        stale += [version - version_of[number] for number in chosen]
        order += chosen
        now += 0.5
    return stale, order, window.size


def enlarged(name: str) -> Any:
    """Window.__init__ with a larger bound."""
    return lambda real: lambda self, *sizes: (real(self, *sizes), setattr(self, name, 20), None)[2]


@sabotaged_by("foresight.planning.generation.asynchronous.Window.__init__", enlarged("size"), enlarged("ahead"))
def test_no_group_is_older_than_the_bound_and_none_beyond_the_window() -> None:
    for staleness in range(5):
        stale, order, size = simulated(staleness)
        assert max(stale) == staleness  # reached and never exceeded
        taken, head = set[int](), 0
        for number in (one for start in range(0, len(order), 4) for one in order[start : start + 4]):
            assert number < head + size and number not in taken
            taken.add(number)
            while head in taken:
                head += 1
        assert set(range(head)) <= taken and len(order) == 1200 and (order != sorted(order)) == (staleness > 1)


def test_a_window_waits_for_its_head_only_when_the_rest_is_taken() -> None:
    window = Window(2, 2)  # at most 4 groups open, of which 3 in the window
    assert window.begin() == 0 and window.begin() == 2 and window.begin() is None
    window.finished |= {1, 2, 3}
    assert window.take() == [1, 2]  # the slow one is passed by
    assert window.begin() == 4
    window.finished |= {4, 5}
    assert window.take() is None  # 3, 4 and 5 are finished, but beyond the window of 0
    window.finished.add(0)
    assert window.take() == [0, 3] and window.open == 2


class Gate:
    """Two turns. Conversations about "slow" end only when the gate is open."""

    slow = True
    gate = threading.Event()

    def __init__(self, question: str) -> None:
        self.question, self.count, self.letters = question, 0, ""

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]

    def turn(self, text: str) -> Reply:
        self.count, self.letters = self.count + 1, self.letters + text
        if self.question.startswith("slow"):
            assert self.gate.wait(20)
        return Reply({"role": "user", "content": "1"} if self.count < 2 else None)

    def parts(self) -> dict[str, float]:
        return {"outcome": self.letters.count("a") / 4}


def built(module: ModuleType, **fields: Any) -> Any:
    base = {"model": tiny_language.folder(), "precision": "float32", "prompts": 2, "group": 2, "max_new_tokens": 5,
            "learning_rate": 3e-3, "steps": 3}  # fmt: skip
    state = module.build(build_config(module.Config, **{**base, **fields}))
    conversational(state.policy)
    return state


def weights(state: Any) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in state.policy.parameters()]


@pytest.mark.parametrize("module", [grpo, cispo])
@sabotaged_by(
    "foresight.planning.generation.asynchronous.Window.__init__",
    lambda real: lambda self, prompts, staleness: real(self, prompts, staleness + 1),
)
def test_staleness_0_is_synchronous_training_bit_for_bit(module: ModuleType) -> None:
    found = []
    for collects in (False, True):
        state = built(module)
        if collects:
            asynchronous.attach(state, task(), 0)
        steps = [metrics for _, metrics, state in module.train(state.config, task(), state)]
        found.append((weights(state), [step["reward"] for step in steps], state.generator.get_state()))
    assert found[0][1] == found[1][1] and len(set(found[0][1])) > 1
    assert all(torch.equal(one, two) for one, two in zip(found[0][0], found[1][0], strict=True))
    assert torch.equal(found[0][2], found[1][2])


def collected(staleness: int, updates: int = 5) -> tuple[list[TokenBatch], list[LanguageModel], list[dict[str, Any]]]:
    """The batches of a run, the policies of its versions, and its metrics."""
    state = built(grpo, steps=updates, prompts=2)
    asynchronous.attach(state, task(), staleness)
    batches, versions, metrics = [], [], []
    real = grpo.update

    def update(state: Any, batch: TokenBatch, rewards: torch.Tensor) -> dict[str, float]:
        versions.append(copy.deepcopy(state.policy))
        batches.append(batch)
        return real(state, batch, rewards)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(grpo, "update", update)
        metrics = [metrics for _, metrics, _ in grpo.train(state.config, task(), state)]
    return batches, versions, metrics


@sabotaged_by(
    "foresight.planning.generation.dialogue.gather",
    lambda real: (
        lambda rows, group: (
            lambda found: dataclasses.replace(
                found, batch=dataclasses.replace(found.batch, completion=(found.batch.completion + 1) % 30)
            )
        )(real(rows, group))
    ),
)
def test_every_episode_replays_token_by_token_under_the_version_that_wrote_it() -> None:
    batches, versions, metrics = collected(2)
    seen = set()
    for now, batch in enumerate(batches):
        for p, stale in enumerate(batch.staleness.tolist()):
            one = batch.select(torch.tensor([p]))
            with torch.no_grad():
                again = versions[now - stale].logprob(one, 1.0)[0]
            torch.testing.assert_close(again[one.mask], one.logprob[one.mask], atol=1e-4, rtol=1e-3)
            seen.add(stale)
    assert max(seen) in (1, 2) and 0 in seen
    assert all(row["max_staleness"] <= 2 and row["in_flight"] <= 4 for row in metrics)
    assert [row["in_flight"] for row in metrics][-1] == 0  # no group is begun that the run does not need


@sabotaged_by("foresight.training.microbatch.behavior", lambda real: lambda batch, device: None)
def test_a_stale_batch_is_corrected_by_the_stored_log_probabilities() -> None:
    """The gradient is that of eq. 3 of GRPO with the ratio to the policy that sampled, before any clip."""
    state = built(grpo, clip_ratio=100.0, max_grad_norm=1e9)
    generator = torch.Generator().manual_seed(0)
    batch = sample_groups(state.policy, task(), 2, 2, 5, 1.0, generator).batch
    with torch.no_grad():
        for weight in state.policy.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    rewards = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    stale = dataclasses.replace(batch, staleness=torch.tensor([1, 0]))
    caught: list[torch.Tensor] = []
    parameters = list(state.policy.parameters())
    state.optimizer.register_step_pre_hook(lambda *_: caught.extend(p.grad.clone() for p in parameters))
    other = copy.deepcopy(state.policy)
    grpo.update(state, stale, rewards)
    logprob = other.logprob(batch, 1.0)[0]
    rho = (logprob - batch.logprob).exp() * batch.mask
    assert (rho[batch.mask] - 1).abs().max() > 0.05
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    (-(rho.sum(-1) / batch.mask.sum(-1) * advantage).mean()).backward()
    for mine, parameter in zip(caught, other.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-5, rtol=1e-3)


def test_a_slow_episode_delays_no_update_until_it_is_the_head() -> None:
    Gate.gate.clear()
    questions = [Example(f"slow {i}" if i == 0 else f"{i}") for i in range(8)]
    what = TextTask("gate", questions, questions, None, episode=lambda one: Gate(str(one.prompt)), turns=9)
    state = built(grpo, steps=6)
    collector = asynchronous.attach(state, what, 4)
    first = (s for s in range(99) if 0 in torch.randperm(8, generator=torch.Generator().manual_seed(s))[:2])
    state.generator.manual_seed(next(first))  # the slow question is drawn in the first round
    steps = grpo.train(state.config, what, state)
    _, one, _ = next(steps)
    _, two, _ = next(steps)
    held = [row for rows in list(collector._rows.values()) for row in rows if row.episode.question == "slow 0"]
    assert not all(row.done for row in held) and held  # two updates were made meanwhile
    Gate.gate.set()
    metrics = [one, two, *(metrics for _, metrics, _ in steps)]
    assert len(metrics) == 6 and 2 <= max(row["max_staleness"] for row in metrics) <= 4


class Broken(Gate):
    """Fails in its second turn."""

    def turn(self, text: str) -> Reply:
        if self.count:
            raise UserError("The environment is gone.")
        return super().turn(text)


def test_an_environment_that_fails_ends_the_run_with_its_own_message() -> None:
    what = dataclasses.replace(task(), episode=lambda one: Broken("1"))
    state = built(grpo)
    collector = asynchronous.attach(state, what, 2)
    with pytest.raises(UserError, match="environment is gone"):
        next(grpo.train(state.config, what, state))
    collector.close()


def test_what_cannot_be_asynchronous_is_refused() -> None:
    state = built(grpo)
    with pytest.raises(UserError, match="from 0 to 16, not -1"):
        asynchronous.attach(state, task(), -1)
    with pytest.raises(UserError, match="has none: choose a task with tools"):
        asynchronous.attach(state, dataclasses.replace(task(), episode=None), 1)
    state.policy.completer = object()
    with pytest.raises(UserError, match="samples in this process"):
        asynchronous.attach(state, task(), 1)

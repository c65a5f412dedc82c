"""DAPO: the asymmetric clip, overlong completions, and dynamic sampling."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from foresight.algorithms.language import dapo
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.ops.advantage import group_scaled, overlong
from foresight.planning.generation import rollout as rollouts
from foresight.planning.generation.rollout import sample_until
from foresight.training.options import build_config
from tests import tiny_conversations, tiny_language
from tests.algorithms.language.group_runs import TOKENS, build, count_a, first_gradients, second_pass
from tests.sabotage import change, flip_sign, returns, sabotaged_by


def objective(logprob, rewards, length, stopped, batch) -> torch.Tensor:
    """arXiv:2503.14476: overlong punishment, scaled advantages, the mean over the tokens of what ended by itself."""
    shaped = rewards - (length - (TOKENS - 4)).clamp(min=0) / 4
    advantage = (shaped - shaped.mean()) / (shaped.std() + 1e-4)
    return (advantage * logprob.sum(1) * stopped).sum() / (batch.length * batch.stopped).sum()


@sabotaged_by("foresight.training.microbatch.split", lambda f: lambda *a: [part[:1] for part in f(*a)])
def test_the_first_gradient_is_that_of_the_papers_objective():
    """At ratio 1, before any clip, through the untouched transformers model."""
    for mine, expected in first_gradients(dapo, objective):
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-4)


@sabotaged_by("foresight.ops.policy.clipped_surrogate", change("clip_high", lambda _: 0.2))
def test_dapo_clips_higher_above_than_below():
    shift = torch.log(torch.tensor([0.7, 0.81, 1.0, 1.19, 1.27, 1.3]))
    up, batch = second_pass(dapo, shift[:6], 1.0)
    learns = (up != 0)[batch.length == 6].all(0)
    assert learns.tolist() == [True, True, True, True, True, False]
    down, batch = second_pass(dapo, shift, -1.0)
    assert (down != 0)[batch.length == 6].all(0).tolist() == [False, True, True, True, True, True]


@sabotaged_by("foresight.ops.advantage.overlong", flip_sign, returns(lambda x: x * 0))
def test_soft_overlong_punishment_as_equation_13_has_it():
    length = torch.tensor([[1, 12, 13, 14, 16, 20]])
    assert overlong(length, 16, 4).tolist() == [[0.0, 0.0, -0.25, -0.5, -1.0, -1.0]]


def whole_length(original):
    return lambda batch: batch.length


@sabotaged_by("foresight.data.text.TokenBatch.longest_turn", whole_length)
def test_a_conversation_is_overlong_where_one_of_its_turns_is(monkeypatch):
    batch = tiny_conversations.converse(tiny_conversations.model(), tiny_conversations.task(), 4, 12).batch
    assert (batch.length > 12).all() and batch.stopped.any() and not batch.stopped.all()
    state, seen = build(dapo, max_new_tokens=12, overlong_buffer=2), []
    monkeypatch.setattr(dapo, "group_scaled", lambda rewards: seen.append(rewards) or group_scaled(rewards))
    dapo.update(state, batch, torch.ones(3, 4))
    assert seen[0].tolist() == batch.stopped.float().tolist()  # only turns that reach the limit are punished


def everything(original):
    return lambda rewards: torch.ones(len(rewards), dtype=torch.bool)


@sabotaged_by("foresight.ops.advantage.differs", everything)
def test_dynamic_sampling_refills_until_the_batch_is_full():
    from foresight.ops.advantage import differs

    state = build(dapo, prompts=6, group=4, max_batches=20)
    task = TextTask("t", [Example(f"{i}?") for i in range(8)], [Example("9?")], count_a)
    rollout, seen = sample_until(differs, state, task)
    assert seen["filled"] == 1 and seen["batches"] > 1
    assert len(rollout.examples) == 6 and len(rollout.answers) == 24
    assert (rollout.rewards.amax(1) > rollout.rewards.amin(1)).all()
    for g, text in enumerate(rollout.answers):  # tokens, text, example and reward still belong together
        p, k = divmod(g, 4)
        row = rollout.batch.completion[p, k, : rollout.batch.length[p, k]].tolist()
        assert state.policy.decode(row) == text
        assert rollout.rewards[p, k] == text.count("a")
        assert rollout.batch.prompts()[p] == state.policy.encode(rollout.examples[p].prompt)


def test_what_asynchronous_sampling_counts_is_of_all_batches(monkeypatch):
    from foresight.ops.advantage import differs

    state = build(dapo, prompts=4, group=4, max_batches=2)
    task = TextTask("t", [Example(f"{i}?") for i in range(8)], [], lambda e, c: [1.0] * len(c))
    counts = iter([
        {"staleness": 1.0, "max_staleness": 3.0, "waiting": 2.0, "in_flight": 5.0, "duration": 4.0},
        {"staleness": 0.0, "max_staleness": 1.0, "waiting": 1.0, "in_flight": 2.0, "duration": 2.0},
    ])  # fmt: skip
    of_one = rollouts.sample
    monkeypatch.setattr(rollouts, "sample", lambda *given: dataclasses.replace(of_one(*given), counts=next(counts)))
    _, seen = sample_until(differs, state, task)
    assert {name: seen[name] for name in ("staleness", "max_staleness", "waiting", "in_flight", "duration")} == {
        "staleness": 0.5, "max_staleness": 3.0, "waiting": 3.0, "in_flight": 2.0, "duration": 3.0,
    }  # fmt: skip


@sabotaged_by("foresight.ops.advantage.differs", lambda f: lambda rewards: ~f(rewards))
def test_dynamic_sampling_has_a_limit_and_reports_how_full_the_batch_is():
    from foresight.ops.advantage import differs

    state = build(dapo, prompts=4, group=4, max_batches=3)
    task = TextTask("t", [Example(f"{i}?") for i in range(8)], [], lambda e, c: [1.0] * len(c))
    rollout, seen = sample_until(differs, state, task)
    assert seen == {"reward": 1.0, "equal_reward_groups": 1.0, "batches": 3.0, "filled": 0.0}
    assert dapo.update(state, rollout.batch, rollout.rewards)["equal_reward_groups"] < 1  # lengths differ
    fields = {"overlong_penalty": 0.0, "overlong_filter": False}
    state.config = build_config(dapo.Config, tiny_language.folder(), precision="float32", **fields)
    assert dapo.update(state, rollout.batch, rollout.rewards)["equal_reward_groups"] == 1


@sabotaged_by("foresight.ops.advantage.differs", everything)
@pytest.mark.parametrize("limit", [1, 3])
def test_equal_groups_are_counted_over_everything_sampled(limit):
    """Both answers to an even number are right: four of eight questions give no gradient."""

    def grade(examples, completions):
        return [max(1.0 - int(one.prompt[0]) % 2, i % 2) for i, one in enumerate(examples)]

    task = TextTask("t", [Example(f"{i}?") for i in range(8)], [], grade)
    config = {"prompts": 8, "group": 2, "max_batches": limit, "overlong_penalty": 0.0, "steps": 1}
    state = build(dapo, **config)
    _, metrics, _ = next(dapo.train(state.config, task, state))
    assert metrics["equal_reward_groups"] == 0.5 and metrics["reward"] == 0.75
    assert metrics["batches"] == min(limit, 2) and metrics["filled"] == 1 and len(metrics["samples"]) == 8


def test_an_overlong_buffer_longer_than_the_limit_is_refused_where_there_is_a_punishment():
    with pytest.raises(UserError, match="overlong_buffer"):
        build(dapo, overlong_buffer=7)
    assert build(dapo, overlong_buffer=7, overlong_penalty=0.0).step == 0

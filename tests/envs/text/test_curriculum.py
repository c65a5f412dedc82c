"""Prompts by learnability: how often each is drawn, what is counted, and that a resumed run continues to count; and
the hardest of several."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from foresight.algorithms.language import cispo, dapo, dr_grpo, grpo, gspo, rloo
from foresight.envs.text import curriculum
from foresight.envs.text.task import Example, TextTask
from foresight.errors import LostError, UserError
from foresight.planning.generation import rollout
from foresight.planning.generation.rollout import draw, sample, sample_until
from foresight.runtime.checkpoints import checkpoint
from tests.algorithms.language.group_runs import build
from tests.sabotage import sabotaged_by

FAMILY = [grpo, dr_grpo, dapo, rloo, cispo, gspo]
TASK = TextTask(
    "parity", [Example(f"{i}?") for i in range(8)], [Example("9?")],
    lambda examples, completions: [float(int(one.prompt[0]) % 2 == 0 or i % 2) for i, one in enumerate(examples)],
)  # fmt: skip  # every completion of an even question is right, and half of those of an odd one


def uniform(original):
    return lambda counts, prompts, generator: torch.randperm(len(counts), generator=generator)[:prompts].tolist()


@sabotaged_by("foresight.envs.text.curriculum.by_learnability", uniform)
@sabotaged_by("foresight.ops.advantage.learnability", lambda f: lambda right, wrong: f(right, 0 * wrong))
def test_examples_are_drawn_in_proportion_to_p_times_1_minus_p():
    counts = torch.tensor([[0.0, 0.0], [3.0, 3.0], [7.0, 0.0], [0.0, 7.0], [4.0, 1.0]])
    rates = torch.tensor([0.5, 0.5, 7.5 / 8, 0.5 / 8, 4.5 / 6])
    generator = torch.Generator().manual_seed(0)
    drawn = [curriculum.by_learnability(counts, 1, generator)[0] for _ in range(4000)]
    share = torch.bincount(torch.tensor(drawn), minlength=5) / 4000
    weight = rates * (1 - rates)
    torch.testing.assert_close(share, weight / weight.sum(), atol=0.025, rtol=0)


def test_it_becomes_uniform_sampling_without_replacement_when_all_rates_are_equal():
    counts, generator = torch.full((6, 2), 4.0), torch.Generator().manual_seed(0)
    drawn = [curriculum.by_learnability(counts, 3, generator) for _ in range(2000)]
    assert all(len(set(one)) == 3 for one in drawn)
    share = torch.bincount(torch.tensor(drawn).flatten(), minlength=6) / 2000
    torch.testing.assert_close(share, torch.full((6,), 0.5), atol=0.05, rtol=0)


def test_earlier_completions_fade_and_unscorable_ones_do_not_count():
    counts = torch.tensor([[4.0, 2.0], [1.0, 1.0], [0.0, 0.0]])
    curriculum.count_(counts, [2, 0], torch.tensor([[1.0, 0.0, math.nan], [0.5, 1.0, 1.0]]))
    assert counts.tolist() == [[4.5, 1.5], [1.0, 1.0], [1.0, 1.0]]


def test_half_known_questions_are_sampled_more_often():
    state = build(grpo, prompts=2, prompt_sampling="learnability")
    sampled = [int(one.prompt[0]) for _ in range(60) for one in sample(state, TASK).examples]
    assert sum(question % 2 for question in sampled) > 0.6 * len(sampled)  # of 120, where uniform sampling gives 60
    counts = state.counts.table
    assert counts[1::2].min(1).values.max() > 0 and counts[::2, 1].max() == 0


@sabotaged_by("foresight.runtime.checkpoints.tree.Decoder.__call__", lambda f: lambda self, node, template, path:
              None if path.endswith("counts") else f(self, node, template, path))  # fmt: skip
@pytest.mark.parametrize("module", FAMILY, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_a_resumed_run_continues_to_count(module, tmp_path):
    fields = {"prompts": 2, "steps": 3, "prompt_sampling": "learnability"}
    state = build(module, **fields)
    run = module.train(state.config, TASK, state)
    next(run)
    fresh = build(module, **fields)
    checkpoint.restore(checkpoint.save(tmp_path, state, 1), fresh)
    (_, whole, _), (_, resumed, _) = next(run), next(module.train(fresh.config, TASK, fresh))
    assert whole["samples"] == resumed["samples"]
    assert torch.equal(state.counts.table, fresh.counts.table) and state.counts.digest == fresh.counts.digest


def test_a_step_that_fails_leaves_the_counts_as_they_were():
    """It is repeated by a resumed run, which counts its completions then."""
    state = build(dapo, prompts=2, prompt_sampling="learnability", max_batches=3)
    answers = iter([0.0, 0.0])  # of two batches: their groups are equal, so that a third is sampled

    def grade(examples, completions):
        if (reward := next(answers, None)) is None:
            raise LostError("The grader is gone.")
        return [reward] * len(completions)

    sample(state, TASK)
    before = state.counts.table.clone()
    with pytest.raises(LostError):
        sample_until(
            lambda rewards: torch.zeros(len(rewards), dtype=torch.bool), state, dataclasses.replace(TASK, grader=grade)
        )
    assert next(answers, None) is None and before.sum() > 0 and torch.equal(state.counts.table, before)


@sabotaged_by("foresight.envs.text.curriculum.counts_of", lambda f: lambda task, counts: counts or f(task, None))
@pytest.mark.parametrize(
    "edited", [TASK.train[::-1], [*TASK.train[:-1], Example("7!")], [*TASK.train[:-1], Example("7?", "odd")]]
)
def test_counts_of_other_questions_begin_again(edited):
    state = build(grpo, prompts=2, prompt_sampling="learnability")
    sample(state, TASK)
    known = state.counts
    sample(state, dataclasses.replace(TASK))
    assert state.counts is known
    sample(state, dataclasses.replace(TASK, train=edited))
    assert state.counts.table.sum() == 2 * state.config.group


def test_rewards_that_are_no_rates_and_a_second_choice_of_prompts_are_refused():
    for reward in (2.0, -1.0):
        with pytest.raises(UserError, match=f"needs rewards from 0 to 1, but one is {reward:g}"):
            curriculum.count_(torch.zeros(2, 2), [0], torch.tensor([[1.0, math.nan, reward]]))
    with pytest.raises(UserError, match="Did you mean 'learnability'"):
        build(grpo, prompt_sampling="learnable")
    state = build(grpo, prompts=2, prompt_sampling="learnability")
    ranked = [Example(f"{i}?", columns={"difficulty": i}) for i in range(8)]
    with pytest.raises(UserError, match="both choose the prompts"):
        sample(state, dataclasses.replace(TASK, train=ranked, curriculum=0.5))
    state.policy.collector = object()
    with pytest.raises(UserError, match="leave out --staleness"):
        sample(state, TASK)


REWARDS = {"1?": 0.0, "4?": 0.5, "6?": math.nan}  # two hard questions, and one whose answers cannot be scored
HARD = dataclasses.replace(TASK, grader=lambda examples, answers: [REWARDS.get(e.prompt, 1.0) for e in examples])


@sabotaged_by(
    "foresight.planning.generation.rollout._hardest", lambda f: lambda state, task: sample(build(grpo, prompts=2), task)
)
@pytest.mark.parametrize("module", FAMILY, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_the_hardest_questions_are_those_with_the_lowest_rewards_of_greedy_answers(module):
    state = build(module, prompts=2, steps=3, prompt_sampling="hardest")
    for _, metrics, _ in module.train(state.config, HARD, state):
        assert {one["prompt"] for one in metrics["samples"]} == {"1?", "4?"}
        assert metrics["greedy_reward"] == pytest.approx(5.5 / 7)


def test_of_more_questions_than_candidates_only_these_are_answered_before(monkeypatch):
    monkeypatch.setattr(rollout, "CANDIDATES", 2)
    graded = list[list[str]]()

    def grade(examples, answers):
        graded.append([one.prompt for one in examples])
        return HARD.grade(examples, answers)

    state = build(grpo, prompts=2, prompt_sampling="hardest")
    for _ in range(12):
        kept = [one.prompt for one in sample(state, dataclasses.replace(HARD, grader=grade)).examples]
        candidates, _ = graded[-2:]
        assert len(candidates) == len(set(candidates)) == 4
        assert kept == sorted((one for one in candidates if one != "6?"), key=lambda one: REWARDS.get(one, 1.0))[:2]
    assert len({tuple(one) for one in graded[::2]}) > 6


def test_the_hardest_questions_need_the_present_policy():
    state = build(grpo, prompts=2, prompt_sampling="hardest")
    state.policy.collector = object()
    with pytest.raises(UserError, match=r"hardest needs the policy .* leave out --staleness"):
        sample(state, HARD)
    with pytest.raises(UserError, match="8 training prompts"):
        sample(build(grpo, prompts=9, prompt_sampling="hardest"), HARD)


def test_the_default_draws_as_before():
    state = build(grpo, prompts=3)
    expected = draw(TASK, 3, torch.Generator().manual_seed(0))
    state.generator.manual_seed(0)
    assert sample(state, TASK).examples == expected and state.counts is None

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from foresight.algorithms.language import dapo, dr_grpo, grpo, gspo, rlhf_ppo, rloo
from foresight.envs.text.task import Example, TextTask
from foresight.envs.tools.episode import Reply
from foresight.errors import LostError, UserError
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation import decoding, dialogue, multi_turn, rollout
from foresight.training import corpus
from tests import tiny_language
from tests.sabotage import sabotaged_by
from tests.tiny_conversations import TEMPLATE, Concurrent, Echo, conversational, converse, model, task, where_they_are


def finished(policy: LanguageModel) -> Any:
    """Conversations long enough that some end by themselves and some are cut."""
    return converse(policy, task(), group=6, tokens=12)


@sabotaged_by("foresight.planning.generation.dialogue.between", lambda real: lambda *a: real(*a)[1:])
def test_the_conversation_is_what_the_template_renders() -> None:
    policy = model()
    what = task()
    found = finished(policy)
    texts = [policy.tokenizer.decode(row[:n]) for row, n in zip(
        found.batch.completion.flatten(0, 1).tolist(), found.batch.length.flatten().tolist(), strict=True)]  # fmt: skip
    assert found.batch.stopped.any() and not found.batch.stopped.all()
    checked = 0
    for row in range(len(texts)):
        episode, conversation = what.episode(what.train[row // 6]), []
        conversation = episode.messages()
        own = found.batch.own.flatten(0, 1)[row].tolist()
        tokens = found.batch.completion.flatten(0, 1)[row].tolist()
        spans, start = [], 0
        while start < found.batch.length.flatten()[row]:  # runs of the model's own tokens are its turns
            end = start
            while end < found.batch.length.flatten()[row] and own[end] == own[start]:
                end += 1
            if own[start]:
                spans.append(policy.decode(tokens[start:end]))
            start = end
        for i, span in enumerate(spans):
            conversation = [*conversation, {"role": "assistant", "content": span}]
            reply = episode.turn(span)
            if i < len(spans) - 1:
                conversation = [*conversation, reply.message]
        whole = policy.tokenizer.apply_chat_template(conversation, tokenize=False)
        found_text = policy.tokenizer.decode(found.batch.prompts()[row // 6]) + texts[row]
        assert whole.removesuffix("<eos>") == found_text.removesuffix("<eos>")
        checked += len(spans) > 1
    assert checked > 2


@sabotaged_by(
    "foresight.planning.generation.dialogue.gather", lambda real: lambda rows, group: _all_own(real(rows, group))
)
@sabotaged_by(
    "foresight.planning.generation.cache_allocator.CacheAllocator.extend",
    lambda real: lambda self, slot, tokens: real(self, slot, tokens[:-1]),
)
def test_what_is_trained_on_is_what_was_sampled() -> None:
    policy = model()
    found = finished(policy)
    with torch.no_grad():
        logprob, _ = policy.logprob(found.batch, 1.0)
    mask = found.batch.mask
    assert (found.batch.own.sum() < found.batch.length.sum()) and mask.sum() == found.batch.own.sum()
    assert torch.allclose(logprob[mask], found.batch.logprob[mask], atol=1e-4)


def _all_own(found: Any) -> Any:
    return dataclasses.replace(found, batch=dataclasses.replace(found.batch, own=torch.ones_like(found.batch.own)))


def test_transcripts_are_logged_message_by_message() -> None:
    policy, what = model(), task()
    generator = torch.Generator().manual_seed(1)
    found = rollout.sample_groups(policy, what, 3, 2, 12, 1.0, generator)
    both = rollout.concat([found.select(torch.tensor([2])), found.select(torch.tensor([0, 1]))])
    assert both.transcripts == found.transcripts[4:] + found.transcripts[:4]
    sample = found.metrics()["samples"][1]
    assert sample["transcript"] == found.transcripts[2] and sample["parts"]["outcome"] == pytest.approx(
        sample["reward"]
    )
    opening, *rest = sample["transcript"]
    assert opening == {"role": "user", "content": sample["prompt"]}
    own = [message for message in rest if message["role"] == "assistant"]
    assert len(own) == sample["parts"]["turns"]
    assert sum(message["tokens"] for message in own) == int(found.batch.own[1, 0].sum())
    assert sum(message["logprob"] for message in own) == pytest.approx(float(found.batch.logprob[1, 0].sum()), abs=1e-4)


def test_tokens_of_the_environment_have_no_gradient() -> None:
    policy = model()
    found = finished(policy)
    state = grpo.build(grpo.Config(model=tiny_language.folder(), group=6))
    rewards = torch.rand(found.batch.length.shape, generator=torch.Generator().manual_seed(0))
    weights = found.batch.scored(rewards).float()
    assert (weights[~found.batch.own] == 0).all()
    first, _, _ = grpo.loss(state, found.batch, rewards, weights, None)
    other = dataclasses.replace(
        found.batch, logprob=torch.where(found.batch.own, found.batch.logprob, torch.tensor(7.0))
    )
    second, _, _ = grpo.loss(state, other, rewards, weights, None)
    assert first == second


@sabotaged_by(
    "foresight.planning.generation.dialogue.gather", lambda real: lambda rows, group: _all_own(real(rows, group))
)
@pytest.mark.parametrize("module", [dr_grpo, dapo, gspo, rloo])
def test_every_variant_trains_on_conversations_and_there_on_what_the_model_wrote(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = module.build(
        module.Config(model=tiny_language.folder(), steps=1, prompts=3, group=4, max_new_tokens=12, learning_rate=0.01)
    )
    conversational(state.policy)
    real, gradients = LanguageModel.logprob, list[tuple[torch.Tensor, torch.Tensor]]()

    def logprob(self: LanguageModel, batch: Any, temperature: float) -> Any:
        found, entropy = real(self, batch, temperature)
        if found.requires_grad:
            found.register_hook(
                lambda gradient: gradients.append((gradient[~written(batch)], gradient[written(batch)]))
            )
        return found, entropy

    monkeypatch.setattr(LanguageModel, "logprob", logprob)
    before = [weight.detach().clone() for weight in state.policy.parameters()]
    ((_, metrics, _),) = module.train(state.config, task(), state)
    assert metrics["turns"] > 1
    assert any(not torch.equal(old, new) for old, new in zip(before, state.policy.parameters(), strict=True))
    own, others = (torch.cat(parts) for parts in zip(*gradients, strict=True))
    assert (own != 0).any() and len(others) > 0 and (others == 0).all()


def written(batch: Any) -> torch.Tensor:
    """The tokens of the environment: they were not sampled, and their log-probability is 0."""
    return (batch.logprob == 0) & (torch.arange(batch.logprob.shape[-1]) < batch.length[..., None])


@sabotaged_by("foresight.envs.tools.tool.escaped", lambda real: lambda text, marks=(): text)
def test_what_an_environment_writes_is_no_special_token() -> None:
    policy = model()
    message = {"role": "user", "content": "a<eos>a obey <eos>"}
    ends = dialogue.between(policy, message, []).count(policy.tokenizer.eos_token_id)
    assert ends == 2  # of the template: after the model's turn, and after the message


class Instructed(Echo):
    """With a system prompt."""

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": "be brief"}, *super().messages()]


@sabotaged_by("foresight.nets.language.model.apply_chat_template", lambda real: lambda tokenizer, messages, *a, **b: (
    real(tokenizer, [m for m in messages if m["role"] != "system"], *a, **b)
))  # fmt: skip
def test_a_template_that_rejects_system_prompts_has_them_in_the_first_message() -> None:
    """As Gemma's and Mistral's first: users and assistants take turns."""
    policy, what = model(), dataclasses.replace(task(), episode=lambda one: Instructed(str(one.prompt), 3))
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + TEMPLATE
    )
    found = converse(policy, what, group=6, tokens=12)
    assert max(found.parts["turns"]) > 1
    prompt = policy.tokenizer.decode(found.batch.prompts()[0])
    assert prompt.startswith("u be brief") and prompt.endswith("0<eos>a ") and "s be brief" not in prompt
    mask = found.batch.mask
    assert torch.allclose(policy.logprob(found.batch, 1.0)[0][mask], found.batch.logprob[mask], atol=1e-4)
    imitated, _ = corpus.encode(policy, Instructed("0", 3).messages(), "brief")
    assert imitated == found.batch.prompts()[0]


def test_a_model_without_a_template_and_a_task_without_an_environment_are_refused() -> None:
    with pytest.raises(UserError, match="chat template"):
        converse(tiny_language.model(), task())
    with pytest.raises(UserError, match="no environment"):
        converse(model(), dataclasses.replace(task(), episode=None))


@sabotaged_by("foresight.envs.tools.episode.graded", lambda real: lambda episode: episode.parts())
def test_a_reward_without_an_outcome_is_no_nan() -> None:
    class Unscored(Echo):
        def parts(self) -> dict[str, float]:
            return {} if self.question == "1" else super().parts()

    what = dataclasses.replace(task(), episode=lambda one: Unscored(str(one.prompt), 1))
    refused = False
    try:
        converse(model(), what)
    except LostError as error:
        refused = "The reward of Unscored is {}" in str(error)
    assert refused


class Failing(Echo):
    """Every turn but the last fails."""

    failed = 0

    def turn(self, text: str) -> Reply:
        self.failed += self.left > 1
        return super().turn(text)


def weighed(completer: Any = None) -> rollout.TextRollout:
    policy, weights = model(), {"outcome": 2.0, "process": -0.1, "time": -0.01}
    policy.completer = completer and completer(policy)
    what = dataclasses.replace(task(), episode=lambda one: Failing(str(one.prompt), 3), weights=weights)
    return rollout.sample_groups(policy, what, 3, 2, 12, 1.0, torch.Generator().manual_seed(1))


@sabotaged_by("foresight.planning.generation.rollout.of_dialogues", lambda real: lambda task, *rest: (
    real(dataclasses.replace(task, weights={**task.weights, "process": 0.5}), *rest)
))  # fmt: skip
def test_a_composite_reward_is_a_weighted_sum_of_outcome_process_and_time() -> None:
    found = weighed()
    parts = found.measures
    assert torch.equal(parts["reward_outcome"], parts["outcome"])
    assert torch.equal(parts["reward_process"], parts["turns"] - 1) and parts["turns"].max() == 3
    rewards = 2 * parts["outcome"] - 0.1 * parts["reward_process"] - 0.01 * parts["reward_time"]
    assert torch.allclose(found.rewards, rewards) and "reward_process" in found.metrics()


@pytest.mark.parametrize("completer", [None, lambda policy: functools.partial(decoding.generate, policy), Concurrent])
def test_the_time_of_an_episode_begins_with_its_first_turn(completer: Any) -> None:
    found = weighed(completer)
    seconds = torch.tensor([sum(second for _, second in turns) for turns in found.turns])
    assert torch.allclose(found.measures["reward_time"].flatten(), seconds)
    assert all(second > 0 for turns in found.turns for _, second in turns)


def test_several_tasks_may_have_composite_rewards_of_their_own() -> None:
    rows = [Example(str(i), columns={"task": "ab"[i % 2], "weights": [{"process": -1.0}, {}][i % 2]}) for i in range(4)]
    what = dataclasses.replace(task(), train=rows, episode=lambda one: Failing(str(one.prompt), 3))
    found = rollout.sample_groups(model(), what, 4, 2, 12, 1.0, torch.Generator().manual_seed(1))
    for p, example in enumerate(found.examples):
        own = -found.measures["reward_process"][p] if example.columns["weights"] else found.measures["outcome"][p]
        assert torch.equal(found.rewards[p], own)


def outcome(policy: LanguageModel, what: TextTask) -> float:
    found = multi_turn.converse(policy, what, what.test, 8, 6, 1.0, torch.Generator().manual_seed(3))
    return sum(found.parts["outcome"]) / len(found.parts["outcome"])


def test_grpo_improves_on_conversations() -> None:
    config = grpo.Config(
        model=tiny_language.folder(), steps=25, prompts=4, group=8, max_new_tokens=6, learning_rate=0.01
    )
    state = grpo.build(config)
    conversational(state.policy)
    what = task(turns=2)
    before = outcome(state.policy, what)
    for _, metrics, _ in grpo.train(config, what, state):
        assert metrics["turns"] <= 2
    assert outcome(state.policy, what) > before + 0.3


class First(Echo):
    """Rewards the vowels of the first turn alone."""

    def parts(self) -> dict[str, float]:
        self.texts = self.texts[:1]
        return super().parts()


@sabotaged_by("foresight.data.text.TokenBatch.steps", where_they_are)
def test_ppo_credits_the_first_turn_with_a_reward_at_the_end() -> None:
    config = rlhf_ppo.Config(
        model=tiny_language.folder(), steps=12, prompts=8, group=4, minibatches=2, max_new_tokens=4, gae_lambda=1.0,
        kl_coef=0.0, learning_rate=0.01, value_learning_rate=0.01,
    )  # fmt: skip
    state = rlhf_ppo.build(config)
    conversational(state.policy)
    what = dataclasses.replace(task(), episode=lambda one: First(str(one.prompt), 2))
    before = outcome(state.policy, what)
    for _ in rlhf_ppo.train(config, what, state):
        pass
    assert outcome(state.policy, what) > before + 0.3

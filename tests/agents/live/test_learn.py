from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch

from foresight.agents.live import learn
from foresight.agents.live.settings import Config
from foresight.agents.live.store import Turn
from foresight.envs.text.task import Example
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.ops import kl
from foresight.planning.generation.decoding import generate
from foresight.training import language
from foresight.training.options import Tuning
from tests import tiny_language
from tests.sabotage import flip_sign, sabotaged_by

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


@functools.cache
def base() -> LanguageModel:
    """A tiny model with a chat template."""
    policy = tiny_language.model()
    policy.tokenizer.chat_template = TEMPLATE
    return policy


def built(**settings: Any) -> tuple[LanguageModel, LanguageModel, torch.optim.Optimizer, Config]:
    tuning = Tuning(precision="float32")
    config = Config(
        **{"model": tiny_language.folder(), "learning_rate": 0.001, "kl_bound": 9.0, "tuning": tuning, **settings}
    )
    policy = copy.deepcopy(base())
    return policy, base(), language.adamw(policy, config.learning_rate, tuning), config


@functools.cache
def samples() -> list[Turn]:
    """Turns of the model."""
    policy, found = base(), []
    for number in range(6):
        messages = [{"role": "user", "content": f"say {number}"}]
        prompt = policy.encode(messages)
        batch = generate(policy, [prompt], 1, 8, 1.0, torch.Generator().manual_seed(number))
        n = int(batch.length[0, 0])
        tokens, logprob = batch.completion[0, 0, :n].tolist(), batch.logprob[0, 0, :n].tolist()
        found.append(Turn("s", 0, messages, policy.decode(tokens), prompt, tokens, logprob, id=number + 1))
    return found


def sampled(count: int = 6, **changes: Any) -> list[Turn]:
    return [dataclasses.replace(turn, **changes) for turn in samples()[:count]]


def logprob(policy: LanguageModel, turns: list[Turn]) -> float:
    with torch.no_grad():
        return sum(policy.logprob(learn._batch(turn), 1.0)[0].sum().item() for turn in turns)


@sabotaged_by("foresight.agents.live.learn.advantage", flip_sign)
@pytest.mark.parametrize("score", [1.0, -1.0])
def test_a_score_moves_the_probability_of_its_turn(score: float) -> None:
    policy, reference, optimizer, config = built(mode="evaluative", kl_coef=0.0)
    turns = sampled(score=score)
    before = logprob(policy, turns)
    metrics = learn.update(policy, reference, optimizer, turns, config)
    assert (logprob(policy, turns) - before) * score > 0
    assert metrics["score"] == score and metrics["turns"] == 6 and metrics["rejected"] == 0 and metrics["kl"] > 0


def test_the_first_step_has_ratio_1_and_the_gradient_of_reinforce() -> None:
    policy, reference, optimizer, config = built(mode="evaluative", kl_coef=0.0, learning_rate=0.0)
    scores = (1, -1, 0.5, 1, -1, -0.5)
    turns = [dataclasses.replace(turn, score=score) for turn, score in zip(sampled(), scores, strict=True)]
    metrics = learn.update(policy, reference, optimizer, turns, config)
    gradient = [w.grad.clone() for group in optimizer.param_groups for w in group["params"]]
    assert metrics["loss"] == pytest.approx(-sum(t.score or 0 for t in turns) / 6, abs=1e-5)
    optimizer.zero_grad()
    loss = sum(-t.score * policy.logprob(learn._batch(t), 1.0)[0].mean() for t in turns) / 6  # type: ignore[operator]
    loss.backward()
    weights = [w for group in optimizer.param_groups for w in group["params"]]
    torch.nn.utils.clip_grad_norm_(weights, config.tuning.max_grad_norm)
    for weight, known in zip(weights, gradient, strict=True):
        torch.testing.assert_close(weight.grad, known, atol=1e-5, rtol=1e-3)


@sabotaged_by("foresight.agents.live.learn._hinted", lambda real: lambda policy, turn, config: learn._batch(turn))
def test_a_hint_moves_the_policy_to_what_it_would_write_with_the_hint() -> None:
    policy, reference, optimizer, config = built(mode="directive", kl_coef=0.0)
    turns = sampled(hint="write more")
    advantages = [learn.advantage(policy, turn, config) for turn in turns]
    teacher = [torch.tensor(turn.logprob) + one for turn, one in zip(turns, advantages, strict=True) if one is not None]
    assert len(teacher) == 6 and any(float(one.abs().max()) > 0.01 for one in advantages if one is not None)

    def distance() -> float:
        with torch.no_grad():
            own = [policy.logprob(learn._batch(turn), 1.0)[0][0, 0] for turn in turns]
        return sum(float((a - b).abs().sum()) for a, b in zip(own, teacher, strict=True))

    before = distance()
    for _ in range(3):
        learn.update(policy, reference, optimizer, turns, config)
    assert distance() < before


@sabotaged_by("foresight.agents.live.learn.kl.likeliest", flip_sign)
def test_the_likeliest_tokens_with_the_hint_teach_all_of_them() -> None:
    """With the score's advantage and the sampled ones untouched: the exact KL to the policy with the hint falls."""
    policy, reference, optimizer, config = built(mode="directive", kl_coef=0.0, hint_top_k=3)
    turns = sampled(hint="write more")
    assert all(learn.advantage(policy, turn, config) is None for turn in turns)
    teachers = []
    for turn in turns:
        hinted = learn._hinted(policy, turn, config)
        assert hinted is not None
        teachers.append(learn._next(policy, hinted, 1.0).detach())

    def distance() -> float:
        with torch.no_grad():
            own = [learn._next(policy, learn._batch(turn), 1.0) for turn in turns]
        return sum(float(kl.categorical(a, b).sum()) for a, b in zip(own, teachers, strict=True))

    before = distance()
    metrics = learn.update(policy, reference, optimizer, turns, config)
    assert 0 < distance() < before and metrics["turns"] == 6 and metrics["loss"] > 0
    assert learn._likeliest(policy, turns[0], dataclasses.replace(config, mode="evaluative")) is None


def test_guidance_exaggerates_what_the_hint_changes() -> None:
    policy, *_, config = built(hint_top_k=5)
    turn = sampled(1, hint="write more")[0]
    hinted = learn._hinted(policy, turn, config)
    assert hinted is not None
    with torch.no_grad():
        plain, teacher = (learn._next(policy, batch, 1.0) for batch in (learn._batch(turn), hinted))
    for c in (1.0, 2.5):
        found = learn._likeliest(policy, turn, dataclasses.replace(config, hint_guidance=c))
        assert found is not None
        wanted = (plain.exp() ** (1 - c) * teacher.exp() ** c).log().log_softmax(-1)
        torch.testing.assert_close(found.values, wanted.gather(-1, found.indices), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.values, wanted.topk(5).values, atol=1e-4, rtol=1e-4)


def test_modes_read_their_own_signal_and_both_is_the_sum() -> None:
    policy, *_, config = built()
    turn = sampled(1, score=-1.0, hint="write more")[0]
    scores, hints = (dataclasses.replace(config, mode=mode) for mode in ("evaluative", "directive"))
    both, evaluative, directive = (learn.advantage(policy, turn, one) for one in (config, scores, hints))
    assert both is not None and evaluative is not None and directive is not None
    torch.testing.assert_close(both, evaluative + directive)
    assert (evaluative == -1).all()
    assert learn.advantage(policy, dataclasses.replace(turn, score=None), scores) is None
    assert learn.advantage(policy, dataclasses.replace(turn, hint=""), hints) is None


def test_a_poisoned_user_moves_no_weight_beyond_the_bound() -> None:
    policy, reference, optimizer, config = built(mode="evaluative", learning_rate=0.5, kl_bound=0.05)
    turns = sampled(score=1.0)
    before = [w.detach().clone() for w in policy.parameters()]
    metrics = learn.update(policy, reference, optimizer, turns, config)
    assert metrics["rejected"] == 1 and metrics["kl"] > 0.05
    assert not optimizer.state  # nor does the next step move by this one's moments
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_settings_out_of_range_get_a_sentence() -> None:
    cases = ({"mode": "all"}, "mode must be"), ({"batch": 0}, "batch"), ({"kl_bound": -1.0}, "kl_bound")
    for settings, words in cases:
        with pytest.raises(UserError, match=words):
            Config(**settings)


@sabotaged_by("foresight.agents.live.learn._forward_kl", lambda real: lambda *a: real(*a).detach().requires_grad_())
def test_what_is_rehearsed_stays_nearer_to_the_first_version() -> None:
    """After the same updates, the KL from the first version on its own answers is smaller with the penalty on it."""
    reached = []
    for rehearsal in (0.0, 20.0):
        policy, reference, optimizer, config = built(rehearsal=rehearsal, kl_coef=0.0)
        known = learn.answers(reference, [Example("say 90"), Example("say 91")], 8)
        for _ in range(4):
            metrics = learn.update(policy, reference, optimizer, sampled(3, score=1.0), config, known)
        reached.append(sum(learn._forward_kl(policy, reference, turn).item() for turn in known))
        assert metrics["turns"] == 3 and not metrics["rejected"]
    assert 0 < reached[1] < 0.7 * reached[0]

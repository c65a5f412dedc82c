"""Verifiers: what a reward model and a critic read, and the area under the curve."""

from __future__ import annotations

import math
import re
from itertools import chain

import pytest
import torch

from foresight.envs.text.make import make
from foresight.errors import UserError
from foresight.nets.language import mtp, pretrained
from foresight.nets.language.tokentree import TokenTree
from foresight.planning.reasoning import verifiers
from tests import tiny_language
from tests.sabotage import change, flip_sign, sabotaged_by

EXAMPLES = make("addition", held_out=6).test
TEXTS = ["7", "19", "3 + 4", "1", "", "12"]


def _scorer():
    return pretrained.load_scorer(
        tiny_language.folder(), precision="float32", generator=torch.Generator().manual_seed(0)
    )


def _probability(scorer, example, text, after=()):
    """σ of the score at the last token of a text, computed alone."""
    trunk = scorer.trunk
    ids = [*trunk.encode(example.prompt), *trunk.tokenizer.encode(text, add_special_tokens=False), *after]
    with torch.no_grad():
        return torch.sigmoid(trunk.states(TokenTree([ids]))[-1] @ scorer.head.weight[0]).item()


def without_the_end(original):
    return lambda *args: (original(*args)[0], original(*args)[1][:-1] or [1])


@sabotaged_by("foresight.nets.language.scorer.Scorer.steps", flip_sign)
@sabotaged_by("foresight.nets.language.completion.encode", without_the_end)
def test_a_reward_model_of_answers_is_read_at_the_end_token_as_it_was_trained():
    scorer = _scorer()
    found = verifiers.reward_model(scorer)(EXAMPLES, TEXTS)
    end = scorer.trunk.stop_ids[:1]
    expected = [_probability(scorer, e, t, end) for e, t in zip(EXAMPLES, TEXTS, strict=True)]
    assert found == pytest.approx(expected, abs=1e-5)


def only_the_last(original):
    return lambda *args: original(*args)[-1:]


def with_the_line_breaks(original):
    return lambda text, *rest: [end + (end < len(text)) for end in original(text, *rest)]


def flip_sign_of_the_first(original):
    return lambda self, batch: (-original(self, batch)[0], None)


@sabotaged_by("foresight.planning.reasoning.verifiers.ends", only_the_last, with_the_line_breaks)
def test_a_reward_model_of_steps_is_read_at_the_end_of_each_line():
    scorer = _scorer()
    scorer.of_steps = True
    texts = ["3 + 4\n7\n12", "1\n", "7\n1\n19\n", "", "4\n\n4", "12"]
    lines = [["3 + 4", "3 + 4\n7", "3 + 4\n7\n12"], ["1"], ["7", "7\n1", "7\n1\n19"], [], ["4", "4\n\n4"], ["12"]]
    each = [[_probability(scorer, e, t) for t in few] for e, few in zip(EXAMPLES, lines, strict=True)]
    for name, combine in (("min", min), ("prod", math.prod), ("last", lambda row: row[-1])):
        expected = [combine(row) if row else 0.5 for row in each]
        assert verifiers.reward_model(scorer, name)(EXAMPLES, texts) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UserError, match="Unknown aggregate 'mean'"):
        verifiers.reward_model(scorer, "mean")


@sabotaged_by("foresight.planning.reasoning.verifiers.ends", only_the_last)
@sabotaged_by("foresight.nets.language.model.LanguageModel.logprob", flip_sign_of_the_first)
def test_a_likelihood_is_that_of_the_tokens_of_each_line():
    model = tiny_language.model()
    texts = ["3 + 4\n7\n12", "1", "7\n1\n19", "", "4\n4", "12"]
    each = []
    for example, text in zip(EXAMPLES, texts, strict=True):
        prompt = model.encode(example.prompt)
        ids = model.tokenizer.encode(text, add_special_tokens=False)
        with torch.no_grad():
            logits = model.logits(model.states(TokenTree([[*prompt, *ids]])))
        found, line = list[float](), 1.0
        for place, token in enumerate(ids):
            line *= logits[len(prompt) + place - 1].softmax(-1)[token].item()
            if len(model.decode(ids[: place + 1])) in [match.end() for match in re.finditer(r"[^\n]+", text)]:
                found.append(line)
                line = 1.0
        each.append(found)
    for name, combine in (("min", min), ("prod", math.prod), ("last", lambda row: row[-1])):
        expected = [combine(row) if row else 0.5 for row in each]
        assert verifiers.likelihood(model, name)(EXAMPLES, texts) == pytest.approx(expected, rel=1e-3)
    with pytest.raises(UserError, match="Unknown aggregate 'mean'"):
        verifiers.likelihood(model, "mean")


@sabotaged_by("foresight.planning.reasoning.verifiers._batch", change("after", lambda ids: ()))
def test_a_critic_values_the_state_after_each_text():
    policy = tiny_language.model()
    torch.manual_seed(0)
    heads = mtp.heads_for(policy, 1)

    def value(example, text):
        ids = [*policy.encode(example.prompt), *policy.tokenizer.encode(text, add_special_tokens=False)]
        with torch.no_grad():
            return heads.values(policy.states(TokenTree([ids]))[-1][None, None])[0, 0].item()

    with torch.no_grad():
        heads.value_weight.uniform_(-1, 1)
        heads.value_weight *= 0.5 / value(EXAMPLES[0], TEXTS[0])  # so that few values are clamped
    expected = [min(max(value(e, t), 0.0), 1.0) for e, t in zip(EXAMPLES, TEXTS, strict=True)]
    assert verifiers.critic(policy, heads)(EXAMPLES, TEXTS) == pytest.approx(expected, abs=1e-4)
    assert expected[0] == pytest.approx(0.5) and len(set(expected)) > 2


@sabotaged_by("foresight.planning.reasoning.verifiers.auc", lambda f: lambda scores, right: 1 - f(scores, right))
def test_the_area_counts_pairs():
    scores, right = [0.1, 0.4, 0.4, 0.9, 0.2], [0, 1, 0, 1, 1]
    pairs = [(a > b) + 0.5 * (a == b) for a, r in zip(scores, right, strict=True) if r
             for b, s in zip(scores, right, strict=True) if not s]  # fmt: skip
    assert verifiers.auc(scores, right) == pytest.approx(sum(pairs) / len(pairs))
    assert math.isnan(verifiers.auc([0.1], [1]))


def test_a_task_without_rules_has_no_exact_verifier():
    with pytest.raises(UserError, match="has no exact verifier"):
        verifiers.exact(make("addition"))


def pooled(original):
    return lambda scores, right: verifiers.auc([*chain(*scores)], [*chain(*right)])


@sabotaged_by("foresight.planning.reasoning.verifiers.auc_within", pooled)
def test_what_is_easy_to_tell_between_questions_does_not_count_within_them():
    easy_and_hard = [[0.9, 0.8], [0.3, 0.2], [0.5, 0.5]]
    assert verifiers.auc_within(easy_and_hard, [[1, 1], [0, 1], [0, 0]]) == 0.0
    assert verifiers.auc_within(easy_and_hard, [[1, 0], [0, 1], [0, 0]]) == 0.5

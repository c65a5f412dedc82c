"""DPO: the paper's equation, and settings that are refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from foresight.algorithms.language import dpo
from foresight.envs.text.task import TextTask
from foresight.errors import UserError
from foresight.runtime import legacy
from foresight.runtime.checkpoints import checkpoint
from tests.algorithms.language.supervised_runs import PAIRS, build, gradient, row_logprob, same_gradients
from tests.algorithms.states import weights
from tests.sabotage import flip_sign, returns, sabotaged_by, scaled


def nll_of_both(original):
    """The term on the rejected answer as well."""

    def mutant(state, batch, pairs, *rest):
        value, sums = original(state, batch, pairs, *rest)
        rejected = state.policy.logprob(batch)[0].sum(-1)[:, 1] / batch.length[:, 1]
        return value - state.config.nll_coef * rejected.sum() / pairs, sums

    return mutant


@sabotaged_by("foresight.ops.preference.sigmoid", flip_sign, scaled(0.5))
@pytest.mark.parametrize("length_normalized", [False, True])
def test_dpo_is_the_papers_equation_7(length_normalized):
    state = build(dpo, beta=0.3, length_normalized=length_normalized, micro_tokens=20)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in state.policy.parameters():
            weight.mul_(1 + 0.1 * torch.randn_like(weight))
    rows, model = dpo._corpus(state, PAIRS), copy.deepcopy(state.policy)
    caught, metrics = gradient(dpo, state, rows.batch(range(6)))
    total, right = torch.zeros(()), 0
    for prompt, answers in zip(rows.prompts, rows.completions, strict=True):
        odds = []
        for answer in answers:
            with torch.no_grad():
                reference = row_logprob(state.reference, prompt, answer)
            difference = row_logprob(model, prompt, answer) - reference
            odds.append(difference.mean() if length_normalized else difference.sum())
        total = total - torch.nn.functional.logsigmoid(0.3 * (odds[0] - odds[1])) / 6
        right += int(odds[0] > odds[1])
    total.backward()
    assert math.isclose(metrics["loss"], total.item(), rel_tol=1e-5)
    assert math.isclose(metrics["accuracy"], right / 6, rel_tol=1e-6)
    same_gradients(caught, model.parameters())


@sabotaged_by("foresight.algorithms.language.dpo.loss", nll_of_both)
def test_the_nll_of_the_chosen_answer_is_added_per_token():
    """RPO, arXiv:2404.19733, eq. 2; with equal policy and reference DPO's own gradient and this one add up."""
    state, plain = build(dpo, beta=0.3, nll_coef=0.7), build(dpo, beta=0.3)
    rows = dpo._corpus(state, PAIRS)
    batch, model = rows.batch(range(6)), copy.deepcopy(state.policy)
    both, without = gradient(dpo, state, batch)[0], gradient(dpo, plain, batch)[0]
    nll = -sum(
        row_logprob(model, p, answers[0]).mean() for p, answers in zip(rows.prompts, rows.completions, strict=True)
    )
    (0.7 * nll / 6).backward()
    for a, b, weight in zip(both, without, model.parameters(), strict=True):
        torch.testing.assert_close(a - b, weight.grad, atol=1e-6, rtol=1e-4)


@sabotaged_by("foresight.ops.preference.robust", returns(lambda x: 2 * x))
def test_the_first_gradient_of_the_robust_loss_is_larger_by_the_labels_that_are_wrong():
    """At D = 0 it is DPO's over 1 - 2ε, and that of smoothed labels is DPO's times 1 - 2ε."""
    gradients = []
    for fields in ({}, {"loss": "robust", "label_smoothing": 0.2}, {"label_smoothing": 0.2}):
        state = build(dpo, beta=0.3, **fields)
        gradients.append(gradient(dpo, state, dpo._corpus(state, PAIRS).batch(range(6)))[0])
    for plain, robust, smoothed in zip(*gradients, strict=True):
        torch.testing.assert_close(robust, plain / 0.6, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(smoothed, plain * 0.6, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("loss", "smoothing"), [("ipo", 0.1), ("hinge", 0.1), ("sigmoid", 0.5), ("sigmoid", -0.1)])
def test_smoothing_is_of_dpo_and_less_than_a_half(loss, smoothing):
    with pytest.raises(UserError, match="label_smoothing"):
        build(dpo, loss=loss, label_smoothing=smoothing)


def test_a_beta_of_nothing_is_refused():
    with pytest.raises(UserError, match="beta is 0"):
        build(dpo, loss="ipo", beta=0.0)


def test_an_unknown_loss_names_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'sigmoid'"):
        build(dpo, loss="sigmoidal")


def _refuse(*_):
    raise AssertionError("log π_ref was computed again")


@sabotaged_by("foresight.algorithms.language.dpo.precomputed", returns(lambda x: x.flip(1)))
def test_log_probabilities_of_the_reference_are_computed_once(tmp_path):
    """The losses and weights are those without; a resumed run has them from its checkpoint."""
    task = TextTask("pairs", PAIRS, PAIRS, lambda *_: [])
    runs = []
    for precompute in (False, True):
        state = build(dpo, precompute_reference=precompute, batch_size=4, micro_tokens=20, learning_rate=1e-3, steps=3)
        runs.append([metrics["loss"] for _, metrics, state in dpo.train(state.config, task, state)])
    torch.testing.assert_close(runs[0], runs[1], atol=1e-6, rtol=1e-6)
    assert len(set(runs[0])) == 3
    assert state.reference_logprob is not None and len(state.reference_logprob) == len(PAIRS)

    state = build(dpo, precompute_reference=True, batch_size=4, micro_tokens=20, learning_rate=1e-3, steps=3)
    next(dpo.train(state.config, task, state))
    fresh = dpo.build(state.config)
    checkpoint.restore(checkpoint.save(tmp_path, state, state.step), fresh)
    ends = []
    for resumed in (state, fresh):
        resumed.reference.logprob = _refuse
        ends.append([m["loss"] for _, m, _ in dpo.train(state.config, task, resumed)])
    assert ends[0] == ends[1] and torch.equal(weights(state), weights(fresh))


@sabotaged_by("foresight.training.corpus.Corpus.digest", lambda _: lambda rows: "the same")
@pytest.mark.parametrize("changed", [PAIRS[::-1], PAIRS[1:]], ids=["order", "count"])
def test_rows_that_changed_before_a_resume_have_their_own_reference(tmp_path, changed):
    """The losses are those without `precompute_reference`."""
    task, ends = TextTask("pairs", PAIRS, PAIRS, lambda *_: []), []
    for precompute in (False, True):
        state = build(dpo, precompute_reference=precompute, batch_size=4, micro_tokens=20, learning_rate=1e-3, steps=3)
        next(dpo.train(state.config, task, state))
        resumed = dpo.build(state.config)
        checkpoint.restore(checkpoint.save(tmp_path / str(precompute), state, state.step), resumed)
        other = TextTask("pairs", changed, PAIRS, lambda *_: [])
        ends.append([m["loss"] for _, m, _ in dpo.train(state.config, other, resumed)])
    torch.testing.assert_close(ends[0], ends[1], atol=1e-6, rtol=1e-6)
    assert resumed.reference_logprob is not None and len(resumed.reference_logprob) == len(changed)


def test_a_checkpoint_from_before_the_digest_loads():
    """Its rows are unknown, so that their reference is computed again."""
    found = legacy.state_fields(dpo.State, {"reference_logprob": torch.zeros(6, 2)})
    assert found["reference_rows"] is None and len(found["reference_logprob"]) == 6

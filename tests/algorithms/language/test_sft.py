"""SFT: the mean over the tokens of completions, packed rows, and epochs."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from foresight.algorithms.language import sft
from foresight.envs.text.task import Example
from foresight.errors import UserError
from foresight.training import corpus
from tests import tiny_language
from tests.algorithms.language.supervised_runs import SHOWN, build, gradient, row_logprob, same_gradients
from tests.sabotage import change, sabotaged_by, scaled


@sabotaged_by("foresight.ops.aggregate.per_token", scaled(0.5))
@sabotaged_by("foresight.nets.language.tokentree.TokenTree.attend", change("scale", lambda s: 0.5 * s))
@pytest.mark.parametrize("micro_tokens", [1, 10_000])
def test_sft_is_the_mean_over_the_tokens_of_completions(micro_tokens):
    state = build(sft, micro_tokens=micro_tokens)
    rows = sft._corpus(state, SHOWN)
    model = copy.deepcopy(state.policy)
    caught, metrics = gradient(sft, state, rows.batch(range(6)))
    logprob = torch.cat([row_logprob(model, p, c[0]) for p, c in zip(rows.prompts, rows.completions, strict=True)])
    (-logprob.mean()).backward()
    assert math.isclose(metrics["loss"], -logprob.mean().item(), rel_tol=1e-5)
    same_gradients(caught, model.parameters())


@sabotaged_by("foresight.nets.language.tokentree.TokenTree.attend", change("scale", lambda s: 0.5 * s))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_packed_rows_equal_separate_rows(precision):
    """Rows of different lengths are packed into one.

    Wrong: attention across rows, or positions that continue from one row to the next (TRL 6800).
    Invariant: log π(y_t | x, y_<t) in a packed row = that in the row alone.
    """
    state = build(sft, precision=precision)
    rows = sft._corpus(state, SHOWN)
    batch = rows.batch([0, 3, 5, 1])
    packed, entropy = state.policy.logprob(batch)
    tolerance = 1e-5 if precision == "float32" else 0.2
    for k, i in enumerate((0, 3, 5, 1)):
        alone = row_logprob(state.policy, rows.prompts[i], rows.completions[i][0])
        torch.testing.assert_close(packed[k, 0, : len(alone)], alone, atol=tolerance, rtol=0)
        assert (packed[k, 0, len(alone) :] == 0).all() and (entropy[k, 0, len(alone) :] == 0).all()


def test_a_prompt_of_no_tokens_is_refused():
    """The first token of its answer would be predicted from another row of the batch."""
    rows = [Example([{"role": "user", "content": said}], columns={"completion": "3"}) for said in ("1+1?", "")]
    with pytest.raises(UserError, match="The prompt has no tokens"):
        corpus.demonstrations(tiny_language.model(), rows, 64, all_turns=False)


@sabotaged_by("foresight.training.corpus.corpus", change("max_tokens", lambda n: 64))
def test_rows_that_are_too_long_are_left_out_and_counted():
    model = tiny_language.model()
    kept = corpus.corpus(model, SHOWN, lambda e: [e.columns["completion"]], 9)
    assert len(kept) == 3 and kept.left_out == 3
    with pytest.raises(UserError, match="raise max_tokens"):
        corpus.corpus(model, SHOWN, lambda e: [e.columns["completion"]], 2)


@sabotaged_by("torch.randperm", lambda f: lambda n, **_: torch.arange(n))
def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    model = tiny_language.model()
    rows = corpus.corpus(model, SHOWN, lambda e: [e.columns["completion"]], 64)
    drawn = [i for step in range(3) for i in rows.draw(4, step, seed=0)]  # two epochs of six
    assert sorted(drawn[:6]) == sorted(drawn[6:]) == list(range(6))
    assert drawn[:6] != drawn[6:]
    assert rows.draw(4, 1, seed=0) == drawn[4:8]  # whatever was drawn before

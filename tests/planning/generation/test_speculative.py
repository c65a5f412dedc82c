"""Speculative decoding writes what the plain model writes: the same text greedily, the same distribution sampled."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from scipy import stats
from torch import nn

from foresight.errors import UserError
from foresight.nets.language import mtp
from foresight.nets.language.cache import Cache, Level
from foresight.nets.language.mtp import MultiTokenHeads
from foresight.ops.speculation import distribution
from foresight.planning.generation.decoding import generate
from foresight.planning.generation.speculative import Speculation, speculate
from tests import tiny_language
from tests.sabotage import change, sabotaged_by, swap

LENGTH, STOP = 3, 0


class _Words:
    def get_vocab(self):
        return {str(i): i for i in range(4)}


class _Chain(nn.Module):
    """A language model whose next token depends on the last one alone, by a table of logits `[V, V]`."""

    autocast = None
    vocab_size = 4

    def __init__(self, seed: int) -> None:
        super().__init__()
        table = 1.2 * torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        self.embedding, self.head = nn.Embedding.from_pretrained(torch.eye(4)), nn.Linear(4, 4, bias=False)
        self.head.weight.data.copy_(table.T)
        self.tokenizer, self.stop_ids, self.context, self.device = _Words(), [STOP], 99, torch.device("cpu")
        self.module, self.read_at = self, []

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def precision(self):
        return contextlib.nullcontext()

    def logits(self, hidden):
        return self.scaled(self.head(hidden))

    def scaled(self, logits):
        return logits

    def read(self, prompts):
        room = torch.zeros(1, 1, 1, 1)
        return self.embedding(torch.tensor([prompts[0][-1]])), Cache([Level([room], [room])], torch.zeros(1))

    def extend(self, tokens, cache, level, place):
        self.read_at.append(place)
        return self.embedding(tokens)

    def chances(self, first: int, temperature: float) -> dict[tuple[int, ...], float]:
        """Every completion and its probability."""
        p, found = distribution(self.head.weight.T, temperature), {}
        for row in itertools.product(range(4), repeat=LENGTH):
            chance, before = 1.0, first
            for place, token in enumerate(row):
                chance, before = chance * float(p[before, token]), token
                if token == STOP:
                    row = row[: place + 1]
                    break
            found[row] = chance
        return found


def _heads(seed: int = 5) -> MultiTokenHeads:
    torch.manual_seed(seed)
    heads = MultiTokenHeads(4, 4)
    for weight in heads.parameters():
        weight.data.add_(torch.randn(weight.shape))
    return heads


# Drafts of either kind are accepted and replaced by the same lines: each mutant is seen through one of them.
@sabotaged_by("foresight.ops.speculation.residual", lambda f: lambda target, draft: target)
@torch.no_grad()
def test_samples_from_drafts_of_heads_have_the_models_own_distribution():
    """Speculative decoding from multi-token heads or a smaller model.

    Wrong: rejected drafts are replaced by samples of the model's distribution instead of the residual distribution.
    Invariant: accept with min(1, p/q), else sample from (p − q)₊ / Σ (p − q)₊: the result has the distribution p.
    """
    _own_distribution(_heads(), 800)


@sabotaged_by("foresight.ops.speculation.residual", lambda f: lambda target, draft: target)
@pytest.mark.parametrize("kind", ["heads", "model"])
@torch.no_grad()
def test_drafts_of_the_frequent_tokens_alone_leave_the_models_own_distribution(kind):
    found = _own_distribution(_heads() if kind == "heads" else _Chain(1), 500, draft_vocabulary=2)
    assert int(found.batch.completion.max()) == 3  # also tokens that are never drafted


@sabotaged_by("foresight.ops.speculation.accepted", change("uniform", lambda u: 0.5 * u), swap("target", "draft"))
@torch.no_grad()
def test_samples_from_drafts_of_a_model_have_the_models_own_distribution():
    _own_distribution(_Chain(1), 500)


def _own_distribution(draft, rows, **options):
    model, temperature = _Chain(0), 0.8
    off = []
    found = speculate(model, [[2]], draft, rows, LENGTH, temperature, torch.Generator().manual_seed(0), 3, **options)
    chances = model.chances(2, temperature)
    assert abs(sum(chances.values()) - 1) < 1e-5
    counts = dict.fromkeys(chances, 0)
    for i in range(rows):
        row = tuple(found.batch.completion[0, i, : found.batch.length[0, i]].tolist())
        counts[row] += 1
        assert bool(found.batch.stopped[0, i]) == (row[-1] == STOP)
        off.append(abs(float(found.batch.logprob[0, i].sum().exp()) - chances[row]))
    assert max(off) < 1e-5
    many = {row for row, chance in chances.items() if chance * rows >= 5}  # the rest together, or chi-square is none
    observed = [counts[row] for row in many] + [sum(n for row, n in counts.items() if row not in many)]
    expected = [rows * chances[row] for row in many] + [rows * sum(p for row, p in chances.items() if row not in many)]
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-3
    assert 0.1 < found.acceptance < 0.9 and found.tokens_per_pass > 1
    return found


@torch.no_grad()
def test_a_model_that_drafts_for_itself_is_always_right():
    model = _Chain(0)
    found = speculate(model, [[2], [1, 3]], _Chain(0), 20, 9, 1.0, torch.Generator().manual_seed(0), ahead=2)
    assert found.accepted == found.drafted > 0 and found.acceptance == 1
    assert found.batch.completion.shape[:2] == (2, 20)


@sabotaged_by("foresight.ops.speculation.accepted", lambda f: lambda t, d, x, u: f(t, d, x, u) * 0 + x.shape[-1])
@sabotaged_by("foresight.nets.language.cache.Extension.update", lambda f: lambda self, layer, key, value: (key, value))
@pytest.mark.parametrize("kind", ["heads", "model"])
@torch.no_grad()
def test_greedily_it_writes_what_the_model_writes(kind):
    model = tiny_language.model()
    torch.manual_seed(0)
    draft = mtp.heads_for(model, 4) if kind == "heads" else tiny_language.model(1)
    _same_text(model, draft)


@sabotaged_by("foresight.nets.language.cache.Extension.update", lambda f: lambda self, layer, key, value: (key, value))
@torch.no_grad()
def test_a_copy_drafts_what_the_model_writes():
    found = _same_text(tiny_language.model(), tiny_language.model())
    assert found.acceptance > 0.8 and found.tokens_per_pass > 2  # all but what was drafted past the end


@pytest.mark.parametrize("kind", ["heads", "model"])
@torch.no_grad()
def test_all_tokens_may_be_drafted_or_few(kind):
    """Becomes drafts of all tokens with a vocabulary as large as the model's, or larger."""
    model = tiny_language.model()
    torch.manual_seed(0)
    draft = mtp.heads_for(model, 4) if kind == "heads" else tiny_language.model(1)
    prompts = [model.encode(text) for text in ("1+1?", "abc")]

    def found(count: int | None) -> Speculation:
        return speculate(model, prompts, draft, 2, 12, 1.0, torch.Generator().manual_seed(0), 3, count)

    whole, few = found(None), found(5)
    for count in (model.vocab_size, model.vocab_size + 9):
        same = found(count)
        assert torch.equal(same.batch.completion, whole.batch.completion) and same.accepted == whole.accepted
    assert not torch.equal(few.batch.completion, whole.batch.completion)
    _same_text(model, draft, draft_vocabulary=5)


def _same_text(model, draft, **options):
    prompts = [model.encode(text) for text in ("1+1?", "12+3?", "abc")]
    plain = generate(model, prompts, 1, 20, 0.0)
    found = speculate(model, prompts, draft, 1, 20, 0.0, ahead=3, **options)
    assert torch.equal(found.batch.completion, plain.completion)
    assert torch.equal(found.batch.length, plain.length) and torch.equal(found.batch.stopped, plain.stopped)
    torch.testing.assert_close(found.batch.logprob, plain.logprob, atol=1e-4, rtol=1e-4)
    assert found.passes <= int(plain.length.sum())
    return found


@torch.no_grad()
def test_heads_write_no_further_ahead_than_requested():
    model = tiny_language.model()
    torch.manual_seed(0)
    heads, prompts = mtp.heads_for(model, 4), [model.encode(text) for text in ("1+1?", "abc")]
    found = speculate(model, prompts, heads, 1, 20, 0.0, ahead=1)
    assert torch.equal(found.batch.completion, generate(model, prompts, 1, 20, 0.0).completion)
    assert found.drafted == found.passes - len(prompts)  # one a pass, but for the last pass of each row


@torch.no_grad()
def test_sampled_tokens_carry_the_models_log_probabilities():
    model = tiny_language.model()
    prompts = [model.encode(text) for text in ("1+1?", "12+3?")]
    found = speculate(model, prompts, tiny_language.model(1), 3, 12, 0.7, torch.Generator().manual_seed(0))
    expected, _ = model.logprob(found.batch, 0.7)
    torch.testing.assert_close(found.batch.logprob, expected, atol=1e-4, rtol=1e-4)
    again = speculate(model, prompts, tiny_language.model(1), 3, 12, 0.7, torch.Generator().manual_seed(0))
    assert torch.equal(found.batch.completion, again.batch.completion)


def test_what_cannot_be_drafted_is_refused():
    model = tiny_language.model()
    with pytest.raises(UserError, match="nothing to draft with"):
        speculate(model, [[1]], mtp.heads_for(model, 1))
    with pytest.raises(UserError, match="another vocabulary"):
        speculate(model, [[1]], _Chain(0))
    with pytest.raises(UserError, match="draft_vocabulary is 0: it must be at least 1"):
        speculate(model, [[1]], tiny_language.model(1), draft_vocabulary=0)
    with pytest.raises(UserError, match="do not fit into a context of 64"):
        speculate(model, [[1] * 50], tiny_language.model(1), max_new_tokens=12)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "give at least one prompt"),
        ([[]], {}, "at least one token each"),
        ([[1]], {"max_new_tokens": 0}, "at least 1 and temperature at least 0, but they are 1, 0"),
        ([[1]], {"group": 0}, "but they are 0, 16"),
        ([[1]], {"temperature": -1.0}, "but they are 1, 16 and -1.0"),
        ([[1]], {"temperature": float("nan")}, "but they are 1, 16 and nan"),
    ],
)
def test_what_generate_refuses_is_refused(prompts, options, message):
    model = tiny_language.model()
    for complete in (generate, lambda *given, **more: speculate(*given, tiny_language.model(1), **more)):
        with pytest.raises(UserError, match=message):
            complete(model, prompts, **options)

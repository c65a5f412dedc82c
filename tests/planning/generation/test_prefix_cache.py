"""What is kept of a prefix is what reading it again would give."""

from __future__ import annotations

import pytest
import torch

from foresight.envs.text.task import Example, TextTask
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation import decoding
from foresight.planning.generation.prefix_cache import PrefixCache
from foresight.planning.reasoning import methods
from foresight.planning.reasoning.mind import Mind
from tests import architectures, tiny_language
from tests.sabotage import change, sabotaged_by, scaled


def swapped(original):
    """Values for keys. Rows in another order would change nothing: attention is a sum over them."""
    return lambda *given: original(*given)[::-1]


PROMPTS = [[3, 4, 5, 6, 7], [3, 4, 9], [3, 4, 5, 8]]


def _read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens that each prefill reads from now on."""
    read, whole = list[int](), LanguageModel.forward

    def forward(self, tokens, lengths, cache=None):
        read.append(int(lengths.sum()))
        return whole(self, tokens, lengths, cache)

    monkeypatch.setattr(LanguageModel, "forward", forward)
    return read


def _continued(batch, group: int) -> list[list[int]]:
    """Two rows of each prompt, as prefixes for the next request, and a prompt that was never seen."""
    rows = [
        PROMPTS[p] + batch.completion[p, g, : batch.length[p, g]].tolist()
        for p in range(len(PROMPTS))
        for g in {0, group - 1}
    ]
    return [*rows, [3, 4, 11, 12]]


@pytest.mark.parametrize("group", [1, 3])
@sabotaged_by("foresight.planning.generation.prefix_cache.PrefixCache.read", scaled(0.9), swapped)
@sabotaged_by("foresight.planning.generation.prefix_cache.PrefixCache.add", change("row", lambda row: 0))
def test_a_kept_prefix_is_not_read_again_and_changes_nothing(monkeypatch, group):
    """The same uniform numbers give the same tokens, with rows of other slots, lengths and groups in between."""
    model, kept = tiny_language.model(), PrefixCache()
    model.stop_ids = [0, 5, 9]
    read = _read(monkeypatch)
    seeds = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    prompts = PROMPTS
    for turn in range(3):
        several = group if turn < 2 else 1
        fresh, begin = decoding.generate(model, prompts, several, 6, 1.0, seeds[0], slots=4), len(read)
        again = decoding.generate(model, prompts, several, 6, 1.0, seeds[1], slots=4, kept=kept)
        assert torch.equal(fresh.completion, again.completion)
        torch.testing.assert_close(fresh.logprob, again.logprob, atol=1e-5, rtol=0)
        if turn == 1:  # one token of each continued prefix, and what no request has read
            assert sum(read[begin:]) < 0.5 * sum(map(len, prompts))
        prompts = _continued(again, several) if turn == 0 else prompts
    assert kept.used > 0


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4_text"])
def test_keys_and_values_may_have_other_sizes_and_so_may_layers(name):
    model, kept = LanguageModel(architectures.model(name), tiny_language.model().tokenizer), PrefixCache()
    assert model.capabilities.shared
    fresh = decoding.generate(model, PROMPTS, 2, 4, 1.0, torch.Generator().manual_seed(0))
    for _ in range(2):
        again = decoding.generate(model, PROMPTS, 2, 4, 1.0, torch.Generator().manual_seed(0), kept=kept)
        assert torch.equal(fresh.completion, again.completion)
        torch.testing.assert_close(fresh.logprob, again.logprob, atol=1e-5, rtol=0)
    assert kept.used > 0


def test_a_full_cache_keeps_no_more_and_changes_nothing():
    model = tiny_language.model()
    fresh = decoding.generate(model, PROMPTS, 2, 6, 1.0, torch.Generator().manual_seed(0))
    for limit in (0, 3_000):
        kept = PrefixCache(limit)
        for _ in range(2):
            again = decoding.generate(model, PROMPTS, 2, 6, 1.0, torch.Generator().manual_seed(0), kept=kept)
            assert torch.equal(fresh.completion, again.completion)
        assert kept.used <= limit


def test_the_longest_kept_prefix_is_found():
    kept, level = PrefixCache(), decoding.generate(tiny_language.model(), PROMPTS, 1, 2, 0.0)
    assert kept.known([1, 2]) == 0
    decoding.generate(tiny_language.model(), PROMPTS, 1, 4, 0.0, kept=kept)
    whole = PROMPTS[0] + level.completion[0, 0].tolist()
    assert kept.known(whole[:5]) == 5  # the prompt
    assert kept.known([*PROMPTS[0], 40, 41]) == 5
    assert kept.known([3, 4, 40]) == 2  # what all prompts share
    kept.clear()
    assert kept.known(whole) == kept.used == 0


def test_a_search_with_a_cache_finds_the_same_thoughts(monkeypatch):
    examples = [Example("What is 12?"), Example("Say it: ")]
    task = TextTask("words", examples, examples, None, delimiter="a")
    found = []
    for limit in (0, 2**20):
        read = _read(monkeypatch)
        mind = Mind(tiny_language.model(), 16, verifier=lambda _, texts: [len(text) / 100 for text in texts])
        mind.kept = PrefixCache(limit)
        results = methods.run("dvts", mind, task, examples, n=4, width=2, steps=3, step_tokens=5)
        found.append(([result.answer.text for result in results], sum(read)))
        assert mind.kept.used == 0  # nothing stays: the weights may change
    assert found[0][0] == found[1][0]
    assert found[1][1] < 0.7 * found[0][1]

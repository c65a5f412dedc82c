"""Whatever transformers calls a causal language model is computed rightly here, or refused in a sentence."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from foresight.data.text import TokenBatch, pad
from foresight.errors import UserError
from foresight.nets.language import lora
from foresight.nets.language.architecture import Capabilities, context
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation.decoding import generate
from foresight.planning.generation.speculative import speculate
from tests import architectures, tiny_language
from tests.sabotage import change, sabotaged_by

WARNED = pytest.mark.filterwarnings("ignore::UserWarning")  # that it is slower, which a test of its own looks at


def _blind(find):
    """A load that takes every architecture for one that can share."""

    def taken(model, attention):
        found = find(model, attention)
        if not found.shared:
            model.module.set_attn_implementation(attention)
        return Capabilities(True)

    return taken


@WARNED
@sabotaged_by("foresight.nets.language.architecture.find", _blind)
@pytest.mark.parametrize("name", ["diffllama", "lfm2", "gemma2", "gpt_oss", "nemotron"])
def test_what_cannot_share_is_computed_row_by_row(name):
    """Architectures with layers other than attention, or with another kind of attention.

    Wrong: a raw traceback at the first batch or, worse, samples from another distribution without a warning
    (DiffLlama).
    Invariant: log π in sampling and in training = those of transformers' forward pass over each row alone.
    """
    try:
        policy, apart = architectures.tried(name)
    except (AttributeError, TypeError, IndexError, RuntimeError, UserError) as error:
        raise AssertionError(f"it is not computed: {error}") from error
    assert apart < architectures.RIGHT
    assert not policy.capabilities.shared and policy.capabilities.cached


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "granite", "cohere"])
def test_what_can_share_does(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there is nothing to warn of
        policy, apart = architectures.tried(name)
    assert policy.capabilities == Capabilities(True) and apart < architectures.RIGHT


@WARNED
@pytest.mark.parametrize("name", ["bart", "gpt2"])
def test_answers_do_not_depend_on_the_way_in_which_they_are_computed(name):
    """With one generator: over the model's own cache, and from the beginning for every token; few slots and many."""
    tokenizer, prompts = tiny_language.model().tokenizer, [[3, 4, 5, 6], [7, 8, 9], [1, 2, 3]]
    rows = []
    for cached in (False, True):
        policy = LanguageModel(architectures.model(name), tokenizer)
        if cached and name == "bart":  # without an encoder it has no cache
            continue
        policy.module.set_attn_implementation("eager")  # as before it was found that rows can share
        policy.capabilities = Capabilities(False, policy.capabilities.linear, cached)
        for slots in (1, 4, 64):
            rows.append(generate(policy, prompts, 2, 6, 1.0, torch.Generator().manual_seed(0), slots=slots))
    for row in rows[1:]:
        assert torch.equal(row.completion, rows[0].completion)
        torch.testing.assert_close(row.logprob, rows[0].logprob, atol=1e-5, rtol=0)


@WARNED
def test_logits_that_are_no_linear_map_of_features_are_taken_whole():
    policy = LanguageModel(architectures.model("llama"), tiny_language.model().tokenizer)
    policy.module.set_attn_implementation("eager")
    policy.capabilities = Capabilities(False, linear=False)
    known = LanguageModel(architectures.model("llama"), tiny_language.model().tokenizer)
    shape = (1, 2, 3)
    batch = TokenBatch(
        *pad([[3, 4, 5]]), torch.tensor([[[6, 7, 8], [6, 9, 1]]]), torch.tensor([[3, 2]]), torch.zeros(shape),
        torch.ones(1, 2, dtype=torch.bool),
    )  # fmt: skip
    torch.testing.assert_close(policy.logprob(batch)[0], known.logprob(batch)[0], atol=1e-5, rtol=0)


@sabotaged_by("foresight.nets.language.architecture._close", lambda f: lambda pairs: True)
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_model_that_is_not_causal_is_refused(name):
    """A masked language model is passed as a causal one.

    Wrong: log π of a token comes from a position that attended to the token itself.
    Invariant: an error message before anything is sampled.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            LanguageModel(architectures.model(name, is_decoder=False), tiny_language.model().tokenizer)
        except UserError as error:
            assert "is not causal" in str(error)
            return
    raise AssertionError("it was taken")


@WARNED
def test_layers_that_choose_what_they_attend_to_are_computed_row_by_row():
    """MiniMax M3: the few tokens tested at load are one block of keys, which is always chosen."""
    fields = {"layer_types": ["minimax_m3_sparse"] * 4, "index_block_size": 16, "index_topk_blocks": 1}
    module = architectures.model("minimax_m3_vl_text", **fields)
    plain = copy.deepcopy(module)
    policy = LanguageModel(module, tiny_language.model().tokenizer)
    assert not policy.capabilities.shared
    row = [3, 4, 5, 6, 7, 8, 9, 10] * 3
    batch = generate(policy, [row], 2, 4, 1.0, torch.Generator().manual_seed(0))
    right = architectures.expected(plain, batch)
    for found in (batch.model_logprob, policy.logprob(batch)[0].detach()):
        assert (found - right)[batch.mask].abs().max() < architectures.RIGHT


def test_what_is_slower_or_shorter_is_reported():
    tokenizer = tiny_language.model().tokenizer
    with pytest.warns(UserWarning, match="Lfm2ForCausalLM is computed row by row.*but slower"):
        LanguageModel(architectures.model("lfm2"), tokenizer)
    with pytest.warns(UserWarning, match=r"context of MistralForCausalLM is limited to 8 tokens here.*sliding_window"):
        assert LanguageModel(architectures.model("mistral", sliding_window=8), tokenizer).context == 8


@sabotaged_by("foresight.nets.language.architecture.context", change("shared", lambda shared: False))
def test_a_window_bounds_only_what_shares():
    config = architectures.model("mistral", sliding_window=8).config
    assert context(config, shared=True)[0] == 8
    assert context(config, shared=False) == (64, "")


@WARNED
def test_speculation_refuses_what_it_cannot_do():
    policy = LanguageModel(architectures.model("lfm2"), tiny_language.model().tokenizer)
    with pytest.raises(UserError, match="row by row, which speculative decoding does not support"):
        speculate(policy, [[3, 4]], policy)


@WARNED
def test_adapters_learn_on_what_is_computed_row_by_row():
    policy = LanguageModel(architectures.model("lfm2"), tiny_language.model().tokenizer)
    lora.add(policy, 2, (), torch.Generator().manual_seed(0))
    batch = generate(policy, [[3, 4]], 2, 3, 1.0, torch.Generator().manual_seed(0))
    policy.logprob(batch)[0].sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for n, p in policy.named_parameters() if "lora_B" in n)


@WARNED
@pytest.mark.parametrize("name", ["gpt2", "mamba"])
def test_adapters_on_all_layers_that_can_have_them(name):
    policy = LanguageModel(architectures.model(name), tiny_language.model().tokenizer)
    batch = generate(policy, [[3, 4]], 2, 3, 1.0, torch.Generator().manual_seed(0))
    lora.add(policy, 2, (), torch.Generator().manual_seed(0))
    for key, weight in policy.named_parameters():
        if "lora_B" in key:
            weight.data.fill_(0.1)
    logprob = policy.logprob(batch)[0]
    assert (logprob - lora.base(policy).logprob(batch)[0]).abs().max() > 0.01
    merged = LanguageModel(lora.merged(policy.module), policy.tokenizer)
    assert not lora.has(merged.module)
    torch.testing.assert_close(logprob, merged.logprob(batch)[0], atol=1e-4, rtol=0)


@WARNED
def test_layers_that_cannot_be_adapted_are_named(monkeypatch):
    policy = LanguageModel(architectures.model("mamba"), tiny_language.model().tokenizer)
    with pytest.raises(
        UserError, match=r"no adapters to these layers of MambaForCausalLM .*: choose other --lora-targets"
    ):
        lora.add(policy, 2, ("out_proj",))
    monkeypatch.setattr(lora, "_linear", lambda module: ([], False))
    with pytest.raises(UserError, match="MambaForCausalLM has no linear layer for --lora"):
        lora.add(policy, 2)

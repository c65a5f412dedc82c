"""Multi-token heads: what each may see, that the tree equals the definition, and what gradients reach."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from foresight.data.text import TokenBatch, pad
from foresight.nets.language import mtp, pretrained
from foresight.nets.language.mtp import MultiTokenHeads
from foresight.ops.tokens import token_logprob
from tests import tiny_language
from tests.sabotage import change, sabotaged_by, swap

PROMPTS = [[3, 4, 5, 6, 7], [3, 4, 9], [8]]  # the last is shorter than the third head needs


def _batch(group: int = 3, width: int = 4) -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    shape = (len(PROMPTS), group, width)
    completion = torch.randint(1, 5, shape, generator=generator)  # few tokens, so that rows share beginnings
    length = torch.randint(1, width + 1, shape[:2], generator=generator)
    length[:, 0] = width
    prompt, prompt_length = pad(PROMPTS)
    return TokenBatch(prompt, prompt_length, completion, length, torch.zeros(shape), length > 0)


def _heads(model, count: int = 3, seed: int = 0) -> MultiTokenHeads:
    torch.manual_seed(seed)
    heads = mtp.heads_for(model, count)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.add_(0.3 * torch.randn(weight.shape))
    return heads


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean() + 1e-5).sqrt()


def _slowly(heads: MultiTokenHeads, hidden: torch.Tensor, embedded: torch.Tensor, n: int, head: int) -> torch.Tensor:
    """The chain of the docstring for one text: what head `head` has at token n, from the trunk's `[T, D]`."""
    if head == 1:
        return hidden[n]
    link = heads.links[head - 2]
    before = _slowly(heads, hidden, embedded, n - 1, head - 1)
    both = torch.cat([_rms(before, link.norm_features.weight), _rms(embedded[n], link.norm_token.weight)])
    joined = link.join.weight @ both
    gate, up = (link.mlp.up.weight @ _rms(joined, link.norm_mlp.weight)).chunk(2)
    return _rms(joined + link.mlp.down.weight @ (functional.silu(gate) * up), link.norm.weight)


@sabotaged_by(
    "foresight.nets.language.mtp.MultiTokenHeads.extend", swap("features", "token"), change("head", lambda k: 5 - k)
)
@sabotaged_by("foresight.nets.language.mtp.MultiTokenHeads.forward", change("parents", lambda p: p.roll(1)))
def test_the_heads_of_a_tree_are_those_of_the_definition():
    model, batch = tiny_language.model(), _batch()
    heads = _heads(model)
    with torch.no_grad():
        seen = mtp.view(model, batch)
        features, exist = heads(seen.hidden, seen.embedded, seen.parents)
        values = seen.scatter(heads.values(features[:, seen.context]))
        logits = [mtp.logits(model, features[k, seen.context]) for k in range(3)]
        chosen = torch.stack([seen.scatter(token_logprob(z, seen.tokens)[0]) for z in logits])
        there = seen.scatter(exist[:, seen.context])
    module = AutoModelForCausalLM.from_pretrained(tiny_language.folder(), dtype=torch.float32)
    missing = 0
    for p, prompt in enumerate(batch.prompts()):
        for g in range(batch.completion.shape[1]):
            row = torch.tensor(prompt + batch.completion[p, g, : batch.length[p, g]].tolist())
            with torch.no_grad():
                hidden = module.model(row[None]).last_hidden_state[0]
                embedded = module.model.embed_tokens(row)
            for t in range(int(batch.length[p, g])):
                n = len(prompt) + t - 1  # the token before the one that is predicted
                for head in (1, 2, 3):
                    place = (head - 1, p, g, t)
                    assert there[place] == (n >= head - 1)
                    if n < head - 1:
                        missing += 1
                        continue
                    one = _slowly(heads, hidden, embedded, n, head)
                    logp = (module.lm_head.weight @ one).log_softmax(-1)[row[n + 1]]
                    torch.testing.assert_close(chosen[place], logp, atol=1e-4, rtol=1e-4)
                    read = heads.read.weight @ (one / one.square().mean().sqrt()) + heads.read.bias
                    value = 100 * (functional.silu(read) @ heads.value_weight[head - 1]) / 64
                    torch.testing.assert_close(values[place], value, rtol=1e-3, atol=1e-3)
    assert missing == 3 * (2 + 1)  # the short prompt: head 2 at its first token, head 3 at its first two
    assert (values[:, ~seen.mask] == 0).all()


@sabotaged_by("foresight.nets.language.mtp.View.scatter", lambda f: lambda self, x: f(self, x).flip(-1))
def test_the_first_head_is_the_model():
    model, batch = tiny_language.model(), _batch()
    seen = mtp.view(model, batch)
    mine = [seen.scatter(x) for x in token_logprob(model.logits(seen.hidden[seen.context]), seen.tokens, 0.7)]
    for a, b in zip(mine, model.logprob(batch, 0.7), strict=True):
        torch.testing.assert_close(a, b)


def test_a_head_reads_the_trunk_from_as_far_behind_as_its_number():
    torch.manual_seed(0)
    heads = MultiTokenHeads(8, 3)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.add_(torch.randn(weight.shape))
    hidden, embedded, parents = torch.randn(6, 8), torch.randn(6, 8), torch.arange(6) - 1
    before, exist = heads(hidden, embedded, parents)
    for moved in range(6):
        other = hidden.clone()
        other[moved] += 1
        differs = (heads(other, embedded, parents)[0] != before).any(-1)
        for head in range(3):
            wanted = torch.zeros(6, dtype=torch.bool)
            if moved + head < 6:
                wanted[moved + head] = True
            assert torch.equal(differs[head] & exist[head], wanted)


@sabotaged_by("foresight.nets.language.mtp.logits", lambda f: lambda model, x: model.logits(x))
def test_predicting_tokens_trains_the_heads_and_not_the_model():
    """Multi-token prediction during reinforcement learning.

    Wrong: hard labels train the trunk on every sample, good or bad, and the entropy collapses (SkyRL 1832; AReno 550).
    Invariant: soft targets, and ∂L_token/∂θ = 0 for all weights of the policy.
    """
    model, batch = tiny_language.model(), _batch()
    heads, seen = _heads(model), mtp.view(model, batch)
    features, _ = heads(seen.hidden.detach(), seen.embedded, seen.parents)
    mtp.logits(model, features[1:, seen.context]).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in heads.links.parameters())
    assert all(weight.grad is None for weight in model.parameters())


def test_new_heads_value_everything_at_0_and_draft_what_the_trunk_predicted_a_token_ago():
    model = tiny_language.model()
    heads = mtp.heads_for(model, 2)
    hidden, token = torch.randn(5, 32), torch.randn(5, 32)
    assert (heads.values(hidden[None].expand(2, -1, -1)) == 0).all()
    gain = model.module.model.norm.weight
    torch.testing.assert_close(
        heads.extend(2, hidden, token), functional.rms_norm(hidden, (32,), gain, 1e-5), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("count", [1, 3])
def test_heads_are_saved_beside_their_model(tmp_path, count):
    model = tiny_language.model()
    heads = _heads(model, count)
    pretrained.save_folder(model.module, model.tokenizer, tmp_path / "with", heads=heads)
    pretrained.save_folder(model.module, model.tokenizer, tmp_path / "without")
    again = pretrained.load_heads(str(tmp_path / "with"))
    assert len(again) == count
    for name, weight in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    assert pretrained.load_heads(str(tmp_path / "without")) is None
    assert pretrained.load_heads("smollm2") is None
    AutoModelForCausalLM.from_pretrained(tmp_path / "with")


def test_bfloat16_is_near_float32_without_a_warning():
    narrow = pretrained.load(tiny_language.folder(), precision="bfloat16")
    wide, batch = tiny_language.model(), _batch()
    heads = _heads(wide)
    found = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for model in (narrow, wide):
            seen = mtp.view(model, batch)
            with model.precision():
                features, _ = copy.deepcopy(heads)(seen.hidden, seen.embedded, seen.parents)
                found.append(heads.values(features[:, seen.context]))
    assert found[0].dtype == torch.float32
    error = (found[0] - found[1]).abs().mean() / found[1].abs().mean()
    assert 0 < error < 0.05


def test_no_heads_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        MultiTokenHeads(8, 0)

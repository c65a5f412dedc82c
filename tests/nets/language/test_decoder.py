"""Our decoder equals its definition, with a cache and without, and is a transformers model to all that asks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from foresight.algorithms.language import grpo
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language import lora, pretrained
from foresight.nets.language.decoder import Decoder, DecoderConfig, characters
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation.rollout import complete
from foresight.training.options import build_config
from tests.sabotage import sabotaged_by, scaled

SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 64,
}  # fmt: skip
both = pytest.mark.parametrize("experts", [0, 4], ids=["dense", "experts"])


def _decoder(experts: int = 0, seed: int = 0, **shape) -> Decoder:
    """Far from uniform, so that what it does can be seen."""
    torch.manual_seed(seed)
    module = Decoder(DecoderConfig(**{**SHAPE, "experts": experts, **shape}))
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.2 * torch.randn(weight.shape)) if weight.ndim > 1 else weight.add_(0.3 * torch.randn(()))
        for name, buffer in module.named_buffers():
            if name.endswith("bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape))
    return module


def _policy(experts: int = 0, **shape) -> LanguageModel:
    return LanguageModel(_decoder(experts, **shape), characters())


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean() + 1e-5).sqrt()


def _turned(x: torch.Tensor, position: int) -> torch.Tensor:
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position * 10_000 ** (-i / half))
        out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return out


def _literal(module: Decoder, row: list[int]) -> torch.Tensor:
    """Logits `[T, V]`, position after position and head after head, by the definition."""
    stream = [module.model.embed_tokens.weight[token] for token in row]
    for layer in module.model.layers:
        keys, values, mixed = [], [], []
        for t, x in enumerate(stream):
            projected = (layer.attention.qkv.weight @ _norm(x, layer.attention_norm.weight)).view(8, 8)
            keys.append([_turned(k, t) for k in projected[4:6]])
            values.append(projected[6:])
            heads = []
            for head in range(4):
                query, group = _turned(projected[head], t), head // 2
                weights = torch.stack([query @ keys[s][group] / 8**0.5 for s in range(t + 1)]).softmax(0)
                heads.append(sum(weights[s] * values[s][group] for s in range(t + 1)))
            mixed.append(x + layer.attention.out.weight @ torch.cat(heads))
        stream = []
        for x in mixed:
            normed = _norm(x, layer.feed_norm.weight)
            if module.config.experts:
                affinity = (layer.feed.router @ normed).softmax(0)
                order = sorted(range(4), key=lambda e: -(affinity[e] + layer.feed.bias[e]).item())[:2]
                fed = sum(affinity[e] * _swiglu(layer.feed.up[e], layer.feed.down[e], normed) for e in order)
                fed = fed / sum(affinity[e] for e in order)
            else:
                fed = _swiglu(layer.feed.up.weight, layer.feed.down.weight, normed)
            stream.append(x + fed)
    return torch.stack([module.lm_head.weight @ _norm(x, module.model.norm.weight) for x in stream])


def _swiglu(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, value = (up @ x).chunk(2)
    return down @ (functional.silu(gate) * value)


@sabotaged_by("foresight.nets.sequence.transformer.rotate", lambda f: lambda x, cos, sin: x)
@sabotaged_by("foresight.nets.sequence.attention.attend", lambda f: _seeing_all)
@sabotaged_by("foresight.nets.language.checkpointing.rms_norm", scaled(1.1))
@both
def test_it_equals_its_definition(experts):
    module, row = _decoder(experts), [0, 5, 9, 40, 5, 77, 3]
    torch.testing.assert_close(module(torch.tensor([row])).logits[0], _literal(module, row), atol=1e-4, rtol=1e-4)


def _seeing_all(query, key, value, allowed, dropout=0.0):
    return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)


@both
def test_a_cache_and_a_tree_change_nothing(experts):
    policy = _policy(experts)
    generator = torch.Generator().manual_seed(1)
    batch = complete(policy, ["1+1=", "1+25=", "x"], 3, 10, generator=generator)
    tree, _ = policy.logprob(batch)
    torch.testing.assert_close(tree, batch.logprob, atol=1e-4, rtol=1e-4)  # what the sampler saw, token by token
    for p, prompt in enumerate(batch.prompts()):
        for g in range(3):
            n = int(batch.length[p, g])
            row = torch.tensor(prompt + batch.completion[p, g, :n].tolist())
            logp = policy.module(row[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logp.gather(-1, row[len(prompt) :, None])[:, 0]
            torch.testing.assert_close(batch.logprob[p, g, :n], expected, atol=1e-4, rtol=1e-4)


@sabotaged_by("foresight.nets.sequence.attention.attend", lambda f: _seeing_all)
@both
def test_no_position_sees_a_later_one(experts):
    module = _decoder(experts)
    row = torch.randint(97, (1, 12), generator=torch.Generator().manual_seed(0))
    other = row.clone()
    other[0, 6:] = (other[0, 6:] + 1) % 97
    before, after = module(row).logits, module(other).logits
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert ((before - after)[0, 6:].abs().amax(-1) > 1e-3).all()


@both
def test_a_folder_of_it_loads_and_is_post_trained(experts, tmp_path):
    policy = _policy(experts)
    pretrained.save_folder(policy.module, policy.tokenizer, tmp_path / "model")
    again = pretrained.load(str(tmp_path / "model"), precision="float32")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for one in (again.module, plain):
        assert all(torch.equal(a, b) for a, b in zip(
            policy.module.state_dict().values(), one.state_dict().values(), strict=True))  # fmt: skip
    scorer = pretrained.load_scorer(str(tmp_path / "model"), precision="float32")
    assert scorer.head.weight.shape == (1, 32) and scorer.head.weight.any()
    task = TextTask(
        "t", [Example(f"{i}+1=") for i in range(8)], [Example("9=")], lambda e, c: [float(len(x)) for x in c]
    )
    for rank in (0, 4):
        config = build_config(
            grpo.Config, str(tmp_path / "model"), steps=1, prompts=4, group=4, max_new_tokens=6, lora=rank,
            learning_rate=1e-2, precision="float32",
        )  # fmt: skip
        state = grpo.build(config)
        before = copy.deepcopy(state.policy.state_dict())
        ((_, metrics, _),) = grpo.train(config, task, state)
        moved = [key for key, value in state.policy.state_dict().items() if not torch.equal(value, before[key])]
        assert moved and lora.has(state.policy.module) == (rank > 0) == all("lora_" in key for key in moved)
        assert metrics["sampler_error"] < 1e-4


def test_the_first_weights_are_small_and_smaller_where_they_add():
    torch.manual_seed(0)
    for experts in (0, 4):
        module = Decoder(DecoderConfig(experts=experts))
        stds = {name: weight.std().item() for name, weight in module.named_parameters() if weight.ndim > 1}
        for name, std in stds.items():
            adds = "attention.out" in name or "feed.down" in name
            assert std == pytest.approx(0.02 / 8**0.5 if adds else 0.02, rel=0.1), name
        logits = module(torch.randint(97, (2, 30))).logits
        nats = functional.cross_entropy(logits.flatten(0, 1), torch.randint(97, (60,)))
        assert nats.item() == pytest.approx(torch.tensor(97.0).log().item(), abs=0.1)


def test_characters_come_back():
    tokenizer, text = characters(), "Tom has 12 figs?\n{~} No, 13."
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.eos_token_id == 0 and len(ids) == len(text) + 1 and len(tokenizer) == 97
    assert tokenizer.decode([*ids, 0], skip_special_tokens=True) == text
    assert len(set(ids[1:])) == len(set(text))


@pytest.mark.parametrize(("shape", "message"), [
    ({"hidden_size": 36}, "dim is 36"), ({"num_key_value_heads": 3}, "kv_heads"),
    ({"experts": 2, "experts_per_token": 3}, "experts_per_token is 3"),
])  # fmt: skip
def test_a_shape_that_does_not_fit_is_refused(shape, message):
    with pytest.raises(UserError, match=message):
        Decoder(DecoderConfig(**{**SHAPE, **shape}))

"""Packed weights: the same products for the sampler, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foresight.nets.language.packed import ABLE, COPIES, packed
from foresight.training.language import adamw
from foresight.training.options import Tuning
from tests.sabotage import change, sabotaged_by

pytestmark = pytest.mark.skipif(not ABLE, reason="this processor has no packed products")


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 80), nn.ReLU(), nn.Linear(80, 32, bias=False))


@sabotaged_by("foresight.nets.language.packed._multiply", change("x", lambda x: 2 * x))
def test_products_are_those_of_autocast():
    layers, x = _layers(), torch.randn(5, 3, 48)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = layers(x)
        with packed(torch.bfloat16, 15, layers):
            found = layers(x)
    assert found.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), plain.float(), atol=0.02, rtol=0.02)


def decoder(family: str, **options: bool | str) -> nn.Module:
    """Two layers of a transformers model, with biases where the family has them, and norms that are not 1."""
    import transformers

    from foresight.nets.language import checkpointing

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=42, hidden_size=48, intermediate_size=81, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, attn_implementation="sdpa", **options,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.normal_(weight, 1.0, 0.3)
    checkpointing.use(model)
    return model


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@sabotaged_by("foresight.nets.language.packed._product", change("layers", lambda layers: layers[::-1]))
@sabotaged_by("foresight.nets.language.packed._run", change("position_embeddings", lambda both: (both[0], -both[1])))
@torch.no_grad()
def test_whole_layers_are_those_of_transformers(family):
    model, ids = decoder(family), torch.randint(42, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(ids).logits.float()
        with packed(torch.bfloat16, 3, model):
            assert "forward" in vars(model.model.layers[1]) and "forward" not in vars(model.model.layers[1].mlp.up_proj)
            found = model(ids).logits.float()
    exact = model(ids).logits
    assert (found - exact).abs().mean() < 1.1 * (plain - exact).abs().mean() + 1e-4  # no worse than autocast
    assert plain.std() > 10 * (plain - found).abs().mean()


@torch.no_grad()
def test_another_activation_is_that_of_transformers():
    model, ids = decoder("Llama", hidden_act="gelu"), torch.randint(42, (3, 20))
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(ids).logits.float()
        for rows in (1, 3):
            with packed(torch.bfloat16, rows, model):
                assert "forward" in vars(model.model.layers[0].mlp.up_proj)
                found = model(ids).logits.float()
            assert plain.std() > 10 * (plain - found).abs().mean()


def test_layers_that_compute_again_do_so_afterward_and_where_there_is_a_gradient():
    from foresight.nets.language import checkpointing

    model, ids = decoder("Llama"), torch.arange(12)[None]
    checkpointing.recompute(model)
    before = [vars(layer)["forward"] for layer in model.model.layers]
    with packed(torch.bfloat16, 3, model):
        model(ids).logits.sum().backward()
    assert [vars(layer)["forward"] for layer in model.model.layers] == before
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_a_layer_with_an_adapter_is_packed_by_its_parts():
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(decoder("Llama"), LoraConfig(target_modules=["q_proj"], r=2))
    layer = adapted.get_base_model().model.layers[0]
    with packed(torch.bfloat16, 3, adapted):
        assert "forward" not in vars(layer) and "forward" in vars(layer.mlp.up_proj)


def test_a_gradient_flows_and_nothing_stays_behind():
    layers, x = _layers(), torch.randn(4, 48)
    with packed(torch.bfloat16, 4, layers), packed(torch.bfloat16, 4, layers):
        assert "forward" in vars(layers[0]) and "forward" in vars(layers[2])
        layers(x).sum().backward()
    assert layers[0].weight.grad is not None
    assert not any("forward" in vars(layer) for layer in layers)


@pytest.mark.parametrize("rows", [1, 4])
def test_weights_that_changed_are_packed_again(rows):
    layers, x = _layers(), torch.randn(rows, 48)
    with torch.no_grad():
        with packed(torch.bfloat16, rows, layers):
            before = layers(x)
        layers[2].weight.mul_(2.0)
        with packed(torch.bfloat16, rows, layers):
            after = layers(x)
    torch.testing.assert_close(after.float(), 2 * before.float(), atol=0.05, rtol=0.05)


@sabotaged_by("foresight.nets.language.packed._kept", lambda kept: lambda part, make: make(part))
@torch.no_grad()
def test_for_a_single_row_weights_are_copied_once():
    module = decoder("Llama")
    copied = []
    weight = module.model.layers[1].mlp.up_proj.weight
    for changed in (None, None, weight, weight.data):
        if changed is not None:
            changed.mul_(2.0)
        with packed(torch.bfloat16, 1, module):
            copied.append(module.model.forward.args[2])
    assert copied[0] is copied[1] and copied[1] is not copied[2] is not copied[3]


@torch.no_grad()
def test_copies_for_a_single_row_go_when_rows_are_decoded_together():
    module = decoder("Llama")
    with packed(torch.bfloat16, 1, module):
        assert module.model in COPIES and module.lm_head in COPIES
    with packed(torch.bfloat16, 2, module):
        assert module.model not in COPIES and module.lm_head not in COPIES


def test_a_step_of_the_optimizer_is_counted():
    module = decoder("Llama")
    optimizer = adamw(module, 1e-3, Tuning())
    module(torch.tensor([[1, 2]])).logits.sum().backward()
    before = [weight._version for weight in module.parameters()]
    optimizer.step()
    assert all(weight._version > count for weight, count in zip(module.parameters(), before, strict=True))


def test_without_a_kind_nothing_is_packed():
    layers = _layers()
    with packed(None, 4, layers):
        assert not any("forward" in vars(layer) for layer in layers)

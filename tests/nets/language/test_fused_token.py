"""Few tokens through compiled layers: what transformers computes from the same weights."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from foresight.nets.language import fused_token, packed
from foresight.nets.language.cache import Level
from foresight.nets.language.model import LanguageModel
from tests import tiny_language
from tests.nets.language.test_packed import decoder
from tests.sabotage import change, sabotaged_by

KIND = torch.bfloat16
able = pytest.mark.skipif(not packed.ABLE, reason="this processor has no packed products")


@sabotaged_by("foresight.nets.language.fused_token.linear", change("bias", lambda bias: -bias))
def test_a_product_of_few_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(37, 21, generator=generator), torch.randn(37, generator=generator)
    x = torch.randn(3, 21, generator=generator)
    held = weight.to(KIND)
    found = fused_token.linear(fused_token.bits(held), fused_token.floats(bias), x)
    torch.testing.assert_close(found, functional.linear(x, held.float(), bias), rtol=1e-5, atol=1e-5)
    none = fused_token.linear(fused_token.bits(held), fused_token.floats(None), x)
    torch.testing.assert_close(none, x @ held.float().T, rtol=1e-5, atol=1e-5)


BIASED = [("Llama", {"attention_bias": True}), ("Llama", {"mlp_bias": True}), ("Qwen3", {"attention_bias": True})]


@able
@pytest.mark.parametrize(("family", "options"), BIASED)
@torch.no_grad()
def test_a_model_with_other_biases_is_computed_layer_by_layer(family: str, options: dict[str, bool]) -> None:
    module, ids = decoder(family, **options), torch.tensor([[1, 2, 3]])
    with packed.packed(KIND, 1, module), torch.autocast("cpu", KIND):
        assert "forward" not in vars(module.model) and "forward" in vars(module.model.layers[0])
        found = module(ids).logits.float()
    expected = module(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1 * expected.std())


@able
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@sabotaged_by(
    "foresight.nets.language.fused_token.layers", change("sin", lambda x: -x), change("place", lambda place: place - 1)
)
@torch.no_grad()
def test_a_decoded_row_is_that_of_transformers(family: str) -> None:
    """One token, then three, one, and so on after a prompt, with weights that bfloat16 holds exactly.

    Keys and values are rounded to it.
    """
    module, ids = decoder(family), torch.randint(42, (1, 20), generator=torch.Generator().manual_seed(1))
    for weight in module.parameters():
        weight.copy_(weight.to(KIND))
    expected = module(ids).logits[0]
    model = LanguageModel(module, tiny_language.model().tokenizer, KIND)
    with model.precision(), packed.packed(KIND, 1, module):
        hidden, cache = model(ids[:, :7], torch.tensor([7]))
        level = cache.levels[0]
        room = Level(*([functional.pad(x.to(KIND), (0, 0, 0, 20)) for x in xs] for xs in (level.keys, level.values)))
        found = [model.logits(hidden[0, -1])]
        empty = type(cache)([], cache.positions - 7)
        for place in range(7, 19, 4):
            found.append(model.logits(model.step(ids[:, place], empty, room, place)[0]))
            found += model.logits(model.extend(ids[:, place + 1 : place + 4], empty, room, place + 1)[0])
    assert all(x.dtype is torch.float32 for x in found[1:])
    torch.testing.assert_close(
        torch.stack([x.float() for x in found]), expected[6:19], rtol=0, atol=0.02 * expected.std()
    )

"""The weights of transformers models: those of their own eager attention; and models that give none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, T5Config, T5ForConditionalGeneration

from foresight.errors import UserError
from foresight.nets.language import recording
from foresight.nets.sequence.attention import KnockOut
from tests import tiny_language
from tests.sabotage import change, drop, sabotaged_by

TOKENS = torch.tensor([[5, 3, 20, 11, 5, 3, 7]])


def model(implementation: str = "sdpa") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_language.folder(), attn_implementation=implementation).eval()


@sabotaged_by("foresight.nets.language.recording.recorded_attention", drop("scaling"), drop("attention_mask"))
@sabotaged_by("foresight.nets.sequence.attention.softmax", lambda f: lambda scores: f(2 * scores))
def test_weights_and_logits_are_those_of_the_eager_model() -> None:
    """The model was loaded with a fused kernel, which it has again afterwards."""
    fused = model()
    fused.model.layers[1].self_attn.scaling = 0.7  # not 1 / √d
    weights, logits = recording.read(fused, TOKENS)
    fused.set_attn_implementation("eager")
    with torch.no_grad():
        expected = fused(input_ids=TOKENS, output_attentions=True)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-5)
    assert len(weights) == 2
    for ours, theirs in zip(weights, expected.attentions, strict=True):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(ours.sum(-1), torch.ones(1, 4, 7))
    fused.set_attn_implementation("sdpa")
    recording.read(fused, TOKENS)
    assert fused.config._attn_implementation == "sdpa"


@sabotaged_by("foresight.nets.language.recording.read", change("knock_outs", lambda x: ()))
def test_knocked_out_links_change_the_logits_after_them_only() -> None:
    one, before = model(), recording.read(model(), TOKENS)[1]
    after = recording.read(one, TOKENS, [KnockOut(0, query=4, key=2)])[1]
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert (after[:, 4:] - before[:, 4:]).abs().amax((0, 2)).min() > 1e-3


def test_a_model_whose_kernels_give_no_weights_is_refused_with_the_way_to_load_it() -> None:
    """A model that takes no other attention function: only its own eager attention can be read."""

    class Fixed(torch.nn.Module):
        def __init__(self, own: str) -> None:
            super().__init__()
            self.inner, self.config = model("eager"), type("Config", (), {"_attn_implementation": own})()

        def set_attn_implementation(self, name: str) -> None: ...

        def forward(self, **inputs: Any) -> Any:
            found = self.inner(**inputs)
            if self.config._attn_implementation != "eager":
                found.attentions = None
            return found

    weights, _ = recording.read(Fixed("eager"), TOKENS)
    torch.testing.assert_close(weights[1], recording.read(model(), TOKENS)[0][1])
    with pytest.raises(UserError, match=r"Fixed \(sdpa\) gives no weights.*attn_implementation='eager'"):
        recording.read(Fixed("sdpa"), TOKENS)
    with pytest.raises(UserError, match="Nothing can be knocked out of Fixed"):
        recording.read(Fixed("eager"), TOKENS, [KnockOut(0)])


@sabotaged_by("foresight.nets.language.recording._own_weights", change("tokens", lambda x: x.flip(1)))
def test_a_soft_cap_is_that_of_the_model() -> None:
    """Gemma 2, whose attention ours does not compute: its own weights."""
    config = Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, attn_logit_softcapping=2.0, attn_implementation="eager",
    )  # fmt: skip
    gemma = Gemma2ForCausalLM(config).eval()
    weights, logits = recording.read(gemma, TOKENS % 50)
    expected = gemma(input_ids=TOKENS % 50, output_attentions=True)
    assert len(weights) == 2 and all(map(torch.equal, weights, expected.attentions))
    assert torch.equal(logits, expected.logits) and gemma.config._attn_implementation == "eager"
    with pytest.raises(UserError, match="a soft cap, which is not supported"):
        recording.read(gemma, TOKENS % 50, [KnockOut(0)])


def test_an_encoder_and_a_decoder_are_refused() -> None:
    config = T5Config(vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(UserError, match="T5ForConditionalGeneration has an encoder and a decoder"):
        recording.read(T5ForConditionalGeneration(config), TOKENS % 50)

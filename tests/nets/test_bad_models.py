"""Models, tokenizers and templates that do not fit together are refused before anything is sampled."""

from __future__ import annotations

import pytest
import torch

from foresight.errors import UserError
from foresight.nets.language import LanguageModel
from tests import tiny_language

TURNS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
OPENED = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"
# As Mistral writes it: the user's turn ends with what opens the answer.
INSTRUCTIONS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[I]{{ m['content'] }}[/I]{% else %} {{ m['content'] }}"
    "{% endif %}{% endfor %}"
)


def _again(template: str | None = None, rows: int | None = None, words: int = 0) -> LanguageModel:
    model = tiny_language.model()
    model.tokenizer.chat_template = template
    model.tokenizer.add_tokens([f"<new{i}>" for i in range(words)])
    if rows is not None:
        model.module.resize_token_embeddings(rows)
    return LanguageModel(model.module, model.tokenizer)


@pytest.mark.parametrize("template", [None, OPENED, INSTRUCTIONS])
def test_templates_that_open_an_answer_are_taken(template):
    assert _again(template).encode("1?")


def test_a_template_that_drops_the_generation_prompt_is_refused():
    with pytest.raises(UserError, match="drops the generation prompt"):
        _again(TURNS)


def test_a_vocabulary_that_grew_is_refused_until_the_model_grows_too():
    words = len(tiny_language.CHARACTERS)
    with pytest.raises(UserError, match=rf"tokenizer has {words + 2} tokens and the model {words}.*vocabulary grew"):
        _again(words=2)
    assert _again(words=2, rows=words + 2).encode("1?")
    assert _again(rows=words + 3)  # padded to a round number


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(UserError, match="belongs to another model"):
        _again(rows=2 * len(tiny_language.CHARACTERS))


def test_a_padding_token_that_also_ends_is_learnt_and_not_masked():
    """pad = eos in the tiny model: the end of each row that stopped has a gradient all the same."""
    from foresight.planning.decode import generate

    model = tiny_language.model()
    assert model.tokenizer.pad_token_id == model.tokenizer.eos_token_id == 0
    model.stop_ids = [0]
    with torch.no_grad():  # so that rows end
        model.module.get_output_embeddings().weight[0] *= 3
    batch = generate(model, [[1, 2, 3]], 40, 12, 1.0, torch.Generator().manual_seed(0))
    rows = batch.stopped[0].nonzero()[:, 0]
    assert len(rows)
    last = batch.length[0, rows] - 1
    assert (batch.completion[0, rows, last] == 0).all()
    logprob, _ = model.logprob(batch)
    assert (logprob[0, rows, last] < 0).all()
    assert batch.mask.sum() == batch.length.sum()

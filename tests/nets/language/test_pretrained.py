"""Models, tokenizers and templates that do not fit together are refused before anything is sampled."""

from __future__ import annotations

import math
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from foresight.algorithms.language import reward_model, rlhf_ppo
from foresight.errors import UserError
from foresight.nets.language import completion, pretrained
from foresight.nets.language.model import LanguageModel
from foresight.training import corpus
from foresight.training.options import build_config
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


def test_special_tokens_beyond_the_model_may_stand_in_no_text():
    """Gemma 3 of 1B: its tokenizer has one token for images, of which the model has no embedding."""
    model, words = tiny_language.model(), len(tiny_language.CHARACTERS)
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    policy = LanguageModel(model.module, model.tokenizer)
    assert len(policy.tokenizer) == words + 1 and policy.encode("1+1?")
    with pytest.raises(UserError, match=r"special token '<image>', for which the model has no embedding"):
        policy.encode("1<image>?")
    with pytest.raises(UserError, match="special token '<image>'"):
        completion.encode(policy, "1?", "<image>2")
    model.tokenizer.pad_token = "<image>"  # it would be used
    with pytest.raises(UserError, match="vocabulary grew"):
        LanguageModel(model.module, model.tokenizer)
    many = tiny_language.model()
    many.tokenizer.add_special_tokens({"additional_special_tokens": [f"<{i}>" for i in range(9)]})
    with pytest.raises(UserError, match="vocabulary grew"):
        LanguageModel(many.module, many.tokenizer)


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(UserError, match="belongs to another model"):
        _again(rows=2 * len(tiny_language.CHARACTERS))


def test_a_token_beyond_the_model_is_refused():
    """As many tokens as the model, and one of them has a higher number: a table with a hole."""
    model = tiny_language.model()
    words = model.tokenizer.get_vocab()
    model.tokenizer.get_vocab = lambda: {**words, "W": 99}
    with pytest.raises(UserError, match="has a token 99 and the model ends at 41"):
        LanguageModel(model.module, model.tokenizer)


@pytest.mark.parametrize(
    ("special", "warned"),
    [
        ({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}, True),
        ({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}, True),
        ({"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": None}, False),  # it chats: one of its ends is new
        ({"bos_token_id": 5, "eos_token_id": 2, "pad_token_id": None}, False),
        ({"bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}, False),  # too little to tell
        ({"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}, False),
    ],
)
def test_a_tokenizer_whose_special_tokens_are_all_others_is_warned_of(special, warned):
    """As many words as the model has, and strangers all the same: as StarCoder's 49,152 are to SmolLM2's."""
    model = tiny_language.model()
    model.tokenizer.bos_token = "4"  # 5 in the table
    assert (model.tokenizer.bos_token_id, model.tokenizer.eos_token_id) == (5, 0)
    for name, value in special.items():
        setattr(model.module.config, name, value)
        setattr(model.module.generation_config, name, value)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        LanguageModel(model.module, model.tokenizer)
    assert [str(one.message).startswith("The tokenizer may be another model's") for one in found] == [True] * warned


def test_a_padding_token_that_also_ends_is_learned_and_not_masked():
    """pad = eos in the tiny model: the end of each row that stopped has a gradient all the same."""
    from foresight.planning.generation.decoding import generate

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


def test_a_folder_without_the_weights_that_are_needed_is_refused(tmp_path):
    scorer = reward_model.build(build_config(reward_model.Config, model=tiny_language.folder(), precision="float32"))
    folder = reward_model.export(scorer, tmp_path / "scorer")
    fields = {"model": tiny_language.folder(), "precision": "float32"}
    assert rlhf_ppo.build(build_config(rlhf_ppo.Config, **fields, reward_model=str(folder))).reward_model is not None
    with pytest.raises(UserError, match="is no reward model, since it has no head"):
        rlhf_ppo.build(build_config(rlhf_ppo.Config, **fields, reward_model=tiny_language.folder()))
    renamed = tmp_path / "renamed"
    shutil.copytree(tiny_language.folder(), renamed)
    weights = {f"other.{name}": x for name, x in load_file(renamed / "model.safetensors").items()}
    save_file(weights, renamed / "model.safetensors", {"format": "pt"})
    for load in (pretrained.load, pretrained.load_scorer):
        with pytest.raises(UserError, match=r"is no language model: \d+ of its weights are not there, as "):
            load(str(renamed))


@pytest.mark.parametrize("kind", ["tiny", "decoder"])
def test_transformers_reads_a_reward_model_at_the_token_that_we_read(kind, tmp_path):
    """The end of an answer is the padding, too, in the tiny model as in SmolLM2: transformers would read before it."""
    model = tiny_language.folder() if kind == "tiny" else str(_decoder(tmp_path / "decoder"))
    state = reward_model.build(build_config(reward_model.Config, model=model, precision="float32"))
    state.scorer.reset(1.0, torch.Generator().manual_seed(0))
    theirs = AutoModelForSequenceClassification.from_pretrained(reward_model.export(state, tmp_path / "scorer"))
    ids, answer = corpus.encode(state.scorer.trunk, "1+1?", "2")
    assert answer[-1] in state.scorer.trunk.stop_ids
    with torch.no_grad():
        read = theirs(torch.tensor([[*ids, *answer]])).logits[0, 0].item()
    (score,), _, _ = reward_model.act(state, [("1+1?", "2")])
    assert math.isclose(score, read, rel_tol=1e-4)
    assert state.scorer.trunk.module.config.pad_token_id is not None


def _decoder(folder):
    from foresight.nets.language import decoder

    torch.manual_seed(0)
    words = len(tiny_language.CHARACTERS)
    config = decoder.DecoderConfig(
        vocab_size=words, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return pretrained.save_folder(decoder.Decoder(config), tiny_language.model().tokenizer, folder)

"""A character-level Llama of a few thousand parameters as a Hugging Face folder: what language tests load."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foresight.nets.language import pretrained
from foresight.nets.language.model import LanguageModel

CHARACTERS = ["<eos>", *"0123456789+=? abcdefghijklmnopqrstuvwxyzW"]


def write(folder: Path, seed: int = 0, dim: int = 32, layers: int = 2, characters: Sequence[str] = CHARACTERS) -> Path:
    """Write a random model and its tokenizer, whose vocabulary is `characters`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(characters),
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.3,  # wide, so that the distributions are far from uniform
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    table = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    table.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    table.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=table, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    return folder


@cache
def folder(seed: int = 0, size: int = len(CHARACTERS)) -> str:
    """The folder of a random model that knows the first `size` characters, made once a test session."""
    return str(write(Path(mkdtemp(prefix="tiny-language-")), seed, characters=CHARACTERS[:size]))


def model(seed: int = 0) -> LanguageModel:
    """A fresh copy of it in float32."""
    return pretrained.load(folder(seed), precision="float32")

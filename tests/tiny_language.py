"""A character-level Llama of a few thousand parameters as a Hugging Face folder: what language tests load."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foresight.nets.language import pretrained
from foresight.nets.language.model import LanguageModel

CHARACTERS = ["<eos>", *"0123456789+=? abcdefghijklmnopqrstuvwxyzW"]
END = "<|endoftext|>"  # transformers adds it to what it reads from GGUF, if it is missing
OPENED = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = "What is 12+34? It is 46, said Ada: five apples, six pears."


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
    """The folder of a random model that knows the first `size` characters, made once a process, which removes it."""
    folder = Path(mkdtemp(prefix="tiny-language-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _FOLDERS.add(str(folder))
    return str(write(folder, seed, characters=CHARACTERS[:size]))


_FOLDERS: set[str] = set()
_READ: dict[Any, tuple[Any, Any, bool]] = {}


def read_once(read: Callable[..., Any], keep: bool) -> Callable[..., Any]:
    """`pretrained._read` that copies what it read from one of these folders before, which it tried as at load.

    With `keep` the first reading is kept: not where a test is sabotaged.
    """

    def found(kind: Any, name: str, adapters: tuple[str, ...], **options: Any) -> tuple[Any, Any, bool]:
        key = (kind, name, *sorted(options.items()))
        if name not in _FOLDERS or adapters or (key not in _READ and not keep):
            return read(kind, name, adapters, **options)
        if key not in _READ:
            module, tokenizer, headless = read(kind, name, adapters, **options)
            LanguageModel(module, tokenizer)  # notes in the module what it is capable of
            _READ[key] = module, tokenizer, headless
        return deepcopy(_READ[key])

    return found


def model(seed: int = 0) -> LanguageModel:
    """A fresh copy of it in float32."""
    return pretrained.load(folder(seed), precision="float32")


def byte_level(folder: Path, tied: bool = True) -> Path:
    """A random Llama with the kind of tokenizer that SmolLM2 has."""
    table = Tokenizer(models.BPE())
    table.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    table.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END, "<user>", "<assistant>"], initial_alphabet=alphabet, show_progress=False
    )
    table.train_from_iterator([TEXT] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=table, eos_token=END, pad_token=END)
    tokenizer.chat_template = OPENED
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=table.get_vocab_size(), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=0, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

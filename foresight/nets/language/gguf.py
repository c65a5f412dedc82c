"""A language model as one GGUF file, which llama.cpp runs on a laptop or a phone; written by the package `gguf`.

Matrices are stored as `f16`, as `bf16`, or in blocks of 32 weights with one scale each: `q8_0` (8.5 bits a weight) or
`q4_0` (4.5 bits). With `q4_0` the embeddings, which are also the output, keep `q8_0`: their rounding moves every logit.
Vectors (norms) stay float32. Names and metadata are those of llama.cpp, whose rotary embedding pairs neighboring rows:
rows of the query and key matrices are interleaved, and `pretrained.load` (transformers) puts them back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foresight.errors import UserError, unknown
from foresight.nets.language import pretrained

QUANTIZATIONS = ("f16", "bf16", "q8_0", "q4_0")
BLOCK = 32  # weights with one scale
ENDS = ("eot", "eom")  # llama.cpp's other tokens that end an answer, of a turn and of a message
# How a tokenizer splits words before it merges bytes: llama.cpp's name of it, by the kinds of its pre-tokenizers.
SPLITS = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}


def write(source: str | Path, file: str | Path, quantization: str = "f16") -> Path:
    """Write the Llama in the Hugging Face folder `source` as the GGUF `file`; returns its path.

    Raises UserError for an unknown quantization, for another architecture or tokenizer, and where the file cannot be
    written.
    """
    if quantization not in QUANTIZATIONS:
        raise unknown("quantization", quantization, QUANTIZATIONS)
    import gguf

    source, file = Path(source), Path(file)
    model = pretrained.load(str(source), precision="float32")
    config = model.module.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise UserError(
            f"{source} is a model of type '{config.model_type}': only Llama (without biases), such as SmolLM2, is "
            "written as GGUF. Export it as merged, and convert that folder with llama.cpp."
        )
    if (scaling := config.rope_parameters.get("rope_type", "default")) != "default":
        raise UserError(
            f"{source} scales its rotary positions ('{scaling}'), which is not written as GGUF here. Export it as "
            "merged, and convert that folder with llama.cpp."
        )
    split = _split(source)
    if len(model.stop_ids) > 1 + len(ENDS):
        raise UserError(
            f"{source} has {len(model.stop_ids)} tokens that end an answer, and GGUF holds {1 + len(ENDS)}. Export it "
            "as merged."
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(file, "llama")
        _describe(writer, config, quantization)
        _tokens(writer, model.tokenizer, config.vocab_size, split)
        special = gguf.SpecialVocab(source, load_merges=True, n_vocab=config.vocab_size)
        for name in ("bos", "unk"):  # never used by byte-level BPE; transformers adds a token of its own without them
            special.special_token_ids.setdefault(name, model.tokenizer.eos_token_id)
        others = [token for token in model.stop_ids if token != special.special_token_ids.get("eos")]
        special.special_token_ids.update(zip(ENDS, others, strict=False))
        special.add_special_token.setdefault("bos", False)
        special.add_to_gguf(writer, quiet=True)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        for key, weight in model.module.state_dict().items():
            if key == "lm_head.weight" and config.tie_word_embeddings:
                continue
            matrix = weight.numpy()
            if key.endswith("q_proj.weight"):
                matrix = interleaved(matrix, config.num_attention_heads)
            elif key.endswith("k_proj.weight"):
                matrix = interleaved(matrix, config.num_key_value_heads)
            kind = _kind(key, matrix, quantization)
            packed = gguf.quants.quantize(np.ascontiguousarray(matrix, np.float32), kind)
            writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), packed, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    except OSError as error:
        raise UserError(f"Cannot write {file}: {error.strerror or error}. Choose another --out.") from error
    return file


def interleaved(matrix: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key matrix `[heads · 2 · D, inputs]` in llama.cpp's order: i and i + D of a head adjoin."""
    halves = matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def _kind(key: str, matrix: NDArray[np.float32], quantization: str) -> Any:
    """The storage of a tensor; a row that is no whole number of blocks stays float16."""
    from gguf import GGMLQuantizationType as Kind

    if matrix.ndim == 1:
        return Kind.F32
    if quantization == "bf16":
        return Kind.BF16
    if quantization == "f16" or matrix.shape[-1] % BLOCK:
        return Kind.F16
    return Kind.Q8_0 if quantization == "q8_0" or "embed_tokens" in key or "lm_head" in key else Kind.Q4_0


def _describe(writer: Any, config: Any, quantization: str) -> None:
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    kinds = {
        "f16": LlamaFileType.MOSTLY_F16,
        "bf16": LlamaFileType.MOSTLY_BF16,
        "q8_0": LlamaFileType.MOSTLY_Q8_0,
        "q4_0": LlamaFileType.MOSTLY_Q4_0,
    }
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_file_type(kinds[quantization])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _tokens(writer: Any, tokenizer: Any, size: int, split: str) -> None:
    """The vocabulary, padded to the `size` of the model, and which of its tokens are no text."""
    from gguf import TokenType

    names, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [TokenType.UNUSED] * size
    for name, i in names.items():
        if i >= size:  # a special token without an embedding
            continue
        outside = TokenType.CONTROL if i in added and added[i].special else TokenType.USER_DEFINED
        tokens[i], kinds[i] = name, outside if i in added else TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)


def _split(source: Path) -> str:
    """llama.cpp's name of how the tokenizer in a folder splits words. Raises UserError if it has none."""
    file = source / "tokenizer.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    outer = known.get("pre_tokenizer") or {}
    parts = tuple(part["type"] for part in outer.get("pretokenizers", [outer] if outer else []))
    if known.get("model", {}).get("type") != "BPE" or parts not in SPLITS:
        raise UserError(
            f"The tokenizer of {source} is {known.get('model', {}).get('type', 'unknown')} after "
            f"{' and '.join(parts) or 'nothing'}: only byte-level BPE, as in SmolLM2, is written as GGUF. Export it as "
            "merged, and convert that folder with llama.cpp."
        )
    return SPLITS[parts]

"""Small random models of the causal architectures of transformers, and how each of them is computed here.

python -m tests.architectures    # tries them all and writes docs/architectures.md (minutes)
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foresight.data.text import TokenBatch
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation.decoding import generate
from tests import tiny_language

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
WORDS = len(tiny_language.CHARACTERS)
RIGHT = 1e-4  # nats: what is right is apart by rounding alone
PROMPTS = [[3, 4, 5, 6, 7], [3, 4, 9], [3, 4, 9]]
# What makes a model small, by all the names that configurations have for it; each takes those that it knows.
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "eos_token_id": 0, "bos_token_id": None,
    "pad_token_id": 0, "initializer_range": 0.3, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_inner": 64,
    "n_positions": 64, "rotary_dim": 8, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64,
    "ffn_hidden_size": 64, "ffn_dim": 64, "dff": 64, "decoder_layers": 4, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64, "encoder_layers": 1, "encoder_ffn_dim": 32, "num_layers": 2, "attention_heads": 4,
    "embedding_size": 32, "dim_model": 32, "dim_ff": 64, "dim_head": 8, "num_heads": 4, "d_inner": 64, "d_head": 8,
    "emb_dim": 32, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "mlp_only_layers": [], "num_dense_layers": 1, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_ssm": 64, "mamba_expand": 2, "mamba_chunk_size": 4,
    "state_size": 8, "time_step_rank": 4, "chunk_size": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4,
    "query_pre_attn_scalar": 8, "lru_width": 32, "vocab_size_per_layer_input": WORDS,
    "hidden_size_per_layer_input": 8, "block_size": 4, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "ssm_state_size": 8, "n_groups": 1, "attention_hidden_size": 32, "index_topk": 64, "index_head_dim": 8,
    "index_n_heads": 2, "router_hidden_size": 8, "word_embed_proj_dim": 32, "rank": 4,
}  # fmt: skip
_LATENT = {"num_key_value_heads": 4}  # heads that share a latent key are as many as heads
_DECODER = {"is_decoder": True}
_BEGIN = {"bos_token_id": 0}
# What else an architecture needs in order to be small, or causal.
EXTRA: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
                     "minicpm3", "youtu"), _LATENT),
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
                     "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta",
                     "xlm-roberta-xl"), _DECODER),
    **dict.fromkeys(("cwm", "modernbert-decoder"), _BEGIN),
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": {**_LATENT, "num_hidden_layers": 4},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "cpmant": {"vocab_size": WORDS - 8, "prompt_length": 4, "prompt_types": 2, "segment_types": 2},
    "dots3_note_text": _LATENT,
    "falcon_h1": {"mamba_d_conv": 4, "projectors_bias": False, "ssm_multipliers": [1.0] * 5},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": [64] * 4, "layer_types":
                     ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4, "num_layers": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_groups": 1},
    "kimi_linear": {**_LATENT, "num_experts_per_token": 2},
    **{name: {"layer_types": ["conv", "full_attention"] * 2} for name in ("lfm2", "lfm2_moe")},
    "llama4_text": {"intermediate_size_mlp": 64, "attention_chunk_size": 64, "no_rope_layers": [1, 0, 1, 0]},
    "llama4": {"text_config": {"model_type": "llama4_text", **SMALL, "intermediate_size_mlp": 64}},
    "longcat_flash": {**_LATENT, "num_layers": 1, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16,
                      "zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "n_groups": 1, "time_step_limit": [0.0, 1e9]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"] * 2, "time_step_limit": [0.0, 1e9]},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 64},
    "reformer": {"is_decoder": True, "attn_layers": ["local"], "axial_pos_embds": False, "local_attn_chunk_length": 4,
                 "attention_head_size": 8, "feed_forward_size": 64},
    "roc_bert": {"is_decoder": True, "shape_vocab_size": 8, "pronunciation_vocab_size": 8, "shape_embed_dim": 8,
                 "pronunciation_embed_dim": 8},
    "xlm": {"causal": True, "init_std": 0.3, "embed_init_std": 0.3},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "mamba"], "attention_head_dim": 16},
    "zamba2": {"num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "mamba"], "hybrid_layer_ids": [1],
               "mamba_headdim": 8, "num_mem_blocks": 1, "attention_head_dim": 16, "num_key_value_heads": 4,
               "kv_channels": 8, "num_query_groups": 4, "n_mamba_heads": 8, "attention_hidden_size": 64},
    "zaya": {"num_experts_per_tok": 1},
    **{name: {"text_config": {"model_type": f"{name}_text", **SMALL}} for name in ("gemma3", "gemma4", "gemma4_unified",
       "qwen3_5", "qwen3_5_moe")},
}  # fmt: skip


def model(name: str, **fields: Any) -> Any:
    """A small random float32 model of the architecture `name`, initialized so that its outputs are not uniform."""
    kind = CONFIG_MAPPING[name]
    known = set(kind().to_dict())
    extra = EXTRA.get(name, {})
    small = {key: value for key, value in SMALL.items() if key in known}
    config = kind(**{**small, **extra, **fields})
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > 3_000_000:
        raise MemoryError(f"{name} has {size:,} weights: add to EXTRA the fields that make it small.")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tried(name: str, **fields: Any) -> tuple[LanguageModel, float]:
    """A model, and how far samples and log-probabilities are from those of its plain forward pass, at most, in nats."""
    module = model(name, **fields)
    plain = copy.deepcopy(module)
    policy = LanguageModel(module, tiny_language.model().tokenizer)
    batch = generate(policy, PROMPTS, 2, 4, 1.0, torch.Generator().manual_seed(0))
    right = expected(plain, batch)
    found = policy.logprob(batch)[0]
    found.sum().backward()
    if not all(p.grad is None or p.grad.isfinite().all() for p in policy.parameters()):
        raise ArithmeticError("a gradient is not finite")
    apart = [(x.detach() - right)[batch.mask].abs().max().item() for x in (batch.model_logprob, found)]
    return policy, max(apart)


@torch.no_grad()
def expected(module: Any, batch: TokenBatch) -> torch.Tensor:
    """Log-probabilities `[P, G, T]` by transformers' own pass over each row alone."""
    logprob = torch.zeros(batch.completion.shape)
    for p, prompt in enumerate(batch.prompts()):
        for g, n in enumerate(batch.length[p].tolist()):
            row = torch.tensor([prompt + batch.completion[p, g, :n].tolist()])
            table = module(input_ids=row, use_cache=False).logits[0].float().log_softmax(-1)
            logprob[p, g, :n] = table[len(prompt) - 1 : -1].gather(1, row[0, len(prompt) :, None])[:, 0]
    return logprob


HEAD = """# Architectures

`--model` accepts any causal language model of `transformers`. When a model is loaded, a few tokens are computed in the
ways below, the fastest first, and compared with the model's own forward pass over each row alone
([`foresight/nets/language/architecture.py`](../foresight/nets/language/architecture.py)). The first way that is exact
is used:

- **shared**: a prefix that rows share is computed once ([generation](generation.md)). This is the fastest way.
- **row by row**: as in `transformers`, with its KV cache for sampling. A shared prompt is computed again for each
  answer; the run warns about this at the start. Speculative decoding is not supported.
- **row by row, no cache**: for every new token, the whole row is computed again.
- **refused**: an error message before the run starts. A model that is not causal (a masked language model) is not a
  policy over tokens.

With shared prefixes, a token attends to all tokens before it. The context is therefore limited to the sliding window of
the model (`sliding_window`, `attention_chunk_size`), or to the length at which its rotary angles change (`dynamic`,
`longrope`), and the run warns about it. A model with layers that choose which tokens they attend to (MiniMax M3 as
released) is computed row by row. Logits that a model scales or caps (Cohere, Granite, Gemma 2) are computed as in that
model.

`python -m tests.architectures` makes the table. It builds random models with a few thousand weights and compares the
log-probabilities of their answers, in sampling and in training, with the plain forward pass. `difference` is the
largest difference, in nats.
"""


def row(name: str) -> tuple[str, str]:
    """How an architecture is computed, and its error in nats, both as text. Raises what building the model raises."""
    try:
        policy, apart = tried(name)
    except UserError as error:
        return "refused: " + ("it is not causal" if "is not causal" in str(error) else str(error)), ""
    found = policy.capabilities
    way = "shared" if found.shared else "row by row" if found.cached else "row by row, no cache"
    return (way if apart < RIGHT else "WRONG"), f"{apart:.0e}"


def main() -> None:
    """Try them all and write the page."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    lines, untried = list[str](), list[str]()
    for name, kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        try:
            way, apart = row(name)
        except Exception as error:  # a configuration that the fields above do not make small
            untried.append(name)
            print(name, type(error).__name__, str(error)[:300].replace("\n", " "), file=sys.stderr, flush=True)
            continue
        print(name, way, apart, flush=True)
        lines.append(f"| `{name}` | `{kind}` | {way} | {apart} |")
    table = ["| architecture | class | computed | difference |", "|---|---|---|---|", *lines]
    words = f"Not tested, because they need images or audio or cannot be made small: {', '.join(untried)}."
    PAGE.write_text("\n".join([HEAD, *table, "", words, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()

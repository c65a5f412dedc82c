"""A small decoder-only transformer of our own, as a `transformers` model class.

A layer is `x += attention(norm(x)); x += feed(norm(x))`: RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), rotary
positions (Su et al. 2021, arXiv:2104.09864), groups of heads that share keys and values (Ainslie et al. 2023,
arXiv:2305.13245), and SwiGLU (Shazeer 2020, arXiv:2002.05202) or a mixture of experts of it (`nets.language.moe`).
Multi-token heads are in `nets.language.mtp`.

As a transformers class it is sampled, post-trained, given adapters, saved and loaded by the same code as pretrained
models. Transformers loads a folder of it once this module has been imported.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foresight.errors import UserError
from foresight.nets.language.checkpointing import rms_norm
from foresight.nets.language.moe import MixtureOfExperts, Routing
from foresight.nets.sequence.attention import attend
from foresight.nets.sequence.transformer import MLP, TransformerConfig, rotary_angles, rotate

END = "<end>"
TURNS = (  # a chat template: the messages one after the other, with the end token after each turn of the model
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


class DecoderConfig(PreTrainedConfig):  # type: ignore[misc]
    """The shape of a decoder, with transformers' field names.

    `experts` 0 is dense; with `intermediate_size` 0, layers are attention only.
    """

    model_type = "foresight_decoder"

    def __init__(
        self,
        vocab_size: int = 97,
        hidden_size: int = 128,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        intermediate_size: int = 344,
        max_position_embeddings: int = 256,
        experts: int = 0,
        experts_per_token: int = 2,
        rope_base: float = 10_000.0,
        norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        **others: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.intermediate_size, self.max_position_embeddings = intermediate_size, max_position_embeddings
        self.experts, self.experts_per_token = experts, experts_per_token
        self.rope_base, self.norm_eps, self.initializer_range = rope_base, norm_eps, initializer_range
        super().__init__(**{"tie_word_embeddings": False, **others})


class _Norm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps or 0.0)


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.shared = config.num_attention_heads, config.num_key_value_heads
        self.width, self.layer_idx, self.config = config.hidden_size // self.heads, layer, config
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.shared) * self.width, bias=False)
        self.out = nn.Linear(self.heads * self.width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], tree: Any) -> Tensor:
        rows, steps, _ = x.shape
        mixed = self.qkv(x).view(rows, steps, -1, self.width).transpose(1, 2)
        query, key, value = mixed.split((self.heads, self.shared, self.shared), dim=1)
        query, key = rotate(query, *angles), rotate(key, *angles)
        if tree is None:  # independent rows: causal
            mixed = attend(query, key, value, None).transpose(1, 2)
        else:  # the attention set by `LanguageModel`, over its cache or tree
            function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
            mixed, _ = function(self, query, key, value, None, scaling=self.width**-0.5, tree=tree)
        return self.out(mixed.reshape(rows, steps, -1))


class _Layer(GradientCheckpointingLayer):  # type: ignore[misc]
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        dim, hidden = config.hidden_size, config.intermediate_size
        self.attention_norm, self.attention = _Norm(dim, config.norm_eps), _Attention(config, layer)
        self.feed: nn.Module | None = None
        if hidden:
            self.feed_norm = _Norm(dim, config.norm_eps)
            self.feed = (
                MixtureOfExperts(dim, hidden, config.experts, config.experts_per_token)
                if config.experts
                else MLP(TransformerConfig(dim=dim, hidden=hidden))
            )

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], tree: Any) -> tuple[Tensor, Routing | None]:
        x = x + self.attention(self.attention_norm(x), angles, tree)
        if self.feed is None:
            return x, None
        fed, routing = self.feed(self.feed_norm(x)), None
        if isinstance(fed, tuple):
            fed, routing = fed
        return x + fed, routing


class Features(NamedTuple):
    """Features `[B, T, D]`, and the routing of each layer (empty in a dense decoder)."""

    last_hidden_state: Tensor
    routing: tuple[Routing, ...]


class Trunk(nn.Module):
    """The decoder without its head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size, config.norm_eps)

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding."""
        return self.embed_tokens

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        tree: Any = None,
        **ignored: Any,
    ) -> Features:
        """Tokens `[B, T]` or their embeddings `[B, T, D]` at positions `[B, T]` (None: 0, 1, …).

        Each attends to itself and the tokens before it in its row or, with a `tree`, above it in the tree (see
        `nets.language.tree_attention`).
        """
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        config, routings = self.config, []
        angles = rotary_angles(position_ids, config.hidden_size // config.num_attention_heads, config.rope_base)
        for layer in self.layers:
            x, routing = layer(x, angles, tree)
            routings.append(routing)
        return Features(self.norm(x), tuple(r for r in routings if r is not None))


class Decoder(PreTrainedModel):  # type: ignore[misc]
    """The decoder as a language model: `AutoModelForCausalLM` of a folder of it."""

    config_class = DecoderConfig
    base_model_prefix = "model"
    _supports_attention_backend = True

    def __init__(self, config: DecoderConfig) -> None:
        """Raises UserError if the shape is inconsistent."""
        _check(config)
        super().__init__(config)
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        _initialize(self, config)

    def get_output_embeddings(self) -> nn.Linear:
        """The unembedding."""
        return self.lm_head

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> CausalLMOutput:
        """Logits `[B, T, V]` of tokens `[B, T]`, or of `Trunk`'s other inputs; padding, if any, is on the right."""
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids, **inputs).last_hidden_state))


class DecoderScorer(PreTrainedModel):  # type: ignore[misc]
    """The decoder with a scalar head (or a few outputs): a critic, or a reward model."""

    config_class = DecoderConfig
    base_model_prefix = "model"
    _supports_attention_backend = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.model = Trunk(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
        _initialize(self, config)

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> SequenceClassifierOutput:
        """The outputs `[B, labels]` at the last of tokens `[B, T]`: rows of one length, without padding."""
        return SequenceClassifierOutput(logits=self.score(self.model(input_ids, **inputs).last_hidden_state[:, -1]))


@torch.no_grad()
def _initialize(module: nn.Module, config: DecoderConfig) -> None:
    # As in GPT-2 scaled down where a branch adds to the stream, so that the stream does not grow with depth.
    std = config.initializer_range
    for name, weight in module.named_parameters():
        if weight.ndim > 1:
            adds = name.endswith(("attention.out.weight", "feed.down.weight", "feed.down"))
            nn.init.normal_(weight, std=std / math.sqrt(2 * config.num_hidden_layers) if adds else std)


def _check(config: DecoderConfig) -> None:
    heads, shared, dim = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    if dim % (2 * heads):
        raise UserError(f"dim is {dim}: it must be a multiple of 2 · heads ({2 * heads}), for rotary positions.")
    if heads % shared:
        raise UserError(f"heads is {heads}: it must be a multiple of kv_heads ({shared}).")
    if config.experts and not 1 <= config.experts_per_token <= config.experts:
        raise UserError(
            f"experts_per_token is {config.experts_per_token}: it must be from 1 to experts ({config.experts})."
        )


CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # all tokens but END
NUMBERS = 100  # with number tokens: 0 to 99 are one token each


def characters() -> PreTrainedTokenizerFast:
    """A character tokenizer of 97 tokens; the first is both BOS and EOS."""
    return _tokenizer([END, *CHARACTERS], "")


def numbers() -> PreTrainedTokenizerFast:
    """`characters` with a token for each pair of digits that does not begin with 0: 187 tokens."""
    from tokenizers import Regex

    return _tokenizer([END, *CHARACTERS, *map(str, range(10, NUMBERS))], Regex("[1-9][0-9]|[^\\n]|\\n"))


def _tokenizer(words: list[str], pattern: Any) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    table = Tokenizer(models.WordLevel({c: i for i, c in enumerate(words)}, unk_token="?"))
    table.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    table.decoder = decoders.Fuse()
    table.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=table, bos_token=END, eos_token=END, pad_token=END)


AutoConfig.register(DecoderConfig.model_type, DecoderConfig, exist_ok=True)
AutoModelForCausalLM.register(DecoderConfig, Decoder, exist_ok=True)
AutoModelForSequenceClassification.register(DecoderConfig, DecoderScorer, exist_ok=True)

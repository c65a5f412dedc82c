"""A causal transformer whose memory is an explicit carry.

The block is the one that GPT-2 and Llama share (pre-norm; Radford et al. 2019, Touvron et al. 2023,
arXiv:2302.13971): `x += attention(norm(x)); x += mlp(norm(x))`, with rotary (Su et al. 2021,
arXiv:2104.09864) or learned positions, RMSNorm or LayerNorm, SwiGLU (Shazeer 2020,
arXiv:2002.05202) or GELU, and fewer key-value heads than heads where memory matters (grouped
queries, Ainslie et al. 2023, arXiv:2305.13245). Llama weights such as SmolLM2 load with `from_llama`.

The KV cache is an argument and a result (`Cache`); the module holds no state, so one model serves many
conversations, and a cache can be repeated for a group, reset or saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foresight.errors import UserError, unknown
from foresight.nets.sequence.attention import attend, dropout, is_recording

Pick = Callable[[Tensor], Tensor]  # some steps `[B, t, ...]` of `[B, T, ...]`


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a transformer; the defaults are a small Llama."""

    layers: int = 4
    dim: int = 128
    """Width D of the residual stream."""
    heads: int = 4
    kv_heads: int | None = None
    """Key-value heads that groups of heads share. None: as many as heads."""
    head_dim: int | None = None
    """None: dim / heads."""
    hidden: int | None = None
    """Width inside the MLP. None: 4·dim, or 8/3·dim for SwiGLU, which has a third matrix: equally many parameters."""
    vocab: int | None = None
    """Tokens V. None: the inputs are embeddings `[B, T, D]` and the outputs are features `[B, T, D]`."""
    positions: str = "rope"
    """'rope', 'learned' (a table of `max_length` rows), or 'none': the inputs have them."""
    max_length: int = 2048
    """Rows of the table of learned positions; rotary positions have no limit."""
    rope_base: float = 10_000.0
    norm: str = "rms"
    """'rms' or 'layer'."""
    norm_eps: float = 1e-5
    activation: str = "swiglu"
    """'swiglu' or 'gelu'."""
    tied: bool = True
    """The unembedding is the embedding, transposed."""
    bias: bool = False
    dropout: float = 0.0
    """On attention weights and on what each branch adds, in training mode only."""

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.head_dim or self.dim // self.heads

    @property
    def kv(self) -> int:
        """Key-value heads."""
        return self.kv_heads or self.heads

    @property
    def mlp_width(self) -> int:
        """Features inside the MLP, a multiple of 8."""
        wide = 8 * self.dim / 3 if self.activation == "swiglu" else 4 * self.dim
        return self.hidden or 8 * math.ceil(wide / 8)


class Cache(NamedTuple):
    """The keys and values of the steps read so far: the carry of a transformer.

    - `keys`, `values`: one `[B, kv_heads, slots, head_dim]` per layer;
    - `mask` `[B, length]` bool: True where a slot holds a real token. None: all of them do;
    - `length`: slots in use, the same in every row (rows differ by their mask, not by their length);
    - `static`: the slots are preallocated and written in place (`Transformer.empty_cache`).

    A static cache shares its memory with its continuations: the old cache stays valid, but a second
    continuation overwrites the first. Branch with `select`, which copies.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor | None
    length: int
    static: bool

    @property
    def lengths(self) -> Tensor:
        """Real tokens read in each row, `[B]` int64: the position of the next one."""
        if self.mask is None:
            return torch.full((self.keys[0].shape[0],), self.length, device=self.keys[0].device)
        return self.mask.sum(dim=1)

    def select(self, rows: Tensor) -> Cache:
        """Row i of the result is row `rows[i]` of this one: to repeat a prompt for its group, or to drop rows."""
        return self._replace(
            keys=tuple(x.index_select(0, rows) for x in self.keys),
            values=tuple(x.index_select(0, rows) for x in self.values),
            mask=None if self.mask is None else self.mask[rows],
        )

    def reset(self, cut: Tensor) -> Cache:
        """Empty the rows where `cut` `[B]` is true: their next token is at position 0 and sees only itself."""
        past = (
            torch.ones(len(cut), self.length, dtype=torch.bool, device=cut.device) if self.mask is None else self.mask
        )
        return self._replace(mask=past & ~cut.bool()[:, None])

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `layer` with T more slots, `[B, kv_heads, length + T, head_dim]`.

        In place if static. Raises ValueError if a static cache is full, or if gradients would have
        to flow through the overwritten memory.
        """
        if not self.static:
            if not self.length:
                return key, value
            return torch.cat((self.keys[layer], key), dim=2), torch.cat((self.values[layer], value), dim=2)
        if key.requires_grad and torch.is_grad_enabled():
            raise ValueError("A static cache cannot carry gradients: decode under torch.no_grad(), or use no cache.")
        slots, end = self.keys[layer].shape[2], self.length + key.shape[2]
        if end > slots:
            raise ValueError(f"The cache has {slots} slots, but {end} are needed: allocate a longer one.")
        self.keys[layer][:, :, self.length : end] = key
        self.values[layer][:, :, self.length : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


NO_CACHE = Cache((), (), None, 0, False)  # of blocks that read everything at once


def rotary_angles(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation of each pair of features at each position.

    positions `[B, T]` -> two float32 `[B, 1, T, head_dim / 2]`; pair i rotates by
    `position · base^(-2i / head_dim)` (arXiv:2104.09864, equation 15).
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * base**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x `[B, heads, T, head_dim]`. Llama pairs so, the paper (2i, 2i+1).

    Scalar products of two rotated vectors depend on their positions only through the difference.
    """
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.head_width
        # One matrix for three projections: decoding is bound by reading weights, fastest in few large matrices.
        self.qkv = nn.Linear(config.dim, (config.heads + 2 * config.kv) * width, bias=config.bias)
        self.out = nn.Linear(config.heads * width, config.dim, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        allowed: Tensor | None,
        cache: Cache,
        layer: int,
        pick: Pick | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x `[B, T, D]` -> (result `[B, T, D]`, keys, values).

        allowed None means: causal if the cache is empty, everything if T is 1. With `pick` only its steps attend, and
        `allowed` has their rows.
        """
        config, (batch, steps, _) = self.config, x.shape
        mixed = self.qkv(x).view(batch, steps, config.heads + 2 * config.kv, config.head_width).transpose(1, 2)
        query, key, value = mixed.split((config.heads, config.kv, config.kv), dim=1)
        if angles is not None:
            query, key = rotate(query, *angles), rotate(key, *angles)
        if pick is not None:
            query = pick(query.transpose(1, 2)).transpose(1, 2)
        key, value = cache.append(layer, key, value)
        key, value = key.to(query.dtype), value.to(query.dtype)
        mixed = attend(query, key, value, allowed, config.dropout if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).flatten(2)), key, value


class MLP(nn.Module):
    """SwiGLU, `down(silu(gate(x)) · up(x))`, or GELU, `down(gelu(up(x)))`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.up = nn.Linear(config.dim, config.mlp_width * (2 if self.gated else 1), bias=config.bias)
        self.down = nn.Linear(config.mlp_width, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x = self.up(x)
        if not self.gated:
            return self.down(F.gelu(x))
        gate, up = x.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention, then the MLP, each on a normalized copy and added to the stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(config), Attention(config)
        self.mlp_norm, self.mlp = _norm(config), MLP(config)
        self.dropout = config.dropout

    def forward(self, x: Tensor, *args: Any, pick: Pick | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As `Attention.forward`; with `pick` the result is that of its steps."""
        rate = self.dropout if self.training else 0.0
        mixed, key, value = self.attention(self.attention_norm(x), *args, pick=pick)
        x = (x if pick is None else pick(x)) + dropout(mixed, rate)
        return x + dropout(self.mlp(self.mlp_norm(x)), rate), key, value


class Transformer(nn.Module):
    """A causal transformer over tokens or over embeddings. Raises UserError if the config is inconsistent."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        _check(config)
        self.config = config
        self.embed = None if config.vocab is None else nn.Embedding(config.vocab, config.dim)
        self.position = nn.Embedding(config.max_length, config.dim) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        untied = config.vocab is not None and not config.tied
        self.unembed = nn.Linear(config.dim, config.vocab or 0, bias=False) if untied else None
        self._initialize()

    def _initialize(self) -> None:
        # GPT-2: 0.02, scaled down where a branch adds to the stream, so that the stream does not grow with depth.
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.layers) if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def empty_cache(self, batch: int, slots: int | None = None, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache.

        With `slots` it is static: preallocated and written in place, so decoding copies nothing. Without,
        it grows by concatenation and carries gradients.
        """
        like = self.norm.weight
        shape = (batch, self.config.kv, slots or 0, self.config.head_width)
        keys, values = (
            tuple(torch.zeros(shape, device=like.device, dtype=dtype or like.dtype) for _ in self.blocks)
            for _ in range(2)
        )
        return Cache(keys, values, None, 0, slots is not None)

    def features(
        self,
        inputs: Tensor,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        start: Tensor | None = None,
        pick: Pick | None = None,
    ) -> tuple[Tensor, Cache]:
        """As `forward`, but before the unembedding: `[B, T, D]`, and the cache.

        Apply `logits` only to the steps that need it: with a large vocabulary, logits are most of the memory.
        """
        batch, steps = inputs.shape[:2]
        cache = self.empty_cache(batch) if cache is None else cache
        real = _extend_mask(cache, mask, batch, steps, inputs.device)
        allowed = _allowed(real, cache.length, steps, inputs.device)
        given = positions
        positions = _positions(cache, real, batch, steps, inputs.device) if given is None else given
        if start is not None:
            same = _same_episode(start, cache.length)
            if allowed is None:
                allowed = same.new_ones(steps, cache.length + steps).tril(cache.length)
            allowed = allowed & same[:, None]
            if given is None:
                began = torch.where(start > 0, positions, 0).cummax(dim=1).values
                positions = positions - began
            real = same[:, -1] if real is None else real & same[:, -1]
        x = self.embed(inputs) if self.embed is not None and not inputs.is_floating_point() else inputs
        angles = None
        if self.position is not None:
            x = x + self.position(positions)
        elif self.config.positions == "rope":
            angles = rotary_angles(positions, self.config.head_width, self.config.rope_base)
        x = dropout(x, self.config.dropout if self.training else 0.0)
        early = None if is_recording() else pick  # a picture shows the links of all steps
        keys, values = [], []
        for layer, block in enumerate(self.blocks):
            if early is not None and layer == len(self.blocks) - 1:
                if allowed is None:
                    allowed = x.new_ones(1, 1, steps, cache.length + steps, dtype=torch.bool).tril(cache.length)
                x, key, value = block(x, angles, early(allowed[:, 0])[:, None], cache, layer, pick=early)
            else:
                x, key, value = block(x, angles, allowed, cache, layer)
            keys.append(key)
            values.append(value)
        if pick is not early:
            assert pick is not None
            x = pick(x)
        if cache.static:
            keys, values = list(cache.keys), list(cache.values)
        grown = Cache(tuple(keys), tuple(values), real, cache.length + steps, cache.static)
        return self.norm(x), grown

    def logits(self, features: Tensor) -> Tensor:
        """Features `[..., D]` -> logits `[..., V]`. Raises ValueError if there is no vocabulary."""
        if self.embed is None:
            raise ValueError("This transformer has no vocabulary: its outputs are features.")
        return F.linear(features, self.embed.weight) if self.unembed is None else self.unembed(features)

    def forward(
        self,
        inputs: Tensor,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        start: Tensor | None = None,
        pick: Pick | None = None,
    ) -> tuple[Tensor, Cache]:
        """Read T more steps.

        - `inputs`: tokens `[B, T]` int64, or embeddings `[B, T, D]`;
        - `cache`: of the steps before (None: none);
        - `mask` `[B, T]` bool: False where an input is padding, on either side: it is never attended to
          and takes no position. None: no padding;
        - `positions` `[B, T]` int64. None: the number of real inputs before, the cached ones included;
        - `start` `[B, T]`: 1 at the first step of an episode, which sees nothing before it and is at position 0.
          None: no episode starts;
        - `pick`: takes the steps whose outputs are needed from `[B, T, ...]`; the last layer computes only these.

        Returns the logits `[B, T, V]` (features `[B, T, D]` without a vocabulary) and the cache. Outputs at padding
        are undefined. The weights of its attention: see `nets.sequence.attention.recorded`.
        """
        x, cache = self.features(inputs, cache, positions, mask, start, pick)
        return x if self.embed is None else self.logits(x), cache


def llama_config(source: Mapping[str, Any]) -> TransformerConfig:
    """The `TransformerConfig` of a Llama's `config.json` (or `config.to_dict()`).

    Raises UserError for what is not supported: scaled rotary positions and other activations.
    """
    rope = source.get("rope_parameters") or source.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"RoPE of type '{kind}' is not supported: use a model with rope_type 'default'.")
    if source.get("hidden_act", "silu") != "silu":
        raise UserError(f"Activation '{source['hidden_act']}' is not supported: use a model with 'silu', as Llama has.")
    return TransformerConfig(
        layers=source["num_hidden_layers"],
        dim=source["hidden_size"],
        heads=source["num_attention_heads"],
        kv_heads=source.get("num_key_value_heads"),
        head_dim=source.get("head_dim"),
        hidden=source["intermediate_size"],
        vocab=source["vocab_size"],
        max_length=source.get("max_position_embeddings", 2048),
        rope_base=float(rope.get("rope_theta", source.get("rope_theta", 10_000.0))),
        norm_eps=source.get("rms_norm_eps", 1e-6),
        tied=source.get("tie_word_embeddings", False),
    )


def from_llama(state_dict: Mapping[str, Tensor], config: TransformerConfig) -> Transformer:
    """A transformer with a copy of the weights of transformers' LlamaForCausalLM.

    Raises UserError if a weight is missing or its shape does not fit the config.
    """

    def take(name: str) -> Tensor:
        if name not in state_dict:
            raise UserError(f"These are not the weights of a Llama with {config.layers} layers: '{name}' is missing.")
        return state_dict[name].detach().clone()

    ours = {"embed.weight": take("model.embed_tokens.weight"), "norm.weight": take("model.norm.weight")}
    if not config.tied:
        ours["unembed.weight"] = take("lm_head.weight")
    for i in range(config.layers):
        source, target = f"model.layers.{i}", f"blocks.{i}"
        projections = [take(f"{source}.self_attn.{x}_proj.weight") for x in "qkv"]
        ours[f"{target}.attention.qkv.weight"] = torch.cat(projections)
        ours[f"{target}.attention.out.weight"] = take(f"{source}.self_attn.o_proj.weight")
        ours[f"{target}.mlp.up.weight"] = torch.cat([take(f"{source}.mlp.{x}_proj.weight") for x in ("gate", "up")])
        ours[f"{target}.mlp.down.weight"] = take(f"{source}.mlp.down_proj.weight")
        ours[f"{target}.attention_norm.weight"] = take(f"{source}.input_layernorm.weight")
        ours[f"{target}.mlp_norm.weight"] = take(f"{source}.post_attention_layernorm.weight")
    with torch.device("meta"):  # the weights are replaced: allocate nothing, draw nothing
        model = Transformer(config)
    try:
        model.load_state_dict(ours, assign=True)
    except RuntimeError as error:
        raise UserError(f"The weights do not fit the config: {error}") from error
    return model


def _norm(config: TransformerConfig) -> nn.RMSNorm | nn.LayerNorm:
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.dim, eps=config.norm_eps)


def _extend_mask(cache: Cache, mask: Tensor | None, batch: int, steps: int, device: torch.device) -> Tensor | None:
    """`[B, length + T]` bool, or None if no slot is padding."""
    if mask is None and cache.mask is None:
        return None
    past = torch.ones(batch, cache.length, dtype=torch.bool, device=device) if cache.mask is None else cache.mask
    new = torch.ones(batch, steps, dtype=torch.bool, device=device) if mask is None else mask.bool()
    return torch.cat((past, new), dim=1)


def _positions(cache: Cache, real: Tensor | None, batch: int, steps: int, device: torch.device) -> Tensor:
    """`[B, T]`: how many real inputs of the row precede each one."""
    if real is None:
        return torch.arange(cache.length, cache.length + steps, device=device).expand(batch, steps)
    return (real.cumsum(dim=1)[:, cache.length :] - 1).clamp(min=0)


def _allowed(real: Tensor | None, length: int, steps: int, device: torch.device) -> Tensor | None:
    """`[B, 1, T, length + T]` bool: which slots each step may see. None where SDPA needs no mask."""
    if real is None and (steps == 1 or length == 0):
        return None
    slots = torch.arange(length + steps, device=device)
    query = slots[length:, None]
    causal = slots <= query
    if real is None:
        return causal[None, None]
    # Every step sees itself, padding too: a softmax over nothing is NaN, and NaN spreads through later layers.
    return ((causal & real[:, None, :]) | (slots == query))[:, None]


def _same_episode(start: Tensor, length: int) -> Tensor:
    """`[B, T, length + T]` bool: whether a slot is of the episode of a step. The cache is of the first one."""
    episode = start.long().cumsum(dim=1)
    slots = F.pad(episode, (length, 0))
    return episode[:, :, None] == slots[:, None]


def _check(config: TransformerConfig) -> None:
    for kind, name, valid in (
        ("positions", config.positions, ("rope", "learned", "none")),
        ("norm", config.norm, ("rms", "layer")),
        ("activation", config.activation, ("swiglu", "gelu")),
    ):
        if name not in valid:
            raise unknown(kind, name, valid)
    if config.head_dim is None and config.dim % config.heads:
        raise UserError(f"dim={config.dim} is not a multiple of heads={config.heads}.")
    if config.heads % config.kv:
        raise UserError(f"heads={config.heads} is not a multiple of kv_heads={config.kv}.")
    if config.positions == "rope" and config.head_width % 2:
        raise UserError(f"Rotary positions need an even head width, not {config.head_width}: change dim or heads.")

"""Multi-token prediction (MTP): heads that also predict the tokens after the next, and their values.

The form is DeepSeek-V3's chain (arXiv:2412.19437, §2.2, eq. 21 to 23), over a trunk with the features f¹:

    fᵏ_n = mlp( W [ norm(fᵏ⁻¹_{n-1}) ; norm(embed(x_n)) ] )        k = 2 .. K
    pᵏ(· | x_≤n) = softmax(unembed(norm(fᵏ_n)))                     vᵏ(x_≤n) = wᵏ · silu(R norm(fᵏ_n))

So head k starts from trunk features that are k - 1 tokens old and reads the last k - 1 tokens itself. Embedding and
unembedding are the trunk's, and the value layer R is shared by the heads. Head 1 is the trunk with a value. In
Gloeckle et al. 2024 (arXiv:2404.19737) all heads work in parallel on x_≤n, without the tokens between: their head k
predicts the average over those. In a chain every head describes *one state*, that after x_n. Hence all heads have the
same targets (the policy's own next token, one TD target), their values are K estimates of one quantity, and a draft
depends on the drafts before it.

Left out is the attention of DeepSeek's modules: the trunk's features already cover the context (Hydra's heads do the
same, Ankner et al. 2024, arXiv:2402.05109). A head is then a function of a vector and a token: it needs no cache, works
with any trunk, and costs about a fiftieth of a 135M one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foresight.data.text import TokenBatch
from foresight.errors import UserError
from foresight.nets.language.checkpointing import rms_norm
from foresight.nets.language.model import LanguageModel, token_tree
from foresight.nets.language.tokentree import ROOT
from foresight.nets.mlp import orthogonal
from foresight.nets.sequence.transformer import MLP, TransformerConfig

VALUE_SCALE = 100.0  # scale of the values: an Adam step at 1e-3 changes one by at most 0.1 for any width of the trunk


class _Link(nn.Module):
    """From the features before a token, and the token, to the features after it: `[..., D]` both."""

    def __init__(self, dim: int, hidden: int, gain: Tensor | None) -> None:
        super().__init__()
        self.norm_features, self.norm_token, self.norm_mlp = (nn.RMSNorm(dim) for _ in range(3))
        self.join = nn.Linear(2 * dim, dim, bias=False)
        self.mlp = MLP(TransformerConfig(dim=dim, hidden=hidden))
        self.norm = nn.RMSNorm(dim)
        with torch.no_grad():
            # Start as the identity on the features, one token late, at the scale that the unembedding expects: 20 steps
            # from a random start get no further than 10 from this one (SmolLM2's heads, KL to its own distribution).
            self.join.weight.copy_(torch.eye(dim, 2 * dim))
            self.mlp.down.weight.zero_()
            if gain is not None:
                self.norm.weight.copy_(gain)

    def forward(self, features: Tensor, token: Tensor) -> Tensor:
        joined = self.join(torch.cat([_norm(self.norm_features, features), _norm(self.norm_token, token)], -1))
        return _norm(self.norm, joined + self.mlp(_norm(self.norm_mlp, joined)))


def _norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight, 1e-5)


class MultiTokenHeads(nn.Module):
    """K heads over features `[..., D]` of a trunk, the first of which is the trunk's own. All values start at 0."""

    def __init__(self, dim: int, heads: int = 3, hidden: int | None = None, gain: Tensor | None = None) -> None:
        """`hidden` is the width inside the MLPs (None: 2 D); `gain` `[D]` that of the trunk's last norm (None: 1).

        Raises ValueError for fewer than 1 head.
        """
        super().__init__()
        if heads < 1:
            raise ValueError(f"There must be at least 1 head, not {heads}.")
        self.links = nn.ModuleList(_Link(dim, hidden or 2 * dim, gain) for _ in range(heads - 1))
        self.read = orthogonal(nn.Linear(dim, hidden or 2 * dim))
        self.value_weight = nn.Parameter(torch.zeros(heads, hidden or 2 * dim))

    def __len__(self) -> int:
        """K."""
        return len(self.value_weight)

    def extend(self, head: int, features: Tensor, token: Tensor) -> Tensor:
        """The features `[..., D]` of head `head` (2 .. K) from those of the one before it and an embedded token."""
        return self.links[head - 2](features, token)

    def forward(self, hidden: Tensor, embedded: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """The features of all heads at every token, and where they exist: `[K, N, D]` and bool `[K, N]`.

        Shapes: hidden f¹ and embedded `[N, D]`, parents `[N]`: the index of the token before each, or `ROOT`. Head k
        needs k - 1 tokens before it; its features elsewhere are undefined.
        """
        features, exist = [hidden], [torch.ones_like(parents, dtype=torch.bool)]
        before = parents.clamp(min=0)
        for head in range(2, len(self) + 1):
            exist.append(exist[-1][before] & (parents != ROOT))
            features.append(self.extend(head, features[-1][before], embedded))
        return torch.stack([f.to(hidden.dtype) for f in features]), torch.stack(exist)

    def values(self, features: Tensor) -> Tensor:
        """The values `[K, N]` of features `[K, N, D]`, always in float32."""
        with torch.autocast(features.device.type, enabled=False):
            read = functional.silu(self.read(functional.rms_norm(features.float(), features.shape[-1:])))
            return VALUE_SCALE * (read * self.value_weight[:, None]).mean(-1)


def heads_for(model: LanguageModel, heads: int, hidden: int | None = None) -> MultiTokenHeads:
    """New heads for a model, as wide as it, on its device, drawn from the global generator.

    Raises UserError if the logits are not a linear unembedding of the features, which the heads need to share.
    """
    if not model.capabilities.linear:
        raise UserError(
            f"{type(model.module).__name__} has no linear unembedding for the heads to share: choose another model "
            "(Llama, Qwen, SmolLM)."
        )
    embedding = model.module.get_input_embeddings()
    last = getattr(getattr(model.module, model.module.base_model_prefix), "norm", None)
    gain = getattr(last, "weight", None)
    return MultiTokenHeads(embedding.embedding_dim, heads, hidden, gain).to(model.device)


def embed(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The model's embeddings `[..., D]` of tokens `[...]`, without gradient."""
    with torch.no_grad():
        return model.module.get_input_embeddings()(tokens.to(model.device))


def logits(model: LanguageModel, features: Tensor) -> Tensor:
    """The model's logits `[..., V]` of a head's features `[..., D]`; gradients flow only to the features."""
    if not torch.is_grad_enabled():
        return model.logits(features)  # uses autocast's cached weights, or packed ones
    unembedding: Any = model.module.get_output_embeddings()
    fixed = {name: weight.detach() for name, weight in unembedding.named_parameters()}
    return model.scaled(torch.func.functional_call(unembedding, fixed, (features,)))


@dataclasses.dataclass(frozen=True)
class View:
    """One pass of the trunk over the token tree of a batch, and the nodes of its n distinct sampled tokens.

    `hidden` `[N, D]`, `embedded` `[N, D]` (no gradient), `parents` `[N]`; of the distinct sampled tokens: `tokens`
    `[n]` and `context` `[n]`, the node that predicts each; `back`, the index in n of each sampled token; `mask`.
    """

    hidden: Tensor
    embedded: Tensor
    parents: Tensor
    tokens: Tensor
    context: Tensor
    back: Tensor
    mask: Tensor

    def scatter(self, values: Tensor) -> Tensor:
        """Values `[..., n]` of distinct sampled tokens, scattered to `[..., P, G, T]`; 0 on padding."""
        flat = values.reshape(-1, values.shape[-1])
        whole = torch.zeros(len(flat), *self.mask.shape, dtype=values.dtype, device=values.device)
        whole[:, self.mask] = flat[:, self.back]
        return whole.view(*values.shape[:-1], *self.mask.shape)


def view(model: LanguageModel, batch: TokenBatch) -> View:
    """Run the trunk over a batch; shared prefixes are computed once."""
    tree, path = token_tree(batch)
    sampled, back = path.unique(return_inverse=True)
    with model.precision():
        hidden = model.states(tree)
    place = (x.to(hidden.device) for x in (tree.parents, tree.tokens[sampled], tree.parents[sampled], back, batch.mask))
    return View(hidden, embed(model, tree.tokens), *place)

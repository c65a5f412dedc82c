"""Token rows as one prefix tree: a prefix that several share is computed once, whether prompt or completion."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

ROOT = -1
BLOCK = 64  # queries with keys in common


class TokenTree:
    """The N distinct prefixes of some token rows, flattened: each linear layer of a model is one product over them.

    - `tokens`, `positions` and `parents` `[N]`: each prefix's last token, its position, and the index of the prefix
      without it (`ROOT`: none);
    - `paths`: for each row, the index in N of every token.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        """`texts` are the token ids of each row."""
        found: dict[tuple[int, int], int] = {}
        self.paths: list[list[int]] = []
        for text in texts:
            parent, path = ROOT, []
            for token in text:
                parent = found.setdefault((parent, token), len(found))
                path.append(parent)
            self.paths.append(path)
        parents, tokens = np.array(list(found), dtype=np.int64).reshape(-1, 2).T
        sees = np.zeros((len(found), len(found)), dtype=bool)  # itself and what its parent sees
        for i, parent in enumerate(parents):
            if parent != ROOT:
                sees[i] = sees[parent]
            sees[i, i] = True
        self.parents, self.tokens = torch.from_numpy(parents.copy()), torch.from_numpy(tokens.copy())
        self.sees = torch.from_numpy(sees)
        self.positions = self.sees.sum(1) - 1
        self._bias: Tensor | None = None

    def __len__(self) -> int:
        """N."""
        return len(self.tokens)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention: query `[1, H, N, D]`, key and value `[1, KV, N, D]` to `[1, N, H, D]`."""
        if query.is_cpu and self._blocks is not None:
            return self._attend_in_blocks(query, key, value, scale, *self._blocks)
        if self._bias is None:
            self._bias = _bias(self.sees, query.dtype).to(query.device)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, self._bias, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return mixed.transpose(1, 2)

    @functools.cached_property
    def _blocks(self) -> tuple[Tensor, Tensor] | None:
        """The keys that any of `BLOCK` adjacent queries sees, `[C, W]`, and the bias of these, `[C, 1, BLOCK, W]`.

        None unless W is less than half of N: most queries of few rows see most keys.
        """
        parts = self.sees.split(BLOCK)
        seen = [part.any(0).nonzero().flatten() for part in parts]
        width = max(map(len, seen))
        if 2 * width >= len(self):
            return None
        keys = torch.zeros(len(parts), width, dtype=torch.int64)
        bias = torch.full((len(parts), 1, BLOCK, width), -torch.inf)
        for block, (part, visible) in enumerate(zip(parts, seen, strict=True)):
            keys[block, : len(visible)] = visible
            bias[block, 0, : len(part), : len(visible)] = _bias(part[:, visible])
            bias[block, 0, len(part) :] = 0.0  # padding, whose result is dropped
        return keys, bias

    def _attend_in_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, keys: Tensor, bias: Tensor
    ) -> Tensor:
        """`attend` of blocks of queries over their keys.

        At least in float32: torch's gradient in bfloat16 takes longer on a CPU, and these products are small.
        """
        heads, nodes, size = query.shape[1:]
        kind = torch.promote_types(query.dtype, torch.float32)
        padded = functional.pad(query.to(kind), (0, 0, 0, len(keys) * BLOCK - nodes))
        blocks = padded.view(heads, len(keys), BLOCK, size).transpose(0, 1)
        key, value = (x[0].to(kind)[:, keys].transpose(0, 1) for x in (key, value))  # [C, KV, W, D]
        with torch.autocast("cpu", enabled=False):
            mixed = functional.scaled_dot_product_attention(
                blocks, key, value, bias.to(kind), scale=scale, enable_gqa=heads != key.shape[1]
            )
        return mixed.transpose(1, 2).reshape(1, -1, heads, size)[:, :nodes].to(query.dtype)


def _bias(sees: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """-inf where a query does not see a key."""
    return torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf)

"""Token rows as one prefix tree: a prefix that several share is computed once, whether prompt or completion."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

ROOT = -1


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
        if self._bias is None:
            bias = torch.zeros(self.sees.shape, dtype=query.dtype).masked_fill_(~self.sees, -torch.inf)
            self._bias = bias.to(query.device)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, self._bias, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return mixed.transpose(1, 2)

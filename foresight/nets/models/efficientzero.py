"""EfficientZero's learned model: an LSTM predicts the value prefix, and latents are consistent with observations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foresight.data.trajectory import Tree
from foresight.nets.mlp import MLP, Encoder, orthogonal
from foresight.nets.models.muzero import CategoricalScalar
from foresight.ops import latent

State = dict[str, Tensor]


class PrefixModel(nn.Module):
    """Latents `[B, D]`, and an LSTM over them that predicts the value prefix (arXiv:2111.00210, §4.2).

    A state is a dict: `latent`, the LSTM's `h` and `c` `[B, L]`, the `prefix` so far and the `depth` `[B]`. The LSTM
    and the prefix are reset every `horizon` steps. The reward of a step is the increase of the prefix. A
    `planning.search.mcts.Model` (`root`, `step`).
    """

    eye: Tensor

    def __init__(
        self,
        encoder: Encoder,
        actions: int,
        latent_size: int = 64,
        hidden: Sequence[int] = (128,),
        lstm: int = 64,
        horizon: int = 5,
        support: int = 20,
        discount: float = 0.997,
        activation: str = "relu",
        bin_width: float = 1.0,
    ) -> None:
        super().__init__()
        self.discount, self.horizon = discount, horizon
        self.encoder, self.into = encoder, orthogonal(nn.Linear(encoder.size, latent_size), 1.0)
        self.body = MLP(latent_size + actions, hidden, activation)
        self.next = orthogonal(nn.Linear(self.body.size, latent_size), 1.0)
        self.lstm, self.prefix = nn.LSTMCell(latent_size, lstm), CategoricalScalar(lstm, support, bin_width)
        self.head = MLP(latent_size, hidden, activation)
        self.policy = orthogonal(nn.Linear(self.head.size, actions), 0.01)
        self.value = CategoricalScalar(self.head.size, support, bin_width)
        wide, narrow = self.head.size, max(self.head.size // 2, 1)
        self.projection = nn.Sequential(*_layer(latent_size, wide), *_layer(wide, wide), *_layer(wide, wide)[:-1])
        self.predictor = nn.Sequential(*_layer(wide, narrow), nn.Linear(narrow, wide))
        self.register_buffer("eye", torch.eye(actions), persistent=False)

    def represent(self, obs: Tree) -> State:
        """The state of an observation: its latent, with LSTM and prefix 0."""
        found = latent.unit_interval(self.into(self.encoder(obs)))
        start = found.new_zeros(len(found), self.lstm.hidden_size)
        zero = found.new_zeros(len(found))
        return {"latent": found, "h": start, "c": start, "prefix": zero, "depth": zero}

    def advance(self, state: State, action: Tensor) -> State:
        """The state after the actions int64 `[B]`, before any reset; the prefix is read from its `h`."""
        joined = torch.cat([state["latent"], self.eye.index_select(0, action)], -1)
        after = latent.unit_interval(self.next(self.body(joined)) + state["latent"])
        h, c = self.lstm(after, (state["h"], state["c"]))
        return {"latent": after, "h": h, "c": c, "prefix": state["prefix"], "depth": state["depth"] + 1}

    def reset_prefix(self, state: State) -> State:
        """Reset the LSTM and the prefix to 0 where `depth` is a multiple of the horizon."""
        kept = (state["depth"] % self.horizon != 0).to(state["h"].dtype)
        wide = kept.unsqueeze(-1)
        return {**state, "h": state["h"] * wide, "c": state["c"] * wide, "prefix": state["prefix"] * kept}

    def root(self, obs: Tree) -> tuple[Tensor, Tensor, State]:
        """`(logits, value, state)`, see `planning.search.mcts.Model`."""
        state = self.represent(obs)
        ahead = self.head(state["latent"])
        return self.policy(ahead), self.value(ahead), state

    def step(self, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Tensor, Tensor]:
        """`(state, reward, discount, logits, value)`, see `planning.search.mcts.Model`."""
        after = self.advance(state, action)
        prefix = self.prefix(after["h"])
        reward = prefix - state["prefix"]
        ahead = self.head(after["latent"])
        after = self.reset_prefix({**after, "prefix": prefix})
        return after, reward, torch.full_like(reward, self.discount), self.policy(ahead), self.value(ahead)

    def project(self, latents: Tensor) -> Tensor:
        """The projection `[N, P]` of latents `[N, D]` for the consistency loss, with mean 0 over the N rows.

        Three layers with batch normalization, also after the last (arXiv:2111.00210, appendix A; SimSiam). Without it a
        constant would be similar to all latents, which lie in [0, 1].
        """
        return self.projection(latents)


def _layer(inputs: int, outputs: int) -> list[nn.Module]:
    """Linear, batch normalization, ReLU. Always with batch statistics: used only in the loss, never in a search."""
    return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs, track_running_stats=False), nn.ReLU()]

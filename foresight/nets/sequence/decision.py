"""The network of the Decision Transformer: three tokens per step, `nets.sequence.transformer` over them.

Source: Chen et al. 2021 (arXiv:2106.01345), algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight.data.episodes import Episodes
from foresight.data.trajectory import Tree
from foresight.nets.imitation import ActionCode, NormalizedObs
from foresight.nets.sequence.transformer import Transformer, TransformerConfig


class DecisionTransformer(nn.Module):
    """Return to go, observation and action of each of K steps, in this order; actions are predicted at observations.

    An embedding of the time step in the episode, at most `max_length`, is added to its three tokens; there are no other
    positions. `scale` divides returns; it and the statistics of the observations are buffers, taken from the data.
    `outputs` is the number of outputs per action; None: the width of its vector. With `bfloat16` the transformer runs
    under autocast; what is before and after it stays float32.
    """

    scale: Tensor
    best: Tensor

    def __init__(
        self,
        obs: gs.Space[Any],
        action: gs.Space[Any],
        dim: int,
        layers: int,
        heads: int,
        max_length: int,
        dropout: float,
        outputs: int | None = None,
        bfloat16: bool = False,
    ) -> None:
        super().__init__()
        self.obs_space, self.action_space, self.max_length, self.autocast = obs, action, max_length, bfloat16
        self.inputs, self.actions = NormalizedObs(obs), ActionCode(action)
        self.embed_return, self.embed_obs = nn.Linear(1, dim), nn.Linear(self.inputs.size, dim)
        self.embed_action, self.embed_time = nn.Linear(self.actions.width, dim), nn.Embedding(max_length, dim)
        nn.init.normal_(self.embed_time.weight, std=0.02)
        self.norm = nn.LayerNorm(dim)
        shape = TransformerConfig(
            layers=layers, dim=dim, heads=heads, norm="layer", activation="gelu", bias=True, dropout=dropout,
            positions="none",
        )  # fmt: skip
        self.transformer = Transformer(shape)
        self.head = nn.Linear(dim, outputs or self.actions.width)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("best", torch.zeros(()))  # the highest return of the data

    def fit(self, episodes: Episodes) -> None:
        """Take the statistics of the data."""
        self.inputs.fit(episodes.obs[episodes.rows].to(self.scale.device))
        self.scale.copy_(episodes.to_go[episodes.rows].abs().max())
        self.best.copy_(episodes.returns.max())

    def forward(self, obs: Tensor, action: Tensor, to_go: Tensor, time: Tensor, mask: Tensor) -> Tensor:
        """Outputs for actions `[B, K, outputs]` of steps `[B, K, ...]`; `action` `[B, K, width]` are vectors.

        The output of a step depends on its return and observation and on everything before; its action and what
        follows are invisible to it.
        """
        if isinstance(self.obs_space, gs.Discrete):  # padding is 0, which may be none of the integers
            obs = obs.masked_fill(mask == 0, int(self.obs_space.start))
        asked = self.embed_return((to_go / self.scale).unsqueeze(-1))
        tokens = torch.stack([asked, self.embed_obs(self.inputs(obs)), self.embed_action(action)], 2)  # [B, K, 3, D]
        when = self.embed_time(time.clamp(max=self.max_length - 1)).unsqueeze(2)
        stream = self.norm(tokens + when).flatten(1, 2)
        real = mask.repeat_interleave(3, 1) > 0
        with torch.autocast(stream.device.type, torch.bfloat16, enabled=self.autocast):
            features, _ = self.transformer(stream, mask=real, pick=at_observations)
        y: Tensor = self.head(features.float())
        return y


def at_observations(tokens: Tensor) -> Tensor:
    """The observations' `[B, K, ...]` of all three tokens' `[B, 3 K, ...]`."""
    return tokens[:, 1::3]


def empty_carry(net: DecisionTransformer, obs: Tensor, steps: int) -> dict[str, Tensor]:
    """The memory of a policy before an episode, for `obs` `[B, ...]`: zeros.

    It is a window of `steps` steps, the number of steps in the episode, and the rewards received `[B]`.
    """
    zeros = torch.zeros(len(obs), steps, device=obs.device)
    return {
        "obs": obs.new_zeros(len(obs), steps, *obs.shape[1:]),
        "action": zeros.new_zeros(len(obs), steps, net.actions.width),
        "to_go": zeros,
        "time": zeros.long(),
        "mask": zeros,
        "steps": zeros[:, 0].long(),
        "received": zeros[:, 0],
    }


def predict(net: DecisionTransformer, carry: Tree, obs: Tensor, to_go: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs `[B, outputs]` for the action at `obs` `[B, ...]`, and the window with this step, its action left 0.

    `to_go` `[B]` is the return asked for from here on.
    """
    window = {name: carry[name].roll(-1, 1) for name in ("obs", "action", "to_go", "time", "mask")}
    window["obs"][:, -1], window["action"][:, -1] = obs, 0
    window["to_go"][:, -1] = to_go
    window["time"][:, -1], window["mask"][:, -1] = carry["steps"], 1
    return net(**window)[:, -1], window


def advance(net: DecisionTransformer, carry: Tree, window: dict[str, Tensor], action: Tensor) -> dict[str, Tensor]:
    """The carry after `action` `[B, ...]` was chosen at the last step of `window`."""
    window["action"][:, -1] = net.actions.encode(action)
    return {**window, "steps": carry["steps"] + 1, "received": carry["received"]}


def rewarded(carry: Tree, reward: Tensor) -> Tree:
    """The carry after the `reward` `[B]` of the last action."""
    return {**carry, "received": carry["received"] + reward.to(carry["received"].device)}

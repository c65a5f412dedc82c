"""Actors and critics with memory, which is an explicit carry.

A carry is a tree of tensors `[B, ...]` that is zero before the first step, for every kind of memory, so `forget`
resets rows of any kind. A memory is a module with `size`, `initial(batch) -> carry` and
`forward(x [B, T, inputs], carry, start [B, T] or None) -> (features [B, T, size], carry)`; `start` is 1 at the first
step of an episode, and no step sees another episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight import errors
from foresight.data import trees
from foresight.data.trajectory import Tree, tree_map
from foresight.errors import UserError
from foresight.nets import encoders
from foresight.nets.actor_critic import ActorCritic, Body, SeparateNetworks
from foresight.nets.heads import PolicyHead, PopArtHead, ScalarHead, StateDependentHead
from foresight.nets.mlp import Encoder, orthogonal
from foresight.nets.normalize import ObsNormalizer
from foresight.nets.outputs import Output, Scalar
from foresight.nets.sequence.gtrxl import GTrXL
from foresight.nets.sequence.recurrent import Recurrent
from foresight.nets.sequence.window import Window

Memory = Recurrent | GTrXL | Window
reset_carry = trees.reset_carry
KINDS = ("gru", "lstm", "gtrxl", "transformer")
# The trunks of a backbone, and whether each has memory; the policy uses the first, the value the last.
BACKBONES = {
    "shared": {"shared": True},
    "separate": {"actor": True, "critic": True},
    "actor": {"actor": True, "critic": False},
    "critic": {"actor": False, "critic": True},
}


@dataclass(frozen=True)
class Shape:
    """The shape of a memory."""

    kind: str  # one of KINDS
    size: int = 64  # output features
    layers: int = 1
    heads: int = 4  # attention only
    window: int = 64  # attention only: how many earlier steps it sees


class MemoryConfig(Protocol):
    """The fields of a Config that choose the memory of its networks."""

    @property
    def memory(self) -> str | None:
        """One of `KINDS`; None for no memory."""

    @property
    def memory_size(self) -> int:
        """Output features."""

    @property
    def memory_layers(self) -> int:
        """Number of layers."""

    @property
    def memory_heads(self) -> int:
        """Attention heads."""

    @property
    def memory_window(self) -> int:
        """The number of earlier steps that attention sees."""

    @property
    def backbone(self) -> str:
        """One of `BACKBONES`."""


def shape_of(config: MemoryConfig) -> Shape | None:
    """The shape given by the Config fields `memory` and `memory_*`; None without memory."""
    if config.memory is None:
        return None
    return Shape(config.memory, config.memory_size, config.memory_layers, config.memory_heads, config.memory_window)


def shapes_of(config: MemoryConfig) -> dict[str, Shape | None]:
    """`shape_of` for "actor" and "critic"; None for one that has no memory under `config.backbone`.

    Raises UserError for an unknown backbone.
    """
    if config.backbone not in BACKBONES:
        raise errors.unknown("backbone", config.backbone, BACKBONES)
    remembers = BACKBONES[config.backbone]
    return {name: shape_of(config) if remembers.get(name, True) else None for name in ("actor", "critic")}


def make(shape: Shape, inputs: int) -> Memory:
    """The memory over features `[B, T, inputs]`. Raises UserError for an unknown kind or a value below 1."""
    if shape.kind not in KINDS:
        raise errors.unknown("memory", shape.kind, KINDS)
    for name in ("size", "layers", "heads", "window"):
        if getattr(shape, name) < 1:
            raise UserError(f"The memory's {name} must be at least 1, not {getattr(shape, name)}.")
    if shape.kind in ("gru", "lstm"):
        return Recurrent(shape.kind, inputs, shape.size, shape.layers)
    kind: type[GTrXL | Window] = GTrXL if shape.kind == "gtrxl" else Window
    return kind(inputs, shape.size, shape.layers, shape.heads, shape.window)


def starts(cut: Tensor) -> Tensor:
    """Where episodes start in `[B, T]`: after a cut. Never at the first step, which the carry belongs to."""
    return torch.cat([torch.zeros_like(cut[:, :1]), cut[:, :-1]], 1)


class Trunk(nn.Module):
    """An encoder, and optionally a memory over its features."""

    def __init__(self, encoder: Encoder, memory: Memory | None) -> None:
        super().__init__()
        self.encoder, self.memory = encoder, memory
        self.size: int = encoder.size if memory is None else memory.size

    def initial(self, batch: int) -> Tree:
        """The carry of `batch` rows before the first step."""
        return None if self.memory is None else self.memory.initial(batch)

    def forward(self, obs: Tree, carry: Tree = None, start: Tensor | None = None) -> tuple[Tensor, Tree]:
        """Features and carry: of single steps `[B, ...]` without `start`, of sequences `[B, T, ...]` with it."""
        x = self.encoder(obs)
        if self.memory is None:
            return x, None
        if carry is None:
            carry = self.initial(len(x))
        if start is not None:
            return self.memory(x, carry, start)
        y, carry = self.memory(x.unsqueeze(1), carry)
        return y.squeeze(1), carry

    def sequence(self, obs: Tree, start: Tensor, burn_in: int) -> Tensor:
        """Features `[B, T - burn_in, size]` of sequences `[B, T, ...]`, starting from an empty memory.

        The first `burn_in` steps only fill the memory, without gradient (Kapturowski et al. 2019, R2D2, §3).
        """
        rest = tree_map(lambda x: x[:, burn_in:], obs)
        if self.memory is None:
            return self(rest, None, None)[0]
        with torch.no_grad():
            early = tree_map(lambda x: x[:, :burn_in], obs)
            carry = self(early, None, start[:, :burn_in])[1] if burn_in else None
        features: Tensor = self(rest, carry, start[:, burn_in:])[0]
        return features


class MemoryActorCritic(nn.Module):
    """Policy and value heads over one shared trunk or one each: `ActorCritic` with memory.

    The carry is a dict with an entry per trunk. `normalizer` and `mask_key` are those of `ActorCritic`.
    """

    def __init__(
        self,
        trunks: dict[str, Trunk],
        policy_head: PolicyHead,
        value_head: ScalarHead | PopArtHead,
        gains: tuple[float, float],
        normalizer: ObsNormalizer | None = None,
        mask_key: str | None = None,
    ) -> None:
        super().__init__()
        self.names = list(trunks)
        self.trunks: Any = nn.ModuleDict(trunks)  # of `Trunk`
        self.policy_head, self.value_head = policy_head, value_head
        ends = ((trunks[self.names[0]], policy_head), (trunks[self.names[-1]], value_head))
        self.last = nn.ModuleList(
            orthogonal(nn.Linear(trunk.size, head.width), gain) for (trunk, head), gain in zip(ends, gains, strict=True)
        )
        self.normalizer, self.mask_key = normalizer, mask_key

    def initial(self, batch: int) -> dict[str, Tree]:
        """The carry of `batch` rows before the first step."""
        return {name: trunk.initial(batch) for name, trunk in self.trunks.items()}

    def step(self, obs: Tree, carry: Tree = None) -> tuple[Output, Tree]:
        """The `Output` over actions after one more step, obs `[B, ...]`, and the carry.

        Only trunks that the carry has an entry for are run; without a carry, as at the start of an evaluation, the
        policy's.
        """
        names = self.names[:1] if carry is None else [name for name in self.names if name in carry]
        y, carry = self._features(names, self._normal(obs), carry, None)
        return self._actions(y[0], obs), carry

    def value(self, obs: Tree, carry: Tree = None) -> Scalar:
        """The value after one more step, obs `[B, ...]`."""
        y, _ = self._features(self.names[-1:], self._normal(obs), carry, None)
        value: Scalar = self.value_head(self.last[1](y[-1]))
        return value

    def read(self, obs: Tree, carry: Tree = None, start: Tensor | None = None) -> tuple[Output, Scalar, Tree]:
        """`forward`."""
        result: tuple[Output, Scalar, Tree] = self(obs, carry, start)
        return result

    def value_layer(self) -> tuple[Tensor, Tensor]:
        """See `ActorCritic.value_layer`."""
        return self.last[1].weight, self.last[1].bias  # type: ignore[return-value]

    def forward(self, obs: Tree, carry: Tree = None, start: Tensor | None = None) -> tuple[Output, Scalar, Tree]:
        """Policy, value and carry: of single steps `[B, ...]` without `start`, of sequences `[B, T, ...]` with it.

        `start` `[B, T]` is 1 at the first step of an episode.
        """
        y, carry = self._features(self.names, self._normal(obs), carry, start)
        return self._actions(y[0], obs), self.value_head(self.last[1](y[-1])), carry

    def vjp(self, obs: Tree) -> None:
        """None: there is no compiled backward pass, autograd does it. See `ActorCritic.vjp`."""

    def _features(
        self, names: Sequence[str], obs: Tree, carry: Tree, start: Tensor | None
    ) -> tuple[list[Tensor], dict[str, Tree]]:
        before = carry or {}
        read = [self.trunks[name](obs, before.get(name), start) for name in names]
        return [y for y, _ in read], {name: after for name, (_, after) in zip(names, read, strict=True)}

    def _normal(self, obs: Tree) -> Tree:
        return obs if self.normalizer is None else self.normalizer(obs)

    def _actions(self, features: Tensor, obs: Tree) -> Output:
        y = self.last[0](features)
        if isinstance(self.policy_head, StateDependentHead):
            y = torch.cat([y, features], -1)
        return self.policy_head(y) if self.mask_key is None else self.policy_head(y, obs[self.mask_key] > 0)


def check_backbone(memory: object | None, backbone: str) -> None:
    """Raise UserError for an unknown `backbone`, and for another one than "shared" without a memory."""
    if backbone not in BACKBONES:
        raise errors.unknown("backbone", backbone, BACKBONES)
    if memory is None and backbone != "shared":
        raise UserError(f"backbone {backbone!r} has no effect without a memory: set memory, or leave out backbone.")


def actor_critic(
    space: gs.Space[Any],
    policy_head: PolicyHead,
    value_head: ScalarHead | PopArtHead,
    shape: Shape | None,
    backbone: str = "shared",
    hidden: Sequence[int] = (64,),
    activation: str = "tanh",
    images: str = "nature",
    normalizer: ObsNormalizer | None = None,
    bfloat16: bool = False,
    gains: tuple[float, float] = (0.01, 1.0),
) -> ActorCritic | MemoryActorCritic:
    """Encoders for observations of `space`, memories of `shape` over them, and the heads. `shape` None: `ActorCritic`.

    `backbone`: 'shared' is one trunk for both, 'separate' one each; with 'actor' and 'critic' (one each) only that one
    has memory. `bfloat16` is for pixel trunks without memory. Raises UserError for an unknown name or a bad value, and
    for another `backbone` than 'shared' without memory.
    """
    check_backbone(shape, backbone)
    if shape is None:
        widths = (policy_head.width, value_head.width)
        body: Body | SeparateNetworks
        if isinstance(policy_head, StateDependentHead):
            body, size = encoders.appended_body(space, widths, gains, hidden, activation, images, bfloat16)
            policy_head.over(size)
        else:
            body = encoders.actor_critic_body(space, widths, gains, hidden, activation, images, bfloat16)
        return ActorCritic(body, policy_head, value_head, normalizer, encoders.mask_key(space))
    trunks = {}
    for name, remembers in BACKBONES[backbone].items():
        encoder = encoders.encoder(space, hidden, activation, images)
        trunks[name] = Trunk(encoder, make(shape, encoder.size) if remembers else None)
    if isinstance(policy_head, StateDependentHead):
        policy_head.over(next(iter(trunks.values())).size)
    return MemoryActorCritic(trunks, policy_head, value_head, gains, normalizer, encoders.mask_key(space))

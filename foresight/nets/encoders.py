"""Networks for spaces: encoders of observations and heads of actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight import errors
from foresight.errors import UserError
from foresight.nets import precision
from foresight.nets.actor_critic import SeparateNetworks, SharedTrunk, VectorizedMLP
from foresight.nets.conv import Impala, Nature, Nips, Planes, order
from foresight.nets.heads import CategoricalHead, MultiCategoricalHead, NormalHead, StateDependentHead
from foresight.nets.mlp import MLP
from foresight.nets.normalize import ObsNormalizer
from foresight.nets.scored_actions import FEATURES, MASK, ScoredActions
from foresight.nets.sequence.swin import Swin
from foresight.nets.sequence.vit import ViT
from foresight.nets.stacked_mlp import StackedMLP

ImageNetwork = Nature | Nips | Impala | ViT | Swin
IMAGES: dict[str, Callable[..., ImageNetwork]] = {
    "nature": Nature, "nips": Nips, "impala": Impala, "vit": ViT, "swin": Swin,
}  # fmt: skip
GRID = 25  # cells of a side of a grid of symbols, at most
ACTION_MASK = MASK  # the key of a dict observation with the mask of allowed actions


class OneHot(nn.Module):
    """Integers in the last `dims` dims (one integer `[...]` where it is 0) as one-hot floats `[..., Σ counts]`.

    The k-th integer is one of `counts[k]` from `starts[k]` on.
    """

    def __init__(self, counts: Sequence[int], starts: Sequence[int], dims: int) -> None:
        super().__init__()
        self.counts, self.dims, self.size = tuple(int(n) for n in counts), dims, int(sum(counts))
        self.starts = tuple(int(start) for start in starts)

    def forward(self, x: Tensor) -> Tensor:
        """One-hot blocks, concatenated."""
        x = x.long().flatten(-self.dims) if self.dims else x.long().unsqueeze(-1)
        ranges = enumerate(zip(self.counts, self.starts, strict=True))
        return torch.cat([F.one_hot(x[..., i] - start, n).float() for i, (n, start) in ranges], -1)


class Flat(nn.Module):
    """The last `dims` dims as one float vector of `size`; bytes are scaled to [0, 1]."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.dims, self.size = len(shape), torch.Size(shape).numel()

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]`."""
        if x.dtype != torch.float32:
            x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
        return x if self.dims == 1 else x.unsqueeze(-1) if self.dims == 0 else x.flatten(-self.dims)


class Symbols(nn.Module):
    """A small grid of symbols `[..., H, W, 3]` (MiniGrid: object, color, state of every cell) as one-hot floats.

    `[..., H W Σ COUNTS]`; a code that MiniGrid does not have becomes zeros. The codes are categories: scaled like the
    bytes of an image they would differ by a few hundredths only.
    """

    COUNTS = (11, 6, 4)
    LARGEST = 31  # a grid with objects of its own has some codes more; colors are above

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape, self.size = tuple(shape), shape[0] * shape[1] * sum(self.COUNTS)
        self.seen = False

    def forward(self, x: Tensor) -> Tensor:
        """Three one-hot blocks per cell. Raises UserError if the first grids that are not all 0 are a small image."""
        if not self.seen and _readable(x):
            self._look(int(x.max()))
        parts = [x[..., i : i + 1] == torch.arange(n, device=x.device) for i, n in enumerate(self.COUNTS)]
        return torch.cat(parts, -1).float().flatten(-3)

    def _look(self, largest: int) -> None:
        if largest > self.LARGEST:
            size = " x ".join(map(str, self.shape))
            raise UserError(
                f"Observations of {size} bytes are read as grids of MiniGrid's symbols, but one holds {largest}, which "
                f"is the color of an image. An image has a side of more than {GRID} pixels: enlarge it in the "
                "environment, or with --env-options image_size=40."
            )
        self.seen = largest > 0


def _readable(x: Tensor) -> bool:
    """Whether `x` has values that can be looked at: not where a graph is compiled, traced or recorded."""
    if not x.numel() or x.is_meta or torch.compiler.is_compiling():
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    return not precision.recording(x.device)


class DictVectorizer(nn.Module):
    """A dict observation as one vector: every entry flattened by its own module, sorted by key."""

    def __init__(self, parts: dict[str, Vectorizer]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(dict(sorted(parts.items())))
        self.size: int = sum(part.size for part in parts.values())

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        """`[..., size]`."""
        return torch.cat([module(x[name]) for name, module in self.parts.items()], -1)


Vectorizer = OneHot | Flat | Symbols | DictVectorizer
ImageEncoder = ImageNetwork | Planes


def is_image(space: gs.Space[Any]) -> bool:
    """Whether observations are images, bytes `[C, H, W]`, `[H, W, C]` and others, see `conv.order`."""
    bytes_ = isinstance(space, gs.Box) and space.dtype == np.uint8
    return bytes_ and not is_symbolic(space) and order(space.shape or ()) is not None


def is_symbolic(space: gs.Space[Any]) -> bool:
    """Whether observations are a grid of symbols as MiniGrid's: bytes `[H, W, 3]`, too small for an image."""
    shape = space.shape if isinstance(space, gs.Box) and space.dtype == np.uint8 else None
    return shape is not None and len(shape) == 3 and shape[2] == 3 and max(shape[:2]) <= GRID and min(shape[:2]) >= 3


def is_vector(space: gs.Space[Any]) -> bool:
    """Whether observations are float32 vectors."""
    return isinstance(space, gs.Box) and len(space.shape) == 1 and space.dtype == np.float32


def vectorizer(space: gs.Space[Any]) -> Vectorizer:
    """The module that flattens observations of any supported space to float vectors `[..., size]`."""
    if isinstance(space, gs.Discrete):
        return OneHot([int(space.n)], [int(space.start)], dims=0)
    if isinstance(space, gs.MultiDiscrete):
        return OneHot(space.nvec.flatten().tolist(), space.start.flatten().tolist(), space.nvec.ndim)
    if isinstance(space, gs.Dict):
        return DictVectorizer({name: vectorizer(part) for name, part in space.spaces.items() if name != ACTION_MASK})
    return Symbols(space.shape) if is_symbolic(space) else Flat(space.shape or ())  # type: ignore[arg-type]


def image_encoder(space: gs.Space[Any], images: str, **options: Any) -> ImageEncoder:
    """The network `images`, a name of `IMAGES`, for images in any order of their dims.

    "vit:16" and "swin:4" set the pixels of a side of a patch. Raises UserError for an unknown name, another number, and
    images that are too small.
    """
    images, colon, patch = images.partition(":")
    if images not in IMAGES:
        raise errors.unknown("image encoder", images, IMAGES)
    if colon:
        if images not in ("vit", "swin") or not patch.isdecimal():
            raise UserError(f"A patch is a number of pixels of vit or swin, as in vit:16, not '{images}:{patch}'.")
        options = {"patch": int(patch), **options}
    shape = space.shape or ()
    found = order(shape) or ()
    *stacked, height, width = (shape[i] for i in found)
    network = IMAGES[images]((math.prod(stacked), height, width), **options)
    return network if len(shape) == 3 and found == (0, 1, 2) else Planes(network, found)


def encoder(
    space: gs.Space[Any], hidden: Sequence[int], activation: str = "tanh", images: str = "nature"
) -> ImageEncoder | MLP:
    """The encoder of observations of `space`; its `size` is the width of the features.

    Images get the network `images`, a name of `IMAGES`, everything else an MLP with `hidden` layers. Raises UserError
    for an unknown name.
    """
    if is_image(space):
        return image_encoder(space, images)
    vector = vectorizer(space)
    return MLP(vector.size, hidden, activation, first=None if is_vector(space) else vector)


def actor_critic_body(
    space: gs.Space[Any],
    outputs: tuple[int, ...],
    gains: tuple[float, ...],
    hidden: Sequence[int],
    activation: str = "tanh",
    images: str = "nature",
    bfloat16: bool = False,
    twice: bool = False,
) -> SharedTrunk | VectorizedMLP | StackedMLP | ScoredActions:
    """The body of an `ActorCritic`: one convolutional trunk for pixels, otherwise an MLP for each head.

    Where observations have `action_features`, it scores each action by them. `twice`: see `StackedMLP`.
    """
    if has_action_features(space):
        return ScoredActions((space.spaces[FEATURES].shape or (0,))[-1], outputs, gains, hidden, activation)
    if is_image(space):
        return SharedTrunk(encoder(space, hidden, activation, images), outputs, gains, bfloat16)
    vector = vectorizer(space)
    mlp = StackedMLP(vector.size, hidden, outputs, gains, activation, twice)
    return mlp if is_vector(space) else VectorizedMLP(vector, mlp)


def appended_body(
    space: gs.Space[Any],
    outputs: tuple[int, int],
    gains: tuple[float, float],
    hidden: Sequence[int],
    activation: str = "tanh",
    images: str = "nature",
    bfloat16: bool = False,
) -> tuple[SharedTrunk | SeparateNetworks, int]:
    """As `actor_critic_body`, with the first output followed by the features that it is linear in; and their number."""
    if is_image(space):
        trunk = encoder(space, hidden, activation, images)
        return SharedTrunk(trunk, outputs, gains, bfloat16, appended=True), trunk.size
    trunk = encoder(space, hidden, activation)
    policy = SharedTrunk(trunk, outputs[:1], gains[:1], appended=True)
    return SeparateNetworks(policy, actor_critic_body(space, outputs[1:], gains[1:], hidden, activation)), trunk.size


def separate_body(
    space: gs.Space[Any],
    outputs: tuple[int, int],
    gains: tuple[float, float],
    hidden: Sequence[int],
    activation: str = "tanh",
    images: str = "nature",
    twice: bool = False,
) -> SeparateNetworks:
    """As `actor_critic_body`, but policy and value share nothing, not even on pixels. `twice`: see `StackedMLP`.

    A single value has no action to score: where observations have `action_features`, it reads them all as one vector.
    """
    policy = actor_critic_body(space, outputs[:1], gains[:1], hidden, activation, images, twice=twice)
    if has_action_features(space) and outputs[1] == 1:
        return SeparateNetworks(policy, SharedTrunk(encoder(space, hidden, activation), outputs[1:], gains[1:]))
    return SeparateNetworks(
        policy, actor_critic_body(space, outputs[1:], gains[1:], hidden, activation, images, twice=twice)
    )


def normalizer(space: gs.Space[Any]) -> ObsNormalizer:
    """The running normalizer of observations in `space`. Raises UserError where they are not one float array."""
    if isinstance(space, gs.Box) and np.dtype(space.dtype).kind == "f":
        return ObsNormalizer(space.shape)
    raise UserError(
        f"normalize_obs needs observations that are one array of floats, but they are {space}. "
        "Use --no-normalize-obs, or make the environment with flatten."
    )


def has_action_features(space: gs.Space[Any]) -> TypeGuard[gs.Dict]:
    """Whether observations describe every action by features, see `nets.scored_actions`."""
    return isinstance(space, gs.Dict) and FEATURES in space.spaces


def mask_key(space: gs.Space[Any]) -> str | None:
    """The key of a dict observation with the mask of allowed actions, or None."""
    return ACTION_MASK if isinstance(space, gs.Dict) and ACTION_MASK in space.spaces else None


def require_choice(space: gs.Space[Any]) -> None:
    """Raise UserError for actions of a Box with a dim of equal bounds: nothing there can be scaled to [-1, 1]."""
    if isinstance(space, gs.Box) and not (space.low < space.high).all():
        raise UserError(
            f"An action of {space} has a dim with equal bounds, so there is nothing to choose: leave it out."
        )


def state_dependent_head(space: gs.Space[Any], log_std: float) -> StateDependentHead:
    """The head of state-dependent noise for actions in `space`. Raises UserError if they are not continuous."""
    if isinstance(space, gs.Box) and len(space.shape) == 1:
        return StateDependentHead(space.shape[0], log_std)
    raise UserError(
        f"state_dependent_noise needs continuous actions (a Box with one dim), but this environment takes {space}. "
        "Leave out --state-dependent-noise."
    )


def policy_head(space: gs.Space[Any], log_std: float = 0.0) -> CategoricalHead | MultiCategoricalHead | NormalHead:
    """The policy head for actions in `space`. Raises UserError for an unsupported space."""
    if isinstance(space, gs.Discrete):
        return CategoricalHead(int(space.n))
    if isinstance(space, gs.MultiDiscrete):
        return MultiCategoricalHead(space.nvec.tolist())
    if isinstance(space, gs.MultiBinary) and len(space.shape) == 1:
        return MultiCategoricalHead([2] * space.shape[0])
    if isinstance(space, gs.Box) and len(space.shape) == 1:
        return NormalHead(space.shape[0], log_std)
    raise UserError(
        f"Unsupported action space {space}. Supported are Discrete, MultiDiscrete, MultiBinary and Box with one dim. "
        "Wrap the environment so that it takes one of these."
    )

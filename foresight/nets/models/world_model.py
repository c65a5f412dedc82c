"""What world models share: their protocol, encoders and decoders of observations, and the roll-out of imagination.

A world model reads sequences in which every episode of T actions has T + 1 rows: the last one holds the final
observation and no action (`data.sequences`). `cut` is 1 on that last row, and the row after it resets the model.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from gymnasium import spaces as gs
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from foresight import errors
from foresight.data.sequences import Arrival
from foresight.data.trajectory import Trajectory, Tree, tree_map
from foresight.errors import UserError
from foresight.nets import conv, encoders
from foresight.nets.outputs import Output, TwoHot
from foresight.nets.precision import compiled
from foresight.nets.resample import UpsampledConv
from foresight.ops import transforms

CONVS = "convs"  # the encoder of images that DreamerV3 has
AT_ONCE = 256  # images that are encoded or decoded together where memory is to be saved
AT_ONCE_ELSEWHERE = 2_304  # not on a CPU
ALIGNED = 16  # floats; on a CPU a product into rows of another multiple takes up to twice as long
EPS = 1e-4  # of every RMSNorm, as in DreamerV3's code


class Policy(Protocol):
    """From features `[N, F]` to actions, and from actions to what the model reads."""

    def __call__(self, features: Tensor) -> Output:
        """The distribution over actions."""

    def action_features(self, action: Tensor) -> Tensor:
        """`[N, A]`."""


class WorldModel(Protocol):
    """A model of the environment that is trained on sequences and then stands in for it.

    A state is a dict of tensors; `features` `[..., size]` of it are what actor and critic see. A carry is what is
    remembered of the steps before, a dict of tensors, zero before the first step of an episode. Those of its parts that
    are `kept` are stored in the replay with every step, so that a sequence can start from them. `discounted` is whether
    the predicted continuation includes γ, as the discount that it was trained on does.
    """

    size: int
    kept: Sequence[str]
    discounted: bool

    def initial(self, batch: int) -> dict[str, Tensor]:
        """The carry before the first step: zeros."""

    def observe(
        self, carry: dict[str, Tensor], obs: Tree, action: Tensor, cut: Tensor, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        """The states `[B, T, ...]` after each observation of a sequence `[B, T, ...]`.

        `action` `[B, T, A]` are action features; the model is reset after a row with `cut` 1. Without a
        generator, latents are the mode of the posterior.
        """

    def carry(self, state: dict[str, Tensor], action: Tensor) -> dict[str, Tensor]:
        """The carry `[B, ...]` after a step with action features `[B, A]` from states `[B, ...]`."""

    def latest(self, obs: Tree, action: Tensor, cut: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """The states `[N, ...]` of the last rows of sequences `[N, T, ...]`, as far as `imagine` reads them."""

    def features(self, state: dict[str, Tensor]) -> Tensor:
        """`[..., size]`."""

    def imagine(
        self, state: dict[str, Tensor], policy: Policy, horizon: int, generator: torch.Generator
    ) -> tuple[Trajectory, Tensor]:
        """`horizon` steps of `policy` inside the model, from states `[N, ...]`.

        `obs` of the Trajectory `[N, horizon]` are features, `discount` is the predicted continuation. The second result
        are the features `[N, horizon + 1, size]` of all states, the one after the last step included.
        """

    def begin(self, state: Tree) -> Tree:
        """The states `[N, ...]` of `observe`, as `advance` takes and returns them."""

    def advance(self, state: Tree, action: Tensor, generator: torch.Generator) -> tuple[Tree, Tensor, Tensor]:
        """One step of the model from states `[N, ...]` with action features `[N, A]`, without an observation.

        Returns the states, the predicted reward `[N]` and the predicted continuation `[N]`.
        """

    def decode(self, state: Tree) -> Tensor:
        """The predicted observations of states `[N, ...]`: bytes `[N, C, H, W]` of images, otherwise vectors `[N, D]`.

        Models without a decoder do not have this, or their `decoder` is None: see `decodes`.
        """

    def loss(
        self, carry: dict[str, Tensor], batch: Trajectory, arrival: Arrival, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The terms of the model's loss by name, `[B, T]` each, and the states."""


def decodes(model: Any) -> bool:
    """Whether a world model predicts observations."""
    return hasattr(model, "decode") and getattr(model, "decoder", True) is not None


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm in float32, also of what autocast made bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return super().forward(x.float())


class Dense(nn.Sequential):
    """A linear layer, RMSNorm and SiLU, initialized as in DreamerV3's code: truncated normal, variance 1 / inputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(linear(inputs, outputs), RMSNorm(outputs, eps=EPS), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`; on a CPU, norm and SiLU are one loop."""
        if not compiled(x):
            return super().forward(x)  # type: ignore[no-untyped-call]  # torch's
        from foresight.ops.fused import latent as fused_latent  # late: numba is slow to import

        return fused_latent.norm_silu(self[0](x), self.get_parameter("1.weight"), EPS)


class Logits(nn.Linear):
    """A linear layer whose outputs are float32 under autocast too, as probabilities and losses need them."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        return super().forward(x).float()


def linear(inputs: int, outputs: int, scale: float = 1.0, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    """A linear layer with truncated normal weights of variance scale² / inputs and bias 0."""
    layer = kind(inputs, outputs)
    nn.init.zeros_(layer.bias)
    truncated(layer.weight, inputs, scale)
    return layer


def truncated(weight: Tensor, inputs: int, scale: float = 1.0) -> None:
    """Fill `weight` from a normal of variance scale² / inputs, truncated at two standard deviations."""
    if scale == 0:
        nn.init.zeros_(weight)
        return
    std = scale / math.sqrt(inputs) / 0.87962566103423978  # the truncation takes that factor off
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def mlp(inputs: int, units: int, layers: int, outputs: int, scale: float = 1.0) -> nn.Sequential:
    """`layers` of `Dense` and a linear layer with float32 outputs, whose initial weights are times `scale`."""
    sizes = [inputs] + [units] * layers
    hidden = [Dense(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*hidden, linear(sizes[-1], outputs, scale, Logits))


class TwoHotMLP(nn.Module):
    """An MLP that predicts a scalar as a categorical over symexp-spaced bins; it predicts exactly 0 at first.

    255 bins of symexp(-20 .. 20): "Robust predictions" of DreamerV3 (arXiv:2301.04104).
    """

    bins: Tensor

    def __init__(self, inputs: int, units: int, layers: int, bins: int = 255) -> None:
        super().__init__()
        self.net = mlp(inputs, units, layers, bins, scale=0.0)
        self.register_buffer("bins", transforms.symexp_bins(bins), persistent=False)

    def forward(self, x: Tensor) -> TwoHot:
        """Features `[..., F]` to a prediction `[...]`."""
        if not compiled(x):
            return TwoHot(self.net(x), self.bins)
        rest, layers = -len(self.bins) % ALIGNED, len(self.net) - 1
        weight = functional.pad(self.net.get_parameter(f"{layers}.weight"), (0, 0, 0, rest))
        bias = functional.pad(self.net.get_parameter(f"{layers}.bias"), (0, rest))
        return TwoHot(functional.linear(self.net[:layers](x), weight, bias), self.bins)


class Vectors(nn.Module):
    """Encoder and decoder of everything that is not an image, as one vector: symlog in, squared symlog error out."""

    def __init__(self, space: gs.Space[Any], units: int, layers: int) -> None:
        super().__init__()
        self.flat = encoders.vectorizer(space)
        self.net = nn.Sequential(*[Dense(units if i else int(self.flat.size), units) for i in range(layers)])
        self.units, self.layers, self.size = units, layers, units

    def augmented(self, obs: Tree, generator: torch.Generator) -> Tree:
        """The same: vectors are not augmented."""
        return obs

    def decoder(self, inputs: int) -> nn.Module:
        """From features `[..., inputs]` to symlog of the vector."""
        return mlp(inputs, self.units, self.layers, int(self.flat.size))

    def forward(self, obs: Tree) -> Tensor:
        """`[..., units]`."""
        return self.net(transforms.symlog(self.flat(obs)))

    def loss(self, prediction: Tensor, obs: Tree) -> Tensor:
        """`[...]`: squared error summed over the vector."""
        return (prediction - transforms.symlog(self.flat(obs))).square().sum(-1)

    def picture(self, prediction: Tensor) -> Tensor:
        """The predicted vector."""
        return transforms.symexp(prediction)


class Images(nn.Module):
    """Encoder and decoder of square images whose side is a power of 2, at least 8.

    5 × 5 convolutions, each followed by max-pooling, down to 4 × 4; the decoder mirrors them with nearest-neighbor
    upsampling. Their channels are `depth` times `MULTS`. With a `patch` of 2, 4, 8, ... pixels, a linear layer on
    squares of that side comes first in the encoder, and one to such squares last in the decoder (Dosovitskiy et al.
    2020, arXiv:2010.11929, eq. 1). They replace the convolutions of large images, where the arithmetic is. With
    `images` a name of `nets.encoders`, such as "vit", that network encodes instead; the decoder is the same.
    """

    MULTS = (2, 3, 4, 4)

    def __init__(self, space: gs.Space[Any], depth: int, patch: int = 1, images: str = CONVS) -> None:
        """Raises UserError for images of other sizes, and for a `patch` that leaves less than 4 × 4 squares."""
        super().__init__()
        self.shape = shape = space.shape or ()
        self.order = conv.order(shape) or ()
        *stack, height, width = (shape[i] for i in self.order)
        stages = round(math.log2(height / 4)) if height >= 8 else 0
        if height != width or height != 4 * 2**stages or not stages:
            raise UserError(
                f"World models need square images of 8, 16, 32, 64 or 128 pixels, not {height} x {width}. "
                "Resize the observation, for example with --env-options image_size=64."
            )
        sides = [2**i for i in range(stages + 1)]
        if patch not in sides:
            raise UserError(
                f"patch {patch} does not fit images of {height} pixels. Use one of {', '.join(map(str, sides))}."
            )
        self.channels, self.patch = math.prod(stack), patch
        self.recomputed = False
        self.backend: str | None = None  # of torch.compile, see `compile_steps`
        convs = stages - round(math.log2(patch))
        self.depths = [depth * m for m in (self.MULTS * 2)[: convs + (patch > 1)]]
        first = self.channels
        self.network = None
        if images != CONVS:
            if (name := images.partition(":")[0]) not in encoders.IMAGES:
                raise errors.unknown("image encoder", name, (CONVS, *encoders.IMAGES))
            self.network = encoders.image_encoder(space, images)
            self.size = self.network.size
            return
        if patch > 1:
            first = self.depths[0]
            self.embed, self.embed_norm = nn.Conv2d(self.channels, first, patch, patch), nn.GroupNorm(1, first)
        sizes = [first, *self.depths[patch > 1 :]]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 5, padding=2) for a, b in itertools.pairwise(sizes))
        self.down_norms = nn.ModuleList(nn.GroupNorm(1, b) for b in sizes[1:])
        self.size = 16 * self.depths[-1]

    def planes(self, obs: Tensor) -> Tensor:
        """Images `[N, C, H, W]` in [0, 1]."""
        lead = obs.dim() - len(self.order)
        x = obs.permute(*range(lead), *(lead + i for i in self.order))
        x = x.reshape(-1, self.channels, *x.shape[-2:]).float()
        return x / 255 if obs.dtype == torch.uint8 else x

    def forward(self, obs: Tensor) -> Tensor:
        """`[..., size]`. Without gradient, of `AT_ONCE` images at a time, whose activations take memory."""
        lead = obs.shape[: obs.dim() - len(self.order)]
        images = obs.reshape(-1, *self.shape)
        run = functools.partial(compiled_step(Images._encoded, self.backend, False), self)
        if self.recomputed or not torch.is_grad_enabled():
            return in_parts(run, images).view(*lead, self.size)
        return run(images).view(*lead, self.size)

    def _encoded(self, images: Tensor) -> Tensor:
        if self.network is not None:
            return self.network(images)
        x = self.planes(images) - 0.5
        if self.patch > 1:
            x = functional.silu(self.embed_norm(self.embed(x)))
        for layer, norm in zip(self.down, self.down_norms, strict=True):
            x = functional.silu(norm(functional.max_pool2d(layer(x), 2)))
        return x.flatten(1)

    def augmented(self, obs: Tensor, generator: torch.Generator) -> Tensor:
        """Square crops of 25% to 100% of each image, stretched to its size: floats in [0, 1] of the shape of `obs`."""
        lead = obs.dim() - len(self.order)
        ordered = [obs.shape[lead + i] for i in self.order]
        x = self.planes(obs)
        side = torch.rand(len(x), device=x.device, generator=generator).mul_(0.75).add_(0.25).sqrt_()
        shift = torch.rand(len(x), 2, device=x.device, generator=generator).mul_(2).sub_(1) * (1 - side).unsqueeze(1)
        scale = torch.diag_embed(side.unsqueeze(1).expand(-1, 2))
        grid = functional.affine_grid(torch.cat([scale, shift.unsqueeze(2)], 2), list(x.shape), align_corners=False)
        crops = functional.grid_sample(x, grid, padding_mode="border", align_corners=False)
        back = [self.order.index(i) for i in range(len(self.order))]
        return crops.view(*obs.shape[:lead], *ordered).permute(*range(lead), *(lead + i for i in back))

    def decoder(self, inputs: int) -> nn.Module:
        """From features `[..., inputs]` to images in [0, 1], `[N, C, H, W]`."""
        return ImageDecoder(inputs, self.channels, self.depths, self.patch)

    def loss(self, prediction: Tensor, obs: Tensor) -> Tensor:
        """`[...]`: squared error summed over the pixels."""
        error = (prediction - self.planes(obs)).square().sum((-3, -2, -1))
        return error.view(obs.shape[: obs.dim() - len(self.order)])

    def picture(self, prediction: Tensor) -> Tensor:
        """The predicted image as bytes `[N, C, H, W]`."""
        return (prediction * 255).round().clamp(0, 255).to(torch.uint8)

    def layout(self, images: Tensor) -> Tensor:
        """Images `[N, C, H, W]` with their dims in the order of the observations, `[N, ...]`."""
        x = images.view(len(images), *(self.shape[i] for i in self.order))
        return x.permute(0, *(1 + self.order.index(i) for i in range(len(self.order))))


class ImageDecoder(nn.Module):
    """A linear layer to 4 × 4, then upsampling and 5 × 5 convolutions, at last to squares; see `Images`."""

    def __init__(self, inputs: int, channels: int, depths: Sequence[int], patch: int = 1) -> None:
        super().__init__()
        self.patch, self.recomputed = patch, False
        self.backend: str | None = None  # of torch.compile, see `compile_steps`
        self.first = linear(inputs, 16 * depths[-1])
        self.first_norm = nn.GroupNorm(1, depths[-1])
        sizes = [*depths[::-1], channels] if patch == 1 else [*depths[::-1]]
        self.up = nn.ModuleList(UpsampledConv(a, b) for a, b in itertools.pairwise(sizes))
        self.up_norms = nn.ModuleList(nn.GroupNorm(1, b) for b in (sizes[1:-1] if patch == 1 else sizes[1:]))
        self.squares = nn.Conv2d(depths[0], channels * patch**2, 1) if patch > 1 else None

    def forward(self, features: Tensor) -> Tensor:
        """`[N, C, H, W]` of features `[..., F]`, N being the product of the leading dims."""
        flat = features.flatten(0, -2)
        run = functools.partial(compiled_step(ImageDecoder._decoded, self.backend, False), self)
        return in_parts(run, flat) if self.recomputed else run(flat)

    def _decoded(self, features: Tensor) -> Tensor:
        x = self.first(features)
        x = functional.silu(self.first_norm(x.view(len(x), -1, 4, 4)))
        for i, layer in enumerate(self.up):
            x = layer(x)
            x = functional.silu(self.up_norms[i](x)) if i < len(self.up_norms) else x
        x = x if self.squares is None else functional.pixel_shuffle(self.squares(x), self.patch)
        return torch.sigmoid(x.float())


def in_parts(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`run` on `AT_ONCE` rows of x `[N, ...]` at a time; with gradients, each is run again in the backward pass.

    Chen et al. 2016 (arXiv:1604.06174). `run` treats rows alike: the values are the same, the gradients up to rounding.
    """
    parts = x.split(AT_ONCE if x.is_cpu else AT_ONCE_ELSEWHERE)
    if not torch.is_grad_enabled():
        return torch.cat([run(part) for part in parts])
    return torch.cat([checkpoint(run, part, use_reentrant=False, preserve_rng_state=False) for part in parts])


def recompute(model: nn.Module) -> None:
    """Gradient checkpointing of the encoder and decoder of images in a world model: they keep only their inputs.

    Raises UserError if the model reads no images.
    """
    found = [part for part in model.modules() if isinstance(part, Images | ImageDecoder)]
    if not found:
        raise UserError(
            "gradient_checkpointing recomputes the encoder and decoder of images, but these observations are numbers. "
            "Leave it out."
        )
    for part in found:
        part.recomputed = True


@functools.cache
def compiled_step(step: Callable[..., Any], backend: str | None, dynamic: bool | None = None) -> Callable[..., Any]:
    """A step of imagination, by torch.compile with a `backend`; the same if that is None.

    The model is an argument of `step`, so one compiled function serves all models, and a copy of a model has no other's
    weights. `dynamic` as in torch.compile: false compiles again for other shapes.
    """
    return step if backend is None else torch.compile(step, backend=backend, dynamic=dynamic)


def compile_steps(model: nn.Module, device: str | torch.device) -> None:
    """Let the steps of imagination be compiled, and on a GPU the networks of images, the first time that they run.

    Raises UserError for a model whose steps cannot be compiled, and on a CPU without a C++ compiler.
    """
    if not hasattr(model, "backend"):
        raise UserError(f"The steps of {type(model).__name__} cannot be compiled: leave out --compile.")
    if torch.device(device).type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise UserError("compile needs a C++ compiler on a CPU: install g++, or leave out --compile.")
    model.backend = "inductor"  # type: ignore[assignment]  # a plain attribute
    if torch.device(device).type != "cpu":
        for part in model.modules():
            if isinstance(part, Images | ImageDecoder):
                part.backend = "inductor"


ObsModel = Vectors | Images


def obs_model(
    space: gs.Space[Any], units: int, layers: int, depth: int, patch: int = 1, images: str = CONVS
) -> ObsModel:
    """Encoder and decoder of the observations of `space`. Raises UserError as `require_supported`, and for sizes."""
    require_supported(space)
    return Images(space, depth, patch, images) if encoders.is_image(space) else Vectors(space, units, layers)


def require_supported(space: gs.Space[Any]) -> None:
    """Raises UserError for observations that are neither an image nor numbers in one dim, and for an action_mask."""
    if isinstance(space, gs.Dict) and "action_mask" in space.spaces:
        raise UserError(
            "World models do not support an action_mask: what is imagined has no mask. "
            "Use ppo or dqn, or an environment in which every action is allowed."
        )
    for name, part in space.spaces.items() if isinstance(space, gs.Dict) else [("", space)]:
        dims, image = len(part.shape or ()), encoders.is_image(part)
        if (name and image) or (dims > 1 and not image and not encoders.is_symbolic(part)):
            raise UserError(
                f"World models read one image (bytes, one or more channels) or numbers in one dim, not {part}"
                f"{f' in a Dict, as {name}' if name else ''}. Wrap the environment so that it gives one of them, for "
                f"example with {'gymnasium.wrappers.FilterObservation' if image else '--env-options flatten=true'}."
            )


def reconstruction(
    obs_model: ObsModel, decoder: nn.Module, features: Tensor, obs: Tree, rows: int, generator: torch.Generator
) -> Tensor:
    """-log p(x_t | features_t), `[B, T]`, of features `[B, T, F]` and observations `[B, T, ...]`.

    With `rows` above 0 only so many of the T are decoded, drawn for all B together; they weigh T / rows, the others 0,
    so the mean over T is right on average.
    """
    length = features.shape[1]
    if not 0 < rows < length:
        return obs_model.loss(decoder(features), obs)
    drawn = torch.randperm(length, generator=generator, device=features.device)[:rows]
    error = obs_model.loss(decoder(features[:, drawn]), tree_map(lambda x: x[:, drawn], obs))
    return torch.zeros_like(features[..., 0]).index_copy(1, drawn, error * (length / rows))


def imagined(features: Tensor, actions: list[Tensor], reward: Tensor, discount: Tensor) -> tuple[Trajectory, Tensor]:
    """The result of `WorldModel.imagine` from `features` `[N, H + 1, F]`, H `actions` `[N, ...]`, results `[N, H]`."""
    steps = Trajectory(features[:, :-1], torch.stack(actions, 1), reward, discount, torch.zeros_like(reward))
    return steps, features

"""TD-MPC2's networks: an implicit world model in a normalized latent space, an ensemble of critics and a policy.

Source: Hansen et al. 2024 (arXiv:2310.16828), §3.1 and appendix. There is no decoder: a latent state is trained to
predict the next one, the reward and the value. Hidden layers have LayerNorm and SiLU (the paper: Mish, nearly the same
function, which takes about four times as long on a CPU).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn
from torch.nn import functional

from foresight.data.sequences import Arrival
from foresight.data.trajectory import Trajectory, Tree, tree_map
from foresight.errors import UserError
from foresight.nets import conv, encoders
from foresight.nets.models import world_model
from foresight.nets.outputs import TanhNormal, TwoHot
from foresight.ops import transforms

PAD = 3  # pixels by which images are shifted at most, in training
SMALLEST = 39  # pixels: the four convolutions leave one of them
LOG_STD = (-10.0, 2.0)  # of the policy


def simnorm(x: Tensor, group: int = 8) -> Tensor:
    """Softmax over D / `group` groups of `group` features, `[..., D]`: every group is on a simplex. Source: §3.1.

    A group is every (D / `group`)-th feature: side by side they would take three times as long.
    """
    return x.unflatten(-1, (group, -1)).softmax(-2).flatten(-2)


class SimNorm(nn.Module):
    """`simnorm` as a layer."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return simnorm(x, self.group)


def normed(inputs: int, outputs: int, last: nn.Module | None = None) -> list[nn.Module]:
    """A linear layer, LayerNorm, and SiLU or `last`."""
    return [_linear(inputs, outputs), nn.LayerNorm(outputs), nn.SiLU() if last is None else last]


def mlp(
    inputs: int, hidden: Sequence[int], outputs: int, last: nn.Module | None = None, zero: bool = False
) -> nn.Module:
    """Normed layers of `hidden` sizes, then a linear layer to `outputs`; with `last` also normed, before `last`.

    With `zero` the weights of the last layer start at 0.
    """
    sizes = [inputs, *hidden]
    layers = [part for a, b in itertools.pairwise(sizes) for part in normed(a, b)]
    final = [_linear(sizes[-1], outputs)] if last is None else normed(sizes[-1], outputs, last)
    if zero:
        nn.init.zeros_(final[0].weight)  # type: ignore[arg-type]
    return nn.Sequential(*layers, *final)


class Vectors(nn.Module):
    """The encoder of everything that is not an image: observations as one vector, to latent states."""

    def __init__(self, space: gs.Space[Any], units: int, layers: int, latent: int, group: int) -> None:
        super().__init__()
        self.flat = encoders.vectorizer(space)
        self.net = mlp(int(self.flat.size), [units] * (layers - 1), latent, SimNorm(group))

    def forward(self, obs: Tree, generator: torch.Generator | None = None) -> Tensor:
        """`[..., latent]`; `generator` is for images."""
        return self.net(self.flat(obs))


class Pixels(nn.Module):
    """The encoder of images: four convolutions of `channels`, to latent states.

    Each image is standardized, and its brightness joins what the convolutions find. The paper subtracts 1/2: a bright
    background then drowns what moves before it, and the latent states of all images are alike for a thousand updates.

    Raises UserError for images that are too small.
    """

    def __init__(self, space: gs.Space[Any], channels: int, latent: int, group: int) -> None:
        super().__init__()
        self.order = conv.order(space.shape or ()) or ()
        *stack, height, width = ((space.shape or ())[i] for i in self.order)
        if min(height, width) < SMALLEST:
            raise UserError(
                f"tdmpc2 needs images of at least {SMALLEST} x {SMALLEST} pixels, not {height} x {width}. "
                "Resize them with --env-options image_size=64."
            )
        self.planes = math.prod(stack)
        layers: list[nn.Module] = []
        for inputs, size, stride in ((self.planes, 7, 2), (channels, 5, 2), (channels, 3, 2), (channels, 3, 1)):
            layers += [nn.Conv2d(inputs, channels, size, stride), nn.ReLU()]
        for layer in layers[::2]:  # He et al. 2015, eq. 10; by default the biases drown what differs between images
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        self.convs = nn.Sequential(*layers[:-1])
        with torch.no_grad():
            size = self.convs(torch.zeros(1, self.planes, height, width)).numel()
        self.net = nn.Sequential(*normed(size + 2, latent, SimNorm(group)))

    def forward(self, obs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """`[..., latent]` of images in the order of the space; with a `generator` each is shifted at random first."""
        lead = obs.dim() - len(self.order)
        x = obs.permute(*range(lead), *(lead + i for i in self.order))
        x = x.reshape(-1, self.planes, *x.shape[-2:])
        if generator is not None:
            x = transforms.random_shift(x, PAD, generator)
        bright = x.float().mean((1, 2, 3)).div(255).unsqueeze(1)
        y = torch.cat([self.convs(functional.group_norm(x.float(), 1)).flatten(1), bright, 1 - bright], 1)
        return self.net(y).view(*obs.shape[:lead], -1)


class TDMPC2(nn.Module):
    """The world model, without memory: the state is the latent state z `[..., size]` alone.

        z = h(s),  z' = d(z, a),  r = R(z, a),  and with `episodic` the probability of a termination at z'     §3.1

    It observes, imagines and takes steps as a `WorldModel`, but is none: its `loss` predicts whole sequences from their
    first observation and leaves it to the caller to mask what follows a cut, so `dreamer` cannot learn in it.

    Latent states are on simplices of `group` dims. Rewards are two-hot over `bins` symexp-spaced bins. Raises UserError
    for observations that world models do not read (`world_model.require_supported`).
    """

    bins: Tensor
    discounted = False

    def __init__(
        self,
        space: gs.Space[Any],
        actions: int,
        latent: int,
        units: int,
        encoder_units: int,
        encoder_layers: int,
        channels: int,
        bins: int,
        group: int,
        episodic: bool,
    ) -> None:
        super().__init__()
        self.size, self.actions = latent, actions
        world_model.require_supported(space)
        self.encoder: Vectors | Pixels
        if encoders.is_image(space):
            self.encoder = Pixels(space, channels, latent, group)
        else:
            self.encoder = Vectors(space, encoder_units, encoder_layers, latent, group)
        self.dynamics = mlp(latent + actions, [units, units], latent, SimNorm(group))
        self.reward = mlp(latent + actions, [units, units], bins, zero=True)
        self.termination = mlp(latent, [units, units], 1) if episodic else None
        self.register_buffer("bins", transforms.symexp_bins(bins, 10.0), persistent=False)

    def initial(self, batch: int) -> dict[str, Tensor]:
        """Zeros: nothing is remembered."""
        zeros = self.bins.new_zeros
        return {"latent": zeros(batch, self.size), "action": zeros(batch, self.actions)}

    def observe(
        self, carry: Tree, obs: Tree, action: Tensor, cut: Tensor, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The latent states of the observations. They depend on nothing else."""
        return {"latent": self.encoder(obs)}

    def features(self, state: Tree) -> Tensor:
        """The latent state."""
        return state["latent"]

    def step(self, latent: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(latent [N, size], reward [N], discount [N])` after actions `[N, A]`: the discount is the continuation."""
        pair = torch.cat([latent, action], -1)
        after = self.dynamics(pair)
        return after, TwoHot(self.reward(pair), self.bins).mean(), self.continuation(after)

    def begin(self, state: Tree) -> Tree:
        """See `WorldModel`."""
        return state

    def advance(self, state: Tree, action: Tensor, generator: torch.Generator) -> tuple[Tree, Tensor, Tensor]:
        """See `WorldModel`: `step`, in which nothing is random. There is no `decode`."""
        latent, reward, continuation = self.step(state["latent"], action)
        return {"latent": latent}, reward, continuation

    def continuation(self, latent: Tensor) -> Tensor:
        """The predicted probability `[...]` that the episode continues at `latent`."""
        if self.termination is None:
            return latent.new_ones(latent.shape[:-1])
        return torch.sigmoid(-self.termination(latent).squeeze(-1))

    def imagine(
        self, state: Tree, policy: world_model.Policy, horizon: int, generator: torch.Generator
    ) -> tuple[Trajectory, Tensor]:
        """See `WorldModel.imagine`."""
        latents, actions, results = [state["latent"]], [], []
        for _ in range(horizon):
            actions.append(policy(latents[-1]).sample(generator))
            after, *result = self.step(latents[-1], policy.action_features(actions[-1]))
            latents.append(after)
            results.append(result)
        reward, discount = (torch.stack(x, 1) for x in zip(*results, strict=True))
        return world_model.imagined(torch.stack(latents, 1), actions, reward, discount)

    def loss(
        self, carry: Tree, batch: Trajectory, arrival: Arrival, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Terms `consistency`, `reward` and `termination`, `[B, T]`: of predicting row t from the first observation.

        The first row is predicted by nothing: 0. Rows after a cut are not masked here. The states are `latent`
        `[B, T, size]`, predicted from the first observation, and `target`, encoded without gradient. Source: §3.1.
        """
        first = self.encoder(tree_map(lambda x: x[:, 0], batch.obs), generator)
        with torch.no_grad():
            later = self.encoder(tree_map(lambda x: x[:, 1:], batch.obs), generator)
        latents, pairs = [first], []
        for action in batch.action[:, :-1].unbind(1):
            pairs.append(torch.cat([latents[-1], action], -1))
            latents.append(self.dynamics(pairs[-1]))
        latent, pair = torch.stack(latents, 1), torch.stack(pairs, 1)
        terms = {
            "consistency": (latent[:, 1:] - later).square().mean(-1),
            "reward": TwoHot(self.reward(pair), self.bins).loss(arrival.reward[:, 1:]),
        }
        if self.termination is not None:
            ended = arrival.known[:, 1:] * (arrival.discount[:, 1:] == 0).float()
            logit = self.termination(latent[:, 1:]).squeeze(-1)
            terms["termination"] = functional.binary_cross_entropy_with_logits(logit, ended, reduction="none")
        states = {"latent": latent, "target": torch.cat([first.detach().unsqueeze(1), later], 1)}
        return {name: functional.pad(term, (1, 0)) for name, term in terms.items()}, states


class QEnsemble(nn.Module):
    """`count` critics of latent states and actions; values are two-hot. Source: §3.1 and appendix.

    `dropout` is the share of units of the first layer that are set to 0 in training.
    """

    bins: Tensor

    def __init__(self, latent: int, actions: int, units: int, count: int, bins: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.members = nn.ModuleList(mlp(latent + actions, [units, units], bins, zero=True) for _ in range(count))
        self.register_buffer("bins", transforms.symexp_bins(bins, 10.0), persistent=False)

    def forward(self, latent: Tensor, action: Tensor, generator: torch.Generator | None = None) -> list[TwoHot]:
        """The values `[...]` of every critic; with dropout if there is a `generator`."""
        pair = torch.cat([latent, action], -1)
        return [TwoHot(self._run(member, pair, generator), self.bins) for member in self.members]

    def two(self, latent: Tensor, action: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The mean values `[...]` of two critics, drawn at random if there are more."""
        pair, count = torch.cat([latent, action], -1), len(self.members)
        chosen = [0, 1]
        if count > 2:
            chosen = torch.randperm(count, generator=generator, device=generator.device)[:2].tolist()
        first, second = (TwoHot(self.members[i](pair), self.bins).mean() for i in chosen)
        return first, second

    def _run(self, member: nn.Module, pair: Tensor, generator: torch.Generator | None) -> Tensor:
        if generator is None or not self.dropout:
            return member(pair)
        linear, *rest = member.children()
        y = linear(pair)
        # Positions are drawn, not a coin for every unit: a hundredth of the random numbers.
        drop = torch.randint(y.numel(), (round(self.dropout * y.numel()),), generator=generator, device=y.device)
        keep = torch.full_like(y, 1 / (1 - self.dropout)).view(-1).index_fill_(0, drop, 0.0).view_as(y)
        y = y * keep
        for layer in rest:
            y = layer(y)
        return y


class LatentPolicy(nn.Module):
    """The policy prior: tanh-squashed normals over latent states, scaled to the bounds of `space` by `to_env`.

    The logarithm of the standard deviation is between -10 and 2. Raises UserError if `space` is not a bounded Box with
    one dim, or has nothing to choose.
    """

    center: Tensor
    scale: Tensor

    def __init__(self, space: gs.Space[Any], latent: int, units: int) -> None:
        super().__init__()
        if not isinstance(space, gs.Box) or len(space.shape) != 1:
            raise UserError(
                f"tdmpc2 needs continuous actions (a Box with one dim), but this environment takes {space}. "
                "Use dreamer, muzero or dqn, or choose another environment."
            )
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise UserError(
                f"tdmpc2 needs bounded actions, but this environment takes {space}. Wrap it with bounds, or use ppo."
            )
        encoders.require_choice(space)
        self.width = int(space.shape[0])
        self.net = mlp(latent, [units, units], 2 * self.width)
        low, high = (torch.from_numpy(np.asarray(x, dtype=np.float32)) for x in (space.low, space.high))
        self.register_buffer("center", (high + low) / 2, persistent=False)
        self.register_buffer("scale", (high - low) / 2, persistent=False)

    def forward(self, latent: Tensor) -> TanhNormal:
        """The policy at `latent`, over actions in (-1, 1)."""
        mean, log_std = self.net(latent).chunk(2, -1)
        low, high = LOG_STD
        return TanhNormal(mean, (low + 0.5 * (high - low) * (log_std.tanh() + 1)).exp())

    def action_features(self, action: Tensor) -> Tensor:
        """What the world model reads: the action itself."""
        return action

    def to_env(self, action: Tensor) -> Tensor:
        """Actions in the units of the environment."""
        return self.center + self.scale * action.clamp(-1, 1)

    def from_env(self, action: Tensor) -> Tensor:
        """The inverse of `to_env`."""
        return (action - self.center) / self.scale


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer

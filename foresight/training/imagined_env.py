"""A learned world model as an environment: what `envs.base.Env` promises, inside the model."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.data import trees
from foresight.data.sequences import Sequences
from foresight.data.trajectory import Tree, tree_map
from foresight.envs.base import Env, Feedback, Frame, Spaces
from foresight.errors import UserError
from foresight.nets.models import latent_actor
from foresight.nets.models.world_model import Images, WorldModel, decodes

CONTEXT = 16  # rows of the replay that are observed before an imagined episode
STARTS = 256  # states that episodes start from
SCALE = 4  # pixels of a frame per pixel of an observation


@torch.no_grad()
def anywhere(model: WorldModel, space: gs.Space[Any], replay: Sequences, generator: torch.Generator) -> Tree:
    """Posterior states `[N, ...]` at random rows of the replay, each after up to `CONTEXT` rows were observed.

    `space` is that of the actions. Raises UserError if the replay or its episodes are too small.
    """
    device = generator.device
    sampler = torch.Generator().manual_seed(generator.initial_seed())
    batch = replay.sample(STARTS, CONTEXT, sampler).map(lambda x: x.to(device))
    action = latent_actor.features_of(space, batch.action.flatten(0, 1)).unflatten(0, batch.shape)
    found = model.observe(model.initial(STARTS), batch.obs, action, batch.cut, generator)
    going = (batch.cut[:, -1] == 0).nonzero().squeeze(-1)  # no action follows a final observation
    if not len(going):
        raise UserError("The episodes of the replay are too short to start from: all rows that were drawn end one.")
    return model.begin(tree_map(lambda x: x[going, -1], found))


@torch.no_grad()
def beginnings(model: WorldModel, space: gs.Space[Any], replay: Sequences, generator: torch.Generator) -> Tree:
    """Posterior states `[N, ...]` at the first observations of episodes of the replay; `space` is that of the actions.

    Raises UserError if the replay holds no whole episode.
    """
    device = generator.device
    obs, _ = replay.episodes()
    obs = tree_map(lambda x: x[-STARTS:].unsqueeze(1).to(device), obs)
    count = len(trees.first(obs))
    action = torch.zeros(count, 1, latent_actor.action_width(space), device=device)
    found = model.observe(model.initial(count), obs, action, torch.zeros(count, 1, device=device), generator)
    return model.begin(tree_map(lambda x: x[:, 0], found))


def require_observations(name: str, model: Any, spaces: Spaces) -> None:
    """Raises UserError for a model that does not decode, and for observations that cannot be made of its output."""
    if not decodes(model):
        raise UserError(
            f"'{name}' cannot be an environment: its world model predicts no observations, so that nothing that is "
            "trained or played inside could act outside. Give a run of dreamer, storm or planet with a decoder. Its "
            "errors are drawn with: foresight plot RUN --model 45 --out errors.png"
        )
    if not isinstance(spaces.obs, gs.Box) or not (isinstance(model.obs, Images) or spaces.obs.dtype.kind == "f"):
        raise UserError(
            f"'{name}' cannot be an environment: its world model must predict observations that are images or one "
            f"float array, not {spaces.obs}."
        )


class ImaginedEnv:
    """An `Env` whose steps are those of a world model.

    Episodes start from states drawn uniformly from `starts` `[N, ...]`, as `begin` returns them. They terminate by the
    predicted continuation, as a coin (never, where the environment never does): the model predicts γ times the
    probability to continue, and `gamma` is that γ. They are truncated after `limit` steps. Observations are decoded, so
    that a policy can act outside as well: images, or float vectors.

    `outside` is the environment that the model was trained in, for evaluations, or None.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        spaces: Spaces,
        starts: Tree,
        num_envs: int,
        limit: int,
        gamma: float,
        device: str | torch.device = "cpu",
        outside: Env | None = None,
    ) -> None:
        """Raises UserError as `require_observations` does."""
        self.name, self.num_envs, self.outside = name, num_envs, outside
        self.spaces = spaces._replace(simulator=None)  # that of the true dynamics
        self.model, self.starts, self.limit, self.gamma, self.device = model, starts, limit, gamma, device
        require_observations(name, model, spaces)
        self.state: Tree = None
        self._generator = torch.Generator(device)
        self._time = torch.zeros(num_envs, dtype=torch.int64)
        self._returns = torch.zeros(num_envs)
        self._mask = torch.ones(num_envs)

    @torch.no_grad()
    def reset(self, seed: int) -> Tensor:
        """Draw a start for all environments; equal seeds give equal episodes. Returns obs `[B, ...]`."""
        self._generator.manual_seed(seed)
        self._time, self._returns = torch.zeros_like(self._time), torch.zeros_like(self._returns)
        self.state = self._draw()
        return self._decoded(self.state)

    @torch.no_grad()
    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B, ...]`, of the environment that the model was trained in, everywhere."""
        if self.state is None:
            raise RuntimeError(f"Environment '{self.name}': call reset(seed) before step.")
        shape = (self.num_envs, *(self.spaces.action.shape or ()))
        if action.shape != shape:
            raise ValueError(f"'{self.name}' takes actions of shape {shape}, not {tuple(action.shape)}.")
        features = latent_actor.features_of(self.spaces.action, action.to(self.device))
        self.state, reward, continuation = self.model.advance(self.state, features, self._generator)
        alive = torch.ones_like(reward) if self.spaces.continuing else (continuation / self.gamma).clamp(0, 1)
        discount = (torch.rand(alive.shape, generator=self._generator, device=self.device) < alive).float().cpu()
        reward = reward.cpu()
        self._time, self._returns = self._time + 1, self._returns + reward
        cut = (discount == 0) | (self._time >= self.limit)
        final = obs = self._decoded(self.state)
        info: dict[str, Any] = {}
        if cut.any():
            info = {"episode_return": self._returns[cut].tolist(), "episode_length": self._time[cut].tolist()}
            over, fresh = cut.to(self.device), self._draw()
            self.state = trees.merge(lambda pair: _chosen(over, *pair), [fresh, self.state])
            self._time, self._returns = self._time.masked_fill(cut, 0), self._returns.masked_fill(cut, 0.0)
            obs = _chosen(cut, self._decoded(self.state), final)
        return Feedback(obs, reward, discount, cut.float(), self._mask, final, info)

    def render(self) -> Frame | None:
        """The decoded image of environment 0, enlarged; None where observations are vectors."""
        if not isinstance(self.model.obs, Images) or self.state is None:
            return None
        with torch.no_grad():
            return frame(self.model.decode(tree_map(lambda x: x[:1], self.state))[0])

    def close(self) -> None:
        """Close the environment outside."""
        if self.outside is not None:
            self.outside.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on, but the model."""
        generator = self._generator.get_state()
        return {"state": self.state, "time": self._time, "returns": self._returns, "generator": generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.state, self._time, self._returns = state["state"], state["time"], state["returns"]
        self._generator.set_state(state["generator"])

    def _draw(self) -> Tree:
        count = len(self.model.features(self.starts))
        rows = torch.randint(count, (self.num_envs,), generator=self._generator, device=self.device)
        return trees.pick(self.starts, rows)

    def _decoded(self, state: Tree) -> Tensor:
        """Observations in the space of the environment outside, on the CPU."""
        found: Tensor = self.model.decode(state)
        if isinstance(self.model.obs, Images):
            return self.model.obs.layout(found).contiguous().cpu()
        return found.view(len(found), *(self.spaces.obs.shape or ())).cpu()


def frame(image: Tensor) -> Frame:
    """An RGB frame `[height, width, 3]` of an image `[C, H, W]`: the last of a stack, enlarged."""
    color = image[-3:] if len(image) % 3 == 0 else image[-1:].expand(3, -1, -1)
    shown: Frame = color.permute(1, 2, 0).repeat_interleave(SCALE, 0).repeat_interleave(SCALE, 1).cpu().numpy()
    return shown


def _chosen(where: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Rows `[B, ...]` of `one` where `where` `[B]`, else of `other`."""
    return torch.where(where.view(-1, *[1] * (one.dim() - 1)), one, other)

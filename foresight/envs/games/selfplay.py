"""A two-player game as an environment in which one agent plays both sides, for MuZero, which has no rules."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.data.trajectory import Trajectory, Tree
from foresight.envs.base import Env, Feedback, Spaces
from foresight.envs.games import symmetries
from foresight.envs.games.game import Game
from foresight.errors import UserError

VISITED = 64  # the last steps, of all games, from whose positions forks are drawn


def spaces(game: Game) -> Spaces:
    """The observation space, planes and legal actions (`action_mask`), and the action space."""
    planes = gs.Box(-np.inf, np.inf, game.shape, np.float32)
    return Spaces(gs.Dict({"planes": planes, "action_mask": gs.MultiBinary(game.actions)}), gs.Discrete(game.actions))


def observe(game: Game, position: Tensor) -> dict[str, Tensor]:
    """The observation of the player to move: `planes` `[B, C, H, W]` float32, `action_mask` `[B, A]` int8."""
    return {"planes": game.planes(position).float(), "action_mask": game.legal(position).to(torch.int8)}


def random_openings(game: Game, count: int, most: int, generator: torch.Generator) -> Tensor:
    """`count` games after 0 to `most` random moves each, uniformly; none of them is over.

    A move that would end the game is not made. Source: arXiv:2306.03408.
    """
    position = game.start(count)
    wanted = torch.randint(most + 1, (count,), generator=generator)
    for made in range(most):
        action = torch.multinomial(game.legal(position).float(), 1, generator=generator).squeeze(-1)
        moved = game.step(position, action)
        playing = (made < wanted) & ~moved.over
        position[playing] = moved.position[playing]
    return position


def forks(game: Game, visited: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` positions drawn uniformly from `visited` `[N, ...]`, after one random move each; none of them is over.

    A move that would end the game is not made. Source: the game forking of KataGo (arXiv:1902.10565), which chooses
    among several random moves by the network's value; here it is one.
    """
    position = visited[torch.randint(len(visited), (count,), generator=generator)]
    action = torch.multinomial(game.legal(position).float(), 1, generator=generator).squeeze(-1)
    moved = game.step(position, action)
    position[~moved.over] = moved.position[~moved.over]
    return position


def symmetric(game: Game, batch: Trajectory, generator: torch.Generator, policies: tuple[str, ...]) -> Trajectory:
    """Sequences `[B, T]` of self-play, each under a random symmetry of the game: one for all its steps.

    `policies` are the extras that are policies over actions, `[B, T, A]`; `next_obs` are observations.
    """
    cells, actions = symmetries.draw(game.symmetries, len(batch.action), generator)

    def transformed(obs: Tree) -> Tree:
        planes = symmetries.permute(obs["planes"].flatten(-2), cells).view_as(obs["planes"])
        return {"planes": planes, "action_mask": symmetries.permute(obs["action_mask"], actions)}

    extras: dict[str, Tree] = {name: symmetries.permute(batch.extras[name], actions) for name in policies}
    extras = {**batch.extras, **extras, "next_obs": transformed(batch.extras["next_obs"])}
    action = actions.argsort(-1).gather(1, batch.action)  # new action a is old action actions[a]
    return batch.replace(obs=transformed(batch.obs), action=action, extras=extras)


class SelfPlay:
    """An `Env` of `num_envs` games. Rewards are the mover's; a discount of -1 means that the opponent moves next.

    Returns are the first player's: 1, 0 or -1. A finished game is reset within the step. A game starts
    with up to `openings` random moves (`random_openings`). A share `forked` of the games starts in a position of a
    recent game instead, after one random move (`forks`). These moves are not part of the episode or its length.
    """

    def __init__(self, game: Game, num_envs: int, openings: int = 0, forked: float = 0.0) -> None:
        self.name, self.num_envs, self.game, self.spaces = game.name, num_envs, game, spaces(game)
        self.openings, self.forked, self._random = openings, forked, torch.Generator().manual_seed(0)
        self._visited: list[Tensor] = []  # the positions of each of the last steps in which no game had ended
        self.position = game.start(num_envs)
        self._lengths = torch.zeros(num_envs, dtype=torch.int64)  # the steps of each episode so far

    def reset(self, seed: int) -> Tree:
        """New games; equal seeds give equal openings, the only random part."""
        self._random.manual_seed(seed)
        self._visited = []
        self.position = self._new_games(self.num_envs)
        self._lengths.zero_()
        return observe(self.game, self.position)

    def _new_games(self, count: int) -> Tensor:
        position = random_openings(self.game, count, self.openings, self._random)
        if not any(map(len, self._visited)):
            return position
        chosen = torch.rand(count, generator=self._random) < self.forked
        if chosen.any():
            position[chosen] = forks(self.game, torch.cat(self._visited), int(chosen.sum()), self._random)
        return position

    def step(self, action: Tensor) -> Feedback:
        """Take `action` int64 `[B]`. Raises UserError for an illegal one, and if a player moves twice in a row."""
        game, before = self.game, self.position
        if not bool(game.legal(before).gather(1, action.unsqueeze(1)).all()):
            raise UserError(f"An action is illegal in {game.title}: choose among those of the action_mask.")
        moved = game.step(before, action)
        over = moved.over
        if bool(((game.mover(moved.position) == game.mover(before)) & ~over).any()):
            raise UserError(f"In {game.title} a player may move twice in a row, which learned models do not support.")
        final, position = observe(game, moved.position), moved.position.clone()
        ended = over.nonzero().flatten()
        info = {}
        self._lengths += 1
        if self.forked:
            self._visited = [*self._visited[1 - VISITED :], moved.position[~over]]
        if len(ended):
            points = 2 * game.first_score(position[ended]) - 1
            info = {"episode_return": points.tolist(), "episode_length": self._lengths[ended].tolist()}
            self._lengths[ended] = 0
            position[ended] = self._new_games(len(ended))
        game.free_except(torch.cat([position, *self._visited]))
        self.position = position
        end = over.float()
        obs = observe(game, position) if len(ended) else final
        return Feedback(obs, moved.reward, end - 1, end, torch.ones_like(end), final, info)

    def render(self) -> None:
        """None: games are shown in the terminal."""

    def close(self) -> None:
        """Nothing to close."""


def env(env: Env | Game, num_envs: int, openings: int = 0, forked: float = 0.0) -> Env:
    """`env` itself; a game becomes `num_envs` games of self-play."""
    return cast("Env", env) if hasattr(env, "spaces") else SelfPlay(env, num_envs, openings, forked)

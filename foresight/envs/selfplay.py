"""A game for two as a world in which one agent plays both sides: what MuZero, which is given no rules, learns from."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.envs.base import Env, Feedback, Spaces
from foresight.envs.games import Game
from foresight.errors import UserError


def spaces(game: Game) -> Spaces:
    """What a player sees, the planes and which actions are legal (`action_mask`), and what he may do."""
    planes = gs.Box(-np.inf, np.inf, game.shape, np.float32)
    return Spaces(gs.Dict({"planes": planes, "action_mask": gs.MultiBinary(game.actions)}), gs.Discrete(game.actions))


def observe(game: Game, position: Tensor) -> dict[str, Tensor]:
    """The observation of the player to move: `planes` `[B, C, H, W]` float32, `action_mask` `[B, A]` int8."""
    return {"planes": game.planes(position).float(), "action_mask": game.legal(position).to(torch.int8)}


class SelfPlay:
    """An `Env` of `num_envs` games. Rewards are the mover's, and a discount of -1 says that the other moves next.

    Returns are the first player's: 1, 0 or -1. A game that is over makes way for a new one within the step.
    """

    def __init__(self, game: Game, num_envs: int) -> None:
        self.name, self.num_envs, self.game, self.spaces = game.name, num_envs, game, spaces(game)
        self.position = game.start(num_envs)

    def reset(self, seed: int) -> Any:
        """New games; nothing in them is random."""
        self.position = self.game.start(self.num_envs)
        return observe(self.game, self.position)

    def step(self, action: Tensor) -> Feedback:
        """Take `action` int64 `[B]`. Raises UserError for an illegal one, and where a player moves twice in a row."""
        game, before = self.game, self.position
        if not bool(game.legal(before).gather(1, action.unsqueeze(1)).all()):
            raise UserError(f"An action is not legal at {game.title}: keep to the action_mask.")
        moved = game.step(before, action)
        over = moved.over
        if bool(((game.mover(moved.position) == game.mover(before)) & ~over).any()):
            raise UserError(f"At {game.title} a player may move twice in a row, which no learned model here knows of.")
        final, position = observe(game, moved.position), moved.position.clone()
        ended = over.nonzero().flatten()
        info = {}
        if len(ended):
            points = 2 * game.first_score(position[ended]) - 1
            info = {"episode_return": points.tolist(), "episode_length": game.moves(position[ended]).tolist()}
            position[ended] = game.start(len(ended))
        game.forget(position)
        self.position = position
        end = over.float()
        obs = observe(game, position) if len(ended) else final
        return Feedback(obs, moved.reward, end - 1, end, torch.ones_like(end), final, info)

    def render(self) -> None:
        """Nothing: a game is shown in the terminal."""

    def close(self) -> None:
        """Nothing is held."""


def world(env: Env | Game, num_envs: int) -> Env:
    """`env` itself, or so many games of it where it is one."""
    return cast("Env", env) if hasattr(env, "spaces") else SelfPlay(env, num_envs)

"""`babyai`: BabyAI as text. The agent reads its mission and what it sees, and writes one action a turn.

Levels and bot: Chevalier-Boisvert et al. 2018 (arXiv:1810.08272). Observations in words: Carta et al. 2023
(arXiv:2302.02662).
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import gymnasium

from foresight.envs.tools import adapters

ACTIONS = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle")
LEVELS = ("GoToRedBallGrey", "GoToLocal", "PickupLoc")
INSTRUCTION = f"You walk through rooms. Do what the mission states. Write one action a turn: {', '.join(ACTIONS)}."


class TextBabyAI(gymnasium.Env[str, str]):
    """A level of BabyAI whose observations are sentences and whose actions are `ACTIONS`."""

    def __init__(self, level: str) -> None:
        import minigrid  # noqa: F401  (registers the levels)

        self.level: Any = gymnasium.make(f"BabyAI-{level}-v0").unwrapped
        self.bot: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        with contextlib.redirect_stdout(None):  # minigrid prints what it draws again
            obs, info = self.level.reset(seed=seed)
        self.bot = None
        return self._text(obs), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act. Reward 1 at the end of the mission. Raises ValueError for an unknown action."""
        if action not in ACTIONS:
            raise ValueError(f"{action[:40]!r} is no action. Actions: {', '.join(ACTIONS)}")
        obs, reward, terminated, truncated, info = self.level.step(ACTIONS.index(action))
        return self._text(obs), float(reward > 0), terminated, truncated, info

    def advice(self) -> str:
        """The next action of minigrid's bot, which plans on being followed."""
        from minigrid.utils.baby_ai_bot import BabyAIBot

        if self.bot is None:
            self.bot = BabyAIBot(self.level)
        return ACTIONS[int(self.bot.replan())]

    def _text(self, obs: dict[str, Any]) -> str:
        held = self.level.carrying
        carried = f" You carry a {held.color} {held.type}." if held is not None else ""
        return f"Mission: {obs['mission']}.{carried} You see: {described(obs['image'])}."


def described(image: Any) -> str:
    """The objects in a view `[7, 7, 3]` of minigrid and the distance to the wall ahead, in words."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

    width, height = image.shape[:2]
    middle, found = width // 2, list[tuple[int, str]]()
    for column in range(width):
        for row in range(height):
            kind, color, state = (int(x) for x in image[column, row])
            name, ahead, side = IDX_TO_OBJECT[kind], height - 1 - row, column - middle
            if (ahead, side) == (0, 0) or name in ("unseen", "empty", "floor"):
                continue
            if name == "wall":
                if side == 0:
                    found.append((ahead, f"a wall {_steps(ahead)} ahead"))
                continue
            door = f"{('open', 'closed', 'locked')[state]} " if name == "door" else ""
            where = [f"{_steps(ahead)} ahead"] if ahead else []
            where += [f"{_steps(abs(side))} {'right' if side > 0 else 'left'}"] if side else []
            found.append((ahead + abs(side), f"a {door}{IDX_TO_COLOR[color]} {name} {' and '.join(where)}"))
    walls = [one for one in sorted(found) if one[1].startswith("a wall")]
    nearest = [one for one in found if not one[1].startswith("a wall")] + walls[:1]
    return "; ".join(text for _, text in sorted(nearest)) or "nothing"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _level(seed: int) -> TextBabyAI:
    return TextBabyAI(LEVELS[random.Random(seed).randrange(len(LEVELS))])


BabyAI = adapters.gymnasium(_level, 400, INSTRUCTION, 64, TextBabyAI.advice)

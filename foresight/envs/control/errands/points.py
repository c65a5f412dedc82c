"""Pictures of errands with a subgoal in words: where to go next, and what the gripper does there."""

from __future__ import annotations

import functools
import random

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.envs.base import Frame, Spaces
from foresight.envs.control.errands import picture, rules, script
from foresight.envs.control.errands.rules import CELLS, Errand

LETTERS = 48  # bytes of the words, padded with zeros
SCENES = 20  # of an episode
LARGEST = 2**31  # of the seeds
GAP = 0.5 / CELLS  # how near a point has to be along each axis: half a cell


class Points:
    """Every step is a new scene. An action `[5]` is where the named object or door is, x and y, where to go next, and
    the gripper there: -1 open, 0 keep, 1 close.

    Observed are `image` `[48, 48, 3]`, `mission` `[48]`, the words in UTF-8, and `state` `[5]`: place, velocity, and 1
    if an object is held. The return is the share of the scenes with the point and the gripper of the script. With
    `held_out` 1 the scenes are those of new instructions in new layouts.
    """

    spaces = Spaces(
        gs.Dict(
            {
                "image": gs.Box(0, 255, (picture.SIDE, picture.SIDE, 3), np.uint8),
                "mission": gs.Box(0, 255, (LETTERS,), np.uint8),
                "state": gs.Box(-1.0, 1.0, (5,), np.float32),
            }
        ),
        gs.Box(np.array([0, 0, 0, 0, -1], np.float32), np.ones(5, np.float32)),
        continuing=True,
    )

    def __init__(self, num_envs: int, held_out: int = 0) -> None:
        self.limit = SCENES
        self._split = "held_out" if held_out else "train"
        self.seeds = torch.zeros(num_envs, dtype=torch.int64)

    def begin(self, rows: Tensor, generator: torch.Generator) -> None:
        """Draw a new scene in the environments `rows` (bool)."""
        self.seeds = torch.where(rows, torch.randint(LARGEST, rows.shape, generator=generator), self.seeds)

    def move(self, action: Tensor, time: Tensor, generator: torch.Generator) -> Tensor:
        """Score `action` `[B, 5]` and draw new scenes; returns the reward `[B]`."""
        wanted = self.expert(generator)
        right = ((action - wanted)[:, 2:4].abs() <= GAP).all(-1) & (action[:, 4].round() == wanted[:, 4])
        self.begin(torch.ones_like(right), generator)
        return right.float() / SCENES

    def over(self, time: Tensor) -> Tensor:
        """Never, `[B]` bool."""
        return torch.zeros(len(time), dtype=torch.bool)

    def show(self, time: Tensor) -> dict[str, Tensor]:
        """The observations."""
        found = [observation(*scene(seed, self._split)) for seed in self.seeds.tolist()]
        return {name: torch.from_numpy(np.stack([one[name] for one in found])) for name in found[0]}

    def expert(self, generator: torch.Generator) -> Tensor:
        """What the script does, `[B, 5]`."""
        scenes = [scene(seed, self._split) for seed in self.seeds.tolist()]
        return torch.tensor([(*script.named(*one), *script.point(*one)) for one in scenes])

    def picture(self) -> Frame:
        """The scene of environment 0, 8 times as large."""
        image = picture.draw(scene(int(self.seeds[0]), self._split)[0])
        return image.repeat(8, 0).repeat(8, 1)


@functools.lru_cache(maxsize=4096)
def scene(seed: int, split: str) -> tuple[Errand, str]:
    """An errand in any of its states, and a subgoal. Neither is to be changed."""
    draw = random.Random(f"scene {split} {seed}")
    errand = Errand(seed, split)
    if draw.random() < 0.5:
        errand.hand = draw.choice(errand.things)
        errand.hand.cell = None
    elif draw.random() < 0.5:  # one lies where it was put down
        draw.choice(errand.things).cell = draw.choice([c for c in rules.free_cells() if c not in errand.taken()])
    errand.opened = draw.random() < 0.5
    errand.velocity = [draw.uniform(-rules.SPEED, rules.SPEED) for _ in range(2)]
    lying = [thing for thing in errand.things if thing.cell is not None]
    one, other = draw.sample(lying, 2)
    carried = errand.hand if errand.hand is not None and draw.random() < 0.5 else one
    texts = {"drop it": 1, f"pick up the {other.name}": 9, f"bring the {carried.name} to the {other.name}": 1}
    if errand.hand is not None:
        texts[f"bring it to the {other.name}"] = 10
    if errand.lock is not None and not errand.opened:
        texts[f"open the {errand.color} door"] = 3
    errand.place = _anywhere(errand, draw)
    doorway = any(abs(x - 0.5) < rules.MARGIN for x in errand.place)
    if other.cell is not None and not doorway and draw.random() < 0.4:  # in the room of the object: few places are
        errand.place = [x % 0.5 + 0.5 * (cell >= CELLS // 2) for x, cell in zip(errand.place, other.cell, strict=True)]
    return errand, draw.choices(list(texts), list(texts.values()))[0]


def _anywhere(errand: Errand, draw: random.Random) -> list[float]:
    """A place on the floor: in a doorway in one of five draws."""
    place = [draw.uniform(rules.MARGIN, 1 - rules.MARGIN) for _ in range(2)]
    doors = [door for door in range(4) if door != errand.wall]
    if draw.random() < 0.2:
        door = draw.choice(doors)
        across = errand.middle(door) + draw.uniform(-rules.OPENING, rules.OPENING)
        along = 0.5 + draw.uniform(-2 * rules.MARGIN, 2 * rules.MARGIN)
        return [along, across] if door in (0, 2) else [across, along]
    return [x + (2 * rules.MARGIN if x >= 0.5 else -2 * rules.MARGIN) * (abs(x - 0.5) < rules.MARGIN) for x in place]


def observation(errand: Errand, text: str) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    """What a semantic policy observes of an errand and a subgoal: see `Points`."""
    words = np.zeros(LETTERS, np.uint8)
    letters = text.encode()[:LETTERS]
    words[: len(letters)] = np.frombuffer(letters, np.uint8)
    state = np.array([*errand.place, *errand.velocity, float(errand.hand is not None)], np.float32)
    return {"image": picture.draw(errand), "mission": words, "state": state}

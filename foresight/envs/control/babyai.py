"""BabyAI with an instruction and a camera: an image of what the agent sees, and the mission as text.

Source: Chevalier-Boisvert et al. 2018 (arXiv:1810.08272); the levels and the bot are minigrid's. Episodes can be
restricted to pairs of a color and a kind of object, and made harder in the three ways of Liu et al. 2025
(arXiv:2505.19789): vision, semantics and execution.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces as gs
from numpy.typing import NDArray
from torch import Tensor

from foresight import errors
from foresight.data.text import encoded
from foresight.data.trajectory import Tree
from foresight.envs.base import Feedback, Frame, Spaces, grouped
from foresight.errors import UserError

PREFIX = "BabyAI-"
LETTERS = 48  # bytes of a mission in the observation, padded with zeros
MISSION = re.compile(r"(?P<verb>go to|pick up) (?P<rest>(?:the|a) (?P<pair>\w+ (?:ball|box|key)))")
HELD_OUT = ("red ball", "green box", "blue key", "yellow ball")  # 4 of the 18 pairs
PAIRS = ("all", "train", "held_out")
PARAPHRASES = {
    "go to": ("walk to", "move over to", "approach", "find"),
    "pick up": ("take", "grab", "lift", "collect"),
}
FLOOR = np.array([70, 45, 20], np.uint8)  # the color of a recolored floor, which is black
DRAWS = 1_000  # at most so many rooms are drawn for one that fits; one in ten does
MOVE_AT = 3  # actions of an episode after which the object is moved
MOVEMENTS = 3  # MiniGrid's first actions: turn left, turn right, forward
CHANGES = 3  # MiniGrid's actions from this one on may change cells: pick up, drop, toggle
VIEW = 7  # cells a side that an agent sees
WALL = (2, 5, 0)  # MiniGrid's code: object, color, state
DOOR, CLOSED = 4, 1  # a door's object, and its state from which on it blocks the view


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may choose."""

    camera: int  # pixels per cell of the agent's 7 × 7 cells
    pairs: str = "all"  # of color and kind: "train" (14; rooms have no others), missions of "held_out" (4), or "all"
    floor: bool = False  # another color of the floor
    noise: float = 0.0  # deviation of normal noise on each pixel, of 255
    paraphrase: bool = False  # verbs that the level's own missions do not have
    moved: bool = False  # the object is moved after `MOVE_AT` actions
    slips: float = 0.0  # share of the expert's actions that are a random movement instead

    def __post_init__(self) -> None:
        """Raises UserError for values out of range."""
        if self.pairs not in PAIRS:
            raise errors.unknown("value of pairs", self.pairs, PAIRS)
        if not isinstance(self.camera, int) or self.camera < 3:
            raise UserError(f"camera of BabyAI must be a whole number of at least 3 (pixels), not {self.camera!r}.")
        if not 0 <= self.noise <= 255:
            raise UserError(f"noise of BabyAI is a deviation from 0 to 255, not {self.noise!r}.")
        if not 0 <= self.slips <= 1:
            raise UserError(f"slips of BabyAI is a share from 0 to 1, not {self.slips!r}.")


class Instructed:
    """An `Env` over minigrid's level `name`.

    Observations are a dict: `image` `[7 camera, 7 camera, 3]`, bytes, the agent at the bottom, in the middle, and
    `mission` `[48]`, UTF-8 bytes padded with zeros. The reward is 1 for a success and 0 otherwise, so the return is 1
    or 0. Missions that do not name a color and a kind ("pick up a key") are left out. The n-th episode of an
    environment depends on the seed only.
    """

    def __init__(self, name: str, num_envs: int, options: Options, time_limit: int | None = None) -> None:
        """Raises UserError for a level without such missions."""
        self.name, self.num_envs, self.options = name, num_envs, options
        self._levels: list[Any] = [gymnasium.make(name).unwrapped for _ in range(num_envs)]
        side = VIEW * options.camera
        image = gs.Box(0, 255, (side, side, 3), np.uint8)
        self.spaces = Spaces(gs.Dict({"image": image, "mission": gs.Box(0, 255, (LETTERS,), np.uint8)}), gs.Discrete(7))
        self._tiles = tiles(options.camera, options.floor)
        self._seed: int | None = None
        self._group = 1
        self._limit = time_limit
        self._episode = np.zeros(num_envs, np.int64)
        self._time = np.zeros(num_envs, np.int64)
        self._missions: list[str] = [""] * num_envs
        self._bots: list[Any] = [None] * num_envs
        self._taken: list[int | None] = [None] * num_envs  # the last action of the episode
        self._codes: list[NDArray[np.uint8]] = [np.zeros((0, 0, 3), np.uint8)] * num_envs  # of the levels' cells
        for level in self._levels:
            level.gen_obs = dict  # it is slow, and `view` does it for all levels at once
        self._noise = self._slips = np.random.default_rng(0)
        if not self._named(self._draw_level(0, (0, 0, 0))):
            raise UserError(f"'{name}' has no mission that names a color and a kind. Use BabyAI-GoToLocal-v0.")

    def reset(self, seed: int) -> Tree:
        """Reset all environments; equal seeds give equal episodes. Returns obs `[B, ...]`."""
        self._seed = seed
        self._episode[:] = 0
        self._noise, self._slips = np.random.default_rng(seed), np.random.default_rng((seed, 1))
        for i in range(self.num_envs):
            self._begin(i)
        return self._show()

    def step(self, action: Tensor) -> Feedback:
        """Take `action` `[B]` in every environment."""
        if action.shape != (self.num_envs,):
            raise ValueError(f"'{self.name}' takes actions of shape {(self.num_envs,)}, not {tuple(action.shape)}.")
        if self._seed is None:
            raise RuntimeError(f"Environment '{self.name}': call reset(seed) before step.")
        success, over, cut = (torch.zeros(self.num_envs) for _ in range(3))
        self._time += 1
        for i, (level, chosen) in enumerate(zip(self._levels, action.tolist(), strict=True)):
            _, reward, terminated, truncated, _ = level.step(chosen)
            success[i], over[i] = float(reward > 0), float(terminated)
            late = self._limit is not None and self._time[i] >= self._limit
            cut[i] = float(terminated or truncated or late)
            self._taken[i] = chosen
            if self.options.moved and self._time[i] == MOVE_AT and not cut[i]:
                move(level)
                self._bots[i], chosen = None, CHANGES
            if chosen >= CHANGES:
                self._codes[i] = codes(level)
        final = obs = self._show()
        info: dict[str, Any] = {}
        ended = cut.nonzero().flatten().tolist()
        if ended:
            info = {"episode_return": success[cut > 0].tolist(), "episode_length": self._time[ended].tolist()}
            for i in ended:
                self._begin(i)
            obs = self._show(ended, final)
        return Feedback(obs, success, 1 - over, cut, torch.ones(self.num_envs), final, info)

    def same_starts(self, group: int) -> None:
        """Give each `group` environments in a row the same episodes, from the next reset on.

        Raises UserError if their number is no multiple of it.
        """
        self._group = grouped(self.num_envs, group)

    def expert(self) -> Tensor:
        """The next action of BabyAI's bot in every environment, `[B]`, to be called before every step.

        It need not be followed. With `slips` some of the actions are random movements.
        """
        advice = np.array([self._advice(i) for i in range(self.num_envs)])
        slipped = self._slips.random(self.num_envs) < self.options.slips
        return torch.from_numpy(np.where(slipped, self._slips.integers(MOVEMENTS, size=self.num_envs), advice))

    def render(self) -> Frame | None:
        """The whole room of environment 0, what the agent sees highlighted."""
        frame: Frame = self._levels[0].get_frame(highlight=True, tile_size=32)
        return frame

    def close(self) -> None:
        """Free the levels."""
        for level in self._levels:
            level.close()

    def _begin(self, i: int) -> None:
        """The next episode of environment `i`."""
        assert self._seed is not None
        key = (self._seed, i // self._group, int(self._episode[i]))
        self._draw_level(i, key)
        self._episode[i] += 1
        self._time[i], self._bots[i], self._taken[i] = 0, None, None
        mission = self._levels[i].mission
        if self.options.paraphrase:
            found = MISSION.fullmatch(mission)
            assert found is not None
            choices = PARAPHRASES[found["verb"]]
            mission = f"{choices[np.random.SeedSequence(key).generate_state(2)[1] % len(choices)]} {found['rest']}"
        self._missions[i] = mission

    def _draw_level(self, i: int, key: tuple[int, int, int]) -> Any:
        """Reset level `i` by the seed `key` until its mission is one of those asked for."""
        level = self._levels[i]
        with contextlib.redirect_stdout(None):  # minigrid prints what it draws again
            level.reset(seed=int(np.random.SeedSequence(key).generate_state(1)[0]))
            for _ in range(DRAWS):
                if self._accepted(level):
                    break
                level.reset()
            else:  # unless there is no mission of this kind at all, which is reported first
                if self._named(level):
                    raise UserError(
                        f"'{self.name}' has no room that pairs={self.options.pairs} allows, in {DRAWS} draws: choose "
                        "another level, or leave out pairs."
                    )
        self._codes[i] = codes(level)
        return level

    def _named(self, level: Any) -> bool:
        return MISSION.fullmatch(level.mission) is not None

    def _accepted(self, level: Any) -> bool:
        found = MISSION.fullmatch(level.mission)
        if found is None:
            return False
        if self.options.pairs == "train":  # an object that lies there and is never asked for teaches to avoid it
            return not any(thing is not None and f"{thing.color} {thing.type}" in HELD_OUT for thing in level.grid.grid)
        return self.options.pairs == "all" or found["pair"] in HELD_OUT

    def _show(self, rows: list[int] | None = None, others: Tree = None) -> dict[str, Tensor]:
        """The observations; with `rows` only theirs are new, the rest are `others`."""
        chosen = range(self.num_envs) if rows is None else rows
        drawn = self._picture(view([self._levels[i] for i in chosen], [self._codes[i] for i in chosen]))
        text = np.zeros((len(drawn), LETTERS), np.uint8)
        for row, i in enumerate(chosen):
            text[row] = encoded(self._missions[i], LETTERS)
        new = {"image": torch.from_numpy(drawn), "mission": torch.from_numpy(text)}
        if rows is None:
            return new
        return {name: others[name].index_copy(0, torch.tensor(rows), value) for name, value in new.items()}

    def _picture(self, cells: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Cells `[B, 7, 7, 3]` as pixels `[B, 7 camera, 7 camera, 3]`. MiniGrid's first index is the column."""
        picked = self._tiles[cells[..., 0], cells[..., 1], cells[..., 2]].swapaxes(1, 2)
        count, rows, columns, side = picked.shape[:4]
        image = picked.swapaxes(2, 3).reshape(count, rows * side, columns * side, 3)
        if not self.options.noise:
            return np.ascontiguousarray(image)
        noisy = image + self._noise.normal(0, self.options.noise, image.shape)
        return noisy.round().clip(0, 255).astype(np.uint8)

    def _advice(self, i: int) -> int:
        from minigrid.utils.baby_ai_bot import BabyAIBot

        if self._bots[i] is None:
            self._bots[i], self._taken[i] = BabyAIBot(self._levels[i]), None
        return int(self._bots[i].replan(self._taken[i]))


def tiles(side: int, floor: bool) -> NDArray[np.uint8]:
    """MiniGrid's pictures of all cells, by the codes of object, color and state: `[11, 6, 4, side, side, 3]`."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT
    from minigrid.core.grid import Grid
    from minigrid.core.world_object import WorldObj

    made = np.zeros((len(IDX_TO_OBJECT), len(IDX_TO_COLOR), 4, side, side, 3), np.uint8)
    for kind in IDX_TO_OBJECT:
        for color in IDX_TO_COLOR:
            for state in range(4):
                if IDX_TO_OBJECT[kind] == "unseen":
                    continue
                known = IDX_TO_OBJECT[kind] not in ("empty", "agent") and (state < 3)
                tile = Grid.render_tile(WorldObj.decode(kind, color, state) if known else None, tile_size=side)
                made[kind, color, state] = np.where((tile == 0).all(-1, keepdims=True), FLOOR, tile) if floor else tile
    return made


def codes(level: Any) -> NDArray[np.uint8]:
    """The codes of a level's cells `[W, H, 3]` with walls around, as far as an agent can see."""
    cells = level.grid.encode()
    framed = np.empty((cells.shape[0] + 2 * VIEW, cells.shape[1] + 2 * VIEW, 3), np.uint8)
    framed[:] = WALL
    framed[VIEW:-VIEW, VIEW:-VIEW] = cells
    return framed


def view(levels: list[Any], framed: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """What the agents see, `[B, 7, 7, 3]`, as minigrid's `gen_obs`: column, row; ahead is row 0; unseen cells are 0."""
    half, seen = VIEW // 2, np.empty((len(levels), VIEW, VIEW, 3), np.uint8)
    for row, (level, cells) in enumerate(zip(levels, framed, strict=True)):
        turn = level.agent_dir
        # The corner of the seen square, for an agent that looks right, down, left or up.
        dx, dy = ((0, -half), (-half, 0), (1 - VIEW, -half), (-half, 1 - VIEW))[turn]
        x, y = int(level.agent_pos[0]) + VIEW + dx, int(level.agent_pos[1]) + VIEW + dy
        seen[row] = np.rot90(cells[x : x + VIEW, y : y + VIEW], -turn - 1)
    visible = lit((seen[..., 0] == WALL[0]) | ((seen[..., 0] == DOOR) & (seen[..., 2] >= CLOSED)))
    for row, level in enumerate(levels):
        seen[row, half, VIEW - 1] = (1, 0, 0) if level.carrying is None else level.carrying.encode()
    return np.where(visible[..., None], seen, np.uint8(0))


def lit(opaque: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The cells `[B, 7, 7]` that light from the agent's reaches, row by row, as minigrid's `process_vis`."""
    mask = np.zeros(opaque.shape, bool)
    mask[:, VIEW // 2, VIEW - 1] = True
    there = list(range(VIEW - 1))
    back = [VIEW - 1 - column for column in there]
    for row in (VIEW - 1 - distance for distance in range(VIEW)):
        for columns, way in ((there, 1), (back, -1)):
            for column in columns:
                through = mask[:, column, row] & ~opaque[:, column, row]
                mask[:, column + way, row] |= through
                if row:
                    mask[:, column + way, row - 1] |= through
                    mask[:, column, row - 1] |= through
    return mask


def move(level: Any) -> None:
    """Put the objects that the mission names, and that are not carried, into other free cells."""
    for thing, place in list(zip(*level.instrs.desc.find_matching_objs(level), strict=True)):
        if thing is level.carrying or place is None:
            continue
        level.grid.set(*place, None)
        try:
            level.place_obj(thing, max_tries=100)
        except RecursionError:  # no free cell
            level.put_obj(thing, *place)
    level.update_objs_poss()


def make(name: str, num_envs: int, time_limit: int | None = None, **options: Any) -> Instructed:
    """A batch of `name` with its `Options`. Raises UserError for an unknown one."""
    known = [field.name for field in dataclasses.fields(Options)]
    for key in options:
        if key not in known:
            raise errors.unknown(f"option of '{name}' with a camera", key, known)
    return Instructed(name, num_envs, Options(**options), time_limit)

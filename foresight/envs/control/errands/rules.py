"""One errand: four rooms, five objects, one door that may be locked, and a disc that is moved by thrust.

The square [0, 1]² (y down) has 12 × 12 cells and four rooms around its middle, numbered clockwise from the upper left.
Door i is in the wall between the rooms i and i + 1 (modulo 4); one of the four walls has none, so there is one way from
room to room. At most one door is locked. It opens when the disc, with the key of the door's color, touches it. Objects
lie in cells that touch no wall. The own numbers of this package; no published task.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random

from foresight import errors
from foresight.errors import UserError

COLORS = ("red", "green", "blue", "yellow", "purple", "cyan")
KINDS = ("ball", "box", "key")
PAIRS = tuple(f"{color} {kind}" for color in COLORS for kind in KINDS)
HELD_PAIRS = ("red ball", "green box", "purple key", "yellow ball")  # never seen nor named in training
GRAPHS = tuple((wall, lock) for wall in range(4) for lock in (None, *((wall + i) % 4 for i in (1, 2, 3))))
HELD_GRAPHS = ((0, 1), (1, 3), (2, 1), (3, None))  # (wall without a door, locked door): never seen in training
SPLITS = ("train", "instructions", "layouts", "held_out")  # held_out: new instructions in new layouts

CELLS, OBJECTS, LIMIT = 12, 5, 600  # cells a side; objects of an errand; steps before it ends
MARGIN, OPENING = 0.04, 0.05  # how near the disc's center gets to a wall, and to the middle line of a doorway
GAP = 1e-4  # by which a wall stops the disc before it touches: rounding must not put it inside
FRICTION, THRUST, SPEED = 0.97, 0.008, 0.05  # velocity kept per step; gained at full thrust; highest along an axis
REACH, SLOW = 0.06, 0.025  # at most so far away, and so fast, an object is picked up
SLIP, SHUT = (3, 15), (10, 30)  # steps after which an injected failure happens


@dataclasses.dataclass
class Thing:
    """An object. `cell` is None while it is held."""

    color: str
    kind: str
    cell: tuple[int, int] | None

    @property
    def name(self) -> str:
        """`red ball`."""
        return f"{self.color} {self.kind}"


@dataclasses.dataclass(frozen=True)
class Sense:
    """What the disc's own sensors report: not where anything else is."""

    place: tuple[float, float]
    velocity: tuple[float, float]
    hand: str  # the name of the held object; "" if there is none
    slipped: str  # the name of an object that was lost in this step, without having been released
    touched: str  # the color of the locked door that was touched in this step
    opened: str  # the color of the door that was opened in this step


class Errand:
    """One episode, drawn from `seed`. `failures` is the probability that an object slips, or that a door shuts.

    An object that was picked up slips at most once per grip, after some steps, and then lies in another cell that can
    be reached. A door that was opened shuts after some steps, locked, if its key can be reached.

    Raises UserError for an unknown split and a rate outside [0, 1].
    """

    def __init__(self, seed: int, split: str = "train", failures: float = 0.0) -> None:
        if split not in SPLITS:
            raise errors.unknown("split of errands", split, SPLITS)
        if not 0 <= failures <= 1:
            raise UserError(f"The rate of failures is {failures:g}: it must be from 0 to 1.")
        self.failures, self.time, self.injected = failures, 0, 0
        self._draw = draw = random.Random(f"errand {split} {seed}")
        new_words, new_rooms = split in ("instructions", "held_out"), split in ("layouts", "held_out")
        known = [pair for pair in PAIRS if pair not in HELD_PAIRS]
        self.wall, self.lock = draw.choice([one for one in GRAPHS if (one in HELD_GRAPHS) == new_rooms])
        self.rows = [draw.randint(1, 4) + (6 if door in (1, 2) else 0) for door in range(4)]
        names = [draw.choice(HELD_PAIRS if new_words else known)]
        names.append(draw.choice([pair for pair in (PAIRS if new_words else known) if pair != names[0]]))
        key = "" if self.lock is None else draw.choice([pair for pair in known if pair.endswith("key")])
        self.color = key.removesuffix(" key")  # of the locked door
        if key and key not in names:
            names.append(key)
        others = [pair for pair in (PAIRS if new_words else known) if pair not in names]
        names += draw.sample(others, OBJECTS - len(names))
        self.opened = False
        self.velocity = [0.0, 0.0]
        self.things = [Thing(name.split()[0], name.split()[1], None) for name in names]
        self.place = list(center(draw.choice(free_cells())))
        apart, near = list(free_cells()), self.reachable()
        for thing in self.things:
            thing.cell = draw.choice([c for c in apart if room_of(center(c)) in near] if thing.name == key else apart)
            apart = [cell for cell in apart if distance(cell, thing.cell) > 1]
        self.hand: Thing | None = None
        self.instruction = f"bring the {names[0]} to the {names[1]}"
        self._slips = self._shuts = -1  # the step of a failure; -1: none
        self._slipped = self._touched = self._opened = ""

    @property
    def success(self) -> bool:
        """Whether the object lies in a cell beside the one where it was to be brought."""
        moved, target = self.things[:2]
        return moved.cell is not None and target.cell is not None and distance(moved.cell, target.cell) == 1

    @property
    def over(self) -> bool:
        """Whether the episode has ended."""
        return self.success or self.time >= LIMIT

    def sense(self) -> Sense:
        """What the sensors report after the last step."""
        (x, y), (vx, vy) = self.place, self.velocity
        return Sense((x, y), (vx, vy), self.hand.name if self.hand else "", self._slipped, self._touched, self._opened)

    def closed(self, door: int) -> bool:
        """Whether a door cannot be passed: there is none, or it is locked."""
        return door == self.wall or (door == self.lock and not self.opened)

    def reachable(self) -> set[int]:
        """The rooms that can be reached without opening a door."""
        here = room_of(self.place)
        found = {here}
        for way in (1, -1):
            room = here
            while not self.closed(room if way == 1 else (room - 1) % 4):
                room = (room + way) % 4
                if room in found:
                    break
                found.add(room)
        return found

    def step(self, right: float, down: float, grip: float) -> None:
        """One step: thrust along x and y in [-1, 1]; grip above 0.5 closes the gripper, below -0.5 opens it."""
        self.time += 1
        self._slipped = self._touched = self._opened = ""
        for axis, thrust in enumerate((right, down)):
            speed = FRICTION * self.velocity[axis] + THRUST * min(max(thrust, -1.0), 1.0)
            self.velocity[axis] = min(max(speed, -SPEED), SPEED)
            self._slide(axis)
        if grip > 0.5 and self.hand is None:
            self._pick()
        elif grip < -0.5 and self.hand is not None:
            self._release(min(free_cells(), key=self._cost))
        self._fail()

    def _slide(self, axis: int) -> None:
        """Move along one axis, as far as walls and doors permit."""
        before, across = self.place[axis], self.place[1 - axis]
        wanted = before + self.velocity[axis]
        stop = min(max(wanted, MARGIN), 1 - MARGIN)
        if abs(across - 0.5) < MARGIN:  # in a doorway of the other wall, whose sides stop the disc
            middle = self.middle(door_in(1 - axis, before))
            stop = min(max(stop, middle - OPENING), middle + OPENING)
        elif abs(stop - 0.5) < MARGIN <= abs(before - 0.5):
            door = door_in(axis, across)
            ahead = door != self.wall and abs(across - self.middle(door)) <= OPENING
            if ahead and self.closed(door):
                self._touch()
            if not ahead or self.closed(door):
                stop = 0.5 - MARGIN - GAP if before < 0.5 else 0.5 + MARGIN + GAP
        if stop != wanted:
            self.velocity[axis] = 0.0
        self.place[axis] = stop

    def middle(self, door: int) -> float:
        """The coordinate of the middle of a door along its wall."""
        return (self.rows[door] + 0.5) / CELLS

    def _touch(self) -> None:
        if self.hand is not None and self.hand.name == f"{self.color} key":
            self.opened, self._opened = True, self.color
            self._shuts = self.time + self._draw.randint(*SHUT) if self._draw.random() < self.failures else -1
        else:
            self._touched = self.color

    def _pick(self) -> None:
        near = [
            (math.dist(self.place, center(thing.cell)), thing) for thing in self.things if thing.cell is not None
        ]  # fmt: skip
        gap, thing = min(near, key=lambda pair: pair[0])
        if gap <= REACH and max(map(abs, self.velocity)) <= SLOW:
            self.hand, thing.cell = thing, None
            self._slips = self.time + self._draw.randint(*SLIP) if self._draw.random() < self.failures else -1

    def _release(self, cell: tuple[int, int]) -> None:
        assert self.hand is not None
        self.hand.cell, self.hand, self._slips = cell, None, -1

    def _cost(self, cell: tuple[int, int]) -> float:
        """How far away a cell is for an object that is put down: taken cells and other rooms come last."""
        away = room_of(center(cell)) != room_of(self.place)
        return math.dist(self.place, center(cell)) + 10 * (cell in self.taken() or away)

    def _fail(self) -> None:
        """Injected failures whose time has come."""
        if self.time == self._slips and self.hand is not None:
            self._slipped = self.hand.name
            rooms, taken = self.reachable(), self.taken()
            open_cells = [c for c in free_cells() if room_of(center(c)) in rooms and c not in taken]
            self._release(self._draw.choice(open_cells))
            self.injected += 1
        inside = any(abs(x - 0.5) < 2 * MARGIN for x in self.place)
        if 0 < self._shuts <= self.time and not inside:
            self.opened, self._shuts = False, -1
            key = next(thing for thing in self.things if thing.name == f"{self.color} key")
            if key.cell is None or room_of(center(key.cell)) in self.reachable():
                self.injected += 1
            else:
                self.opened = True

    def taken(self) -> list[tuple[int, int]]:
        """The cells in which objects lie."""
        return [thing.cell for thing in self.things if thing.cell is not None]


@functools.cache
def free_cells() -> tuple[tuple[int, int], ...]:
    """The cells (column, row) in which objects may lie: those that touch no wall."""
    inner = [i for i in range(CELLS) if 1 <= i % 6 <= 4]
    return tuple((column, row) for column in inner for row in inner)


def center(cell: tuple[int, int]) -> tuple[float, float]:
    """The middle of a cell."""
    return (cell[0] + 0.5) / CELLS, (cell[1] + 0.5) / CELLS


def room_of(place: tuple[float, float] | list[float]) -> int:
    """The room of a place; the middle of a doorway belongs to one of its two."""
    return (0 if place[0] < 0.5 else 1) if place[1] < 0.5 else (3 if place[0] < 0.5 else 2)


def door_in(axis: int, across: float) -> int:
    """The door that a move along `axis` (0: x) passes, at the coordinate `across` the move."""
    return ((0, 2) if axis == 0 else (3, 1))[across >= 0.5]


def distance(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Steps between two cells, straight or diagonal."""
    return max(abs(one[0] - other[0]), abs(one[1] - other[1]))

"""A solution of errands without learning, in three parts: a plan in words, points on the way, and thrust.

They stand in for the layers of `agents.stack`, and are what the learned ones imitate.
"""

from __future__ import annotations

import re

from foresight.envs.control.errands import rules
from foresight.envs.control.errands.rules import CELLS, THRUST, Errand, center, distance, room_of

KEEP, CLOSE, OPEN = 0.0, 1.0, -1.0  # of the gripper
SUBGOAL = re.compile(
    r"pick up the (?P<pick>\w+ \w+)|open the (?P<open>\w+) door|(?P<drop>drop it)|bring it to the (?P<bring>\w+ \w+)"
    r"|bring the (?P<what>\w+ \w+) to the (?P<where>\w+ \w+)"
)
STIFFNESS, DAMPING = 0.15, 0.75  # of `steer`: thrust per distance and per velocity, in units of THRUST


def plan(instruction: str, hand: str = "", locked: str = "") -> list[str]:
    """Subgoals for "bring the A to the B" with an object in the hand and a door that is known to be locked.

    Empty if the instruction is of another form.
    """
    found = SUBGOAL.fullmatch(instruction)
    if found is None or not found["what"]:
        return []
    wanted, plans = [f"{locked} key"] * bool(locked) + [found["what"]], list[str]()
    for number, name in enumerate(wanted):
        if hand != name:
            plans += ["drop it"] * bool(hand) + [f"pick up the {name}"]
        hand = name
        if locked and not number:
            plans.append(f"open the {locked} door")
    return [*plans, f"bring it to the {found['where']}"]


def ask(instruction: str, reason: str, hand: str = "", locked: str = "") -> str:
    """The question of a language model that plans: the instruction, and what is reported to it."""
    door = f"the {locked} door" if locked else "nothing"
    return f"Task: {instruction}. Report: {reason}. Hand: {hand or 'nothing'}. Locked: {door}. Plan:"


def read(text: str) -> list[str]:
    """The subgoals in an answer, which are separated by semicolons."""
    return [part for part in (one.strip(" .") for one in text.strip().partition("\n")[0].split(";")) if part]


def named(errand: Errand, text: str) -> tuple[float, float]:
    """Where the object or the door is that a subgoal is about; the place of the disc if there is none."""
    found, (x, y) = SUBGOAL.fullmatch(text), errand.place
    if found is None or found["drop"]:
        return x, y
    if found["open"]:
        return (x, y) if errand.lock is None or errand.color != found["open"] else _behind(errand, errand.lock, -1)
    name, _ = _wanted(errand, found)
    return next((center(one.cell) for one in errand.things if one.name == name and one.cell is not None), (x, y))


def _wanted(errand: Errand, found: re.Match[str]) -> tuple[str, bool]:
    """The object to go to, and whether what is held is put down beside it."""
    put = found["bring"] or (found["where"] if errand.hand and errand.hand.name == found["what"] else None)
    return put or found["pick"] or found["what"], bool(put)


def point(errand: Errand, text: str) -> tuple[float, float, float]:
    """Where to go next for a subgoal, x and y, and what the gripper does there.

    A whole instruction is a subgoal too: without plans or doors. Text of another form, or about what is not there:
    stay.
    """
    x, y = errand.place
    stay = (x, y, KEEP)
    found = SUBGOAL.fullmatch(text)
    if found is None:
        return stay
    if found["drop"]:
        return x, y, OPEN
    if found["open"]:
        return stay if errand.lock is None or errand.color != found["open"] else (*_to_door(errand, errand.lock), KEEP)
    name, put = _wanted(errand, found)
    thing = next((one for one in errand.things if one.name == name and one.cell is not None), None)
    if thing is None or thing.cell is None:
        return stay
    cell = _free_beside(errand, thing.cell) if put else thing.cell
    room = room_of(center(cell))
    if (way := _way(errand, room)) is not None:
        return (*way, KEEP)
    return (*center(cell), OPEN if put else CLOSE)


def steer(offset: tuple[float, float], velocity: tuple[float, float]) -> tuple[float, float]:
    """Thrust toward a point at `offset` from the disc: a spring with damping."""
    right, down = (
        min(max((STIFFNESS * d - DAMPING * v) / THRUST, -1.0), 1.0) for d, v in zip(offset, velocity, strict=True)
    )
    return right, down


def _free_beside(errand: Errand, cell: tuple[int, int]) -> tuple[int, int]:
    """A free cell beside an object: the one toward the middle of the room, or the next nearest to it."""
    first = (cell[0] + (1 if cell[0] % 6 <= 2 else -1), cell[1])
    near = [one for one in rules.free_cells() if distance(one, cell) == 1 and one not in errand.taken()]
    return min(near or [first], key=lambda one: distance(one, first))


def _way(errand: Errand, room: int) -> tuple[float, float] | None:
    """The next point on the way to a room: behind a door; None in the room.

    On the way there walls stop the disc along one axis, and it slides along them until it is at the door.
    """
    here = room_of(errand.place)
    if here == room:
        return None
    forward = (errand.wall - here) % 4 >= (room - here) % 4  # clockwise, unless the wall without a door is there
    return _behind(errand, here if forward else (here - 1) % 4, here)


def _to_door(errand: Errand, door: int) -> tuple[float, float]:
    """The next point on the way to touch a door."""
    here = room_of(errand.place)
    if here in (door, (door + 1) % 4):
        return _behind(errand, door, here)
    forward = (errand.wall - here) % 4 >= (door - here) % 4
    way = _way(errand, door if forward else (door + 1) % 4)
    assert way is not None
    return way


def _behind(errand: Errand, door: int, here: int) -> tuple[float, float]:
    """The middle of the cell that touches a door of the room `here` from the other side."""
    row, room = errand.rows[door], (door + 1) % 4 if here == door else door
    if door in (0, 2):
        return center((CELLS // 2 - (1 if room in (0, 3) else 0), row))
    return center((row, CELLS // 2 - (1 if room in (0, 1) else 0)))


def arrived(offset: tuple[float, float], velocity: tuple[float, float]) -> bool:
    """Whether the gripper may act: near the point, and slow."""
    return max(map(abs, offset)) <= rules.REACH / 2 and max(map(abs, velocity)) <= rules.SLOW

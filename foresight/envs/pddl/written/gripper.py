"""Gripper: ball by ball, with the first gripper."""

from __future__ import annotations

Atoms = set[tuple[str, ...]]


def get_plan(objects: Atoms, init: Atoms, goal: Atoms) -> list[str]:
    """Go to each ball of the goal, pick it, go to its room, drop it."""
    where = {a[1]: a[2] for a in init if a[0] == "at"}
    here = next(a[1] for a in init if a[0] == "at-robby")
    hand = min(a[1] for a in init if a[0] == "gripper")
    plan = []
    for _, ball, room in sorted(goal):
        start = where[ball]
        if start == room:
            continue
        if here != start:
            plan.append(f"(move {here} {start})")
        plan.append(f"(pick {ball} {start} {hand})")
        plan.append(f"(move {start} {room})")
        plan.append(f"(drop {ball} {room} {hand})")
        here = room
    return plan

"""Ferry: car by car."""

from __future__ import annotations

Atoms = set[tuple[str, ...]]


def get_plan(objects: Atoms, init: Atoms, goal: Atoms) -> list[str]:
    """Sail to each car, board it, sail to its end, debark."""
    where = {a[1]: a[2] for a in init if a[0] == "at"}
    here = next(a[1] for a in init if a[0] == "at-ferry")
    plan = []
    for _, car, end in sorted(goal):
        start = where[car]
        if start == end:
            continue
        if here != start:
            plan.append(f"(sail {here} {start})")
        plan.append(f"(board {car} {start})")
        plan.append(f"(sail {start} {end})")
        plan.append(f"(debark {car} {end})")
        here = end
    return plan

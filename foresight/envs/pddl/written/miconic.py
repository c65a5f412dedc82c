"""Miconic: passenger by passenger, each with the lift of its building."""

from __future__ import annotations

Atoms = set[tuple[str, ...]]


def get_plan(objects: Atoms, init: Atoms, goal: Atoms) -> list[str]:
    """Take the lift to the origin, board, take it to the destination, depart."""
    above = {(a[1], a[2]) for a in init if a[0] == "above"}
    start = {a[1]: a[2] for a in init if a[0] == "origin"}
    end = {a[1]: a[2] for a in init if a[0] == "destination"}
    lifts = sorted(a[1] for a in init if a[0] == "lift-at")
    plan = []

    def ride(here: str, to: str) -> None:
        if here != to:
            plan.append(f"(up {here} {to})" if (here, to) in above else f"(down {here} {to})")

    for _, who in sorted(goal):
        a, b = start[who], end[who]
        i = next(i for i, f in enumerate(lifts) if f == a or (f, a) in above or (a, f) in above)
        ride(lifts[i], a)
        plan.append(f"(board {a} {who})")
        ride(a, b)
        plan.append(f"(depart {b} {who})")
        lifts[i] = b
    return plan

"""Forest: follow the trail; climb where it is a hill."""

from __future__ import annotations

Atoms = set[tuple[str, ...]]


def get_plan(objects: Atoms, init: Atoms, goal: Atoms) -> list[str]:
    """From the start to the goal along the marked trail."""
    trail = {a[1]: a[2] for a in init if a[0] == "trail"}
    hills = {a[1] for a in init if a[0] == "hill"}
    here = next(a[1] for a in init if a[0] == "at")
    end = next(a[1] for a in goal)
    plan = []
    while here != end:
        to = trail[here]
        plan.append(f"(climb {here} {to})" if to in hills else f"(walk {here} {to})")
        here = to
    return plan

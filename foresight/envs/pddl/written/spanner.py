"""Spanner: collect every spanner on the way, then tighten."""

from __future__ import annotations

Atoms = set[tuple[str, ...]]


def get_plan(objects: Atoms, init: Atoms, goal: Atoms) -> list[str]:
    """Walk from link to link to the nuts; one spanner for each nut."""
    at = {a[1]: a[2] for a in init if a[0] == "at"}
    link = {a[1]: a[2] for a in init if a[0] == "link"}
    usable = sorted(a[1] for a in init if a[0] == "usable")
    man = next(o[0] for o in objects if o[1] == "man")
    nuts = sorted(a[1] for a in goal)
    here, held, plan = at[man], [], []
    while True:
        for tool in usable:
            if at[tool] == here:
                plan.append(f"(pick-up {here} {tool} {man})")
                held.append(tool)
        if here == at[nuts[0]]:
            break
        plan.append(f"(walk {here} {link[here]} {man})")
        here = link[here]
    for nut, tool in zip(nuts, held, strict=False):
        plan.append(f"(tighten {here} {tool} {man} {nut})")
    return plan

"""Delivery: take a paper for each location that wants one, then visit them."""

from __future__ import annotations

Atoms = set[tuple[str, ...]]


def get_plan(objects: Atoms, init: Atoms, goal: Atoms) -> list[str]:
    """Every location of the goal is safe; the others are never visited."""
    here = next(a[1] for a in init if a[0] == "home")
    papers = sorted(a[1] for a in init if a[0] == "unpacked")
    places = sorted(a[1] for a in goal)
    plan = [f"(pick-up {paper} {here})" for paper in papers[: len(places)]]
    for place, paper in zip(places, papers, strict=False):
        plan.append(f"(move {here} {place})")
        plan.append(f"(deliver {paper} {place})")
        here = place
    return plan

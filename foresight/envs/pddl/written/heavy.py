"""Heavy: from the heaviest to the lightest."""

from __future__ import annotations

Atoms = set[tuple[str, ...]]


def get_plan(objects: Atoms, init: Atoms, goal: Atoms) -> list[str]:
    """An item is as heavy as the number of items that it is heavier than."""
    items = [a[1] for a in goal]
    count = dict.fromkeys(items, 0)
    for a in init:
        if a[0] == "heavier":
            count[a[1]] += 1
    items.sort(key=lambda i: -count[i])
    plan = [f"(pack-first {items[0]})"]
    for i in range(1, len(items)):
        plan.append(f"(stack {items[i - 1]} {items[i]})")
    return plan

"""Draw the backup diagrams of the course: docs/media/backups.svg.

python docs/diagrams.py

Open circles are states, filled ones actions, squares the end of an episode (Sutton & Barto 2018, figure 8.11). The gray
is readable on a light and on a dark page.
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parent / "media" / "backups.svg"
GRAY, STEP, WIDTH = "#808890", 38, 150
STATE, ACTION, END = "state", "action", "end"
Tree = tuple[str, list["Tree"]]  # a node and what follows it


def chain(*kinds: str) -> Tree:
    """Nodes one below the other."""
    node: Tree = (kinds[-1], [])
    for kind in kinds[-2::-1]:
        node = (kind, [node])
    return node


DIAGRAMS: dict[str, tuple[str, Tree]] = {
    "dynamic programming": (
        "all actions, all next states",
        (STATE, [(ACTION, [(STATE, []), (STATE, [])]), (ACTION, [(STATE, []), (STATE, [])])]),
    ),
    "TD(0)": ("one sampled step", chain(STATE, ACTION, STATE)),
    "Q-learning": ("the best next action", (ACTION, [(STATE, [(ACTION, []), (ACTION, []), (ACTION, [])])])),
    "n-step": ("n sampled steps", chain(STATE, ACTION, STATE, ACTION, STATE)),
    "Monte Carlo": ("to the end", chain(STATE, ACTION, STATE, ACTION, STATE, ACTION, END)),
}


def node(kind: str, x: float, y: float) -> str:
    """One node."""
    if kind == END:
        return f'<rect x="{x - 7}" y="{y - 7}" width="14" height="14" fill="{GRAY}"/>'
    fill = GRAY if kind == ACTION else "none"
    return (
        f'<circle cx="{x}" cy="{y}" r="{5 if kind == ACTION else 8}" fill="{fill}" stroke="{GRAY}" stroke-width="2"/>'
    )


def drawn(tree: Tree, x: float, y: float, room: float) -> list[str]:
    """A node and everything below it, in `room` pixels around `x`."""
    kind, below = tree
    parts = []
    for i, child in enumerate(below):
        at = x + room * ((i + 0.5) / len(below) - 0.5)
        start, end = (5 if kind == ACTION else 8), (5 if child[0] == ACTION else 8)
        parts.append(f'<path d="M {x} {y + start} L {at} {y + STEP - end}" stroke="{GRAY}" stroke-width="2"/>')
        parts += drawn(child, at, y + STEP, room / len(below))
    return [*parts, node(kind, x, y)]


def picture() -> str:
    """All diagrams side by side."""
    parts = []
    for column, (name, (note, tree)) in enumerate(DIAGRAMS.items()):
        x = WIDTH * (column + 0.5)
        parts += [f'<text x="{x}" y="18" font-weight="bold">{name}</text>', f'<text x="{x}" y="36">{note}</text>']
        parts += drawn(tree, x, 62, 110)
    width, height = WIDTH * len(DIAGRAMS), 62 + 6 * STEP + 16
    style = f'font-family="sans-serif" font-size="12" text-anchor="middle" fill="{GRAY}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")

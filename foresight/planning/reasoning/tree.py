"""`ThoughtTree`: what a method thought, as a graph of texts with scores. An aggregated thought has several parents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class Node:
    """A thought: its own text, where it came from, and its score (None: it was not scored)."""

    text: str
    parents: tuple[int, ...]
    kind: str = "thought"
    score: float | None = None
    kept: bool = True
    chosen: bool = False  # on the way to the answer


@dataclasses.dataclass
class ThoughtTree:
    """Nodes in the order in which they were thought: parents come before their children. Node 0 is the question."""

    question: str
    nodes: list[Node] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        """Start with the question."""
        if not self.nodes:
            self.nodes.append(Node(self.question, (), "question"))

    def add(self, text: str, parents: Sequence[int] = (0,), kind: str = "thought", score: float | None = None) -> int:
        """Add a thought below its parents; returns its number."""
        self.nodes.append(Node(text, tuple(parents), kind, score))
        return len(self.nodes) - 1

    def choose(self, node: int) -> None:
        """Mark a node and everything that it came from as chosen."""
        ahead = [node]
        while ahead:
            found = self.nodes[ahead.pop()]
            if not found.chosen:
                found.chosen = True
                ahead += found.parents

    def prune(self, nodes: Sequence[int]) -> None:
        """Mark nodes as not kept."""
        for node in nodes:
            self.nodes[node].kept = False

    def depth(self) -> list[int]:
        """How many thoughts each node is away from the question, on the longest way."""
        found = list[int]()
        for node in self.nodes:
            found.append(1 + max((found[parent] for parent in node.parents), default=-1))
        return found

    def document(self) -> dict[str, Any]:
        """The tree as JSON types."""
        return {"question": self.question, "nodes": [dataclasses.asdict(node) for node in self.nodes]}

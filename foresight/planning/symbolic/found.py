"""The result of a planner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """The result of a search. `plan` is None without one; `status` is solved, unsolvable, time or memory."""

    plan: list[str] | None
    status: str
    expanded: int
    generated: int
    seconds: float

    @property
    def rate(self) -> float:
        """Generated states a second."""
        return self.generated / max(self.seconds, 1e-9)

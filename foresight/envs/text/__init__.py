"""Text tasks: prompts, graders and rewards."""

from __future__ import annotations

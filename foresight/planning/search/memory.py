"""What a search takes of the memory, asked before it is taken: a tree that cannot be held is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from foresight.errors import UserError

ASKED = 2**30  # bytes below which nobody asks: searches are made all the time


def memory(device: str | torch.device = "cpu") -> int:
    """Bytes that this process may use: the machine's, or less inside a container; on an accelerator its own."""
    if torch.device(device).type != "cpu" and torch.accelerator.is_available():
        module = torch.get_device_module(device)
        if hasattr(module, "get_device_properties"):
            return int(module.get_device_properties(device).total_memory)
    total = int(psutil.virtual_memory().total)
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total


def require(
    rows: int, simulations: int, actions: int, state: int = 0, device: str | torch.device = "cpu", more: str = ""
) -> None:
    """Raise UserError where `rows` trees of so many simulations cannot be held at once, see `tree.Tree`.

    `actions`: of a node; `state`: bytes of the model's state at a node. `more` is said of the cause, if it is known.
    """
    needed = rows * (simulations + 1) * (12 * actions + 32 + state)
    if needed > ASKED and needed > (there := memory(device)):
        trees = f"{rows:,} trees" if rows > 1 else "a tree"
        raise UserError(
            f"simulations is {simulations:,}{more}: {trees} of that size would take {needed / 2**30:,.0f} GiB of "
            f"memory, and there are {there / 2**30:,.0f}. Take fewer simulations, or search fewer positions at once."
        )

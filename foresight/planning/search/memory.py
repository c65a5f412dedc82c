"""The memory that a search needs, checked before it is allocated."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from foresight.errors import UserError

UNCHECKED = 2**30  # bytes below which memory is not queried, as searches are frequent


def memory(device: str | torch.device = "cpu") -> int:
    """Bytes that this process may use: the machine's, the container's limit, or the accelerator's own."""
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
    """Raise UserError if `rows` trees (`tree.Tree`) of so many simulations do not fit in memory.

    `actions`: per node; `state`: bytes of the model's state per node; `more`: added to the message after the count.
    """
    needed = rows * (simulations + 1) * (12 * actions + 32 + state)
    if needed > UNCHECKED and needed > (available := memory(device)):
        trees = f"{rows:,} trees" if rows > 1 else "a tree"
        raise UserError(
            f"simulations is {simulations:,}{more}: {trees} of that size would take {needed / 2**30:,.0f} GiB of "
            f"memory, and there are {available / 2**30:,.0f}. Use fewer simulations, or search fewer positions at once."
        )

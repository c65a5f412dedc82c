"""A replay of pixels on disk: sampling from mapped files, and checkpoints that write only new rows.

The peer is the same replay in memory. 20,000 rows of 64 x 64 x 3 bytes with latents of 512 numbers, as the DreamerV3
preset of KeyDoor keeps them. `rate` counts rows of batches of 16 sequences of 64 per second of processor time; the
files are in the page cache. Then a checkpoint of the replay is written, 1,000 rows are added, and a second one is
written: `first_bytes`, `next_bytes` and their seconds. `restore_seconds` are those of a resumed run.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

UNIT = "rows/s"
PEER = "foresight"
TARGET = 0.8
ROWS, NEW, LATENTS, BATCH, LENGTH, BATCHES = 20_000, 1_000, 512, 16, 64, 200


def ours() -> dict[str, Any]:
    """On disk."""
    return _measure(True)


def peer() -> dict[str, Any]:
    """In memory."""
    return _measure(False)


def _measure(on_disk: bool) -> dict[str, Any]:
    import torch

    from foresight.data.sequences import Sequences
    from foresight.runtime.checkpoints import checkpoint, run_state

    Held = dataclasses.make_dataclass("Held", ["replay"])
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(256, (1, 64, 64, 3), dtype=torch.uint8, generator=generator)
    number, latent = torch.ones(1), torch.randn(1, LATENTS, generator=generator)

    def add(replay: Sequences, rows: int) -> None:
        row = {"obs": image, "action": number, "reward": number, "discount": number, "cut": 0 * number, "mask": number}
        for _ in range(rows):
            replay.add({**row, "extras": {"latent": latent}}, image)

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)

        def build() -> Any:
            held = Held(Sequences(ROWS, 1, on_disk))
            run_state.use_disk(held, folder)
            return held

        held = build()
        add(held.replay, ROWS)
        held.replay.sample(BATCH, LENGTH, generator)  # warm-up
        began = time.process_time()
        for _ in range(BATCHES):
            held.replay.sample(BATCH, LENGTH, generator)
        found: dict[str, Any] = {"rate": BATCHES * BATCH * LENGTH / (time.process_time() - began)}
        before: set[Path] = set()
        for step, label in ((1, "first"), (2, "next")):
            began = time.perf_counter()
            path = checkpoint.save(folder, held, step)
            found[f"{label}_seconds"] = time.perf_counter() - began
            files = {file for file in folder.rglob("*") if file.is_file()}
            found[f"{label}_bytes"] = sum(file.stat().st_size for file in files - before)
            before = files
            add(held.replay, NEW)
        began = time.perf_counter()
        checkpoint.restore(path, build())
        return {**found, "restore_seconds": time.perf_counter() - began, "rows": ROWS, "new_rows": NEW}

"""The cache directory, for files that can be recomputed, such as converted models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$FORESIGHT_CACHE`, else `$XDG_CACHE_HOME/foresight`, else `~/.cache/foresight`."""
    if own := os.environ.get("FORESIGHT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foresight"

"""Files that only the sandbox protects: its user owns them, and all may write."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from foresight.sandbox.confine import UNPRIVILEGED


@pytest.fixture
def own() -> Iterator[Path]:
    """A directory with a `secret` of 2001 and an empty `folder`. The `tmp_path` of root is out of reach anyway."""
    with tempfile.TemporaryDirectory() as place:
        secret, folder = Path(place) / "secret", Path(place) / "folder"
        secret.write_text("it is 42")
        folder.mkdir()
        os.utime(secret, (10**9, 10**9))
        for path, mode in ((Path(place), 0o777), (folder, 0o777), (secret, 0o666)):
            path.chmod(mode)  # without the layer `user`, root is another user without rights
        if os.geteuid() == 0:
            for path in (Path(place), folder, secret):
                os.chown(path, UNPRIVILEGED, UNPRIVILEGED)
        yield Path(place)

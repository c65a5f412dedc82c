"""Where the cache is."""

from __future__ import annotations

from pathlib import Path

import pytest

from foresight.data.cache import cache_directory


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FORESIGHT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "foresight"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/foresight")
    monkeypatch.setenv("FORESIGHT_CACHE", "/mine")
    assert cache_directory() == Path("/mine")

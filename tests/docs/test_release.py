"""What a release states is one story: version, citation, changelog; and the wheel holds every file of the package."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import tomllib
from pathlib import Path

import yaml

from foresight import __version__
from tests.house.rules import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DATA = PROJECT["tool"]["setuptools"]["package-data"]["foresight"]


def left_out(files: list[str], patterns: list[str]) -> list[str]:
    """The files (relative to the package) that are neither Python nor package data."""
    return [f for f in files if not f.endswith(".py") and not any(_matches(f, pattern) for pattern in patterns)]


def _matches(file: str, pattern: str) -> bool:
    return file.count("/") == pattern.count("/") and fnmatch.fnmatch(file, pattern)


def test_version_citation_and_changelog_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == __version__ and citation["license"] == PROJECT["project"]["license"]
    titles = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert titles[0] == "Unreleased" or titles[0] == __version__
    assert all(title in ("Unreleased", __version__) for title in titles[:2])


def test_the_wheel_holds_every_file_of_the_package() -> None:
    package = ROOT / "foresight"
    kept = {"__pycache__", ".ipynb_checkpoints"}
    files = [p.relative_to(package).as_posix() for p in package.rglob("*") if p.is_file() and not kept & set(p.parts)]
    assert "studio/page/index.html" in files and len(files) > 300
    assert left_out(files, DATA) == []
    assert left_out(["studio/page/index.html", "studio/x.txt", "a.py"], DATA) == ["studio/x.txt"]


def test_the_wheel_is_checked_alone() -> None:
    """The script parses, and runs the commands that a new user types first."""
    script = Path(ROOT, ".ci", "release")
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8")
    assert all(
        f"foresight {command}" in text for command in ("train", "doctor", "studio runs --no-browser", "--version")
    )

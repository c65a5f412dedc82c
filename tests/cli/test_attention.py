"""`foresight attention` on a model folder, and its mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foresight.cli.main import main
from tests import tiny_language


def test_a_model_folder_is_drawn_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tiny_language.folder(), str(tmp_path / "a.html")
    assert main(["attention", model, "--text", "2+3=5", "--knock-out", "1.0:-1,0", "--each-head", "--out", out]) == 0
    printed = capsys.readouterr().out
    assert "5 tokens, 2 layers of 4 heads" in printed and "without 1.0:-1,0 the output changes by" in printed
    assert "heads whose loss" in printed and "Written to" in printed and Path(out).stat().st_size > 5_000
    assert main(["attention", model, "--text", "2+3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == ["2", "+", "3"]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ([], "add --text"),
        (["--text", "2", "--images"], "leave one out"),
        (["--text", "2", "--knock-out", "9"], "no layer 9"),
        (["--text", "2", "--view", "least"], "Unknown view"),
        (["--text", "2+3", "--query", "3"], "no query 3: choose one from 0 to 2, or, from the end, -1 to -3"),
        (["--text", "2+3", "--query", "-4", "--knock-out", "0"], "no query -4"),
    ],
)
def test_mistakes_are_named(args: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", tiny_language.folder(), "--out", str(tmp_path / "x.html"), *args]) == 2
    assert why in " ".join(capsys.readouterr().err.split())

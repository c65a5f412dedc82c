from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from foresight.errors import UserError
from foresight.nets import precision
from foresight.runtime import bench

FAKE = '''"""Count to a million. Settings: none."""
import os

UNIT = "numbers/s"
PEER = "numpy"
TARGET = 3.0


def _note(side):
    with open(os.environ["BENCH_NOTES"], "a") as file:
        file.write(f"{side} {os.getpid()}\\n")
    with open(os.environ["BENCH_NOTES"]) as file:
        return sum(line.startswith(side) for line in file)


def ours():
    print("noise on stdout")
    return {"rate": {1: 100.0, 2: 900.0, 3: 400.0}[_note("ours")], "reached": True, "seconds": 1.0}


def peer():
    return {"rate": [100.0, 50.0, 300.0][_note("peer") - 1], "seconds": 2.0}
'''


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "benchmarks"
    directory.mkdir()
    (directory / "counting.py").write_text(FAKE)
    (directory / "_shared.py").write_text("def ours(): ...")
    (directory / "lonely.py").write_text('"""Alone."""\n\n\ndef ours():\n    return {"rate": 1.0}\n')
    (directory / "broken.py").write_text('"""B."""\n\n\ndef ours():\n    raise RuntimeError("the flux is out")\n')
    monkeypatch.setenv("BENCH_NOTES", str(tmp_path / "notes"))
    return directory


def test_the_files_are_read_and_not_run(checkout: Path) -> None:
    found = bench.benchmarks(checkout)
    assert sorted(found) == ["broken", "counting", "lonely"]
    one = found["counting"]
    assert (one.title, one.unit, one.peer, one.target) == (
        "Count to a million. Settings: none.",
        "numbers/s",
        "numpy",
        3.0,
    )


def test_sides_take_turns_in_fresh_processes_and_medians_are_reported(checkout: Path, tmp_path: Path) -> None:
    result = bench.run("counting", against="numpy", rounds=3, directory=checkout)
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    assert [side for side, _ in notes] == ["ours", "peer"] * 3
    assert len({process for _, process in notes}) == 6
    assert result["ours"] == {"rate": 400.0, "reached": True, "seconds": 1.0}
    assert result["peer"] == {"name": "numpy", "rate": 100.0, "seconds": 2.0}
    assert result["ratio"] == 400 / 300 and result["spread"] == [1.0, 18.0] and result["met"] is False
    written = json.loads((tmp_path / "results" / "bench-counting.json").read_text())
    assert written == result
    assert written["command"] == "foresight bench counting --against numpy --rounds 3"
    assert written["versions"]["numpy"] and written["versions"]["python"]
    assert written["machine"]["cores"] >= 1 and "GiB" in written["machine"]["memory"]
    assert written["machine"]["instructions"] == bench.instructions()
    assert [one["rate"] for one in written["each"]["ours"]] == [100.0, 900.0, 400.0]


@pytest.mark.parametrize(
    ("capability", "fast", "reported"),
    [("AVX512", True, "AVX512, bfloat16"), ("AVX512", False, "AVX512"), ("AVX2", False, "AVX2")],
)
def test_a_machine_reports_the_instructions_that_its_products_use(
    monkeypatch: pytest.MonkeyPatch, capability: str, fast: bool, reported: str
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(precision, "fast_bfloat16", lambda device: fast)
    assert bench.machine()["instructions"] == reported


def test_a_missed_target_is_reported(checkout: Path) -> None:
    assert bench.run("counting", against="numpy", rounds=1, directory=checkout)["met"] is False  # 100 to 100


def test_the_ratio_is_the_median_of_those_of_the_rounds() -> None:
    ours, peer = ([{"rate": rate} for rate in rates] for rates in ((100.0, 900.0, 400.0), (100.0, 50.0, 200.0)))
    assert bench.compared(ours, peer, 2.0) == {"ratio": 2.0, "spread": [1.0, 18.0], "target": 2.0, "met": True}
    unknown = {"ratio": None, "spread": None, "target": 2.0, "met": None}
    assert bench.compared(ours, [*peer[:2], {"rate": 0.0}], 2.0) == unknown


def test_without_a_peer_there_is_no_ratio(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESIGHT_BENCH_MINUTES", "6")
    result = bench.run("lonely", rounds=1, directory=checkout)
    assert result["ours"]["rate"] == 1.0 and result["ours"]["seconds"] >= 0 and "ratio" not in result
    assert result["command"] == "FORESIGHT_BENCH_MINUTES=6 foresight bench lonely --rounds 1"


def test_mistakes_are_sentences(checkout: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'counting'"):
        bench.run("countin", directory=checkout)
    with pytest.raises(UserError, match="Did you mean 'numpy'"):
        bench.run("counting", against="numpi", directory=checkout)
    with pytest.raises(UserError, match="no peer"):
        bench.run("lonely", against="numpy", directory=checkout)
    with pytest.raises(UserError, match="at least 1"):
        bench.run("counting", rounds=0, directory=checkout)
    with pytest.raises(UserError, match="the flux is out"):
        bench.run("broken", rounds=1, directory=checkout)


def test_a_missing_peer_is_reported_with_its_command(checkout: Path) -> None:
    text = (checkout / "counting.py").read_text().replace('"numpy"', '"no-such-peer"')
    (checkout / "counting.py").write_text(text)
    with pytest.raises(UserError, match=r"pip install no-such-peer$"):
        bench.run("counting", against="no-such-peer", directory=checkout)
    with pytest.raises(UserError, match=r"-m pip install no-such-peer$"):
        bench.run("counting", against="no-such-peer", directory=checkout, python=sys.executable)


PEERS = {one.peer for one in bench.benchmarks().values() if one.peer} - {"foresight"}


@pytest.mark.parametrize("peer", sorted(PEERS))
def test_the_command_of_a_peer_installs_it(peer: str) -> None:
    command = bench.installation(peer)
    extra = re.fullmatch(r"pip install 'foresight\[(\w+)\]'", command)
    wanted = {
        "ray": "ray",
        "open_spiel": "games",
        **dict.fromkeys(("trl", "quantecon", "mctx", "stable-baselines3"), "peers"),
    }
    assert (extra[1] if extra else None) == wanted.get(peer)
    if extra is None:
        assert command == f"pip install {peer}"
        return
    lines = [line for line in metadata.requires("foresight") or [] if f'extra == "{extra[1]}"' in line]
    assert any(re.match(rf"{peer}\W", line) for line in lines)


def test_the_command_of_a_peer_elsewhere_names_its_interpreter(checkout: Path) -> None:
    result = bench.run("counting", against="numpy", rounds=1, directory=checkout, python=sys.executable)
    assert result["command"] == "foresight bench counting --against numpy --rounds 1 --peer-python PYTHON"
    assert bench.installation("sheeprl", "/peers/bin/python") == "/peers/bin/python -m pip install sheeprl"


def test_median_is_of_numbers_and_not_of_strings() -> None:
    rows = [
        {"rate": 1.0, "ok": True, "at": "x"},
        {"rate": 9.0, "ok": True, "at": "x"},
        {"rate": 2.0, "ok": True, "at": "x"},
    ]
    assert bench.median(rows) == {"rate": 2.0, "ok": True, "at": "x"}


def _loaded(code: str, **variables: str) -> str:
    """What torch's copy of GNU's OpenMP prints of itself when a fresh process loads it after `code`."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    found = sorted((Path(spec.origin).parent / "lib").glob("libgomp*"))
    if not found:
        pytest.skip("this build of torch has another OpenMP")
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment = {**kept, "OMP_DISPLAY_ENV": "VERBOSE", **variables}
    command = [sys.executable, "-c", f"{code}; import ctypes; ctypes.CDLL({str(found[0])!r})"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)[0]


@pytest.mark.parametrize(
    "entry", ["foresight", "foresight.cli.main", "foresight.envs.text.worker", "foresight.ops.returns"]
)
def test_waiting_threads_spin_less_wherever_one_comes_in(entry: str) -> None:
    """By default 300,000 times, with which GRPO falls off a cliff beside two busy processes."""
    assert _loaded(f"import {entry}") == "10000"


@pytest.mark.parametrize("variables", [{"GOMP_SPINCOUNT": "777"}, {"OMP_WAIT_POLICY": "passive"}])
def test_what_the_user_set_stays(variables: dict[str, str]) -> None:
    assert _loaded("import foresight", **variables) == variables.get("GOMP_SPINCOUNT", "0")


def test_a_peer_is_measured_as_it_is(checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (checkout / "asking.py").write_text(
        '"""Ask."""\nimport os\n\n\ndef ours():\n    return {"rate": float(os.environ.get("GOMP_SPINCOUNT", 0))}\n'
    )
    monkeypatch.setattr("foresight.WAITING", {"GOMP_SPINCOUNT": "10000"})
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    assert bench.run("asking", rounds=1, directory=checkout, out=tmp_path / "r.json")["ours"]["rate"] == 0
    monkeypatch.setattr("foresight.WAITING", {})
    assert bench.run("asking", rounds=1, directory=checkout, out=tmp_path / "r.json")["ours"]["rate"] == 10000

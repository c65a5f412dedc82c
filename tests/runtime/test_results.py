"""What the committed results say of the algorithms: targets, rows, and the index that an installed wheel reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foresight.runtime import catalog, results, suites

REACHED: dict[str, Any] = {
    "seeds": [0, 1], "steps": 300, "unit": "env steps", "metric": "return", "episodes": 10, "iqm": 480.0,
    "interval_95": [470.0, 490.0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "good", "bad"),
    [
        (">= 475", 475.0, 474.9),
        (">= -90", -89.0, -91.0),
        ("<= 1e-6", 1e-7, 1e-5),
        ("-25 ± 3", -27.9, -28.1),
        ("-25 ± 3", -22.0, -21.9),
        ("yes", True, False),
        ("yes", True, 1.0),
    ],
)
def test_a_target_is_met_or_not(target: str, good: float, bad: float) -> None:
    assert suites.met(target, good) is True and suites.met(target, bad) is False


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of results and one suite that asks for them."""
    walk = suites.Figure("sarsa", "error/best", "walk", "<= 1")
    run = suites.Trained("ppo", "CartPole-v1", seeds=5, steps=900, target=">= 475")
    suite = suites.Suite("s", "t", (suites.Experiment("m:walk", "walk", (walk,)),), (run,))
    monkeypatch.setattr(results, "suites", lambda: {"s": suite})
    return tmp_path


def test_rows_are_what_is_asked_for_and_what_there_is(few: Path) -> None:
    walk, ppo = results.gather(few)
    assert (walk.value, ppo.value, walk.met, ppo.met) == (None, None, None, None)
    assert (ppo.seeds, ppo.steps, ppo.unit) == (5, 900, "env steps") and "not run" in ppo.words()
    (few / "walk.json").write_text(json.dumps({"what": "w", "seeds": 7, "error": {"best": 2.0}}))
    (few / "ppo-CartPole-v1.json").write_text(json.dumps({"what": "ppo on CartPole-v1", **REACHED}))
    (few / "dqn-X.json").write_text(json.dumps({"what": "dqn on X", **REACHED, "metric": "score"}))
    (few / "bench-ppo.json").write_text(json.dumps({"what": "speed", "rounds": 1}))
    walk, ppo, dqn = results.gather(few)
    assert (walk.value, walk.met, walk.done_seeds) == (2.0, False, 7)
    assert walk.words() == "2 on walk, 7 seeds (missed: <= 1)"
    assert (ppo.value, ppo.met, ppo.interval) == (480.0, True, (470.0, 490.0))
    assert (ppo.done_seeds, ppo.done_steps, ppo.episodes) == (2, 300, 10)
    assert ppo.words() == "480 on CartPole-v1, 2 seeds (>= 475)" and ppo.file == "results/ppo-CartPole-v1.json"
    assert (dqn.algorithm, dqn.suite, dqn.met, dqn.words()) == ("dqn", None, None, "480 on X, score, 2 seeds")


def test_what_is_verified_begins_with_what_was_met_and_has_no_row_twice() -> None:
    missed, free, good = (
        results.Row("ppo", task, "s", target, f"results/{task}.json", value=1.0)
        for task, target in (("a", ">= 2"), ("b", None), ("c", ">= 1"))
    )
    empty = results.Row("ppo", "d", "s", ">= 1", "results/d.json")
    assert results.verified("ppo", [missed, free, good, empty, good]) == [good, free, missed]
    assert results.verified("dqn", [missed]) == []


def test_the_index_has_the_rows_with_a_result() -> None:
    rows = results.rows()
    assert len(rows) > 30 and any(row.met for row in rows)
    assert rows == [row for row in results.gather() if row.value is not None]


def test_lists_need_no_torch() -> None:
    code = "import sys\nfrom foresight.runtime import results\nresults.rows()\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=catalog.ROOT.parent)

"""What the committed results say of the algorithms: targets, rows, and the index that an installed wheel reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foresight.errors import UserError
from foresight.runtime import catalog
from foresight.runtime.results import results, suites
from tests.sabotage import sabotaged_by

REACHED: dict[str, Any] = {
    "seeds": [0, 1], "steps": 300, "unit": "env steps", "metric": "return", "episodes": 10, "iqm": 480.0,
    "interval_95": [470.0, 490.0], "seconds": [60.0, 120.0], "baseline": 20.0, "command": "c",
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


def test_a_target_may_be_another_number() -> None:
    known = {"baseline": 0.3, "grpo-addition": 0.9}
    assert suites.met(">= 0.95", (0.96 + 0.94 + 0.95) / 3 - 2e-16) is True and suites.met(">= 0.95", 0.9499) is False
    assert suites.met(">= 2 × baseline", 0.6, known) is True and suites.met(">= 2 × baseline", 0.59, known) is False
    assert suites.met(">= grpo-addition - 0.03", 0.871, known) is True
    assert suites.met(">= grpo-addition - 0.03", 0.869, known) is False
    assert suites.met(">= teacher - 0.03", 1.0, known) is None and suites.met(">= 2 × baseline", 1.0) is None


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of results and one suite that asks for them."""
    walk = suites.Figure("sarsa", "error/best", "walk", "<= 1")
    run = suites.Trained("ppo", "CartPole-v1", seeds=5, steps=900, target=">= 475")
    suite = suites.Suite("s", "t", (suites.Experiment("m:walk", "walk", (walk,)),), (run,))
    monkeypatch.setattr(results, "suites", lambda: {"s": suite})
    return tmp_path


def test_rows_are_the_targets_and_the_results(few: Path) -> None:
    walk, ppo = results.gather(few)
    assert (walk.value, ppo.value, walk.met, ppo.met) == (None, None, None, None)
    assert (ppo.seeds, ppo.steps, ppo.unit) == (5, 900, "env steps") and "not run" in ppo.text()
    (few / "walk.json").write_text(json.dumps({"what": "w", "seeds": 7, "error": {"best": 2.0}}))
    (few / "ppo-CartPole-v1.json").write_text(json.dumps({"what": "ppo on CartPole-v1", **REACHED}))
    (few / "dqn-X.json").write_text(json.dumps({"what": "dqn on X", **REACHED, "metric": "score"}))
    (few / "bench-ppo.json").write_text(json.dumps({"what": "speed", "rounds": 1}))
    walk, ppo, dqn = results.gather(few)
    assert (walk.value, walk.met, walk.done_seeds) == (2.0, False, 7)
    assert (ppo.done_minutes, ppo.budget, ppo.verdict, walk.verdict) == (2.0, "5 × 900 env steps", "met", "missed")
    assert walk.text() == "2 on walk, 7 seeds (missed: <= 1)"
    assert (ppo.value, ppo.met, ppo.interval) == (480.0, True, (470.0, 490.0))
    assert (ppo.done_seeds, ppo.done_steps, ppo.episodes) == (2, 300, 10) and ppo.reached.endswith(", 2 of 5 seeds")
    assert (
        ppo.text() == "480 [470, 490] on CartPole-v1, 2 seeds (>= 475)" and ppo.file == "results/ppo-CartPole-v1.json"
    )
    assert (dqn.algorithm, dqn.suite, dqn.met, dqn.text()) == (
        "dqn",
        None,
        None,
        "480 [470, 490] on X, score, 2 seeds",
    )


@sabotaged_by("foresight.runtime.results.results._outside", lambda f: lambda *a: not f(*a))
def test_a_failed_seed_that_the_interval_leaves_out_is_shown(few: Path) -> None:
    file = few / "ppo-CartPole-v1.json"
    for worst, shown in ((131.0, "480 [470, 490], worst 131"), (475.0, "480 [470, 490]"), (469.99, "480 [470, 490]")):
        file.write_text(json.dumps({"what": "ppo on CartPole-v1", **REACHED, "worst": worst}))
        assert results.gather(few)[1].score == shown


def test_a_result_of_another_command_is_marked(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = suites.Figure("sarsa", "error", "walk", "<= 1")
    suite = suites.Suite(
        "s", "t", (suites.Experiment("python benchmarks/x.py --seeds 0 1 2 --steps 3", "walk", (walk,)),)
    )
    monkeypatch.setattr(results, "suites", lambda: {"s": suite})
    (blank,) = results.gather(few)
    assert (blank.seeds, blank.made, blank.budget) == (3, None, "3 seeds")
    document = {"what": "w", "seeds": [0], "error": 0.5, "command": "python benchmarks/x.py --seeds 0"}
    (few / "walk.json").write_text(json.dumps(document))
    (row,) = results.gather(few)
    assert row.reached.endswith(", 1 of 3 seeds") and row.made == "python benchmarks/x.py --seeds 0"
    assert row.met and row.command == "python benchmarks/x.py --seeds 0 1 2 --steps 3"
    (few / "walk.json").write_text(json.dumps({**document, "seeds": [0, 1, 2], "command": row.command}))
    (row,) = results.gather(few)
    assert (row.made, row.reached) == (None, "0.5")


def test_an_installed_package_lists_what_is_published_and_what_was_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = results.gather()
    catalog.algorithms()  # of the real package
    monkeypatch.setattr(catalog, "ROOT", tmp_path / "site" / "foresight")
    monkeypatch.chdir(tmp_path)

    def key(row: results.Row) -> tuple[Any, ...]:
        return row.suite or "", row.name, row.task, row.algorithm, row.value, row.met, row.done_seeds

    done = [row for row in everything if row.value is not None]
    assert sorted(map(key, (row for row in results.gather() if row.value is not None))) == sorted(map(key, done))
    (tmp_path / "results").mkdir()
    again = {"what": "trpo on CartPole-v1", **REACHED, "iqm": 3.0}
    (tmp_path / "results" / "trpo-CartPole-v1.json").write_text(json.dumps(again))
    (row,) = (row for row in results.gather() if row.name == "trpo-CartPole-v1")
    assert (row.value, row.met, row.done_seeds) == (3.0, False, 2)
    assert all(row.value is None for row in results.gather(tmp_path / "none"))


def test_a_row_has_a_limit_of_time_and_may_lean_on_another(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = (
        suites.Trained("grpo", "x", "teacher", minutes=2, target=">= 3 × baseline"),
        suites.Trained("grpo", "x", "late", minutes=1.9, target=">= 3 × baseline"),
        suites.Trained("distill", "x", "student", after=("teacher",), target=">= teacher - 3"),
    )
    suite = suites.Suite("s", "t", (suites.Experiment("", "later", (suites.Figure("ppo", "a", "no code"),)),), runs)
    monkeypatch.setattr(results, "suites", lambda: {"s": suite})
    for name, value in (("teacher", 480.0), ("late", 480.0), ("student", 476.0)):
        (few / f"{name}.json").write_text(json.dumps({"what": "w", **REACHED, "iqm": value}))
    open_, teacher, late, student = results.gather(few)
    assert (open_.command, open_.verdict, teacher.met, late.met, student.met) == ("", "not run", True, False, False)
    assert late.text().endswith("(missed: >= 3 × baseline in 1.9 min)")
    (few / "teacher.json").unlink()
    assert results.gather(few)[-1].met is None
    with pytest.raises(UserError, match="Did you mean 'student'"):
        suite.rows(("studnt",))
    assert [row.result for row in suite.rows(("student",))] == ["teacher", "student"]
    assert [row.result for row in suite.rows()] == ["later", "teacher", "late", "student"]


def test_what_is_verified_begins_with_what_was_met_and_has_no_row_twice() -> None:
    missed, free, good = (
        results.Row("ppo", "x", name, "s", value=1.0, met=met) for name, met in (("a", False), ("b", None), ("c", True))
    )
    empty = results.Row("ppo", "x", "d", "s", ">= 1")
    assert results.verified("ppo", [missed, free, good, empty, good]) == [good, free, missed]
    assert results.verified("dqn", [missed]) == []


def test_the_index_has_the_rows_with_a_result() -> None:
    rows = results.rows()
    assert len(rows) > 30 and any(row.met for row in rows)
    assert rows == [row for row in results.gather() if row.value is not None]


def test_every_algorithm_has_a_row() -> None:
    """Also those without a result yet: what is measured nowhere would look as if it reached its return."""
    assert {row.algorithm for row in results.gather()} >= set(catalog.algorithms())


def test_lists_need_no_torch() -> None:
    code = (
        "import sys\nfrom foresight.runtime.results import results\nresults.rows()\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=catalog.ROOT.parent)

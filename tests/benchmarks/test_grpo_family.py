"""The curves of GRPO's family, drawn from run directories."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "grpo_family.py"


def test_finished_runs_become_a_result_a_picture_and_a_table(tmp_path):
    made = runpy.run_path(str(FILE))
    measured = {"metric": "accuracy", "std": 0.1, "n": 100}
    for name, end in (("grpo", 0.9), ("dapo", 0.8)):
        out = made["folder"](tmp_path, name, 0)
        out.mkdir()
        rows = [
            {"step": i, "seconds": 2.0 * i, "reward": 0.1 * i, "length": 5.0, "entropy": 1.0 / i} for i in range(1, 5)
        ]
        rows.append({"step": 4, "seconds": 8.0, "evaluation/accuracy": end})
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = {"steps": 4, "seconds": 8.0, "peak_gib": 1.0, "command": "foresight train", "baseline": None}
        summary |= {"baseline": {**measured, "mean": 0.25}, "evaluation": {**measured, "mean": end}}
        (out / "summary.json").write_text(json.dumps(summary))
    made["folder"](tmp_path, "dapo", 1).mkdir()  # not finished
    result = made["collect"](tmp_path, list(made["FAMILY"]), [0, 1], "python benchmarks/grpo_family.py")
    assert {name: list(done) for name, done in result["runs"].items()} == {"grpo": ["0"], "dapo": ["0"]}
    assert result["runs"]["dapo"]["0"]["accuracy"] == [[0.0, 0.25], [8.0, 0.8]]
    assert result["seconds"] == 16.0
    json.dumps(result)
    made["draw"](result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert "| `grpo` | 25% | 90% | 4 | 0.1 | 5.0 | 0.25 |" in made["page"](result)

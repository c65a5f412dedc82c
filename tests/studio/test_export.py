"""The static page: opened from its folder, without a server, by a browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import foresight
from foresight.agents import team
from foresight.cli.main import main
from foresight.errors import UserError
from foresight.studio import export
from foresight.studio.dreams import Models
from foresight.studio.runs import Library
from tests.agents.test_team import SECRETS, halves, play
from tests.studio.reports import think
from tests.studio.test_samples import talk

FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs"
HOSTILE = '</script><img src=x onerror="window.hacked=1"> \ud800 \u2028'
SIZES = {"deter": 16, "hidden": 8, "groups": 2, "classes": 2, "blocks": 2, "units": 8, "layers": 1}


def document(page: Path, name: str) -> Any:
    text = (page / "data" / f"{name}.js").read_text(encoding="utf-8")
    before, after = f'foresight("{name}",', ");\n"
    assert text.startswith(before) and text.endswith(after)
    return json.loads(text[len(before) : -len(after)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of each kind of view that an exported page has."""
    found = tmp_path_factory.mktemp("everything")
    shutil.copytree(FIXTURES, found, dirs_exist_ok=True)
    talks = found / "talks"
    (talks / "media").mkdir(parents=True)
    (talks / "config.yaml").write_text("algorithm: grpo\nkind: text\nenv: calculator\nseed: 0\nconfig: {steps: 9}\n")
    (talks / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0, "reward": NaN}\n{"step": 2, "reward": 0.5}\n')
    rows = [talk(9, 1.0, held_out=True), {"step": 9, "prompt": HOSTILE, "completion": HOSTILE, "reward": 0.0}]
    (talks / "media" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    think(found / "report")
    (found / "team.json").write_text(json.dumps(play(halves, team.Team("Both words", documents=SECRETS))))
    small = {
        "num_envs": 2,
        "learning_starts": 32,
        "batch_size": 2,
        "sequence_length": 8,
        "evaluation_episodes": 1,
        "train_ratio": 16.0,
    }
    foresight.train("dreamer", env="CartPole-v1", steps=64, out=found / "dreams", show=False, **small, **SIZES)
    return found


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("exported") / "page"
    assert main(["studio", str(runs), "--export", str(out)]) == 0
    yield out


def test_every_view_that_has_data_is_there(page: Path, runs: Path) -> None:
    assert document(page, "about")["views"] == ["runs", "imagination", "thoughts", "agents"]
    listed = document(page, "runs")
    assert {row["name"] for row in listed} == {path.parent.name for path in runs.glob("*/config.yaml")}
    for row in listed:
        curves = document(page, f"curves/{row['id']}")
        assert {name.rsplit("/", 1)[0] for name in curves} == set(document(page, f"runs/{row['id']}")["metrics"])
    ids = {row["name"]: row["id"] for row in listed}
    assert document(page, f"samples/{ids['talks']}")["rows"][1]["completion"] == HOSTILE
    assert document(page, f"conversations/{ids['talks']}")["0"]["turns"][3]["results"][0]["text"] == "36"
    (trace,) = document(page, "traces")
    assert document(page, f"traces/{trace['id']}")["root"]["answer"] == "heron and otter"
    expected = Models(Library([runs])).open_loop(ids["dreams"], export.HORIZON)["errors"]
    assert document(page, f"models/{ids['dreams']}")["errors"] == expected
    with pytest.raises(UserError, match="exists"):
        export.write([runs], page)


def test_an_export_says_what_it_wrote_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["studio", str(FIXTURES), "--export", str(tmp_path / "out")]) == 0
    assert "4 runs" in capsys.readouterr().out
    assert main(["studio", str(tmp_path / "none")]) == 2
    with pytest.raises(UserError, match="no runs in"):
        export.write([tmp_path / "out"], tmp_path / "other")


@pytest.mark.slow
def test_a_browser_opens_it_from_its_folder(page: Path, runs: Path) -> None:
    browser = pytest.importorskip("tests.studio.browser")
    ids = {row["name"]: row["id"] for row in document(page, "runs")}
    address = (page / "index.html").as_uri()
    with browser.opened(address.removesuffix("index.html")) as opened:
        opened.goto(address)
        opened.wait_for_selector("table tbody tr")
        views = [link.inner_text() for link in opened.query_selector_all("nav a")]
        assert views == ["Runs", "Imagination", "Thoughts", "Agents"]
        opened.goto(f"{address}#/runs?run={ids['ppo']}")
        opened.wait_for_selector(".chart canvas")
        opened.goto(f"{address}#/runs?run={ids['talks']}")
        opened.wait_for_selector(".sample pre")
        assert "onerror" in opened.inner_text(".sample >> nth=1") and opened.evaluate("window.hacked") is None
        for view, there in (
            ("imagination", ".chart canvas"),
            ("thoughts", "svg[aria-label='Tree of thoughts'] g"),
            (f"agents?run={ids['talks']}", ".turn.tool .call.failed"),
            (f"agents?trace={document(page, 'traces')[0]['id']}", "ul.team ul button"),
        ):
            opened.goto(f"{address}#/{view}")
            opened.wait_for_selector(there)
            assert opened.locator("[role=alert]").count() == 0

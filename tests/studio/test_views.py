"""Runs of each kind of view: on the served page, whose numbers are Python's, and on a static one in a folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from starlette.testclient import TestClient

import foresight
from foresight.agents import team
from foresight.cli.main import main
from foresight.errors import UserError
from foresight.runtime.attention import sources
from foresight.studio import app, export
from foresight.studio.decisions import Decisions
from foresight.studio.dreams import Models
from foresight.studio.runs import Library
from tests import tiny_language
from tests.agents.test_team import SECRETS, halves, play
from tests.algorithms.search.muzero_runs import SMALL
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
    tiny = {**SMALL, "steps": 120, "evaluation_episodes": 1}
    foresight.train("muzero", env="CartPole-v1", out=found / "search", show=False, **tiny)
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


def test_an_export_names_what_it_wrote_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
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


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Any]:
    """The page over these runs, and its address."""
    browser = pytest.importorskip("tests.studio.browser")
    with browser.served(runs, model=tiny_language.folder()) as address, browser.opened(address) as opened:
        yield opened, address


def texts(page: Any, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


@pytest.mark.slow
def test_an_episode_is_played_inside_a_model_with_the_keys(served: Any, runs: Path) -> None:
    page, address = served
    models = Models(Library([runs]))
    (model,) = models.names()
    page.goto(f"{address}#/imagination")
    page.wait_for_selector(".dream p[role=status]:has-text('step 0')")
    for seed in (0, 1, 2):
        page.click("h1")  # away from the controls
        for key in ("1", "ArrowLeft", " "):
            page.keyboard.press(key)  # without waiting: none is lost
        found = models.dream({"run": model["id"], "seed": seed, "keys": [1, 0, "agent"]})
        end = f"over: {found['over']}" if found["over"] else f"value {found['value']:.3g}"
        page.wait_for_selector(f".dream p[role=status]:has-text('{end}')")
        status = page.inner_text(".dream p[role=status]")
        assert f"step {found['length']}," in status and f"return {sum(found['rewards']):.4g}" in status
        assert page.inner_text(".dream pre").split() == [f"{x:.3f}" for x in found["vector"]]
        page.click("button:has-text('undo')")
        page.wait_for_selector(f".dream p[role=status]:has-text('step {found['length'] - 1},')")
        page.click("button:has-text('new episode')")
        page.wait_for_selector(".dream p[role=status]:has-text('step 0,')")


@pytest.mark.slow
def test_the_search_of_a_run_is_scrubbed_by_step_and_by_simulation(served: Any, runs: Path) -> None:
    page, address = served
    searches = Decisions(Library([runs]))
    (player,) = searches.names()
    page.goto(f"{address}#/search?player={player['id']}&step=3")
    page.wait_for_selector("p, span[role=status] >> text=step 3")
    for step, simulations in ((3, 20), (5, 7)):
        page.fill("input[aria-label='simulations']", str(simulations))
        page.fill("input[aria-label='step']", str(step))
        found = searches.look({"player": player["id"], "step": step, "simulations": simulations})
        page.wait_for_selector(f"span[role=status]:has-text('step {step}, return {found['total']:.0f}')")
        page.wait_for_selector(f"h2:has-text('Tree after {simulations} simulations')")
        analysis = found["analysis"]
        rows = [row.split("\t")[:4] for row in texts(page, "table tbody tr")]
        assert rows == [
            [row["name"], str(row["visits"]), f"{100 * row['prior']:.1f}%", f"{row['value']:.3f}"]
            for row in analysis["moves"]
        ]
        for child in analysis["tree"]["children"]:
            label = f"{child['action']}: {child['visits']} visits, value {child['q']:.3f}"
            assert page.locator(f"svg[aria-label='Search tree'] g[aria-label='{label}']").count() >= 1
    assert page.locator("img.seen").get_attribute("src") == found["picture"]


@pytest.mark.slow
def test_the_horizon_slider_asks_for_predictions_as_far(served: Any, runs: Path) -> None:
    page, address = served
    page.goto(f"{address}#/imagination")
    page.wait_for_selector(".chart canvas")
    with page.expect_response(lambda answer: "/api/models/" in answer.url and "horizon=6" in answer.url) as answered:
        page.fill("input[aria-label='imagined steps']", "6")
    models = Models(Library([runs]))
    expected = models.open_loop(models.names()[0]["id"], 6)
    shown = answered.value.json()
    assert shown["errors"] == expected["errors"] and len(expected["errors"]["reward"]) == 7
    assert shown["truth"] == expected["truth"] and shown["prediction"] == expected["prediction"]


@pytest.mark.slow
def test_a_text_is_typed_and_its_rollout_is_that_of_python(served: Any) -> None:
    page, address = served
    page.goto(f"{address}#/attention?view=rollout&first=in")
    page.wait_for_selector("input[aria-label='Text']")
    page.fill("input[aria-label='Text']", "what is 7+2?")
    page.wait_for_selector("svg[aria-label^='Attention'] [data-token='11']")
    page.wait_for_selector("[data-token='8'][aria-label='token 8: 7']")
    maps = sources.of_text(tiny_language.model(), "what is 7+2?")
    strongest = maps.view("rollout")[1][-1].max()
    titles = page.locator("svg[aria-label^='Attention'] title").all_text_contents()
    weights = [float(title.rsplit(" ", 1)[1]) for title in titles if title.startswith("layer 1")]
    assert max(weights) == pytest.approx(float(strongest), abs=1e-4)
    name, chance = maps.likeliest(maps.output[-1])[0]
    assert f"{chance:.3f}" in page.locator("tr", has=page.locator("code", has_text=json.dumps(name))).first.inner_text()


@pytest.mark.slow
def test_votes_and_budgets_are_those_of_the_report(served: Any, runs: Path) -> None:
    page, address = served
    report = json.loads((runs / "report" / "think.json").read_text())
    written = json.loads((runs / "report" / "thoughts.json").read_text())["examples"]
    page.goto(f"{address}#/thoughts?question=1&method=self_consistency&budget=64")
    page.wait_for_selector("h2:has-text('Votes')")
    (result,) = [one for one in written[1]["results"] if (one["method"], one["budget"]) == ("self_consistency", 64)]
    rows = [row.split("\t") for row in texts(page, ".panel:has(h2:has-text('Votes')) tbody tr")]
    assert [row[0] for row in rows] == [vote["key"] or "(no answer)" for vote in result["votes"][:16]]
    assert [float(row[1]) for row in rows] == pytest.approx([vote["score"] for vote in result["votes"][:16]], rel=1e-2)
    budgets = sorted({one["budget"] for one in written[1]["results"]})
    assert texts(page, "th:has-text(' tokens')")[-len(budgets) :] == [f"{budget} tokens" for budget in budgets]
    page.click("summary:has-text('All figures')")
    shown = [row.split("\t") for row in texts(page, "details tbody tr")]
    assert [(row[0], row[2]) for row in shown] == [
        (row["method"], f"{row['accuracy']:.3f} ± {row['standard_error']:.3f}") for row in report["rows"]
    ]


@pytest.mark.slow
def test_a_curve_is_overlaid_and_settings_that_differ_are_listed(served: Any, runs: Path) -> None:
    page, address = served
    ids = {row["name"]: row["id"] for row in Library([runs]).table()}
    with page.expect_response(lambda answer: "/api/curves" in answer.url) as answered:
        page.goto(f"{address}#/runs?run={ids['ppo']}&run={ids['dreams']}&metric=return")
    page.wait_for_selector("h2:has-text('Settings that differ')")
    library = Library([runs])
    for curve in answered.value.json()["curves"]:
        assert curve["last"] == library.curve(curve["run"], "return")["last"]
    different = {row["name"] for row in library.differences([ids["ppo"], ids["dreams"]])}
    page.wait_for_selector("th[scope=row]:has-text('algorithm')")
    assert {text for text in texts(page, "th[scope=row]")} == different


def test_50_clients_see_a_row_that_is_written_and_a_run_that_goes(tmp_path: Path) -> None:
    """At once: all get the same rows after each change, while the run is written, cut short and deleted."""
    import concurrent.futures

    shutil.copytree(FIXTURES / "ppo", tmp_path / "ppo")
    client = TestClient(app.create([tmp_path]), base_url="http://127.0.0.1:8765")
    (row,) = client.get("/api/runs").json()
    log, rows = tmp_path / "ppo" / "metrics.jsonl", 8
    asked = ("/api/runs", f"/api/runs/{row['id']}", f"/api/curves?run={row['id']}&metric=return")

    def seen() -> list[Any]:
        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            found = list(pool.map(lambda number: client.get(asked[number % 3]), range(150)))
        assert {answer.status_code for answer in found} <= {200, 400}
        curves = [answer.json() for answer in found[2::3]]
        assert all(answer == curves[0] for answer in curves) and found[2].status_code == 200
        return [len(curves[0]["curves"]) and curves[0]["curves"][0]["rows"], found[0].status_code, found[1].status_code]

    assert seen() == [rows, 200, 200]
    with log.open("a") as file:
        file.write('{"step": 999999, "seconds": 9.0, "return": 1.0}\n')
    assert seen() == [rows + 1, 200, 200]
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    assert seen() == [4, 200, 200]
    shutil.rmtree(tmp_path / "ppo")
    assert seen()[0] == 0
    time.sleep(1.1)  # the table is read again once a second
    assert seen() == [0, 200, 400] and client.get("/api/runs").json() == []

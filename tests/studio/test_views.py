"""Runs of each kind of view: on the served page, whose numbers are Python's, and on a static one in a folder."""

from __future__ import annotations

import difflib
import functools
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")

from starlette.testclient import TestClient

import foresight
from foresight.agents import team
from foresight.cli.main import main
from foresight.envs.tabular import grid as worlds
from foresight.errors import UserError
from foresight.planning.dynamic import bellman
from foresight.runtime.attention import sources
from foresight.runtime.evaluation import open_loop, record
from foresight.runtime.kinds import control
from foresight.runtime.results import plot
from foresight.studio import app, export, grid, recorded, trees
from foresight.studio.boards import Players
from foresight.studio.decisions import Decisions
from foresight.studio.dreams import Models
from foresight.studio.encode import encode
from foresight.studio.runs import Library
from tests import tiny_language
from tests.agents.test_team import SECRETS, halves, play
from tests.algorithms.search.muzero_runs import SMALL
from tests.studio.reports import think
from tests.studio.test_samples import talk

FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs"
HOSTILE = '</script><img src=x onerror="window.hacked=1"> \ud800 \u2028'
# Of two questions: the first answer and its reward, and the last ones.
ANSWERS = (
    ("first 3 plus 4 is 8 so no", 0.0, "first 3 plus 4 is 7 so yes it is", 1.0),
    ("I do not know", 0.25, "I do know <b>it</b>", 0.5),
)
RED, BLUE = (200, 20, 20), (20, 20, 200)
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
        "train_ratio": 1.0,
    }
    tiny = {**SMALL, "steps": 120, "train_every": 120, "evaluation_episodes": 1}
    foresight.train("muzero", env="CartPole-v1", out=found / "search", show=False, **tiny)
    foresight.train("dreamer", env="CartPole-v1", steps=64, out=found / "dreams", show=False, **small, **SIZES)
    for seed in (1, 2):  # two more runs like `ppo`, so that there is an interval
        copy = found / f"ppo-{seed}"
        shutil.copytree(FIXTURES / "ppo", copy)
        text = (copy / "config.yaml").read_text()
        (copy / "config.yaml").write_text(text.replace("seed: 0", f"seed: {seed}"))
        logged = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
        for i, row in enumerate(logged):
            if "return" in row:
                row["return"] = row["return"] * (1 + seed) + 7 * (i % 3)
        (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    answers = found / "answers"
    (answers / "media").mkdir(parents=True)
    (answers / "config.yaml").write_text("algorithm: grpo\nkind: text\nenv: countdown\nseed: 0\nconfig: {steps: 9}\n")
    (answers / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0, "reward": 0.5}\n')
    logged = [
        {"step": step, "prompt": f"question {i}", "completion": text, "reward": reward, "held_out": True}
        for step, column in ((0, 0), (9, 2))
        for i, pair in enumerate(ANSWERS)
        for text, reward in (pair[column : column + 2],)
    ]
    (answers / "media" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    frames = (np.full((48, 64, 3), RED if i < 20 else BLUE, np.uint8) for i in range(40))
    assert record.write(answers / "media" / "episode.mp4", frames, fps=10) == 40
    return found


@pytest.fixture(scope="module")
def few() -> Iterator[None]:
    """Exported pages hold less."""
    with pytest.MonkeyPatch.context() as changed:
        for name, value in (("EVERY", 7), ("SHARE", 1), ("EPISODES", 7), ("POSITIONS", 2), ("HALVINGS", 1)):
            changed.setattr(recorded, name, value)
        yield


@pytest.fixture(scope="module")
def page(runs: Path, few: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("exported") / "page"
    assert main(["studio", str(runs), "--export", str(out), "--model", tiny_language.folder()]) == 0
    yield out


def test_every_view_that_has_data_is_there(page: Path, runs: Path) -> None:
    assert document(page, "about")["views"] == list(app.VIEWS)
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
    together = sorted(ids[name] for name in ("ppo", "ppo-1", "ppo-2"))
    (band,) = [one["metrics"]["return"] for one in document(page, "bands") if sorted(one["runs"]) == together]
    (exact,) = Library([runs]).bands(together, "return")
    assert band["runs"] == 3 and band["middle"] == pytest.approx(exact["middle"])
    with pytest.raises(UserError, match="exists"):
        export.write([runs], page)


def test_what_is_computed_beforehand_is_what_a_server_answers(page: Path, runs: Path) -> None:
    kept = document(page, "grids")["recorded"]
    assert set(kept) == set(grid.METHODS) and all(steps[:4] == [0, 1, 2, 3] for steps in kept.values())
    for method, step in (("value_iteration", 5), ("policy_iteration", kept["policy_iteration"][-1]), ("sarsa", 7)):
        found = document(page, f"grid/{method}")
        wanted = recorded.rounded(grid.solve(grid.Request(method=method, step=step)))
        assert {**found["steps"][str(step)], "model": found["model"]} == wanted
        assert wanted["done"] or method != "policy_iteration"
    library = Library([runs])
    players = {one["name"]: one for one in document(page, "players")}
    assert set(players) == {"AlphaZero (bundled)", "muzero", "search"}
    for name, asks in (("muzero", Players(library)), ("search", Decisions(library))):
        found = document(page, f"search/{players[name]['id']}")
        moves: list[int] = []
        for step, position in enumerate(found["positions"]):
            for count, analysis in position.pop("analyses").items():
                asked = {"player": players[name]["id"], "simulations": int(count)}
                wanted = asks.look({**asked, **({"moves": moves} if name == "muzero" else {"step": step})})
                trees.prune(wanted["analysis"]["tree"], recorded.NODES)
                assert analysis == json.loads(encode(recorded.rounded(wanted.pop("analysis"))))
                assert position == recorded.rounded(wanted)
            moves = [*moves, analysis["action"]]
        assert len(found["positions"]) == 2 and len(found["counts"]) == 2
    (reader, *_) = document(page, "readers")
    found = document(page, f"attention/{reader['id']}")
    maps = sources.of_text(tiny_language.model(), recorded.TEXT)
    assert reader["read"] == recorded.TEXT and found["pass"]["tokens"] == list(maps.tokens)
    for view in ("mean", "rollout", "1"):
        for without_first in (False, True):
            layers = found["views"][f"{view}/{int(without_first)}"]["layers"]
            for layer, weights in zip(layers, maps.view(view, without_first), strict=True):
                assert np.array(layer) / 10_000 == pytest.approx(weights.flatten().numpy(), abs=1e-4)


def test_an_export_names_what_it_wrote_and_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for slow in ("worlds", "searches"):  # which `page` computes
        monkeypatch.setattr(recorded, slow, lambda *_: iter(()))
    out = tmp_path / "out"
    assert main(["studio", str(FIXTURES), "--export", str(out), "--model", str(tmp_path / "no model")]) == 0
    assert "attention" not in document(out, "about")["views"]
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
        assert views == [view.title() for view in app.VIEWS]
        opened.goto(f"{address}#/runs?run={ids['ppo']}")
        opened.wait_for_selector(".chart canvas")
        opened.goto(f"{address}#/runs?run={ids['talks']}")
        opened.wait_for_selector(".sample pre")
        assert "onerror" in opened.inner_text(".sample >> nth=1") and opened.evaluate("window.hacked") is None
        together = "&".join(f"run={ids[name]}" for name in ("ppo", "ppo-1", "ppo-2"))
        opened.goto(f"{address}#/runs?{together}&metric=return")
        opened.wait_for_selector(".chart[aria-label*='IQM of 3']")
        opened.goto(f"{address}#/grid?step=3&gamma=0.5")
        opened.wait_for_selector("h2:has-text('sweep 3')")
        opened.click("button:has-text('Step')")
        opened.wait_for_selector("h2:has-text('sweep 4')")
        found = grid.solve(grid.Request(step=4))
        label = opened.get_attribute("[data-cell='62']", "aria-label")
        assert f"value {found['values'][62]:.3f}" in label
        assert opened.is_disabled("input[aria-label='discount γ']") and not opened.locator("text=Drag a piece").count()
        opened.select_option("select[aria-label='method']", "sarsa")
        opened.wait_for_selector("h2:has-text('sarsa, episode 0')")
        opened.click("button:has-text('7 episodes')")
        opened.wait_for_selector("h2:has-text('sarsa, episode 7')")
        player = next(one for one in document(page, "players") if one["name"] == "muzero")
        search = document(page, f"search/{player['id']}")
        opened.goto(f"{address}#/search?player={player['id']}")
        opened.click("button:has-text('Move')")
        opened.fill("input[aria-label='simulations']", "0")
        opened.wait_for_selector(f"h2:has-text('Tree after {search['counts'][0]} simulations')")
        best = search["positions"][1]["analyses"][str(search["counts"][0])]["moves"][0]
        row = opened.locator("table tbody tr >> nth=0").inner_text().split("\t")
        assert row[:3] == [best["name"], str(best["visits"]), f"{100 * best['prior']:.1f}%"]
        assert opened.locator("svg[aria-label$='board'] g[aria-label$='first player']").count() == 1
        opened.goto(f"{address}#/attention?view=rollout&first=in")
        opened.wait_for_selector("svg[aria-label^='Attention'] [data-token='5']")
        for view in ("grid", "search", "attention", "imagination"):
            opened.goto(f"{address}#/{view}")
            opened.wait_for_selector("[role=note]:has-text('foresight studio')")
            assert opened.locator("[role=alert]").count() == 0
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
def test_the_interval_of_three_runs_is_that_of_python(served: Any, runs: Path) -> None:
    page, address = served
    library = Library([runs])
    ids = [row["id"] for row in library.table() if row["name"] in ("ppo", "ppo-1", "ppo-2")]
    with page.expect_response(lambda answer: "/api/curves" in answer.url) as answered:
        page.goto(f"{address}#/runs?{'&'.join(f'run={one}' for one in ids)}&metric=return")
    (band,) = answered.value.json()["bands"]
    (expected,) = plot.bands([library.path(one) for one in ids], "return")
    for name in ("steps", "middle", "low", "high"):
        assert band[name] == pytest.approx(getattr(expected, name).tolist())
    assert band["runs"] == 3 and (expected.high > expected.low).all()
    box = page.wait_for_selector(".chart .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2)
    rows = page.locator(".chart .u-legend tr.u-series")
    pairs = zip(rows.locator(".u-label").all_text_contents(), rows.locator(".u-value").all_text_contents(), strict=True)
    legend = {name: float(value.replace(",", "")) for name, value in pairs}
    at = band["steps"].index(legend["env steps"])
    name = f"IQM of 3: {band['label']}"
    for part, suffix in (("middle", ""), ("low", " low"), ("high", " high")):
        assert legend[name + suffix] == pytest.approx(band[part][at], abs=0.006)
    assert page.get_attribute(".chart", "aria-label").count("IQM of 3") == 1


def _answers(served: Any, runs: Path) -> tuple[Any, str]:
    """The page at the run `answers`, and the page's address."""
    page, address = served
    ids = {row["name"]: row["id"] for row in Library([runs]).table()}
    page.goto(f"{address}#/runs?run={ids['answers']}")
    return page, address


@pytest.mark.slow
def test_a_video_of_a_run_plays(served: Any, runs: Path) -> None:
    """The first half is red, the second blue: what is played is what was recorded."""
    page, _ = _answers(served, runs)
    page.wait_for_selector("video")
    page.evaluate("() => { const it = document.querySelector('video'); it.playbackRate = 4; return it.play(); }")
    page.wait_for_function("() => document.querySelector('video').currentTime > 0.3")
    seen = page.evaluate(
        """async () => {
          const it = document.querySelector("video"), canvas = document.createElement("canvas");
          it.pause();
          canvas.width = it.videoWidth; canvas.height = it.videoHeight;
          const pixel = async (time) => {
            await new Promise((done) => { it.onseeked = done; it.currentTime = time; });
            canvas.getContext("2d").drawImage(it, 0, 0);
            return [...canvas.getContext("2d").getImageData(30, 20, 1, 1).data].slice(0, 3);
          };
          return [it.duration, it.videoWidth, await pixel(0.5), await pixel(3.5)];
        }"""
    )
    assert seen[0] == pytest.approx(4.0, abs=0.11) and seen[1] == 64
    assert np.abs(np.array(seen[2:]) - (RED, BLUE)).max() < 30


@pytest.mark.slow
def test_completions_before_and_after_are_compared_word_by_word(served: Any, runs: Path) -> None:
    page, address = _answers(served, runs)
    page.click("button:has-text('Before and after')")
    page.wait_for_selector("text=The same 2 questions: mean reward 0.125 at step 0, 0.75 at step 9.")
    assert page.locator(".sample").count() == 2
    for sample, (before, _, after, _) in zip(page.locator(".sample").all(), ANSWERS, strict=True):
        parts = sample.locator("pre >> nth=1").evaluate(
            "node => [...node.childNodes].map((one) => [one.tagName.toLowerCase(), one.textContent])"
        )
        assert "".join(text for tag, text in parts if tag != "ins") == before
        assert "".join(text for tag, text in parts if tag != "del") == after
        kept = sum(len(re.split(r"(\s+)", text)) for tag, text in parts if tag == "span")
        same = difflib.SequenceMatcher(None, re.split(r"(\s+)", before), re.split(r"(\s+)", after), autojunk=False)
        assert kept >= sum(block.size for block in same.get_matching_blocks()) > 0
    link = page.url
    page.goto(f"{address}#/grid")
    page.goto(link)  # the address holds what was chosen
    page.wait_for_selector("button:has-text('Before and after')[aria-pressed='true']")
    page.click("button:has-text('Before and after')")
    page.get_by_label("order").select_option("worst")
    page.fill("[aria-label='Search completions']", "the")
    page.wait_for_function(
        "() => ['order=worst', 'text=the'].every((part) => location.hash.split(/[?&]/).includes(part))"
    )


@pytest.mark.slow
def test_sliders_and_drawing_change_the_grid_as_planning_does(served: Any) -> None:
    """γ, slip, the reward of a step, a trap that is drawn, and what Undo takes back: values are planning's own."""
    page, address = served
    page.goto(f"{address}#/grid?step=9")
    page.wait_for_selector("h2:has-text('sweep 9')")

    def check(picture: list[str], gamma: float, slip: float, step_reward: float) -> None:
        mdp = worlds.gridworld(tuple(picture), slip, step_reward)
        values = torch.zeros(mdp.states, dtype=torch.float64)
        for _ in range(9):
            values, _ = bellman.greedy(mdp, gamma, values)
        free = [cell for cell, sign in enumerate("".join(picture)) if sign != "#"]
        ends = {cell for cell in free if "".join(picture)[cell] in "GT"}
        wanted = {cell: f"value {v:.3f}" for cell, v in zip(free, values.tolist(), strict=True) if cell not in ends}
        page.wait_for_function(
            """wanted => Object.entries(wanted).every(([cell, value]) =>
                document.querySelector(`[data-cell='${cell}']`).getAttribute("aria-label").endsWith(value))""",
            arg={str(cell): text.replace("-0.000", "0.000") for cell, text in wanted.items()},
        )

    picture = list(grid.LAYOUT[0])
    check(picture, 0.9, 0.2, -0.04)
    page.fill("input[aria-label='discount γ']", "0.7")
    check(picture, 0.7, 0.2, -0.04)
    page.fill("input[aria-label='slip']", "0.35")
    check(picture, 0.7, 0.35, -0.04)
    page.fill("input[aria-label='reward of a step']", "-0.2")
    check(picture, 0.7, 0.35, -0.2)
    page.focus("[data-cell='57']")
    page.keyboard.press("t")
    drawn = [*picture[:-1], picture[-1][0] + "T" + picture[-1][2:]]
    check(drawn, 0.7, 0.35, -0.2)
    page.keyboard.press("Control+z")
    check(picture, 0.7, 0.35, -0.2)
    page.click("button:has-text('Undo')")
    page.click("button:has-text('Undo')")
    check(picture, 0.7, 0.2, -0.04)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sarsa", "mc_epsilon_greedy"])
def test_the_updates_of_a_cell_are_written_out(served: Any, method: str) -> None:
    page, address = served
    page.goto("about:blank")
    page.goto(f"{address}#/grid?step=12&method={method}")
    page.wait_for_selector("h2:has-text('episode 12')")
    found = grid.solve(grid.Request(method=method, step=12))
    cell = max((cell for cell, made in enumerate(found["updates"]) if made), key=lambda c: len(found["updates"][c]))
    page.focus(f"[data-cell='{cell}']")
    text = page.inner_text(".backup").replace("−", "-")
    for one in found["updates"][cell]:
        sign = "↑→↓←"[["up", "right", "down", "left"].index(found["actions"][one["action"]])]
        assert f"q(s, {sign}) ← {one['before']:.4f}".replace("-0.0000", "0.0000") in text.replace("-0.0000", "0.0000")
        assert f"= {one['after']:.4f}".replace("-0.0000", "0.0000") in text.replace("-0.0000", "0.0000")
        if method == "sarsa" and one["discount"]:
            assert f"{(one['target'] - one['reward']) / one['discount']:.4f}" in text
        elif method != "sarsa":
            assert f"G {one['target']:.4f}" in text


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


@pytest.mark.slow
def test_frames_of_a_model_of_pixels_are_those_of_python(
    served: Any, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, address = served
    small = {"num_envs": 2, "learning_starts": 16, "batch_size": 2, "sequence_length": 8, "evaluation_episodes": 1}
    foresight.train(
        "dreamer", env="KeyDoor-v0", env_options={"time_limit": 6}, steps=32, out=runs / "pixels", show=False,
        train_ratio=1.0, **small, **SIZES,
    )  # fmt: skip
    monkeypatch.setattr(control, "EVALUATION_ENVS", 2)
    monkeypatch.setattr(open_loop, "measure", functools.partial(open_loop.measure, count=2))
    models = Models(Library([runs]))
    (run,) = [one["id"] for one in models.names() if one["name"] == "pixels"]
    found = models.open_loop(run, 15)
    page.goto(f"{address}#/imagination?run={run}")
    page.wait_for_selector(".frames img")
    sources = "nodes => nodes.map((one) => one.src)"
    for sequence in (0, 1):
        page.fill("input[aria-label='sequence']", str(sequence))
        page.wait_for_function(
            "wanted => document.querySelector('.frames img').src === wanted", arg=found["truth"][sequence][0]
        )
        shown = page.eval_on_selector_all(".frames img", sources)
        assert shown == [*found["truth"][sequence], *found["prediction"][sequence], *found["error"][sequence]]
    assert page.locator(".frames >> nth=0").locator("img.imagined").count() == 15
    page.wait_for_selector(".dream p[role=status]:has-text('step 0')")
    page.click("h1")
    page.keyboard.press("1")
    page.wait_for_selector(".dream p[role=status]:has-text('step 1,')")
    dreamed = models.dream({"run": run, "seed": 0, "keys": [1]})
    assert page.get_attribute(".dream img", "src") == dreamed["image"]


def test_50_clients_see_a_row_that_is_written_and_a_run_that_goes(tmp_path: Path) -> None:
    """At once: all get the same rows after each change, while the run is written, cut short and deleted."""
    import concurrent.futures

    shutil.copytree(FIXTURES / "ppo", tmp_path / "ppo")
    with TestClient(app.create([tmp_path]), base_url="http://127.0.0.1:8765") as client:  # one loop for all requests
        (row,) = client.get("/api/runs").json()
        log, rows = tmp_path / "ppo" / "metrics.jsonl", 8
        asked = ("/api/runs", f"/api/runs/{row['id']}", f"/api/curves?run={row['id']}&metric=return")

        def seen() -> list[Any]:
            with concurrent.futures.ThreadPoolExecutor(50) as pool:
                found = list(pool.map(lambda number: client.get(asked[number % 3]), range(60)))
            assert {answer.status_code for answer in found} <= {200, 400}
            curves = [answer.json() for answer in found[2::3]]
            assert all(answer == curves[0] for answer in curves) and found[2].status_code == 200
            shown = curves[0]["curves"]
            return [len(shown) and shown[0]["rows"], found[0].status_code, found[1].status_code]

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

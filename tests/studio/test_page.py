"""The page in a real browser: the system's Chromium, where it and playwright are installed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("playwright.sync_api")

from playwright import sync_api as playwright

from foresight.agents import team
from foresight.runtime.attention import sources
from foresight.studio import app, grid, runs
from foresight.studio.runs import identity
from tests import tiny_language
from tests.agents.test_team import SECRETS, halves, play
from tests.studio import browser
from tests.studio.test_samples import talk

pytestmark = pytest.mark.slow
FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs"
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>{{7*7}}'
NAME = "<img src=x onerror=window.hacked=1>&amp;"  # of a folder
RUN = "algorithm: ppo\nkind: control\nenv: CartPole-v1\nseed: 0\nconfig: {steps: 99999}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    shutil.copytree(FIXTURES, root, dirs_exist_ok=True)
    hostile = root / NAME
    (hostile / "media").mkdir(parents=True)
    (hostile / "config.yaml").write_text(
        f"algorithm: grpo\nkind: text\nenv: {json.dumps(HOSTILE)}\nseed: 0\nconfig: {{steps: 9}}\n"
    )
    (hostile / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0, "reward": 0.5}\n')
    sample = {"step": 1, "prompt": HOSTILE, "completion": HOSTILE, "reward": 1}
    (hostile / "media" / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    talks = root / "talks"
    (talks / "media").mkdir(parents=True)
    (talks / "config.yaml").write_text("algorithm: grpo\nkind: text\nenv: calculator\nseed: 0\nconfig: {steps: 9}\n")
    (talks / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0, "reward": 0.5}\n')
    rows = [talk(0, 0.0, held_out=True), talk(9, 1.0, held_out=True)]
    (talks / "media" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = root / "report"
    report.mkdir()
    row = {"method": "puct", "budget": 64, "accuracy": 1.0, "standard_error": 0.0, "sampled_tokens": 50.0,
           "prompt_tokens": 9.0, "verifier_calls": 4.0, "seconds": 0.5}  # fmt: skip
    about = {"task": "countdown", "model": "m", "verifier": "exact", "questions": 1, "metric": "accuracy"}
    (report / "think.json").write_text(json.dumps({**about, "rows": [row]}))
    nodes = [{"text": "q", "parents": [], "kind": "question", "score": None, "kept": True, "chosen": True}]
    nodes += [
        {"text": f"{i} {HOSTILE}", "parents": [0], "kind": "thought", "score": i / 20, "kept": i > 3, "chosen": i == 19}
        for i in range(20)
    ]
    votes = [{"text": HOSTILE, "key": HOSTILE, "score": 3.0, "reward": 1.0}]
    result = {"method": "puct", "budget": 64, "text": HOSTILE, "reward": 1.0, "votes": votes,
              "charge": {"sampled_tokens": 50}, "tree": {"question": "q", "nodes": nodes}}  # fmt: skip
    examples = [{"question": HOSTILE, "answer": "24", "results": [result]}]
    (report / "thoughts.json").write_text(json.dumps({"examples": examples}))
    (root / "team.json").write_text(json.dumps(play(halves, team.Team("Both words", documents=SECRETS))))
    return root


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with browser.served(folder, model=tiny_language.folder()) as address:
        yield address


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Any]:
    with browser.opened(address) as page:
        yield page


def test_runs_are_listed_and_drawn_and_texts_are_text(page: Any, address: str, folder: Path) -> None:
    page.goto(address)
    page.wait_for_selector("table tbody tr")
    assert {link.inner_text() for link in page.query_selector_all("tbody td a")} >= {"ppo", "grpo", NAME}
    page.goto(f"{address}#/runs?run={identity(folder.resolve() / NAME)}")
    page.wait_for_selector(".sample pre")
    assert page.inner_text(".sample pre >> nth=1") == HOSTILE
    assert page.evaluate("window.hacked") is None
    page.wait_for_selector(".chart canvas")


def test_an_answer_that_could_not_be_scored_is_in_no_mean(page: Any, address: str, folder: Path) -> None:
    run = folder / "unscored"
    (run / "media").mkdir(parents=True)
    (run / "config.yaml").write_text("algorithm: grpo\nkind: text\nenv: addition\nseed: 0\nconfig: {steps: 9}\n")
    (run / "metrics.jsonl").write_text('{"step": 9, "seconds": 1.0, "reward": 0.5}\n')
    rewards = {1: (0.2, "NaN", 0.6), 9: (1.0, 0.5, "NaN")}  # as the log writes one that is not a number
    rows = [{"step": step, "prompt": f"{i}", "completion": "x", "reward": reward}
            for step, found in rewards.items() for i, reward in enumerate(found)]  # fmt: skip
    (run / "media" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page.goto(f"{address}#/runs?run={identity(run.resolve())}")
    page.click("button:has-text('Before and after')")
    page.wait_for_selector("text=mean reward 0.4 at step 1, 0.75 at step 9")
    shutil.rmtree(run)


def test_a_new_row_appears_while_the_page_is_open(page: Any, address: str, folder: Path) -> None:
    run = folder / "growing"
    run.mkdir()
    (run / "config.yaml").write_text(RUN)
    (run / "metrics.jsonl").write_text('{"step": 4321, "seconds": 1.0, "return": 0.5}\n')
    page.goto(f"{address}#/runs")
    page.wait_for_selector("text=4,321")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8765, "seconds": 2.0, "return": 0.5}\n')
    page.wait_for_selector("text=8,765")
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[: text.index("\n") + 20])  # cut short in the middle of a row
    page.wait_for_selector("text=8,765", state="detached")
    page.wait_for_selector("text=4,321")
    (run / "metrics.jsonl").write_text(text)
    page.wait_for_selector("text=8,765")
    shutil.rmtree(run)
    page.wait_for_selector("text=8,765", state="detached")


def test_the_grid_has_the_values_of_python_and_a_goal_that_moves(page: Any, address: str) -> None:
    page.goto(f"{address}#/grid?step=5")
    page.wait_for_selector("h2:has-text('sweep 5')")
    found = grid.solve(grid.Request(step=5))
    label = page.get_attribute("[data-cell='62']", "aria-label")
    assert f"value {found['values'][62]:.3f}" in label
    page.click("button:has-text('Back')")
    page.wait_for_selector("h2:has-text('sweep 4')")
    boxes = [page.locator(f"[data-cell='{cell}']").bounding_box() for cell in (63, 61)]
    centers = [(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2) for box in boxes]
    page.mouse.move(*centers[0])
    page.mouse.down()
    page.mouse.move(*centers[1], steps=4)
    page.mouse.up()
    page.wait_for_selector("[data-cell='61'][aria-label*='goal']")
    moved = (*grid.LAYOUT[0][:-1], grid.LAYOUT[0][-1][:5] + "G..")
    assert moved[-1] == "...#.G.."
    asked = grid.solve(grid.Request(picture=moved, step=4))
    page.wait_for_selector(f"[data-cell='60'][aria-label*='value {asked['values'][60]:.3f}']")
    page.focus("[data-cell='60']")
    page.keyboard.press("t")
    page.wait_for_selector("[data-cell='60'][aria-label*='trap']")


def test_a_game_is_played_with_clicks(page: Any, address: str) -> None:
    page.goto(f"{address}#/search")
    page.wait_for_selector("svg[aria-label='Connect Four board'] [role=button]")
    page.click("[aria-label='row 1, column 4: empty']")
    page.wait_for_selector("[aria-label='row 6, column 4: first player']")
    page.click("button:has-text('Agent plays')")
    page.wait_for_selector("[aria-label$='second player']")
    assert page.query_selector("svg[aria-label='Search tree'] g") is not None


def test_a_head_is_knocked_out_and_the_output_changes(page: Any, address: str) -> None:
    page.goto(f"{address}#/attention?text=what+is+2%2B3%3F")
    page.wait_for_selector("svg[aria-label^='Attention'] [data-token='11']")
    maps = sources.of_text(tiny_language.model(), "what is 2+3?")
    name, chance = maps.likeliest(maps.output[-1])[0]
    row = page.locator("tr", has=page.locator("code", has_text=json.dumps(name))).first
    assert f"{chance:.3f}" in row.inner_text()
    page.click("[aria-label='layer 1, head 2']")
    change = maps.effect([maps.knock_out("1.2")])["change"]
    first = page.inner_text("p[role=status] strong")
    assert float(first) == pytest.approx(change, rel=1e-3)
    page.focus("[data-token='11']")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("[data-token='10'][aria-pressed='true']")
    change = maps.effect([maps.knock_out("1.2")], 10)["change"]
    playwright.expect(page.locator("p[role=status] strong")).not_to_have_text(first, timeout=60_000)
    assert float(page.inner_text("p[role=status] strong")) == pytest.approx(change, rel=1e-3)
    page.click("button:has-text('Measure each head')")
    strongest = max(max(row) for row in maps.each_head(10))
    page.wait_for_selector("text=most:")
    assert float(page.inner_text("text=most:").split()[1]) == pytest.approx(strongest, rel=1e-3)


def test_thoughts_and_conversations_are_text(page: Any, address: str, folder: Path) -> None:
    page.goto(f"{address}#/thoughts")
    page.wait_for_selector("svg[aria-label='Tree of thoughts'] g")
    assert page.locator("svg[aria-label='Tree of thoughts'] g[role=button]").count() == 9  # the question and the best
    page.click("svg[aria-label='Tree of thoughts'] g[aria-label^='question']")
    assert page.locator("svg[aria-label='Tree of thoughts'] g[role=button]").count() == 21
    assert page.locator("button.mark").inner_text() == "✓"
    page.goto(f"{address}#/agents?run={identity(folder.resolve() / 'talks')}")
    page.wait_for_selector(".turn.tool .call.failed")
    assert page.inner_text(".turn.assistant .call code >> nth=0") == "calculate"
    assert page.inner_text(".turn.user pre >> nth=1").startswith("<img src=x")
    page.click("button[aria-label='step 0, reward 0']")
    page.wait_for_selector("h2:has-text('Step 0, held-out question')")
    assert page.evaluate("window.hacked") is None


def test_moving_a_slider_asks_for_few_boards_and_the_last(page: Any, address: str) -> None:
    asked = []
    page.goto(f"{address}#/search")
    page.wait_for_selector("svg[aria-label='Connect Four board'] [role=button]")

    def slowly(route: Any) -> None:
        asked.append(route.request.post_data_json["simulations"])
        time.sleep(0.3)
        route.continue_()

    page.route("**/api/board", slowly)
    with page.expect_response(lambda got: (got.request.post_data_json or {}).get("simulations") == 20):
        page.evaluate(
            """async () => {
                const slider = document.querySelector("[aria-label='simulations']");
                for (let count = 1; count <= 20; count++) {
                    slider.value = count;
                    slider.dispatchEvent(new Event("input", { bubbles: true }));
                    await new Promise((done) => setTimeout(done, 10));
                }
            }"""
        )
    page.unroute("**/api/board")
    assert len(asked) <= 3 and asked[-1] == 20


@pytest.fixture
def growing(tmp_path: Path) -> Path:
    run = tmp_path / "growing"
    run.mkdir()
    (run / "config.yaml").write_text(RUN)
    (run / "metrics.jsonl").write_text('{"step": 4321, "seconds": 1.0, "return": 0.5}\n')
    return run


def test_a_run_that_was_killed_can_be_resumed_on_the_open_page(
    page: Any, growing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file changes: only the table, which is asked for every 30 seconds, has the new state."""
    with browser.served(growing.parent, control=True) as address, page.context.browser.new_context() as other:
        tab = other.new_page()
        tab.clock.install()
        tab.goto(f"{address}#/runs?run={identity(growing.resolve())}")
        playwright.expect(tab.locator("button:has-text('Stop')")).to_be_enabled(timeout=60_000)
        monkeypatch.setattr(runs, "LIVE", 0.0)
        tab.clock.fast_forward(31_000)
        tab.wait_for_selector("table .state.stopped")
        playwright.expect(tab.locator("button:has-text('Resume')")).to_be_enabled(timeout=10_000)
        shutil.rmtree(growing)
        tab.wait_for_selector("[role=alert]:has-text('There is no run')", timeout=10_000)
        assert tab.locator("button:has-text('Resume')").count() == 0


def test_hidden_tabs_hold_no_connection_and_see_what_they_missed(page: Any, growing: Path) -> None:
    """Browsers open six connections to a server."""
    show = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with browser.served(growing.parent) as address, page.context.browser.new_context() as other:
        tabs = [other.new_page() for _ in range(7)]
        for tab in tabs:
            tab.goto(address, timeout=10_000)
            tab.wait_for_selector("text=4,321", timeout=10_000)
            if tab is not tabs[-1]:
                tab.evaluate(show, True)
        with (growing / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8765, "seconds": 2.0, "return": 0.5}\n')
        tabs[-1].wait_for_selector("text=8,765", timeout=10_000)
        assert tabs[0].locator("text=8,765").count() == 0
        tabs[0].evaluate(show, False)
        tabs[0].wait_for_selector("text=8,765", timeout=10_000)


def test_what_changes_before_the_first_connection_is_seen(page: Any, growing: Path) -> None:
    held: list[Any] = []
    with browser.served(growing.parent) as address, page.context.browser.new_context() as other:
        tab = other.new_page()
        tab.route("**/api/live", lambda route: held.append(route))
        tab.goto(address, timeout=10_000)
        tab.wait_for_selector("text=4,321", timeout=10_000)
        with (growing / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8765, "seconds": 2.0, "return": 0.5}\n')
        held[0].continue_()
        tab.wait_for_selector("text=8,765", timeout=10_000)


RULES = {"light": ["wcag2a", "wcag2aa", "wcag21aa"], "dark": ["color-contrast"]}


@pytest.mark.parametrize("view", [*app.VIEWS, "team"])
def test_views_are_accessible_in_light_and_dark_and_fit_a_phone(
    page: Any, address: str, folder: Path, view: str
) -> None:
    page.goto("about:blank")
    if view == "team":
        page.goto(f"{address}#/agents?trace={identity((folder / 'team.json').resolve())}")
        page.wait_for_selector("h2:has-text('A team of 3')")
        page.click("ul.team ul li:nth-child(2) button")
        page.wait_for_selector("h2:has-text('Sub-agent 0.1')")
    else:
        page.goto(f"{address}#/{view}")
    page.wait_for_selector("main h1")
    page.wait_for_load_state("networkidle") if view in ("grid", "search", "attention") else page.wait_for_timeout(300)
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(150)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1280, "height": 900})
    page.evaluate((browser.packages() / "axe-core" / "axe.min.js").read_text(encoding="utf-8"))
    for scheme, rules in RULES.items():
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate("rules => axe.run(document, {runOnly: rules})", rules)["violations"]
        problems = [f"{one['id']}: {node['target']} {node['failureSummary']}" for one in found for node in one["nodes"]]
        assert not problems, f"{view}, {scheme}:\n" + "\n".join(problems[:10])
    page.emulate_media(color_scheme="light")

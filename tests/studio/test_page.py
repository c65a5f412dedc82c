"""The page in a real browser: the system's Chromium, where it and playwright are installed."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("playwright.sync_api")

import uvicorn
from playwright import sync_api as playwright

from foresight.studio import app, grid, serve
from foresight.studio.runs import identity

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this system"), pytest.mark.slow]
FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs"
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>{{7*7}}'
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    shutil.copytree(FIXTURES, runs, dirs_exist_ok=True)
    hostile = runs / "hostile"
    (hostile / "media").mkdir(parents=True)
    (hostile / "config.yaml").write_text(
        f"algorithm: grpo\nkind: text\nenv: {json.dumps(HOSTILE)}\nseed: 0\nconfig: {{steps: 9}}\n"
    )
    (hostile / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0, "reward": 0.5}\n')
    sample = {"step": 1, "prompt": HOSTILE, "completion": HOSTILE, "reward": 1}
    (hostile / "media" / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    return runs


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    taken = serve.listen("127.0.0.1", 28_765)
    server = uvicorn.Server(uvicorn.Config(app.create([folder]), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
    thread.start()
    yield serve.address("127.0.0.1", taken.getsockname()[1], None)
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        opened.set_default_timeout(60_000)
        problems: list[str] = []
        asked: list[str] = []
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("request", lambda request: asked.append(request.url))
        yield opened
        browser.close()
        assert problems == []
        assert all(url.startswith((address, "data:", "blob:")) for url in asked)


def test_runs_are_listed_and_drawn_and_texts_are_text(page: Any, address: str, folder: Path) -> None:
    page.goto(address)
    page.wait_for_selector("table tbody tr")
    assert {link.inner_text() for link in page.query_selector_all("tbody td a")} >= {"ppo", "grpo", "hostile"}
    page.goto(f"{address}#/runs?run={identity(folder.resolve() / 'hostile')}")
    page.wait_for_selector(".sample pre")
    assert page.inner_text(".sample pre >> nth=1") == HOSTILE
    assert page.evaluate("window.hacked") is None
    page.wait_for_selector(".chart canvas")


def test_a_new_row_appears_while_the_page_is_open(page: Any, address: str, folder: Path) -> None:
    run = folder / "growing"
    run.mkdir()
    (run / "config.yaml").write_text(
        "algorithm: ppo\nkind: control\nenv: CartPole-v1\nseed: 0\nconfig: {steps: 99999}\n"
    )
    (run / "metrics.jsonl").write_text('{"step": 4321, "seconds": 1.0, "return": 0.5}\n')
    page.goto(f"{address}#/runs")
    page.wait_for_selector("text=4,321")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8765, "seconds": 2.0, "return": 0.5}\n')
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


@pytest.mark.parametrize("view", ["runs", "grid", "search", "imagination"])
def test_no_view_is_wider_than_a_phone(page: Any, address: str, view: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{address}#/{view}")
    page.wait_for_selector("main h1")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1280, "height": 900})

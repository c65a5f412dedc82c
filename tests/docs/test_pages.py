"""The built site in a real browser: its figures, width and accessibility, and that it loads nothing from elsewhere.

A few pages are built, as `make docs` builds all: with the packages of the extra `docs` and the system's Chromium.
"""

from __future__ import annotations

import functools
import http.server
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

pytest.importorskip("material", reason="mkdocs-material is not installed: make docs, or pip install -e '.[docs]'")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: make docs, or pip install -e '.[docs]'")
pytest.importorskip("playwright.sync_api")


from foresight.envs.tabular import grid
from foresight.planning.dynamic import bellman
from tests.house.rules import ROOT
from tests.studio import browser

pytestmark = pytest.mark.slow
FIGURES = {
    "grid": "learn/02_dynamic_programming", "walk": "learn/03_temporal_differences", "clip": "learn/06_trust_regions",
    "tree": "learn/08_tree_search",
}  # fmt: skip
PAGES = ("index", "learn/index", *FIGURES.values(), "ppo", "compare", "how_to/reward", "reference/ops/advantage")
SCHEMES = {"light": ["wcag2a", "wcag2aa", "wcag21aa"], "dark": ["color-contrast"]}
START: list[str] = runpy.run_path(str(ROOT / "docs" / "figures.py"))["GRID"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a site of a few pages."""
    made: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "site.py"))
    top = tmp_path_factory.mktemp("site")
    names = made["modules"]()
    for page in PAGES:
        if page.startswith("reference/"):
            module = page.replace("reference", "foresight").replace("/", ".")
            made["write"](top / "docs" / f"{page}.md", made["listing"](module, names[module], names))
        else:
            made["write"](top / "docs" / f"{page}.md", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    for folder in ("assets", "media"):
        shutil.copytree(ROOT / "docs" / folder, top / "docs" / folder)
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config |= {"docs_dir": "docs", "site_dir": "site", "nav": [f"{page}.md" for page in PAGES]}
    config["plugins"][2]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
    (top / "mkdocs.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet"]
    subprocess.run(command, cwd=top, check=True, capture_output=True, timeout=150)
    handler = functools.partial(Quiet, directory=str(top / "site"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Any]:
    with browser.opened(address) as opened:
        asked: list[str] = []
        opened.on("request", lambda request: asked.append(request.url))
        yield opened
        assert len(asked) > 20


def shown(page: Any, address: str, name: str, width: int = 1280, scheme: str = "light") -> Any:
    """The page `name`, or the page of a figure, at a width and in a color scheme; returns the figure."""
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.goto(f"{address}/{FIGURES.get(name, name)}.html")
    return page.locator(f"[data-figure={name}]")


def cells(figure: Any) -> list[str]:
    """What a screen reader reads of the cells of the grid."""
    return [cell.get_attribute("aria-label") for cell in figure.locator("[data-cell]").all()]


def test_the_grid_is_dragged_and_its_values_are_the_librarys(page: Any, address: str) -> None:
    figure = shown(page, address, "grid")
    figure.scroll_into_view_if_needed()
    goal, corner = (figure.locator(f"[data-cell='{cell}'] rect").bounding_box() for cell in (24, 0))
    page.mouse.move(goal["x"] + 20, goal["y"] + 20)
    page.mouse.down()
    page.mouse.move(goal["x"] + 20, corner["y"] + 20, steps=9)  # along the right and the upper edge
    page.mouse.move(corner["x"] + 20, corner["y"] + 20, steps=9)
    page.mouse.up()
    assert "goal" in cells(figure)[0] and "free" in cells(figure)[24]
    figure.locator("[data-cell='0']").focus()
    for key in ("ArrowDown", "ArrowRight", "t"):  # a trap where a wall was
        page.keyboard.press(key)
    assert cells(figure)[6].endswith("trap")
    figure.locator("input[type=range] >> nth=0").fill("0.8")
    figure.get_by_role("button", name="Run policy iteration").click()
    rows = ["G" + START[0][1:], START[1][0] + "T" + START[1][2:], *START[2:4], START[4][:4] + "."]
    mdp = grid.gridworld(rows, slip=0.2, step_reward=-0.04)
    assert mdp.layout is not None
    sweeps, values, policy = bellman.Sweeps(mdp, 0.8), mdp.start * 0, mdp.start.long() * 0
    for _ in range(200):
        values, policy, _ = sweeps.improve(values, policy)
    for cell, value in zip(mdp.layout.position, values.tolist(), strict=True):
        if "free" in (label := cells(figure)[cell]):
            assert abs(float(re.findall(r"value (\S+?),", label)[0].replace("−", "-")) - value) < 0.006, label
    figure.locator("[data-cell='1']").focus()
    page.keyboard.press("ArrowRight")
    text = figure.locator(".figure-numbers").inner_text()
    assert "Row 1, column 3" in text and len(re.findall(r"= −?0\.\d{3}", text)) >= 4
    figure.get_by_role("button", name="Reset").click()
    assert "goal" in cells(figure)[24] and "0 sweeps" in figure.locator(".figure-status").inner_text()


def test_sliders_move_the_other_figures(page: Any, address: str) -> None:
    figure = shown(page, address, "walk")
    status = figure.locator(".figure-status")
    figure.locator("input[type=range] >> nth=2").fill("0")
    assert "After 0 episodes the error is 0.236 with TD(0) and 0.236" in status.inner_text()  # √ mean of 1/9, 1/36, 0
    figure = shown(page, address, "clip")
    status = figure.locator(".figure-status")
    assert "the minimum is 1.20, its slope 0.00" in status.inner_text()
    figure.locator("input[type=range] >> nth=0").fill("-1")
    assert "the minimum is −1.30, its slope −1.00" in status.inner_text()
    figure = shown(page, address, "tree")
    figure.locator("input[type=range] >> nth=1").fill("100")
    visits = [row.inner_text().split()[1] for row in figure.locator("tbody tr").all()]
    assert visits[:4] == ["2"] * 4 and "next\t92" in figure.locator("tbody").inner_text()
    figure.locator("[data-node='0']").focus()
    page.keyboard.press("ArrowDown")
    assert "After c3: the game is over" in figure.locator(".figure-table").inner_text()
    figure.get_by_role("button", name="Back").click()
    assert "Simulation 99" in figure.locator(".figure-status").inner_text()


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_accessible_in_light_and_dark_and_fit_a_phone(page: Any, address: str, name: str) -> None:
    shown(page, address, name, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    axe = (browser.packages() / "axe-core" / "axe.min.js").read_text(encoding="utf-8")
    for scheme, rules in SCHEMES.items():
        shown(page, address, name, scheme=scheme)
        page.evaluate(axe)
        found = page.evaluate("rules => axe.run(document, {runOnly: rules})", rules)["violations"]
        problems = [f"{one['id']}: {node['target']} {node['failureSummary']}" for one in found for node in one["nodes"]]
        assert not problems, f"{name}, {scheme}:\n" + "\n".join(problems[:10])


def test_without_javascript_a_still_picture_is_shown(address: str) -> None:
    import urllib.request

    for name, chapter in FIGURES.items():
        text = urllib.request.urlopen(f"{address}/{chapter}.html").read().decode()
        assert re.search(rf'data-figure="{name}">\s*<p><img alt="[^"]+" src="[^"]*media/figures/{name}.svg"', text)

"""Games on the page: a move against an agent, and the agent's evaluation, which is Python's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")

import foresight
from foresight.envs.games import make as games
from foresight.studio import boards, dreams
from foresight.studio.runs import Library
from tests.studio import browser

# Player, title, the move: row, column and number of its action, and simulations.
GAMES = (
    ("connect_four", "Connect Four", 1, 4, 3, 64),
    ("mcts-tic_tac_toe", "tic-tac-toe", 2, 2, 4, 1_000),
    ("mcts-hex", "hex", 2, 3, 7, 2_000),
    ("mcts-go", "Go", 3, 3, 12, 2_000),
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser.served(tmp_path_factory.mktemp("none")) as address, browser.opened(address) as page:
        page.goto(f"{address}#/search")
        yield page


def looked(player: str, moves: list[int], simulations: int) -> dict[str, Any]:
    return boards.Players(Library([])).look({"player": player, "moves": moves, "simulations": simulations})


@pytest.mark.parametrize("player", [game[0] for game in GAMES[1:]])  # Gumbel search plans how it spends simulations
def test_fewer_simulations_are_an_earlier_state_of_the_same_search(player: str, simulations: int = 40) -> None:
    early, late = (looked(player, [4], count)["analysis"]["moves"] for count in (simulations, 2 * simulations))
    later = {move["action"]: move["visits"] for move in late}
    assert sum(later.values()) == 2 * simulations == 2 * sum(move["visits"] for move in early)
    assert all(move["visits"] <= later[move["action"]] for move in early)
    assert looked(player, [4], simulations)["analysis"]["moves"] == early


@pytest.mark.parametrize("player", [game[0] for game in GAMES])
def test_the_tree_is_that_of_the_table(player: str) -> None:
    analysis = looked(player, [4], 80)["analysis"]
    tree, moves = analysis["tree"], {move["name"]: move for move in analysis["moves"]}
    assert tree["children"] and len(tree["children"]) + tree["hidden"] == sum(x["visits"] > 0 for x in moves.values())
    for child in tree["children"]:
        move = moves[child["action"]]
        assert (child["visits"], child["q"], child["prior"]) == (move["visits"], move["value"], move["prior"])
    assert any(child["children"] for child in tree["children"])


def test_a_run_of_mcts_is_a_player_and_moves_have_the_names_of_their_positions(tmp_path: Path) -> None:
    foresight.train(
        "mcts", env="breakthrough", out=tmp_path / "a", steps=1, simulations=20, show=False, evaluation_episodes=1
    )
    players = boards.Players(Library([tmp_path]))
    (mine,) = [one for one in players.names() if one["name"] == "a"]
    assert mine["simulations"] == 20 and mine["least"] == 1
    asked = {"player": mine["id"], "moves": [], "simulations": 300}
    found = players.look(asked)
    assert players.look(asked) == found
    game = games.make("breakthrough")
    (first, *_) = found["analysis"]["tree"]["children"]
    actions = {move["name"]: move["action"] for move in found["legal"]}
    after = game.step(game.start(1), torch.tensor([actions[first["action"]]])).position
    names = {game.move_name(after, action) for action in game.legal(after)[0].nonzero().flatten().tolist()}
    assert first["children"] and {child["action"] for child in first["children"]} <= names


def test_a_newer_checkpoint_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, loaded = ["step-1"], list[str]()

    def load(path: Path) -> Any:
        loaded.append(saved[-1])
        kind = SimpleNamespace(kind="game")
        return SimpleNamespace(settings=kind, state=None, module=None, env=None, close=lambda: None)

    library = Library([])
    monkeypatch.setattr(library, "path", lambda name: tmp_path)
    monkeypatch.setattr(library, "saved", lambda name: saved[-1])
    monkeypatch.setattr(boards.run, "load", load)
    monkeypatch.setattr(dreams.imagined, "require_model", lambda agent: None)
    for get in (boards.Players(library)._load, dreams.Models(library)._agent):
        for step in ("step-1", "step-1", "step-2"):
            saved.append(step)
            get("mine")
    assert loaded == ["step-1", "step-2"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("player", "title", "row", "column", "action", "simulations"), GAMES)
def test_a_move_is_played_and_the_evaluation_is_that_of_python(
    page: Any, player: str, title: str, row: int, column: int, action: int, simulations: int
) -> None:
    page.select_option("select[aria-label='agent']", player)
    page.wait_for_selector(f"svg[aria-label^='{title}' i] [role=button]")
    page.click(f"[aria-label='row {row}, column {column}: empty']")
    page.wait_for_selector("button:has-text('Agent plays')")
    found = looked(player, [action], simulations)
    assert found["moves"] == [action] and found["mover"] == 1
    analysis = found["analysis"]
    page.wait_for_selector(f"button:has-text('Agent plays {analysis['moves'][0]['name']}')")
    for shown, move in zip(page.locator("table tbody tr").all(), analysis["moves"], strict=False):
        texts = shown.locator("td").all_inner_texts()
        assert texts[:2] == [move["name"], str(move["visits"])]
        assert texts[3] == ("" if move["value"] is None else f"{move['value']:.3f}")
    assert f"{analysis['value']:.3g}" in page.inner_text("h2:has-text('search') + span")
    page.wait_for_selector(f"h2:has-text('Tree after {simulations} simulations')")
    labels = page.eval_on_selector_all(
        "svg[aria-label='Search tree'] g", "nodes => nodes.map(node => node.getAttribute('aria-label'))"
    )
    for node in analysis["tree"]["children"]:
        assert f"{node['action']}: {node['visits']} visits, value {node['q']:.3f}" in labels
    page.fill("input[aria-label='simulations']", "50")
    page.wait_for_selector("h2:has-text('Tree after 50 simulations')")
    page.fill("input[aria-label='simulations']", str(simulations))
    page.wait_for_selector(f"h2:has-text('Tree after {simulations} simulations')")
    page.click("button:has-text('Agent plays')")
    page.wait_for_selector("[aria-label$='second player']")
    assert page.locator("[aria-label$='second player']").count() == 1
    page.click("button:has-text('Take back')")
    page.wait_for_selector(f"[aria-label='row {row}, column {column}: empty']")

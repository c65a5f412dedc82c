"""The tree of a search with random playouts: its counts add up, and its ends are those of the game."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foresight.envs.games import make as games
from foresight.envs.games.game import Game, replay
from foresight.planning.search import playouts
from foresight.planning.search.tree import Tree
from tests.sabotage import sabotaged_by

GAMES = [
    ("tic_tac_toe", {}, [0, 4, 1]),
    ("connect_four", {}, [0, 6, 0, 6, 0, 5]),
    ("hex", {"size": 3}, [4]),
    ("go", {"size": 3}, [4, 9]),
    ("tic_tac_toe", {"rules": "openspiel"}, [0, 1]),
    ("dots_and_boxes", {}, [0, 1, 2, 3, 4, 5]),
]


def paths(tree: Tree) -> list[list[int]]:
    """The actions from the root to each node."""
    found: list[list[int]] = [[]]
    for node in range(1, tree.size):
        parent = int(tree.parent[0, node])
        assert int(tree.children[0, parent, int(tree.action[0, node])]) == node
        found.append([*found[parent], int(tree.action[0, node])])
    return found


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def mutate(function: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*arguments: Any) -> Any:
            visits, values, tree = function(*arguments)
            setattr(tree, name, change(getattr(tree, name)))
            return visits, values, tree

        return broken

    mutate.__name__ = f"other_{name}"
    return mutate


@sabotaged_by(
    "foresight.planning.search.playouts.grow",
    changed("value", torch.neg), changed("reward", torch.neg), changed("discount", torch.neg),
    changed("visits", lambda x: x.roll(1, 1)), changed("prior", lambda x: x.roll(1, 1)),
)  # fmt: skip
@pytest.mark.parametrize(("name", "options", "moves"), GAMES, ids=lambda x: x if isinstance(x, str) else None)
def test_a_tree_adds_up_and_its_ends_are_those_of_the_game(name: str, options: dict, moves: list[int]) -> None:
    game: Game = games.make(name, **options)
    root = replay(game, [moves])
    visits, values, tree = playouts.grow(game, root, 300, playouts.stream(3))
    assert visits.sum() == 300 and tree.size <= 301
    again = playouts.uct(game, root, 300, playouts.stream(3))
    assert torch.equal(visits, again[0]) and torch.equal(values, again[1])  # the same search
    native = options.get("rules") != "openspiel" and name != "dots_and_boxes"
    if native:
        assert torch.equal(tree.child_visits(), visits)
    searched = visits > 0
    assert torch.allclose(tree.child_values()[searched], values[searched], atol=1e-6)
    places = replay(game, [[*moves, *path] for path in paths(tree)])
    legal, over = game.legal(places), game.over(places)
    assert over.any() and torch.equal(over, tree.discount[0] == 0)
    assert torch.equal(tree.prior[0] > 0, legal) and torch.equal(tree.logits[0].isfinite(), legal)
    assert tree.prior[0].sum(-1)[~over].tolist() == pytest.approx([1.0] * int((~over).sum()))
    for node in range(tree.size):
        place, parent = places[node : node + 1], int(tree.parent[0, node])
        count = int(tree.visits[0, node])
        if node:
            above = int(game.mover(places[parent : parent + 1])[0])
        if over[node]:
            first = 2 * float(game.first_score(place)[0]) - 1  # a result in [-1, 1]
            assert float(tree.reward[0, node]) == pytest.approx(first if above == 0 else -first)
            continue
        if node:
            same = int(game.mover(place)[0]) == above
            assert float(tree.discount[0, node]) == (1.0 if same else -1.0) and float(tree.reward[0, node]) == 0
        below, q = tree.child_visits(node)[0], tree.child_values(node)[0]
        assert count >= int(below.sum())
        if native:  # OpenSpiel's values of proven nodes are no means
            own = 1 if node else 0
            assert count == int(below.sum()) + own
            mean = (float((below * q).sum()) + own * float(tree.raw[0, node])) / count
            assert float(tree.value[0, node]) == pytest.approx(mean, abs=1e-5)


def test_fewer_simulations_are_the_first_nodes_of_more() -> None:
    game = games.make("hex", size=5)
    early, late = (playouts.grow(game, game.start(1), count, playouts.stream(1))[2] for count in (60, 200))
    assert early.size < late.size and paths(early) == paths(late)[: early.size]
    assert torch.equal(early.raw, late.raw[:, : early.size]) and (early.visits <= late.visits[:, : early.size]).all()

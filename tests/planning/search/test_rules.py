"""Evaluations that a search remembers: each position is computed once, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from foresight.algorithms.search import alphazero
from foresight.envs.games import make as games
from foresight.planning.search.rules import each_once
from tests.sabotage import sabotaged_by


@sabotaged_by("tests.planning.search.test_rules.each_once", lambda f: lambda network: network)
@pytest.mark.parametrize("size", [2, 200])  # 24 bytes; 2,400, which are remembered by their digest
def test_each_position_is_computed_once(size: int) -> None:
    seen: list[torch.Tensor] = []

    def network(planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(planes)
        return planes.flatten(1)[:, :2] + 1, planes.flatten(1).sum(1)

    evaluate, a, b, c = each_once(network), *torch.arange(9.0 * size).view(3, 1, size, 3)
    for rows in ([a, b, a], [b, a], [c, a, c, b]):
        planes = torch.stack(rows)
        logits, value = evaluate(planes)
        assert torch.equal(logits, planes.flatten(1)[:, :2] + 1) and torch.equal(value, planes.flatten(1).sum(1))
    assert [len(planes) for planes in seen] == [2, 1]


def test_a_search_is_the_same_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Games that begin alike share most of their positions."""
    game, found, computed = games.make("connect_four"), [], []
    for remembered in (True, False):
        state = alphazero.build(alphazero.Config(simulations=16, channels=8, blocks=1, num_games=8), game)
        forward, rows = state.network.forward, []
        state.network.forward = lambda x, f=forward, rows=rows: (rows.append(len(x)), f(x))[1]  # type: ignore[method-assign]
        if not remembered:
            monkeypatch.setattr(alphazero, "each_once", lambda network: network)
        found.append(alphazero.run_search(state, game.start(8), 16, torch.Generator().manual_seed(0)))
        computed.append(sum(rows))
    assert torch.equal(found[0].action, found[1].action) and torch.equal(found[0].visits, found[1].visits)
    torch.testing.assert_close(found[0].value, found[1].value)
    assert computed[1] == 8 * 17 and computed[0] < 0.8 * computed[1]

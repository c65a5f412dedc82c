"""Self-play as an environment: whose reward it is, what follows an end, and what is refused."""

from __future__ import annotations

import pytest
import torch

from foresight.data import trees
from foresight.data.trajectory import Trajectory, tree_map
from foresight.envs.games import make as games
from foresight.envs.games import selfplay
from foresight.envs.games.selfplay import SelfPlay, observe, symmetric
from foresight.errors import UserError
from tests.sabotage import sabotaged_by

TTT = games.make("tic_tac_toe")


@sabotaged_by("foresight.envs.games.native.Native.first_score", lambda f: lambda self, p: 1 - f(self, p))
def test_a_game_by_hand() -> None:
    """X takes the top row in five moves: the fifth earns 1, ends the game, and shows an empty board again."""
    env = SelfPlay(TTT, 2)
    obs = env.reset(0)
    assert obs["planes"].shape == (2, 3, 3, 3) and obs["action_mask"].tolist() == [[1] * 9] * 2
    for cells in ((0, 0), (3, 3), (1, 1), (4, 4)):
        back = env.step(torch.tensor(cells))
        assert back.discount.tolist() == [-1, -1] and back.cut.tolist() == [0, 0] == back.reward.tolist()
        assert back.obs is back.final_obs and "episode_return" not in back.info
    back = env.step(torch.tensor([2, 8]))
    assert back.reward.tolist() == [1, 0] and back.discount.tolist() == [0, -1] and back.cut.tolist() == [1, 0]
    assert back.info == {"episode_return": [1.0], "episode_length": [5]}
    assert back.obs["action_mask"].sum(1).tolist() == [9, 4] and back.final_obs["action_mask"].sum(1).tolist() == [0, 4]
    assert torch.equal(back.obs["planes"][0], observe(TTT, TTT.start(1))["planes"][0])
    back = env.step(torch.tensor([0, 5]))  # O has 3, 4 and now 5
    assert back.reward.tolist() == [0, 1] and back.info["episode_return"] == [-1.0]


@sabotaged_by("foresight.envs.games.selfplay.random_openings", lambda f: lambda game, count, *_: game.start(count))
def test_games_may_begin_with_random_moves() -> None:
    """0 to 3 of them, a quarter of the games each, all first moves as likely; again in the games that follow."""
    env = SelfPlay(TTT, 2_000, openings=3)
    env.reset(5)
    first = env.position.clone()
    env.reset(5)
    assert torch.equal(env.position, first)
    env.reset(6)
    assert not torch.equal(env.position, first)
    for _ in range(12):  # by then every game has been over
        assert not TTT.over(env.position).any()
        env.step(torch.multinomial(TTT.legal(env.position).float(), 1).squeeze(-1))
    env.position = TTT.start(2_000)
    for cell in (0, 3, 1, 4, 2):  # X wins in all of them
        back = env.step(torch.full((2_000,), cell))
    assert back.info["episode_return"] == [1.0] * 2_000
    for position in (first, env.position):
        made = TTT.moves(position)
        share = torch.stack([(made == n).float().mean() for n in range(4)])
        torch.testing.assert_close(share, torch.full((4,), 0.25), atol=0.04, rtol=0)
        cells = (position[made == 1, :9] > 0).float().mean(0)
        torch.testing.assert_close(cells, torch.full((9,), 1 / 9), atol=0.05, rtol=0)


@sabotaged_by("foresight.envs.games.selfplay.forks", lambda f: lambda game, visited, count, *_: game.start(count))
def test_games_may_fork_off_recent_ones() -> None:
    """All games take cells 0 to 6 in order. A fork has taken some of these, and made one random move."""
    env = SelfPlay(TTT, 500, forked=1.0)
    env.reset(0)
    assert (TTT.moves(env.position) == 0).all()
    for cell in range(7):
        back = env.step(torch.full((500,), cell))
    assert back.info["episode_length"] == [7] * 500 and not TTT.over(env.position).any()
    made, taken = TTT.moves(env.position), env.position[:, :9] != 0
    assert set(made.tolist()) == {2, 3, 4, 5, 6, 7}  # a move that would win is not made
    off = torch.stack([t[: int(n) - 1].sum() == n - 1 for n, t in zip(made, taken, strict=True)])
    assert off.all() and len(env.position.unique(dim=0)) > 20
    env.reset(0)
    assert (TTT.moves(env.position) == 0).all()


@sabotaged_by("foresight.envs.games.selfplay.SelfPlay._new_games", lambda f: lambda self, count: self.game.start(count))
def test_a_length_counts_no_move_before_the_episode() -> None:
    """Those of an opening or of the game that was forked. A whole game has at least 5."""
    env = SelfPlay(TTT, 200, openings=3, forked=0.5)
    obs, lengths, before = env.reset(0), [], TTT.moves(env.position)
    for _ in range(12):
        back = env.step(torch.multinomial(obs["action_mask"].float(), 1).squeeze(-1))
        ended = back.cut.bool()
        made = (back.final_obs["planes"][:, :2] != 0).sum((1, 2, 3))
        if ended.any():
            assert back.info["episode_length"] == (made - before)[ended].tolist()
            lengths += back.info["episode_length"]
        before, obs = torch.where(ended, TTT.moves(env.position), before), back.obs
    assert min(lengths) < 5


@pytest.mark.parametrize("name", ["tic_tac_toe", "connect_four"])
@sabotaged_by(
    "foresight.envs.games.selfplay.symmetric",
    lambda f: lambda game, batch, *rest: f(game, batch, *rest).replace(action=batch.action),
    lambda f: lambda game, batch, *rest: f(game, batch, *rest).replace(obs=batch.obs),
)
def test_a_sequence_under_a_symmetry_is_one_of_the_same_game(name: str) -> None:
    """The actions of the new sequence, played from the start, show its observations and lead to its successors."""
    game, generator = games.make(name), torch.Generator().manual_seed(0)
    env = SelfPlay(game, 64)
    obs, steps = env.reset(0), []
    for _ in range(4):
        action = torch.multinomial(obs["action_mask"].float(), 1, generator=generator).squeeze(-1)
        back = env.step(action)
        policy = torch.nn.functional.one_hot(action, game.actions).float()
        extras = {"next_obs": back.final_obs, "weights": policy}
        steps.append(Trajectory(obs, action, back.reward, back.discount, back.cut, extras=extras))
        obs = back.obs
    batch = trees.merge(lambda column: torch.stack(list(column), 1), steps)
    moved = symmetric(game, batch, generator, ("weights",))
    changed = (moved.action != batch.action).any(1).float().mean()
    assert 0.3 < changed < 0.95  # some sequences are under the identity, or symmetric themselves
    position = game.start(64)
    for t in range(4):
        torch.testing.assert_close(tree_map(lambda x, t=t: x[:, t], moved.obs), observe(game, position))
        position = game.step(position, moved.action[:, t]).position
        successor = tree_map(lambda x, t=t: x[:, t], moved.extras["next_obs"])
        torch.testing.assert_close(successor, observe(game, position))
    assert torch.equal(moved.extras["weights"].argmax(-1), moved.action)
    for field in ("reward", "discount", "cut"):
        assert torch.equal(getattr(moved, field), getattr(batch, field))


@sabotaged_by("foresight.envs.games.openspiel.Spiel.free_except", lambda f: lambda self, keep: None)
def test_openspiel_keeps_only_the_positions_that_games_may_fork_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfplay, "VISITED", 5)
    game = games.make("tic_tac_toe", rules="openspiel")
    env = SelfPlay(game, 4, forked=0.5)
    obs = env.reset(0)
    for _ in range(40):
        obs = env.step(torch.multinomial(obs["action_mask"].float(), 1).squeeze(-1)).obs
    assert len(game._states) <= 4 * (5 + 1)


def test_what_is_refused() -> None:
    env = SelfPlay(TTT, 1)
    env.reset(0)
    env.step(torch.tensor([4]))
    with pytest.raises(UserError, match="illegal in tic-tac-toe"):
        env.step(torch.tensor([4]))

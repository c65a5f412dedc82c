"""Self-play as a world: whose reward it is, what follows an end, and what is refused."""

from __future__ import annotations

import pytest
import torch

from foresight.envs import games
from foresight.envs.selfplay import SelfPlay, observe
from foresight.errors import UserError
from tests.sabotage import sabotaged_by

TTT = games.make("tic_tac_toe")


@sabotaged_by("foresight.envs.games.Native.first_score", lambda f: lambda self, p: 1 - f(self, p))
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


def test_what_is_refused() -> None:
    env = SelfPlay(TTT, 1)
    env.reset(0)
    env.step(torch.tensor([4]))
    with pytest.raises(UserError, match="not legal at tic-tac-toe"):
        env.step(torch.tensor([4]))

"""Where conditioning on returns fails: a gamble, and parts of episodes that must be joined.

python benchmarks/return_conditioning.py            # writes results/return_conditioning.json

The Decision Transformer is asked for the highest return of its data. Q-learning replays the same recorded steps.

- gamble: one step. The safe action pays 1. The other pays 3 with probability 0.2, otherwise 0: 0.6 on average. Both are
  recorded 500 times.
- stitching: a grid of 3 x 5. From the start S, some episodes leave by the door d, which pays 0.5, and others go right
  and end in the trap T, which pays 0. Episodes from the other start O go through the same corridor and end at the goal
  G, which pays 1. No episode goes from S to G, though all its parts were recorded.

      O . . . G
      S . . . .
      d . . . T
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces as gs

if TYPE_CHECKING:
    from foresight.data.episodes import Episodes

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "return_conditioning.json"
UP, RIGHT, DOWN, LEFT = range(4)
MOVES = {UP: (-1, 0), RIGHT: (0, 1), DOWN: (1, 0), LEFT: (0, -1)}
ROWS, COLUMNS, START, OTHER = 3, 5, 5, 0
PAYS = {10: 0.5, 14: 0.0, 4: 1.0}  # of the door, the trap and the goal, which end an episode


def move(state: int, action: int) -> tuple[int, float, bool]:
    """The next state of the grid, the reward, and whether the episode ends."""
    row, column = state // COLUMNS + MOVES[action][0], state % COLUMNS + MOVES[action][1]
    inside = 0 <= row < ROWS and 0 <= column < COLUMNS
    after = row * COLUMNS + column if inside else state
    return after, PAYS.get(after, 0.0), after in PAYS


def walk(start: int, actions: Sequence[int]) -> Episodes:
    """The recorded episode of these actions."""
    from foresight.data import episodes

    steps, state, end = [], start, False
    for action in actions:
        after, reward, end = move(state, action)
        steps.append((torch.tensor(state), torch.tensor(action), torch.tensor(reward)))
        state = after
    assert end
    return episodes.episode(steps, torch.tensor(state), True)


def grid_data() -> Episodes:
    """Fifty episodes of each kind."""
    from foresight.data import episodes

    through = [DOWN, RIGHT, RIGHT, RIGHT, RIGHT, UP]
    kinds = [walk(START, [DOWN]), walk(START, [RIGHT] * 4 + [DOWN]), walk(OTHER, through)]
    return episodes.join(kinds * 50)


def gamble_data(seed: int) -> Episodes:
    """Five hundred episodes of each action."""
    from foresight.data import episodes

    lucky = np.random.default_rng(seed).random(500) < 0.2
    nothing = torch.tensor(0)
    pays = [(0, 1.0)] * 500 + [(1, 3.0 * x) for x in lucky]
    steps = [(nothing, torch.tensor(action), torch.tensor(reward)) for action, reward in pays]
    return episodes.join([episodes.episode([step], nothing, True) for step in steps])


def q_learning(data: Episodes, states: int, actions: int, seed: int) -> Callable[[int], int]:
    """The greedy policy of Q-learning (γ = 1) on recorded steps in random order; actions not seen are worth 0."""
    q, count = np.zeros((states, actions)), np.zeros((states, actions))
    obs, action, reward = data.obs.numpy(), data.action.numpy(), data.reward.numpy()
    ends = set((data.first + data.length - 1).tolist())
    for row in np.random.default_rng(seed).permutation(np.repeat(data.rows.numpy(), 20)):
        s, a = obs[row], action[row]
        count[s, a] += 1
        target = reward[row] + (0 if row in ends else q[obs[row + 1]].max())
        # Old targets used values that were still wrong, so newer ones count for more.
        q[s, a] += (target - q[s, a]) * max(1 / count[s, a], 0.002)
    return lambda state: int(q[state].argmax())


def transformer(data: Episodes, states: int, actions: int, seed: int) -> Callable[[], tuple[Any, Any]]:
    """A Decision Transformer trained on the data: begin an episode, and get its `act` and `rewarded`."""
    from foresight.algorithms.sequence import decision_transformer as dt
    from foresight.envs.base import Spaces

    spaces = Spaces(gs.Discrete(states), gs.Discrete(actions))
    config = dt.Config(steps=400, seed=seed, context=6, batch_size=64, dim=32, layers=1, dropout=0, lr_warmup=20)
    state = dt.build(config, spaces)
    state.episodes = data
    state.net.fit(data)
    for _ in dt.train(config, None, state):  # the environment is only for evaluation
        pass

    def begin() -> tuple[Callable[[int], int], Callable[[float], None]]:
        carry: list[Any] = [None]

        def act(obs: int) -> int:
            action, _, carry[0] = dt.act(state, torch.tensor([obs]), carry[0])
            return int(action)

        def rewarded(reward: float) -> None:
            carry[0] = dt.rewarded(carry[0], torch.tensor([reward]))

        return act, rewarded

    return begin


def grid_return(act: Callable[[int], int], rewarded: Callable[[float], None] = lambda reward: None) -> float:
    """The return of the policy from S, 0 if it has not ended after 20 steps."""
    state, total = START, 0.0
    for _ in range(20):
        state, reward, end = move(state, act(state))
        rewarded(reward)
        total += reward
        if end:
            break
    return total


def measure(seed: int) -> dict[str, float]:
    """The probability of the gamble and the returns, of both methods."""
    bandit, grid = gamble_data(seed), grid_data()
    dt_bandit, dt_grid = transformer(bandit, 1, 2, seed), transformer(grid, ROWS * COLUMNS, 4, seed)
    return {
        "dt_gambles": float(dt_bandit()[0](0)),
        "q_gambles": float(q_learning(bandit, 1, 2, seed)(0)),
        "dt_stitching": grid_return(*dt_grid()),
        "q_stitching": grid_return(q_learning(grid, ROWS * COLUMNS, 4, seed)),
    }


def main() -> None:
    """Measure every seed, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()

    from foresight.runtime import bench

    torch.set_num_threads(1)
    began = time.monotonic()
    each = {seed: measure(seed) for seed in given.seeds}
    print(each)
    document = {
        "what": "decision_transformer and Q-learning on the same episodes: a gamble, and a grid that needs stitching",
        "command": shlex.join(["python", "benchmarks/return_conditioning.py", *sys.argv[1:]]),
        "seeds": given.seeds,
        **{key: statistics.fmean(found[key] for found in each.values()) for key in each[given.seeds[0]]},
        "each": each,
    }
    bench.record(FILE, document, began)


if __name__ == "__main__":
    main()

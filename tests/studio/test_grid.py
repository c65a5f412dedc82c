from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from foresight.envs.tabular import grid as worlds
from foresight.errors import UserError
from foresight.planning.dynamic import bellman
from foresight.studio import grid


def layout(rng: np.random.Generator) -> tuple[str, ...]:
    rows, columns = rng.integers(2, 5, 2)
    cells = rng.choice(list("....#T"), (rows, columns))
    cells.flat[0], cells.flat[-1] = "S", "G"
    return tuple("".join(row) for row in cells)


def by_state(cells: list, picture: tuple[str, ...]) -> list:
    return [x for x, sign in zip(cells, "".join(picture), strict=True) if sign != "#"]


def test_sweeps_on_200_random_layouts_are_those_of_planning() -> None:
    rng = np.random.default_rng(0)
    for trial in range(200):
        picture, sweeps = layout(rng), int(rng.integers(0, 6))
        gamma, slip = float(rng.uniform(0.1, 0.99)), float(rng.uniform(0, 0.5))
        asked = grid.Request(picture=picture, step=sweeps, gamma=gamma, slip=slip, step_reward=-0.1)
        found = grid.solve(asked)
        mdp = worlds.gridworld(picture, slip, -0.1)
        values, before = torch.zeros(mdp.states, dtype=torch.float64), None
        for _ in range(found["step"]):
            before, (values, _) = values, bellman.greedy(mdp, gamma, values)
        assert found["step"] == sweeps or found["done"], trial
        assert by_state(found["values"], picture) == pytest.approx(values.tolist(), abs=1e-12)
        if found["step"] == sweeps and sweeps:
            q = bellman.action_values(mdp, gamma, before)
            assert np.array(by_state(found["q"], picture)) == pytest.approx(q.numpy(), abs=1e-12)
            assert q.amax(1).tolist() == pytest.approx(by_state(found["values"], picture), abs=1e-12)
        assert all(x is None for x, sign in zip(found["values"], "".join(picture), strict=True) if sign == "#")


@pytest.mark.parametrize("method", grid.METHODS)
def test_going_back_gives_what_was_there(method: str) -> None:
    asked = grid.Request(picture=("S..", ".#.", "..G"), method=method)
    first = [grid.solve(dataclasses.replace(asked, step=step)) for step in range(4)]
    again = [grid.solve(dataclasses.replace(asked, step=step)) for step in (3, 1)]
    assert again == [first[3], first[1]]
    assert first[3]["values"] != first[1]["values"] or method == "mc_epsilon_greedy"


@pytest.mark.parametrize("method", ["policy_iteration", "truncated_policy_iteration"])
def test_every_planner_ends_at_the_optimal_values(method: str) -> None:
    asked = grid.Request(picture=("S..T", ".#..", "...G"), method=method, step=2_000)
    found = grid.solve(asked)
    best = grid.solve(dataclasses.replace(asked, method="value_iteration"))
    assert found["done"] and best["done"]
    assert by_state(found["values"], asked.picture) == pytest.approx(by_state(best["values"], asked.picture), abs=1e-4)
    assert found["policy"] == best["policy"]


def test_the_backup_of_a_cell_adds_up() -> None:
    asked = grid.Request(picture=("S.T", "..G"), step=3, gamma=0.8)
    found = grid.solve(asked)
    for cell, actions in enumerate(found["model"]):
        for action, outcomes in enumerate(actions):
            assert sum(p for p, *_ in outcomes) == pytest.approx(1)
            total = sum(p * (r + 0.8 * going * found["before"][s]) for p, s, r, going in outcomes)
            assert total == pytest.approx(found["q"][cell][action])


def test_q_learning_finds_the_shortest_path_and_its_last_episode_is_a_path() -> None:
    asked = grid.Request(picture=("S...", "....", "...G"), method="q_learning", slip=0.0, step=300, alpha=0.5)
    found = grid.solve(asked)
    optimal = grid.solve(dataclasses.replace(asked, method="value_iteration", step=100))
    assert found["values"][0] == pytest.approx(optimal["values"][0], abs=0.02)
    steps = np.abs(np.diff(np.array([divmod(cell, 4) for cell in [0, *found["path"]]]), axis=0)).sum(1)
    assert found["path"] and steps.max() <= 1


@pytest.mark.parametrize("method", ["q_learning", "sarsa", "expected_sarsa"])
def test_the_updates_of_an_episode_are_those_of_the_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the table before the episode, the definition of the method and the listed steps give the table after it."""
    asked = grid.Request(picture=("S..", ".#T", "..G"), method=method, step=40, alpha=0.3, epsilon=0.3)
    made: list[dict] = []
    by_state_ = grid._by_state
    monkeypatch.setattr(grid, "_by_state", lambda mdp, cells, found: made.extend(found) or by_state_(mdp, cells, found))
    old = grid.solve(dataclasses.replace(asked, step=39))
    made.clear()
    new = grid.solve(asked)
    q = np.array(by_state(old["q"], asked.picture))
    for one in made:
        s, a, after = one["state"], one["action"], one["next"]
        assert one["before"] == q[s, a]
        value = 0.0
        if one["discount"]:
            assert one["discount"] == asked.gamma
            best = q[after] == q[after].max()
            policy = asked.epsilon / 4 + (1 - asked.epsilon) * best / best.sum()
            value = {
                "q_learning": q[after].max(),
                "sarsa": q[after, one["next_action"]],
                "expected_sarsa": policy @ q[after],
            }[method]
        assert one["target"] == pytest.approx(one["reward"] + one["discount"] * value)
        q[s, a] += asked.alpha * (one["target"] - q[s, a])
        assert one["after"] == pytest.approx(q[s, a])
    assert made and q == pytest.approx(np.array(by_state(new["q"], asked.picture)))
    listed = [one for cell in new["updates"] if cell for one in cell]
    assert sum(cell[-1]["turn"] for cell in new["updates"] if cell) == len(made) >= len(listed)
    assert all(len(cell or []) <= grid.SHOWN_UPDATES for cell in new["updates"])


def test_the_updates_of_monte_carlo_are_returns() -> None:
    asked = grid.Request(
        picture=("S..", "..G"), method="mc_epsilon_greedy", step=7, slip=0.0, step_reward=-0.1, gamma=0.8
    )
    old, new = grid.solve(dataclasses.replace(asked, step=6)), grid.solve(asked)
    length = len(new["path"]) + 1
    rewards = [-0.1] * (length - 1) + [-0.1 + asked.goal_reward]
    returns = [sum(0.8**k * r for k, r in enumerate(rewards[t:])) for t in range(length)]
    places, seen = [0, *new["path"]], set()
    for cell, made in enumerate(new["updates"]):
        for one in made or []:
            assert one["after"] == pytest.approx(one["before"] + asked.alpha * (one["target"] - one["before"]))
            assert one["before"] == old["q"][cell][one["action"]] and one["after"] == new["q"][cell][one["action"]]
            assert min(abs(one["target"] - returns[t]) for t, at in enumerate(places) if at == cell) < 1e-9
            seen.add(cell)
    assert seen == set(places)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"gama": 0.9}, "gama"),
        ({"gamma": "high"}, "finite number"),
        ({"gamma": float("nan")}, "finite number"),
        ({"step": -1}, "between 0 and"),
        ({"step": 10**9}, "between 0 and"),
        ({"seed": -1}, "seed must be between 0 and 4,294,967,295, not -1"),
        ({"seed": 1e300}, "seed must be between 0 and"),
        ({"method": "dqn"}, "dqn"),
        ({"picture": "S.G"}, "list of rows"),
        ({"picture": ["S" * 40]}, "16 rows"),
        ({"picture": []}, "16 rows"),
    ],
)
def test_bad_requests_are_refused(document: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        grid.read(document)


def test_a_discount_of_one_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="gamma = 1"):
        grid.solve(grid.Request(picture=("S..",), gamma=1.0, step=2))


def test_rewards_beyond_64_bits_are_numbers_too() -> None:
    found = grid.solve(grid.read({"picture": ["SG"], "slip": 0, "goal_reward": 10**30, "step": 1}))
    assert found["values"][0] == pytest.approx(1e30)

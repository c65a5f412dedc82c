"""Tabular environments: read, drawn and stepped through."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from foresight.envs.make import make
from foresight.envs.tabular import grid, render
from foresight.envs.tabular.mdp import MDP, random_mdp
from foresight.errors import UserError
from tests.sabotage import change, sabotaged_by
from tests.small_mdps import small_mdp

UP, RIGHT, DOWN, LEFT = range(4)


def outcomes(mdp: MDP, s: int, a: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for s2, p in zip(mdp.next_state[s, a].tolist(), mdp.prob[s, a].tolist(), strict=True):
        found[s2] = found.get(s2, 0.0) + p
    return {s2: pytest.approx(p) for s2, p in found.items() if p > 0}


@sabotaged_by("foresight.envs.tabular.grid.gridworld", change("slip", lambda p: 0.5 * p, "slips_less"))
def test_a_picture_becomes_an_mdp() -> None:
    # 0 1 .
    # 2 # 3      cells without the wall, numbered by row
    # 4 5 6
    mdp = grid.gridworld("S.T/.#G/...", slip=0.2, step_reward=-0.1, goal_reward=2.0, trap_reward=-3.0)
    assert (mdp.states, mdp.actions) == (8, 4)
    assert mdp.start.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert outcomes(mdp, 0, RIGHT) == {1: 0.8, 0: 0.1, 3: 0.1}  # up is off the grid
    assert outcomes(mdp, 3, RIGHT) == {3: 0.8, 0: 0.1, 5: 0.1}  # a wall
    assert outcomes(mdp, 7, UP) == {4: 0.8, 6: 0.1, 7: 0.1}
    assert mdp.reward[7, UP].item() == pytest.approx(-0.1 + 0.8 * 2)
    assert mdp.reward[1, RIGHT].item() == pytest.approx(-0.1 - 0.8 * 3)
    assert mdp.weight[7, UP].sum().item() == pytest.approx(0.2)  # the goal ends it
    assert mdp.absorbing().tolist() == [False, False, True, False, True, False, False, False]


def test_pictures_without_a_start_begin_in_any_free_cell() -> None:
    assert grid.gridworld(["..G", "#.T"]).start.tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3, 0])


@pytest.mark.parametrize("name", [*grid.GRIDS, *grid.TOY_TEXT, "RandomMDP"])
def test_every_name_makes_a_valid_mdp(name: str) -> None:
    mdp = make(name, kind="tabular")
    assert isinstance(mdp, MDP) and mdp.name == name
    np.testing.assert_allclose(mdp.prob.sum(-1), 1.0, atol=1e-12)
    assert len(mdp.arrows) == mdp.actions
    assert mdp.uniform().sum(1).allclose(torch.ones(mdp.states, dtype=torch.float64))


@sabotaged_by("foresight.envs.tabular.mdp.assemble", change("reward", lambda r: r + 0.1, "more_reward"))
@sabotaged_by("foresight.envs.tabular.mdp.assemble", change("discount", np.ones_like, "nothing_ends"))
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FrozenLake-v1", {}),
        ("FrozenLake-v1", {"map_name": "8x8", "is_slippery": False}),
        ("CliffWalkingSlippery-v1", {}),
        ("Taxi-v4", {"is_rainy": True}),
    ],
)
def test_toy_text_tables_are_read_as_they_are(name: str, options: dict[str, object]) -> None:
    mdp = grid.make(name, **options)
    table = gymnasium.make(name, **options).unwrapped.P  # type: ignore[attr-defined]
    still = mdp.absorbing()
    assert mdp.states == len(table) and int(still.sum()) < mdp.states / 3
    for s in range(mdp.states):
        if still[s]:
            continue
        for a in range(mdp.actions):
            going, ended = np.zeros(mdp.states), 0.0
            for p, s2, _, terminated in table[s][a]:
                going[s2] += p * (not terminated)
                ended += p * terminated
            ours = np.zeros(mdp.states)
            np.add.at(ours, mdp.next_state[s, a].numpy(), mdp.weight[s, a].numpy())
            np.testing.assert_allclose(ours, going, atol=1e-12)
            assert 1 - mdp.weight[s, a].sum().item() == pytest.approx(ended, abs=1e-12)
            assert mdp.reward[s, a].item() == pytest.approx(sum(p * r for p, _, r, _ in table[s][a]))


def test_options_and_limits_of_toy_text() -> None:
    assert grid.make("FrozenLake-v1").time_limit == 100
    assert grid.make("FrozenLake8x8-v1").time_limit == 200
    assert grid.make("FrozenLake-v1", time_limit=7).time_limit == 7
    assert grid.make("FrozenLake-v1", is_slippery=False).next_state.shape[2] == 1
    assert int(grid.make("Taxi-v4").start.count_nonzero()) == 300
    custom = grid.make("FrozenLake-v1", desc=["SFH", "FFG"])
    assert custom.states == 6 and custom.layout is not None and custom.layout.cells == ("S.T", "..G")


@pytest.mark.parametrize("limit", [0, -5, 2.5])
def test_a_time_limit_below_one_is_refused(limit: Any) -> None:
    reported = f"time_limit must be a whole number of at least 1, not {limit}"
    with pytest.raises(UserError, match=reported):
        grid.make("FrozenLake-v1", time_limit=limit)
    with pytest.raises(UserError, match=reported):
        grid.make("FrozenLake-v1").sample(time_limit=limit)


def test_random_mdps() -> None:
    a, b = random_mdp(70_000, 3, 2, seed=4), random_mdp(70_000, 3, 2, seed=4)  # more than one block
    assert torch.equal(a.next_state, b.next_state) and torch.equal(a.prob, b.prob) and torch.equal(a.reward, b.reward)
    other = random_mdp(70_000, 3, 2, seed=5)
    assert not torch.equal(a.next_state, other.next_state)
    assert a.next_state.dtype == torch.int32 and a.discount is None and a.outcome_reward is None
    assert a.next_state.float().mean().item() == pytest.approx(35_000, rel=0.01)
    assert a.prob.mean().item() == pytest.approx(0.5) and a.prob.std().item() == pytest.approx(12**-0.5, rel=0.01)
    assert a.reward.mean().item() == pytest.approx(0.5, rel=0.01)


# --- the sampled face


def test_sampling_follows_the_tables() -> None:
    mdp = small_mdp(0, states=3, actions=2, outcomes=3, ending=0.2)
    env = mdp.sample(200)
    obs = env.reset(seed=1)
    assert obs.shape == (200,) and obs.dtype == torch.int64
    counts, rewards, ends = np.zeros((3, 2, 3)), np.zeros((3, 2)), np.zeros((3, 2))
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        action = torch.randint(0, 2, (200,), generator=generator)
        feedback = env.step(action)
        np.add.at(counts, (obs, action, feedback.final_obs), 1)
        np.add.at(rewards, (obs, action), feedback.reward)
        np.add.at(ends, (obs, action), 1 - feedback.discount)
        assert torch.equal(feedback.cut, 1 - feedback.discount)  # no time limit here
        assert torch.equal(feedback.obs[feedback.cut == 0], feedback.final_obs[feedback.cut == 0])
        obs = feedback.obs
    visits = counts.sum(-1)
    assert visits.min() > 3_000
    expected = np.zeros((3, 2, 3))
    for s in range(3):
        for a in range(2):
            np.add.at(expected[s, a], mdp.next_state[s, a].numpy(), mdp.prob[s, a].numpy())
    np.testing.assert_allclose(counts / visits[..., None], expected, atol=0.03)
    np.testing.assert_allclose(rewards / visits, mdp.reward, atol=0.06)
    np.testing.assert_allclose(ends / visits, 1 - mdp.weight.sum(-1).numpy(), atol=0.03)


def test_the_end_is_a_termination_and_the_time_limit_a_cut() -> None:
    env = grid.make("GridWorld", picture="S..G", time_limit=5).sample(2)
    env.reset(seed=0)
    for _ in range(2):
        feedback = env.step(torch.tensor([RIGHT, LEFT]))
        assert feedback.cut.tolist() == [0, 0] and feedback.info["episode_return"] == []
    feedback = env.step(torch.tensor([RIGHT, LEFT]))
    assert feedback.cut.tolist() == [1, 0] and feedback.discount.tolist() == [0, 1]
    assert feedback.final_obs.tolist() == [3, 0] and feedback.obs.tolist() == [0, 0]
    assert feedback.reward.tolist() == [1, 0] and feedback.mask.tolist() == [1, 1]
    assert feedback.info == {"episode_return": [1.0], "episode_length": [3]}
    env.step(torch.tensor([RIGHT, LEFT]))
    feedback = env.step(torch.tensor([RIGHT, RIGHT]))
    assert feedback.cut.tolist() == [0, 1] and feedback.discount.tolist() == [1, 1]
    assert feedback.final_obs.tolist() == [2, 1] and feedback.obs.tolist() == [2, 0]
    assert feedback.info == {"episode_return": [0.0], "episode_length": [5]}


def test_what_was_handed_out_is_not_changed_by_later_steps() -> None:
    env = small_mdp(1, states=50).sample(8)
    obs = env.reset(seed=0)
    feedback = env.step(torch.zeros(8, dtype=torch.int64))
    kept = copy.deepcopy((obs, feedback.obs, feedback.final_obs, feedback.reward))
    for _ in range(5):
        env.step(torch.ones(8, dtype=torch.int64))
    for x, y in zip(kept, (obs, feedback.obs, feedback.final_obs, feedback.reward), strict=True):
        assert torch.equal(x, y)


def test_equal_seeds_and_saved_states_give_equal_episodes() -> None:
    env, twin = grid.make("FrozenLake-v1").sample(5), grid.make("FrozenLake-v1").sample(5)
    actions = torch.randint(0, 4, (60, 5), generator=torch.Generator().manual_seed(0))
    assert torch.equal(env.reset(3), twin.reset(3))
    saved = None
    for t, action in enumerate(actions):
        if t == 30:
            saved = copy.deepcopy(env.state_dict())
        a, b = env.step(action), twin.step(action)
        assert torch.equal(a.obs, b.obs) and a.info == b.info
    last = env.state_dict()
    assert saved is not None
    other = grid.make("FrozenLake-v1").sample(5)
    other.load_state_dict(saved)
    for action in actions[30:]:
        other.step(action)
    assert other.state_dict()["rng"] == last["rng"] and (other.state_dict()["state"] == last["state"]).all()
    assert not torch.equal(env.reset(3), torch.ones(5)) and env.close() is None


# --- pictures


def test_text_shows_values_arrows_walls_and_ties() -> None:
    mdp = grid.gridworld("S./#G")
    values = torch.tensor([0.5, -12.25, 0.0], dtype=torch.float64)
    policy = torch.zeros(3, 4, dtype=torch.bool)
    policy[0, RIGHT] = policy[1, RIGHT] = policy[1, DOWN] = True
    assert render.text(mdp, values, policy).splitlines() == [
        "value           policy",
        "0.500 -12.25      → →↓",
        "  ███      G    ███  G",
    ]
    marked = render.text(mdp, values, policy.long().argmax(1), markup=True)
    assert "[bold green]     G[/]" in marked and "[dim]  ███[/]" in marked


def test_text_without_a_layout_is_a_table() -> None:
    mdp = random_mdp(30, 2, 2)
    lines = render.text(mdp, torch.zeros(30), torch.ones(30, dtype=torch.int64)).splitlines()
    assert lines[0].split() == ["state", "value", "policy"] and lines[1].split() == ["0", "0.000", "1"]
    assert lines[-1] == "... and 20 more states"


def test_images() -> None:
    mdp = grid.make("GridWorld8x8")
    low = render.image(mdp, torch.linspace(0, 1, mdp.states), torch.zeros(mdp.states, dtype=torch.int64))
    high = render.image(mdp, torch.linspace(1, 0, mdp.states), torch.zeros(mdp.states, dtype=torch.int64))
    other = render.image(mdp, torch.linspace(0, 1, mdp.states), torch.ones(mdp.states, dtype=torch.int64))
    assert low is not None and high is not None and other is not None
    assert low.dtype == np.uint8 and low.shape == high.shape and low.shape[2] == 3 and min(low.shape[:2]) > 300
    assert (low != high).mean() > 0.2 and 0 < (low != other).mean() < 0.2
    env = mdp.sample()
    before = env.render()
    env.step(torch.tensor([RIGHT]))
    assert before is not None and before.shape == low.shape
    assert render.image(random_mdp(5), torch.zeros(5)) is None and random_mdp(5).sample().render() is None


# --- mistakes


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("FrozenLake-v2", {}, "Did you mean 'FrozenLake-v1'"),
        ("GridWorld9x9", {}, "Did you mean 'GridWorld"),
        ("CartPole-v1", {}, "no transition table"),
        ("FrozenLake-v1", {"slippery": True}, "cannot be made with the options"),
        ("GridWorld8x8", {"slipp": 0.1}, "cannot be made with the options"),
        ("GridWorld", {}, "needs a picture"),
        ("GridWorld", {"picture": "SX/.G"}, "not X"),
        ("GridWorld", {"picture": "S../.G"}, "equal length"),
        ("GridWorld", {"picture": "#G"}, "start"),
        ("GridWorld", {"picture": "SG", "slip": 1.5}, "slip must be a probability"),
        ("Taxi-v4", {"fickle_passenger": True}, "fickle_passenger"),
        ("RandomMDP", {"states": 0}, "at least 1 state"),
    ],
)
def test_mistakes_are_reported(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        grid.make(name, **options)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prob", lambda x: x * 0.9, "state 0, action 0 do not sum to 1"),
        ("prob", lambda x: x.float(), "must be float64"),
        ("next_state", lambda x: x + 100, "between 0 and 11"),
        ("next_state", lambda x: x[0], "must have the shape"),
        ("start", lambda x: x * 2, "start probabilities"),
        ("reward", lambda x: x * torch.nan, "finite reward"),
    ],
)
def test_tables_that_are_wrong_are_refused(field: str, value: object, message: str) -> None:
    mdp = small_mdp(2)
    fields = {f: getattr(mdp, f) for f in ("name", "next_state", "prob", "reward", "start")}
    fields[field] = value(fields[field])  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        MDP(**fields)


def test_an_action_that_does_not_exist_is_refused() -> None:
    env = grid.make("FrozenLake-v1").sample(2)
    with pytest.raises(UserError, match="actions between 0 and 3"):
        env.step(torch.tensor([0, 4]))

"""The contract of `envs.base` over all engines: equal environments give equal steps, whatever their autoreset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.data.trajectory import Trajectory, tree_map
from foresight.envs.base import Feedback
from foresight.envs.control import vector
from foresight.envs.make import make
from foresight.errors import UserError
from tests.envs.example_envs import COUNTER, REUSING, rollout, same
from tests.sabotage import change, sabotaged_by

MODES = ("same_step", "next_step", "partial")


def feedback(how: Callable[[Feedback], Feedback], label: str) -> Any:
    """A mutation of `Vector.step`: `how` spoils what it returns."""

    def mutate(original: Callable[..., Feedback]) -> Callable[..., Feedback]:
        return lambda *args: how(original(*args))

    mutate.label = label  # type: ignore[attr-defined]
    return mutate


no_mask = feedback(lambda f: f._replace(mask=torch.ones_like(f.mask)), "drop_mask")
limit_is_termination = feedback(lambda f: f._replace(discount=f.discount * (1 - f.cut)), "limit_is_termination")
next_episode_is_successor = feedback(lambda f: f._replace(final_obs=f.obs), "next_episode_is_successor")
no_cut = feedback(lambda f: f._replace(cut=torch.zeros_like(f.cut)), "drop_cut")


def counter_oracle(actions: Tensor, limit: int | None) -> dict[str, Tensor]:
    """Rows of `Counter`, written down by its rules alone."""
    out: dict[str, list[list[Any]]] = {key: [] for key in ("obs", "reward", "discount", "cut", "after")}
    for script in actions.tolist():
        for kept in out.values():
            kept.append([])
        episode, at, last = 0, 0, -1
        for action in script:
            out["obs"][-1].append([episode, at, last])
            at, last = at + 1, action
            over = action == 2 and at >= 3
            cut = over or at == limit
            out["after"][-1].append([episode, at, last])
            for key, x in (("reward", 10.0 if over else action), ("discount", not over), ("cut", cut)):
                out[key][-1].append(float(x))
            if cut:
                episode, at, last = episode + 1, 0, -1
    return {key: torch.tensor(kept, dtype=torch.float32) for key, kept in out.items()}


@sabotaged_by("foresight.envs.control.vector.Vector.step", no_mask, next_episode_is_successor, no_cut)
@pytest.mark.parametrize("limit", [None, 4])
def test_every_autoreset_mode_gives_the_steps_of_the_contract(limit: int | None) -> None:
    actions = torch.randint(0, 3, (3, 40), generator=torch.Generator().manual_seed(1))
    expected = counter_oracle(actions, limit)
    assert expected["cut"].sum() > 9
    for mode in MODES:
        env = make(COUNTER, num_envs=3, engine="gymnasium", autoreset=mode, time_limit=limit)
        real = rollout(env, actions)
        for key in ("obs", "reward", "discount", "cut"):
            torch.testing.assert_close(getattr(real, key), expected[key], msg=f"{key} with {mode}")
        torch.testing.assert_close(real.extras["after"], expected["after"])
        env.close()


@sabotaged_by("foresight.envs.control.vector.Vector.step", limit_is_termination)
def test_a_time_limit_is_a_cut_with_discount_one_and_the_true_final_observation() -> None:
    for mode in MODES:
        env = make(COUNTER, num_envs=2, engine="gymnasium", autoreset=mode, time_limit=3)
        env.reset(0)
        for _ in range(3):
            f = env.step(torch.tensor([1, 2]))
        assert f.cut.tolist() == [1, 1]
        assert f.discount.tolist() == [1, 0], mode  # the second terminates at the very step of the limit
        assert f.final_obs.tolist() == [[0, 3, 1], [0, 3, 2]]
        assert f.info["episode_return"] == [3.0, 14.0]
        assert f.info["episode_length"] == [3, 3]


def agree_on_advantages(limit: int | None) -> None:
    actions = torch.randint(0, 3, (3, 40), generator=torch.Generator().manual_seed(2))
    first, *others = (
        rollout(make(COUNTER, num_envs=3, engine="gymnasium", autoreset=mode, time_limit=limit), actions)
        for mode in MODES
    )
    for other in others:
        same(first, other)
    assert ((first.cut * first.discount).sum() > 0) == (limit is not None)
    # Two rows of the recursion by hand, so that three equal mistakes cannot pass.
    t = int(first.cut[0].nonzero()[0])
    last, before = (
        first.reward[0, i] + 0.9 * first.discount[0, i] * first.next_value[0, i] - first.value[0, i] for i in (t, t - 1)
    )
    torch.testing.assert_close(first.extras["advantage"][0, t], last)
    torch.testing.assert_close(first.extras["advantage"][0, t - 1], before + 0.9 * 0.8 * last)


@sabotaged_by("foresight.envs.control.vector.Vector.step", no_mask, next_episode_is_successor)
def test_every_autoreset_mode_gives_the_same_advantages() -> None:
    agree_on_advantages(limit=None)


@sabotaged_by("foresight.ops.returns.gae", change("cut", torch.zeros_like, "drop_cut"))
@sabotaged_by("foresight.envs.control.vector.Vector.step", no_mask, no_cut, limit_is_termination)
def test_every_autoreset_mode_gives_the_same_advantages_with_a_time_limit() -> None:
    agree_on_advantages(limit=4)


def cliff_actions(envs: int, steps: int) -> Tensor:
    """Mostly along the cliff's edge to the goal (up, 11 times right, down), with detours."""
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(envs):
        script: list[int] = []
        while len(script) < steps:
            detour = [0] if rng.random() < 0.5 else []
            script += detour + [0] + [1] * 11 + [2] * (1 + len(detour))
        rows.append(script[:steps])
    return torch.tensor(rows)


def grid_actions(envs: int, steps: int) -> Tensor:
    """MiniGrid-Empty-5x5: two forward, right, two forward is the goal; idle turns between episodes."""
    rows = []
    for b in range(envs):
        one = [0, 1] * b + [2, 2, 1, 2, 2]
        rows.append((one * steps)[:steps])
    return torch.tensor(rows)


def agree_on_the_cliff(limit: int | None) -> Trajectory:
    # Both start and move without chance, so that equal actions must give equal rows.
    actions = cliff_actions(3, 60)
    pool = rollout(make("CliffWalking-v1", num_envs=3, engine="envpool", time_limit=limit), actions)
    for mode in ("same_step", "next_step"):
        other = make("CliffWalking-v1", num_envs=3, engine="gymnasium", autoreset=mode, time_limit=limit)
        same(pool, rollout(other, actions))
    return pool


@sabotaged_by("foresight.envs.control.vector.Vector.step", no_mask, next_episode_is_successor)
def test_envpool_and_gymnasium_give_the_same_rows_and_advantages() -> None:
    rows = agree_on_the_cliff(limit=None)
    assert rows.cut.sum() >= 9
    assert (rows.cut * rows.discount).sum() == 0


@sabotaged_by("foresight.envs.control.vector.Vector.step", no_mask, limit_is_termination, next_episode_is_successor)
def test_envpool_and_gymnasium_give_the_same_rows_and_advantages_with_a_time_limit() -> None:
    rows = agree_on_the_cliff(limit=9)
    assert (rows.cut * rows.discount).sum() == 18  # every ninth row


def test_envpool_and_gymnasium_agree_on_minigrid() -> None:
    actions = grid_actions(3, 30)
    name, keep = "MiniGrid-Empty-5x5-v0", dict(num_envs=3, flatten=True)
    pool = rollout(make(name, engine="envpool", **keep), actions)
    assert (pool.reward > 0.9).sum() >= 9
    for mode in ("same_step", "next_step"):
        same(pool, rollout(make(name, engine="gymnasium", autoreset=mode, **keep), actions))


@pytest.mark.parametrize("limit", [None, 11])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_native_envs_equal_those_of_gymnasium_from_the_same_seeds(name: str, limit: int | None) -> None:
    native = make(name, num_envs=3, engine="native", time_limit=limit)
    generator = torch.Generator().manual_seed(4)
    if name == "CartPole-v1":
        actions = torch.randint(0, 2, (3, 420), generator=generator)
        actions[:, ::2] = torch.arange(210) % 2  # long and short episodes
    else:
        actions = 6 * torch.rand(3, 420, 1, generator=generator) - 3  # beyond the bounds too
    rows = rollout(native, actions, seed=7)
    assert rows.cut.sum() >= 6
    for mode in ("same_step", "next_step"):
        other = make(name, num_envs=3, engine="gymnasium", autoreset=mode, time_limit=limit)
        same(rows, rollout(other, actions, seed=7))


def test_native_cartpole_is_cut_at_500_steps() -> None:
    env = make("CartPole-v1", num_envs=2)
    obs = env.reset(0)
    for t in range(500):
        f = env.step((obs[:, 2] + 0.5 * obs[:, 3] + 0.05 * obs[:, 0] + 0.1 * obs[:, 1] > 0).long())
        obs = f.obs
        assert f.cut.tolist() == [float(t == 499)] * 2
    assert f.discount.tolist() == [1, 1]
    assert f.info == {"episode_return": [500.0, 500.0], "episode_length": [500, 500]}
    assert f.obs.abs().max() <= 0.05 < f.final_obs.abs().max()


def test_native_envs_continue_from_a_saved_state() -> None:
    actions = torch.randint(0, 2, (900, 3))
    env, twin = make("CartPole-v1", num_envs=3), make("CartPole-v1", num_envs=3)
    env.reset(3)
    for a in actions[:150]:
        env.step(a)
    saved = env.state_dict()
    twin.load_state_dict(saved)
    for a in actions[150:]:  # far enough that new starts are drawn
        assert torch.equal(env.step(a).obs, twin.step(a).obs)


CASES = [
    ("CartPole-v1", "native"),
    ("CartPole-v1", "envpool"),
    ("CartPole-v1", "gymnasium"),
    ("CartPole-v1", "vector"),
    ("LunarLander-v3", "envpool"),
    ("MiniGrid-Empty-5x5-v0", "gymnasium"),
    ("ALE/Breakout-v5", "ale"),
    ("ALE/Breakout-v5", "envpool"),
]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(equal(a[key], b[key]) for key in a)
    return torch.equal(a, b)


@pytest.mark.parametrize("name,engine", CASES)
def test_rows_never_change_under_the_callers_feet(name: str, engine: str) -> None:
    env = make(name, num_envs=2, engine=engine, time_limit=15)
    first = env.reset(0)
    kept: list[tuple[Any, Any]] = [(first, tree_map(torch.clone, first))]
    for t in range(50):
        f = env.step(torch.tensor([t % 2, 1]))
        parts = {key: getattr(f, key) for key in f._fields if key != "info"}
        kept.append((parts, tree_map(torch.clone, parts)))
    assert any(parts["cut"].any() for parts, _ in kept[1:])
    assert all(equal(now, then) for now, then in kept)
    env.close()


@pytest.mark.parametrize("name,engine", CASES)
def test_equal_seeds_give_equal_episodes(name: str, engine: str) -> None:
    def run(env: Any, seed: int) -> list[Any]:
        out = [env.reset(seed)]
        for t in range(40):
            out.append(env.step(torch.tensor([t % 2, 1])).obs)
        return out

    env, twin = (make(name, num_envs=2, engine=engine) for _ in range(2))
    first, again, other = run(env, 5), run(env, 5), run(twin, 5)  # a used one and a fresh one
    assert all(equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(equal(a, b) for a, b in zip(first, other, strict=True))
    if "MiniGrid" not in name:
        assert not all(equal(a, b) for a, b in zip(first, run(env, 99), strict=True))


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5"])
def test_envpool_moves_as_gymnasium_does_from_the_same_state(name: str) -> None:
    pool = make(name, num_envs=1, engine="envpool")
    twin = make(name, num_envs=1, engine="gymnasium")
    obs = pool.reset(1)
    twin.reset(0)
    env = twin._engine.envs[0].unwrapped
    x = obs[0].double().numpy()
    if name == "HalfCheetah-v5":
        env.set_state(np.concatenate([[0.0], x[:8]]), x[8:])
    else:
        env.state = x if name == "CartPole-v1" else np.array([np.arctan2(x[1], x[0]), x[2]])
    generator = torch.Generator().manual_seed(0)
    for t in range(8):
        shape = pool.spaces.action.shape
        action = torch.tensor([t % 2]) if not shape else 2 * torch.rand(1, *shape, generator=generator) - 1
        a, b = pool.step(action), twin.step(action)
        torch.testing.assert_close(a.obs, b.obs, atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(a.reward, b.reward, atol=2e-3, rtol=1e-3)


def test_the_terminal_step_of_cartpole_is_worth_one_in_every_engine() -> None:
    for engine in ("native", "envpool", "gymnasium", "vector"):
        env = make("CartPole-v1", num_envs=2, engine=engine)
        env.reset(0)
        for _ in range(30):
            f = env.step(torch.ones(2, dtype=torch.long))
            assert torch.equal(f.reward, f.mask), engine
            if "episode_return" in f.info:
                assert f.info["episode_return"] == [float(n) for n in f.info["episode_length"]]
                assert 7 < f.info["episode_length"][0] < 12, engine


@pytest.mark.parametrize("mode", MODES)
def test_envs_in_processes_are_the_same_envs(mode: str) -> None:
    actions = torch.randint(0, 3, (2, 30), generator=torch.Generator().manual_seed(6))
    name = COUNTER.replace("Foresight", "tests.envs.example_envs:Foresight")
    there = make(name, num_envs=2, engine="async", time_limit=5, autoreset=mode)
    here = make(COUNTER, num_envs=2, engine="gymnasium", time_limit=5)
    same(rollout(there, actions), rollout(here, actions))
    there.close()


@sabotaged_by("foresight.envs.control.engines._with_own_end", lambda f: lambda single: single())
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("engine", ["gymnasium", "async"])
def test_the_last_observation_is_kept_of_an_environment_that_reuses_its_array(engine: str, nested: bool) -> None:
    actions = torch.zeros(2, 12, dtype=torch.int64)
    name = REUSING.replace("Foresight", "tests.envs.example_envs:Foresight")
    ends = {}
    for mode in MODES:
        env = make(name, num_envs=2, engine=engine, time_limit=3, autoreset=mode, nested=nested)
        env.reset(0)
        steps = [env.step(actions[:, t]) for t in range(12)]
        finals = [f.final_obs["x"] if nested else f.final_obs for f in steps]
        ends[mode] = [x.tolist() for x, f in zip(finals, steps, strict=True) if (f.cut * f.mask).all()]
        env.close()
    assert ends == {"same_step": [[[3.0], [3.0]]] * 4, "next_step": [[[3.0], [3.0]]] * 3, "partial": ends["same_step"]}


def test_actions_stay_within_float64_bounds() -> None:
    """float32(0.1) is above 0.1, and float32(-0.1) below -0.1."""
    space = gs.Box(-0.1, 0.1, (2,), np.float64)
    clipped = vector.action_converter(space)(torch.tensor([5.0, -5.0])).numpy()
    assert space.contains(clipped) and space.contains(vector._engine_converter(space)(torch.tensor([5.0, -5.0])))
    np.testing.assert_allclose(clipped, [0.1, -0.1], rtol=2e-7)
    exact = gs.Box(np.array([-2.0, -np.inf]), np.array([2.0, np.finfo(np.float64).max]), dtype=np.float64)
    assert vector.action_converter(exact)(torch.tensor([5.0, 1e38])).tolist() == [2.0, torch.tensor(1e38).item()]


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (gs.Dict({"x": gs.Discrete(2)}), "Dict"),
        (gs.Tuple((gs.Discrete(2),)), "Tuple"),
        (gs.Sequence(gs.Discrete(2)), "Sequence"),
    ],
)
def test_a_part_of_an_observation_that_is_no_tensor_is_refused_by_its_name(part: gs.Space[Any], kind: str) -> None:
    space = gs.Dict({"arm": part, "eye": gs.Discrete(2), "word": gs.Text(3)})
    with pytest.raises(UserError, match=f"'Robot-v0' has the space {kind} for the part 'arm'.*Wrap it"):
        vector.observation_space(space, "Robot-v0")
    assert vector.observation_space(gs.Dict({"eye": gs.Discrete(2), "word": gs.Text(3)}), "") == gs.Dict(
        {"eye": gs.Discrete(2)}
    )

"""`make` for control: declared options, rendering, and errors that say what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.envs.control import engines, vector
from foresight.envs.control.wrappers import frame_stack
from foresight.envs.make import make
from foresight.errors import UserError
from tests.envs.example_envs import COUNTER, rollout, same


def steps(env: Any, count: int, action: Any = None) -> list[Any]:
    """Feedback of `count` steps, with random actions by default."""
    generator = np.random.default_rng(0)
    out = []
    for _ in range(count):
        if action is None:
            shape = env.spaces.action.shape or ()
            drawn = generator.uniform(-1, 1, (env.num_envs, *shape)).astype(np.float32)
            if isinstance(env.spaces.action, gs.Discrete):
                drawn = generator.integers(0, env.spaces.action.n, env.num_envs)
            out.append(env.step(torch.from_numpy(drawn)))
        else:
            out.append(env.step(action))
    return out


# ------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "name,kind",
    [("CartPole-v1", "Classic"), ("Acrobot-v1", "EnvPool"), ("Pong-v5", "Atari"), (COUNTER, "Sync")],
)
def test_auto_picks_the_fastest_engine_that_has_the_id(name: str, kind: str) -> None:
    env: Any = make(name, num_envs=2)
    env.reset(0)
    inner = getattr(env, "env", env)
    engine = getattr(inner, "_engine", inner)
    assert kind in type(getattr(engine, "_engine", engine)).__name__


def test_frame_stack_holds_the_last_frames_of_this_episode_only() -> None:
    for mode in ("same_step", "next_step", "partial"):
        env = make(COUNTER, num_envs=1, engine="gymnasium", frame_stack=3, time_limit=4, autoreset=mode)
        assert env.spaces.obs.shape == (3, 3)
        assert env.reset(0)[0, :, :2].tolist() == [[0, 0]] * 3
        seen, finals = [], []
        while len(seen) < 6:
            f = env.step(torch.tensor([1]))
            if f.mask[0] > 0:
                finals.append(f.final_obs[0, :, 1].tolist())
            if not (mode == "next_step" and f.mask[0] > 0 and f.cut[0] > 0):  # a reset row will follow
                seen.append(f.obs[0, :, :2].tolist())
        assert seen[2] == [[0, 1], [0, 2], [0, 3]], mode
        assert seen[3] == [[1, 0]] * 3, mode
        assert seen[4] == [[1, 0], [1, 0], [1, 1]], mode
        assert finals[3] == [2, 3, 4], mode
        assert finals[4] == [0, 0, 1], mode


def test_frame_stack_of_parts() -> None:
    env = make("MiniGrid-Empty-5x5-v0", num_envs=2, frame_stack=2)
    obs = env.reset(0)
    assert {key: tuple(x.shape) for key, x in obs.items()} == {"direction": (2, 2), "image": (2, 2, 7, 7, 3)}
    assert env.spaces.obs["image"].shape == (2, 7, 7, 3)
    env.step(torch.tensor([0, 1]))
    f = env.step(torch.tensor([0, 1]))
    assert f.obs["direction"].tolist() == [[3, 2], [1, 2]]


@pytest.mark.parametrize("mode", ["same_step", "next_step", "partial"])
def test_frame_stack_leaves_the_action_mask_to_the_next_action(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Masked(gymnasium.Env[Any, Any]):
        observation_space = gs.Dict({"x": gs.Box(0, 9, (1,), np.float32), "action_mask": gs.MultiBinary(2)})
        action_space = gs.Discrete(2)

        def _show(self) -> Any:
            return {"x": np.full(1, self._at, np.float32), "action_mask": np.eye(2, dtype=np.int8)[self._at % 2]}

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self._at = 0
            return self._show(), {}

        def step(self, action: Any) -> Any:
            self._at += 1
            return self._show(), 0.0, self._at == 3, False, {}

    spec = gymnasium.envs.registration.EnvSpec("ForesightMasked-v0", entry_point=Masked)
    monkeypatch.setitem(gymnasium.registry, "ForesightMasked-v0", spec)
    env = make("ForesightMasked-v0", num_envs=1, engine="gymnasium", frame_stack=2, autoreset=mode)
    space = env.spaces.obs
    assert isinstance(space, gs.Dict) and space["action_mask"] == gs.MultiBinary(2) and space["x"].shape == (2, 1)
    seen = [env.reset(0)]
    for f in steps(env, 5):
        seen += [f.obs, f.final_obs]
    for obs in seen:
        assert obs["action_mask"].tolist() == [[1, 0] if obs["x"][0, 1, 0] % 2 == 0 else [0, 1]]
    with pytest.raises(UserError, match="flatten would make the action_mask of 'ForesightMasked-v0' a part"):
        make("ForesightMasked-v0", num_envs=1, flatten=True)


@pytest.mark.parametrize("nested", [False, True])
def test_a_scalar_observation_is_flattened(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scalar(gymnasium.Env[Any, Any]):
        number = gs.Box(0, 1, (), np.float32)
        observation_space = gs.Dict({"x": number, "y": gs.Discrete(2)}) if nested else number
        action_space = gs.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            x = np.array(0.5, np.float32)
            return {"x": x, "y": 1} if nested else x, {}

    spec = gymnasium.envs.registration.EnvSpec("ForesightScalar-v0", entry_point=Scalar)
    monkeypatch.setitem(gymnasium.registry, "ForesightScalar-v0", spec)
    env = make("ForesightScalar-v0", num_envs=4, flatten=True)
    assert env.reset(0).tolist() == [[0.5, 0, 1] if nested else [0.5]] * 4
    assert env.spaces.obs.shape == (3 if nested else 1,)


def test_action_repeat_sums_rewards_and_stops_at_the_end() -> None:
    env = make(COUNTER, num_envs=1, action_repeat=2, engine="gymnasium")
    env.reset(0)
    assert [f.reward.item() for f in steps(env, 3, torch.tensor([2]))] == [4.0, 10.0, 4.0]  # 2+2, 10, 2+2
    assert env.step(torch.tensor([1])).obs[0].tolist() == [1, 4, 1]


def test_action_repeat_in_envpool_is_that_many_steps() -> None:
    plain, repeated = (make("CartpoleSwingup-v1", num_envs=3, action_repeat=n, max_episode_steps=10) for n in (1, 4))
    plain.reset(0), repeated.reset(0)
    generator, rewards = torch.Generator().manual_seed(0), []
    for t in range(3):  # of 4, 4 and 2 steps
        action = 2 * torch.rand(3, 1, generator=generator) - 1
        once = steps(plain, 4 if t < 2 else 2, action)
        twice = repeated.step(action)
        torch.testing.assert_close(twice.reward, torch.stack([f.reward for f in once]).sum(0))
        assert torch.equal(twice.final_obs["position"], once[-1].final_obs["position"])
        assert torch.equal(twice.cut, torch.full((3,), float(t == 2)))
        rewards.append(twice.reward)
    torch.testing.assert_close(
        torch.tensor(twice.info["episode_return"]), torch.stack(rewards).sum(0), check_dtype=False
    )
    assert twice.info["episode_length"] == [3, 3, 3]
    assert "multiple of action_repeat" in error("LunarLander-v3", engine="envpool", action_repeat=3, time_limit=100)


def test_an_option_of_envpool_that_changes_the_observations_changes_their_space() -> None:
    env = make("Catch-v0", num_envs=2, width=8)
    assert env.spaces.obs.shape == env.reset(0).shape[1:] == (10, 8)


def test_flatten_gives_one_vector_in_the_order_of_the_keys() -> None:
    plain, flat = (make("MiniGrid-Empty-5x5-v0", num_envs=2, flatten=flat) for flat in (False, True))
    parts, x = plain.reset(0), flat.reset(0)
    assert flat.spaces.obs.shape == (4 + 147,) == tuple(x.shape[1:])
    assert x[0, :4].tolist() == [1, 0, 0, 0]  # facing right: 0 of 4
    assert torch.equal(x[:, 4:], parts["image"].flatten(1).float())
    env = make("FrozenLake-v1", num_envs=2, engine="gymnasium", flatten=True)
    assert env.reset(0).tolist() == [[1.0] + [0.0] * 15] * 2


def test_rescaled_actions_cover_the_bounds() -> None:
    generator = torch.Generator().manual_seed(0)
    actions = 2 * torch.rand(2, 30, 1, generator=generator) - 1
    rescaled = make("Pendulum-v1", num_envs=2, rescale_action=True)
    assert rescaled.spaces.action == gs.Box(-1.0, 1.0, (1,), np.float32)
    a, b = rollout(rescaled, actions), rollout(make("Pendulum-v1", num_envs=2), 2 * actions)
    same(a.replace(action=2 * a.action), b)
    options: dict[str, Any] = {"num_envs": 1, "engine": "gymnasium"}
    assert make("Pendulum-v1", rescale_action=True, **options).engine_action.high == 1  # type: ignore[attr-defined]
    assert make("Pendulum-v1", clip_reward=True, **options).engine_action.high == 2  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="bounded Box"):
        make("CartPole-v1", rescale_action=True)


@pytest.mark.parametrize("engine", ["envpool", "gymnasium", "native"])
def test_actions_are_clipped_to_their_bounds(engine: str) -> None:
    wild = torch.full((2, 25, 1), 50.0)
    name = "MountainCarContinuous-v0" if engine == "envpool" else "Pendulum-v1"
    bound = 1.0 if engine == "envpool" else 2.0
    a, b = (rollout(make(name, num_envs=2, engine=engine), x) for x in (wild, wild.clamp(-bound, bound)))
    same(a.replace(action=b.action), b)


def test_clipped_rewards_leave_returns_whole() -> None:
    env = make(COUNTER, num_envs=1, clip_reward=True)
    env.reset(0)
    out = steps(env, 3, torch.tensor([2]))
    assert [f.reward.item() for f in out] == [1, 1, 1]
    assert out[-1].info["episode_return"] == [14.0]


def test_environment_options_reach_the_environment() -> None:
    env = make("LunarLander-v3", num_envs=2, continuous=True)
    assert env.spaces.action.shape == (2,)
    assert make("FrozenLake-v1", num_envs=2, map_name="8x8").spaces.obs.n == 64


def test_discrete_actions_count_from_zero() -> None:
    class Shifted(gymnasium.Env[Any, Any]):
        observation_space = gs.Box(0, 9, (1,), np.float32)
        action_space = gs.Discrete(2, start=5)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.zeros(1, np.float32), float(action), False, False, {}

    gymnasium.register("ForesightShifted-v0", Shifted)
    env = make("ForesightShifted-v0", num_envs=2)
    env.reset(0)
    assert env.spaces.action == gs.Discrete(2)
    assert env.step(torch.tensor([0, 1])).reward.tolist() == [5, 6]
    del gymnasium.registry["ForesightShifted-v0"]


def test_floats_come_as_float32_and_frames_as_uint8() -> None:
    env = make("HalfCheetah-v5", num_envs=2)
    assert env.reset(0).dtype == torch.float32
    assert env.spaces.obs.dtype == np.float32
    assert make("MiniGrid-Empty-5x5-v0", num_envs=2).reset(0)["image"].dtype == torch.uint8
    wide = make("CheetahRun-v1", num_envs=2)  # its bounds are float64's largest numbers
    assert {key: x.dtype for key, x in wide.reset(0).items()} == dict.fromkeys(wide.spaces.obs, torch.float32)


# --------------------------------------------------------------------- Atari


@pytest.mark.parametrize("engine", ["ale", "envpool", "gymnasium"])
def test_a_lost_life_has_discount_zero_but_the_game_continues(engine: str) -> None:
    env = make("ALE/Breakout-v5", num_envs=2, engine=engine, repeat_action_probability=0.0)
    obs = env.reset(0)
    assert obs.shape == (2, 4, 84, 84) and obs.dtype == torch.uint8
    lost, cuts, lengths = np.zeros(2), np.zeros(2), []
    for f in steps(env, 260):
        life = ((f.discount == 0) & (f.cut == 0)).numpy()
        first = cuts == 0
        lost += life * first
        cuts += f.cut.numpy()
        lengths += f.info.get("episode_length", [])
        if not f.cut.any():
            assert f.final_obs is f.obs
    assert (cuts >= 1).all()
    assert (lost == 4).all(), "five lives: four are lost before the game ends"
    assert min(lengths) > 80, "a length is that of a whole game"
    whole = make("ALE/Breakout-v5", num_envs=2, engine=engine, episodic_life=False)
    whole.reset(0)
    assert all(torch.equal(f.discount, 1 - f.cut) for f in steps(whole, 120))


@pytest.mark.parametrize("engine", ["ale", "envpool", "gymnasium"])
def test_atari_rewards_are_clipped_and_returns_are_not(engine: str) -> None:
    env = make("MsPacman-v5", num_envs=1, engine=engine, time_limit=130)
    env.reset(0)
    out = steps(env, 130)
    rewards = torch.stack([f.reward for f in out])
    assert set(rewards.flatten().tolist()) == {0.0, 1.0}
    (score,) = out[-1].info["episode_return"]
    assert score == 10 * rewards.sum() and score >= 50  # pellets, no ghosts yet
    assert out[-1].cut.item() == 1 and out[-1].discount.item() == 1
    assert sum(f.cut.item() for f in out) == 1


def test_atari_options_reach_every_engine() -> None:
    options: dict[str, Any] = dict(image_size=42, frame_stack=2, full_action_space=True, frame_skip=2)
    for engine in ("ale", "envpool", "gymnasium"):
        env = make("ALE/Pong-v5", num_envs=2, engine=engine, clip_reward=False, **options)
        assert env.reset(0).shape == (2, 2, 42, 42)
        assert env.spaces.action == gs.Discrete(18)
        assert env.spaces.obs.shape == (2, 42, 42)
    raw = make("ALE/Pong-v5", num_envs=2, atari=False)
    assert raw.reset(0).shape == (2, 210, 160, 3)


def test_sticky_actions_are_those_of_the_id() -> None:
    def engine(name: str, **options: Any) -> Any:
        env: Any = make(name, num_envs=1, engine="envpool", **options)
        env.reset(0)
        return env.env._engine.config["repeat_action_probability"]

    assert engine("ALE/Pong-v5") == 0.25
    assert engine("Pong-v5") == engine("PongNoFrameskip-v4") == 0
    assert engine("ALE/Pong-v5", repeat_action_probability=0.1) == pytest.approx(0.1)


def test_our_atari_frames_are_those_of_ale() -> None:
    options: dict[str, Any] = dict(noop_max=0, repeat_action_probability=0.0, num_envs=1)
    ale, single = (make("ALE/Pong-v5", engine=engine, **options) for engine in ("ale", "gymnasium"))
    ale.reset(0), single.reset(0)
    for t in range(80):
        action = torch.tensor([2 if t % 9 < 5 else 3])
        a, b = ale.step(action), single.step(action)
        newest = (a.obs[:, -1].int() - b.obs[:, -1].int()).abs()  # before an episode, ALE shows black frames
        assert newest.max() <= 2, t  # they round differently
        assert torch.equal(a.reward, b.reward)
    assert a.obs.float().std() > 10


# ----------------------------------------------------------------- rendering


@pytest.mark.parametrize("name,shape", [("CartPole-v1", (400, 600, 3)), ("ALE/Pong-v5", (210, 160, 3))])
def test_render_gives_a_frame_of_the_first_environment(name: str, shape: tuple[int, ...]) -> None:
    env = make(name, num_envs=2, render=True)
    env.reset(0)
    first = env.render()
    assert first.shape == shape and first.dtype == np.uint8 and first.std() > 1
    steps(env, 5)
    assert (env.render() != first).any()
    env.close()


def test_envs_without_a_render_mode_give_no_frame() -> None:
    for engine in ("native", "envpool", "gymnasium"):
        env = make("CartPole-v1", num_envs=2, engine=engine)
        env.reset(0)
        assert env.render() is None


# -------------------------------------------------------------------- errors


def error(name: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        make(name, **options)
    return str(caught.value)


def test_an_unknown_id_gets_near_ones_and_not_all() -> None:
    text = error("CartPol-v1")
    assert "Did you mean 'CartPole-v1'?" in text and len(text) < 400
    assert "Pendulum-v1" in error("qqqqqqqq")
    assert "Pong-v5" in error("ALE/Pogn-v5")
    assert "no_such_module" in error("no_such_module:Thing-v0")


def test_unknown_envs_engines_and_options_are_named() -> None:
    assert "Did you mean 'control'?" in error("CartPole-v1", kind="contrl")
    assert "Did you mean 'envpool'?" in error("CartPole-v1", engine="envpol")
    assert "Did you mean 'same_step'?" in error("CartPole-v1", engine="gymnasium", autoreset="samestep")
    assert "Did you mean 'frame_skip'?" in error("ALE/Pong-v5", frame_skp=4)
    assert "gravitas" in error("LunarLander-v3", gravitas=1)
    assert "gravitas" in error("Acrobot-v1", engine="envpool", gravitas=1)
    assert "does not accept width='wide' (default: 5)" in error("Catch-v0", width="wide")
    alone = "AcrobotSwingup-v1"  # Gymnasium does not have it
    assert f"EnvPool's '{alone}' does not take these options: from_pixels" in error(alone, from_pixels=True)
    assert f"Only EnvPool has '{alone}', and it draws no frames" in error(alone, render=True)
    assert "num_envs must be a whole number of at least 1" in error("CartPole-v1", num_envs=0)
    assert "time_limit must be a whole number" in error("CartPole-v1", time_limit="abc")
    assert "visible must be a list" in error("CartPole-v1", visible=0)


def test_autoreset_chooses_an_engine_that_has_it() -> None:
    """CartPole-v1 is `native` and Acrobot-v1 EnvPool's by default: neither of them has another autoreset."""
    for name in ("CartPole-v1", "Acrobot-v1"):
        env = make(name, num_envs=1, autoreset="next_step", time_limit=2)
        env.reset(0)
        masks = [float(f.mask[0]) for f in steps(env, 3)]
        assert masks == [1, 1, 0], name  # the third step is spent on resetting
        env.close()
    assert "The engine 'native' takes no autoreset" in error("CartPole-v1", engine="native", autoreset="next_step")
    assert "The engine 'envpool' takes no autoreset" in error("Acrobot-v1", engine="envpool", autoreset="partial")
    assert "'TwoRoutes-v0' is built in and takes no autoreset" in error("TwoRoutes-v0", autoreset="next_step")


def test_minatar_is_registered_by_its_name() -> None:
    """Its import registers nothing. Breakout: 10 by 10 cells of 4 kinds, and 3 actions that change something."""
    env = make("MinAtar/Breakout-v1", num_envs=2)
    obs = env.reset(0)
    assert obs.shape == (2, 10, 10, 4) and obs.dtype == torch.bool and env.spaces.action.n == 3
    assert obs[:, 1:4, :, 3].all() and obs[..., 0].sum() == 2  # three rows of bricks; a paddle each


def test_an_engine_that_cannot_names_those_that_can() -> None:
    assert "engine='auto'" in error("LunarLander-v3", engine="native")
    assert "engine='auto'" in error(COUNTER, engine="envpool")
    assert "engine='gymnasium'" in error("CartPole-v1", engine="native", render=True)
    assert "engine='gymnasium'" in error("ALE/Pong-v5", engine="ale", render=True)
    assert "Atari" in error("CartPole-v1", engine="ale")
    assert "frame_skip" in error("ALE/Pong-v5", action_repeat=2)


@pytest.mark.parametrize(
    "name,module,extra",
    [
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid"),
        ("MinAtar/Breakout-v1", "minatar.gym", "minatar"),
    ],
)
def test_a_missing_package_gets_its_command(monkeypatch: Any, name: str, module: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert f"pip install 'foresight[{extra}]'" in error(name)


def test_a_missing_box2d_gets_its_command(monkeypatch: Any) -> None:
    for module in [m for m in sys.modules if m.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    assert "pip install 'foresight[box2d]'" in error("LunarLander-v3", engine="gymnasium")


def test_without_envpool_gymnasium_takes_over(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    engines.envpool_ids.cache_clear()
    try:
        env: Any = make("Acrobot-v1", num_envs=2)
        env.reset(0)
        assert type(env._engine).__name__ == "SyncVectorEnv"
        assert "pip install envpool" in error("Acrobot-v1", engine="envpool")
    finally:
        engines.envpool_ids.cache_clear()


def test_spaces_that_are_no_tensors_are_refused() -> None:
    assert "the observation space Tuple" in error("tests.envs.example_envs:ForesightOdd-v0", obs=True)
    assert "the action space Tuple" in error("tests.envs.example_envs:ForesightOdd-v0", obs=False)
    assert "several players" in error("TicTacToe-v1")


@pytest.mark.parametrize(("of", "what"), [(vector.observation_space, "observation"), (vector.action_space, "action")])
def test_a_space_without_a_number_is_refused(of: Callable[..., object], what: str) -> None:
    with pytest.raises(UserError, match=rf"'Empty-v0' has the {what} space Box.*holds no number. Wrap it"):
        of(gs.Box(-1, 1, (0,)), "Empty-v0")


@pytest.mark.parametrize("engine", ["native", "envpool", "gymnasium"])
def test_a_wrong_number_of_actions_is_refused(engine: str) -> None:
    env = make("CartPole-v1", num_envs=3, engine=engine)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(torch.zeros(3, dtype=torch.long))
    env.reset(0)
    with pytest.raises(ValueError, match="shape"):
        env.step(torch.zeros(2, dtype=torch.long))


def test_a_library_of_the_system_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As EnvPool's Procgen without Qt. Gymnasium's environment is used instead if it has one."""
    import envpool

    def missing(name: str) -> Any:
        raise ImportError("Procgen requires the system Qt 5 runtime.")

    monkeypatch.setattr(envpool, "make_spec", missing)
    for engine in ("auto", "envpool"):
        reported = error("StarpilotEasy-v0", engine=engine)
        assert reported == "Environment 'StarpilotEasy-v0': Procgen requires the system Qt 5 runtime."
    assert make("MountainCar-v0", num_envs=2).reset(0).shape == (2, 2)


def test_frame_stack_of_strange_spaces_is_refused() -> None:
    class Bits:
        name, num_envs, spaces = "bits", 1, make("CartPole-v1").spaces._replace(obs=gs.MultiBinary(3))

    with pytest.raises(UserError, match="frame_stack"):
        frame_stack(Bits(), 2)  # type: ignore[arg-type]

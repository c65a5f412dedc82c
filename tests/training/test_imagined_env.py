"""A world model as an environment: the contract of `envs.base`, where episodes start, and what is learned inside."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pytest
import torch
from torch import Tensor

from foresight.algorithms.policy import ppo, sac
from foresight.algorithms.search import muzero
from foresight.algorithms.value import dqn
from foresight.algorithms.world import dreamer
from foresight.data.sequences import Sequences
from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.nets.models import tdmpc2
from foresight.nets.models.latent_actor import LatentActor, features_of
from foresight.nets.models.world_model import Images
from foresight.training import imagined_env
from foresight.training.imagined_env import ImaginedEnv
from foresight.training.options import ModelTraining
from tests.algorithms.policy.small_envs import choice
from tests.algorithms.small_runs import last
from tests.algorithms.states import weights
from tests.algorithms.world.world_runs import DREAMER, reward_of
from tests.sabotage import change, sabotaged_by, swap
from tests.training.small_model import GAMMA, SPACES, Line, Picture, Slope


def line(count: int, limit: int = 5, places: tuple[float, ...] = (0.0, 1.0), model: Any = None) -> ImaginedEnv:
    starts = {"place": torch.tensor(places).unsqueeze(1)}
    return ImaginedEnv("line", model or Line(), SPACES, starts, count, limit, GAMMA)


def sums_all_episodes(step: Any) -> Any:
    def mutant(self: ImaginedEnv, action: Tensor) -> Any:
        total = self._returns
        feedback = step(self, action)
        self._returns = total + feedback.reward
        return feedback

    return mutant


@sabotaged_by("foresight.training.imagined_env._chosen", swap("one", "other"))
@sabotaged_by("foresight.training.imagined_env.ImaginedEnv.step", sums_all_episodes)
@sabotaged_by("tests.training.small_model.Line.advance", change("action", lambda x: 1 - x))
def test_steps_are_those_of_the_model() -> None:
    env = line(1, places=(0.0,))
    assert env.reset(0).tolist() == [[0.0]]
    rows, infos = [], []
    for action in (1, 0, 1, 1, 0, 0, 0, 0, 0, 1):
        f = env.step(torch.tensor([action]))
        rows.append([x.item() for x in (f.final_obs, f.obs, f.reward, f.discount, f.cut, f.mask)])
        infos.append(f.info)
    first, second = ({"episode_return": [r], "episode_length": [n]} for r, n in ((7.0, 4), (0.0, 5)))
    assert infos == [{}, {}, {}, first, {}, {}, {}, {}, second, {}]
    assert rows == [
        [1, 1, 1, 1, 0, 1],
        [1, 1, 1, 1, 0, 1],
        [2, 2, 2, 1, 0, 1],
        [3, 0, 3, 0, 1, 1],  # terminated: the next episode is shown already
        [0, 0, 0, 1, 0, 1],
        [0, 0, 0, 1, 0, 1],
        [0, 0, 0, 1, 0, 1],
        [0, 0, 0, 1, 0, 1],
        [0, 0, 0, 1, 1, 1],  # the limit of 5 steps truncates
        [1, 1, 1, 1, 0, 1],
    ]


def test_environments_end_apart_and_nothing_cut_is_one_object() -> None:
    env = line(64)
    obs = env.reset(3)
    assert set(obs.flatten().tolist()) == {0.0, 1.0}
    f = env.step(torch.ones(64, dtype=torch.int64))
    assert f.final_obs is f.obs and not f.cut.any() and torch.equal(f.obs, obs + 1)
    f = env.step(torch.ones(64, dtype=torch.int64))
    assert torch.equal(f.cut, (obs[:, 0] == 1).float()) and torch.equal(f.discount, 1 - f.cut)
    assert torch.equal(f.final_obs, obs + 2)
    going = f.cut == 0
    assert torch.equal(f.obs[going], f.final_obs[going]) and f.obs[~going].max() <= 1
    assert f.info["episode_return"] == [5.0] * int(f.cut.sum())


def test_the_predicted_continuation_is_a_coin() -> None:
    class Unsure(Line):
        def advance(self, state: Any, action: Tensor, generator: Any) -> tuple[Any, Tensor, Tensor]:
            state, reward, continuation = super().advance(state, action, generator)
            return state, reward, torch.full_like(continuation, 0.25 * GAMMA)

    env = line(4000, model=Unsure())
    env.reset(0)
    f = env.step(torch.zeros(4000, dtype=torch.int64))
    assert f.discount.mean().item() == pytest.approx(0.25, abs=0.03)


def test_no_coin_ends_what_never_terminates() -> None:
    env = ImaginedEnv("line", Line(), SPACES._replace(continuing=True), {"place": torch.ones(1, 1)}, 1, 5, GAMMA)
    env.reset(0)
    rows = [env.step(torch.ones(1, dtype=torch.int64)) for _ in range(5)]
    assert [f.discount.item() for f in rows] == [1] * 5 and [f.cut.item() for f in rows] == [0, 0, 0, 0, 1]


def test_equal_seeds_give_equal_episodes_and_a_state_continues() -> None:
    actions = torch.randint(0, 2, (40, 16), generator=torch.Generator().manual_seed(0))

    def rows(env: ImaginedEnv, count: int) -> Tensor:
        return torch.stack([torch.cat([f.obs[:, 0], f.reward, f.cut]) for f in map(env.step, actions[:count])])

    one, two, three = line(16), line(16), line(16)
    assert torch.equal(one.reset(4), two.reset(4)) and not torch.equal(one.reset(4), three.reset(5))
    first = rows(one, 20)
    assert torch.equal(first, rows(two, 20)) and not torch.equal(first, rows(three, 20))
    saved = copy.deepcopy(one.state_dict())
    expected = rows(one, 30)
    three.load_state_dict(saved)
    assert torch.equal(expected, rows(three, 30))


@sabotaged_by(
    "foresight.nets.models.world_model.Images.layout", lambda f: lambda self, x: f(self, x.flip(-1).contiguous())
)
@pytest.mark.parametrize("shape", [(32, 32, 3), (3, 64, 64), (4, 64, 64), (2, 64, 64, 3), (64, 64)])
def test_images_have_the_layout_of_the_observations(shape: tuple[int, ...]) -> None:
    encoder = Images(gs.Box(0, 255, shape, np.uint8), 2)
    obs = torch.randint(0, 256, (5, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(encoder.layout(encoder.picture(encoder.planes(obs))), obs)


def test_a_frame_is_the_decoded_image() -> None:
    env = ImaginedEnv(
        "picture", Picture(), Spaces(gs.Box(0, 255, (32, 32, 3), np.uint8), gs.Discrete(2)),
        {"place": torch.ones(1, 1)}, 2, 5, GAMMA,
    )  # fmt: skip
    assert env.render() is None
    assert env.reset(0).shape == (2, 32, 32, 3) and (env.reset(0) == 50).all()
    assert (env.step(torch.tensor([1, 0])).obs[:, 0, 0, 0].tolist()) == [100, 50]
    assert env.render().shape == (128, 128, 3) and (env.render() == 100).all()


def test_actions_are_read_as_the_model_was_trained_to() -> None:
    for space in (gs.Discrete(3), gs.Box(np.array([-2, 0], np.float32), np.array([2, 4], np.float32))):
        actor = LatentActor(space, 4, 8, 1)
        action = actor(torch.randn(50, 4, generator=torch.Generator().manual_seed(0))).sample(
            torch.Generator().manual_seed(1)
        )
        torch.testing.assert_close(features_of(space, actor.to_env(action)), actor.action_features(action))
        rows = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(actor(rows, 3).mode(), actor(rows[:, :3]).mode())  # the last step is not acted in


def trained(train_ratio: float) -> Any:
    """DreamerV3 in one-step episodes, mostly of random actions: the observation shows which of 4 actions earns 1."""
    config = dataclasses.replace(DREAMER, steps=800, learning_starts=640, horizon=1, train_ratio=train_ratio)
    return last(dreamer, config, choice())


def test_the_first_imagined_observation_is_the_decoded_context() -> None:
    state, space = trained(0.5), gs.Discrete(4)
    generator = torch.Generator().manual_seed(0)
    starts = imagined_env.beginnings(state.model, space, state.replay, generator)
    env = ImaginedEnv("choice", state.model, choice().spaces, starts, 8, 5, 0.997)
    first = env.reset(0)
    rows = torch.randint(len(starts["deter"]), (8,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = state.model.decode({name: x[rows] for name, x in starts.items()})
    assert torch.equal(first, expected)
    going = imagined_env.anywhere(state.model, space, state.replay, generator)
    assert 0 < len(going["deter"]) < imagined_env.STARTS  # without final observations, every second row here


@sabotaged_by("tests.training.test_imagined_env.trained", change("train_ratio", lambda x: 0.5))
def test_training_inside_improves_the_return_outside() -> None:
    state = trained(100.0)
    starts = imagined_env.anywhere(state.model, gs.Discrete(4), state.replay, torch.Generator().manual_seed(0))
    env = ImaginedEnv("choice", state.model, choice().spaces, starts, 16, 5, state.config.gamma)
    config = ppo.Config(
        steps=4096, num_envs=16, rollout_steps=16, learning_rate=1e-2, entropy_coef=0.01, hidden=(16,), epochs=4
    )
    before = reward_of(ppo, ppo.build(config, env.spaces), choice()).mean()
    after = reward_of(ppo, last(ppo, config, env), choice()).mean()
    assert before <= 0.5 and after == 1.0


@pytest.mark.parametrize("name", ["ppo", "dqn", "muzero", "sac"])
def test_others_train_inside(name: str) -> None:
    small: dict[str, Any] = {
        "ppo": {"rollout_steps": 8, "hidden": (8,), "learning_rate": 1e-2},
        "dqn": {"learning_starts": 32, "hidden": (8,), "learning_rate": 1e-2, "target_every": 16},
        "sac": {"learning_starts": 32, "hidden": (8,), "learning_rate": 1e-2, "batch_size": 16},
        "muzero": {
            "simulations": 4, "unroll_steps": 2, "n_steps": 2,
            "training": ModelTraining(
                latent_size=8, hidden=(8,), support=5, learning_starts=32, batch_size=16, collect_steps=4
            ),
        },
    }  # fmt: skip
    module = {"ppo": ppo, "dqn": dqn, "sac": sac, "muzero": muzero}[name]
    model, space = (Slope(), gs.Box(-1, 1, (1,), np.float32)) if name == "sac" else (Line(), gs.Discrete(2))
    env = ImaginedEnv("line", model, SPACES._replace(action=space), {"place": torch.zeros(1, 1)}, 4, 5, GAMMA)
    state = last(module, module.Config(steps=96, num_envs=4, **small[name]), env)
    before = weights(module.build(state.config, env.spaces))
    assert torch.isfinite(weights(state)).all() and not torch.equal(weights(state), before)


def test_what_cannot_be_an_environment_is_refused() -> None:
    discrete = Spaces(gs.Discrete(4), gs.Discrete(2))
    with pytest.raises(UserError, match="must predict observations that are images or one float array, not Discrete"):
        ImaginedEnv("x", Line(), discrete, {"place": torch.zeros(1, 1)}, 1, 5, GAMMA)
    with pytest.raises(UserError, match="predicts no observations, so that nothing that is trained or played inside"):
        ImaginedEnv("x", tdmpc2.TDMPC2, SPACES, {"latent": torch.zeros(1, 1)}, 1, 5, GAMMA)
    empty = Sequences(100, 2)
    with pytest.raises(UserError, match="holds no whole episode"):
        imagined_env.beginnings(Line(), gs.Discrete(2), empty, torch.Generator())
    with pytest.raises(UserError, match="Cannot sample sequences of 16 rows: 0 are stored"):
        imagined_env.anywhere(Line(), gs.Discrete(2), empty, torch.Generator())
    env = line(2)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(torch.zeros(2, dtype=torch.int64))
    env.reset(0)
    with pytest.raises(ValueError, match="takes actions of shape"):
        env.step(torch.zeros(3, dtype=torch.int64))

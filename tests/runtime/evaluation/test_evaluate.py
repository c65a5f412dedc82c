"""Evaluation: which episodes count, what is left untouched, and exact figures where the environment is a table."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

import foresight
from foresight.algorithms.search import alphago, mcts
from foresight.envs.base import Feedback, Spaces
from foresight.envs.games import make as games
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.runtime.agent import Agent
from foresight.runtime.evaluation import returns
from foresight.runtime.evaluation.evaluate import (
    EVALUATION_SEED,
    Evaluation,
    baseline,
    evaluate,
    preserve_generators,
)
from foresight.runtime.monitoring.profile import TimedEnv
from tests.algorithms.policy.small_envs import hidden_choice
from tests.sabotage import sabotaged_by


class Scripted:
    """Environments whose episodes have the given lengths (environment i runs through `lengths[i]`); every step earns 1.

    With `spend`, the row after an end is spent on resetting, as next-step autoreset does.
    """

    name = "scripted"

    def __init__(self, lengths: list[list[int]], spend: bool = False, lives: bool = False, shown: float = 1.0) -> None:
        self.lengths, self.num_envs, self.spend, self.lives, self.shown = lengths, len(lengths), spend, lives, shown
        self.spaces = Spaces(gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2))
        self.seeds: list[int] = []
        self.actions: list[Tensor] = []

    def reset(self, seed: int) -> Tensor:
        self.seeds.append(seed)
        self.episode, self.time = [0] * self.num_envs, [0] * self.num_envs
        self.spent = [False] * self.num_envs
        return torch.zeros(self.num_envs, 1)

    def step(self, action: Tensor) -> Feedback:
        self.actions.append(action)
        cut, mask, over, returns = [], [], [], []
        for i, lengths in enumerate(self.lengths):
            if self.spend and self.spent[i]:
                self.spent[i] = False
                cut, mask, over = [*cut, 1.0], [*mask, 0.0], [*over, False]
                continue
            self.time[i] += 1
            length = lengths[self.episode[i] % len(lengths)]
            ended = self.time[i] == length
            life = self.lives and not ended and self.time[i] == length // 2
            if ended:
                returns.append(float(length))
                self.time[i], self.episode[i], self.spent[i] = 0, self.episode[i] + 1, True
            cut, mask, over = [*cut, float(ended or life)], [*mask, 1.0], [*over, ended]
        obs, one = torch.zeros(self.num_envs, 1), torch.ones(self.num_envs)
        info: dict[str, Any] = {"episode_return": returns} if returns else {}
        if self.lives:
            info["engine"] = {"game_over": np.array(over)}
        tensors = torch.tensor(cut), torch.tensor(mask)
        return Feedback(obs, one * self.shown, one, *tensors, obs, info)


class NoReports(Scripted):
    """The same, but an engine that reports no returns."""

    def step(self, action: Tensor) -> Feedback:
        return super().step(action)._replace(info={})


@dataclasses.dataclass
class State:
    generator: torch.Generator
    config: Any = None


def control(**extra: Any) -> tuple[Any, State]:
    def act(state: Any, obs: Tensor, carry: Any = None, explore: bool = False) -> tuple[Tensor, dict[str, Any], Any]:
        assert not explore
        torch.rand(1), torch.rand(1, generator=state.generator), random.random(), np.random.rand()
        return torch.zeros(len(obs), dtype=torch.int64), {}, carry

    return SimpleNamespace(**{"KIND": "control", "act": act, **extra}), State(torch.Generator())


@sabotaged_by("foresight.runtime.evaluation.evaluate.training_seed", lambda f: lambda seed, count: seed)
@pytest.mark.parametrize("first", [-31, 0, 15, 999_999])
def test_training_never_has_the_seeds_of_evaluation(first: int) -> None:
    env = Scripted([[9]] * 32)
    TimedEnv(env).reset(EVALUATION_SEED + first)
    (seed,) = env.seeds
    assert set(range(seed, seed + 32)).isdisjoint(range(EVALUATION_SEED, EVALUATION_SEED + 1_000_000))


@pytest.mark.parametrize("seed", [0, 7, 1_000_003, EVALUATION_SEED - 32, EVALUATION_SEED + 1_000_000])
def test_other_seeds_of_training_stay_what_they_are(seed: int) -> None:
    env = Scripted([[9]] * 32)
    TimedEnv(env).reset(seed)
    assert env.seeds == [seed]


LENGTHS = [[1, 9, 9], [9, 1, 1], [1, 1, 5], [7, 1, 1]]


@pytest.mark.parametrize("kind", [Scripted, NoReports])
@pytest.mark.parametrize("options", [{}, {"spend": True}])
def test_every_environment_has_a_quota(kind: Any, options: dict[str, Any]) -> None:
    algorithm, state = control()
    env = kind(LENGTHS, **options)
    result = evaluate(algorithm, state, env, 6, seed=3)
    # Two of environments 0 and 1, one of the others, however soon other episodes end: short ones have no advantage.
    assert result.values == (1, 9, 9, 1, 1, 7) and result.n == 6
    assert result.mean == pytest.approx(28 / 6) and result.std == pytest.approx(np.std([1, 9, 9, 1, 1, 7]))
    assert env.seeds[0] > 1_000_000  # apart from the seeds of training


def test_lives_are_not_episodes_and_clipped_rewards_are_not_returns() -> None:
    algorithm, state = control()
    assert evaluate(algorithm, state, Scripted(LENGTHS, lives=True), 6).values == (1, 9, 9, 1, 1, 7)
    assert evaluate(algorithm, state, Scripted(LENGTHS, shown=0.1), 6).values == (1, 9, 9, 1, 1, 7)


def test_an_episode_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "MAX_STEPS", 50)
    algorithm, state = control()
    assert evaluate(algorithm, state, Scripted([[10**9], [20]]), 2).values == (50, 20)


def test_carries_are_reset_where_episodes_end() -> None:
    seen: list[Tensor] = []

    def act(state: Any, obs: Tensor, carry: Any = None, explore: bool = False) -> tuple[Tensor, dict[str, Any], Any]:
        carry = torch.zeros(len(obs)) if carry is None else carry
        seen.append(carry)
        return torch.zeros(len(obs), dtype=torch.int64), {}, carry + 1

    algorithm, state = control(act=act, reset_carry=lambda carry, cut: carry * (1 - cut))
    evaluate(algorithm, state, Scripted([[2, 3], [4]]), 3)
    assert [carry.tolist() for carry in seen] == [[0, 0], [1, 1], [0, 2], [1, 3], [2, 0]]
    forgetful, state = control(act=act)
    with pytest.raises(TypeError, match="reset_carry"):
        evaluate(forgetful, state, Scripted([[2, 3], [4]]), 3)


def test_generators_stay_where_they_were() -> None:
    algorithm, state = control()

    def draws() -> list[float]:
        with preserve_generators(state):
            numbers = torch.rand(1), torch.rand(1, generator=state.generator)
            return [float(numbers[0]), float(numbers[1]), random.random(), float(np.random.rand())]

    before = draws()
    evaluate(algorithm, state, Scripted(LENGTHS), 6)
    assert draws() == before
    with pytest.raises(ZeroDivisionError), preserve_generators(state):
        torch.rand(1, generator=state.generator)
        _ = 1 / 0
    assert draws() == before


@pytest.mark.parametrize("module", [mcts, alphago])
def test_the_random_stream_of_playouts_stays_where_it_was(module: Any) -> None:
    game = games.make("tic_tac_toe", opponent="random")
    sizes = {"simulations": 4} if module is mcts else {"play_simulations": 4, "channels": 4, "blocks": 1}
    state = module.build(module.Config(**sizes), game)
    before = state.random.copy()
    first = evaluate(module, state, game, 4)
    assert state.random == before and evaluate(module, state, game, 4) == first


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Discrete(3),
        gymnasium.spaces.MultiDiscrete([2, 5]),
        gymnasium.spaces.Box(-2, 3, (2,), np.float32),
        gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32),
    ],
)
def test_the_random_baseline_covers_the_space(space: Any) -> None:
    algorithm, state = control()
    env = Scripted([[100]] * 8)
    env.spaces = env.spaces._replace(action=space)
    result = baseline(algorithm, state, env, 8, seed=1)
    assert result.mean == 100
    actions = torch.stack(env.actions).flatten(0, 1)
    assert all(space.contains(action.numpy().astype(space.dtype)) for action in actions)
    if isinstance(space, gymnasium.spaces.Discrete):
        counts = actions.bincount(minlength=3) / len(actions)
        assert (counts - 1 / 3).abs().max() < 0.05
    elif isinstance(space, gymnasium.spaces.Box) and space.is_bounded():
        assert (actions.mean(0) - 0.5).abs().max() < 0.2
    again = Scripted([[100]] * 8)
    again.spaces = env.spaces
    baseline(algorithm, state, again, 8, seed=1)
    assert torch.equal(torch.stack(again.actions), torch.stack(env.actions))


@sabotaged_by("foresight.nets.encoders.mask_key", lambda f: lambda space: None)
def test_the_random_baseline_keeps_to_what_is_allowed() -> None:
    """All actions but the right one are forbidden: a policy that keeps to the mask earns all there is."""
    assert baseline(*control(), hidden_choice(), 32, seed=1).mean == 1


def test_random_cartpole_has_the_published_return() -> None:
    algorithm, state = control()
    env = make("CartPole-v1", num_envs=16)
    assert 18 < baseline(algorithm, state, env, 200).mean < 26  # about 22 in the literature
    env.close()


def mdp_module(policy: list[int], gamma: float) -> tuple[Any, State]:
    def act(state: Any, obs: Tensor, carry: Any = None, explore: bool = False) -> tuple[Tensor, dict[str, Any], None]:
        return torch.tensor(policy)[obs], {}, None

    return SimpleNamespace(KIND="tabular", act=act), State(torch.Generator(), SimpleNamespace(gamma=gamma))


def test_a_table_is_evaluated_exactly_and_left_unchanged() -> None:
    from foresight.envs.tabular.mdp import MDP

    f64 = torch.float64
    # State 0: stay for 1, or go to state 1 for 0. State 1: earn 5, the end, either way.
    env = MDP(
        name="two",
        next_state=torch.tensor([[[0], [1]], [[1], [1]]], dtype=torch.int32),
        prob=torch.ones(2, 2, 1, dtype=f64),
        reward=torch.tensor([[1.0, 0.0], [5.0, 5.0]], dtype=f64),
        start=torch.tensor([1.0, 0.0], dtype=f64),
        discount=torch.tensor([[[1.0], [1.0]], [[0.0], [0.0]]], dtype=f64),
        time_limit=4,
    )
    tables = [tensor.clone() for tensor in (env.next_state, env.prob, env.reward)]
    stay, leave = mdp_module([0, 0], 0.9), mdp_module([1, 0], 0.9)
    assert evaluate(*stay, env).mean == pytest.approx(10) and evaluate(*leave, env).mean == pytest.approx(4.5)
    assert evaluate(*stay, env).extra_metrics == {"return": pytest.approx(4)} and evaluate(*leave, env).n == 1
    # v = 0.5 (1 + 0.9 v) + 0.5 (0.9 · 5)
    assert baseline(*stay, env).mean == pytest.approx(2.75 / 0.55)
    # Undiscounted, a policy that never ends has no value; what it earns within the limit is reported instead.
    assert evaluate(*mdp_module([0, 0], 1.0), env).mean == pytest.approx(4)
    assert all(torch.equal(a, b) for a, b in zip(tables, (env.next_state, env.prob, env.reward), strict=True))


def test_a_larger_table_is_left_unchanged() -> None:
    env = make("RandomMDP", "tabular", states=30)
    tables = [tensor.clone() for tensor in (env.next_state, env.prob, env.reward)]
    baseline(*mdp_module([0] * 30, 0.9), env)
    assert all(torch.equal(a, b) for a, b in zip(tables, (env.next_state, env.prob, env.reward), strict=True))


def text_module(answers: dict[str, str]) -> tuple[Any, State]:
    def act(state: Any, obs: Any, carry: Any = None, explore: bool = False) -> tuple[list[str], dict[str, Any], None]:
        return [answers.get(example.question, "no") for example in obs], {}, None

    return SimpleNamespace(KIND="text", act=act), State(torch.Generator())


def test_text_is_graded_on_what_is_held_out() -> None:
    task = make("addition", "text")
    right = {example.question: example.answer for example in task.test[:30]}
    result = evaluate(*text_module(right), task)
    assert result.metric == "accuracy" and result.n == 100 and result.mean == 0.3
    assert evaluate(*text_module(right), task, episodes=60).mean == 0.5
    trained = {example.question: example.answer for example in task.train}
    assert evaluate(*text_module(trained), task).mean == 0


def test_unscorable_is_not_zero() -> None:
    from foresight.envs.text.task import Example, TextTask

    examples = [Example(str(i)) for i in range(4)]
    task = TextTask("t", examples, examples, lambda e, c: [1.0, math.nan, 0.0, math.nan], metric="reward")
    result = evaluate(*text_module({}), task)
    assert result.mean == 0.5 and result.n == 2
    nothing = dataclasses.replace(task, grader=lambda e, c: [math.nan] * len(e))
    unknown = evaluate(*text_module({}), nothing)
    assert unknown.n == 0 and math.isnan(unknown.mean) and unknown.score == -math.inf
    assert str(unknown) == "reward unknown: the grader could score none of the answers"
    assert '"mean": null' in json.dumps(unknown.document())
    assert math.isnan(Evaluation.read(unknown.document()).mean)


def test_an_evaluation_as_json_and_words() -> None:
    result = Evaluation.of("return", [1.0, 2.0, 3.0])
    assert result.document() == {"metric": "return", "mean": 2.0, "std": pytest.approx(math.sqrt(2 / 3)), "n": 3}
    assert str(result) == "return 2 ± 0.8165 (standard deviation, n = 3)"


def test_ppo_through_the_whole_runtime(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_envs": 4, "rollout_steps": 64, "evaluation_episodes": 6, "show": False}
    run = foresight.train("ppo", env="CartPole-v1", steps=1024, out=tmp_path / "a", **options)
    agent = foresight.load(run.path)
    assert run.evaluation.n == 6 and agent.evaluate().mean == run.evaluation.mean
    single = agent.act([0.0, 0.1, 0.0, 0.1])
    assert isinstance(single, int) and single in (0, 1)
    batch = agent.act(np.zeros((5, 4)))
    assert batch.shape == (5,) and batch.dtype.kind == "i"
    assert agent.act(torch.zeros(4, dtype=torch.float64)) == batch[0]
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    for _ in range(3):
        obs, *_ = env.step(agent.act(obs))
    with pytest.raises(UserError, match=r"shape \(3,\)\. It must be \(4,\), or a batch"):
        agent.act([1, 2, 3])
    for obs, message in (("x", "obs must be numbers, not 'x'"), (None, "must be numbers"), ([math.nan] * 4, "finite")):
        with pytest.raises(UserError, match=message):
            agent.act(obs)
    again = foresight.train("ppo", env="CartPole-v1", steps=1024, out=tmp_path / "b", evaluate_every=256, **options)
    rows = [[row["policy_loss"] for row in one.metrics() if "policy_loss" in row] for one in (run, again)]
    assert len(rows[0]) == 4 and rows[0] == rows[1]  # evaluating on the way changed nothing


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        (({"a": [0], "b": [0, 0]}, {}), "obs is a pair with a dict, as env.reset"),
        ([0.0], "obs is a list. It must be a dict of a, b"),
        ({"a": [0]}, "obs lacks b. It must be a dict of a, b"),
        ({"a": [[0], [1]], "b": [0, 0]}, "different numbers of observations: a 2, b one"),
        ({"a": [[0], [1]], "b": [[0, 0]]}, "different numbers of observations: a 2, b 1"),
    ],
)
def test_observations_of_another_form_are_named(obs: Any, message: str) -> None:
    parts = gymnasium.spaces.Dict({"a": gymnasium.spaces.Box(0, 1, (1,)), "b": gymnasium.spaces.Box(0, 1, (2,))})
    agent: Any = SimpleNamespace(spaces=SimpleNamespace(obs=parts))
    with pytest.raises(UserError, match=message):
        Agent.batch(agent, obs)
    for wanted, given in ((False, {"a": [[0]], "b": [[0, 0]]}), (True, {"a": [0], "b": [0, 0]})):
        batch, single = Agent.batch(agent, given)
        assert single == wanted and batch["b"].tolist() == [[0, 0]]
    batch, single = Agent.batch(agent, {"a": np.zeros((0, 1)), "b": np.zeros((0, 2))})
    assert not single and batch["a"].shape == (0, 1)
    agent.spaces.obs = parts["a"]
    with pytest.raises(UserError, match="must be numbers"):
        Agent.batch(agent, {"a": [0]})


def test_a_state_of_a_table_is_a_whole_number_in_range() -> None:
    agent = foresight.load("q_learning/Taxi-v4")
    assert agent.act(0) in range(6)
    for obs in (-1, 2.7, 500):
        with pytest.raises(UserError, match=rf"obs must be a whole number from 0 to 499, not {obs}"):
            agent.act(obs)

"""Searches that are handed the truth instead of a network, and targets made of true values: both must leave them alone.

At its default settings and others a whole algorithm's `act`, given the true model and the values of the policy that it
found last, is policy iteration: it ends at V*. Its value targets, made of true values, are these values again.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foresight.algorithms.search import (
    alphazero,
    efficientzero,
    gumbel_muzero,
    muzero,
    sampled_muzero,
    stochastic_muzero,
)
from foresight.data import trees
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Spaces
from foresight.envs.games import make as games
from foresight.envs.games import selfplay
from foresight.envs.games.game import Game
from foresight.training import muzero_targets
from foresight.training.options import build_config
from tests.fixed_points import mdps
from tests.fixed_points.solved_game import Solved, some
from tests.planning.search.table_model import TableModel, action_values, random_tables
from tests.planning.search.test_mcts import Chance
from tests.sabotage import change, flip_sign, sabotaged_by, swap

STATES, ACTIONS = 12, 4


def name(x: Any) -> str | None:
    if isinstance(x, dict):
        return "-".join(f"{key}={value}" for key, value in x.items()) or "default"
    return x.__name__.split(".")[-1] if isinstance(x, ModuleType) else None


def state_of(module: Any, fields: dict[str, Any], actions: int = ACTIONS, states: int = STATES) -> Any:
    spaces = Spaces(gs.Box(0, 1, (states,), np.float32), gs.Discrete(actions))
    return module.build(build_config(module.Config, **{"hidden": (4,), "latent_size": 4, **fields}), spaces)


def env(seed: int, discount: float, forbidden: float = 0.25) -> dict[str, Tensor]:
    """Deterministic, with some actions that end it and a share that is not allowed; no hint by logits or values."""
    found, g = random_tables(seed, STATES, ACTIONS), torch.Generator().manual_seed(seed)
    ends = torch.rand(STATES, ACTIONS, generator=g) < 0.1
    illegal = torch.rand(STATES, ACTIONS, generator=g) < forbidden
    illegal[:, 0] = False
    found["discount"] = torch.where(ends, 0.0, torch.tensor(discount))
    found["logits"] = torch.zeros(STATES, ACTIONS).masked_fill(illegal, -torch.inf)
    found["reward"] = found["reward"].masked_fill(illegal, -100.0)
    found["value"] = torch.zeros(STATES)
    return found


# Of a search of few simulations the choice need not be the best one: with as many as here PUCT tells apart what differs
# by more than 0.05; Gumbel's is exact where each action has one simulation, which sees the true values.
SEARCHED: list[tuple[ModuleType, dict[str, Any], float, float]] = [
    (muzero, {"simulations": 400}, 0.5, 0.05),
    (muzero, {"simulations": 400}, -0.5, 0.05),
    (efficientzero, {"simulations": 400}, 0.5, 0.05),
    (sampled_muzero, {"simulations": 400, "samples": 40}, 0.5, 0.05),
    (gumbel_muzero, {"simulations": 4}, 0.5, 1e-5),
    (gumbel_muzero, {"simulations": 4, "value_scale": 1.0, "value_normalization": "tree"}, -0.5, 1e-5),
    (gumbel_muzero, {"simulations": 4, "max_visit_init": 5.0}, 0.9, 1e-5),
]
STAYING: list[tuple[ModuleType, dict[str, Any], float]] = [
    (muzero, {}, 0.9),
    (muzero, {"simulations": 100}, 0.97),
    (muzero, {}, -0.9),
    (efficientzero, {}, 0.9),
    (efficientzero, {"simulations": 100}, 0.97),
]
GUMBEL: list[dict[str, Any]] = [
    {},
    {"simulations": 32, "value_normalization": "tree"},
    {"simulations": 4, "considered": 3},
]


def negated(f: Any) -> Any:
    return lambda *x: tuple(-y if i == 1 else y for i, y in enumerate(f(*x)))


@pytest.mark.parametrize(("module", "fields", "discount", "tolerance"), SEARCHED, ids=name)
@sabotaged_by("tests.planning.search.table_model.TableModel.step", negated)
def test_searching_and_evaluating_in_turn_ends_at_the_optimal_values(
    module: Any, fields: dict[str, Any], discount: float, tolerance: float
) -> None:
    """Below a flat prior. With a negative discount the players take turns: the values are those of a game for two."""
    for seed in range(3):
        truth, state = env(seed, discount, 0.0 if module is gumbel_muzero else 0.25), state_of(module, fields)
        best, rows = action_values(truth).amax(1), torch.arange(STATES)
        state.network = TableModel(truth)
        for _ in range(6):
            chosen = torch.eye(ACTIONS).double()[module.act(state, rows)[0]]
            values = (chosen * action_values(truth, chosen)).sum(1)
            state.network.value = values.float()
        torch.testing.assert_close(values, best, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("module", "fields", "discount"), STAYING, ids=name)
@sabotaged_by("tests.planning.search.table_model.TableModel.step", negated)
def test_the_optimal_policy_and_values_stay(module: Any, fields: dict[str, Any], discount: float) -> None:
    """With a prior that is all but sure of the best action, so are the weights of the search, which are worth V*."""
    for seed in range(3):
        truth, state = env(seed, discount), state_of(module, fields)
        q = action_values(truth)
        sure = torch.full_like(truth["logits"], -20.0).masked_fill(truth["logits"] == -torch.inf, -torch.inf)
        truth["logits"], truth["value"] = sure.scatter(1, q.argmax(1, keepdim=True), 0.0), q.amax(1).float()
        state.network = TableModel(truth)
        action, extras, _ = module.act(state, torch.arange(STATES))
        assert torch.equal(action, q.argmax(1)) and torch.equal(extras["weights"].argmax(1), action)
        torch.testing.assert_close((extras["weights"] * q).sum(1), q.amax(1), atol=0.02, rtol=0)
        torch.testing.assert_close(extras["value"], truth["value"], atol=0.02, rtol=0)


@pytest.mark.parametrize("fields", GUMBEL, ids=name)
@sabotaged_by("tests.planning.search.table_model.TableModel.step", negated)
@sabotaged_by("foresight.planning.search.selection.completed_values", flip_sign)
def test_the_improved_policy_of_gumbel_muzero_improves_until_it_is_optimal(fields: dict[str, Any]) -> None:
    """π ← π', V ← V^π' in turn, 20 times: no state ever loses, and less than a twentieth is left of the way to V*."""
    for seed in range(3):
        truth, state = env(seed, 0.9), state_of(gumbel_muzero, fields)
        legal, best = truth["logits"] == 0, action_values(truth).amax(1)
        state.network = TableModel(truth)

        def values_of(policy: Tensor, truth: dict[str, Tensor] = truth) -> Tensor:
            return torch.where(policy > 0, policy * action_values(truth, policy), 0.0).sum(1)

        before = first = values_of(legal / legal.sum(1, keepdim=True).double())
        for _ in range(20):
            state.network.value = before.float()
            weights = gumbel_muzero.act(state, torch.arange(STATES), explore=True)[1]["weights"].double()
            state.network.logits = weights.clamp(min=1e-6).log().float().masked_fill(~legal, -torch.inf)
            after = values_of(weights / weights.sum(1, keepdim=True))
            assert (after >= before - 1e-4).all()
            before = after
        assert float((best - after).max()) < 0.05 * float((best - first).max())


def values_of(model: Chance, policy: Tensor | None) -> Tensor:
    """V `[S]` of a policy `[S]`, of the best one if None, by sweeps."""
    values = torch.zeros(len(model.value))
    for _ in range(300):
        q = (model.prob * (model.reward + model.gamma * values[model.next])).sum(-1)
        values = q.amax(1) if policy is None else q.gather(1, policy.unsqueeze(1)).squeeze(1)
    return values


@pytest.mark.parametrize(
    ("fields", "tolerance"), [({}, 0.2), ({"simulations": 100}, 0.2), ({"simulations": 200}, 1e-4)], ids=name
)
@sabotaged_by("tests.planning.search.test_mcts.Chance.step", negated)
def test_stochastic_muzero_finds_the_best_actions_on_average(fields: dict[str, Any], tolerance: float) -> None:
    """Outcomes by chance, a flat prior over actions; it takes two simulations to see a step ahead."""
    for seed in range(3):
        model, rows = Chance(seed), torch.arange(6)
        actions, outcomes = model.shape[1:]
        model.actions = actions  # type: ignore[attr-defined]
        state = state_of(stochastic_muzero, {"codes": outcomes, **fields}, actions, 6)
        state.network, model.value = model, torch.zeros(6)
        for _ in range(6):
            model.value = values_of(model, stochastic_muzero.act(state, rows)[0])
        torch.testing.assert_close(model.value, values_of(model, None), atol=tolerance, rtol=0)


# --- tic-tac-toe, solved


@pytest.fixture(scope="module")
def tic_tac_toe() -> Game:
    return games.make("tic_tac_toe")


@pytest.fixture(scope="module")
def best_play(tic_tac_toe: Game) -> Solved:
    return Solved(tic_tac_toe)


def test_the_solution_is_the_published_one(best_play: Solved) -> None:
    assert best_play.value[-1] == 0 and best_play.best[-1].all() and len(best_play.value) == 4520


@pytest.mark.parametrize("fields", [{}, {"rule": "puct"}, {"play_simulations": 400}], ids=name)
@sabotaged_by("foresight.planning.search.rules.Rules.step", negated)
def test_alphazero_with_true_values_plays_perfectly(
    fields: dict[str, Any], tic_tac_toe: Game, best_play: Solved
) -> None:
    state = alphazero.build(alphazero.Config(channels=2, blocks=1, **fields), tic_tac_toe)
    state.network, rows = best_play, some(best_play, 200)
    action, _, _ = alphazero.act(state, best_play.positions[rows])
    assert best_play.best[rows].gather(1, action.unsqueeze(1)).all()


@pytest.mark.parametrize("fields", [{"rule": "puct"}, {"rule": "gumbel", "value_scale": 1.0}], ids=name)
@sabotaged_by("foresight.planning.search.rules.Rules.step", negated)
def test_alphazero_with_a_blank_network_finds_the_value_of_the_game(
    fields: dict[str, Any], tic_tac_toe: Game, best_play: Solved
) -> None:
    class Blank(Solved):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.device, self.game = nn.Parameter(torch.zeros(())), tic_tac_toe

        def seen(self, planes: Tensor) -> Tensor:
            return torch.zeros(len(planes))

    state = alphazero.build(alphazero.Config(channels=2, blocks=1, **fields), tic_tac_toe)
    state.network, rows = Blank(), some(best_play, 40)
    action, extras, _ = alphazero.act(state, best_play.positions[rows], simulations=1500)
    assert best_play.best[rows].gather(1, action.unsqueeze(1)).all()
    if state.config.rule == "puct":  # the mean at a root of Gumbel's has in it all actions that were considered
        torch.testing.assert_close(extras["value"], best_play.value[rows], atol=0.3, rtol=0)


@pytest.mark.parametrize("td_lambda", [0.0, 0.5, 1.0])
@sabotaged_by("foresight.ops.returns.lambda_return", change("discount", torch.abs))
def test_alphazero_learns_true_values_from_true_values(td_lambda: float, tic_tac_toe: Game) -> None:
    """Games of a fixed policy: at every λ the target is its value. λ = 1 does not look at values, but at the end."""
    solved = Solved(tic_tac_toe, seed=1)
    state = alphazero.build(alphazero.Config(channels=2, blocks=1, td_lambda=td_lambda), tic_tac_toe)
    for start in some_starts(solved, 20).split(1):
        rows, position = [], start
        while not bool(tic_tac_toe.over(position)[0]):
            value = solved.of(position)
            action = choice(solved, position)
            moved = tic_tac_toe.step(position, action)
            rows.append(
                {
                    "obs": tic_tac_toe.planes(position)[0], "legal": tic_tac_toe.legal(position)[0],
                    "policy": torch.zeros(9), "value": value[0], "learned": torch.ones(()),
                    "mover": tic_tac_toe.mover(position)[0], "action": action[0], "reward": moved.reward[0],
                }
            )  # fmt: skip
            position = moved.position
        target = alphazero.FinishedGames.of(state, rows, 0.5).trajectory.extras["target"][:, 0]
        torch.testing.assert_close(target, torch.stack([row["value"] for row in rows]))


def choice(solved: Solved, positions: Tensor) -> Tensor:
    """What a fixed policy does."""
    same = (solved.positions.flatten(1).unsqueeze(0) == positions.flatten(1).unsqueeze(1)).all(-1)
    return solved.best[same.int().argmax(1)].int().argmax(1)


def some_starts(solved: Solved, count: int) -> Tensor:
    return solved.positions[torch.linspace(0, len(solved.value) - 1, count).long()]


# --- the value targets of MuZero's family


class Values:
    """What targets ask of a network: true values by number of the state."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.float()

    def root(self, obs: Tensor) -> tuple[None, Tensor, None]:
        return None, self.values[obs], None


FAMILY: list[tuple[ModuleType, dict[str, Any]]] = [
    (muzero, {}),
    (muzero, {"n_steps": 1, "gamma": 0.9}),
    (muzero, {"n_steps": 10, "unroll_steps": 3}),
    (gumbel_muzero, {}),
    (gumbel_muzero, {"n_steps": 3, "gamma": 0.5}),
    (gumbel_muzero, {"n_steps": 1}),
    (efficientzero, {}),
    (efficientzero, {"gamma": 0.9, "n_steps": 7}),
    (efficientzero, {"n_steps": 1}),
    (sampled_muzero, {}),
    (sampled_muzero, {"n_steps": 2, "gamma": 0.9}),
    (sampled_muzero, {"n_steps": 10}),
    (stochastic_muzero, {}),
    (stochastic_muzero, {"n_steps": 2, "gamma": 0.9}),
    (stochastic_muzero, {"n_steps": 10}),
]


@pytest.mark.parametrize(("module", "fields"), FAMILY, ids=name)
@sabotaged_by(
    "foresight.training.muzero_targets.targets", change("batch", lambda b: b.replace(discount=1 - 0 * b.discount))
)
@sabotaged_by("foresight.ops.returns.n_step_return", change("next_value", lambda v: 0.7 * v))
def test_true_values_give_true_values(module: Any, fields: dict[str, Any]) -> None:
    """The mean target of each state, in each of the K + 1 rows, is V^π: with ends, time limits and any n."""
    mdp = mdps.random_mdp(0, ends=0.2)
    policy = mdps.random_policy(mdp, 0)
    state = state_of(module, {"reanalyze": 0.0, **fields}, mdp.actions, mdp.states)
    config = state.config
    exact = mdps.policy_values(mdp, policy, config.gamma).float()
    state.target = Values(exact)

    env = mdp.sample(20_000, time_limit=4)
    obs, rows = env.reset(0), []
    g = torch.Generator().manual_seed(0)
    for _ in range(config.unroll_steps + config.n_steps):
        action = torch.multinomial(policy[obs], 1, generator=g).squeeze(1)
        seen = env.step(action)
        extras = {"next_obs": seen.final_obs, "weights": torch.zeros(len(obs), 2), "actions": action, "taken": action}
        rows.append(
            {
                "obs": obs, "action": action, "reward": seen.reward, "discount": seen.discount, "cut": seen.cut,
                "mask": seen.mask, "extras": {**extras, "born": torch.arange(len(obs)) % 7 - 7},
            }
        )  # fmt: skip
        obs = seen.obs
    batch = Trajectory(**trees.stack(rows))
    if module is efficientzero:  # pieces of all ages
        total = (config.steps - config.training.learning_starts) / config.training.train_every
        batch.extras["born"] = (batch.extras["born"] * total / 4).long()
    alive, known, value, *_ = module.targets(state, batch)
    assert (value[known > alive] == 0).all() and (known > alive).any()
    for k in range(config.unroll_steps + 1):
        for s in range(mdp.states):
            there = (alive[:, k] > 0) & (batch.obs[:, k] == s)
            if there.sum() > 2_000:
                found = value[there, k].double()
                error = found.std() / there.sum() ** 0.5
                assert abs(found.mean() - exact[s]) < 4 * error + 1e-5, (k, s)


@pytest.mark.parametrize("module", [muzero, gumbel_muzero], ids=name)
@pytest.mark.parametrize("fields", [{}, {"n_steps": 1, "gamma": 0.9}, {"n_steps": 9, "gamma": 1.0}], ids=name)
@sabotaged_by("foresight.ops.returns.n_step_return", change("discount", torch.abs), swap("discount", "cut"))
def test_true_values_of_a_game_for_two_give_true_values(module: Any, fields: dict[str, Any], tic_tac_toe: Game) -> None:
    """Both sides play a fixed policy, so that nothing is random and each target is the value exactly."""
    config = build_config(module.Config, **{"hidden": (4,), "latent_size": 4, "reanalyze": 0.0, **fields})
    state, solved = module.build(config, tic_tac_toe), Solved(tic_tac_toe, gamma=config.gamma, seed=2)
    state.target = solved
    env = selfplay.SelfPlay(tic_tac_toe, 100)
    env.reset(0)
    env.position = some_starts(solved, 100).clone()
    obs, rows, true = selfplay.observe(tic_tac_toe, env.position), [], []
    for _ in range(config.unroll_steps + config.n_steps):
        true.append(solved.of(env.position))
        seen = env.step(choice(solved, env.position))
        extras = {"next_obs": seen.final_obs, "weights": torch.zeros(100, 9)}
        rows.append(
            {
                "obs": obs, "action": torch.zeros(100), "reward": seen.reward, "discount": seen.discount,
                "cut": seen.cut, "mask": seen.mask, "extras": extras,
            }
        )  # fmt: skip
        obs = seen.obs
    alive, _, value, _ = module.targets(state, Trajectory(**trees.stack(rows)))
    expected = torch.stack(true, 1)[:, : config.unroll_steps + 1]
    assert expected.unique().numel() > 2
    torch.testing.assert_close(value, expected * alive, atol=1e-5, rtol=0)
    assert state.network.discount == -config.gamma and muzero_targets.spaces_of(tic_tac_toe)[1] is tic_tac_toe

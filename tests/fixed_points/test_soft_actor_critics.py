"""SAC and discrete SAC: what their critics settle at, and soft values by linear solves.

The entropy counts at every state that is passed, also within n-step targets; α is held constant, and in some tests the
policy too. Critics begin wrong by 0.3, with a rate that goes to 0: from far away most updates would only walk.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pytest
import torch
from torch import Tensor

from foresight.algorithms.policy import sac, sac_discrete
from foresight.envs.base import Feedback, Spaces
from foresight.training import optim
from tests.fixed_points import mdps
from tests.sabotage import change, sabotaged_by

GAMMA, ALPHA = 0.9, 0.2
# Many environments, so that few samples are no source of error; large batches and fast targets need fewer updates.
COMMON: dict[str, Any] = {
    "steps": 10**9, "num_envs": 512, "rollout_steps": 8, "learning_starts": 0, "train_every": 1024, "batch_size": 2048,
    "learning_rate": 0.02, "tau": 0.5, "hidden": (), "gamma": GAMMA, "entropy_temperature": ALPHA,
    "learn_temperature": False,
}  # fmt: skip


def hold(state: Any, weight: Tensor, bias: Tensor) -> None:
    """Make a policy without hidden layers this one, from which nothing moves it."""
    with torch.no_grad():
        own_weight, own_bias = state.actor.mlp.layers()[0][-1]
        own_weight.copy_(weight)
        own_bias.copy_(bias)
    state.actor_optimizer.param_groups[0]["lr"] = 0.0


WRONG, FAR = 0.3, 0.35  # where tables begin, and a bound that none of them leaves on its way


def set_out(state: Any, table: Tensor) -> None:
    """Make critics without hidden layers this one, `[actions or outputs, inputs]`."""
    for layers in state.critics.mlp.layers():
        layers[-1][0].copy_(table)
        layers[-1][1].zero_()
    optim.track(state.target, state.critics)


def beside(exact: Tensor) -> Tensor:
    """`exact`, wrong by ±WRONG in turn."""
    return mdps.beside(exact, WRONG).float()


def walk(module: Any, state: Any, env: Any, obs: Any, first: int, last: int, rounds: int) -> Iterator[Any]:
    """Act and learn in some of so many rounds, with a rate that falls to 0; yields the next observation."""
    for i in range(first, last):
        for optimizer in (state.critic_optimizer, state.actor_optimizer):
            group = optimizer.param_groups[0]
            group["lr"] = (1 - i / rounds) * (group["lr"] > 0) * state.config.learning_rate
        unroll, obs, _ = module.rollout(state, env, obs)
        module.learn(state, unroll)
        yield obs


@functools.cache
def halfway(module: Any, begin: Callable[..., tuple[Any, Any]], case: tuple[Any, ...], rounds: int) -> tuple[Any, ...]:
    """State, environment and observation of what `begin(*case)` made, after two fifths of so many rounds."""
    state, env = begin(*case)
    obs = env.reset(0)
    *_, obs = walk(module, state, env, obs, 0, rounds * 2 // 5, rounds)
    return state, env, obs


def settled(
    module: Any, begin: Callable[..., tuple[Any, Any]], case: tuple[Any, ...], table: Callable[..., Tensor],
    exact: Tensor, rounds: int = 60,
) -> Tensor:  # fmt: skip
    """The mean of a table over the last two fifths of the rounds. In the last three fifths it stays near `exact`.

    A twin begins where the sound test was by then, and must leave the solution.
    """
    state, env, obs = copy.deepcopy(halfway(module, begin, case, rounds))
    seen, real = [], exact.isfinite()
    for _ in walk(module, state, env, obs, rounds * 2 // 5, rounds, rounds):
        with torch.no_grad():
            seen.append(table(state).double())
        torch.testing.assert_close(seen[-1][real], exact[real], atol=FAR, rtol=0)
    return torch.stack(seen[len(seen) // 3 :]).mean(0)


def table_of(mdp: Any, state: Any) -> Tensor:
    features = state.critics.trunk(mdps.observations(mdp))[0]
    return torch.stack(list(state.critics(features))).mean(0)


def unrewarded_mdp() -> Any:
    mdp = mdps.random_mdp(0, states=1, actions=4, ends=0.0)
    return dataclasses.replace(mdp, reward=torch.zeros(1, 4, dtype=torch.float64))


WORTH = 2.495


def unrewarded(n: int) -> tuple[Any, Any]:
    """Nothing is drawn that matters, so that small batches do."""
    env = mdps.Tabled(unrewarded_mdp(), 16)
    fields = {"num_envs": 16, "batch_size": 32, "train_every": 32, "tau": 1.0}
    state = sac_discrete.build(sac_discrete.Config(**{**COMMON, **fields}, n_steps=n), env.spaces)
    set_out(state, torch.full((4, 1), WORTH - WRONG))
    return state, env


@sabotaged_by("foresight.ops.value.soft_reward", change("weight", torch.zeros_like))
def test_entropy_alone_is_worth_the_same_at_every_n() -> None:
    """r = 0, 4 actions, uniform: Q = γ α log 4 / (1 - γ) = 2.495."""
    for n in (3, 1):
        exact = torch.full((1, 4), WORTH).double()
        found = settled(sac_discrete, unrewarded, (n,), functools.partial(table_of, unrewarded_mdp()), exact, 35)
        assert found.mean().item() == pytest.approx(WORTH, abs=0.03), n


@sabotaged_by("foresight.ops.value.soft_reward", change("alpha", torch.zeros_like))
@pytest.mark.parametrize(("n", "forbidden"), [(3, 1), (2, 0)])
def test_discrete_sac_settles_at_the_soft_values_of_its_policy(n: int, forbidden: int) -> None:
    _held(n, forbidden)


def test_discrete_sac_settles_at_the_soft_values_of_its_policy_with_one_reward() -> None:
    _held(1, 1)


def a_policy(mdp: Any) -> Tensor:
    found: Tensor = 0.5 * mdps.random_policy(mdp, 1) + 0.5 * mdp.uniform()
    return found


def worth(mdp: Any) -> Tensor:
    return mdps.action_values(mdp, mdps.soft_policy_values(mdp, a_policy(mdp), GAMMA, ALPHA), GAMMA)


def held(n: int, forbidden: int) -> tuple[Any, Any]:
    mdp = mdps.random_mdp(1, forbidden=forbidden)
    env = mdps.Tabled(mdp, COMMON["num_envs"], time_limit=7)
    state = sac_discrete.build(sac_discrete.Config(**COMMON, n_steps=n), env.spaces)
    hold(state, a_policy(mdp).clamp(min=1e-9).log().t(), torch.zeros(mdp.actions))
    set_out(state, beside(worth(mdp)).t())
    return state, env


def _held(n: int, forbidden: int) -> None:
    mdp = mdps.random_mdp(1, forbidden=forbidden)
    exact, real = worth(mdp), mdps.allowed(mdp)
    found = settled(sac_discrete, held, (n, forbidden), functools.partial(table_of, mdp), exact)
    torch.testing.assert_close(found[real], exact[real], atol=0.06, rtol=0)


HOT = 0.5


def costly(forbidden: int) -> Any:
    """With rewards so low that values are near 0: where entropy is worth this much, an end is noise of their size."""
    mdp = mdps.random_mdp(1, forbidden=forbidden)
    return dataclasses.replace(mdp, reward=mdp.reward - 0.7)


def best(mdp: Any) -> Tensor:
    return mdps.action_values(mdp, mdps.soft_optimal_values(mdp, GAMMA, HOT), GAMMA)


def free(forbidden: int) -> tuple[Any, Any]:
    mdp = costly(forbidden)
    env = mdps.Tabled(mdp, COMMON["num_envs"], time_limit=7)
    state = sac_discrete.build(sac_discrete.Config(**{**COMMON, "entropy_temperature": HOT}), env.spaces)
    near = beside(best(mdp)).t()
    set_out(state, near)
    with torch.no_grad():
        state.actor.mlp.last_layer(0)[0].copy_(0.5 * near / HOT)
    return state, env


@sabotaged_by("foresight.nets.outputs.Categorical.entropy", lambda f: lambda self: 0.5 * f(self))
@pytest.mark.parametrize("forbidden", [0, 1])
def test_discrete_sac_finds_the_soft_optimal_values(forbidden: int) -> None:
    """At an α so high that every action is taken often."""
    mdp = costly(forbidden)
    shown, exact, real = mdps.observations(mdp), best(mdp), mdps.allowed(mdp)
    chosen = torch.softmax(exact / HOT, 1)

    def both(state: Any) -> Tensor:
        policy = state.actor(state.critics.trunk(shown)[0], shown).mean()
        return torch.stack([table_of(mdp, state), policy])

    found, policy = settled(sac_discrete, free, (forbidden,), both, torch.stack([exact, chosen]))
    torch.testing.assert_close(found[real], exact[real], atol=0.04, rtol=0)
    torch.testing.assert_close(policy, chosen, atol=0.03, rtol=0)


# ---- the temperature where few actions are allowed


class Masked:
    """One state, 6 actions of which two are allowed, and one of these earns 1; every step ends an episode."""

    name = "Masked"

    def __init__(self, num_envs: int = 8) -> None:
        self.num_envs = num_envs
        self.spaces = Spaces(
            gs.Dict({"x": gs.Box(0, 1, (1,), np.float32), "action_mask": gs.MultiBinary(6)}), gs.Discrete(6)
        )

    def reset(self, seed: int) -> Any:
        mask = torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.int8).expand(self.num_envs, 6)
        return {"x": torch.ones(self.num_envs, 1), "action_mask": mask}

    def step(self, action: Tensor) -> Feedback:
        ones, obs = torch.ones(self.num_envs), self.reset(0)
        return Feedback(obs, (action == 1).float(), 0 * ones, ones, ones, obs, {})


@sabotaged_by("foresight.nets.critics.CategoricalActor.uniform", lambda f: lambda self, like: _all_six(like))
def test_the_target_entropy_is_a_share_of_what_the_mask_leaves() -> None:
    """α settles where the entropy is 0.89 log 2; 0.89 log 6 is beyond reach, and α would grow for ever."""
    env = Masked()
    config = sac_discrete.Config(
        steps=1_600, num_envs=8, learning_starts=16, train_every=8, batch_size=64, learning_rate=0.03, hidden=(),
        entropy_temperature=1.0,
    )  # fmt: skip
    *_, (_, metrics, _) = sac_discrete.train(config, env)
    assert metrics["entropy"] == pytest.approx(0.89 * np.log(2), abs=0.03)
    assert metrics["alpha"] < 1.5


def _all_six(like: Any) -> Any:
    return type(like)(torch.zeros_like(like.logits))


# ---- SAC: a value that is linear in state and action


class Linear:
    """Four states that follow each other at random; r = g(s) + c · a, so that Q is linear in one-hot s and in a."""

    name, states, slope, limit = "Linear", 4, 0.5, 6

    def __init__(self, num_envs: int = COMMON["num_envs"]) -> None:
        self.num_envs = num_envs
        rng = np.random.default_rng(0)
        self.chain = torch.from_numpy(rng.dirichlet(np.ones(self.states), self.states))
        self.base = torch.from_numpy(rng.uniform(-1, 1, self.states))
        self.spaces = Spaces(gs.Box(0, 1, (self.states,), np.float32), gs.Box(-1, 1, (1,), np.float32))

    def reset(self, seed: int) -> Tensor:
        self._generator = torch.Generator().manual_seed(seed)
        self._state = torch.arange(self.num_envs) % self.states
        self._time = torch.arange(self.num_envs) % self.limit
        return torch.eye(self.states)[self._state]

    def step(self, action: Tensor) -> Feedback:
        reward = (self.base[self._state] + self.slope * action[:, 0]).float()
        self._state = torch.multinomial(self.chain[self._state], 1, generator=self._generator)[:, 0]
        self._time = (self._time + 1) % self.limit
        cut, final = (self._time == 0).float(), torch.eye(self.states)[self._state]
        self._state = torch.where(cut > 0, 0, self._state)
        ones, obs = torch.ones(self.num_envs), torch.eye(self.states)[self._state]
        return Feedback(obs, reward, ones, cut, ones, final, {})


def ahead(state: Any, env: Linear) -> Tensor:
    """g(s) + γ E V(s') `[S]`, of which Q is the sum with c · a."""
    with torch.no_grad():
        output = state.actor(torch.eye(4))
        earned = env.base + env.slope * output.mean()[:, 0].double() + ALPHA * output.entropy().double()
    values = torch.linalg.solve(torch.eye(4).double() - GAMMA * env.chain, earned)
    return env.base + GAMMA * env.chain @ values


def linear(n: int, compiled: bool) -> tuple[Any, Any]:
    env = Linear()
    state = sac.build(sac.Config(**COMMON, n_steps=n), env.spaces)
    state.critics.mlp._compiled = compiled
    hold(state, torch.tensor([[0.5, -0.5, 0.0, 1.0], [-1.0, 0.0, -0.5, 0.3]]), torch.zeros(2))  # means and spreads
    set_out(state, beside(torch.cat([ahead(state, env), torch.tensor([env.slope]).double()]).unsqueeze(0)))
    return state, env


@sabotaged_by("foresight.nets.outputs.TanhNormal.sample_logp", lambda f: lambda *a: (f(*a)[0], 0.5 * f(*a)[1]))
@pytest.mark.parametrize("compiled", [True, False])
def test_sac_settles_at_the_soft_values_of_its_policy(compiled: bool) -> None:
    _settles(3, compiled)


@sabotaged_by("foresight.ops.fused.soft.soft_step", change("alpha", lambda alpha: 0.5 * alpha))
def test_sac_settles_at_the_soft_values_of_its_policy_with_one_reward() -> None:
    _settles(1, True)


def _settles(n: int, compiled: bool) -> None:
    state, env = linear(n, compiled)
    actions = torch.tensor([[-0.5], [0.5]])
    rows = torch.cat([torch.eye(4).repeat_interleave(2, 0), actions.repeat(4, 1)], 1)

    def table(trained: Any) -> Tensor:
        return torch.cat(list(trained.critics(rows[:, :4], rows[:, 4:])), 1).mean(1)

    exact = ahead(state, env).repeat_interleave(2) + env.slope * actions.repeat(4, 1)[:, 0].double()
    found = settled(sac, linear, (n, compiled), table, exact)
    torch.testing.assert_close(found, exact, atol=0.06, rtol=0)

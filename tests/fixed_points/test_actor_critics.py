"""Policy gradients with the policy held still: what their critics settle at, and V^π or Q^π from a linear solve.

Critics are tables (one-hot observations, no hidden layer) that begin wrong by 0.3: from far away most updates would
only walk. Episodes end at random and are cut by a time limit of 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foresight.algorithms.policy import a2c, impala, off_policy_ac, ppg, ppo, qac, reinforce, trpo
from foresight.nets.actor_critic import SharedTrunk
from foresight.ops import returns as estimators
from tests.fixed_points import mdps
from tests.sabotage import change, sabotaged_by

GAMMA, NUM_ENVS = 0.9, 256
WRONG, FAR = 0.3, 0.45  # where tables begin, and a bound that none of them leaves later
CLOSE = 0.05  # of values that span about 3; noise leaves 0.01 to 0.035


def hold(network: Any, policy: Tensor) -> None:
    """Make the policy of a network over one-hot observations this table."""
    body = getattr(network.body, "policy", network.body)
    body = getattr(body, "mlp", body)
    if isinstance(body, SharedTrunk):
        weight, bias = body.last[0].weight, body.last[0].bias
    else:
        weight, bias = body.layers()[0][-1]
    with torch.no_grad():
        weight.copy_(policy.clamp(min=1e-9).log().t())
        bias.zero_()


@torch.no_grad()
def set_out(network: Any, exact: Tensor) -> None:
    """Make the critic over one-hot observations `exact` (`[S]` or `[S, A]`), wrong by ±WRONG in turn."""
    weight, bias = network.value_layer()
    table = exact.unsqueeze(1) if exact.dim() == 1 else exact
    weight.copy_(mdps.beside(table, WRONG).t())
    bias.zero_()


@torch.no_grad()
def settled(
    rounds: int, step: Callable[[], None], table: Callable[[], Tensor], exact: Tensor, skipped: float = 1 / 3
) -> Tensor:
    """The mean of a table over so many steps but the first ones: it takes the noise of a constant rate away."""
    seen = []
    for i in range(rounds):
        with torch.enable_grad():
            step()
        if i >= skipped * rounds:
            seen.append(table().double())
            compare(seen[-1], exact, FAR)
    return torch.stack(seen).mean(0)


def critic(module: Any, config: Any, mdp: Any, policy: Tensor, rounds: int, exact: Tensor, **options: Any) -> Tensor:
    """What `module` learns that `policy` is worth."""
    env = mdps.Tabled(mdp, config.num_envs, time_limit=7)
    config = dataclasses.replace(config, gamma=GAMMA, steps=10**9)
    state, held = module.build(config, env.spaces), [env.reset(0)]
    set_out(state.network, exact)

    def step() -> None:
        hold(state.network, policy)
        batch, held[0], *_ = module.rollout(state, env, held[0])
        (module.learn if hasattr(module, "learn") else module.update)(state, batch)

    shown = mdps.observations(mdp)
    values = (lambda: qac.q_values(state.network, shown)) if module is qac else lambda: state.network.value(shown).value
    return settled(rounds, step, values, exact, **options)


def compare(found: Tensor, exact: Tensor, within: float = CLOSE) -> None:
    real = exact.isfinite()
    torch.testing.assert_close(found[real], exact[real], atol=within, rtol=0)


ON_POLICY = {"num_envs": NUM_ENVS, "rollout_steps": 8, "hidden": ()}
SETTINGS = {
    "a2c": (
        a2c,
        {"learning_rate": 0.05, "rollout_steps": 5, "max_grad_norm": 1e9},
        ({"gae_lambda": 0.5}, {"normalize_advantage": True, "gae_lambda": 0.0}),
        45,
    ),
    "ppo": (
        ppo,
        {"learning_rate": 0.02, "anneal_lr": False},
        ({"gae_lambda": 0.0}, {"clip_value": 0.2}),
        40,
    ),
    "ppg": (
        ppg,
        {"learning_rate": 0.04, "normalize_reward": False, "policy_iterations": 10**6},
        ({"gae_lambda": 0.0}, {"value_epochs": 2, "gae_lambda": 1.0}),
        30,
    ),
    "trpo": (
        trpo,
        {"value_learning_rate": 0.02, "cg_iterations": 1, "value_epochs": 2, "value_batch": 256},
        ({"gae_lambda": 1.0}, {"gae_lambda": 0.0}),
        30,
    ),
    "impala": (
        impala,
        {"learning_rate": 0.05, "anneal_lr": False, "max_grad_norm": 1e9},
        ({"trace_lambda": 0.5}, {"optimizer": "adam", "optimizer_epsilon": 1e-8, "learning_rate": 0.3}),
        60,
    ),
    "off_policy_ac": (
        off_policy_ac,
        {"value_learning_rate": 0.1, "replay_segments": 4},
        ({"epsilon": 0.5}, {"trace_lambda": 0.0, "epsilon": 0.5}, {"epsilon": 1.0, "max_ratio": 10.0}),
        45,
    ),
}


def _settles(name: str, options: dict[str, Any], forbidden: int) -> None:
    module, common, _, rounds = SETTINGS[name]
    mdp = mdps.random_mdp(1 + forbidden, forbidden=forbidden)
    policy = mdps.random_policy(mdp, 1)
    exact = mdps.policy_values(mdp, policy, GAMMA)
    compare(critic(module, module.Config(**{**ON_POLICY, **common, **options}), mdp, policy, rounds, exact), exact)


def _a_limit_ends(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda reward, discount, cut, *rest, **more: original(reward, discount * (1 - cut), cut, *rest, **more)


@sabotaged_by("foresight.ops.returns.gae", _a_limit_ends)
@pytest.mark.parametrize("name", ["a2c", "ppo", "ppg", "trpo"])
def test_the_critic_settles_at_the_value_of_the_policy(name: str) -> None:
    _settles(name, {}, 0)


@sabotaged_by("foresight.ops.returns.vtrace", _a_limit_ends)
@pytest.mark.parametrize("name", ["impala", "off_policy_ac"])
def test_the_critic_settles_at_the_value_of_the_policy_with_vtrace(name: str) -> None:
    _settles(name, {}, 0)


@pytest.mark.parametrize(
    ("name", "options", "forbidden"),
    [
        pytest.param(name, options, i % 2, id=f"{name}-{i}")
        for name, (_, _, others, _) in SETTINGS.items()
        for i, options in enumerate(others)
    ],
)
def test_the_critic_settles_at_other_settings_and_with_masks(
    name: str, options: dict[str, Any], forbidden: int
) -> None:
    _settles(name, options, 1 - forbidden)


@sabotaged_by("foresight.ops.returns.lambda_return", _a_limit_ends)
@pytest.mark.parametrize(("options", "forbidden"), [({}, 0), ({"trace_lambda": 0.9}, 1), ({"all_actions": True}, 0)])
def test_qac_settles_at_the_action_values_of_the_policy(options: dict[str, Any], forbidden: int) -> None:
    mdp = mdps.random_mdp(1, forbidden=forbidden)
    policy = 0.5 * mdps.random_policy(mdp, 1) + 0.5 * mdp.uniform()
    config = qac.Config(**ON_POLICY, value_learning_rate=0.2, **options)
    exact = mdps.action_values(mdp, mdps.policy_values(mdp, policy, GAMMA), GAMMA)
    compare(critic(qac, config, mdp, policy, 80, exact, skipped=0.5), exact)  # Adam swings at first


@pytest.mark.parametrize(
    ("options", "forbidden"),
    [({}, 0), ({"normalize_advantage": True}, 1), ({"value_steps": 2, "value_learning_rate": 0.05}, 0)],
)
def test_the_baseline_of_reinforce_settles_at_the_value_of_the_policy(options: dict[str, Any], forbidden: int) -> None:
    mdp = mdps.random_mdp(1, forbidden=forbidden)
    policy, held = (
        mdps.random_policy(mdp, 1),
        reinforce.Config(num_envs=NUM_ENVS, hidden=(), gamma=GAMMA, max_episode_steps=7, **options),
    )
    env = mdps.Tabled(mdp, NUM_ENVS)
    state, exact = reinforce.build(held, env.spaces), mdps.policy_values(mdp, policy, GAMMA)
    set_out(state.network, exact)

    def step() -> None:
        hold(state.network, policy)
        reinforce.update(state, reinforce.rollout(state, env))

    compare(settled(75, step, lambda: state.network.value(mdps.observations(mdp)).value, exact), exact)


# ---- another behavior: V-trace's fixed point is the value of the policy ∝ min(ρ̄ μ, π)


def between(policy: Tensor, behavior: Tensor, clip_rho: float) -> Tensor:
    """Espeholt et al. 2018, eq. 2."""
    kept = torch.minimum(clip_rho * behavior, policy)
    return kept / kept.sum(1, keepdim=True)


@sabotaged_by("foresight.ops.returns.vtrace", change("ratio", torch.ones_like))
@pytest.mark.parametrize(
    "options", [{}, {"clip_rho": 10.0}, {"clip_rho": 10.0, "clip_c": 2.0, "trace_lambda": 0.8}], ids=["1", "10", "c"]
)
def test_impala_settles_at_the_fixed_point_of_vtrace_for_any_behavior(options: dict[str, Any]) -> None:
    mdp = mdps.random_mdp(1)
    policy, behavior = mdps.random_policy(mdp, 1), mdp.uniform()
    config = impala.Config(**{**ON_POLICY, **SETTINGS["impala"][1], **options}, gamma=GAMMA, steps=10**9)
    env = mdps.Tabled(mdp, NUM_ENVS, time_limit=7)
    state, held = impala.build(config, env.spaces), [env.reset(0)]
    exact = mdps.policy_values(mdp, between(policy, behavior, config.clip_rho), GAMMA)
    set_out(state.network, exact)

    def step() -> None:
        hold(state.network, behavior)
        unroll, held[0], _ = impala.rollout(state, env, held[0])
        hold(state.network, policy)
        impala.update(state, unroll)

    compare(settled(45, step, lambda: state.network.value(mdps.observations(mdp)).value, exact), exact)


@sabotaged_by("foresight.ops.returns.vtrace", change("clip_rho", lambda r: 1.5 * r))
@pytest.mark.parametrize("max_ratio", [1.0, 1.5])
def test_off_policy_ac_settles_at_the_fixed_point_of_its_bound(max_ratio: float) -> None:
    mdp = mdps.random_mdp(1)
    policy = mdps.random_policy(mdp, 1)
    config = off_policy_ac.Config(**ON_POLICY, **SETTINGS["off_policy_ac"][1], epsilon=1.0, max_ratio=max_ratio)
    exact = mdps.policy_values(mdp, between(policy, mdp.uniform(), max_ratio), GAMMA)
    compare(critic(off_policy_ac, config, mdp, policy, 50, exact), exact)


@sabotaged_by("foresight.ops.returns.vtrace", lambda f: _as_retrace)
def test_off_policy_ac_in_one_state_is_worth_nine() -> None:
    """π = (.9, .1), uniform behavior, γ = λ = .9, r = (1, 0), no end: V = .9 / (1 - .9)."""
    one = mdps.random_mdp(0, states=1, actions=2, ends=0.0)
    mdp = dataclasses.replace(one, reward=torch.tensor([[1.0, 0.0]]).double())
    config = off_policy_ac.Config(**ON_POLICY, epsilon=1.0, value_learning_rate=0.3, replay_segments=4)
    exact = torch.tensor([9.0]).double()
    compare(critic(off_policy_ac, config, mdp, torch.tensor([[0.9, 0.1]]), 45, exact), exact, within=0.1)


def _as_retrace(
    reward: Tensor, discount: Tensor, cut: Tensor, value: Tensor, next_value: Tensor, ratio: Tensor, lam: float,
    clip_rho: float, clip_pg: float, mask: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Traces that are made for δ of Q(s, a): what a row's own action was is not weighed."""
    target = estimators.retrace(reward, discount, cut, value, next_value, ratio, lam, mask)
    target = value + ratio.clamp(max=clip_rho) * (target - value)
    return target - value, target

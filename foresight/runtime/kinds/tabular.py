"""Tabular: explicit MDPs, whose policies are evaluated exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foresight.errors import UserError
from foresight.runtime.kinds.kind import Kind, Profiled, make_env

if TYPE_CHECKING:
    from torch import Tensor

    from foresight.envs.tabular.mdp import MDP
    from foresight.runtime.agent import Agent
    from foresight.runtime.catalog import Algorithm, State
    from foresight.runtime.evaluation.evaluate import Evaluation
    from foresight.runtime.monitoring.profile import Profile


def _profile(module: Algorithm, env: MDP, times: Profile) -> Profiled[MDP]:
    from foresight.runtime.monitoring import profile

    return profile.time_updates(module, times), env, "loop"


def _evaluate(module: Algorithm, state: State, env: MDP, episodes: int | None, seed: int) -> Evaluation:
    import torch

    from foresight.runtime import machine
    from foresight.runtime.evaluation import evaluate

    if hasattr(module, "measure"):
        return evaluate.from_measure(module, state, env)
    env = env.to(machine.device_of(state))
    policy, _, _ = module.act(state, torch.arange(env.states, device=env.reward.device), explore=False)
    return _value(env, policy, state.config.gamma)


def _baseline(module: Algorithm, state: State, env: MDP, episodes: int | None, seed: int) -> Evaluation:
    from foresight.runtime.evaluation import evaluate

    if hasattr(module, "measure"):
        return evaluate.evaluate(module, state, env, episodes, seed)
    return _value(env, env.uniform(), state.config.gamma)


def _value(env: MDP, policy: Tensor, gamma: float) -> Evaluation:
    """Exact, by the Bellman equation of the policy (`[S]` or `[S, A]`): nothing is sampled, so n is 1."""
    from foresight.planning.dynamic import bellman
    from foresight.runtime.evaluation.evaluate import Evaluation

    try:
        figures = bellman.evaluate(env, policy, gamma)
    except UserError:  # gamma is 1 and the policy (a random one, or an early one) may never end an episode
        horizon = env.time_limit or 10 * env.states
        figures = {"value": bellman.expected_return(env, policy, gamma, horizon)}
    value = figures.pop("value")
    return Evaluation("value", value, 0.0, 1, (value,), figures)


def _act(agent: Agent, obs: Any, explore: bool) -> Any:
    import torch

    from foresight.runtime.agent import choices  # late: it imports this module

    states = torch.as_tensor(choices(obs, 0, agent.env.states - 1), dtype=torch.int64)
    return agent.act_on(states.reshape(-1), states.ndim == 0, explore)


KIND = Kind(
    episodes=1,
    gpu=False,
    scored_by=("gamma", "policy"),
    training_env=make_env,
    single_env=lambda settings, render: make_env(settings),
    profile=_profile,
    evaluate=_evaluate,
    baseline=_baseline,
    act=_act,
    pictures=("train",),
)

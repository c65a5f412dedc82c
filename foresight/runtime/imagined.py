"""`imagined:RUN`: the world model that a run has learned, as an environment to train and to play in."""

from __future__ import annotations

import dataclasses
import functools
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foresight.errors import UserError, resume_command
from foresight.runtime import catalog

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from foresight.runtime.agent import Agent
    from foresight.runtime.catalog import State
    from foresight.training.imagined_env import ImaginedEnv

PREFIX = "imagined:"
HORIZON = 50  # steps of an episode inside, unless `horizon` is given


def run_of(name: str) -> Path | None:
    """The run directory that `imagined:RUN` names, or None for another name."""
    return Path(name.removeprefix(PREFIX)).expanduser() if name.startswith(PREFIX) else None


def has_model(state: State) -> bool:
    """Whether `state` holds a world model that predicts step by step."""
    return hasattr(getattr(state, "model", None), "advance")


@functools.cache
def learns_model(algorithm: str) -> bool:
    """Whether the State of an algorithm holds a world model that predicts step by step. False for a broken file."""
    try:
        if catalog.entry(algorithm).kind != "control":
            return False  # and no language model is imported
        return hasattr(typing.get_type_hints(catalog.module(algorithm).State).get("model"), "advance")
    except Exception:  # whatever a user's file raises
        return False


def require_model(agent: Agent) -> Any:
    """The world model of an agent. Raises UserError if its algorithm learns none that predicts step by step."""
    if not has_model(agent.state):
        raise UserError(
            f"{agent.path} is a run of {agent.settings.algorithm}, which learns no world model that predicts "
            "step by step. Give a run of dreamer, storm or planet; open-loop errors are drawn of tdmpc2 and lewm, too."
        )
    return agent.state.model


def gamma_of(state: State) -> float:
    """The γ that the continuation of the state's world model includes; 1 without."""
    return float(state.config.gamma) if state.model.discounted else 1.0


def make(run: Path, num_envs: int, horizon: int = HORIZON, **options: Any) -> ImaginedEnv:
    """The environment to train in: episodes start anywhere in the run's replay and last at most `horizon` steps.

    Raises UserError for other options, a run without a world model, and a replay that is too small.
    """
    if options:
        raise UserError(f"{PREFIX}{run} has the option horizon, not {', '.join(options)}.")
    if not isinstance(horizon, int) or horizon < 1:
        raise UserError(f"horizon must be a whole number of at least 1, not {horizon!r}.")
    from foresight.runtime import run as runner

    agent = runner.load(run)
    try:
        return inside(agent, num_envs, horizon, first=False)
    finally:
        agent.close()


def evaluation(run: Path, num_envs: int) -> ImaginedEnv:
    """The environment to evaluate in: whole episodes, from their beginning, inside and (`outside`) in the true one."""
    from foresight.runtime import environments
    from foresight.runtime import run as runner

    agent = runner.load(run)
    try:
        outside = environments.evaluation(dataclasses.replace(agent.settings, episodes=num_envs), agent.env)
        env = inside(agent, num_envs, None, first=True)
    finally:
        agent.close()
    env.outside = outside
    return env


def outside(run: Path, render: bool) -> Any:
    """One of the environments that the run was trained in."""
    from foresight.runtime import environments
    from foresight.runtime.config.settings import Settings

    return environments.single(Settings.read(run), render)


def inside(agent: Agent, num_envs: int, horizon: int | None, first: bool, seed: int = 0) -> ImaginedEnv:
    """The agent's world model as an environment.

    Episodes start at the beginnings of episodes in the replay (`first`), or anywhere in it. `horizon` None is the
    length of the longest episode there.
    """
    import torch

    from foresight.runtime import machine
    from foresight.training import imagined_env

    model, state = require_model(agent), agent.state
    device = machine.device_of(state)
    generator = torch.Generator(device).manual_seed(seed)
    name = f"{PREFIX}{agent.path}"
    imagined_env.require_observations(name, model, agent.spaces)
    agent.read_replay()
    if not state.replay.ready(imagined_env.CONTEXT):
        raise UserError(
            f"The replay of {agent.path} holds {len(state.replay)} rows, too few to start from: "
            f"{imagined_env.CONTEXT} rows of an environment are needed. Train it longer: " + resume_command(agent.path)
        )
    draw = imagined_env.beginnings if first else imagined_env.anywhere
    starts = draw(model, agent.spaces.action, state.replay, generator)
    longest = horizon or state.replay.episodes()[1]
    return imagined_env.ImaginedEnv(name, model, agent.spaces, starts, num_envs, longest, gamma_of(state), device)


def own_action(agent: Agent, env: ImaginedEnv, generator: torch.Generator) -> Tensor:
    """The agent's greedy action `[1, ...]` in the present state of `env`: its actor's, or the first of a new plan.

    `generator` draws the candidates of plans.
    """
    import torch

    from foresight.planning.continuous import bounds

    with torch.no_grad():
        if (actor := getattr(agent.state, "actor", None)) is not None:
            return actor.to_env(actor(env.model.features(env.state)).mode()).cpu()
        actions = agent.module.plan(dataclasses.replace(agent.state, generator=generator), env.state)
        return bounds.to_env(actions[:, 0], agent.spaces.action).cpu()


def value(agent: Agent, env: ImaginedEnv) -> float | None:
    """The critic's value of the present state of `env`; None without a critic."""
    import torch

    critic = getattr(agent.state, "critic", None)
    if critic is None:
        return None
    with torch.no_grad():
        return float(critic(env.model.features(env.state)).mean()[0])

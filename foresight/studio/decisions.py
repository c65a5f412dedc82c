"""Searches of runs in environments on the page: an episode of the agent, and its search at one of the steps.

A request is stateless: the run, the seed of the episode, a step of it, and a number of simulations. The episode that
the agent plays greedily is recorded as far as it was asked for.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresight.data.trajectory import Tree as Obs
from foresight.data.trajectory import tree_map
from foresight.errors import UserError
from foresight.planning.search.tree import Tree
from foresight.runtime import environments, machine, run
from foresight.runtime.agent import Agent
from foresight.studio import dreams, trees
from foresight.studio.encode import whole
from foresight.studio.runs import Library

LONGEST = 200  # steps of an episode
MOST = 2_000  # simulations of one request
USUAL = 50
EPISODES = 4  # that are kept
ROWS = 64  # actions that are listed, by visits


@dataclasses.dataclass
class Step:
    """What the agent saw before a step, as an image if there is one, and the reward so far."""

    obs: Obs
    picture: str | None
    total: float


@dataclasses.dataclass
class Episode:
    """The steps so far, how it ended, and its environment, which goes on from the last of them."""

    env: Any
    steps: list[Step]
    over: str | None = None


class Decisions:
    """The runs of a library that search in an environment."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._agents: dict[tuple[str, str], Agent] = {}
        self._episodes: dict[tuple[str, str, int], Episode] = {}
        self._lock = threading.Lock()

    def names(self) -> list[dict[str, Any]]:
        """The runs with a checkpoint, as `boards.Players.names` lists players; `episode` tells them apart."""
        found = []
        for row in self._library.table():
            fields = self._library.settings(row["id"]) if row["kind"] == "control" else {}
            if "simulations" in fields and self._library.saved(row["id"]):
                usual = fields.get("play_simulations") or fields.get("simulations")
                usual = max(1, min(usual, MOST)) if type(usual) is int else USUAL
                found.append(
                    {"id": row["id"], "name": row["name"], "game": f"{row['algorithm']} on {row['env']}",
                     "simulations": usual, "least": 1, "most": max(200, 2 * usual), "stride": 1, "episode": True}
                )  # fmt: skip
        return found

    def look(self, document: dict[str, Any]) -> dict[str, Any]:
        """A step of an episode, and the agent's search there.

        `player` (an id of `names`), `seed`, `step`, `simulations`. Returns the step as reached, `over` if the episode
        ends there, `picture` or `vector`, the `total` reward before it, and the `analysis` as `boards.Players.look`
        returns it.
        """
        name = document.get("player")
        if not isinstance(name, str):
            raise UserError("player must be a name.")
        seed, step = whole(document, "seed", 0, 0), whole(document, "step", 0, 0, LONGEST)
        simulations = whole(document, "simulations", USUAL, 1, MOST)
        with self._lock:
            agent, stamp = self._agent(name)
            episode = self._episode(agent, (name, stamp, seed), step)
            at = min(step, len(episode.steps) - 1)
            here = episode.steps[at]
            last = at == len(episode.steps) - 1
            single = isinstance(here.obs, Tensor) and here.picture is None
            return {
                "game": f"{Path(agent.settings.algorithm).stem} on {agent.settings.env}",
                "step": at,
                "longest": at if last and episode.over else LONGEST,
                "over": episode.over if last else None,
                "picture": here.picture,
                "vector": here.obs.flatten().tolist()[:64] if single else None,
                "total": here.total,
                "analysis": None if last and episode.over else _analyze(agent, here.obs, seed + at, simulations),
            }

    def _agent(self, name: str) -> tuple[Agent, str]:
        path, stamp = self._library.path(name), str(self._library.saved(name))
        if (name, stamp) not in self._agents:
            for old in self._agents.values():
                old.close()
            for episode in self._episodes.values():
                _close(episode.env)
            self._agents, self._episodes = {}, {}
            agent = run.load(path)
            searches = "simulations" in inspect.signature(agent.module.act).parameters
            if not searches or agent.settings.kind != "control":
                agent.close()
                raise UserError(f"The run {path.name} does not search in an environment. Choose another run.")
            if hasattr(agent.state, "replay"):
                agent.state.replay = None  # may be large, and is not needed to act
            self._agents = {(name, stamp): agent}
        return self._agents[name, stamp], stamp

    def _episode(self, agent: Agent, key: tuple[str, str, int], step: int) -> Episode:
        """The episode of a seed, as far as `step`."""
        seed = key[-1]
        if key not in self._episodes:
            while len(self._episodes) >= EPISODES:
                _close(self._episodes.pop(next(iter(self._episodes))).env)
            env = _rendering(agent)
            first = env.reset(seed)
            self._episodes[key] = Episode(env, [Step(first, _picture(env, first), 0.0)])
        found = self._episodes[key]
        while len(found.steps) <= step and found.over is None:
            now = found.steps[-1]
            action, _ = _act(agent, now.obs, seed + len(found.steps) - 1)
            feedback = found.env.step(action.cpu())
            ended = bool(feedback.cut[0])
            obs = feedback.final_obs if ended else feedback.obs
            total = now.total + float(feedback.reward[0])
            if ended:
                found.over = "the end" if float(feedback.discount[0]) == 0 else "a time limit"
            # After an end the environment shows the next episode already.
            found.steps.append(Step(obs, None if ended else _picture(found.env, obs), total))
            if len(found.steps) > LONGEST and found.over is None:
                found.over = f"the first {LONGEST} steps"
        return found


def _act(agent: Agent, obs: Obs, seed: int, simulations: int | None = None) -> tuple[Tensor, dict[str, Any]]:
    """The agent's action and extras; the same for the same seed, also where a search samples actions."""
    device = machine.device_of(agent.state)
    agent.state.generator.manual_seed(seed)
    options = {} if simulations is None else {"simulations": simulations}
    with torch.no_grad():
        inputs = tree_map(lambda x: x.to(device), obs)
        action, extras, _ = agent.module.act(agent.state, inputs, None, explore=False, **options)
    return action, extras


def _analyze(agent: Agent, obs: Obs, seed: int, simulations: int) -> dict[str, Any]:
    action, extras = _act(agent, obs, seed, simulations)
    tree: Tree = extras["tree"]
    values, visits, prior = tree.child_values()[0], extras["visits"][0], extras["prior"][0]
    name = _names(agent, tree)
    chosen = action[0]
    if "actions" in extras:  # sampled ones
        drawn = extras["actions"][0]
        same = drawn == extras["taken"][0]
        played = int((same if same.dim() == 1 else same.all(-1)).int().argmax())
    else:
        played = int(chosen)
    rows: list[dict[str, Any]] = [
        {
            "action": a,
            "name": name(0, a),
            "visits": int(visits[a]),
            "prior": float(prior[a]),
            "value": float(values[a]) if visits[a] > 0 else None,
        }
        for a in range(len(visits))
        if prior[a] > 0
    ]
    rows.sort(key=lambda row: (row["action"] != played, -row["visits"], -row["prior"]))
    value = float(extras["value"][0])
    return {
        "action": played,
        "simulations": simulations,
        "value": value if math.isfinite(value) else None,
        "moves": rows[:ROWS],
        "tree": trees.shown(tree, name),
    }


def _names(agent: Agent, tree: Tree) -> Callable[[int, int], str]:
    """The names of actions at the nodes: numbers, the numbers of a sampled action, or those of a chance outcome."""
    if isinstance(tree.state, dict) and "actions" in tree.state:
        low, high = agent.state.low, agent.state.high
        sampled = tree.state["actions"]  # [N, B, K] or [N, B, K, D]

        def of_sample(node: int, action: int) -> str:
            one = sampled[node, 0, action]
            if one.dim() == 0:
                return str(int(one))
            scaled = low + (one + 1) / 2 * (high - low)
            return " ".join(f"{x:+.2f}" for x in scaled.flatten().tolist())

        return of_sample
    actions = int(agent.spaces.action.n)
    return lambda _, action: str(action) if action < actions else f"outcome {action - actions}"


def _rendering(agent: Agent) -> Any:
    """The run's environment, which draws itself if it can."""
    try:
        env = environments.single(agent.settings, render=True)
        env.reset(0)
        if env.render() is not None:
            return env
        _close(env)
    except (UserError, ImportError):
        pass
    return environments.single(agent.settings)


def _picture(env: Any, obs: Obs) -> str | None:
    frame = env.render()
    if frame is None:
        return None
    from PIL import Image

    picture = Image.fromarray(np.asarray(frame, dtype=np.uint8))
    picture.thumbnail((480, 480))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return dreams.url(stream.getvalue())


def _close(env: Any) -> None:
    if hasattr(env, "close"):
        env.close()

"""Tabular algorithms on a grid world, step by step, as the page shows them.

A request is stateless: layout, hyperparameters and a number of steps. The answer is what the algorithm's own `train`
yields there, so going back is asking for fewer steps. Nothing is computed here that the library does not compute.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from foresight.envs.tabular import grid
from foresight.envs.tabular.mdp import MDP
from foresight.errors import UserError, unknown
from foresight.ops import targets
from foresight.planning.dynamic import bellman
from foresight.training import tabular

PLANNING = ("value_iteration", "policy_iteration", "truncated_policy_iteration")
SAMPLED = ("q_learning", "sarsa", "expected_sarsa", "mc_epsilon_greedy")
METHODS = (*PLANNING, *SAMPLED)
LARGEST = 16  # cells along a side
MOST_STEPS = 20_000
EPISODE = 1_000  # steps after which an episode of TD control is truncated
SHOWN_UPDATES = 6  # of a cell in an episode
LAYOUT = grid.GRIDS["GridWorld8x8"]


@dataclasses.dataclass(frozen=True)
class Request:
    """What the page asks for. `step` is sweeps of dynamic programming, or episodes of sampled methods."""

    picture: tuple[str, ...] = LAYOUT[0]
    method: str = "value_iteration"
    step: int = 0
    gamma: float = 0.9
    slip: float = 0.2
    step_reward: float = -0.04
    goal_reward: float = 1.0
    trap_reward: float = -1.0
    evaluation: str = "sweeps"  # of policy iteration
    evaluation_sweeps: int = 3  # of truncated policy iteration
    alpha: float = 0.1
    epsilon: float = 0.1
    seed: int = 0


def read(document: dict[str, Any]) -> Request:
    """The request in a JSON document. Raises UserError for unknown fields and values out of range."""
    fields = {field.name: field for field in dataclasses.fields(Request)}
    for name in document:
        if name not in fields:
            raise unknown("field", name, fields)
    given = dict(document)
    if "picture" in given:
        rows = given["picture"]
        if not isinstance(rows, list | tuple) or not all(isinstance(row, str) for row in rows):
            raise UserError("picture must be a list of rows, such as ['S.', '.G'].")
        given["picture"] = tuple(rows)
    for name, value in given.items():
        default = getattr(Request(), name)
        if isinstance(default, int | float) and (
            isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
        ):
            raise UserError(f"{name} must be a finite number, not {value!r}.")
        if isinstance(default, str) and not isinstance(value, str):
            raise UserError(f"{name} must be text, not {value!r}.")
        if isinstance(default, int):
            given[name] = int(value)
    request = Request(**given)
    if request.method not in METHODS:
        raise unknown("method", request.method, METHODS)
    if not 0 <= request.step <= MOST_STEPS:
        raise UserError(f"step must be between 0 and {MOST_STEPS:,}, not {request.step}.")
    if not 0 <= request.seed < 2**32:
        raise UserError(f"seed must be between 0 and {2**32 - 1:,}, not {request.seed}.")
    if not request.picture or max(len(request.picture), *(len(row) for row in request.picture)) > LARGEST:
        raise UserError(f"The grid must have 1 to {LARGEST} rows and columns.")
    return request


def mdp_of(request: Request) -> MDP:
    """The grid world of a request; sampled episodes have a time limit. Raises UserError as `grid.gridworld` does."""
    return grid.gridworld(
        request.picture, request.slip, request.step_reward, request.goal_reward, request.trap_reward,
        time_limit=EPISODE if request.method in SAMPLED else None,
    )  # fmt: skip


def solve(request: Request) -> dict[str, Any]:
    """The algorithm after `request.step` steps. Arrays are by cell in row order; cells of walls hold None.

    - `values`, `before`: v after this step and after the one before it;
    - `q` `[cell][action]`: the action values, of `before` for dynamic programming (what the last sweep compared), else
      the learned table;
    - `policy` `[cell]`: the greedy actions, all of equal ones;
    - `model` `[cell][action]`: the outcomes [probability, next cell, reward, continuation];
    - `path`: cells of the last sampled episode; `metrics`; `done`; `step`: as reached; `unit`; `actions`;
    - `updates` `[cell]`: what the last episode of a sampled method changed there, see `_last_episode`: the last
      `SHOWN_UPDATES`, each with its `turn` among those of the cell.
    """
    mdp = mdp_of(request)
    module = importlib.import_module(f"foresight.algorithms.tabular.{request.method}")
    if request.method in PLANNING:
        found = _plan(request, mdp, module)
    else:
        found = _learn(request, mdp, module)
    values, before, q, policy, extra = found
    return {
        "method": request.method,
        "rows": len(request.picture),
        "columns": len(request.picture[0]),
        "actions": list(mdp.action_names),
        "unit": "sweeps" if request.method in PLANNING else "episodes",
        "values": _cells(mdp, values.tolist()),
        "before": _cells(mdp, before.tolist()),
        "q": _cells(mdp, q.tolist()),
        "policy": _cells(mdp, [row.nonzero().flatten().tolist() for row in policy]),
        "model": _cells(mdp, _outcomes(mdp)),
        **extra,
    }


Found = tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]
Update = dict[str, Any]


def _plan(request: Request, mdp: MDP, module: Any) -> Found:
    options: dict[str, Any] = {"gamma": request.gamma, "steps": request.step + 1}
    if request.method == "policy_iteration":
        options["evaluation"] = request.evaluation
        options["tolerance"] = 1e-6
    if request.method == "truncated_policy_iteration":
        options["evaluation_sweeps"] = request.evaluation_sweeps
    bellman.require_ending(mdp, request.gamma)
    state = module.build(module.Config(**options), mdp.spaces)
    before, kind, metrics, reached = state.values.clone(), "start", {}, 0
    ended = True
    for step, found, now in module.train(module.Config(**options), mdp, state):
        if step > request.step:
            ended = False
            break
        kind = "improvement" if "switched" in found else "evaluation"
        reached, metrics = step, found
        if step == request.step - 1:
            before = now.values.clone()
        values, policy, last = now.values.clone(), now.policy.clone(), before
    if not reached:
        values, policy, last = before, state.policy.clone(), before
    elif reached < request.step:  # it converged earlier
        last = values
    q = bellman.action_values(mdp, request.gamma, last)
    greedy = bellman.optimal_actions(mdp, request.gamma, values)
    extra = {
        "step": reached, "done": ended, "sweep": kind, "metrics": _finite(metrics), "path": [], "updates": [],
        "followed": _cells(mdp, policy.tolist() if reached else [None] * mdp.states),
    }  # fmt: skip
    return values, last, q, greedy, extra


def _learn(request: Request, mdp: MDP, module: Any) -> Found:
    options: dict[str, Any] = {
        "gamma": request.gamma, "alpha": request.alpha, "epsilon": request.epsilon, "seed": request.seed,
    }  # fmt: skip
    path: list[int] = []
    updates: list[Update] = []
    metrics: dict[str, float] = {}
    if request.method == "mc_epsilon_greedy":
        config = module.Config(
            **options, steps=max(request.step, 1), improve_every=1, max_episode_steps=EPISODE, alpha_power=0.0
        )
        state = module.build(config, mdp.spaces)
        before = state.values.clone()
        for _ in itertools.islice(module.train(config, mdp, state), max(request.step - 1, 0)):
            pass
        before = state.values.clone()
        if request.step:
            metrics, path, updates = _last_returns(module, mdp, state)
    else:
        config = module.Config(**options, steps=2**62, yield_every=0)
        state = module.build(config, mdp.spaces)
        before = state.values.clone()
        for _, _, now in itertools.islice(module.train(config, mdp, state), max(request.step - 1, 0)):
            state, before = now, now.values.clone()
        if request.step:
            state, metrics, path, updates = _last_episode(module, mdp, state)
    absorbing = mdp.absorbing()
    greedy = state.q >= state.q.amax(1, keepdim=True) - 1e-12
    greedy[absorbing] = False
    assert mdp.layout is not None
    cells = mdp.layout.position.tolist()
    extra = {
        "step": request.step, "done": False, "sweep": "episode", "metrics": _finite(metrics),
        "path": [cells[s] for s in path], "followed": _cells(mdp, [None] * mdp.states),
        "updates": _cells(mdp, _by_state(mdp, cells, updates)),
    }  # fmt: skip
    return state.values, before, state.q, greedy, extra


def _last_episode(module: Any, mdp: MDP, state: Any) -> tuple[Any, dict[str, float], list[int], list[Update]]:
    """One more episode, one env step at a time; yields do not change what is learned.

    An update holds `state`, `action`, `before` and `after` of q(s, a), `target`, and its parts: the `reward`, the
    `discount` (0 where the episode ended), and `next` and `next_action`, of which only Sarsa's counts.
    """
    count = state.actor.episodes
    state.config = dataclasses.replace(state.config, yield_every=1)
    path: list[int] = []
    updates: list[Update] = []
    metrics: dict[str, float] = {}
    last, earned = state.q.clone(), 0.0
    for _, found, now in module.train(state.config, mdp, state):
        state, metrics, actor = now, found, now.actor
        (s, a), (target, discount) = actor.pairs[0].tolist(), actor.rewards[0].tolist()
        total = metrics.get("return", actor.earned)
        updates.append(
            {"state": s, "action": a, "before": float(last[s, a]), "after": float(state.q[s, a]), "target": target,
             "reward": total - earned, "discount": discount, "next": actor.state, "next_action": actor.action}
        )  # fmt: skip
        earned, last = total, state.q.clone()
        if actor.episodes > count:
            break
        path.append(int(actor.state))
    return state, metrics, path, updates


def _last_returns(module: Any, mdp: MDP, state: Any) -> tuple[dict[str, float], list[int], list[Update]]:
    """One more episode of Monte Carlo control, as `train` samples it; `target` of an update is the return."""
    config, before = state.config, state.q.clone()
    policy = targets.epsilon_greedy(state.q, config.epsilon)
    batch = tabular.episodes(tabular.Tables(mdp, config.gamma), policy, 1, config.max_episode_steps, state.rng)
    metrics = module.update(state, batch)
    returned = targets.monte_carlo(batch.reward, batch.discount, batch.cut)[0].tolist()
    first = tabular.first_visits(batch.obs[0] * state.q.shape[1] + batch.action[0], batch.cut[0])
    pairs = zip(batch.obs[0].tolist(), batch.action[0].tolist(), returned, first.tolist(), strict=True)
    updates = [
        {"state": s, "action": a, "before": float(before[s, a]), "after": float(state.q[s, a]), "target": g}
        for s, a, g, counts in pairs
        if counts
    ]
    return metrics, batch.obs[0, 1:].tolist(), updates


def _by_state(mdp: MDP, cells: list[int], updates: list[Update]) -> list[list[Update]]:
    """Updates by state, with the next state as a cell, None where the episode ended."""
    found: list[list[Update]] = [[] for _ in range(mdp.states)]
    for one in updates:
        rest = {name: value for name, value in one.items() if name != "state"}
        if "next" in rest:
            rest["next"] = cells[rest["next"]] if rest["next"] >= 0 else None
        found[one["state"]].append({**rest, "turn": len(found[one["state"]]) + 1})
    return [rows[-SHOWN_UPDATES:] for rows in found]


def _outcomes(mdp: MDP) -> list[list[list[list[float]]]]:
    """`[S][A]` lists of [probability, next cell, reward, continuation], without outcomes of probability 0."""
    cells = mdp.layout.position if mdp.layout is not None else range(mdp.states)
    reward = mdp.reward[:, :, None].expand_as(mdp.prob) if mdp.outcome_reward is None else mdp.outcome_reward
    going = torch.ones_like(mdp.prob) if mdp.discount is None else mdp.discount
    table = zip(
        mdp.prob.flatten(0, 1).tolist(), mdp.next_state.flatten(0, 1).tolist(), reward.flatten(0, 1).tolist(),
        going.flatten(0, 1).tolist(), strict=True,
    )  # fmt: skip
    rows = [[[p, int(cells[s]), r, g] for p, s, r, g in zip(*outcome, strict=True) if p > 0] for outcome in table]
    return [rows[s * mdp.actions : (s + 1) * mdp.actions] for s in range(mdp.states)]


def _cells(mdp: MDP, by_state: list[Any]) -> list[Any]:
    """Values by state as values by cell, None for walls."""
    assert mdp.layout is not None
    found: list[Any] = [None] * (len(mdp.layout.cells) * len(mdp.layout.cells[0]))
    for cell, value in zip(mdp.layout.position.tolist(), by_state, strict=True):
        found[cell] = value
    return found


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def choices() -> dict[str, Any]:
    """The layouts, methods and first values that the page offers."""
    first = dataclasses.asdict(Request())
    return {
        "request": first,
        "methods": [{"name": name, "unit": "sweeps" if name in PLANNING else "episodes"} for name in METHODS],
        "layouts": {name: {"picture": rows, **options} for name, (rows, options) in grid.GRIDS.items()},
        "most_steps": MOST_STEPS,
    }

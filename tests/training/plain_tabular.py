"""Tabular TD and Monte Carlo by their definitions: one step after the other, targets in torch, no numba.

The compiled loops of `foresight.training.tabular_kernels` are held to these. Both draw the same numbers from the same
generator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foresight.ops import returns, targets
from foresight.training import tabular
from foresight.training.tabular import ActorState, Tables


class Rows(NamedTuple):
    """The steps that wait for their targets, oldest first, all `[1, T]`.

    `discount` is γ times the environment's own, 0 where the episode ended. `next_action` is 0 where it is not known
    yet, or where nothing follows. Where the last step is `cut`, every one is `ready`; else the first one is.
    """

    state: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    cut: Tensor
    next_state: Tensor
    next_action: Tensor

    @property
    def ready(self) -> int:
        return self.cut.shape[1] if bool(self.cut[0, -1]) else 1


def sarsa(state: Any, rows: Rows) -> float:
    target = targets.sarsa(rows.reward, rows.discount, state.q[rows.next_state], rows.next_action)
    return move(state.q, state.visits, (rows.state[0], rows.action[0]), target[0], state.config)


def expected_sarsa(state: Any, rows: Rows) -> float:
    next_q = state.q[rows.next_state]
    policy = targets.epsilon_greedy(next_q, state.config.epsilon)
    target = targets.expected_sarsa(rows.reward, rows.discount, next_q, policy)
    return move(state.q, state.visits, (rows.state[0], rows.action[0]), target[0], state.config)


def n_step_sarsa(state: Any, rows: Rows) -> float:
    next_q, n, ready = state.q[rows.next_state], state.config.n_steps, slice(0, rows.ready)
    target = targets.n_step_sarsa(rows.reward, rows.discount, rows.cut, next_q, rows.next_action, n)
    where = rows.state[0, ready], rows.action[0, ready]
    return move(state.q, state.visits, where, target[0, ready], state.config)


def q_learning(state: Any, rows: Rows) -> float:
    target = targets.q_learning(rows.reward, rows.discount, state.q[rows.next_state])
    return move(state.q, state.visits, (rows.state[0], rows.action[0]), target[0], state.config)


def double_q_learning(state: Any, rows: Rows) -> float:
    i = 0 if state.actor.rng.random() < 0.5 else 1
    one, other = state.q[i][rows.next_state], state.q[1 - i][rows.next_state]
    target = targets.double_q_learning(rows.reward, rows.discount, one, other)
    return move(state.q[i], state.visits[i], (rows.state[0], rows.action[0]), target[0], state.config)


def td_prediction(state: Any, rows: Rows) -> float:
    next_value, ready = state.v[rows.next_state], slice(0, rows.ready)
    target = returns.n_step_return(rows.reward, rows.discount, rows.cut, next_value, state.config.n_steps)
    return move(state.v, state.visits, (rows.state[0, ready],), target[0, ready], state.config)


def td_lambda(state: Any, rows: Rows) -> float:
    config, s = state.config, rows.state[0, 0]
    target = targets.td(rows.reward, rows.discount, state.v[rows.next_state])[0, 0]
    error = target - state.v[s]
    state.visits[s] += 1
    state.trace[s] = 1.0 if config.replacing else state.trace[s] + 1.0
    step_size = config.alpha / float(state.visits[s]) ** config.alpha_power
    state.v += step_size * error * state.trace
    state.trace *= rows.discount[0, 0] * config.trace_lambda
    return float(error.abs())


UPDATES = {
    update.__name__: update
    for update in (sarsa, expected_sarsa, n_step_sarsa, q_learning, double_q_learning, td_prediction, td_lambda)
}


def replace(patch: Any, module: Any) -> None:
    """Put these definitions in the place of what an algorithm's `train` calls."""
    update, on_policy = UPDATES.get(module.__name__.split(".")[-1]), module.__name__.endswith(".sarsa")
    on_policy = on_policy or module.__name__.endswith(".n_step_sarsa")
    patch.setattr(tabular, "control", lambda env, state, _: control(env, state, module.act, update, on_policy))
    patch.setattr(tabular, "predict", lambda env, state, policy, _: predict(env, state, policy, update))
    if hasattr(module, "follow"):
        patch.setattr(module, "follow", lambda state, env: predict(env, state, state.probabilities, update))
    patch.setattr(tabular, "episodes", episodes)
    patch.setattr(tabular, "move_all", lambda table, visits, index, target, config: move(
        table.view(-1), visits.view(-1), (index,), target, config
    ))  # fmt: skip


def begin(env: Tables, rng: np.random.Generator) -> int:
    """Where an episode begins."""
    return tabular.draw(env.start, rng.random())


def step(env: Tables, rng: np.random.Generator, s: int, a: int) -> tuple[int, float, float]:
    """(next state, reward, the environment's own discount) of action a in state s."""
    k = tabular.draw(env.cumulative[s, a], rng.random())
    reward = env.reward[s, a, k if env.reward.shape[2] > 1 else 0]
    going = float(env.discount[s, a, k]) if env.discount.size else 1.0
    return int(env.next_state[s, a, k]), float(reward), going


def control(env: Tables, state: Any, act: Any, update: Any, on_policy: bool) -> dict[str, float]:
    if state.step == 0:
        state.q.masked_fill_(env.forbidden, -torch.inf)
    steps, most = tabular.until(state)
    actor, taken, ended, returned, lengths, errors = state.actor, 0, 0, 0.0, 0, 0.0

    def choose(s: int) -> int:
        return int(act(state, torch.tensor([s]), explore=True)[0])

    while taken < steps:
        if actor.state < 0:
            actor.state, actor.action, actor.length, actor.earned, actor.pending = begin(env, actor.rng), -1, 0, 0.0, 0
        if actor.action < 0:
            actor.action = choose(actor.state)
        after, reward, going = step(env, actor.rng, actor.state, actor.action)
        taken, actor.length, actor.earned = taken + 1, actor.length + 1, actor.earned + reward
        cut = going == 0 or (env.limit > 0 and actor.length >= env.limit)
        chosen = choose(after) if on_policy and going else -1
        remember(actor, actor.state, actor.action, reward, env.gamma * going)
        if cut or actor.pending == len(actor.pairs):
            errors += update(state, recall(actor, cut, after, chosen))
            forget(actor)
        actor.state, actor.action = after, chosen
        if cut:
            returned, lengths, ended = returned + actor.earned, lengths + actor.length, ended + 1
            actor.state, actor.action, actor.pending = -1, -1, 0
            if ended == most:
                break
    return tabular.report(state, taken, ended, returned, lengths, errors)


def predict(env: Tables, state: Any, policy: Tensor, update: Any) -> dict[str, float]:
    steps, most = tabular.until(state)
    actor, taken, ended, returned, lengths, errors = state.actor, 0, 0, 0.0, 0, 0.0
    running = np.cumsum(policy.numpy(), axis=1)
    while taken < steps:
        if actor.state < 0:
            actor.state, actor.length, actor.earned, actor.pending = begin(env, actor.rng), 0, 0.0, 0
            if hasattr(state, "trace"):
                state.trace.zero_()
        action = tabular.draw(running[actor.state], actor.rng.random())
        after, reward, going = step(env, actor.rng, actor.state, action)
        taken, actor.length, actor.earned = taken + 1, actor.length + 1, actor.earned + reward
        cut = going == 0 or (env.limit > 0 and actor.length >= env.limit)
        remember(actor, actor.state, action, reward, env.gamma * going)
        if cut or actor.pending == len(actor.pairs):
            errors += update(state, recall(actor, cut, after, -1))
            forget(actor)
        actor.state = after
        if cut:
            returned, lengths, ended = returned + actor.earned, lengths + actor.length, ended + 1
            actor.state, actor.pending = -1, 0
            if ended == most:
                break
    return tabular.report(state, taken, ended, returned, lengths, errors)


def remember(actor: ActorState, s: int, a: int, reward: float, discount: float) -> None:
    actor.pairs[actor.pending] = s, a
    actor.rewards[actor.pending] = reward, discount
    actor.pending += 1


def recall(actor: ActorState, cut: bool, after: int, chosen: int) -> Rows:
    """The steps that wait, the last of which led to state `after`, where `chosen` will be done."""
    state, action = torch.from_numpy(actor.pairs[: actor.pending].T.copy())[:, None]
    reward, discount = torch.from_numpy(actor.rewards[: actor.pending].T.copy())[:, None]
    ends = torch.zeros_like(reward)
    ends[0, -1] = float(cut)
    last = torch.tensor([[after], [max(chosen, 0)]])
    following = torch.cat([torch.stack([state[0, 1:], action[0, 1:]]), last], dim=1)[:, None]
    return Rows(state, action, reward, discount, ends, following[0], following[1])


def forget(actor: ActorState) -> None:
    actor.pairs[:-1], actor.rewards[:-1] = actor.pairs[1:].copy(), actor.rewards[1:].copy()
    actor.pending -= 1


def move(table: Tensor, visits: Tensor, index: tuple[Tensor, ...], target: Tensor, config: Any) -> float:
    """The update rule for entries `index` (each `[N]`) of a table, one after the other; the sum of |errors|."""
    errors = 0.0
    for *where, aim in zip(*index, target, strict=True):
        at = tuple(where)
        visits[at] += 1
        step_size = config.alpha / float(visits[at]) ** config.alpha_power
        errors += float((aim - table[at]).abs())
        table[at] = targets.moved(table[at], aim, step_size)
    return errors


def episodes(
    env: Tables, policy: Tensor, count: int, horizon: int, rng: np.random.Generator, first: Tensor | None = None
) -> Any:
    running, rows = np.cumsum(policy.numpy(), axis=1), []
    for s, a in (torch.full((count, 2), -1) if first is None else first).tolist():
        s = begin(env, rng) if s < 0 else s
        for t in range(min(horizon, env.limit or horizon)):
            a = tabular.draw(running[s], rng.random()) if t > 0 or a < 0 else a
            after, reward, going = step(env, rng, s, a)
            cut = going == 0 or t == min(horizon, env.limit or horizon) - 1
            rows.append((s, a, reward, env.gamma * going, float(cut)))
            s = after
            if going == 0:
                break
    s, a, *rest = (torch.from_numpy(np.array(column))[None] for column in zip(*rows, strict=True))
    return tabular.Trajectory(s, a, *rest)

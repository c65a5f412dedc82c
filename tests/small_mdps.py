"""Random MDPs with terminations for tests, and the Bellman equation written out without our library."""

from __future__ import annotations

from typing import Any

import numpy as np

from foresight.envs.tabular.mdp import MDP, assemble


def small_mdp(seed: int, states: int = 12, actions: int = 3, outcomes: int = 2, ending: float = 0.1) -> MDP:
    """Each outcome ends the episode with probability `ending`; rewards depend on the outcome and have both signs."""
    rng = np.random.default_rng(seed)
    shape = (states, actions, outcomes)
    next_state = rng.integers(0, states, shape, dtype=np.int32)
    prob = rng.dirichlet(np.ones(outcomes), shape[:2])
    discount = (rng.random(shape) >= ending).astype(float)
    return assemble("random", next_state, prob, rng.normal(size=shape), discount, rng.dirichlet(np.ones(states)))


def backup(mdp: MDP, gamma: float, values: np.ndarray) -> np.ndarray:
    """q [S, A], state by state, outcome by outcome."""
    q = np.zeros((mdp.states, mdp.actions))
    for s in range(mdp.states):
        for a in range(mdp.actions):
            total = 0.0
            for k in range(mdp.next_state.shape[2]):
                p = float(mdp.prob[s, a, k])
                if mdp.discount is not None:
                    p *= float(mdp.discount[s, a, k])
                total += p * values[int(mdp.next_state[s, a, k])]
            q[s, a] = float(mdp.reward[s, a]) + gamma * total
    return q


def last(module: Any, mdp: MDP, **fields: Any) -> Any:
    """The state that a run of an algorithm with these fields ends with."""
    *_, (_, _, state) = module.train(module.Config(**fields), mdp)
    return state

"""Shared by the benchmarks of dynamic programming: the workload, also in the peer's form, and the memory limit."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import torch

from foresight.envs.tabular.mdp import MDP, random_mdp
from foresight.planning.dynamic import bellman
from foresight.runtime import machine

THREADS = 2
GAMMA = 0.99
CHANGE = 1e-6  # sup-norm change of a sweep at which value iteration stops


def workload(states: int = 100_000) -> MDP:
    """100,000 states × 4 actions × 5 successors, the same tables on both sides."""
    torch.set_num_threads(THREADS)
    return random_mdp(states, 4, 5, seed=0)


def quantecon(mdp: MDP) -> Any:
    """The same MDP as a QuantEcon `DiscreteDP` in its fastest form, sparse state-action pairs."""
    from quantecon.markov import DiscreteDP
    from scipy import sparse

    pairs = mdp.states * mdp.actions
    indptr = np.arange(pairs + 1) * mdp.next_state.shape[2]
    chain = sparse.csr_matrix(
        (mdp.prob.numpy().ravel(), mdp.next_state.numpy().ravel(), indptr), shape=(pairs, mdp.states)
    )
    s_index = np.repeat(np.arange(mdp.states), mdp.actions)
    a_index = np.tile(np.arange(mdp.actions), mdp.states)
    return DiscreteDP(mdp.reward.numpy().ravel(), chain, GAMMA, s_index, a_index)


def peer_value_iteration(mdp: MDP) -> tuple[Any, float]:
    """QuantEcon's value iteration to a sup-norm change of `CHANGE`; (its result, seconds)."""
    quantecon(random_mdp(50, 4, 5)).value_iteration(epsilon=1.0)  # compile
    problem = quantecon(mdp)
    began = time.perf_counter()
    result = problem.value_iteration(epsilon=CHANGE * 2 * GAMMA / (1 - GAMMA), max_iter=100_000)
    return result, time.perf_counter() - began


def exact(mdp: MDP, policy: torch.Tensor) -> torch.Tensor:
    """v*, as the value of an optimal policy by a linear solve; checked to be a fixed point of the Bellman operator."""
    for _ in range(20):
        values = bellman.policy_value(mdp, policy, GAMMA)
        _, policy = bellman.greedy(mdp, GAMMA, values, policy)
        residual = bellman.residual(mdp, GAMMA, values)
        if residual < 1e-11:  # so the error is below 1e-9
            return values
    raise RuntimeError(f"The reference is not exact: residual {residual}.")


def peak_mib() -> float:
    """Peak resident memory of this process."""
    return 2**10 * machine.peak_gib()


def triad(size: int, repeats: int) -> float:
    """GB/s of `a = b + c` (24 bytes per element) with `THREADS` threads on arrays of `size` bytes in total."""
    length = size // 24 // THREADS
    parts = [[np.ones(length) for _ in range(3)] for _ in range(THREADS)]

    def work(part: list[np.ndarray]) -> None:
        for _ in range(repeats):
            np.add(part[1], part[2], out=part[0])

    best = 0.0
    for _ in range(3):
        threads = [threading.Thread(target=work, args=(part,)) for part in parts]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, 24 * length * THREADS * repeats / (time.perf_counter() - began) / 1e9)
    return best


def sweep_bytes(mdp: MDP) -> tuple[int, int]:
    """Bytes of tables and values that a sweep must touch: (with all actions, with one action per state)."""
    states, actions, outcomes = mdp.next_state.shape
    vectors = 3 * 8  # values read, values written, deadlines
    return states * (actions * (outcomes * 12 + 8) + vectors), states * (outcomes * 12 + 8 + vectors)

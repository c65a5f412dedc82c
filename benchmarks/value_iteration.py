"""Value iteration on a random sparse MDP, to a sup-norm change of 1e-6.

100,000 states, 4 actions, 5 successors each, rewards U[0, 1), gamma 0.99, float64, 2 threads, from v = 0. The iterates
equal those of plain value iteration bit for bit (tests/planning/dynamic/test_bellman.py). Compilation is a separate
warm-up on a tiny MDP, reported as `warmup_seconds`. `touched_gb_s` is the rate at which tables and values are read and
written; `share_of_*_limit` compares it with a stream from memory, and with one of the size of a sweep, measured in the
same process; `plain_limit_seconds` is the time of sweeps that compare all actions if they only streamed their tables
from memory.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks import _tables as tables

UNIT = "sweeps/s"
PEER = "quantecon"
TARGET = 3.0


def ours() -> dict[str, Any]:
    from foresight.algorithms.tabular import value_iteration
    from foresight.planning.dynamic import bellman

    mdp = tables.workload()
    config = value_iteration.Config(gamma=tables.GAMMA, tolerance=tables.CHANGE, yield_every=1_000_000)
    began = time.perf_counter()
    list(value_iteration.train(config, tables.random_mdp(2_000, 4, 5)))
    warmup = time.perf_counter() - began
    began = time.perf_counter()
    *_, (sweeps, metrics, state) = value_iteration.train(config, mdp)
    seconds = time.perf_counter() - began
    peak = tables.peak_mib()
    return {
        "rate": sweeps / seconds,
        "seconds": seconds,
        "sweeps": sweeps,
        "residual": metrics["residual"],
        "true_error": float((state.values - tables.exact(mdp, state.policy)).abs().max()),
        "warmup_seconds": warmup,
        "peak_mib": peak,
        "threads": tables.THREADS,
        **_limits(mdp, bellman, sweeps, seconds),
    }


def peer() -> dict[str, Any]:
    mdp = tables.workload()
    result, seconds = tables.peer_value_iteration(mdp)
    peak = tables.peak_mib()
    policy = tables.torch.from_numpy(result.sigma.astype("int64"))
    values = tables.torch.from_numpy(result.v)
    return {
        "rate": result.num_iter / seconds,
        "seconds": seconds,
        "sweeps": result.num_iter,
        "true_error": float((values - tables.exact(mdp, policy)).abs().max()),
        "peak_mib": peak,
        "threads": tables.THREADS,
    }


def _limits(mdp: Any, dynamic: Any, sweeps: int, seconds: float) -> dict[str, float]:
    # Run again, counting the states in which all actions are compared.
    machine = dynamic.Sweeps(mdp, tables.GAMMA)
    values, policy = tables.torch.zeros_like(mdp.start), tables.torch.zeros_like(mdp.start).long()
    compared = 0
    for _ in range(sweeps):
        compared += machine.undecided(values)
        values, policy, _ = machine.improve(values, policy)
    full, single = tables.sweep_bytes(mdp)
    touched = (sweeps - compared / mdp.states) * single + compared / mdp.states * full
    memory, cache = tables.triad(1 << 30, 3), tables.triad(single, 300)
    return {
        "compared_share": compared / mdp.states / sweeps,
        "touched_gb_s": touched / seconds / 1e9,
        "memory_gb_s": memory,
        "cache_gb_s": cache,
        "share_of_memory_limit": touched / seconds / 1e9 / memory,
        "share_of_cache_limit": touched / seconds / 1e9 / cache,
        "plain_limit_seconds": sweeps * full / memory / 1e9,
    }

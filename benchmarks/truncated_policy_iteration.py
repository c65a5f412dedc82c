"""Truncated policy iteration compared with value iteration at the same true error.

The MDP is that of benchmarks/value_iteration.py. The peer is QuantEcon's value iteration to a sup-norm change of 1e-6;
ours stops at the same residual. `true_error` is ‖v - v*‖∞ with an exact v* (a linear solve, checked to be a fixed point
to 1e-11). `rate` is with `span_bounds=True` (Puterman 6.6), `plain_*` with the sup-norm stop. QuantEcon has such bounds
in its modified policy iteration, which is reported too (`modified_*`): compare it with `seconds`.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks import _tables as tables

UNIT = "solves/min"
PEER = "quantecon"
TARGET = 10.0


def ours() -> dict[str, Any]:
    from foresight.algorithms.tabular import truncated_policy_iteration as algorithm

    mdp = tables.workload()
    plain = algorithm.Config(gamma=tables.GAMMA, tolerance=tables.CHANGE, evaluation_sweeps=50, yield_every=1_000_000)
    span = algorithm.Config(
        gamma=tables.GAMMA, tolerance=tables.CHANGE, evaluation_sweeps=5, span_bounds=True, yield_every=1_000_000
    )
    began = time.perf_counter()
    list(algorithm.train(span, tables.random_mdp(2_000, 4, 5)))
    warmup = time.perf_counter() - began
    figures: dict[str, Any] = {}
    for prefix, config in (("", span), ("plain_", plain)):
        began = time.perf_counter()
        *_, (sweeps, _, state) = algorithm.train(config, mdp)
        figures[f"{prefix}seconds"] = time.perf_counter() - began
        figures[f"{prefix}sweeps"] = sweeps
        figures[f"{prefix}peak_mib"] = tables.peak_mib()
        error = (state.values - tables.exact(mdp, state.policy)).abs().max()
        figures[f"{prefix}true_error"] = float(error)
    return {"rate": 60 / figures["seconds"], **figures, "warmup_seconds": warmup, "threads": tables.THREADS}


def peer() -> dict[str, Any]:
    mdp = tables.workload()
    result, seconds = tables.peer_value_iteration(mdp)
    peak = tables.peak_mib()
    problem = tables.quantecon(mdp)
    began = time.perf_counter()
    # Its epsilon bounds the error of the value, by the span: as ours with tolerance = CHANGE.
    modified = problem.modified_policy_iteration(
        epsilon=2 * tables.CHANGE * tables.GAMMA / (1 - tables.GAMMA), max_iter=100_000
    )
    modified_seconds = time.perf_counter() - began
    best = tables.exact(mdp, tables.torch.from_numpy(result.sigma.astype("int64"))).numpy()
    return {
        "rate": 60 / seconds,
        "seconds": seconds,
        "sweeps": result.num_iter,
        "true_error": float(abs(result.v - best).max()),
        "modified_seconds": modified_seconds,
        "modified_true_error": float(abs(modified.v - best).max()),
        "peak_mib": peak,
        "threads": tables.THREADS,
    }

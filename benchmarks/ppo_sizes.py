"""PPO on CartPole-v1 at three sizes of a rollout, beside a PPO that JAX compiles whole.

8 environments x 128 steps, 64 x 128 and 1,024 x 32; 4 epochs, 4 minibatches, two networks of 64x64 tanh, Adam at
2.5e-4, gamma 0.99, lambda 0.95, clip 0.2, entropy 0.01, no value clip, gradient norm 0.5. `rate` is the geometric mean
of the three, each of which is the median of several trainings after one that is not counted: JAX compiles there. The
peer clips each number of a gradient instead of its norm, and clips values, which takes no longer. One thread.
`return_SIZE` is that of the last training, over its last 100 episodes with exploration; the peer does not keep that:
it is that of its policy in 32 episodes.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

UNIT = "env steps/s"
PEER = "rejax"
TARGET = 1.0
SIZES = {"8x128": (8, 128, 102_400), "64x128": (64, 128, 409_600), "1024x32": (1024, 32, 655_360)}
REPEATS = 2


def ours() -> dict[str, Any]:
    """This library's `ppo.train`, as a user runs it."""
    import torch

    from foresight.algorithms.policy import ppo
    from foresight.envs.make import make

    torch.set_num_threads(1)

    def training(num_envs: int, length: int, steps: int) -> Callable[[], float]:
        config = ppo.Config(
            steps=steps, num_envs=num_envs, rollout_steps=length, epochs=4, minibatches=4, learning_rate=2.5e-4,
            anneal_lr=False, gamma=0.99, gae_lambda=0.95, clip_ratio=0.2, entropy_coef=0.01, value_coef=1.0,
            max_grad_norm=0.5,
        )  # fmt: skip

        def run() -> float:
            *_, (_, metrics, _) = ppo.train(config, make("CartPole-v1", num_envs=num_envs))
            return metrics["return"]

        return run

    return _measured(training)


def peer() -> dict[str, Any]:
    """rejax's PPO on gymnax's CartPole."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # XLA has no other limit to one thread
    import jax
    from rejax import PPO
    from rejax.evaluate import evaluate

    def training(num_envs: int, length: int, steps: int) -> Callable[[], float]:
        algorithm = PPO.create(
            env="CartPole-v1", num_envs=num_envs, num_steps=length, num_epochs=4, num_minibatches=4,
            learning_rate=2.5e-4, gamma=0.99, gae_lambda=0.95, clip_eps=0.2, ent_coef=0.01, vf_coef=1.0,
            max_grad_norm=0.5, total_timesteps=steps, eval_freq=steps, skip_initial_evaluation=True,
            agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
        )  # fmt: skip
        algorithm = algorithm.replace(eval_callback=lambda algo, state, key: ())  # type: ignore[attr-defined]
        train = jax.jit(algorithm.train)
        last: list[Any] = []

        def run() -> float:
            state, _ = jax.block_until_ready(train(jax.random.PRNGKey(len(last))))
            last.append(state)
            return math.nan

        def score() -> float:
            act = algorithm.make_act(last[-1])
            key = jax.random.PRNGKey(0)
            _, returns = evaluate(act, key, algorithm.env, algorithm.env_params, 32, 500)
            return float(returns.mean())

        run.score = score  # type: ignore[attr-defined]
        return run

    return _measured(training)


def _measured(training: Callable[[int, int, int], Callable[[], float]]) -> dict[str, Any]:
    rates, returns = {}, {}
    for name, (num_envs, length, steps) in SIZES.items():
        run, seconds = training(num_envs, length, steps), []
        run()
        for _ in range(REPEATS):
            began = time.perf_counter()
            reached = run()
            seconds.append(time.perf_counter() - began)
        rates[name] = steps / statistics.median(seconds)
        returns[name] = getattr(run, "score", lambda reached=reached: reached)()
    found = {f"rate_{name}": rate for name, rate in rates.items()}
    return {
        "rate": statistics.geometric_mean(rates.values()),
        **found,
        **{f"return_{name}": value for name, value in returns.items()},
        "threads": 1,
    }

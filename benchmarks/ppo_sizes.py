"""PPO on CartPole-v1 at three sizes of a rollout, beside a PPO that JAX compiles whole.

8 environments x 128 steps, 64 x 128 and 1,024 x 32; 4 epochs, 4 minibatches, two networks of 64x64 tanh, Adam at
2.5e-4, gamma 0.99, lambda 0.95, clip 0.2, entropy 0.01, no value clip. `rate` is the geometric mean of the three, each
of one training after one that is not counted: JAX compiles there. `return_SIZE` is the mean of 32 episodes, with
exploration. The peer clips each number of a gradient to 0.5, which is less than a norm of 0.5: here the norm is 5, with
which returns are no smaller. It also clips values, which takes no longer. One thread.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

UNIT = "env steps/s"
PEER = "rejax"
TARGET = 1.0
EPISODES = 32
Training = Callable[[], Callable[[], float]]  # trains, and returns what measures the policy
SIZES = {"8x128": (8, 128, 102_400), "64x128": (64, 128, 409_600), "1024x32": (1024, 32, 655_360)}


def ours() -> dict[str, Any]:
    """This library's `ppo.train`, as a user runs it."""
    import torch

    from foresight.algorithms.policy import ppo
    from foresight.envs import collect
    from foresight.envs.base import Episodes
    from foresight.envs.make import make

    torch.set_num_threads(1)

    def training(num_envs: int, length: int, steps: int) -> Training:
        config = ppo.Config(
            steps=steps, num_envs=num_envs, rollout_steps=length, epochs=4, minibatches=4, learning_rate=2.5e-4,
            anneal_lr=False, gamma=0.99, gae_lambda=0.95, clip_ratio=0.2, entropy_coef=0.01, value_coef=1.0,
            max_grad_norm=5.0,
        )  # fmt: skip

        def run() -> Callable[[], float]:
            *_, (_, _, state) = ppo.train(config, make("CartPole-v1", num_envs=num_envs))
            return functools.partial(score, state)

        return run

    def score(state: ppo.State) -> float:
        choose, finished = functools.partial(ppo.act, state, explore=True), Episodes()
        collect.episodes(make("CartPole-v1", num_envs=EPISODES), 0, choose, 500, torch.device("cpu"), finished)
        return statistics.fmean(finished.returns)

    return _measured(training)


def peer() -> dict[str, Any]:
    """rejax's PPO on gymnax's CartPole."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # XLA has no other limit to one thread
    import jax
    from rejax import PPO
    from rejax.evaluate import evaluate

    def training(num_envs: int, length: int, steps: int) -> Training:
        algorithm = PPO.create(
            env="CartPole-v1", num_envs=num_envs, num_steps=length, num_epochs=4, num_minibatches=4,
            learning_rate=2.5e-4, gamma=0.99, gae_lambda=0.95, clip_eps=0.2, ent_coef=0.01, vf_coef=1.0,
            max_grad_norm=0.5, total_timesteps=steps, eval_freq=steps, skip_initial_evaluation=True,
            agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
        )  # fmt: skip
        algorithm = algorithm.replace(eval_callback=lambda algo, state, key: ())
        train = jax.jit(algorithm.train)

        def run() -> Callable[[], float]:
            state, _ = jax.block_until_ready(train(jax.random.PRNGKey(0)))

            def score() -> float:
                act, key = algorithm.make_act(state), jax.random.PRNGKey(0)
                _, returns = evaluate(act, key, algorithm.env, algorithm.env_params, EPISODES, 500)
                return float(returns.mean())

            return score

        return run

    return _measured(training)


def _measured(training: Callable[[int, int, int], Training]) -> dict[str, Any]:
    found: dict[str, float] = {}
    for name, (num_envs, length, steps) in SIZES.items():
        run = training(num_envs, length, steps)
        run()
        began = time.perf_counter()
        score = run()
        found[f"rate_{name}"] = steps / (time.perf_counter() - began)
        found[f"return_{name}"] = score()
    rates = [found[f"rate_{name}"] for name in SIZES]
    return {"rate": statistics.geometric_mean(rates), **found, "threads": 1}

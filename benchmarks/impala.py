"""IMPALA on CartPole-v1 with two actors on Ray: 16 environments each, rollouts of 50, 800 steps per update, 64x64 tanh.

Equal settings on both sides: Adam, a learning rate of 5e-4 (RLlib's default), gamma 0.99, ρ̄ = c̄ = 1, entropy 0.01,
value loss 0.5 of the half squared error, gradient norm 40, no annealing. One thread per process. The first 20% of the
steps are warm-up; the rate is the env steps that the learner trained on after it, per second. `return` is the mean over
the last 100 episodes of training, with exploration.

Both run actors in separate processes on this machine and learn in the process that is measured. RLlib's losses are
means over steps and ours are sums (as in the paper), a factor that does not matter with Adam.
"""

from __future__ import annotations

import time
from typing import Any

UNIT = "env steps/s"
PEER = "ray"
TARGET = 3.0
ACTORS, ENVS, ROLLOUT, STEPS = 2, 16, 50, 200_000
PEER_STEPS = 40_000  # the same rate in less time


def ours() -> dict[str, Any]:
    """This library's learner over Ray actors, as `foresight train impala --actors 2` runs it."""
    from benchmarks import _impala

    given = {
        "steps": STEPS, "num_envs": ENVS, "rollout_steps": ROLLOUT, "rollouts_per_update": 1, "gamma": 0.99,
        "learning_rate": 5e-4, "anneal_lr": False, "optimizer": "adam", "optimizer_epsilon": 1e-8,
        "entropy_coef": 0.01, "value_coef": 0.5, "max_grad_norm": 40.0,
    }  # fmt: skip
    return _impala.measure("CartPole-v1", ACTORS, given)


def peer() -> dict[str, Any]:
    """RLlib's IMPALA at the same settings."""
    import logging

    import ray
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    logging.disable(logging.WARNING)
    ray.init(address="local", num_cpus=ACTORS + 1, include_dashboard=False, log_to_driver=False)
    network = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
    config = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=ACTORS, num_envs_per_env_runner=ENVS, rollout_fragment_length=ROLLOUT)
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=ENVS * ROLLOUT, lr=5e-4, gamma=0.99, entropy_coeff=0.01, vf_loss_coeff=0.5,
            grad_clip=40.0,
        )
        .rl_module(model_config=network)
        .reporting(min_time_s_per_iteration=1)
        .debugging(seed=0, log_level="ERROR")
    )  # fmt: skip
    algorithm = config.build_algo()
    done, begun, first, reached = 0, 0.0, 0, float("nan")
    while done < PEER_STEPS:
        result = algorithm.train()
        trained = result.get("learners", {}).get("__all_modules__", {})  # empty before the first update
        done = int(trained.get("num_env_steps_trained_lifetime", done))
        reached = float(result["env_runners"].get("episode_return_mean", reached))
        if not begun and done >= PEER_STEPS // 5:
            begun, first = time.perf_counter(), done
    seconds = time.perf_counter() - begun
    algorithm.stop()
    ray.shutdown()
    return {"rate": (done - first) / seconds, "return": reached, "actors": ACTORS}

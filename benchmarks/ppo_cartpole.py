"""PPO on CartPole-v1: 8 environments x 128 steps, 4 epochs, 4 minibatches, 64x64 tanh, 102,400 steps.

Equal settings on both sides: Adam, a learning rate of 2.5e-4, gamma 0.99, lambda 0.95, clip 0.2, entropy 0.01, no
value clip, gradient norm 0.5 (stable-baselines3's vf_coef of 0.5 has no half in the squared error: it is 1.0 here).
One thread, which is the faster choice for both. The first 10,240 steps are warm-up; the rest is measured. `return` is
the mean over the last 100 episodes of training, with exploration.
"""

from __future__ import annotations

import time
from typing import Any

UNIT = "env steps/s"
PEER = "stable-baselines3"
TARGET = 5.0
STEPS, WARM, THREADS = 102_400, 10_240, 1


def ours() -> dict[str, Any]:
    """This library's `ppo.train`, as a user runs it."""
    import torch

    from foresight.algorithms.policy import ppo
    from foresight.envs.make import make

    torch.set_num_threads(THREADS)
    config = ppo.Config(
        steps=STEPS, num_envs=8, rollout_steps=128, epochs=4, minibatches=4, learning_rate=2.5e-4, anneal_lr=False,
        gamma=0.99, gae_lambda=0.95, clip_ratio=0.2, entropy_coef=0.01, value_coef=1.0, max_grad_norm=0.5,
    )  # fmt: skip
    env = make("CartPole-v1", num_envs=config.num_envs)
    begun, metrics = 0.0, {}
    for step, metrics, _ in ppo.train(config, env):  # noqa: B007
        if step == WARM:
            begun = time.perf_counter()
    seconds = time.perf_counter() - begun
    return {"rate": (STEPS - WARM) / seconds, "return": metrics["return"], "threads": THREADS}


def peer() -> dict[str, Any]:
    """stable-baselines3's PPO at the same settings."""
    import numpy as np
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(THREADS)
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", n_envs=8, seed=0), n_steps=128, batch_size=256, n_epochs=4,
        learning_rate=2.5e-4, gamma=0.99, gae_lambda=0.95, clip_range=0.2, ent_coef=0.01, vf_coef=0.5,
        max_grad_norm=0.5, seed=0, device="cpu",
    )  # fmt: skip
    model.learn(WARM)
    begun = time.perf_counter()
    model.learn(STEPS - WARM, reset_num_timesteps=False)
    seconds = time.perf_counter() - begun
    reached = float(np.mean([episode["r"] for episode in model.ep_info_buffer]))
    return {"rate": (STEPS - WARM) / seconds, "return": reached, "threads": THREADS}

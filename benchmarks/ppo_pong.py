"""PPO on ALE/Pong-v5 pixels with the Nature network: 8 environments x 128 steps, 4 epochs, minibatches of 256.

Equal settings on both sides: 84x84 gray, 4 frames, skip 4, Adam with a learning rate of 2.5e-4, clip 0.1, entropy
0.01, gamma 0.99, lambda 0.95, no value clip, two threads. Ours computes the trunk in bfloat16 where the processor
supports it natively (`precision`); `float32` is the speed without it. `of_limit` is the share of the time that
arithmetic alone takes: the trunk's forward passes of the rollout, and forward and backward passes of 4 epochs.
An agent step is four frames. The first iteration is warm-up.
"""

from __future__ import annotations

import time
from typing import Any

UNIT = "agent steps/s"
PEER = "stable-baselines3"
TARGET = 2.0
ITERATIONS, ROWS, THREADS = 4, 8 * 128, 2


def rate(precision: str) -> tuple[float, float]:
    """Agent steps per second of `ppo.train`, and the seconds of one iteration."""
    from foresight.algorithms.policy import ppo
    from foresight.envs.make import make

    config = ppo.Config(
        steps=(ITERATIONS + 1) * ROWS, num_envs=8, rollout_steps=128, epochs=4, minibatches=4, learning_rate=2.5e-4,
        anneal_lr=False, clip_ratio=0.1, entropy_coef=0.01, value_coef=1.0, max_grad_norm=0.5, precision=precision,
    )  # fmt: skip
    env = make("ALE/Pong-v5", num_envs=config.num_envs)
    begun = 0.0
    for step, _, _ in ppo.train(config, env):
        if step == ROWS:
            begun = time.perf_counter()
    seconds = (time.perf_counter() - begun) / ITERATIONS
    env.close()
    return ROWS / seconds, seconds


def _arithmetic(precision: str) -> float:
    """Seconds that the trunk alone takes in one iteration."""
    import torch

    from foresight.nets.actor_critic import SharedTrunk
    from foresight.nets.conv import Nature

    body = SharedTrunk(Nature((4, 84, 84)), (6, 1), (0.01, 1.0), precision == "bfloat16")
    rows = torch.randint(0, 256, (256, 4, 84, 84), dtype=torch.uint8)

    def learn() -> None:
        sum(y.square().mean() for y in body(rows)).backward()

    @torch.inference_mode()
    def act() -> None:
        body(rows[:8])

    def seconds(call: Any, times: int) -> float:
        call()
        begun = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begun) / times

    return 128 * seconds(act, 64) + 16 * seconds(learn, 8)


def ours() -> dict[str, Any]:
    """This library's `ppo.train`, as a user runs it."""
    import torch

    from foresight.nets import precision as precisions

    torch.set_num_threads(THREADS)
    precision = "bfloat16" if precisions.fast_bfloat16("cpu") else "float32"
    steps, seconds = rate(precision)
    result = {"rate": steps, "precision": precision, "threads": THREADS, "of_limit": _arithmetic(precision) / seconds}
    if precision != "float32":
        result["float32"], _ = rate("float32")
    return result


def peer() -> dict[str, Any]:
    """stable-baselines3's PPO at the same settings."""
    import ale_py
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    torch.set_num_threads(THREADS)
    gymnasium.register_envs(ale_py)
    # frameskip=1: the wrapper skips, and two skips would be 16 frames.
    envs = make_atari_env("ALE/Pong-v5", n_envs=8, seed=0, env_kwargs={"frameskip": 1})
    model = PPO(
        "CnnPolicy", VecFrameStack(envs, 4), n_steps=128, batch_size=256, n_epochs=4, learning_rate=2.5e-4,
        clip_range=0.1, ent_coef=0.01, vf_coef=0.5, seed=0, device="cpu",
    )  # fmt: skip
    model.learn(ROWS)
    begun = time.perf_counter()
    model.learn(ITERATIONS * ROWS, reset_num_timesteps=False)
    return {"rate": ITERATIONS * ROWS / (time.perf_counter() - begun), "threads": THREADS}

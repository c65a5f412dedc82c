"""Episode returns of any policy in control environments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from foresight.data.trajectory import Tree
from foresight.envs.base import Env, Feedback
from foresight.runtime.evaluation.evaluate import EVALUATION_SEED, Evaluation

MAX_STEPS = 108_000  # of an episode that does not end by itself (30 minutes of Atari frames)
Act = Callable[[Tree, Tree], tuple[Tensor, Tree]]  # (obs, carry) -> (action, carry)


def random_policy(env: Env, seed: int) -> Act:
    """Uniformly random legal actions (normally distributed if the space is unbounded)."""
    from gymnasium.vector.utils import batch_space

    from foresight.nets import encoders

    if key := encoders.mask_key(env.spaces.obs):
        head, generator = encoders.policy_head(env.spaces.action), torch.Generator().manual_seed(seed)

        def allowed(obs: Tree, carry: Tree) -> tuple[Tensor, Tree]:
            mask = torch.as_tensor(obs[key]).cpu() > 0
            action: Tensor = head(torch.zeros(mask.shape), mask).sample(generator)
            return action, carry

        return allowed
    space = batch_space(env.spaces.action, env.num_envs)
    space.seed(seed)
    return lambda obs, carry: (torch.as_tensor(np.asarray(space.sample())), carry)


def evaluate(
    env: Env,
    act: Act,
    episodes: int,
    seed: int,
    reset_carry: Callable[[Tree, Tensor], Tree] | None,
    rewarded: Callable[[Tree, Tensor], Tree] | None = None,
) -> Evaluation:
    """Evaluate `act` on `episodes` episodes, a fixed quota per env: the first to end would be biased to short ones.

    `rewarded(carry, reward)` passes the rewards `[B]` to a policy that acts on them.
    """
    quota = [episodes // env.num_envs + (i < episodes % env.num_envs) for i in range(env.num_envs)]
    values: list[list[float]] = [[] for _ in quota]
    running, length = [0.0] * env.num_envs, [0] * env.num_envs
    obs, carry = env.reset(seed + EVALUATION_SEED), None
    while any(len(done) < wanted for done, wanted in zip(values, quota, strict=True)):
        action, carry = act(obs, carry)
        feedback = env.step(action)
        obs = feedback.obs
        rewards, real = feedback.reward.tolist(), feedback.mask.tolist()
        for i in range(env.num_envs):
            running[i] += rewards[i] * real[i]
            length[i] += int(real[i])
        ended = _ended(feedback)
        reported = feedback.info.get("episode_return")
        for k, i in enumerate(ended):
            # The env reports the unclipped return.
            values[i].append(float(reported[k]) if reported is not None else running[i])
            running[i], length[i] = 0.0, 0
        for i in range(env.num_envs):
            if length[i] >= MAX_STEPS:
                values[i] += [running[i]] * (quota[i] - len(values[i]))
        if carry is not None and rewarded is not None:
            carry = rewarded(carry, feedback.reward * feedback.mask)
        if carry is not None and bool(feedback.cut.any()):
            if reset_carry is None:
                raise TypeError("An algorithm that has a carry must define reset_carry(carry, cut).")
            carry = reset_carry(carry, feedback.cut)
    kept = [value for done, wanted in zip(values, quota, strict=True) for value in done[:wanted]]
    return Evaluation.of("return", kept)


def _ended(feedback: Feedback) -> list[int]:
    """The envs whose episode (not only a life) ended, in the order in which returns are reported."""
    engine = feedback.info.get("engine")
    over = engine.get("game_over") if isinstance(engine, dict) else None
    if over is None:
        over = (feedback.cut * feedback.mask).numpy()
    return [int(i) for i in np.flatnonzero(np.asarray(over))]

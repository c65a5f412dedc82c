"""foresight: planning and reinforcement learning, from the Bellman equation to agents that speak.

>>> import foresight
>>> run = foresight.train("ppo", env="CartPole-v1", steps=100_000)
>>> run.evaluation
>>> policy = foresight.load(run.path)
>>> policy.act(obs)
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["load", "resume", "train"]


def __getattr__(name: str) -> Any:
    # Late, because `foresight --help` must not wait for torch.
    if name in __all__:
        from foresight.runtime import run

        return getattr(run, name)
    raise AttributeError(f"module 'foresight' has no attribute {name!r}")

"""foresight: planning and reinforcement learning, from the Bellman equation to language models that reason.

>>> import foresight
>>> run = foresight.train("ppo", env="CartPole-v1", steps=100_000)
>>> run.evaluation
>>> policy = foresight.load(run.path)
>>> policy.act(obs)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# OpenMP threads that wait for one another spin before they sleep: 300,000 times with GNU's OpenMP. On a busy machine
# this is longer than a time slice, so a spinning thread blocks the thread that it waits for. Torch's copy of OpenMP
# reads the variable when it is loaded, so it is set before, and only if the user has not set it.
WAITING = {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys() else {"GOMP_SPINCOUNT": "10000"}
os.environ.update(WAITING)

__version__ = "0.1.0"
__all__ = ["load", "resume", "train"]


if TYPE_CHECKING:
    from foresight.runtime.run import load, resume, train
else:

    def __getattr__(name: str) -> object:
        # Late, because `foresight --help` must not wait for torch.
        if name in __all__:
            from foresight.runtime import run

            return getattr(run, name)
        raise AttributeError(f"module 'foresight' has no attribute {name!r}")

"""A reward function that hangs ends a run after a checkpoint; what follows is what would have followed."""

from __future__ import annotations

import json

import pytest
import torch

from foresight.errors import LostError
from foresight.runtime import run
from tests import tiny_language
from tests.sabotage import begins_anew, sabotaged_by

REWARDS = """
import time

calls = 0

def count(completions, **columns):
    global calls
    calls += 1
    if calls == HANGS:
        time.sleep(600)
    return [float(c.count("a")) for c in completions]
"""


def _train(tmp_path, name, hangs):
    (tmp_path / f"{name}.py").write_text(REWARDS.replace("HANGS", str(hangs)))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{i}?"}) for i in range(10)))
    return run.train(
        "grpo", task=str(rows), model=tiny_language.folder(), out=tmp_path / name, show=False, prompts=2, group=3,
        max_new_tokens=5, steps=4, learning_rate=1e-2, precision="float32",
        env_options={"reward": f"{tmp_path}/{name}.py:count", "reward_timeout": 3},
    )  # fmt: skip


@sabotaged_by("foresight.algorithms.language.grpo.train", begins_anew)
def test_a_reward_function_that_hangs_stops_the_run_with_a_checkpoint_and_resuming_changes_nothing(tmp_path):
    """A reward function that never returns.

    Wrong: an alarm that works only in the main thread and silently scores 0 elsewhere (verl 5635), or a run that hangs
    (verl 5839, 6673; TRL 5281; AReaL 1426).
    Invariant: it has its own process and time limit, and weights after a stop and a resume = those without, bit for
    bit.
    """
    whole = _train(tmp_path, "whole", 0)
    words = r"'count' did not answer within 3 seconds.*The checkpoint at 1 updates is saved.*foresight resume"
    with pytest.raises(LostError, match=words):
        _train(tmp_path, "cut", 3)
    (tmp_path / "cut.py").write_text(REWARDS.replace("HANGS", "0"))  # fixed
    cut = run.resume(tmp_path / "cut", show=False)
    weights = [dict(run.load(one.path).state.policy.named_parameters()) for one in (whole, cut)]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name

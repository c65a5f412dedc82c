"""Every metric that a short run of an algorithm reports is named on its page."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from foresight.envs.base import Spaces
from foresight.envs.make import make
from foresight.envs.text.task import Example, TextTask
from foresight.runtime import catalog
from foresight.training import offline
from foresight.training.options import build_config
from tests import tiny_language
from tests.algorithms.imitation import lines, scenes
from tests.algorithms.policy.small_envs import choice
from tests.algorithms.sequence import chain
from tests.algorithms.world.world_runs import SIZES, near
from tests.house.rules import ROOT

Fields = dict[str, Any]

ROLL: Fields = {"steps": 64, "num_envs": 8, "rollout_steps": 8, "hidden": (8,)}
REPLAY: Fields = {"steps": 32, "num_envs": 8, "learning_starts": 16, "batch_size": 4, "train_every": 16, "hidden": (8,)}
DREAM: Fields = {
    "steps": 32, "num_envs": 8, "learning_starts": 16, "batch_size": 2, "sequence_length": 4, "depth": 2,
    "replay_size": 200, "horizon": 2, "imagined_last": 2, "groups": 4, "classes": 4, "units": 8, "layers": 1,
}  # fmt: skip
WIDTHS: Fields = {"width": 8, "heads": 2, "sequence_layers": 1, "imagined_batch": 4, "context": 2}
TERMS: Fields = {"contrastive_coef": 1.0, "contrastive_steps": 2, "replay_value_coef": 0.3}
PLAN: Fields = {"horizon": 2, "candidates": 4, "elites": 2, "iterations": 1}
LATENTS: Fields = {"proposals": 2, "latent_size": 8, "hidden": 8, "encoder_hidden": 8, "bins": 11}
MODEL: Fields = {
    "seed_episodes": 1, "updates": 1, "deter": 8, "stoch": 4, "hidden": 8, "units": 8, "layers": 1, "depth": 2,
    "replay_size": 200,
}  # fmt: skip
SEARCH: Fields = {
    "steps": 64, "num_envs": 8, "simulations": 2, "unroll_steps": 2, "n_steps": 2, "batch_size": 4, "train_every": 16,
    "collect_steps": 4, "learning_starts": 32, "latent_size": 8, "hidden": (8,), "replay_size": 200,
}  # fmt: skip
DATA: Fields = {"steps": 2, "batch_size": 2, "data": ("d",)}
TEXT: Fields = {"model": tiny_language.folder, "precision": "float32", "steps": 1}
SAMPLED: Fields = {**TEXT, "prompts": 4, "max_new_tokens": 4}
ROWS: Fields = {**TEXT, "batch_size": 2}
DECODER: Fields = {"layers": 1, "dim": 16, "heads": 2, "kv_heads": 1, "mlp_size": 8, "experts": 2, "predict_tokens": 2}

# The options of a run that reports everything. Left out are algorithms that start from a run, that compile their loop
# for seconds, and that report what GRPO reports.
RUNS: dict[str, Fields] = {
    "value_iteration": {}, "policy_iteration": {}, "truncated_policy_iteration": {}, "soft_value_iteration": {},
    "a2c": ROLL, "impala": {**ROLL, "rollouts_per_update": 1}, "off_policy_ac": ROLL, "ppo": ROLL, "qac": ROLL,
    "ppg": {**ROLL, "policy_iterations": 1, "auxiliary_epochs": 1, "minibatches": 1, "auxiliary_minibatches": 1},
    "reinforce": {"steps": 8}, "trpo": ROLL,
    "dqn": REPLAY, "rainbow": REPLAY, "sac": REPLAY, "sac_discrete": REPLAY,
    "dreamer": {**DREAM, **SIZES, "train_ratio": 1.0}, "storm": {**DREAM, **WIDTHS, **TERMS, "train_every": 16},
    "planet": {**PLAN, **MODEL, "steps": 16, "num_envs": 8, "batch_size": 2, "sequence_length": 2},
    "tdmpc2": {**REPLAY, **PLAN, **LATENTS},
    "muzero": SEARCH, "gumbel_muzero": SEARCH, "efficientzero": SEARCH, "stochastic_muzero": SEARCH,
    "sampled_muzero": {**SEARCH, "samples": 2},
    "act": {**DATA, "dim": 8, "hidden": 8, "chunk": 2}, "behavior_cloning": DATA,
    "decision_transformer": {**DATA, "dim": 8},
    "diffusion_policy": {**DATA, "widths": (8,), "embedding": 8, "horizon": 4, "action_steps": 2},
    "trajectory_transformer": {**DATA, "dim": 8, "bins": 3, "window": 2, "context": 1, "horizon": 1},
    "vla": {**DATA, **scenes.FIELDS, "find": True},
    "dapo": SAMPLED, "mtp_critic": SAMPLED, "rlhf_ppo": SAMPLED,
    "distill": {**SAMPLED, "teacher": tiny_language.folder, "soft": True}, "grpo": {**SAMPLED, "kl_coef": 0.1},
    "rloo": {**SAMPLED, "kl_coef": 0.1},
    "dpo": ROWS, "kto": ROWS, "orpo": ROWS, "reward_model": {**ROWS, "lm_coef": 1.0}, "sft": ROWS,
    "pretrain": {**DECODER, "steps": 1, "batch_size": 2},
}  # fmt: skip
CONTINUOUS = ("planet", "sac", "sampled_muzero", "tdmpc2")
OFFLINE: dict[str, tuple[Spaces, Callable[[], Any]]] = {
    **dict.fromkeys(
        ("behavior_cloning", "decision_transformer", "trajectory_transformer"), (chain.SPACES, chain.chain)
    ),
    **dict.fromkeys(("act", "diffusion_policy"), (lines.TWO_MODES, lines.two_modes)),
    "vla": (scenes.SPACES, scenes.demonstrations),
}


def environment(name: str, kind: str) -> Any:
    """A small one that the algorithm `name` of a `kind` trains in."""
    if kind == "text":
        columns = {"completion": "3"} if name in ("sft", "pretrain") else {"chosen": "3", "rejected": "aa"}
        rows = [Example(f"{i}?", "3", {"prompt": f"{i}?", **columns}) for i in range(8)]
        return TextTask("t", rows, rows[:2], lambda _, answers: [float(len(set(x))) for x in answers])
    if kind != "control":
        return make({"tabular": "GridWorld4x4", "game": "tic_tac_toe"}[kind], kind=kind)
    if name in OFFLINE:
        return SimpleNamespace(spaces=OFFLINE[name][0], num_envs=1)
    return near() if name in CONTINUOUS else choice()


def unnamed(name: str, reported: set[str], text: str) -> set[str]:
    """The metrics that neither the page with this `text` names in its table nor those that the table refers to."""
    pages = [text, *((ROOT / "docs" / page).read_text() for page in re.findall(r"\]\((\w+\.md)", table(text)))]
    return reported - {metric for page in pages for metric in re.findall(r"`([^`]+)`", table(page))} - {"samples"}


def table(text: str) -> str:
    """The section on metrics."""
    return text.partition("\n## Metrics\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", RUNS)
def test_the_metrics_of_a_run_are_on_the_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in OFFLINE:
        monkeypatch.setattr(offline, "read", lambda *_: OFFLINE[name][1]())
    module = catalog.module(name)
    given = {key: value() if callable(value) else value for key, value in RUNS[name].items()}
    reported = set[str]()
    for _, metrics, _ in module.train(build_config(module.Config, **given), environment(name, module.KIND)):
        reported |= metrics.keys()
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert reported and unnamed(name, reported, text) == set()


def test_a_metric_without_a_row_is_found() -> None:
    text = (ROOT / "docs" / "sac_discrete.md").read_text(encoding="utf-8")
    assert unnamed("sac_discrete", {"q", "critic_loss"}, text) == set()  # the second is on the page of SAC
    assert unnamed("sac_discrete", {"q", "norm"}, text) == {"norm"}
    assert unnamed("sac_discrete", {"q"}, text.partition("## Metrics")[0]) == {"q"}

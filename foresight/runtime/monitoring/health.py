"""Warnings about unhealthy metrics: what a value means for the run, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foresight.runtime import catalog
from foresight.runtime.config.settings import Settings

Sentence = str | None
Test = Callable[[float, Mapping[str, float]], Sentence]


@dataclass(frozen=True)
class Rule:
    """`test(value, metrics)` gives a sentence where the value of `metric` is unhealthy.

    It must be so `patience` times in a row before a warning: one bad step is noise.
    """

    metric: str
    test: Test
    patience: int = 1


class Health:
    """Watches the metrics of a run and warns once per episode of trouble.

    A rule warns when its condition begins, and again only after the condition has cleared and returned.
    """

    def __init__(self, rules: tuple[Rule, ...] | None = None) -> None:
        self._rules = RULES if rules is None else rules
        self._streak = [0] * len(self._rules)

    def check(self, step: int, metrics: Mapping[str, object]) -> list[str]:
        """The sentences that are new at `step`; metrics that are absent or NaN change nothing."""
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        sentences = []
        for index, rule in enumerate(self._rules):
            if rule.metric not in numbers or math.isnan(numbers[rule.metric]):
                continue  # NaN is not a matter of health: a NaN loss stops the run, others mean "not defined"
            sentence = rule.test(numbers[rule.metric], numbers)
            self._streak[index] = self._streak[index] + 1 if sentence else 0
            if sentence and self._streak[index] == rule.patience:
                sentences.append(f"step {step:,}: {sentence}")
        return sentences


def unlearned(resolved: Settings, step: int, updates: int | None, before: Any, after: Any) -> Sentence:
    """Of an agent with a learned model (MuZero and its variants): that it learned nothing yet, and what a run takes.

    `before`, `after`: the Evaluations of random play and of the run; `updates`: gradient steps, where the State counts.
    """
    if not {"unroll_steps", "simulations", "learning_starts"} <= set(resolved.config) or step < 1:
        return None
    noise = 2 * math.hypot(before.std, after.std) / math.sqrt(max(after.n, 1))
    if updates == 0:
        starts, every = resolved.config["learning_starts"], resolved.config["train_every"]
        why = f"no gradient step was due: learning_starts is {starts:,} env steps, and train_every {every:,}"
    elif after.worth <= before.worth + noise:
        why = f"{after.metric} {after.mean:.4g} is no better than the {before.mean:.4g} of random play"
    else:
        return None
    known = catalog.presets(resolved.algorithm)
    mine = {name: preset for name, preset in known.items() if preset.get("env") == resolved.env} or known
    takes = [f"{preset['steps']:,} at {name}" for name, preset in mine.items() if preset.get("steps", 0) > step]
    more = f" Its presets take {', '.join(takes)}: continue with: foresight resume RUN --steps N." if takes else ""
    return f"no learning yet after {step:,} env steps: {why}.{more}"


def nonfinite(metrics: Mapping[str, object]) -> list[str]:
    """The names of metrics that are NaN or infinite: where a loss is among them, training must stop."""
    return [k for k, v in metrics.items() if isinstance(v, float) and not math.isfinite(v)]


def _equal_groups(share: float, metrics: Mapping[str, float]) -> Sentence:
    if share < 1:
        return None
    reward = metrics.get("reward")
    if reward is not None and reward >= 1:
        return "every group in this step had equal, full rewards: no gradient; the task is solved or too easy"
    return "every group in this step had equal rewards: no gradient; try a harder or easier task"


def _most_equal(share: float, _: Mapping[str, float]) -> Sentence:
    if not 0.9 <= share < 1:
        return None
    return f"{share:.0%} of the groups had equal rewards and gave no gradient; try larger groups or another difficulty"


def _left_out(share: float, _: Mapping[str, float]) -> Sentence:
    if share < 1:
        return None
    return "every completion of this step is truncated or unscorable: no gradient"


def _truncated(share: float, _: Mapping[str, float]) -> Sentence:
    return f"{share:.0%} of completions hit the token limit: raise max_new_tokens" if share > 0.5 else None


def _unscorable(share: float, _: Mapping[str, float]) -> Sentence:
    if share <= 0.1:
        return None
    return f"{share:.0%} of the rewards were None (unscorable) and were left out; check the reward function"


def _entropy(value: float, _: Mapping[str, float]) -> Sentence:
    # A differential entropy may be far below zero in health, so this speaks only of the discrete floor.
    if not 0 <= value < 0.003:
        return None
    return (
        f"entropy collapsed to {value:.2g}: the policy hardly explores; "
        "if it has not solved the task, raise the entropy bonus or lower the learning rate"
    )


def _kl(value: float, _: Mapping[str, float]) -> Sentence:
    if value <= 0.1:
        return None
    return (
        f"one update moved the policy far (approximate KL {value:.2g}); "
        "lower the learning rate, the epochs or the clip ratio"
    )


def _clipped(share: float, _: Mapping[str, float]) -> Sentence:
    if share <= 0.4:
        return None
    return f"{share:.0%} of the probability ratios were clipped; lower the learning rate or do fewer epochs per rollout"


def _ratio(value: float, _: Mapping[str, float]) -> Sentence:
    if 0.05 <= value <= 20:
        return None
    return (
        f"a probability ratio reached {value:.3g}: the current policy is far from the one that acted; "
        "lower the learning rate, or check that the sampling temperature is the same in both"
    )


def _explained(value: float, _: Mapping[str, float]) -> Sentence:
    if value >= -1:
        return None
    return (
        f"explained variance is {value:.2f}: the critic predicts worse than a constant; "
        "scale the rewards or lower the learning rate of the critic"
    )


def _gradient(value: float, _: Mapping[str, float]) -> Sentence:
    if value == 0:
        return "the gradient is exactly zero: nothing is being learned"
    return None


def _reference(value: float, _: Mapping[str, float]) -> Sentence:
    if value <= 1:
        return None
    return (
        f"the model has drifted far from the reference (KL {value:.3g} nats a token): completions may be degenerate; "
        "raise the KL coefficient or lower the learning rate"
    )


def _sampler(value: float, _: Mapping[str, float]) -> Sentence:
    if value <= 0.1:
        return None
    return (
        f"sampling and learning disagree by {value:.2g} nats a token: the ratio is not what it seems; "
        "use float32, or the same precision in both"
    )


RULES = (
    Rule("equal_reward_groups", _equal_groups),
    Rule("equal_reward_groups", _most_equal, patience=3),
    Rule("left_out_groups", _left_out),
    Rule("truncated", _truncated),
    Rule("unscorable", _unscorable),
    Rule("entropy", _entropy, patience=10),
    Rule("approx_kl", _kl, patience=3),
    Rule("clip_fraction", _clipped, patience=5),
    Rule("ratio", _ratio, patience=3),
    Rule("ratio_min", _ratio, patience=3),
    Rule("ratio_max", _ratio, patience=3),
    Rule("explained_variance", _explained, patience=10),
    Rule("grad_norm", _gradient, patience=3),
    Rule("kl", _reference, patience=3),
    Rule("sampler_error", _sampler, patience=3),
)

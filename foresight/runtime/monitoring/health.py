"""Warnings about unhealthy metrics: what a value means for the run, and how to fix it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foresight.runtime import catalog
from foresight.runtime.config.settings import Settings

ENDLESS = 10_000  # steps of every environment, without an end of an episode
NO_END = (
    f"no episode has ended in {ENDLESS:,} steps of every environment, so there are no returns, and an evaluation will "
    "be long: give the environment a time limit, for example --env-options time_limit=1000"
)

Message = str | None
Test = Callable[[float, Mapping[str, float]], Message]


@dataclass(frozen=True)
class Rule:
    """`test(value, metrics)` returns a warning if the value of `metric` is unhealthy, else None.

    It must do so `patience` times in a row before the run warns: one bad step is noise.
    """

    metric: str
    test: Test
    patience: int = 1


class Health:
    """Checks the metrics of a run against rules, and warns once per problem.

    A rule warns again only after its condition has cleared and returned. With the `settings` of a run, it also warns
    where no episode ends.
    """

    def __init__(self, rules: tuple[Rule, ...] | None = None, settings: Settings | None = None) -> None:
        self._rules = RULES if rules is None else rules
        self._streak = [0] * len(self._rules)
        self._endless = math.inf if settings is None else _endless(settings)

    def check(self, step: int, metrics: Mapping[str, object]) -> list[str]:
        """The new warnings at `step`. Metrics that are absent or NaN change nothing."""
        values = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        warnings = []
        if step >= self._endless or "return" in metrics:
            if "return" not in metrics:
                warnings.append(f"step {step:,}: {NO_END}")
            self._endless = math.inf
        for index, rule in enumerate(self._rules):
            if rule.metric not in values or math.isnan(values[rule.metric]):
                continue  # NaN needs no warning: a NaN loss stops the run, other metrics are undefined
            warning = rule.test(values[rule.metric], values)
            self._streak[index] = self._streak[index] + 1 if warning else 0
            if warning and self._streak[index] == rule.patience:
                warnings.append(f"step {step:,}: {warning}")
        return warnings


def _endless(settings: Settings) -> float:
    """The env steps by which an episode should have ended; infinite for algorithms that do not report returns."""
    entry = catalog.entry(settings.algorithm)
    if entry.kind != "control" or entry.unit != "env steps" or "return" not in entry.metrics:
        return math.inf
    return ENDLESS * int(settings.config.get("num_envs") or 1) * max(1, settings.actors)


def no_learning(resolved: Settings, step: int, updates: int | None, before: Any, after: Any) -> Message:
    """A warning that an agent with a learned model (MuZero and its variants) learned nothing yet; else None.

    `before`, `after`: the Evaluations of random play and of the run; `updates`: gradient steps, if the State counts
    them.
    """
    if not {"unroll_steps", "simulations", "learning_starts"} <= set(resolved.config) or step < 1:
        return None
    noise = 2 * math.hypot(before.std, after.std) / math.sqrt(max(after.n, 1))
    if updates == 0:
        starts, every = resolved.config["learning_starts"], resolved.config["train_every"]
        why = f"no gradient step was due: learning_starts is {starts:,} env steps, and train_every {every:,}"
    elif after.score <= before.score + noise:
        why = f"{after.metric} {after.mean:.4g} is no better than the {before.mean:.4g} of random play"
    else:
        return None
    known = catalog.presets(resolved.algorithm)
    mine = {name: preset for name, preset in known.items() if preset.get("env") == resolved.env} or known
    budgets = [f"{preset['steps']:,} at {name}" for name, preset in mine.items() if preset.get("steps", 0) > step]
    more = f" Its presets take {', '.join(budgets)}: continue with: foresight resume RUN --steps N." if budgets else ""
    return f"no learning yet after {step:,} env steps: {why}.{more}"


def nonfinite(metrics: Mapping[str, object]) -> list[str]:
    """The names of metrics that are NaN or infinite."""
    return [k for k, v in metrics.items() if isinstance(v, float) and not math.isfinite(v)]


def _equal_groups(share: float, metrics: Mapping[str, float]) -> Message:
    if share < 1:
        return None
    if metrics.get("reward") == 1:
        return "every reward in this step is 1: no gradient; the task is solved or too easy"
    return (
        "every group in this step had equal rewards: no gradient from them; no answer to a prompt is better than "
        "another: try a finer reward, or a harder or easier task"
    )


def _most_equal(share: float, _: Mapping[str, float]) -> Message:
    if not 0.9 <= share < 1:
        return None
    return (
        f"{share:.0%} of the groups had equal rewards, which give no gradient; try larger groups or another difficulty"
    )


def _left_out(share: float, _: Mapping[str, float]) -> Message:
    if share < 1:
        return None
    return "every completion of this step is truncated or unscorable: no gradient"


def _truncated(share: float, _: Mapping[str, float]) -> Message:
    return (
        f"{share:.0%} of completions hit the token limit: raise max_new_tokens if answers need more"
        if share > 0.5
        else None
    )


def _unscorable(share: float, _: Mapping[str, float]) -> Message:
    if share <= 0.1:
        return None
    return f"{share:.0%} of the rewards were None (unscorable) and were left out; check the reward function"


def _entropy(value: float, _: Mapping[str, float]) -> Message:
    # A healthy differential entropy may be far below zero, so this rule is only for discrete actions.
    if not 0 <= value < 0.003:
        return None
    return (
        f"entropy collapsed to {value:.2g}: the policy hardly explores; "
        "if it has not solved the task, raise the entropy bonus or lower the learning rate"
    )


def _kl(value: float, _: Mapping[str, float]) -> Message:
    if value <= 0.1:
        return None
    return (
        f"one update moved the policy far (approximate KL {value:.2g}); "
        "lower the learning rate, the epochs or the clip ratio"
    )


def _clipped(share: float, _: Mapping[str, float]) -> Message:
    if share <= 0.4:
        return None
    return f"{share:.0%} of the probability ratios were clipped; lower the learning rate or do fewer epochs per rollout"


def _ratio(value: float, _: Mapping[str, float]) -> Message:
    if 0.05 <= value <= 20:
        return None
    return (
        f"a probability ratio reached {value:.3g}: the current policy is far from the one that acted; "
        "lower the learning rate, or check that the sampling temperature is the same in both"
    )


def _explained(value: float, _: Mapping[str, float]) -> Message:
    if value >= -1:
        return None
    return (
        f"explained variance is {value:.2f}: the critic predicts worse than a constant; "
        "scale the rewards or lower the learning rate of the critic"
    )


def _gradient(value: float, _: Mapping[str, float]) -> Message:
    if value == 0:
        return "the gradient is exactly zero: nothing is being learned"
    return None


def _reference(value: float, _: Mapping[str, float]) -> Message:
    if value <= 1:
        return None
    return (
        f"the model has drifted far from the reference (KL {value:.3g} nats a token): completions may be degenerate; "
        "raise the KL coefficient or lower the learning rate"
    )


def _saturated(share: float, _: Mapping[str, float]) -> Message:
    if share == 0:
        return None
    return (
        f"{share:.1%} of the two-hot targets (rewards and returns) are beyond the outermost bins, which stand in for "
        "them: scale the rewards down"
    )


def _sampler(value: float, _: Mapping[str, float]) -> Message:
    if value <= 0.1:
        return None
    return (
        f"sampling and training disagree by {value:.2g} nats a token: the ratio is wrong by as much; "
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
    Rule("saturated", _saturated),
)

from __future__ import annotations

import math

import pytest

from foresight.runtime.config.resolve import resolve
from foresight.runtime.monitoring.health import Health, nonfinite
from tests.sabotage import sabotaged_by


def test_equal_groups_are_reported_once_in_a_row() -> None:
    health = Health()
    reported = [health.check(step, {"equal_reward_groups": share}) for step, share in enumerate([1.0, 1.0, 0.5, 1.0])]
    assert [len(sentences) for sentences in reported] == [1, 0, 0, 1]
    assert "every group in this step had equal rewards: no gradient from them; no answer" in reported[0][0]


def test_a_solved_task_is_not_called_hard() -> None:
    (sentence,) = Health().check(1, {"equal_reward_groups": 1.0, "reward": 1.0})
    assert "solved or too easy" in sentence


def test_truncation_names_the_share_and_the_cure() -> None:
    (sentence,) = Health().check(12_000, {"truncated": 0.75})
    assert sentence == "step 12,000: 75% of completions hit the token limit: raise max_new_tokens if answers need more"


@pytest.mark.parametrize(
    ("name", "sick", "well", "words"),
    [
        ("entropy", 0.0001, 0.5, "entropy collapsed"),
        ("entropy", 0.0, -1.5, "entropy collapsed"),  # a normal policy may have a negative entropy in health
        ("approx_kl", 0.5, 0.01, "moved the policy far"),
        ("clip_fraction", 0.6, 0.1, "60% of the probability ratios were clipped"),
        ("ratio_max", 1e3, 1.3, "probability ratio reached 1e+03"),
        ("ratio_min", 1e-3, 0.8, "probability ratio reached 0.001"),
        ("explained_variance", -3.0, 0.4, "worse than a constant"),
        ("unscorable", 0.5, 0.0, "50% of the rewards were None"),
        ("grad_norm", 0.0, 1e-9, "gradient is exactly zero"),
        ("kl", 5.0, 0.1, "far from the reference"),
        ("sampler_error", 0.5, 0.01, "sampling and training disagree"),
        ("equal_reward_groups", 0.95, 0.3, "95% of the groups"),
        ("left_out_groups", 1.0, 0.9, "every completion of this step is truncated or unscorable"),
    ],
)
def test_every_rule_warns_of_unhealthy_runs_only(name: str, sick: float, well: float, words: str) -> None:
    ill, fine = Health(), Health()
    reported = [sentence for step in range(20) for sentence in ill.check(step, {name: sick})]
    assert len(reported) == 1 and words in reported[0]
    assert [sentence for step in range(20) for sentence in fine.check(step, {name: well})] == []


@sabotaged_by("foresight.runtime.monitoring.health._endless", lambda f: lambda settings: f(settings) / 2)
def test_an_environment_without_end_is_named_once() -> None:
    settings = resolve("ppo", env="CartPole-v1", given={"num_envs": 4})
    health = Health(settings=settings)
    reported = [health.check(step, {}) for step in (30_000, 40_000, 50_000)]
    assert [len(sentences) for sentences in reported] == [0, 1, 0] and "time_limit=1000" in reported[1][0]
    ends = Health(settings=settings)
    assert not ends.check(30_000, {"return": 9.0}) and not ends.check(50_000, {})
    assert not Health(settings=resolve("vla", preset="BabyAI")).check(10**9, {})  # trained on data


def test_one_bad_step_is_noise_and_absence_is_nothing() -> None:
    health = Health()
    reported = []
    for step in range(30):
        reported += health.check(step, {"explained_variance": -5.0 if step % 2 else 0.5})
        reported += health.check(step, {})
        reported += health.check(step, {"approx_kl": math.nan, "entropy": math.nan, "ratio_max": math.nan})
    assert reported == []


def test_nonfinite_names_the_term() -> None:
    assert nonfinite({"loss": 1.0, "value_loss": math.nan, "kl": math.inf, "samples": []}) == ["value_loss", "kl"]

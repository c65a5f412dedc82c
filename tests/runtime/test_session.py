"""What happens beside training: callbacks, and where the time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foresight.algorithms.policy import ppo
from foresight.planning.generation import rollout
from foresight.runtime import catalog, run
from foresight.runtime.monitoring import profile
from tests import tiny_conversations, tiny_language
from tests.sabotage import sabotaged_by

SMALL: dict[str, Any] = {
    "env": "CartPole-v1", "steps": 1024, "num_envs": 4, "rollout_steps": 64, "hidden": (8,), "show": False,
    "evaluation_episodes": 2,
}  # fmt: skip


class Enough(Exception):
    """Of training."""


def test_callbacks_see_every_step(tmp_path: Path) -> None:
    seen: list[tuple[int, float, int]] = []
    also: list[int] = []
    run.train(
        "ppo",
        out=tmp_path / "run",
        callbacks=[
            lambda step, metrics, state: seen.append((step, metrics["entropy"], state.step)),
            lambda *a: also.append(a[0]),
        ],
        **SMALL,
    )
    assert [step for step, _, _ in seen] == also == [256, 512, 768, 1024]
    assert all(0 < entropy < 0.7 and step == whole for step, entropy, whole in seen)


def test_the_log_counts_each_episode_once(tmp_path: Path) -> None:
    states: list[Any] = []
    fields = {**SMALL, "steps": 512, "out": tmp_path / "run"}
    rows = run.train("ppo", callbacks=[lambda step, metrics, state: states.append(state)], **fields).metrics()
    episodes = states[-1].episodes
    assert sum(row.get("ended", 0) for row in rows) == episodes.finished == len(episodes.returns) > 4
    assert min(row["ended_return_min"] for row in rows if "ended" in row) == min(episodes.returns)


def test_a_callback_can_stop_a_run(tmp_path: Path) -> None:
    def enough(step: int, metrics: dict[str, Any], state: Any) -> None:
        if step >= 512:
            raise Enough

    update = ppo.update
    with pytest.raises(Enough):
        run.train("ppo", out=tmp_path / "run", callbacks=[enough], **SMALL)
    assert ppo.update is update
    assert [row["step"] for row in run.Run(tmp_path / "run").metrics()][-1] == 512
    resumed: list[int] = []
    run.resume(tmp_path / "run", show=False, callbacks=[lambda step, *_: resumed.append(step)])
    assert resumed[-1] == 1024


@sabotaged_by(
    "foresight.runtime.monitoring.profile.TimedEnv.step", lambda f: lambda self, action: self.env.step(action)
)
@sabotaged_by("foresight.runtime.monitoring.profile.Profile.add", lambda f: lambda self, section, seconds: None)
def test_a_run_reports_where_its_time_went(tmp_path: Path) -> None:
    update = ppo.update
    fields = {**SMALL, "env": "Pendulum-v1", "epochs": 1, "minibatches": 4}  # its rollouts are steps
    finished = run.train("ppo", out=tmp_path / "run", **fields)
    assert ppo.update is update
    seconds = finished.summary.get("profile", {})
    assert {"environment", "inference", "learning"} <= set(seconds)
    total = finished.summary["seconds"]
    assert sum(seconds.values()) == pytest.approx(total, rel=0.05, abs=0.01)
    assert all(part > 0 for part in seconds.values()), "a section took no time"


@sabotaged_by("foresight.runtime.monitoring.profile.Profile.add", lambda f: lambda self, section, seconds: None)
@pytest.mark.parametrize(
    ("name", "env", "sections"),
    [
        ("value_iteration", "GridWorld4x4", {"learning", "loop"}),
        ("monte_carlo_prediction", "RandomWalk5", {"learning", "loop"}),
        ("q_learning", "CliffWalking-v1", {"loop"}),  # one compiled loop
    ],
)
def test_a_tabular_run_reports_where_its_time_went(name: str, env: str, sections: set[str], tmp_path: Path) -> None:
    update = getattr(catalog.module(name), "update", None)
    finished = run.train(name, env=env, steps=500, out=tmp_path / "run", show=False)
    assert getattr(catalog.module(name), "update", None) is update
    seconds = finished.summary.get("profile", {})
    assert set(seconds) == sections
    assert sum(seconds.values()) == pytest.approx(finished.summary["seconds"], rel=0.05, abs=0.01)


def test_shares_are_among_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foresight.runtime.session.PROFILE_EVERY", 0.0)
    finished = run.train("ppo", out=tmp_path / "run", **SMALL)
    rows = [row for row in finished.metrics() if "profile/learning" in row]
    assert len(rows) == 4
    names = [f"profile/{name}" for name in profile.SECTIONS[:3]]
    assert all(sum(row[name] for name in names) == pytest.approx(1) for row in rows)


def _slow(rows: Path) -> str:
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1?"}) + "\n" for i in range(12)))
    reward = rows.with_suffix(".py")
    reward.write_text(
        "import time\n\n\ndef score(completions, **_):\n    time.sleep(0.05)\n"
        "    return [float(len(c) % 2) for c in completions]\n"
    )
    return f"{reward}:score"


@sabotaged_by(
    "foresight.runtime.monitoring.profile.Profile.count", lambda f: lambda self, section, completions, tokens: None
)
@sabotaged_by("foresight.runtime.monitoring.profile._sampled", lambda f: lambda batch: (12, batch.length.numel()))
@sabotaged_by("foresight.runtime.monitoring.profile.Profile.add", lambda f: lambda self, section, seconds: None)
def test_a_language_run_reports_its_tokens_and_its_time(tmp_path: Path) -> None:
    reward = _slow(tmp_path / "rows.jsonl")
    update, complete = catalog.module("grpo").update, rollout.complete
    finished = run.train(
        "grpo", task=str(tmp_path / "rows.jsonl"), model=tiny_language.folder(), out=tmp_path / "run", show=False,
        steps=3, prompts=3, group=4, max_new_tokens=6, env_options={"reward": reward, "reward_timeout": 0},
    )  # fmt: skip
    assert catalog.module("grpo").update is update and rollout.complete is complete
    rows = [row for row in finished.metrics() if "reward" in row]
    before = 0.0
    for row in rows:
        spent, before = row["seconds"] - before, row["seconds"]
        assert row.get("completions_per_second") == pytest.approx(12 / spent, rel=0.02)
        assert row["tokens_per_second"] == pytest.approx(12 * row["length"] / spent, rel=0.02)
        shares = {name: row[f"profile/{name}"] for name in (*profile.LANGUAGE, "other")}
        assert sum(shares.values()) == pytest.approx(1) and min(shares[name] for name in profile.LANGUAGE) > 0
        assert shares["grading"] * spent >= 0.05
    assert finished.summary["profile"]["grading"] >= 0.15


@sabotaged_by("foresight.runtime.monitoring.profile._sampled", lambda f: lambda batch: (4, int(batch.length.sum())))
def test_conversations_are_sampled_and_only_the_models_tokens_count() -> None:
    times, generator = profile.Profile(), torch.Generator().manual_seed(0)
    with profile.time_language(catalog.module("grpo"), times):
        found = rollout.sample_groups(tiny_conversations.model(), tiny_conversations.task(), 2, 2, 4, 1.0, generator)
    assert times.seconds["sampling"] > 0 and found.batch.own is not None and not found.batch.own.all()
    assert times.seconds["learning"] == times.seconds["grading"] == 0
    rates, seconds = times.throughput(), times.total()
    assert rates["completions_per_second"] == pytest.approx(4 / seconds)
    assert rates["tokens_per_second"] == pytest.approx(int(found.batch.mask.sum()) / seconds)


@sabotaged_by("foresight.runtime.monitoring.profile._update_size", lambda f: lambda *arguments: (0, 0))
def test_a_run_without_samples_reports_how_much_it_trained_on(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1?", "completion": f"{i + 1}"}) + "\n" for i in range(9)))
    finished = run.train(
        "sft", task=str(data), model=tiny_language.folder(), out=tmp_path / "run", show=False, steps=2, batch_size=4
    )
    rows = [row for row in finished.metrics() if "loss" in row]
    before = 0.0
    for row in rows:
        spent, before = row["seconds"] - before, row["seconds"]
        assert row.get("completions_per_second") == pytest.approx(4 / spent, rel=0.02)
        assert row["tokens_per_second"] == pytest.approx(8 / spent, rel=0.02)  # a digit and the end of each
        assert row["profile/sampling"] == row["profile/grading"] == 0 < row["profile/learning"]

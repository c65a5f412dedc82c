"""What happens beside training: callbacks, and where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foresight.algorithms.policy import ppo
from foresight.runtime import catalog, profile, run
from tests.sabotage import sabotaged_by

SMALL: dict[str, Any] = {
    "env": "CartPole-v1", "steps": 1024, "num_envs": 4, "unroll_steps": 64, "hidden": (8,), "show": False,
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


@sabotaged_by("foresight.runtime.profile.Watch.step", lambda f: lambda self, action: self.env.step(action))
@sabotaged_by("foresight.runtime.profile.Profile.add", lambda f: lambda self, section, seconds: None)
def test_a_run_says_where_its_time_went(tmp_path: Path) -> None:
    update = ppo.update
    finished = run.train("ppo", out=tmp_path / "run", **SMALL)
    assert ppo.update is update
    seconds = finished.summary.get("profile", {})
    assert {"environment", "inference", "learning"} <= set(seconds)
    total = finished.summary["seconds"]
    assert sum(seconds.values()) == pytest.approx(total, rel=0.05, abs=0.01)
    assert all(part > 0 for part in seconds.values()), "a section took no time"


@sabotaged_by("foresight.runtime.profile.Profile.add", lambda f: lambda self, section, seconds: None)
@pytest.mark.parametrize(
    ("name", "env", "sections"),
    [
        ("value_iteration", "GridWorld4x4", {"learning", "walking"}),
        ("monte_carlo_prediction", "RandomWalk5", {"learning", "walking"}),
        ("q_learning", "CliffWalking-v1", {"walking"}),  # one compiled loop
    ],
)
def test_a_run_on_tables_says_so_too(name: str, env: str, sections: set[str], tmp_path: Path) -> None:
    update = catalog.module(name).update
    finished = run.train(name, env=env, steps=500, out=tmp_path / "run", show=False)
    assert catalog.module(name).update is update
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

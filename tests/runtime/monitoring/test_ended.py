"""Training episodes one by one: counted once, and a return that is held is that of the last fifth alone."""

from __future__ import annotations

from types import SimpleNamespace

from foresight.envs.base import Episodes
from foresight.runtime.monitoring import ended
from tests.sabotage import change, sabotaged_by


@sabotaged_by("foresight.runtime.monitoring.ended.since", change("count", lambda count: 0))
def test_each_episode_is_counted_once() -> None:
    state = SimpleNamespace(episodes=Episodes())
    assert ended.finished(state) == 0 and ended.since(state, 0) == {}
    state.episodes.note({"episode_return": [3.0, 1.0], "episode_length": [3, 1]})
    assert ended.since(state, 0) == {"ended": 2, "ended_return": 2.0, "ended_return_min": 1.0}
    count = ended.finished(state)
    assert ended.since(state, count) == {}
    state.episodes.note({"episode_return": [7.0], "episode_length": [7]})
    assert ended.since(state, count) == {"ended": 1, "ended_return": 7.0, "ended_return_min": 7.0}
    state.episodes.note({"episode_return": list(map(float, range(150))), "episode_length": [1] * 150})
    assert ended.since(state, 3)["ended"] == 100 and ended.since(state, 3)["ended_return_min"] == 50.0
    assert ended.finished(SimpleNamespace()) == 0


@sabotaged_by("foresight.runtime.monitoring.ended.held", change("steps", lambda steps: 0))
def test_what_is_held_is_of_the_last_fifth() -> None:
    rows = [
        {"step": 40, "ended": 3, "ended_return": 1.0, "ended_return_min": 0.0},
        {"step": 80, "ended": 1, "ended_return": 2.0, "ended_return_min": 2.0},  # of the steps before it
        {"step": 90, "loss": 1.0},
        {"step": 95, "ended": 1, "ended_return": 9.0, "ended_return_min": 9.0},
        {"step": 100, "ended": 3, "ended_return": 5.0, "ended_return_min": 4.0},
    ]
    assert ended.held(rows, 100) == {"mean": 6.0, "min": 4.0, "episodes": 4}
    assert ended.held(rows[:2], 100) == {} == ended.held([{"step": 100, "return": 1.0}], 100)


@sabotaged_by("foresight.runtime.monitoring.ended.held_greedily", change("steps", lambda steps: 0))
def test_what_is_held_greedily_is_of_the_evaluations_of_the_last_fifth() -> None:
    rows = [
        {"step": 80, "evaluation/return": 1.0},
        {"step": 90, "evaluation/return": 9.0, "evaluation/return_std": 0.0},
        {"step": 95, "ended": 1, "ended_return": 0.0, "ended_return_min": 0.0},
        {"step": 100, "evaluation/return": 6.0},
    ]
    assert ended.held_greedily(rows, "return", 100) == {"mean": 7.5, "min": 6.0, "evaluations": 2}
    assert ended.held_greedily(rows[-2:], "return", 100) == {}  # by one evaluation nothing is held

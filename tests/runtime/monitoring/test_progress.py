from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from foresight.runtime.monitoring.progress import HISTORY, Progress, curve, sparkline

SAMPLE = {"prompt": "What is 7 + 12?", "completion": "It is\n19.\x1b[31m", "reward": 1.0}


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=100), out


def test_without_a_terminal_there_are_no_control_codes() -> None:
    console, out = plain()
    with Progress("grpo on addition", 4, "updates", ("reward",), console=console, line_every=0.0) as progress:
        for step in range(1, 5):
            progress.update(step, {"reward": step / 4, "samples": [SAMPLE]})
        progress.note("75% of completions hit the token limit")
    text = out.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)  # nothing but printable characters and newlines
    assert "grpo on addition: 4 updates" in text
    assert "3/4 updates (75%)" in text and "reward 1" in text
    assert text.splitlines()[-1].startswith("4 updates  ")
    assert "What is 7 + 12? → It is 19." in text
    assert "note: 75% of completions hit the token limit" in text


def test_lines_come_at_a_calm_rate() -> None:
    console, out = plain()
    with Progress("p", 1000, "updates", console=console) as progress:
        for step in range(1000):
            progress.update(step + 1, {})
    assert len(out.getvalue().splitlines()) <= 3  # the title, at most one on the way, and the end


def test_the_terminal_shows_bar_metrics_samples_and_notes() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=110, height=40, color_system=None, legacy_windows=False)
    progress = Progress("grpo on addition", 60, "updates", ("reward", "kl"), console=console)
    progress.start()
    for step in range(1, 31):
        progress.update(step, {"reward": step / 60, "kl": 0.01, "hidden": 9.0, "samples": [SAMPLE]})
    progress.note("try a harder task")
    progress.close()
    text = out.getvalue()
    for words in (
        "grpo on addition",
        "50%",
        "30 of 60 updates",
        "reward",
        "0.5",
        "completion",
        "It is 19.",
        "try a harder",
    ):
        assert words in text, words
    assert "hidden" not in text and "▁" in text and "█" in text


def test_quiet_is_silent() -> None:
    console, out = plain()
    with Progress("p", 1, "updates", quiet=True, console=console, line_every=0.0) as progress:
        progress.update(1, {"x": 1.0})
        progress.note("n")
        progress.status("saving")
    assert out.getvalue() == ""


def test_the_last_line_has_the_speed_up_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step came after 0.6 seconds and the other 66 in 0.2, which the last entry of the clock did not see."""
    now = [100.0]
    monkeypatch.setattr("foresight.runtime.monitoring.progress.time.perf_counter", lambda: now[0])
    console, out = plain()
    progress = Progress("p", 67, "sweeps", console=console)
    progress.start()
    for step in range(1, 68):
        now[0] = 100.6 + 0.2 * (step - 1) / 66
        progress.update(step)
    progress.status("evaluating")
    now[0] += 40
    progress.status("")
    assert progress.speed == pytest.approx(67 / 0.8)
    progress.close()
    assert out.getvalue().splitlines()[-1].startswith("67 sweeps  83.75 sweeps/s")


def test_speed_counts_from_where_a_resumed_run_began(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("foresight.runtime.monitoring.progress.time.perf_counter", lambda: now[0])
    progress = Progress("p", 2000, "sweeps", quiet=True)
    progress.start(1000)
    for step in (1100, 1200, 1300):
        now[0] += 1.0
        progress.update(step, {})
    assert progress.speed == pytest.approx(100.0)
    progress.status("evaluating")  # a minute of something else is not slow training
    now[0] += 60.0
    progress.status("")
    assert progress.speed == pytest.approx(100.0)
    assert "0:07 left" in progress.line()


def test_a_long_run_keeps_a_bounded_curve() -> None:
    progress = Progress("p", 10**6, "updates", ("x",), quiet=True)
    progress.start()
    for step in range(50_000):
        progress.update(step, {"x": float(step)})
    assert len(progress._history) < HISTORY
    gaps = {b - a for a, b in zip(progress._history[:-1], progress._history[1:], strict=True)}
    assert progress._history[0] == 0.0 and gaps == {16.0}  # still evenly spread


def test_sparkline_is_low_to_high() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▁▁" and sparkline([]) == "" and sparkline([float("nan")]) == ""
    assert len(sparkline(range(1000), width=48)) == 48


def test_curve_is_text_without_color() -> None:
    text = curve([0.0, 0.5, 1.0], steps=[10, 20, 30], title="reward")
    assert "reward" in text and "\x1b" not in text and len(text.splitlines()) == 14
    assert curve([1.0]) == "" and curve([float("nan")] * 5) == ""

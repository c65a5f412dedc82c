"""Help comes at once: torch is not imported for it."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable

import pytest

PROBE = """
import sys
from foresight.cli.main import main
code = main(sys.argv[1:])
heavy = {"torch", "numpy", "gymnasium", "transformers", "matplotlib"} & set(sys.modules)
sys.stderr.write("heavy: " + " ".join(sorted(heavy)))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def floor() -> float:
    """What the libraries of the command line themselves take to load."""
    return min(_processor_seconds("import tyro, typeguard, rich.table, yaml")[1] for _ in range(3))


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["train", "ppo", "--help"], ["list"], ["show", "grpo"]]
)
def test_help_is_quick_and_light(words: list[str], floor: float) -> None:
    """Twice what the libraries of the command line themselves take to load, and half as much again for noise."""
    least = 9.0
    for _ in range(5):
        done, seconds = _processor_seconds(PROBE, *words)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "heavy: " and done.stdout
        least = min(least, seconds)
        if least < 3 * floor:
            break  # more would not make it less true
    assert least < 3 * floor


def _processor_seconds(code: str, *words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Processor time and not the clock, beside a floor on the same machine: who else is busy must not decide."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_names_every_command(call: Callable) -> None:
    text = call("--help").out
    for name in ("list", "show", "train", "resume", "eval", "play", "plot", "bench", "doctor"):
        assert f" {name} " in text
    assert call().out == text  # no command at all asks for help


def test_train_help_has_every_field_with_its_source(call: Callable, push: object) -> None:
    text = " ".join(call("train", "push.py", "--help").out.replace("│", " ").split())
    assert "--learning-rate FLOAT Nothing is learned with it (Table 3). (default: 0.5)" in text
    assert "--anneal, --no-anneal" in text and "--preset" in text and "--env-options" in text
    preset = " ".join(call("train", "push.py", "--preset", "CartPole-v1", "--help").out.split())
    assert "(default: 0.25)" in preset and "(default: 3.0)" in preset


def test_list_and_show_print_json(call: Callable, push: object) -> None:
    names = {one["name"]: one for one in call("list", "--json").json}
    assert names["ppo"]["kind"] == "control" and names["grpo"]["unit"] == "updates"
    assert {row["file"]: row["met"] for row in names["ppo"]["verified"]}["results/ppo-CartPole-v1.json"] is True
    shown = call("show", "push.py", "--json").json
    fields = {field["name"]: field for field in shown["config"]}
    assert fields["steps"] == {"name": "steps", "type": "int", "default": 300, "help": "env steps, chosen by hand"}
    assert fields["learning_rate"]["help"] == "Nothing is learned with it (Table 3)."
    assert fields["hidden"]["help"] == "How wide nothing is." and fields["anneal"]["help"] == ""
    assert shown["presets"]["CartPole-v1"]["source"] == "made up" and shown["doc"].startswith("Push:")


def test_list_and_show_print_text(call: Callable, push: object) -> None:
    table = call("list").out
    assert "ppo" in table and "more" in table
    assert "results/ppo-CartPole-v1.json" in call("show", "ppo").out and "not run" in call("show", "push.py").out
    text = call("show", "push.py").out
    assert "always push right" in text and "learning_rate" in text and "made up" in text
    assert "\x1b" not in text


def test_list_names_algorithms_without_results(call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foresight.runtime.results.results.rows", list)
    assert "no published result" in call("list").out


def test_version(call: Callable) -> None:
    from foresight import __version__

    assert call("--version").out == f"foresight {__version__}\n"

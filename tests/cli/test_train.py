"""From words to a run and back: what is given explicitly wins over the preset, and the rest is left unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from foresight.cli import fields
from foresight.cli.train import parse
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.runtime import catalog


def test_only_what_was_given_is_passed_on(push: Path) -> None:
    options, given = parse("push.py", ["--preset", "CartPole-v1", "--learning_rate", "0.1", "--no-anneal"])
    assert options.preset == "CartPole-v1" and given == {"learning_rate": 0.1, "anneal": False}


def test_a_default_that_is_given_counts_as_given(push: Path) -> None:
    _, given = parse("push.py", ["--preset", "CartPole-v1", "--learning-rate=0.5", "--limit", "None"])
    assert given == {"learning_rate": 0.5, "limit": None}


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--steps", "1e6"], "steps", 1_000_000),
        (["--steps=2.5e3"], "steps", 2500),
        (["--steps", "100_000"], "steps", 100_000),
        (["--hidden", "32", "16"], "hidden", (32, 16)),
        (["--limit", "7"], "limit", 7.0),
        (["--learning-rate", "1e-3"], "learning_rate", 1e-3),
        (["--anneal"], "anneal", True),
    ],
)
def test_values_are_parsed_from_their_usual_spellings(push: Path, words: list[str], field: str, value: object) -> None:
    assert parse("push.py", words)[1] == {field: value}


@pytest.mark.parametrize("file", ["my-q.py", "2nd.py", "class.py", "run.py"])
def test_a_file_may_have_a_name_that_no_field_has(file: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / file
    path.write_text(catalog.entry("q_learning").path.read_text(encoding="utf-8"), encoding="utf-8")
    assert parse(str(path), ["--gamma", "0.5"])[1] == {"gamma": 0.5}
    with pytest.raises(SystemExit):
        parse(str(path), ["--help"])
    assert f" {path.stem} options " in capsys.readouterr().out


def test_env_options_are_typed() -> None:
    pairs = ["num_envs=4", "engine=gymnasium", "time-limit=None", "map=[1, 2]", "slippery=false"]
    expected: dict[str, Any] = {"num_envs": 4, "engine": "gymnasium", "time_limit": "None", "map": [1, 2]}
    assert fields.options(pairs) == {**expected, "slippery": False}
    with pytest.raises(UserError, match="--env-options takes key=value"):
        fields.options(["num_envs"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-1", 0.1), ("-2.5E-3", -0.0025), (".5e1", 5), ("1e3", 1000), ("1.5e3", 1500), ("{a: 1e-1}", {"a": 0.1}),
        ("[1e6, x]", [1_000_000, "x"]), ("'1e3'", "1e3"), ("e3", "e3"), ("1e", "1e"), ("0.5", 0.5), ("7", 7),
        ("1e999", "1e999"),
    ],
)  # fmt: skip
def test_env_options_with_exponents_are_numbers(text: str, value: object) -> None:
    """YAML 1.1 reads 1e-1 as a text."""
    (found,) = fields.options([f"x={text}"]).values()
    assert found == value and type(found) is type(value)


def test_train_eval_play_plot_and_resume(push: Path, call: Callable, tmp_path: Path) -> None:
    done = call(
        "train", "push.py", "--preset", "CartPole-v1", "--steps", 500, "--out", "run", "--evaluation-episodes", 4
    )
    assert done.code == 0, done.err
    assert "before: return" in done.out and "after:  return" in done.out and "500 env steps" in done.out
    assert "⠤" in done.out or "⠉" in done.out or "⠊" in done.out  # the curve, in braille
    assert "foresight eval run" in done.out and "foresight play run" in done.out
    assert "\x1b" not in done.out + done.err
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["config"]
    assert config["steps"] == 500 and config["learning_rate"] == 0.25 and config["limit"] == 3.0

    evaluated = call("eval", "run", "--episodes", 6, "--json").json
    assert evaluated["n"] == 6 and len(evaluated["values"]) == 6
    assert 8 <= evaluated["mean"] <= 11  # pushing one way, CartPole falls after 8 to 10 steps
    assert call("eval", "run", "--episodes", 6).out.startswith(f"return {evaluated['mean']:.6g} ± ")

    played = call("play", "run", "--gif", "out.gif")
    assert played.code == 0, played.err
    from PIL import Image

    frames = int(played.out.split()[0])
    with Image.open("out.gif") as image:  # frames that are equal are kept once, for longer
        assert 8 <= frames <= 10 and frames - 2 <= image.n_frames <= frames

    plotted = call("plot", "run", "--out", "c.png", "--json").json
    assert plotted["curves"][0]["iqm"] == 500.0 and Path("c.png").stat().st_size > 1000
    assert "push on CartPole-v1" in call("plot", "run", "--out", "c.png").out

    refused = call("resume", "run")
    assert refused.code == 2 and "--steps" in refused.err
    resumed = call("resume", "run", "--steps", 700, "--json")
    assert resumed.json["steps"] == 700 and resumed.json["path"] == "run"
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()][-1] == 700


def test_only_json_is_on_stdout(push: Path, call: Callable) -> None:
    done = call("train", "push.py", "--env", "CartPole-v1", "--json", "--out", "run", "--record")
    assert done.code == 0, done.err
    summary = done.json
    assert {"algorithm", "env", "seed", "steps", "seconds", "baseline", "evaluation", "command"} <= set(summary)
    assert "env steps" in done.err  # progress goes to stderr
    assert (Path("run") / "media" / "result.mp4").stat().st_size > 0


def test_a_model_answers(adder: Path, call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    done = call("train", "adder.py", "--task", "addition", "--out", "run", "--evaluation-episodes", 20)
    assert done.code == 0, done.err
    assert "after:  accuracy" in done.out
    assert call("play", "run", "--prompt", "What is 7 + 12?").out == "It is 19\n"  # cut at 8, as in training
    assert call("play", "run", "--prompt", "What is 7 + 12?", "--tokens", 20).out == "It is 19.\n"
    own = make("addition", "text").test[0]
    assert "reward 1: this is a question of 'addition'" in call("play", "run", "--prompt", own.question).err
    assert "reward" not in call("play", "run", "--prompt", "What is 700 + 12?").err
    monkeypatch.setattr("sys.stdin", io.StringIO("1 + 2\n30 + 4\n\nnever read\n"))
    assert call("play", "run").out == "It is 3.\nIt is 34\n"
    assert call("eval", "run", "--episodes", 5, "--json").json["n"] == 5


def test_what_no_grader_scores_is_null(adder: Path, call: Callable) -> None:
    """JSON has no NaN."""
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{i} + 1?"}}\n' for i in range(9)))
    Path("score.py").write_text("def score(prompts, completions):\n    return [None] * len(completions)\n")
    words = ("--task", "rows.jsonl", "--env-options", "reward=score.py:score", "held_out=3", "--out", "run")
    assert call("train", "adder.py", *words).code == 0
    text = call("eval", "run", "--json").out
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert found["mean"] is None and found["n"] == 0 and found["samples"][0]["reward"] is None


def test_the_commands_at_the_end_can_be_typed(push: Path, call: Callable) -> None:
    """On a narrow terminal too, and with a space in the path."""
    out = f"my runs/{'long ' * 20}run"
    done = call("train", "push.py", "--env", "CartPole-v1", "--out", out, "--evaluation-episodes", 1)
    assert done.code == 0, done.err
    assert done.out.endswith("".join(f"foresight {name} '{out}'\n" for name in ("studio", "eval", "play", "plot")))
    assert f"run directory: {out}\n" in done.out


def test_tables_are_shown_sweep_by_sweep(call: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("train", "value_iteration", "--env", "GridWorld4x4", "--gamma", 1, "--out", "run")
    assert done.code == 0, done.err
    assert "-3" in done.out and "↑" in done.out  # Sutton & Barto, figure 4.1: v* of the far corner's neighbors
    played = call("play", "run")
    assert played.out.count("sweep ") >= 2 and "sweep 1 " in played.out
    assert "sweeps 1, 2, 4, 8, ... and the last are shown" in played.err
    assert call("play", "run", "--gif", "out.gif").code == 0
    from PIL import Image

    with Image.open("out.gif") as image:
        assert image.n_frames >= 3


def test_where_the_time_went_is_reported() -> None:
    from foresight.cli.train import sentences

    profile = {"environment": 1.0, "inference": 0.0, "learning": 3.0}
    assert sentences({"profile": profile}) == ["time:   learning 75%, environment 25%"]
    assert sentences({"profile": {"learning": 0.0}}) == sentences({}) == []

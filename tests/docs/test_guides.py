"""The guides are followed as written: their files are saved, their commands run with a small model and few steps."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_language
from tests.cli.conftest import call as call
from tests.house.rules import ROOT, commands

DOCS = ROOT / "docs"
FILE = re.compile(r'^```python title="(.*?)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Save the files of a page in the working directory, run those that write data, and return the page's commands."""
    monkeypatch.chdir(tmp_path)

    def save(page: str) -> list[str]:
        text = (DOCS / page).read_text(encoding="utf-8")
        for name, source in FILE.findall(text):
            Path(name).write_text(source)
        for name in re.findall(r"^python (\w+\.py)$", text, re.MULTILINE):
            subprocess.run([sys.executable, name], check=True)
        return commands(text)

    return save


def one(lines: list[str], start: str) -> list[str]:
    """The words of the command that starts so, after `foresight`."""
    (line,) = [line for line in lines if line.startswith(start)]
    return shlex.split(line)[1:]


def shorter(words: list[str], *given: object) -> list[str]:
    """The words with other values for the options `given`, as `--option value` pairs."""
    options = {str(name): str(value) for name, value in zip(given[::2], given[1::2], strict=True)}
    kept = [word for i, word in enumerate(words) if not ({word, words[i - 1] if i else ""} & options.keys())]
    return [*kept, *(part for pair in options.items() for part in pair), "--json"]


SMALL = ("--max-new-tokens", 2, "--prompts", 2, "--group", 2, "--steps", 1, "--model")  # a second, with a tiny model


def test_ten_minutes_end_with_a_model_trained_on_an_own_reward(call: Callable, saved: Callable) -> None:
    lines = saved("start/ten_minutes.md")
    scores = {}
    exec(Path("rewards.py").read_text(), scores)
    texts = ["A dog barks.", "It barks.", "A dog " + "barks " * 14]
    assert scores["score"]([""] * 3, texts, ["dog"] * 3) == [1.0, 0.0, 0.5]
    done = call(*shorter(one(lines, "foresight train grpo"), *SMALL, tiny_language.folder()))
    assert done.code == 0, done.err
    assert "reward" in done.json["evaluation"]["metric"] and done.json["steps"] == 1
    assert Path("runs/short/export/config.json").is_file()
    assert call(*one(lines, "foresight eval")).json["n"] == 8  # held_out=8


def test_an_own_environment_and_an_own_map_are_trained_on(call: Callable, saved: Callable) -> None:
    lines = saved("how_to/environment.md")
    few = ("--steps", 256, "--rollout-steps", 32, "--evaluation-episodes", 2)
    done = call(*shorter(one(lines, "foresight train ppo"), *few))
    assert done.code == 0 and done.json["env"] == "corridor:Corridor-v0", done.err
    drawn = call(*shorter(one(lines, "foresight train value_iteration"), "--out", "runs/map"))
    assert drawn.code == 0 and drawn.json["evaluation"]["mean"] > drawn.json["baseline"]["mean"], drawn.err


def test_a_policy_is_exported_as_the_page_does_it(call: Callable, saved: Callable) -> None:
    lines = saved("how_to/export.md")
    train = one(lines, "foresight train ppo")
    assert call(*shorter(train, "--steps", 1024, "--evaluation-episodes", 1)).code == 0
    assert call("export", "runs/balance").code == 0
    code = re.findall(r"^```python\n(.*?)^```$", (DOCS / "how_to/export.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict = {}
    exec(code[0], names)
    assert names["action"].shape == (1,)
    resumed = one(saved("how_to/resume.md"), "foresight resume runs/balance --steps")
    assert call(*shorter(resumed, "--steps", 2048)).json["steps"] == 2048


def test_own_demonstrations_and_own_rewards_are_read(call: Callable, saved: Callable) -> None:
    lines = saved("how_to/data.md")
    sft = one(lines, "foresight train sft")
    done = call(*shorter(sft, "--model", tiny_language.folder(), "--steps", 1, "--batch-size", 2))
    assert done.code == 0, done.err
    assert call(*one(lines, "foresight data episodes --env TwoRoutes-v0")).code == 0
    (source,) = re.findall(
        r"^```python\n(.*?)^```$", (DOCS / "how_to" / "data.md").read_text(), re.DOTALL | re.MULTILINE
    )
    made: dict[str, Any] = {}
    exec(source, made)
    assert made["sample"]["action"].shape == (2, 3, 2)
    assert made["sample"]["observation.state_is_pad"].tolist() == [[True, False], [False, False]]
    Path("questions.jsonl").write_text("".join(f'{{"prompt": "{n}+1?"}}\n' for n in range(4)))
    lines = saved("how_to/reward.md")
    train = one(lines, "foresight train grpo --task questions.jsonl --env-options 'reward=[")
    done = call(*shorter(train, *SMALL, tiny_language.folder()))
    assert done.code == 0, done.err


def test_code_that_is_no_notebook_is_sound_python() -> None:
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name not in ("learn", "notebooks")]
    blocks = [
        block
        for page in pages
        for block in re.findall(
            r"^```python.*?\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
    ]
    assert len(blocks) > 15
    for block in blocks:
        compile(block, "block", "exec")

"""A learned world model on the command line: drawn, played in, trained in; and what is refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import foresight
from foresight.cli import dream
from foresight.errors import UserError
from foresight.runtime import imagined
from foresight.runtime.evaluation import open_loop
from foresight.runtime.run import load

SMALL = {
    "num_envs": 4, "rollout_steps": 4, "learning_starts": 100, "train_ratio": 1.0, "batch_size": 8,
    "sequence_length": 8, "replay_size": 2_000, "horizon": 3, "deter": 16, "hidden": 16, "groups": 4, "classes": 4,
    "blocks": 1, "units": 16, "layers": 1, "depth": 1,
}  # fmt: skip


STORM = {
    "num_envs": 4, "rollout_steps": 4, "learning_starts": 100, "train_every": 50, "batch_size": 8,
    "sequence_length": 8, "replay_size": 2_000, "horizon": 3, "context": 2, "width": 16,
    "sequence_layers": 1, "heads": 2, "groups": 4, "classes": 4, "units": 16, "layers": 1, "depth": 1,
}  # fmt: skip
TDMPC2 = {
    "num_envs": 4, "learning_starts": 100, "train_every": 50, "batch_size": 8, "replay_size": 2_000, "horizon": 2,
    "candidates": 8, "proposals": 2, "elites": 2, "iterations": 1, "latent_size": 8, "hidden": 8, "encoder_hidden": 8,
    "bins": 11,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs on vectors and images, one that predicts no observations, and one without a world model."""
    folder = tmp_path_factory.mktemp("runs")
    common = {"show": False, "evaluation_episodes": 2}
    pole = foresight.train("dreamer", env="CartPole-v1", steps=300, out=folder / "pole", **common, **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_loop, "observe_and_predict", functools.partial(open_loop.observe_and_predict, horizon=5))
        door = foresight.train(
            "dreamer", env="KeyDoor-v0", env_options={"size": 2, "time_limit": 12}, steps=300, record=True,
            out=folder / "door", **common, **SMALL,
        )  # fmt: skip
    small = {"size": 2, "time_limit": 12}
    storm = foresight.train(
        "storm", env="KeyDoor-v0", env_options=small, steps=300, out=folder / "storm", **common, **STORM
    )
    blind = foresight.train("tdmpc2", env="Pendulum-v1", steps=400, out=folder / "blind", **common, **TDMPC2)
    plain = foresight.train("ppo", env="CartPole-v1", steps=256, out=folder / "plain", **common)
    found = {"pole": pole, "door": door, "storm": storm, "blind": blind, "plain": plain}
    return {name: run.path for name, run in found.items()}


def test_a_recorded_run_shows_what_its_model_predicts(runs: dict[str, Path]) -> None:
    assert {file.name for file in (runs["door"] / "media").iterdir()} >= {"result.mp4", "open-loop.mp4"}


def test_plot_draws_errors_by_horizon(runs: dict[str, Path], tmp_path: Path, call: Callable) -> None:
    names = ("pole", "storm", "door", "blind")
    drawn = call("plot", *(runs[x] for x in names), "--model", 2, "--out", tmp_path / "all.png", "--json").json["runs"]
    errors = dict(zip(names, drawn.values(), strict=True))
    assert set(errors.pop("blind")) == {"latent", "reward", "continuation"}
    for one in errors.values():
        assert set(one) == {"observation", "reward", "continuation"}
        assert all(len(values) == 3 for values in one.values()) and one["observation"][1] > 0
    assert (tmp_path / "all.png").stat().st_size > 5_000
    again = call("plot", runs["door"], "--model", 2, "--out", tmp_path / "door.gif", "--json").json["runs"]
    assert list(again.values()) == [errors["door"]]  # measuring changes nothing
    assert (tmp_path / "door.gif").stat().st_size > 1_000


@pytest.mark.parametrize("name", ["door", "storm"])
def test_the_agent_is_filmed_inside_its_model(runs: dict[str, Path], name: str, tmp_path: Path, call: Callable) -> None:
    answer = call("play", runs[name], "--imagine", "--gif", tmp_path / "inside.gif")
    assert answer.code == 0 and "frames in" in answer.out and (tmp_path / "inside.gif").is_file()


def keys(text: str) -> Callable[[], str]:
    pressed: Iterator[str] = iter(text)
    return lambda: next(pressed)


@pytest.mark.parametrize("name", ["pole", "door", "storm"])
def test_keys_act_inside_the_model(runs: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    agent = load(runs[name])
    env = imagined.inside(agent, 1, None, first=True)
    dream._keyboard(agent, env, 0, keys("01 ?r1q0"))
    agent.close()
    out = capsys.readouterr().out
    lines = [line.split("  ")[0] for line in out.splitlines() if line.startswith("step")]
    assert lines[0] == "step 0" and lines.count("step 0") >= 2 and "step 1" in lines and "return" in out
    assert ("▀" in out) == (name != "pole")


def test_a_new_episode_is_shown_before_its_first_action(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    agent = load(runs["pole"])
    dream._keyboard(agent, imagined.inside(agent, 1, 1, first=True), 0, keys("00q"))
    agent.close()
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert lines == ["step 0", "step 1", "step 0", "step 1", "step 0"]


def test_ppo_trains_inside_and_is_evaluated_outside(runs: dict[str, Path], tmp_path: Path) -> None:
    inside = foresight.train(
        "ppo", env=f"imagined:{runs['pole']}", env_options={"horizon": 10}, steps=512, num_envs=8, rollout_steps=16,
        out=tmp_path / "inside", show=False, evaluation_episodes=3,
    )  # fmt: skip
    for part in (inside.evaluation, inside.baseline):
        extra = part.extra_metrics
        assert extra["gap"] == pytest.approx(extra["return_inside"] - part.mean)
    assert inside.evaluation.metric == "return" and inside.evaluation.n == 3
    lengths = [row["length"] for row in inside.metrics() if "length" in row]
    assert lengths and max(lengths) <= 10
    longer = foresight.resume(inside.path, steps=640, show=False)
    assert longer.summary["steps"] == 640
    agent = load(inside.path)
    assert agent.env.name == "CartPole-v1" and agent.act(torch.zeros(4)) in (0, 1)
    agent.close()


def test_mistakes_are_named(runs: dict[str, Path], tmp_path: Path, call: Callable) -> None:
    model = f"imagined:{runs['pole']}"
    cases = [
        (
            ("train", "ppo", "--env", f"imagined:{runs['plain']}"),
            "which learns no world model that predicts step by step. Give a run of dreamer",
        ),
        (("train", "ppo", "--env", "imagined:nowhere"), "is not a run directory"),
        (("train", "ppo", "--env", model, "--env-options", "hroizon=3"), "has the option horizon, not hroizon"),
        (("train", "ppo", "--env", model, "--env-options", "horizon=0"), "horizon must be a whole number"),
        (("train", "ppo", "--env", f"imagined:{runs['blind']}"), "world model predicts no observations"),
        (("play", runs["blind"], "--imagine"), "Give a run of dreamer, storm or planet"),
        (("train", "ppo", "--env", model, "--actors", "2"), "Actors cannot act inside a world model"),
        (("play", runs["plain"], "--imagine"), "which learns no world model"),
        (("play", runs["pole"], "--imagine", "--gif", tmp_path / "x.gif"), "predicts numbers, not images"),
        (("plot", runs["plain"], "--model", "3", "--out", tmp_path / "x.png"), "learns no model to search in"),
        (("plot", runs["pole"], "--model", "0", "--out", tmp_path / "x.png"), "must be at least 1, not 0"),
        (("plot", runs["pole"], runs["plain"], "--model", "3", "--out", tmp_path / "x.png"), "in two figures"),
        (("plot", runs["pole"], runs["door"], "--model", "3", "--out", tmp_path / "x.gif"), "of one run, not of 2"),
    ]
    for words, message in cases:
        answer = call(*words, *(("--out", tmp_path / "bad") if words[0] == "train" else ()))
        assert answer.code == 2 and message in answer.err.replace("\n", " "), (words, answer.err)


def test_a_damaged_replay_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(runs["pole"], copy)
    for file in (copy / "checkpoints").glob("step-*/replay*.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="is damaged"):
        imagined.make(copy, 2)


def test_a_short_replay_is_named(tmp_path: Path) -> None:
    run = foresight.train(
        "dreamer", env="CartPole-v1", out=tmp_path / "short", show=False, evaluation_episodes=2,
        **{**SMALL, "steps": 16, "learning_starts": 16},
    )  # fmt: skip
    with pytest.raises(UserError, match="too few to start from: 16 rows of an environment are needed"):
        imagined.make(run.path, 2)
    assert json.loads((run.path / "summary.json").read_text())["steps"] == 16

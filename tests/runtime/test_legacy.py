"""What earlier versions wrote still loads: run directories, presets and command lines, under the present names."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from foresight.algorithms.language import reward_model, rlhf_ppo
from foresight.algorithms.world import dreamer, storm
from foresight.cli import train as command
from foresight.errors import UserError
from foresight.nets.language import pretrained
from foresight.nets.language.mtp import MultiTokenHeads
from foresight.runtime import catalog, legacy, run
from foresight.runtime.checkpoints import shards
from foresight.runtime.config import config_fields, resolve, settings
from foresight.runtime.config.settings import Settings
from foresight.runtime.evaluation.evaluate import Evaluation
from foresight.training.options import field_types
from tests import tiny_language
from tests.sabotage import sabotaged_by

RUNS = Path(__file__).parents[1] / "fixtures" / "runs"  # written by version 0.1.0, before names were changed
TOTAL = {"value_iteration": 4, "ppo": 2048, "muzero": 448, "grpo": 2}


def _copy(name: str, folder: Path) -> Path:
    """The committed run in a folder of its own; a language run is given a model that is there."""
    path = Path(shutil.copytree(RUNS / name, folder / name))
    config = path / "config.yaml"
    config.write_text(
        config.read_text(encoding="utf-8").replace("tiny_model", tiny_language.folder()), encoding="utf-8"
    )
    return path


@pytest.mark.parametrize("name", TOTAL)
def test_a_run_of_before_is_loaded_and_acts(name: str, tmp_path: Path) -> None:
    agent = run.load(_copy(name, tmp_path), device="cpu")
    assert agent.step == TOTAL[name]
    assert (
        agent.settings.kind == {"value_iteration": "tabular", "ppo": "control", "muzero": "game", "grpo": "text"}[name]
    )
    obs = {"value_iteration": 0, "ppo": [0.0, 0.0, 0.0, 0.0], "grpo": "What is 1 + 2?"}
    if name in obs:
        agent.act(obs[name])
    agent.close()


@pytest.mark.parametrize("name", ["ppo", "grpo", "muzero"])
def test_a_run_of_before_is_resumed_and_written_with_present_names(name: str, tmp_path: Path) -> None:
    path = _copy(name, tmp_path)
    more = {"ppo": 2048 + 1024, "grpo": 3, "muzero": 480}[name]
    finished = run.resume(path, more, show=False, device="cpu")
    assert finished.summary is not None and finished.summary["steps"] >= more
    written = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    assert "world" not in written
    assert not set(written["config"]) & set(legacy.field_names(name))
    assert written["config"].keys() <= config_fields.fields(name, {}).keys()


@sabotaged_by("foresight.runtime.legacy.field_names", lambda f: lambda algorithm: {})
def test_values_of_before_are_read_under_their_present_names() -> None:
    try:
        old = Settings.read(RUNS / "ppo").config
        muzero = Settings.read(RUNS / "muzero").config
    except settings.UserError as error:
        raise AssertionError(error) from error
    assert old["rollout_steps"] == yaml.safe_load((RUNS / "ppo" / "config.yaml").read_text())["config"]["unroll_steps"]
    assert (muzero["batch_size"], muzero["replay_size"], muzero["learning_starts"]) == (8, 200, 60)
    assert muzero["unroll_steps"] == 5  # inside a model it keeps its name


def test_every_renamed_field_is_one_that_there_is() -> None:
    for names, renamed in legacy._FIELDS:
        fields = {name: set(field_types(catalog.config_class(name))) for name in names}
        for old, new in renamed.items():
            assert not any(old in present for present in fields.values()), f"{old} is both an old and a present name"
            assert any(new in present for present in fields.values()), f"{new} is no field of {names}"


@sabotaged_by("foresight.runtime.legacy.weight", lambda f: lambda name: name)
def test_weights_of_before_are_loaded_under_their_present_names() -> None:
    """The bundled agent was saved when the trunk of its network had another name."""
    try:
        agent = run.load("connect_four", device="cpu")
    except UserError as error:
        raise AssertionError(error) from error
    assert "trunk.first.weight" in agent.state.network.state_dict()
    agent.close()


@sabotaged_by("foresight.runtime.legacy.state_fields", lambda f: lambda kind, nodes: dict(nodes))
def test_a_state_of_before_is_read_under_its_present_names() -> None:
    saved = {field.name: field.name for field in dataclasses.fields(rlhf_ppo.State)}
    saved["judge"] = saved.pop("reward_model")
    present = legacy.state_fields(rlhf_ppo.State, saved)
    assert set(present) == {field.name for field in dataclasses.fields(rlhf_ppo.State)}
    assert present["reward_model"] == "reward_model"


def _rewrite(saved: Path, text: str) -> None:
    """Replace the State of a checkpoint, in the file `saved`, and its hash in the manifest."""
    saved.write_text(text, encoding="utf-8")
    manifest = saved.with_name("manifest.json")
    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["files"][saved.name] = shards.digest(saved)
    manifest.write_text(json.dumps(content), encoding="utf-8")


@sabotaged_by("foresight.runtime.legacy.address", lambda f: lambda text: text)
def test_a_checkpoint_of_before_is_restored_into_renamed_fields_and_classes(tmp_path: Path) -> None:
    run.train("q_learning", env="GridWorld4x4", steps=200, out=tmp_path / "run", show=False)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("*/state.json")
    text = saved.read_text(encoding="utf-8")
    for present, old in (('"actor": {', '"walk": {'), ("training.tabular:ActorState", "planning.walks:Walk")):
        assert text.count(present) == 1
        text = text.replace(present, old)
    _rewrite(saved, text.replace('"loop"', '"walking"'))
    try:
        finished = run.resume(tmp_path / "run", 300, show=False)
    except UserError as error:
        raise AssertionError(error) from error
    assert finished.summary is not None and set(finished.summary["profile"]) == {"loop"}


@sabotaged_by("foresight.runtime.legacy.document", lambda f: lambda config: dict(config))
def test_a_preset_of_before_is_read(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    source = catalog.entry("muzero").path.read_text(encoding="utf-8")
    mine.write_text(source, encoding="utf-8")
    (tmp_path / "mine.yaml").write_text("old: {world: game, env: tic_tac_toe, source: mine}\n", encoding="utf-8")
    assert catalog.presets(str(mine))["old"].get("kind") == "game"


def test_options_of_before_are_understood_and_their_new_names_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _, given = command.parse("ppo", ["--unroll-steps", "64", "--no-anneal"])
    assert given == {"rollout_steps": 64, "anneal_lr": False}
    printed = capsys.readouterr().err
    assert "--unroll-steps is called --rollout-steps now" in printed
    assert "--no-anneal is called --no-anneal-lr now" in printed


@sabotaged_by("foresight.runtime.legacy.document", lambda f: lambda config: {**f(config), "paths": {}})
def test_paths_of_files_are_read_under_their_former_name(tmp_path: Path) -> None:
    path, rows = _copy("ppo", tmp_path), tmp_path / "rows.jsonl"
    rows.write_text("{}")
    config = path / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8") + f"places: {{rows.jsonl: {rows}}}\n", encoding="utf-8")
    found = Settings.read(path)
    assert found.paths == {"rows.jsonl": str(rows)} and "places" not in found.document()


@sabotaged_by("foresight.runtime.legacy.preset", lambda f: lambda algorithm, name: (name, ""))
def test_a_preset_is_found_by_its_former_name() -> None:
    try:
        found = resolve.resolve("pretrain", preset="stories-foresee")
    except UserError as error:
        raise AssertionError(error) from error
    assert (found.preset, found.config["predict_tokens"]) == ("stories-multi-token", 4)
    assert found.note == "preset 'stories-foresee' is called 'stories-multi-token' now"
    before = {"algorithm": "pretrain", "preset": "stories-foresee"}
    assert legacy.document(before) == {"algorithm": "pretrain", "preset": "stories-multi-token"}


def test_every_renamed_preset_is_one_that_there_is() -> None:
    for algorithm, renamed in legacy._PRESETS.items():
        known = catalog.presets(algorithm)
        assert set(renamed.values()) <= set(known) and not set(renamed) & set(known)


@sabotaged_by("foresight.runtime.legacy.env_options", lambda f: lambda env, options: (dict(options), ""))
def test_options_of_a_task_are_read_under_their_former_names() -> None:
    found = resolve.resolve("grpo", preset="smollm2-addition", env_options={"reach": 29})
    assert found.env_options.get("train_high") == 29 and "reach" not in found.env_options
    assert found.note == "option 'reach' of addition is called 'train_high' now"
    before = legacy.document({"env": "addition", "env_options": {"reach": 49}})
    assert before["env_options"] == {"train_high": 49}


@sabotaged_by("foresight.runtime.legacy.evaluation", lambda f: lambda document: dict(document))
def test_an_evaluation_of_before_is_read() -> None:
    before = {"metric": "score", "mean": 0.5, "std": 0.5, "n": 2, "also": {"won": 1.0}}
    try:
        found = Evaluation.read(before)
    except TypeError as error:
        raise AssertionError(error) from error
    assert found.extra_metrics == {"won": 1.0} and "also" not in found.document()
    assert command.measured(before) == "score 0.5 ± 0.5 (standard deviation, n = 2), won 1"


@sabotaged_by("foresight.runtime.legacy.weight", lambda f: lambda name: name)
def test_weights_are_read_under_their_former_names(tmp_path: Path) -> None:
    heads = MultiTokenHeads(8, 2)
    before = {name.replace("value_weight", "worth"): x for name, x in heads.state_dict().items()}
    assert {legacy.weight(name) for name in before} == set(heads.state_dict())
    save_file(before, tmp_path / pretrained.HEADS)
    again = pretrained.load_heads(str(tmp_path))
    assert again is not None and torch.equal(again.value_weight, heads.value_weight)
    assert legacy.weight("actor.reach") == "actor.scale"


@sabotaged_by("foresight.runtime.legacy.state_fields", lambda f: lambda kind, nodes: dict(nodes))
@pytest.mark.parametrize("module", [dreamer, storm])
def test_agents_with_world_models_had_one_generator(module: Any) -> None:
    present = legacy.state_fields(module.State, {"generator": 1, "step": 2})
    assert present == {"generator": 1, "step": 2, "inner": 1}
    assert legacy.state_fields(module.State, {**present, "inner": 3})["inner"] == 3


@sabotaged_by("foresight.runtime.legacy.state_fields", lambda f: lambda kind, nodes: dict(nodes))
def test_dqn_had_no_count_of_gradient_steps(tmp_path: Path) -> None:
    small = {"num_envs": 2, "hidden": (8,), "learning_starts": 32, "train_every": 4, "gradient_steps": 1}
    run.train("dqn", env="CartPole-v1", steps=128, out=tmp_path / "run", show=False, evaluation_episodes=1, **small)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("*/state.json")
    text = saved.read_text(encoding="utf-8")
    counted = re.search(r'"gradient_steps": [1-9]\d*, ', text)
    assert counted
    _rewrite(saved, text.replace(counted[0], ""))
    try:
        finished = run.resume(tmp_path / "run", 192, show=False)
    except UserError as error:
        raise AssertionError(error) from error
    assert finished.load().state.gradient_steps == (192 - 128) // 4


@sabotaged_by("foresight.runtime.legacy.added", lambda f: lambda name: False)
def test_codes_of_stochastic_muzero_were_not_standardized(tmp_path: Path) -> None:
    """Their scores have the mean 0 and the variance 1 that the network is built with: all codes stay what they were."""
    small = {"steps": 64, "num_envs": 2, "hidden": (8,), "simulations": 2, "codes": 2, "learning_starts": 32}
    run.train("stochastic_muzero", env="CartPole-v1", out=tmp_path / "run", show=False, evaluation_episodes=1, **small)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("*/state.json")
    text, count = re.subn(r'\["code_(mean|var)", \{"tensor": \[[^\]]*\]\}\], ', "", saved.read_text(encoding="utf-8"))
    assert count == 4  # of the network and of the target network
    _rewrite(saved, text)
    try:
        network = run.load(tmp_path / "run", device="cpu").state.network
    except UserError as error:
        raise AssertionError(error) from error
    assert torch.equal(network.code_mean, torch.zeros(2)) and torch.equal(network.code_var, torch.ones(2))


@sabotaged_by("foresight.runtime.legacy.state_fields", lambda f: lambda kind, nodes: dict(nodes))
def test_reward_models_had_no_marks() -> None:
    present = legacy.state_fields(reward_model.State, {"scorer": 1, "step": 2})
    assert present == {"scorer": 1, "step": 2, "of_steps": None, "delimiter": "\n"}

"""Runs are found, gone on with and asked from anywhere; what was refused leaves nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from foresight.data import episodes as data
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.nets.language import gguf, lora, pretrained
from foresight.runtime import episodes, run
from foresight.runtime.config import paths, resolve, settings
from tests import tiny_language
from tests.sabotage import change, sabotaged_by

SMALL: dict[str, Any] = {"precision": "float32", "show": False, "batch_size": 2}
REWARD = "def digits(completions, **_):\n    return [sum(map(str.isdigit, c)) / 4 for c in completions]\n"


def _trained(home: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> run.Run:
    """A run of one update, everything in it named from the folder `home`."""
    monkeypatch.chdir(home)
    (home / "data").mkdir()
    Path("data/rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1?"}) + "\n" for i in range(10)))
    Path("rewards.py").write_text(REWARD)
    tiny_language.write(home / "model")
    return run.train(
        "grpo", task="data/rows.jsonl", model="model", env_options={"reward": "rewards.py:digits", "reward_timeout": 0},
        out="runs/one", steps=1, prompts=2, group=2, max_new_tokens=3, precision="float32", show=False, **fields,
    )  # fmt: skip


@sabotaged_by("foresight.runtime.config.paths.locate", lambda f: lambda env, config, options: {})
def test_a_run_resumes_from_another_directory(tmp_path, monkeypatch):
    """A run is used from another working directory.

    Wrong: resume, eval and play look for the model and the data in the current directory.
    Invariant: all of them work after a change of directory, and `config.yaml` keeps the paths as typed.
    """
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir(), away.mkdir()
    done = _trained(home, monkeypatch)
    typed = yaml.safe_load((done.path / "config.yaml").read_text())
    assert (typed["env"], typed["config"]["model"]) == ("data/rows.jsonl", "model")
    assert typed["env_options"]["reward"] == "rewards.py:digits"
    command = done.summary["command"]
    monkeypatch.chdir(away)
    path = home / "runs" / "one"
    try:
        agent = run.load(path)
        assert isinstance(agent.act("1+1?"), str)
        assert agent.evaluate().n == 2
        again = run.resume(path, steps=2, show=False)
    except UserError as error:
        raise AssertionError(str(error)) from error
    assert again.summary["steps"] == 2
    assert again.summary["command"] == command.replace("--steps 1", "--steps 2")
    assert yaml.safe_load((path / "config.yaml").read_text())["env"] == "data/rows.jsonl"


@sabotaged_by("foresight.runtime.config.paths.locate", lambda f: lambda env, config, options: {})
def test_a_policy_on_recorded_episodes_resumes_from_another_directory(tmp_path, monkeypatch):
    """The folders of `data` and the run named by `policy` are found again, and are not copied into the run."""
    env, home, away = make("CartPole-v1", num_envs=1), tmp_path / "home", tmp_path / "away"
    home.mkdir(), away.mkdir()
    monkeypatch.chdir(home)
    steps = [(torch.rand(4), torch.tensor(1), torch.tensor(1.0)) for _ in range(3)]
    written = data.episode(steps, torch.rand(4), True)
    episodes.write(written, env.spaces, "CartPole-v1", {}, "by hand", home / "recorded")
    fields = {"batch_size": 2, "evaluation_episodes": 1, "show": False}
    run.train("behavior_cloning", env="CartPole-v1", data=("recorded",), out="one", steps=1, **fields)
    (home / "weak").mkdir()
    fine_tuned = resolve.resolve("episode_grpo", env="BabyAI-GoToLocal-v0", given={"policy": "weak"})
    monkeypatch.chdir(away)
    assert yaml.safe_load((home / "one" / "config.yaml").read_text())["config"]["data"] == ["recorded"]
    assert not (home / "one" / paths.FOLDER).exists()
    assert fine_tuned.relocated(away).config["policy"] == str(home / "weak")
    try:
        assert run.resume(home / "one", steps=2, show=False).summary["steps"] == 2
    except UserError as error:
        raise AssertionError(str(error)) from error


@sabotaged_by("foresight.runtime.config.paths.copy_inputs", lambda f: lambda paths, config, run: None)
def test_a_run_that_was_moved_has_its_data_and_rewards_with_it(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    _trained(home, monkeypatch)
    shutil.move(home / "runs" / "one", tmp_path / "moved")
    shutil.move(home / "model", tmp_path / "moved" / "model")
    monkeypatch.chdir(tmp_path / "moved")
    shutil.rmtree(home)
    try:
        agent = run.load(tmp_path / "moved")
        assert agent.evaluate().n == 2
    except UserError as error:
        raise AssertionError(str(error)) from error
    assert agent.settings.env == str(tmp_path / "moved" / paths.FOLDER / "rows.jsonl")


def test_an_agent_without_its_data_answers_and_reports_what_is_missing(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    done = _trained(home, monkeypatch)
    shutil.rmtree(home / "data")
    shutil.rmtree(done.path / paths.FOLDER)
    agent = done.load()
    assert isinstance(agent.act("1+1?"), str)
    with pytest.raises(UserError, match=r"rows\.jsonl"):
        agent.evaluate()


def test_copies_of_one_name_do_not_collide(tmp_path):
    found = {}
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text(folder)
        found[f"{folder}/rows.jsonl"] = str(tmp_path / folder / "rows.jsonl")
    found["a/rows.jsonl:x"] = found["a/rows.jsonl"]
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    paths.copy_inputs(found, {}, run_directory)
    assert sorted(p.name for p in (run_directory / paths.FOLDER).iterdir()) == ["2-rows.jsonl", "rows.jsonl"]
    shutil.rmtree(tmp_path / "b")
    now = paths.relocate(found, run_directory)
    assert Path(now["b/rows.jsonl"]).read_text() == "b" and now["a/rows.jsonl"] == found["a/rows.jsonl"]


def test_large_files_are_not_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "SMALL", 3)
    (tmp_path / "rows.jsonl").write_text("1234")
    paths.copy_inputs({"rows.jsonl": str(tmp_path / "rows.jsonl")}, {}, tmp_path)
    assert not (tmp_path / paths.FOLDER).exists()


def test_bundled_tasks_are_no_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("addition", "smollm2"):
        (tmp_path / name).mkdir()
    assert resolve.resolve("grpo", task="addition", given={"model": "smollm2"}).paths == {}


@sabotaged_by("foresight.runtime.run._remove", lambda f: lambda paths: None)
def test_a_refused_run_leaves_nothing_behind(tmp_path, monkeypatch):
    """A run is refused after its directory was created, and after its files were.

    Wrong: a config and empty logs are left, so the corrected command is refused because a run exists.
    Invariant: the created directories are removed, and what existed before is unchanged.
    """

    def refuse(*_: object, **__: object) -> None:
        raise UserError("no context")

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1?" + "1" * 70, "answer": "1"}) + "\n" for i in range(10)))
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("kept")
    for late in (False, True):
        if late:  # the baseline comes after the files
            monkeypatch.setattr("foresight.runtime.session.Session._run_evaluation", refuse)
            rows.write_text("".join(json.dumps({"prompt": f"{i}+1?", "answer": "1"}) + "\n" for i in range(10)))
        for out in (tmp_path / "deep" / "run", full):
            with pytest.raises(UserError, match="context"):
                run.train(
                    "grpo", task=str(rows), model=tiny_language.folder(), out=out, steps=1, prompts=2, group=2,
                    max_new_tokens=4, precision="float32", show=False,
                )  # fmt: skip
    assert not (tmp_path / "deep").exists()
    assert [file.name for file in full.iterdir()] == ["mine.txt"]


def test_a_run_that_has_made_a_step_stays(tmp_path):
    def fails(step, metrics, state):
        raise UserError("enough")

    with pytest.raises(UserError, match="enough"):
        run.train("qac", env="CartPole-v1", steps=64, out=tmp_path / "run", show=False, callbacks=[fails])
    assert (tmp_path / "run" / "config.yaml").is_file()


def _adapted(tmp_path: Path) -> tuple[Any, Path]:
    """A policy whose base was rounded to bfloat16, with adapters that say something, and its Config's model."""
    folder = tiny_language.write(tmp_path / "base")
    policy = pretrained.load(str(folder), precision="bfloat16", narrow=True)
    _disturb(policy)
    return policy, folder


def _disturb(policy: Any) -> None:
    lora.add(policy, 4, (), torch.Generator().manual_seed(0))
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.3)


@sabotaged_by("foresight.nets.language.lora.merged", change("base", lambda base: None))
def test_a_merged_export_is_base_and_adapter_to_rounding(tmp_path):
    """The base is stored in few bits while adapters are trained.

    Wrong: a merged model with a rounded base and different logits (by 0.26 in one of SmolLM2).
    Invariant: its logits = those of peft on the folder that training started from.
    """
    policy, folder = _adapted(tmp_path)
    model, words = policy.module, policy.tokenizer
    merged = pretrained.save_folder(model, words, tmp_path / "merged", base=str(folder))
    adapter = pretrained.save_folder(model, words, tmp_path / "adapter", merged=False, base=str(folder))
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    expected = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)(input_ids=tokens).logits
    found = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_names_its_base_as_others_find_it(tmp_path, monkeypatch):
    policy, folder = _adapted(tmp_path)
    monkeypatch.chdir(tmp_path)
    for base, named in (("base", str(folder)), ("smollm2", pretrained.HUB), ("some/one", "some/one")):
        adapter = pretrained.save_folder(policy.module, policy.tokenizer, tmp_path / "adapter", False, base=base)
        assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == named
    adapter = pretrained.save_folder(policy.module, policy.tokenizer, tmp_path / "adapter", False, base="smollm2")
    monkeypatch.setattr(pretrained, "packaged", lambda: folder)  # the packaged model, in a smaller copy
    again = pretrained.load(str(adapter), precision="float32")
    assert not torch.equal(again.module.lm_head.weight, torch.zeros(1)) and not lora.has(again.module)
    plain = pretrained.load(str(folder), precision="float32")
    assert not torch.equal(
        again.module.model.layers[0].mlp.up_proj.weight, plain.module.model.layers[0].mlp.up_proj.weight
    )
    lost = pretrained.save_folder(policy.module, policy.tokenizer, tmp_path / "lost", False, base=str(folder))
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="does not exist: write"):
        pretrained.load(str(lost))


def test_an_adapter_of_a_file_or_of_an_adapter_loads_with_its_base(tmp_path):
    """Every version of `foresight live` is such an adapter if its model is a GGUF file or an adapter."""
    base = str(gguf.write(tiny_language.byte_level(tmp_path / "model"), tmp_path / "model-f16.gguf"))
    tokens, lengths = torch.tensor([[3, 4, 5, 6, 7, 8]]), torch.tensor([6])
    for name in ("first", "second"):
        policy = pretrained.load(base, precision="float32")
        _disturb(policy)
        model, words = policy.module, policy.tokenizer
        merged = pretrained.save_folder(model, words, tmp_path / f"{name}-merged", base=base)
        adapter = pretrained.save_folder(model, words, tmp_path / name, merged=False, base=base)
        expected, found, before = (
            each.logits(each(tokens, lengths)[0])
            for each in (pretrained.load(str(one), precision="float32") for one in (merged, adapter, base))
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert (found - before).abs().max() > 0.1
        base = str(adapter)
    scorer = pretrained.load_scorer(base, precision="float32", generator=torch.Generator().manual_seed(0))
    assert scorer.head.weight.abs().sum() > 0


def test_adapters_whose_bases_are_each_other_are_refused(tmp_path):
    policy, folder = _adapted(tmp_path)
    for name, base in (("a", folder), ("b", tmp_path / "a"), ("a", tmp_path / "b")):
        pretrained.save_folder(policy.module, policy.tokenizer, tmp_path / name, False, base=str(base))
    with pytest.raises(UserError, match=r"b is .*a, which is an adapter of it in turn: write the model"):
        pretrained.load(str(tmp_path / "a"))
    pretrained.save_folder(policy.module, policy.tokenizer, tmp_path / "a", False, base=str(tmp_path / "a"))
    with pytest.raises(UserError, match=r"a is .*a, which is an adapter of it in turn: write the model"):
        pretrained.load(str(tmp_path / "a"))


@sabotaged_by("foresight.runtime.config.settings.Settings.placed", lambda original: lambda self: self)
def test_a_file_by_another_name_is_no_other_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = settings.Settings.read(_trained(tmp_path, monkeypatch).path)
    (tmp_path / "linked").symlink_to("model")
    shutil.copytree(tmp_path / "model", tmp_path / "copied")
    found = {}
    for model in ("model", "linked", str(tmp_path / "model"), "copied"):
        new = dataclasses.replace(old.typed(), config={**old.typed().config, "model": model}, paths={
            **old.paths, model: str(tmp_path / model)})  # fmt: skip
        found[model] = settings.differences(old, new)
    assert found == {"model": [], "linked": [], str(tmp_path / "model"): [], "copied": ["model"]}

"""Mistakes with language data, models and rewards: one message with what to do, and nothing is lost."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foresight import distributed
from foresight.cli.main import main
from foresight.data import forms
from foresight.envs.text import make as text
from foresight.envs.text.task import TextTask
from foresight.envs.text.worker import function
from foresight.errors import LostError, UserError
from foresight.nets.language import pretrained
from foresight.planning.generation.rollout import sample_groups
from foresight.planning.generation.speculative import speculate
from foresight.runtime import kinds, run
from foresight.runtime.agent import Agent
from foresight.runtime.config import resolve
from foresight.training import corpus, graded
from tests import tiny_conversations, tiny_language

DEMONSTRATIONS = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(10)]
PREFERENCES = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "?"} for i in range(10)]
SMALL: dict[str, Any] = {"precision": "float32", "show": False, "prompts": 4, "max_new_tokens": 4}
REWARDS = """
def digits(completions, **_):
    return [sum(map(str.isdigit, c)) / 4 for c in completions]

def nothing(completions, **_):
    return [None] * len(completions)
"""


def rows(folder: Path, name: str, table: list[dict[str, Any]]) -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in table))
    return str(folder / name)


def prompts(folder: Path, longest: int = 3) -> str:
    table = [{"prompt": f"{i}+{j}?"} for i in range(5) for j in range(5)]
    return rows(folder, "prompts.jsonl", [*table, {"prompt": "1" * longest}])


def rewarded(folder: Path, name: str) -> dict[str, str]:
    (folder / "rewards.py").write_text(REWARDS)
    return {"reward": f"{folder / 'rewards.py'}:{name}", "reward_timeout": 0}


def padded(folder: Path, seed: int = 0, rows: int = 3) -> Path:
    """The tiny model with some rows of its table that no token has."""
    shutil.copytree(tiny_language.folder(seed), folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tiny_language.CHARACTERS) + rows)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "table", "has"),
    [("sft", PREFERENCES, "preference"), ("dpo", DEMONSTRATIONS, "demonstration"),
     ("reward_model", DEMONSTRATIONS, "demonstration")],
)  # fmt: skip
def test_data_of_another_form_are_refused_before_anything_is_measured(name, table, has, tmp_path):
    data = rows(tmp_path, "data.jsonl", table)
    with pytest.raises(UserError, match=rf"{name} needs rows of the form .* has '{has}'"):
        run.train(name, data=data, model=tiny_language.folder(), out=tmp_path / "run", steps=1, show=False)


def test_the_task_evaluates_and_the_data_train(tmp_path):
    """Both are demonstrations: the data are trained on, and the task is only evaluated."""
    data = rows(tmp_path, "data.jsonl", [{"prompt": f"{i}+2=", "completion": str(i + 2)} for i in range(10)])
    task = text.make(rows(tmp_path, "task.jsonl", DEMONSTRATIONS))
    assert all("+2=" in row.prompt for row in corpus.examples(data, task, "demonstration", "sft"))
    assert len(corpus.examples(task.path, task, "demonstration", "sft")) == len(task.train) < len(DEMONSTRATIONS)
    assert corpus.examples("", task, "demonstration", "sft") == task.train


@pytest.mark.parametrize(
    "options", [{}, {"seed": 1}, {"held_out": 5}, {"reward": lambda completions, **_: [1.0] * len(completions)}]
)
def test_held_out_rows_are_never_trained_on_however_they_are_graded(options, tmp_path):
    answers = {} if "reward" in options else {row["prompt"]: {"answer": row["completion"]} for row in DEMONSTRATIONS}
    table = [{**row, **answers.get(row["prompt"], {})} for row in DEMONSTRATIONS * 3]
    task = text.make(rows(tmp_path, "task.jsonl", table), **options)
    held = {row.prompt for row in task.test}
    assert held and held.isdisjoint(row.prompt for row in corpus.examples(task.path, task, "demonstration", "sft"))


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("grpo", "epochs"),
        ("dapo", "max_batches"),
        ("pretrain", "heads"),
        ("pretrain", "kv_heads"),
        ("reward_model", "batch_size"),
    ],
)
def test_a_count_of_nothing_is_refused(name, field):
    with pytest.raises(UserError, match=f"{field} must be at least 1, not 0"):
        resolve.resolve(name, task="addition", given={field: 0})


def test_forms_of_other_programs(tmp_path):
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    bad = [chat[0], {"role": "assistant", "content": "3"}]
    _, (row,) = forms.check([{"prompt": "1+1=", "messages": chat}], "x")
    assert (row["prompt"], row["completion"]) == (chat[:1], "2")
    _, (row,) = forms.check([{"prompt": "1+1=", "chosen": chat, "rejected": bad}], "x")
    assert (row["prompt"], row["chosen"], row["rejected"]) == (chat[:1], "2", "3")
    data = rows(tmp_path, "labeled.jsonl", [{**row, "label": i > 0} for i, row in enumerate(DEMONSTRATIONS)])
    with pytest.raises(UserError, match=r"row 1: .* is labeled bad \('label' is false\), .* or train kto"):
        run.train("sft", data=data, model=tiny_language.folder(), out=tmp_path / "run", steps=1, show=False)


def test_a_text_may_hold_any_character(tmp_path):
    """Some characters end a line for Python, but not in JSON; lines are counted as an editor does."""
    file = tmp_path / "a.jsonl"
    odd = [{"prompt": "a\u2028b\u0085c", "completion": "\u2029"}]
    file.write_text(json.dumps(odd[0], ensure_ascii=False) + "\n\n{", encoding="utf-8")
    with pytest.raises(UserError, match="line 3 is not JSON"):
        forms.read(str(file))
    file.write_text(json.dumps(odd[0], ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert forms.read(str(file)) == odd


def test_an_export_replaces_a_model_and_nothing_else(tmp_path, capsys):
    table = rows(tmp_path, "data.jsonl", DEMONSTRATIONS)
    run.train(
        "sft", data=table, model=tiny_language.folder(), out=tmp_path / "run", steps=1, batch_size=2,
        precision="float32", show=False,
    )  # fmt: skip
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    assert main(["export", str(tmp_path / "run"), "--format", "merged", "--out", str(precious)]) == 2
    assert "is not a model: choose another folder" in " ".join(capsys.readouterr().err.split())
    assert (precious / "thesis.txt").read_text() == "years of work"
    for _ in range(2):  # an older export may be replaced
        assert main(["export", str(tmp_path / "run"), "--format", "merged", "--out", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_reward_model_scores_prompts_without_columns(tmp_path):
    scorer = pretrained.load_scorer(tiny_language.folder(1), precision="float32", std=1.0)
    pretrained.save_folder(scorer.trunk.module, scorer.trunk.tokenizer, tmp_path / "scorer")
    made = run.train(
        "rlhf_ppo", task=prompts(tmp_path), model=tiny_language.folder(), reward_model=str(tmp_path / "scorer"),
        out=tmp_path / "run", steps=2, minibatches=1, **SMALL,
    )  # fmt: skip
    assert made.evaluation.metric == "score of the reward model" and math.isfinite(made.evaluation.mean)
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert math.isfinite(logged[0]["reward"]) and "grade" not in logged[0]
    with pytest.raises(UserError, match="rlhf_ppo has no reward: give --reward-model"):
        run.train(
            "rlhf_ppo", task=prompts(tmp_path), model=tiny_language.folder(), out=tmp_path / "none", steps=2, **SMALL
        )


def test_a_grader_that_can_tell_of_nothing_yet_does_not_stop_a_run(tmp_path, capsys):
    made = run.train(
        "grpo", task=prompts(tmp_path), env_options=rewarded(tmp_path, "nothing"), model=tiny_language.folder(),
        out=tmp_path / "run", steps=2, group=2, **SMALL,
    )  # fmt: skip
    assert made.evaluation.n == 0 and math.isnan(made.evaluation.mean) and made.evaluation.score == -math.inf
    assert "the grader could score none" in str(made.evaluation)
    assert (tmp_path / "run" / "export" / "config.json").is_file()
    assert run.resume(tmp_path / "run", steps=3, show=False).evaluation.n == 0
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert "reward unknown: the grader could score none" in capsys.readouterr().out.replace("\n", " ")


def test_a_reward_function_from_python_is_found_again_or_reported_missing(tmp_path, capfd, monkeypatch):
    """A function of a module is found again; one that has no place is reported missing, before anything is measured."""
    (tmp_path / "scores.py").write_text(REWARDS)
    monkeypatch.setitem(sys.modules, "scores", sys)  # a file of the same name was imported before
    digits = function(f"{tmp_path}/scores.py:digits")
    made = {}
    for name, given in (("kept", digits), ("lost", lambda completions, **_: digits(completions))):
        made[name] = run.train(
            "grpo", task=Path(prompts(tmp_path)), env_options={"reward": given}, model=tiny_language.folder(),
            out=tmp_path / name, steps=1, group=2, **{**SMALL, "show": True},
        )  # fmt: skip
        reported = capfd.readouterr().err
        assert "21 examples to train on, 5 held out; rewards are computed from prompts, completions\n" in reported
        assert ("cannot be found again" in reported) == (name == "lost")
    assert made["kept"].summary["evaluation"] == made["lost"].summary["evaluation"]
    assert "scores.py:digits" in made["kept"].summary["command"]
    assert run.resume(made["kept"].path, steps=2, show=False).summary["steps"] == 2
    with pytest.raises(UserError, match=r"The reward function of this run was given from Python .*put it into a file"):
        run.resume(made["lost"].path, steps=2, show=False)
    with pytest.raises(UserError, match=r"The option 'high' is .*, a object. It must be a string, a number"):
        run.train("grpo", task="addition", env_options={"high": object()}, out=tmp_path / "none")


def test_a_prompt_that_is_too_long_is_named_at_the_beginning(tmp_path):
    with pytest.raises(UserError, match=r"(training|held-out) prompt \d+ of 'prompts' \('1+'\) has 90 tokens"):
        run.train(
            "grpo", task=prompts(tmp_path, 90), env_options=rewarded(tmp_path, "digits"), model=tiny_language.folder(),
            out=tmp_path / "run", steps=2, group=2, **SMALL,
        )  # fmt: skip


def test_a_run_stopped_by_a_mistake_is_saved_and_resumes_exactly(tmp_path, monkeypatch):
    """Of a step that fails its draws are taken back; of an evaluation that fails those of the step before stay."""

    def trained(name: str, **more: Any) -> run.Run:
        return run.train(
            "grpo", task=prompts(tmp_path), env_options=rewarded(tmp_path, "digits"), model=tiny_language.folder(),
            out=tmp_path / name, steps=6, group=4, evaluate_every=3, learning_rate=1e-3, **SMALL, **more,
        )  # fmt: skip

    def logged(name: str) -> list[float]:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [row["reward"] for row in map(json.loads, lines) if "reward" in row]

    trained("whole")

    def at(when: int, function: Any, error: UserError) -> Any:
        """The function, which fails when it is called for the `when`-th time."""
        calls = itertools.count(1)

        def called(*given: Any) -> Any:
            if next(calls) == when:
                raise error
            return function(*given)

        return called

    with monkeypatch.context() as patch:
        patch.setattr(TextTask, "reward", at(2, TextTask.reward, UserError("A server refuses.")))
        with pytest.raises(
            LostError, match=r"refuses\. The checkpoint at 1 updates is saved\. When .*foresight resume"
        ):
            trained("step")
    run.resume(tmp_path / "step", show=False)
    assert logged("step") == logged("whole")

    with monkeypatch.context() as patch:  # the first evaluation is the baseline
        scored = at(2, kinds.KINDS["text"].evaluate, LostError("A server went away."))
        patch.setitem(kinds.KINDS, "text", dataclasses.replace(kinds.KINDS["text"], evaluate=scored))
        with pytest.raises(LostError, match="The checkpoint at 3 updates is saved"):
            trained("evaluation")
    run.resume(tmp_path / "evaluation", show=False)
    assert logged("evaluation") == logged("whole")


class Strange(Exception):
    """An error that cannot be pickled."""

    def __init__(self, name: str, *, size: int = 1) -> None:
        super().__init__(f"{name}, {size}", lambda: size)

    def __str__(self) -> str:
        return str(self.args[0])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["training", "evaluation"])
@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [(LostError("A judge went away."), LostError, "A judge went away"), (Strange("a"), RuntimeError, "Strange: a, 1")],
)
def test_what_a_grader_raises_is_raised_in_every_process(rank, what, error, kind, sentence, monkeypatch):
    """Else the first process would save, which is collective, while the others still wait for its rewards."""
    calls, sent = [], []

    def grader(examples, answers):
        calls.append(len(answers))
        raise error

    def broadcast(value):
        sent.append(pickle.loads(pickle.dumps(value)))
        return value if rank == 0 else (None, kind(sentence))

    task = dataclasses.replace(text.make("addition"), grader=grader)
    policy = tiny_language.model()
    module = SimpleNamespace(act=lambda state, examples, explore: (["1"] * len(examples), {}, None))
    monkeypatch.setattr(distributed, "processes", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: rank)
    monkeypatch.setattr(distributed, "broadcast", broadcast)
    with pytest.raises(kind, match=sentence):
        if what == "training":
            sample_groups(policy, task, 2, 2, 2, 1.0, torch.Generator().manual_seed(0))
        else:
            kinds.get("text").evaluate(module, SimpleNamespace(), task, 2, 0)
    assert len(calls) == 1 - rank and len(sent) == 1
    if rank == 0:
        assert sent[0][0] is None and type(sent[0][1]) is kind and sentence in str(sent[0][1])


def test_tables_of_one_vocabulary_may_be_padded_differently(tmp_path):
    plain, wide = tiny_language.model(), pretrained.load(str(padded(tmp_path / "wide", 1)), precision="float32")
    assert (plain.vocab_size, wide.vocab_size) == (len(tiny_language.CHARACTERS), len(tiny_language.CHARACTERS) + 3)
    for model, draft in ((plain, wide), (wide, plain)):
        prompt = [model.encode("1+1")]
        found = speculate(model, prompt, draft, 1, 8, temperature=0.0).batch
        assert torch.equal(found.completion, speculate(model, prompt, model, 1, 8, temperature=0.0).batch.completion)
    made = run.train(
        "distill", task="addition", model=tiny_language.folder(), teacher=str(tmp_path / "wide"), soft=True, group=2,
        out=tmp_path / "run", steps=1, evaluation_episodes=4, **SMALL,
    )  # fmt: skip
    assert made.summary["steps"] == 1
    with pytest.raises(UserError, match="saved without multi-token heads"):
        speculate(plain, [plain.encode("1+1")], pretrained.load_heads(tiny_language.folder()), 1, 4)


@pytest.mark.parametrize(
    ("name", "options", "reported"),
    [
        ("grpo", {"temperature": 0.0}, "temperature must be more than 0"),
        ("grpo", {"temperature": -1.0}, "temperature must be more than 0"),
        ("grpo", {"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ("sft", {"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ("grpo", {"lora_targets": ("q_proj",)}, "lora-targets is given without --lora"),
        ("grpo", {"completer": "foo"}, "must be the URL of a server"),
        ("grpo", {"staleness": 2}, "'addition' has none: choose a task with tools"),
        ("grpo", {"staleness": -1, "task": "calculator"}, "--staleness must be from 0 to 16, not -1"),
        ("rloo", {"staleness": 1}, "rloo does not correct for samples of earlier weights"),
        ("grpo", {"task": "calculator,calculator"}, "does not name several different tasks"),
        ("grpo", {"task": "calculator,addition"}, "'addition' has no conversations"),
        ("grpo", {"task": "calculator,notebook", "env_options": {"orders.size": 9}}, "is of none of the tasks"),
    ],
)
def test_invalid_values_are_refused(name, options, reported, tmp_path):
    if name == "sft":
        options = {**options, "data": rows(tmp_path, "data.jsonl", DEMONSTRATIONS)}
    else:
        options = {"task": "addition", **options}
    with pytest.raises(UserError, match=reported):
        run.train(name, model=tiny_language.folder(), out=tmp_path / "run", steps=1, show=False, **options)


@pytest.mark.parametrize(("unknown", "mean", "n"), [(1, 1.0, 1), (2, math.nan, 0)])
def test_a_conversation_that_cannot_be_scored_does_not_count(unknown, mean, n):
    class Scored(tiny_conversations.Echo):
        def parts(self):
            return {"outcome": math.nan if int(self.question) < unknown else 1.0}

    task = dataclasses.replace(tiny_conversations.task(1), episode=lambda one: Scored(str(one.prompt), 1))
    state = SimpleNamespace(policy=tiny_conversations.model(), config=SimpleNamespace(max_new_tokens=2))
    found = kinds.get("text").evaluate(SimpleNamespace(), state, task, 2, 0)
    assert found.metric == "outcome" and found.n == n and found.mean == pytest.approx(mean, nan_ok=True)
    assert len(found.samples) == 2 and found.extra_metrics == {"turns": 1.0}


def test_conversations_are_refused_in_several_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("foresight.distributed.processes", lambda: 2)
    with pytest.raises(UserError, match=r"'calculator' has conversations .*, which do not work under torchrun"):
        run.train("grpo", task="calculator", model=tiny_language.folder(), out=tmp_path / "run", steps=1, show=False)
    assert not (tmp_path / "run").exists()


def test_an_incomplete_model_is_refused(tmp_path):
    shutil.copytree(tiny_language.folder(), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged or cut off"):
        pretrained.load(str(tmp_path / "model"))


def test_an_error_of_the_template_is_reported(tmp_path):
    model = tiny_language.model()
    model.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    with pytest.raises(UserError, match=r"conversation of user, system \(no system role\).*SmolLM2"):
        model.encode([{"role": "user", "content": "1+1"}, {"role": "system", "content": "be brief"}])


def test_a_custom_reward_may_have_another_scale(tmp_path):
    table = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]
    options = rewarded(tmp_path, "digits")
    assert text.make(rows(tmp_path, "data.jsonl", table), **options).metric == "reward"


def test_a_question_is_prompted_as_in_training():
    """A run whose completions are traces was trained on prompts that ask for one."""
    seen: list[Any] = []
    agent = Agent.__new__(Agent)
    agent.settings, agent.state, agent.env = SimpleNamespace(kind="text"), None, text.make("addition", trace=True)
    agent.module = SimpleNamespace(act=lambda state, obs, explore: (seen.extend(obs) or ["answer"], {}, None))
    one = agent.env.test[0]
    question = next(row.question for row in text.make("addition").test if row.answer == one.answer)
    assert agent.act(question) == "answer" and agent.act([[{"role": "user", "content": question}], one]) == ["answer"]
    assert (seen[0].prompt, seen[0].stop) == (one.prompt, one.stop) and seen[2] is one
    assert seen[1].prompt == [{"role": "user", "content": one.prompt}] and seen[1].stop == one.stop


def test_the_card_of_an_older_checkpoint_describes_that_one(tmp_path):
    made = run.train(
        "grpo", task=prompts(tmp_path), env_options=rewarded(tmp_path, "digits"), group=4, learning_rate=3e-3,
        model=tiny_language.folder(), out=tmp_path / "run", steps=4, checkpoint_every=0, **SMALL,
    )  # fmt: skip
    assert main(["export", str(made.path), "--format", "merged", "--checkpoint", "2"]) == 0
    card = (made.path / "merged" / "README.md").read_text()
    assert "after 2 updates" in card and "after 4 updates" not in card
    agent = made.load(2)
    assert f"{agent.evaluate().mean:.4g}" in card


def test_data_that_cannot_be_written_or_fail_on_the_way(tmp_path, capsys, monkeypatch):
    asked = ["data", "preferences", "--task", "addition", "--model", tiny_language.folder()]
    assert main([*asked, "--out", "/proc/nothing/a.jsonl"]) == 2
    assert "Cannot write /proc/nothing/a.jsonl" in capsys.readouterr().err

    def answered(*given: Any) -> Any:
        yield SimpleNamespace(examples=[1, 2], stopped=torch.ones(2, 1, dtype=torch.bool))
        raise UserError("It broke.")

    monkeypatch.setattr(graded, "sample", answered)
    monkeypatch.setattr(graded, "make", lambda kind, rollout, *rest: [{"prompt": "1+1="}] * len(rollout.examples))
    assert main([*asked, "--out", str(tmp_path / "a.jsonl")]) == 2
    reported = " ".join(capsys.readouterr().err.split())
    assert "It broke. The 2 preferences made so far are in" in reported and "a.partial.jsonl" in reported.replace(
        " ", ""
    )
    assert not (tmp_path / "a.jsonl").exists() and len((tmp_path / "a.partial.jsonl").read_text().splitlines()) == 2

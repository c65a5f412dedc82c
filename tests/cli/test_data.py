"""`foresight data`, and `foresight train NAME --data FILE` on what it made."""

from __future__ import annotations

import datetime
import inspect
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from foresight.cli import data
from foresight.cli.main import main
from foresight.errors import UserError
from foresight.nets.language import pretrained
from foresight.runtime import drafts, run
from foresight.runtime.run import Run
from foresight.training import graded
from tests import tiny_language
from tests.openai_server import Stub, serve
from tests.sabotage import sabotaged_by


@pytest.fixture
def digits(tmp_path):
    task, reward = tmp_path / "task.jsonl", tmp_path / "rewards.py"
    task.write_text("\n".join(json.dumps({"prompt": f"{i}+{j}?"}) for i in range(5) for j in range(5)))
    reward.write_text("def digits(completions, **_):\n    return [sum(map(str.isdigit, c)) for c in completions]\n")
    return ["--task", str(task), "--model", tiny_language.folder(), "--env-options", f"reward={reward}:digits"]


def _rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_preferences_put_the_better_answer_first_and_can_be_learned(digits, tmp_path, capsys):
    out = tmp_path / "pairs.jsonl"
    assert main(["data", "preferences", *digits, "--out", str(out), "--max-new-tokens", "30", "--group", "6"]) == 0
    rows = _rows(out)
    assert len(rows) > 5
    questions = len({row["prompt"] for row in rows})
    assert 1 < questions <= len(rows)
    assert f"{len(rows)} preferences on {questions} different questions from " in capsys.readouterr().out
    for row in rows:
        good, bad = (sum(map(str.isdigit, row[name])) for name in ("chosen", "rejected"))
        assert good > bad
        assert (row["chosen_reward"], row["rejected_reward"]) == (good, bad)
    made = tmp_path / "run"
    arguments = ["--data", str(out), "--model", tiny_language.folder(), "--precision", "float32", "--steps", "2"]
    assert main(["train", "dpo", *arguments, "--out", str(made)]) == 0
    assert Run(made).summary["evaluation"]["metric"] == "pair accuracy"
    assert Run(made).summary["baseline"]["mean"] == 0.5
    assert (made / "export" / "model.safetensors").is_file()


def test_demonstrations_are_good_enough(digits, tmp_path):
    out = tmp_path / "shown.jsonl"
    assert main(["data", "demonstrations", *digits, "--out", str(out), "--max-new-tokens", "30", "--least", "2"]) == 0
    assert all(sum(map(str.isdigit, row["completion"])) >= 2 for row in _rows(out))


@sabotaged_by("foresight.training.graded.before", lambda real: lambda text, stop: text)
def test_stop_texts_end_an_answer_and_are_left_out_of_it(digits, tmp_path, capsys):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    words = ["data", "demonstrations", *digits, "--max-new-tokens", "30", "--least", "0", "--out"]
    assert main([*words, str(whole)]) == 0
    assert main([*words, str(cut), "--stop", "\\n", "e"]) == 0
    answers = [row["completion"] for row in _rows(cut)]
    assert not any("\n" in answer or "e" in answer for answer in answers)
    assert any("e" in row["completion"] for row in _rows(whole))
    assert all(row["reward"] == sum(map(str.isdigit, row["completion"])) for row in _rows(cut))
    capsys.readouterr()
    assert main([*words, str(tmp_path / "x.jsonl"), "--stop", ""]) == 2
    assert "A text of --stop is empty" in capsys.readouterr().err.replace("\n", " ")


def test_truncated_answers_are_reported(digits, tmp_path, capsys):
    assert main(["data", "demonstrations", *digits, "--max-new-tokens", "1", "--out", str(tmp_path / "x.jsonl")]) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert "of the answers were truncated by --max-new-tokens 1 and left out: raise it" in said


def test_a_server_answers_in_place_of_the_model(digits, tmp_path, capsys):
    out = tmp_path / "shown.jsonl"
    arguments = ["data", "demonstrations", *digits, "--max-new-tokens", "30", "--group", "3", "--out"]
    with serve(Stub(tiny_language.model())) as stub:
        assert main([*arguments, str(out), "--completer", stub.url]) == 0
        assert len(stub.requests) == 20 and not stub.loaded
    assert _rows(out)
    assert main([*arguments, str(tmp_path / "b.jsonl"), "--completer", "localhost:8000"]) == 2
    assert "--completer must be the URL of a server" in capsys.readouterr().err.replace("\n", " ")


def test_several_models_answer(digits, tmp_path, capsys):
    one, two, common = tmp_path / "one.jsonl", tmp_path / "two.jsonl", ["--max-new-tokens", "30", "--group", "4"]
    assert main(["data", "preferences", *digits, *common, "--out", str(one)]) == 0
    task, options = digits[:2], digits[4:]
    models = ["--model", *[tiny_language.folder()] * 2]
    assert main(["data", "preferences", *task, *options, *common, *models, "--out", str(two)]) == 0
    assert _rows(two)[: len(_rows(one))] == _rows(one) and len(_rows(two)) > len(_rows(one))
    assert "from 40 prompts" in capsys.readouterr().out
    servers = ["--model", "a", "b", "--completer", "http://localhost:8000"]
    assert main(["data", "preferences", *task, *options, *servers, "--out", str(tmp_path / "x.jsonl")]) == 2
    assert "A server has the weights of one model" in capsys.readouterr().err.replace("\n", " ")


def test_mistakes_are_reported(digits, tmp_path, capsys):
    out = tmp_path / "x.jsonl"
    out.write_text("")
    assert main(["data", "preferences", *digits, "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    out.unlink()
    assert main(["data", "demonstrations", *digits, "--out", str(out), "--least", "99", "--prompts", "2"]) == 2
    assert "None of the 2 prompts gave demonstrations" in capsys.readouterr().err.replace("\n", " ")
    assert not out.exists()
    for option in ("--max-new-tokens", "--group", "--prompts", "--most"):
        assert main(["data", "demonstrations", *digits, "--out", str(out), option, "0"]) == 2
        assert f"{option} must be at least 1, not 0" in capsys.readouterr().err.replace("\n", " ")
    assert main(["data", "demonstrations", *digits, "--out", str(out), "--temperature", "-1"]) == 2
    assert "--temperature must be at least 0" in capsys.readouterr().err.replace("\n", " ")
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}  # of rewards.py, unless Python writes none
    assert left == {"task.jsonl", "rewards.py"}
    assert main(["train", "dpo", "--model", tiny_language.folder()]) == 2
    assert "No task given for dpo: add --task NAME" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["episodes", "run", "--env-options", "time_limit=50"], "--env-options has no effect on episodes: leave it"),
        (["episodes", "run", "--task", "addition"], "--task has no effect on episodes: leave it out."),
        (["episodes", "run", "--fps", "30"], "--fps is for --format lerobot"),
        (["episodes", "--env", "TwoRoutes-v0", "--device", "cuda"], "--device has no effect on episodes of an expert"),
        (["episodes", "--env", "TwoRoutes-v0", "--env-options", "num_envs=4"], "num_envs is no option of this command"),
        (["demonstrations", "--task", "orders", "--group", "3"], "--group has no effect on demonstrations of a task"),
        (["demonstrations", "--task", "addition", "--episodes", "5"], "--episodes has no effect on demonstrations:"),
        (["preferences", "--task", "addition", "--env", "CartPole-v1"], "--env has no effect on preferences:"),
        (["preferences", "--task", "addition", "--least", "2"], "It is for demonstrations."),
        (["steps", "--task", "chains", "--format", "lerobot"], "--format has no effect on steps"),
        (["planners", "--model", "smollm2", "gpt2"], "--model has no effect on planners"),
        (["planners", "--seed", "3"], "--seed has no effect on planners"),
    ],
)
def test_an_option_without_effect_is_refused(call, tmp_path, words, message):
    done = call("data", *words, "--out", tmp_path / "out")
    assert done.code == 2 and message in done.err and not any(tmp_path.iterdir())


def test_every_option_is_read_by_some_kind_of_data():
    read = frozenset().union(*data.READ.values())
    assert read | {"out"} == {
        name for name, one in inspect.signature(data.data).parameters.items() if one.kind == one.KEYWORD_ONLY
    }


def test_what_cannot_be_written_is_known_before_the_work(call, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "load", _never)
    monkeypatch.setattr(pretrained, "load", _never)
    (tmp_path / "file").write_text("")
    done = call("data", "episodes", "run", "--out", tmp_path / "file" / "x")
    assert done.code == 2 and "file is not a folder. Choose another --out." in done.err
    done = call("data", "preferences", "--task", "addition", "--out", tmp_path / "file" / "x.jsonl")
    assert done.code == 2 and "file is not a folder. Choose another --out." in done.err


def test_runs_of_other_environments_have_a_folder_of_their_own(call, tmp_path, monkeypatch):
    """Also where only the options differ: their shapes may not, and the folder has one set of options."""
    options = {"plain": {}, "blind": {"visible": [0, 2]}}
    monkeypatch.setattr(
        run,
        "load",
        lambda name, *_: SimpleNamespace(settings=SimpleNamespace(env="X", env_options=options[name]), close=int),
    )
    done = call("data", "episodes", "plain", "blind", "--out", tmp_path / "out")
    assert done.code == 2 and "blind has other env options than plain: {'visible': [0, 2]} instead of {}" in done.err


def _without_the_generator(add):
    def forgetful(draft, rows, prompts, progress, settings, generator):
        return add(draft, rows, prompts, progress, settings, torch.Generator().manual_seed(0))

    return forgetful


def _stopped(monkeypatch, call, words, chunks):
    """`foresight data` that is stopped after some chunks of 8 prompts."""
    monkeypatch.setattr(graded, "CHUNK", 8)
    real, left = graded.make, iter(range(chunks))

    def make(*given):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(graded, "make", make)
        return call("data", *words)


@sabotaged_by("foresight.runtime.drafts.add", _without_the_generator)
def test_a_command_that_was_stopped_continues_where_it_was(digits, call, tmp_path, monkeypatch):
    """Here within the answers of the second model, whose first chunk is the fourth."""
    out, draft = tmp_path / "a.jsonl", tmp_path / "a.partial.jsonl"
    task, options = digits[:2], digits[4:]
    words = ["preferences", *task, *options, "--model", *[tiny_language.folder()] * 2]
    words += ["--max-new-tokens", "30", "--group", "4", "--out"]
    whole = tmp_path / "whole.jsonl"
    monkeypatch.setattr(graded, "CHUNK", 8)
    assert call("data", *words, whole).code == 0
    stopped = _stopped(monkeypatch, call, [*words, out], 4)
    assert stopped.code == 130 and f"made so far are in {draft}: the same command continues." in stopped.err
    rows = len(_rows(draft))
    assert 0 < rows < len(_rows(whole)) and f"Stopped. The {rows} preferences" in stopped.err
    with draft.open("a") as file:
        file.write('{"prompt": "ha')  # a kill in the middle of a chunk
    other = call("data", *words, out, "--seed", "1", "--most", "2")
    assert other.code == 2 and f"{draft} was made with --most 4 and --seed 0: give the same" in other.err
    again = call("data", *words, out)
    assert again.code == 0 and "28 of 40 prompts were answered before" in again.err
    assert re.findall(r"(\d+) of 40 prompts answered, \d+ preferences", again.err) == ["36", "40"]  # a log has lines
    assert out.read_bytes() == whole.read_bytes()
    assert not draft.exists() and not any(tmp_path.glob("*.progress"))


def test_a_kill_in_the_first_chunk_is_continued(digits, call, tmp_path, monkeypatch):
    out, draft = tmp_path / "a.jsonl", tmp_path / "a.partial.jsonl"
    words = ["preferences", *digits, "--max-new-tokens", "30", "--group", "4", "--out", out]

    def killed(draft, rows, *rest):
        draft.write_text("".join(json.dumps(row) for row in rows))
        raise SystemExit(137)

    with monkeypatch.context() as patch:
        patch.setattr(drafts, "add", killed)
        assert call("data", *words).code == 137 and draft.stat().st_size
    assert call("data", *words).code == 0
    assert call("data", *words[:-1], tmp_path / "whole.jsonl").code == 0
    assert len(_rows(out)) > 4 and _rows(out) == _rows(tmp_path / "whole.jsonl")


def test_settings_that_json_does_not_know_are_compared_too(tmp_path):
    draft, generator = tmp_path / "a.jsonl", torch.Generator().manual_seed(3)
    settings = {"--env-options": {"first": datetime.date(2024, 1, 1), "share": math.nan}}
    progress = drafts.add(draft, [{"prompt": "é"}], 5, drafts.begin(draft, settings, generator), settings, generator)
    assert drafts.resume(draft, settings, torch.Generator()) == progress and progress.size == draft.stat().st_size
    with pytest.raises(UserError, match=r'--env-options \{"first": "2024-01-01", "share": NaN\}: give the same'):
        drafts.resume(draft, {"--env-options": {"first": datetime.date(2024, 1, 2), "share": math.nan}}, generator)


def test_rows_of_another_reward_do_not_join(digits, call, tmp_path, monkeypatch):
    out = tmp_path / "a.jsonl"
    words = ["preferences", *digits, "--max-new-tokens", "30", "--group", "4", "--out", out]
    _stopped(monkeypatch, call, words, 1)
    file = tmp_path / "rewards.py"
    file.write_text(file.read_text() + "\n# another one\n")
    done = call("data", *words)
    assert done.code == 2 and "was made with other files of the task or the model: give the same" in done.err


def test_two_commands_do_not_write_to_one_draft(digits, call, tmp_path):
    out = tmp_path / "a.jsonl"
    with drafts.held(tmp_path / "a.partial.jsonl"):
        done = call("data", "preferences", *digits, "--max-new-tokens", "30", "--out", out)
    assert done.code != 0 and "a.partial.jsonl is being written by another process" in done.err and not out.exists()


def test_a_draft_that_cannot_be_continued_is_kept(digits, call, tmp_path, monkeypatch):
    out, draft = tmp_path / "a.jsonl", tmp_path / "a.partial.jsonl"
    words = ["preferences", *digits, "--max-new-tokens", "30", "--group", "4", "--out", out]
    _stopped(monkeypatch, call, words, 1)
    before = draft.read_bytes()
    draft.write_bytes(before[:-5])
    done = call("data", *words)
    assert done.code == 2 and f"{draft} has fewer rows than its progress: rename it to keep" in done.err
    for damage in ("", "{}", '{"progress": {"steps": 1}, "settings": {}}'):
        (tmp_path / f"{draft.name}.progress").write_text(damage)
        done = call("data", *words)
        assert done.code == 2 and "from a command that did not end, and cannot be continued" in done.err
    assert draft.read_bytes() == before[:-5]


def _never(*given, **options):
    raise AssertionError("the work has begun")


def test_planners_are_written_as_demonstrations(call, tmp_path):
    out = tmp_path / "planners.jsonl"
    done = call("data", "planners", "--out", out, "--env-options", "size=3", "planning=gripper")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.code == 0 and len(rows) == 3 and all("def get_plan" in row["completion"] for row in rows)
    assert call("data", "planners", "--out", out).code == 2

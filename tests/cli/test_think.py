"""`foresight think` and `foresight faithfulness`: what is printed and written, and what a user gets wrong."""

from __future__ import annotations

import json

import pytest
import yaml

from foresight.cli.main import main
from foresight.envs.make import make
from foresight.planning.generation.scripted import Scripted
from foresight.runtime.config.settings import Settings
from foresight.runtime.reasoning import faithfulness
from foresight.runtime.reasoning import think as thinking
from tests import tiny_language
from tests.planning.reasoning.players import player
from tests.planning.reasoning.test_faithfulness import reader
from tests.sabotage import sabotaged_by


@pytest.fixture
def scripted(monkeypatch):
    """Let the commands load a scripted speaker."""

    def use(reply):
        monkeypatch.setattr(thinking, "model", lambda name, *args: Scripted(reply))

    return use


def test_methods_are_compared_and_their_trees_are_written(tmp_path, capsys, scripted):
    scripted(player)
    out = tmp_path / "out"
    command = ["think", "best_of_n", "puct", "--task", "countdown", "--model", "m", "--verifier", "exact"]
    sizes = [
        "--budget",
        "128",
        "--points",
        "2",
        "--questions",
        "6",
        "--max-new-tokens",
        "24",
        "--env-options",
        "traces=steps",
    ]
    assert main([*command, *sizes, "--out", str(out)]) == 0
    assert "best_of_n" in capsys.readouterr().out
    document = json.loads((out / "think.json").read_text())
    rows = {(row["method"], row["budget"]): row for row in document["rows"]}
    assert set(rows) == {("greedy", 24), *((name, b) for name in ("best_of_n", "puct") for b in (32, 128))}
    assert all(row["sampled_tokens"] <= row["budget"] for row in rows.values())
    assert rows["best_of_n", 128]["any"] >= rows["best_of_n", 128]["accuracy"] > rows["greedy", 24]["accuracy"]
    tree = json.loads((out / "puct.tree.json").read_text())
    assert tree["nodes"][0]["kind"] == "question" and any(node["chosen"] for node in tree["nodes"])
    examples = json.loads((out / "thoughts.json").read_text())["examples"]
    assert len(examples) == thinking.EXAMPLES == 5
    thought = {(one["method"], one["budget"]): one for one in examples[0]["results"]}
    assert set(thought) == set(rows) and thought["puct", 128]["tree"] == tree
    votes = thought["best_of_n", 128]["votes"]
    assert [vote["score"] for vote in votes] == sorted((vote["score"] for vote in votes), reverse=True)
    assert votes[0]["text"] == thought["best_of_n", 128]["text"] and votes[0]["reward"] in (0.0, 1.0)
    assert thought["best_of_n", 128]["charge"]["sampled_tokens"] <= 128
    page = (out / "puct.tree.html").read_text()
    assert page.count("<details") == len(tree["nodes"]) and "<script" not in page
    assert all((out / name).stat().st_size > 1000 for name in ("curves.png", "best_of_n.tree.png"))


def test_faithfulness_is_reported_with_intervals(tmp_path, capsys, scripted):
    scripted(reader)
    options = ["--task", "chains", "--env-options", "modulus=10", "largest=9", "size=50", "--questions", "20"]
    assert main(["faithfulness", "m", *options, "--out", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["mistakes"]["aoc"] == 1.0 and document["accuracy"] == 1.0 and document["filler"]["gain"] <= 0.3
    low, high = document["early"]["interval_95"]
    assert low <= document["early"]["aoc"] <= high
    assert (tmp_path / "faithfulness.png").is_file() and (tmp_path / "faithfulness.json").is_file()


@sabotaged_by("foresight.cli.think._task", lambda task: lambda *given: (task(*given)[0], {}))
def test_a_run_is_asked_what_it_held_out(tmp_path, capsys, scripted):
    """Wrong: the task with its default options, whose held-out questions the run may have trained on."""
    scripted(player)
    settings = Settings("pretrain", "text", "countdown", None, {"traces": "steps", "largest": 9}, 100, None, "cpu", {})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings.document()))
    sizes = ["--questions", "4", "--budget", "24", "--points", "1", "--max-new-tokens", "24", "--out", str(tmp_path)]
    options = ["--env-options", "held_out=50"]
    assert main(["think", "greedy", "--task", "countdown", "--model", str(tmp_path), *sizes, *options]) == 0
    capsys.readouterr()
    asked = [example["question"] for example in json.loads((tmp_path / "thoughts.json").read_text())["examples"]]
    own = make("countdown", "text", traces="steps", largest=9, held_out=50)
    assert asked == [example.question for example in own.test[:4]]


def test_a_bundled_language_model_thinks_without_a_download_or_an_export(tmp_path, capsys):
    sizes = ["--questions", "20", "--budget", "256", "--points", "1", "--max-new-tokens", "48", "--out", str(tmp_path)]
    command = ["--task", "chains", "--model", "pretrain/chains-sums", "--verifier", "exact"]
    assert main(["think", "best_of_n", *command, *sizes]) == 0
    rows = {row["method"]: row for row in json.loads((tmp_path / "think.json").read_text())["rows"]}
    assert min(row["accuracy"] for row in rows.values()) >= 0.85  # 0.97 greedy, of 100 questions
    capsys.readouterr()
    assert main(["think", "best_of_n", "--task", "chains", "--model", "ppo/LunarLander-v3", *sizes]) == 2
    assert "ppo/LunarLander-v3 has no language model: it is a run of ppo" in " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_written_is_known_before_the_work(call, tmp_path, monkeypatch, scripted):
    def never(*given, **options):
        raise AssertionError("the work has begun")

    scripted(player)
    monkeypatch.setattr(thinking, "think", never)
    monkeypatch.setattr(faithfulness, "report", never)
    (tmp_path / "notes.txt").write_text("mine")
    for words in (("think", "best_of_n", "--task", "countdown"), ("faithfulness", "m", "--task", "chains")):
        done = call(*words, "--out", tmp_path / "notes.txt")
        assert done.code == 2 and "notes.txt is not a folder. Choose another --out." in done.err
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["think", "--task", "countdown"], "No method given"),
        (["think", "majority", "--task", "countdown"], "Unknown method 'majority'"),
        (["think", "best_of_n", "--task", "addition"], "best_of_n needs a verifier"),
        (["think", "beam", "--task", "addition", "--verifier", "exact"], "no exact verifier"),
        (["think", "beam", "--task", "addition", "--verifier", "judge"], "Unknown verifier 'judge'"),
        (["think", "beam", "--task", "addition", "--verifier", "critic"], "no multi-token heads"),
        (["think", "self_consistency", "--task", "addition", "--budget", "8"], "below one answer"),
        (
            ["think", "deep_think", "--task", "addition", "--questions", "2", "--max-new-tokens", "8"],
            "no chat template",
        ),
        (["think", "self_consistency", "--task", "addition", "--questions", "0"], "must be at least 1"),
        (["think", "self_consistency", "--task", "addition", "--seed", str(10**20)], "--seed must be less than 2**63"),
        (["faithfulness"], "is not a run directory: name the task"),
        (["faithfulness", "--task", "addition"], "do not follow a trace"),
    ],
)
def test_a_mistake_is_explained(arguments, match, capsys):
    folder = tiny_language.folder()
    model = ["--model", folder] if arguments[0] == "think" else [folder]
    assert main([arguments[0], *model, *arguments[1:]]) == 2
    assert match in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["think", "greedy", "--task", "chains", "--model", "pretrain/chain-sums"],
         "There is no model 'pretrain/chain-sums'. Did you mean the bundled 'pretrain/chains-sums'?"),
        (["faithfulness", "ppo/LunarLander-v3"],
         "ppo/LunarLander-v3 has no language model: it is a run of ppo."),
    ],
)  # fmt: skip
def test_a_name_that_is_no_language_model_is_explained(arguments, match, capsys):
    """The hub is not asked for what is nearly the name of a bundled model."""
    assert main(arguments) == 2
    assert match in " ".join(capsys.readouterr().err.split())

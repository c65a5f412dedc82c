"""The model card that goes with every exported language model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from foresight.errors import UserError
from foresight.nets.language.completion import encode
from foresight.runtime import card, catalog, run
from foresight.runtime.export import export
from tests import tiny_language
from tests.sabotage import change, sabotaged_by


def _trained(tmp_path: Path, name: str = "sft", **fields) -> run.Run:
    """A run of two updates on demonstrations or preferences."""
    data = tmp_path / "rows.jsonl"
    answer = {"completion": "3"} if name == "sft" else {"chosen": "3", "rejected": "aa"}
    data.write_text("".join(json.dumps({"prompt": f"{i}+1?", **answer}) + "\n" for i in range(10)))
    return run.train(
        name, task=str(data), out=tmp_path / "run", steps=2, batch=2, precision="float32", seed=3, show=False,
        **{"model": tiny_language.folder(), **fields},
    )  # fmt: skip


@sabotaged_by("foresight.runtime.card.objective", lambda f: lambda doc: "")
@sabotaged_by("foresight.runtime.card.text", lambda f: lambda s, m, a: f(s, {**m, "evaluation": m["baseline"]}, a))
def test_the_card_names_algorithm_data_and_results(tmp_path):
    done = _trained(tmp_path)
    found = ModelCard.load(done.path / "export" / "README.md")
    after = done.summary["evaluation"]
    assert found.data["library_name"] == "transformers" and found.data.pipeline_tag == "text-generation"
    assert {"foresight", "sft", "arxiv:2203.02155"} <= set(found.data.tags)
    assert (
        found.data.base_model is None and "are under its license: look it up" in found.text
    )  # a random model has neither
    (result,) = found.data.eval_results
    assert (result.metric_type, result.metric_value) == (after["metric"], after["mean"])
    assert after["mean"] != done.summary["baseline"]["mean"]
    assert result.dataset_name == "rows.jsonl" and "seed 3" in result.metric_name
    expected = (
        "Ouyang et al. 2022",
        "L(θ) = −",
        done.summary["command"],
        "learning_rate: 1e-05",
        "One run of one seed",
    )
    for part in expected:
        assert part in found.text, part


def test_the_card_of_an_own_file_names_it_and_not_where_it_is(tmp_path):
    own = tmp_path / "my_sft.py"
    own.write_text(catalog.entry("sft").path.read_text(encoding="utf-8"), encoding="utf-8")
    trained = _trained(tmp_path)
    settings = dataclasses.replace(trained.settings, algorithm=str(own))
    summary = {**trained.summary, "command": settings.command()}
    found = card.text(settings, summary)
    assert "trained by `my_sft.py` in the library foresight" in found and "foresight train my_sft.py" in found
    assert str(own) in summary["command"] and str(own) not in found


def test_what_is_exported_loads_merged_and_as_an_adapter(tmp_path):
    done = _trained(tmp_path, lora=2, learning_rate=1e-2)
    merged, adapter = export(done.path, "merged"), export(done.path, "adapter", tmp_path / "adapter")
    tokens = torch.tensor([AutoTokenizer.from_pretrained(merged)("1+1?")["input_ids"]])
    expected = AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
    for model in (
        AutoModelForCausalLM.from_pretrained(done.path / "export"),
        AutoPeftModelForCausalLM.from_pretrained(adapter),
    ):
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, atol=1e-4, rtol=1e-4)
    cards = [ModelCard.load(folder / "README.md") for folder in (merged, adapter)]
    assert [found.data["library_name"] for found in cards] == ["transformers", "peft"]
    assert "An adapter (LoRA)" in cards[1].text and "An adapter" not in cards[0].text


def test_a_reward_model_is_no_writer(tmp_path):
    done = _trained(tmp_path, "reward_model")
    assert AutoModelForSequenceClassification.from_pretrained(done.path / "export").config.num_labels == 1
    assert ModelCard.load(done.path / "export" / "README.md").data.pipeline_tag == "text-classification"


TURNS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}W{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def the_end_of_an_answer(original):
    return lambda trunk: encode(trunk, "1?", "2")[1][-1]


@sabotaged_by("foresight.algorithms.language.reward_model.padding", the_end_of_an_answer)
@pytest.mark.parametrize(
    ("template", "end"), [(None, "<eos>"), (TURNS, "W"), (TURNS.replace("W", "W "), "<eos>")], ids=["no", "own", "two"]
)
def test_the_card_of_a_reward_model_scores_with_plain_transformers(tmp_path, monkeypatch, template, end):
    """A reward model is used without this library.

    Wrong: it has no padding token, or the end token serves as one, or the user must guess how the text is formatted.
    Invariant: the code in the model card, run as it is, gives the scores of the run for a batch of answers of unequal
    length.
    """
    folder = tiny_language.write(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.eos_token = end
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 41]}')
    done = _trained(tmp_path, "reward_model", model=str(folder))
    found = ModelCard.load(done.path / "export" / "README.md").text
    code = found.rpartition("```python")[2].partition("```")[0]
    monkeypatch.chdir(done.path / "export")
    code = code.replace("What is 1+1?", "1+1?").replace("It is three.", "3 or so")
    names: dict = {}
    exec(code, names)
    expected = done.load().act(names["pairs"])
    torch.testing.assert_close(names["scores"], expected, atol=1e-4, rtol=1e-4)
    assert abs(expected[0] - expected[1]) > 1e-2
    shown = "What is 1+1?2<eos>" if template is None else "<user>What is 1+1?<assistant>2W"
    assert repr(shown) in found


def test_a_model_from_nothing_has_no_base(tmp_path):
    done = run.train(
        "pretrain", task="addition", env_options={"held_out": 5}, out=tmp_path / "run", steps=2, layers=1, dim=16,
        heads=2, kv_heads=1, mlp_size=16, batch_size=4, context=32, max_new_tokens=4, predict_tokens=2,
        precision="float32", show=False,
    )  # fmt: skip
    found = ModelCard.load(done.path / "export" / "README.md")
    assert found.data.base_model is None and "there is no base model" in found.text
    assert found.data.model_name == "pretrain" and (done.path / "export" / "heads.safetensors").is_file()
    after = done.summary["evaluation"]
    assert after["metric"] == "nats per character" and after["mean"] < done.summary["baseline"]["mean"]
    assert set(after["extra_metrics"]) == {"bits per character", "accuracy"}


def test_origin_and_license_go_from_card_to_card(tmp_path):
    assert card.base("smollm2")["license"] == "apache-2.0"
    assert card.base("someone/some-model") == {"base_model": "someone/some-model"}
    (tmp_path / "README.md").write_text("---\nlicense: mit\nbase_model: a/b\n---\n# x\n")
    assert card.base(str(tmp_path)) == {"license": "mit", "base_model": "a/b"}
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")
    assert card.base(str(tmp_path)) == {}


def test_a_model_that_began_from_nothing_has_a_card_too(tmp_path):
    small = {"layers": 1, "dim": 16, "heads": 2, "kv_heads": 1, "mlp_size": 16, "steps": 2, "batch_size": 2}
    done = run.train("pretrain", task="stories", out=tmp_path / "run", evaluation_episodes=4, show=False, **small)
    found = ModelCard.load(done.path / "export" / "README.md")
    assert (found.data["library_name"], found.data.base_model) == ("foresight", None)
    assert "# pretrain\n" in found.text and "there is no base model" in found.text


@pytest.mark.parametrize("name", [n for n, e in catalog.algorithms().items() if e.family == "language"])
def test_every_objective_is_found(name):
    formula = card.objective(catalog.entry(name).doc)
    assert "=" in formula and not formula.startswith(" ") and len(formula) < 800


def test_what_cannot_be_exported_is_named(tmp_path):
    done = _trained(tmp_path)
    with pytest.raises(UserError, match=r"no adapter\. Train with --lora"):
        export(done.path, "adapter")
    (done.path / "summary.json").unlink()
    with pytest.raises(UserError, match="has not ended"):
        export(done.path, "merged")


@sabotaged_by("foresight.nets.language.gguf._kind", change("quantization", lambda _: "f16"))
def test_gguf_files_are_evaluated_and_their_card_reports_it(tmp_path):
    done = _trained(tmp_path, model=str(tiny_language.byte_level(tmp_path / "model")), lora=2, learning_rate=1e-2)
    folder = export(done.path, "gguf", quantize=("f16", "q4_0"))
    shown = (folder / "README.md").read_text(encoding="utf-8")
    found = {}
    for name in ("f16", "q4_0"):
        (row,) = [x.split("|") for x in shown.splitlines() if x.startswith(f"| `model-{name}.gguf`")]
        found[name] = float(row[3])
    mean = done.summary["evaluation"]["mean"]
    assert abs(found["f16"] - mean) < 0.01 * abs(mean)  # adapters are in it
    assert found["q4_0"] != found["f16"] and ModelCard(shown).data["library_name"] == "gguf"
    export(done.path, "gguf", quantize=("q8_0",))  # every file that is there is in the card
    files = [x.name for x in folder.glob("*.gguf")]
    shown = (folder / "README.md").read_text(encoding="utf-8")
    assert files == ["model-q8_0.gguf"] and shown.count("| `model-") == 1
    with pytest.raises(UserError, match="not an export"):
        export(done.path, "gguf", done.path)
    with pytest.raises(UserError, match="Did you mean 'q8_0'"):
        export(done.path, "gguf", quantize=("q8",))

"""GGUF: what is written is read back, and its logits are those of the stored weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from foresight import distributed
from foresight.errors import UserError
from foresight.nets.language import gguf, pretrained
from foresight.nets.language.model import LanguageModel
from tests import tiny_language
from tests.sabotage import change, sabotaged_by


def logits(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(torch.tensor([ids]), torch.tensor([len(ids)]))[0])[0]


@sabotaged_by("foresight.nets.language.gguf.interleaved", lambda f: lambda matrix, heads: matrix)
def test_float16_has_the_logits_of_the_rounded_weights(tmp_path: Path):
    folder = tiny_language.byte_level(tmp_path / "model")
    read = pretrained.load(str(gguf.write(folder, tmp_path / "model-f16.gguf")), precision="float32")
    rounded = pretrained.load(str(folder), precision="float32")
    for weight in rounded.module.parameters():
        if weight.dim() == 2:
            weight.data = weight.data.half().float()
    ids = read.tokenizer.encode(tiny_language.TEXT)
    assert ids == PreTrainedTokenizerFast.from_pretrained(folder).encode(tiny_language.TEXT) and len(ids) > 10
    assert torch.equal(logits(read, ids), logits(rounded, ids))
    assert (read.tokenizer.eos_token, read.tokenizer.chat_template) == (tiny_language.END, tiny_language.OPENED)
    assert read.module.config.tie_word_embeddings


@pytest.mark.parametrize("ends", [1, 2, 3])
def test_all_tokens_that_end_an_answer_are_written_and_read(ends: int, tmp_path: Path):
    folder = tiny_language.byte_level(tmp_path / "model")
    end = pretrained.load(str(folder)).tokenizer.eos_token_id
    wanted = sorted({end, *range(5, 4 + ends)})
    generation = {"eos_token_id": wanted if ends > 1 else end}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert pretrained.load(str(folder)).stop_ids == wanted and len(wanted) == ends
    assert pretrained.load(str(gguf.write(folder, tmp_path / "model.gguf"))).stop_ids == wanted
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 5, 6, 7]}))
    with pytest.raises(UserError, match="has 4 tokens that end an answer, and GGUF holds 3"):
        gguf.write(folder, tmp_path / "more.gguf")


@sabotaged_by("foresight.nets.language.gguf._kind", change("quantization", lambda _: "q4_0"))
def test_quantized_logits_are_near_and_files_are_small(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """The step of 8 bits is 1/127 of the largest weight of a block, that of 4 bits 1/8: each about 16 times coarser."""
    folder = tiny_language.byte_level(tmp_path / "model", tied=False)
    model = pretrained.load(str(folder), precision="float32")
    ids = model.tokenizer.encode(tiny_language.TEXT)
    plain, error, size = logits(model, ids), {}, {}
    for kind in gguf.QUANTIZATIONS:
        file = gguf.write(folder, tmp_path / f"{kind}.gguf", kind)
        read = pretrained.load(str(file), precision="float32")
        error[kind] = ((logits(read, ids) - plain).std() / plain.std()).item()
        size[kind] = file.stat().st_size
    assert error["f16"] < 5e-3 and 4 < error["bf16"] / error["f16"] < 16  # three bits of the mantissa fewer
    assert 5 < error["q8_0"] / error["f16"] < 50 and 5 < error["q4_0"] / error["q8_0"] < 50
    assert size["f16"] == size["bf16"] > size["q8_0"] > size["q4_0"]
    assert "de-quantizing" not in capfd.readouterr().err  # progress belongs to the runtime


def test_what_cannot_be_written_or_read_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="byte-level BPE"):
        gguf.write(tiny_language.folder(), tmp_path / "x.gguf")
    with pytest.raises(UserError, match="Did you mean 'q8_0'"):
        gguf.write(tiny_language.folder(), tmp_path / "x.gguf", "q8")
    folder = tiny_language.byte_level(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="scales its rotary positions"):
        gguf.write(folder, tmp_path / "x.gguf")
    with pytest.raises(UserError, match="No file"):
        pretrained.load(str(tmp_path / "x.gguf"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF and nothing else")
    with pytest.raises(UserError, match="no GGUF file"):
        pretrained.load(str(tmp_path / "x.gguf"))


def test_each_of_several_processes_unpacks_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = gguf.write(tiny_language.byte_level(tmp_path / "model"), tmp_path / "model.gguf")
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    assert pretrained.load(str(file), precision="float32").tokenizer.encode(tiny_language.TEXT)


def test_a_folder_that_another_process_unpacked_meanwhile_is_kept(tmp_path: Path):
    folder = tiny_language.byte_level(tmp_path / "model")
    file, ready = gguf.write(folder, tmp_path / "model.gguf"), tmp_path / "cache" / "model"
    shutil.copytree(folder, ready)
    (ready / "mark").touch()
    assert pretrained.unpack(file, ready) == ready and (ready / "mark").exists()
    assert [one.name for one in ready.parent.iterdir()] == ["model"]  # no draft is left


@pytest.mark.parametrize("scaled", ["type", "factors", "none"])
def test_scaled_rotary_positions_are_refused(scaled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Llama 3.1 has its factors in a tensor that transformers skips: every angle would be wrong, without a word."""
    import gguf as package

    describe = gguf._describe

    def described(writer, config, quantization):
        describe(writer, config, quantization)
        if scaled == "factors":
            writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
        else:
            kind = package.RopeScalingType.LINEAR if scaled == "type" else package.RopeScalingType.NONE
            writer.add_rope_scaling_type(kind)

    monkeypatch.setattr(gguf, "_describe", described)
    file = gguf.write(tiny_language.byte_level(tmp_path / "model"), tmp_path / "model.gguf")
    if scaled == "none":
        assert pretrained.load(str(file), precision="float32").tokenizer.encode("1")
        return
    with pytest.raises(UserError, match="scales its rotary positions, which is not read from GGUF"):
        pretrained.load(str(file))


def test_a_file_without_all_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As the first part of a split file: what it lacks would be drawn at random."""
    import gguf as package

    add = package.GGUFWriter.add_tensor

    def most(self, name, *args, **options):
        if name != "blk.0.ffn_up.weight":
            add(self, name, *args, **options)

    monkeypatch.setattr(package.GGUFWriter, "add_tensor", most)
    file = gguf.write(tiny_language.byte_level(tmp_path / "model"), tmp_path / "model.gguf")
    with pytest.raises(UserError, match=r"lacks 1 of the .* weights, as .*layers\.0\.mlp\.up_proj\.weight: .*split"):
        pretrained.load(str(file))

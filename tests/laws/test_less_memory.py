"""Options that save memory: none of them changes what is learned."""

from __future__ import annotations

import importlib
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from foresight.errors import UserError
from foresight.planning.generation.rollout import complete
from foresight.training import language
from foresight.training.options import Tuning, build_config, field_types
from tests import tiny_language
from tests.kept import kept
from tests.sabotage import change, sabotaged_by

REWARDS = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 2.0]])


def _gradients(name: str, **fields) -> dict[str, torch.Tensor]:
    """What one update on one rollout hands to the optimizers, in float32 whatever computes."""
    module = importlib.import_module(f"foresight.algorithms.language.{name}")
    base = {
        "model": tiny_language.folder(), "prompts": 3, "group": 4, "minibatches": 1, "max_new_tokens": 6,
        "max_grad_norm": math.inf, "precision": "float32", "overlong_filter": False,
    }  # fmt: skip
    known = field_types(module.Config)
    state = module.build(build_config(module.Config, **{k: v for k, v in {**base, **fields}.items() if k in known}))
    batch = complete(tiny_language.model(), ["1+1?", "22+3?", "4?"], 4, 6, generator=torch.Generator().manual_seed(0))
    caught: dict[str, torch.Tensor] = {}
    for key, part in vars(state).items():
        if isinstance(part, torch.optim.Optimizer):
            model = state.critic if key == "critic_optimizer" else state.policy
            named = {n: p for n, p in model.named_parameters() if p.requires_grad}
            part.register_step_pre_hook(
                lambda *_, named=named: caught.update({n: p.grad.clone() for n, p in named.items()})
            )
    module.update(state, batch, *([REWARDS] if name != "sft" else []))
    assert caught and all(grad.dtype == torch.float32 for grad in caught.values())
    return caught


@sabotaged_by("foresight.nets.language.checkpointing._again", lambda f: lambda *a, **k: 1.01 * f(*a, **k))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["grpo", "rlhf_ppo"])
@pytest.mark.parametrize("lora", [0, 4])
def test_gradient_checkpointing_changes_no_gradient(name, precision, lora):
    plain = _gradients(name, precision=precision, lora=lora)
    again = _gradients(name, precision=precision, lora=lora, gradient_checkpointing=True)
    assert plain.keys() == again.keys()
    for key, grad in plain.items():
        assert torch.equal(grad, again[key]), key


@sabotaged_by("foresight.nets.language.checkpointing.recompute", lambda f: lambda module: None)
def test_gradient_checkpointing_keeps_only_the_inputs_of_layers():
    batch = complete(tiny_language.model(), ["1+1?", "22+3?", "4?"], 4, 6, generator=torch.Generator().manual_seed(0))
    plain, again = tiny_language.model(), tiny_language.model()
    language.checkpointing.recompute(again.module)
    weights = sum(p.numel() * p.element_size() for p in plain.parameters())
    before, after = (kept(lambda model=model: model.logprob(batch)) - weights for model in (plain, again))
    assert after < 0.5 * before


def coarser(original):
    """Where it computes in bfloat16, two bits less."""

    def norm(x, weight, eps):
        found = original(x, weight, eps)
        return found if found.dtype == torch.float32 else (found * 32).round() / 32

    return norm


@sabotaged_by("foresight.nets.language.checkpointing.rms_norm", coarser)
@pytest.mark.parametrize("name", ["grpo", "rloo", "sft"])
def test_gradients_in_bfloat16_are_those_of_float32_but_for_rounding(name):
    """The weights and their gradients are float32 in both: what is rounded is what a matrix product reads."""
    wide, narrow = _gradients(name), _gradients(name, precision="bfloat16")
    error = sum((narrow[key] - grad).square().sum() for key, grad in wide.items()) ** 0.5
    assert error < 0.06 * sum(grad.square().sum() for grad in wide.values()) ** 0.5


def averaged(original):
    """What gradient accumulation does by itself: a mean over the parts."""

    def mutant(optimizer, pieces, *rest):
        pieces = list(pieces)

        def share(piece):
            value, sums = piece()
            return value / len(pieces), sums

        return original(optimizer, [lambda p=piece: share(p) for piece in pieces], *rest)

    return mutant


@sabotaged_by("foresight.training.microbatch.step", averaged)
def test_gradients_in_bfloat16_do_not_depend_on_the_micro_batches():
    whole = _gradients("grpo", precision="bfloat16", micro_tokens=10_000)
    parts = _gradients("grpo", precision="bfloat16", micro_tokens=1)
    for key, grad in whole.items():
        assert (parts[key] - grad).norm() < 0.02 * grad.norm(), key


def test_an_optimizer_that_is_not_there_is_refused_with_what_to_do(monkeypatch):
    with pytest.raises(UserError, match=r"Unknown optimizer 'adam8'.*adamw8bit"):
        _gradients("grpo", optimizer="adam8")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    with pytest.raises(UserError, match="pip install bitsandbytes"):
        _gradients("grpo", optimizer="adamw8bit")


@sabotaged_by("foresight.training.language.adamw", change("tuning", lambda tuning: Tuning(optimizer=tuning.optimizer)))
def test_the_8_bit_optimizer_gets_the_weights_that_learn(monkeypatch):
    made: dict[str, object] = {}

    def make(weights, **numbers):
        made.update(weights=weights, **numbers)
        return torch.optim.SGD(weights, lr=1.0)

    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(optim=SimpleNamespace(AdamW8bit=make)))
    with pytest.raises(UserError, match="needs an accelerator, not a CPU"):
        _gradients("grpo", optimizer="adamw8bit")
    model = torch.nn.Sequential(torch.nn.Linear(2, 3, device="meta"), torch.nn.Linear(3, 1, device="meta"))
    model[0].requires_grad_(False)
    language.adamw(model, 1e-3, Tuning(weight_decay=0.1, optimizer="adamw8bit"))
    assert made.pop("weights") == list(model[1].parameters())
    assert made == {"lr": 1e-3, "weight_decay": 0.1}

"""`rms_norm` and `swiglu` against the operations that define them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from foresight.data.text import TokenBatch
from foresight.nets.language import checkpointing
from foresight.nets.language.model import LanguageModel, token_tree
from foresight.ops.fused import decoder
from foresight.planning.generation.decoding import generate
from tests import tiny_language
from tests.sabotage import change, sabotaged_by


class LlamaRMSNorm(nn.Module):
    """As transformers has it."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(size) + 0.5), 1e-3

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


@sabotaged_by(
    "foresight.nets.language.checkpointing.rms_norm",
    change("eps", lambda x: 2 * x),
    change("weight", torch.Tensor.detach),
)
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8)])
def test_values_and_gradients_are_those_of_the_definition(shape):
    plain = LlamaRMSNorm(8).double()
    used = copy.deepcopy(plain).float()
    checkpointing.use(used)
    x, grad = torch.randn(shape) * 0.1, torch.randn(shape)
    a, b = x.double().requires_grad_(), x.clone().requires_grad_()
    plain(a).backward(grad.double())
    y = used(b)
    y.backward(grad)
    torch.testing.assert_close(y.double(), plain(a))
    torch.testing.assert_close(b.grad.double(), a.grad, atol=1e-5, rtol=1e-5)
    assert used.weight.grad is not None
    torch.testing.assert_close(used.weight.grad.double(), plain.weight.grad, atol=1e-5, rtol=1e-5)


def test_the_result_has_the_type_of_matrix_products():
    norm = LlamaRMSNorm(8)
    checkpointing.use(norm)
    assert norm(torch.randn(2, 8)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.randn(2, 8)).dtype == torch.bfloat16


@sabotaged_by("copy.deepcopy", lambda f: lambda x: x)
def test_a_deep_copy_uses_its_own_weight():
    norm = LlamaRMSNorm(8)
    checkpointing.use(norm)
    other, x = copy.deepcopy(norm), torch.randn(2, 8)
    before = norm(x)
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(norm(x), before)
    assert not other(x).any()


def swapped(original):
    return lambda gate, up: original(up, gate)


@sabotaged_by("foresight.nets.language.checkpointing.swiglu", swapped)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_bit_identical_and_saves_its_arguments_alone(dtype, monkeypatch):
    monkeypatch.setattr(decoder, "able", lambda *_: False)  # of torch's operations
    saved = []
    results = []
    for function in (lambda gate, up: functional.silu(gate) * up, checkpointing.swiglu):
        torch.manual_seed(0)
        gate, up = (torch.randn(5, 8, dtype=dtype, requires_grad=True) for _ in range(2))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            y = function(gate, up)
        y.backward(torch.randn(5, 8, dtype=dtype))
        results.append((y, gate.grad, up.grad))
        saved.append({x.data_ptr() for x in kept})
    assert all(map(torch.equal, *results))
    assert len(saved[1]) == 2 < len(saved[0])


def plain_mlp(original):
    return lambda gate, up: functional.silu(gate) * up


@sabotaged_by("foresight.nets.language.checkpointing.swiglu", plain_mlp)
def test_an_mlp_of_transformers_saves_less_and_computes_the_same():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48, hidden_act="silu"))
    used = copy.deepcopy(plain)
    checkpointing.use(used)
    x, kept = torch.randn(5, 32), []
    for mlp in (plain, used):
        saved = set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.add(t.data_ptr()) or t, lambda t: t):
            y = mlp(x)
        y.sum().backward()
        kept.append(len(saved))
    assert kept[1] < kept[0]
    torch.testing.assert_close(used(x), plain(x), rtol=1e-6, atol=1e-6)
    for a, b in zip(used.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@sabotaged_by("foresight.ops.fused.decoder.rotated", change("sin", lambda x: -x))
@sabotaged_by("foresight.ops.fused.decoder.swiglu", change("up", lambda x: 1.02 * x))
@sabotaged_by("foresight.ops.fused.decoder.rms_norm", change("x", lambda x: x + 0.01))
def test_training_over_a_tree_is_that_of_the_layers_of_transformers(family, precision):
    from tests.nets.language.test_packed import decoder as small

    policy = LanguageModel(small(family), tiny_language.model().tokenizer)
    assert policy.capabilities.shared
    batch = generate(policy, [[3, 4, 5, 6], [3, 4, 7]], 3, 6, 1.0, torch.Generator().manual_seed(0))
    found = _gradients(policy, batch, precision)
    with torch.no_grad(), policy.precision():
        assert torch.equal(found[0], policy.states(token_tree(batch)[0]))  # a reference is computed in the same way
    for part in policy.modules():
        vars(part).pop("forward", None)  # as transformers has it
    plain, exact = _gradients(policy, batch, precision), _gradients(policy.double(), batch, None)
    error, usual = (
        sum((x - y).norm() / y.norm() for x, y in zip(one, exact, strict=True)) / len(exact) for one in (found, plain)
    )
    assert error <= 1.3 * usual + 1e-6, (error, usual)


def _gradients(policy: LanguageModel, batch: TokenBatch, precision: torch.dtype | None) -> list[torch.Tensor]:
    """The states of the tokens of a batch, and the gradient of each weight."""
    policy.autocast = precision
    policy.zero_grad()
    with policy.precision():
        states = policy.states(token_tree(batch)[0])
    (states * torch.randn(states.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    return [states.detach(), *(p.grad.double() for p in policy.parameters() if p.grad is not None)]

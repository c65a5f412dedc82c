"""The mixture of experts equals a loop over all of them, and both ways of balancing even a load that was not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from foresight.nets.language.moe import MixtureOfExperts
from tests.sabotage import change, drop, flip_sign, sabotaged_by


def _layer(chosen: int = 2, experts: int = 5, seed: int = 0) -> MixtureOfExperts:
    torch.manual_seed(seed)
    return MixtureOfExperts(8, 12, experts, chosen)


def _dense(layer: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Every expert on every token, one after another, weighted by the definition."""
    out = torch.zeros_like(x)
    for n, row in enumerate(x):
        affinity = (layer.router @ row).softmax(-1)
        order = sorted(range(layer.experts), key=lambda e: -(affinity[e] + layer.bias[e]).item())[: layer.chosen]
        total = sum(affinity[e] for e in order) if layer.chosen > 1 else 1.0
        for e in range(layer.experts):
            gate, up = (layer.up[e] @ row).chunk(2)
            answer = layer.down[e] @ (functional.silu(gate) * up)
            out[n] = out[n] + (affinity[e] / total * answer if e in order else 0 * answer)
    return out


@sabotaged_by("foresight.ops.routing.top_experts", drop("bias"), change("experts", lambda k: max(1, k - 1)))
@pytest.mark.parametrize("chosen", [2, 3])
def test_it_equals_a_dense_loop_over_the_experts(chosen):
    layer, x = _layer(chosen), torch.randn(17, 8, generator=torch.Generator().manual_seed(1))
    layer.bias.copy_(torch.tensor([0.3, 0.0, -0.3, 0.0, 0.1]))
    out, found = layer(x)
    expected = _dense(layer, x)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape)
    mine = torch.autograd.grad((out * weights).sum(), list(layer.parameters()))
    theirs = torch.autograd.grad((expected * weights).sum(), list(layer.parameters()))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert found.chosen.shape == (17, chosen)
    torch.testing.assert_close(found.load.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("chosen", [1, 5])
def test_one_expert_and_all_of_them(chosen):
    layer, x = _layer(chosen), torch.randn(9, 8)
    torch.testing.assert_close(layer(x)[0], _dense(layer, x))


@pytest.mark.parametrize("chosen", [1, 2])
def test_the_router_prefers_the_expert_that_reduces_the_loss(chosen):
    layer = _layer(chosen)
    layer(torch.randn(9, 8))[0].square().sum().backward()
    assert layer.router.grad.abs().max() > 1e-4


def test_a_token_does_not_see_its_neighbors():
    layer, x = _layer(), torch.randn(2, 6, 8)
    whole, _ = layer(x)
    for b in range(2):
        for t in range(6):
            torch.testing.assert_close(layer(x[b, t])[0], whole[b, t])


def test_an_expert_without_tokens_gets_no_gradient_and_no_error():
    layer = _layer(1)
    layer.bias.copy_(torch.tensor([9.0, 0, 0, 0, 0]))
    out, found = layer(torch.randn(4, 8))
    out.sum().backward()
    assert found.load.tolist() == [1, 0, 0, 0, 0]
    assert layer.up.grad[0].any() and not layer.up.grad[1:].any()


def _skewed(layer: MixtureOfExperts) -> torch.Tensor:
    """Tokens that all lean to the first expert."""
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(2))
    return x + 2 * layer.router[0].detach() / layer.router[0].norm().detach()


def _spread(layer: MixtureOfExperts, x: torch.Tensor) -> float:
    """How much the busiest expert has over an even share (MaxVio, Wang et al. 2024, eq. 4)."""
    return float(layer(x)[1].load.max() * layer.experts - 1)


@sabotaged_by("foresight.ops.routing.balanced_bias", change("rate", lambda u: -u))
def test_the_bias_rule_balances_a_skewed_load_and_changes_no_weight():
    """Load balancing of experts without a loss.

    Wrong: the rule reaches the weights of the gate, or a balance loss is added, and log-probabilities diverge (prime-rl
    2953; TRL 6083; NeMo).
    Invariant: b_e += u sign(mean load − load_e) changes only which experts are chosen; no weight changes.
    """
    layer = _layer(2, 4)
    x = _skewed(layer)
    before, weights = _spread(layer, x), [p.clone() for p in layer.parameters()]
    for _ in range(200):
        layer.rebalance(layer(x)[1].load, 0.005)
    assert before > 0.5
    assert _spread(layer, x) < 0.1
    assert all(torch.equal(a, b) for a, b in zip(weights, layer.parameters(), strict=True))


@sabotaged_by("foresight.ops.routing.balance_loss", flip_sign)
def test_the_balance_loss_evens_a_skewed_load():
    layer = _layer(2, 4)
    x = _skewed(layer)
    before = _spread(layer, x)
    optimizer = torch.optim.Adam([layer.router], lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        layer(x)[1].balance.backward()
        optimizer.step()
    assert before > 0.5
    assert _spread(layer, x) < 0.2


def test_bfloat16_routes_in_float32():
    layer, x = _layer(), torch.randn(40, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, found = layer(x)
    assert found.affinity.dtype == torch.float32
    assert torch.equal(found.chosen, layer(x)[1].chosen)
    torch.testing.assert_close(out, layer(x)[0], atol=0.1, rtol=0.1)


def test_more_experts_than_there_are_is_refused():
    with pytest.raises(ValueError, match="3 of 2"):
        MixtureOfExperts(8, 8, 2, 3)

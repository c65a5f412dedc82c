"""StackedMLP against the same layers in plain torch."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import numba
import pytest
import torch
from torch import nn

from foresight.errors import UserError
from foresight.nets import mlp, stacked_mlp
from foresight.nets.stacked_mlp import StackedMLP
from foresight.runtime import machine
from tests.sabotage import change, sabotaged_by, scaled

SHAPES = [(4, (64, 64)), (40, (16,)), (3, ()), (64, (64, 64, 64))]


def _plain(module: StackedMLP, x: torch.Tensor, flat: torch.Tensor | None = None) -> list[torch.Tensor]:
    function = {"tanh": torch.tanh, "relu": torch.relu, "elu": nn.functional.elu}[module.activation]
    outputs = []
    for member in stacked_mlp._split(module.flat if flat is None else flat, module.sizes):
        h = x
        for i, (weight, bias) in enumerate(member):
            h = h @ weight.T + bias
            h = function(h) if i < len(member) - 1 else h
        outputs.append(h)
    return outputs


def _random(inputs: int, hidden: tuple[int, ...], activation: str) -> StackedMLP:
    module = StackedMLP(inputs, hidden, (2, 1, 5), (0.01, 1.0, 1.0), activation)
    nn.init.normal_(module.flat, std=0.3)
    return module


@sabotaged_by("foresight.ops.fused.mlp.forward", scaled(1.01))
@sabotaged_by("foresight.ops.fused.mlp.backward", change("grads", lambda gs: [2 * g for g in gs]))
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(("inputs", "hidden"), SHAPES)
@pytest.mark.parametrize("shape", [(300,), (7, 11)])
def test_values_and_gradients_are_autograds(shape, inputs, hidden, activation):
    module, x = _random(inputs, hidden, activation), torch.randn(*shape, inputs, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    ours, theirs = module(x), _plain(module, twin)
    weights = [torch.randn_like(y) for y in theirs]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    (expected_x, expected) = torch.autograd.grad(theirs, [twin, module.flat], weights)
    (found_x, found) = torch.autograd.grad(ours, [x, module.flat], weights)
    scale = expected.abs().max()
    assert (found - expected).abs().max() < 1e-5 * scale
    assert (found_x - expected_x).abs().max() < 1e-4 * expected_x.abs().max()


def test_one_member_alone_is_the_same_and_gives_the_others_no_gradient():
    module, x = _random(4, (64, 64), "tanh"), torch.randn(256, 4)
    alone = module.single(1, x)
    assert torch.equal(alone, module(x)[1])
    alone.sum().backward()
    assert module.flat.grad is not None
    moved = [
        any(bool(g.any()) for layer in member for g in layer)
        for member in stacked_mlp._split(module.flat.grad, module.sizes)
    ]
    assert moved == [False, True, False]


@pytest.mark.parametrize("hidden", [(64, 64), (256, 256)])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("rows", [1, 8, 300])
def test_without_gradient_it_is_the_same(rows, activation, hidden):
    module, x = _random(4, hidden, activation), torch.randn(rows, 4)
    with torch.inference_mode():
        for fast, slow in zip(module(x), _plain(module, x), strict=True):
            torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
        assert torch.equal(module.single(0, x), module(x)[0])


@pytest.mark.parametrize("hidden", [64, 256])
@pytest.mark.parametrize("sizes", [(4, 2), (17, 6), (64, 4), (2, 3)])
def test_a_row_has_the_same_bits_in_every_batch(sizes, hidden):
    """What makes the first ratio of PPO exactly 1, though minibatches have other rows than the rollout."""
    inputs, outputs = sizes
    module, x = StackedMLP(inputs, (hidden, hidden), (outputs, 1), (1.0, 1.0)), torch.randn(1024, inputs)
    with torch.no_grad():
        whole = module(x)[0]
    exact = torch.backends.cpu.get_cpu_capability() == "AVX512"  # elsewhere the BLAS sums the last rows of a block
    for rows in (65, 128, 250, 256, 512):  # in another order
        chosen = torch.randperm(1024)[:rows]
        found = module(x[chosen])[0]
        assert torch.equal(found, whole[chosen]) if exact else torch.allclose(found, whole[chosen], atol=2e-6, rtol=0)


@sabotaged_by("foresight.ops.fused.mlp.backward", change("grads", lambda gs: [2 * g for g in gs]))
@pytest.mark.parametrize("hidden", [(64, 64), (256, 256)])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_backward_pass_without_autograd_is_that_of_autograd(activation, hidden):
    module, x = _random(4, hidden, activation), torch.randn(300, 4)
    for _ in range(2):  # twice: the memory is used again
        found = module.vjp(x)
        assert found is not None
        outputs, back = found
        expected = _plain(module, x)
        weights = [torch.randn_like(y) for y in expected]
        for a, b in zip(outputs, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            assert not a.requires_grad
        back(weights)
        (gradient,) = torch.autograd.grad(expected, [module.flat], weights)
        assert module.flat.grad is not None
        assert (module.flat.grad - gradient).abs().max() < 1e-5 * gradient.abs().max()
        x = torch.randn(200, 4)
    assert _random(4, (8,), "elu").vjp(x) is None and module.vjp(x.double()) is None


@sabotaged_by(
    "foresight.ops.fused.mlp.forward_threads", lambda f: lambda xs, *rest: f(tuple(1.01 * x for x in xs), *rest)
)
@sabotaged_by(
    "foresight.ops.fused.mlp.backward_threads", lambda f: lambda gs, *rest: f(tuple(2 * g for g in gs), *rest)
)
@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS == 1, reason="needs two processors")
@pytest.mark.parametrize("outputs", [(2,), (2, 1, 5)])
def test_threads_share_the_rows_of_large_layers(outputs):
    """One MLP in parts of its rows, and several at once: the same values bit for bit, and the same gradients."""
    module, x = StackedMLP(4, (256, 256), outputs, (1.0,) * len(outputs)), torch.randn(300, 4)
    found = []
    for threads in (1, 2):
        with machine.threads(threads):
            values = module(x.requires_grad_())
            found.append([*values, *torch.autograd.grad(sum(y.sum() for y in values), [x, module.flat])])
    for a, b in zip(found[0][:-2], found[1][:-2], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(found[0][-2:], found[1][-2:], strict=True):
        assert (a - b).abs().max() < 1e-5 * a.abs().max()


@sabotaged_by("foresight.nets.stacked_mlp._kind", lambda f: lambda: torch.float32)
@sabotaged_by("foresight.ops.fused.mlp.backward", change("grads", lambda gs: [1.1 * g for g in gs]))
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_large_layers_follow_autocast_more_closely_than_plain_torch_and_small_ones_do_not(activation):
    module, x, weights = _random(4, (256, 256), activation), torch.randn(300, 4), torch.randn(300)

    def found(outputs) -> list[torch.Tensor]:
        (gradient,) = torch.autograd.grad((outputs[1][:, 0] * weights).sum(), module.flat)
        return [outputs[1].detach(), gradient]

    exact = found(_plain(module, x))
    with torch.autocast("cpu", torch.bfloat16):
        fast, plain = found(module(x)), found([y.float() for y in _plain(module, x)])
        outputs, back = module.vjp(x)
        back([0 * outputs[0], torch.stack([weights], -1), 0 * outputs[2]])
        small = _random(4, (64,), activation)
        in_float32 = small(x)[0]
    assert torch.equal(in_float32, small(x)[0])
    torch.testing.assert_close(module.flat.grad, fast[1])
    for a, b, c in zip(exact, fast, plain, strict=True):
        assert b.dtype == torch.float32 and 1e-5 < (b - a).norm() / a.norm() < (c - a).norm() / a.norm()


def test_other_activations_dtypes_and_autocast_take_the_plain_way():
    x = torch.randn(9, 4)
    module = _random(4, (8,), "elu")
    torch.testing.assert_close(module(x)[2], _plain(module, x)[2])
    double = _random(4, (8,), "tanh").double()
    assert torch.autograd.gradcheck(
        lambda y: double(y)[1], [torch.randn(3, 4, dtype=torch.float64, requires_grad=True)]
    )
    with torch.autocast("cpu", torch.bfloat16):
        rounded = module(x)[2]
    assert rounded.dtype == torch.float32 and torch.equal(rounded, rounded.bfloat16().float())


@sabotaged_by("foresight.nets.stacked_mlp._members", lambda f: lambda flat, sizes: f(flat.clone(), sizes))
def test_new_weights_are_used_however_they_arrive():
    module, x = _random(4, (8,), "tanh"), torch.randn(9, 4)
    before = module(x)[0].detach()
    with torch.no_grad():
        module.flat.mul_(2)
    torch.testing.assert_close(module(x)[0], _plain(module, x)[0])
    module.flat.data = torch.randn_like(module.flat)
    torch.testing.assert_close(module(x)[0], _plain(module, x)[0])
    other = copy.deepcopy(module)
    nn.init.normal_(other.flat)
    torch.testing.assert_close(other(x)[0], _plain(other, x)[0])
    torch.testing.assert_close(module(x)[0], _plain(module, x)[0])
    module.load_state_dict(other.state_dict())
    assert torch.equal(module(x)[0], other(x)[0]) and not torch.equal(module(x)[0], before)


def test_weights_changed_between_forward_and_backward_are_refused():
    module = _random(4, (8,), "tanh")
    y = module(torch.randn(9, 4))[0].sum()
    with torch.no_grad():
        module.flat.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_graph_dies_with_its_outputs():
    module = _random(4, (8,), "tanh")
    outputs = module(torch.randn(99, 4))
    alive = weakref.ref(outputs[0].grad_fn)
    del outputs
    gc.collect()
    assert alive() is None


def test_weights_are_orthogonal_with_their_gains():
    module = StackedMLP(64, (64, 32), (3, 1), (0.01, 1.0))
    for member, last in zip(module.layers(), (0.01, 1.0), strict=True):
        for (weight, bias), gain in zip(member, (math.sqrt(2), math.sqrt(2), last), strict=True):
            torch.testing.assert_close(weight @ weight.T, gain**2 * torch.eye(len(weight)), atol=1e-5, rtol=1e-5)
            assert not bias.any()


@sabotaged_by("foresight.nets.mlp.orthogonal", lambda f: lambda layer, gain=1.0: f(layer, 1.0))
def test_mlp_is_orthogonal_too():
    module = mlp.MLP(64, (64, 32))
    for layer in module.layers:
        weight = layer.weight
        torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(len(weight)), atol=1e-5, rtol=1e-5)
    assert module(torch.randn(3, 5, 64)).shape == (3, 5, 32) and module.size == 32


@pytest.mark.parametrize("make", [lambda a: mlp.MLP(2, (2,), a), lambda a: StackedMLP(2, (2,), (1,), (1.0,), a)])
def test_an_unknown_activation_is_named(make):
    with pytest.raises(UserError, match="Did you mean 'tanh'"):
        make("tahn")


def test_gradients_can_be_differentiated_again_with_create_graph():
    once, twice = (StackedMLP(3, (8,), (2,), (1.0,), twice=t) for t in (False, True))
    twice.load_state_dict(once.state_dict())
    x, v = torch.randn(20, 3), torch.randn(once.flat.shape)

    def curve(module: StackedMLP, outputs: list[torch.Tensor]) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(outputs[0].square().mean(), module.flat, create_graph=True)
        return torch.autograd.grad(gradient @ v, module.flat)[0]

    torch.testing.assert_close(curve(twice, twice(x)), curve(once, _plain(once, x)))
    with pytest.raises(RuntimeError):  # and not silently wrong where it was not
        curve(once, once(x))
    with torch.no_grad():
        assert torch.equal(twice(x)[0], once(x)[0])


@sabotaged_by("foresight.ops.fused.mlp.backward", change("grads", lambda gs: [1.1 * g for g in gs]))
def test_members_of_different_widths_without_hidden_layers_have_the_gradients_of_autograd() -> None:
    members, x = StackedMLP(4, (), (3, 5), (1.0, 1.0)), torch.randn(7, 4)
    parts = [torch.randn(7, 3), torch.randn(7, 5)]
    sum((y * part).sum() for y, part in zip(members(x), parts, strict=True)).backward()
    expected = [(part.t() @ x, part.sum(0)) for part in parts]
    torch.testing.assert_close(members.flat.grad, torch.cat([g.flatten() for pair in expected for g in pair]))

"""Q-networks in all their forms, critics that are taken as given, and targets that follow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.errors import UserError
from foresight.nets import outputs, q_network
from foresight.nets.critics import Critics, SquashedActor
from foresight.nets.outputs import TanhNormal
from foresight.nets.q_network import QNetwork
from foresight.nets.values import AtomHead, PointHead, QuantileHead
from foresight.training import optim
from tests.sabotage import change, flip_sign, sabotaged_by, scaled

VECTOR = gs.Box(-1, 1, (5,), np.float32)
IMAGE = gs.Box(0, 255, (2, 36, 36), np.uint8)
DICT = gs.Dict({"x": gs.Box(-1, 1, (2,), np.float32), "n": gs.Discrete(3), "action_mask": gs.MultiBinary(4)})


def _obs(space: gs.Space) -> torch.Tensor | dict[str, torch.Tensor]:
    if isinstance(space, gs.Dict):
        return {
            "x": torch.randn(7, 2),
            "n": torch.randint(0, 3, (7,)),
            "action_mask": torch.tensor([0, 1, 1, 0], dtype=torch.int8).expand(7, 4),
        }
    return torch.randn(7, 5) if space is VECTOR else torch.randint(0, 255, (7, 2, 36, 36), dtype=torch.uint8)


@pytest.mark.parametrize("space", [VECTOR, IMAGE, DICT], ids=["vector", "image", "dict"])
@pytest.mark.parametrize("sigma", [None, 0.5])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(
    "head", [PointHead(), AtomHead(5, -1, 1), QuantileHead(3)], ids=["points", "atoms", "quantiles"]
)
def test_every_form_gives_values_and_learns_all_of_its_weights(space, sigma, dueling, head) -> None:
    network = QNetwork(space, 4, head, (16, 16), dueling=dueling, sigma=sigma, hidden_images=16)
    obs, generator = _obs(space), torch.Generator().manual_seed(0)
    noise = network.noise(generator)
    assert (noise is None) == (sigma is None)
    values = network(obs, noise)
    assert values.mean().shape == (7, 4)
    picked = values.pick(torch.tensor([0, 1, 2, 3, 0, 1, 2]))
    picked.loss(picked.backup(torch.ones(7), torch.ones(7))).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    assert any(p.grad.abs().sum() > 0 for p in network.parameters() if p.grad is not None)
    if sigma is not None:
        other = network(obs, network.noise(generator)).mean()
        assert not torch.equal(other, values.mean())
        assert torch.equal(network(obs).mean(), network(obs).mean())
    best, drawn = network.best(values.mean(), obs), network.random(obs, 7, generator)
    if space is DICT:
        assert set(best.tolist()) | set(drawn.tolist()) <= {1, 2}


@sabotaged_by("foresight.ops.value.dueling", lambda f: lambda value, advantage: value.unsqueeze(-2) + advantage)
@pytest.mark.parametrize("sigma", [None, 0.5])
def test_a_dueling_network_has_its_state_value_for_a_mean(sigma) -> None:
    network = QNetwork(VECTOR, 4, PointHead(), (16,), dueling=True, sigma=sigma)
    obs = torch.randn(9, 5)
    state_value = network.body(obs)[0].squeeze(-1)
    torch.testing.assert_close(network(obs).mean().mean(-1), state_value)


@sabotaged_by("foresight.ops.fused.mlp.backward", change("grads", lambda gs: [1.1 * g for g in gs]))
def test_values_and_backward_pass_are_those_of_autograd() -> None:
    network, obs = QNetwork(VECTOR, 4, PointHead(), (16, 16)), torch.randn(70, 5)
    weight = torch.randn(70, 4)
    found = network.vjp(obs)
    assert found is not None
    values, back = found
    back(weight)
    fast = network.body.flat.grad.clone()
    network.zero_grad()
    network.body._compiled = False
    plain = network(obs).mean()
    (weight * plain).sum().backward()
    torch.testing.assert_close(values.squeeze(-1) if values.dim() > 2 else values, plain)
    torch.testing.assert_close(fast, network.body.flat.grad, rtol=1e-4, atol=1e-5)
    for other in (QNetwork(VECTOR, 4, PointHead(), dueling=True), QNetwork(VECTOR, 4, AtomHead(5, -1, 1))):
        assert other.vjp(obs) is None


@sabotaged_by(
    "foresight.training.optim.track", change("rate", lambda r: r / 2), change("rate", lambda r: 1 - r, "the_other_way")
)
def test_a_target_follows() -> None:
    """θ⁻ ← θ⁻ + τ (θ - θ⁻): after n moves toward a fixed θ the distance is (1 - τ)ⁿ."""
    source, target = QNetwork(VECTOR, 2, AtomHead(5, -1, 1), (8,)), QNetwork(VECTOR, 2, AtomHead(5, -2, 2), (8,))
    before = target.body.flat.detach().clone()
    for _ in range(3):
        optim.track(target, source, 0.2)
    expected = source.body.flat + 0.8**3 * (before - source.body.flat)
    torch.testing.assert_close(target.body.flat.detach(), expected.detach())
    assert torch.equal(target.head.atoms, source.head.atoms)
    optim.track(target, source, 1.0)
    assert torch.equal(target.body.flat, source.body.flat)


@sabotaged_by("foresight.ops.fused.mlp.backward", change("grads", lambda gs: [1.1 * g for g in gs]))
def test_frozen_critics_pass_the_gradient_on_and_keep_none() -> None:
    for compiled in (True, False):
        _passes_on(compiled)


def _passes_on(compiled: bool) -> None:
    critics = Critics(VECTOR, 2, 1, (16, 16))
    critics.mlp._compiled = compiled
    features, action = torch.randn(70, 5), torch.randn(70, 2, requires_grad=True)
    values = critics.frozen(features, action)
    torch.minimum(*values).sum().backward()
    assert critics.mlp.flat.grad is None
    found, action.grad = action.grad, None
    critics.mlp._compiled = False
    plain = critics(features, action)
    torch.testing.assert_close(list(values), list(plain))
    torch.minimum(*plain).sum().backward()
    torch.testing.assert_close(found, action.grad, rtol=1e-4, atol=1e-5)


@sabotaged_by("foresight.nets.outputs._log_slope", flip_sign, scaled(0.9))
@sabotaged_by("foresight.nets.outputs.TanhNormal.logp", scaled(1.05))
def test_the_log_probability_integrates_to_one() -> None:
    """Over actions in (-1, 1), in one dim and in two, from flat laws to such as pile up at the edges."""
    torch.manual_seed(0)
    for dims, points in ((1, 801), (2, 161)):
        actor = SquashedActor(3, gs.Box(-2, 2, (dims,), np.float32), "SAC", (8,)).double()
        u = torch.linspace(-8.6, 8.6, points, dtype=torch.float64)  # where actions differ from their neighbors
        grid = torch.cartesian_prod(*[u] * dims).view(-1, dims)
        volume = (1 - grid.tanh() ** 2).prod(-1) * (17.2 / (points - 1)) ** dims
        for center, log_std in ((0.0, -0.5), (1.5, 0.3), (-1.0, 0.5)):
            bias = actor.mlp.layers()[0][-1][1]
            bias[:dims], bias[dims:] = center, log_std
            law = actor(torch.randn(1, 3, dtype=torch.float64).expand(len(grid), 3))
            total = (law.logp(grid.tanh()).exp() * volume).sum().item()
            assert total == pytest.approx(1, abs=2e-3), (dims, center, log_std)


@sabotaged_by("foresight.nets.outputs.TanhNormal.sample_logp", scaled(0.95))
def test_a_draw_comes_with_its_log_probability() -> None:
    actor = SquashedActor(3, gs.Box(-2, 2, (2,), np.float32), "SAC", (8,))
    output = actor(torch.randn(50, 3))
    action, logp = output.sample_logp(torch.Generator().manual_seed(0))
    torch.testing.assert_close(output.logp(action), logp, rtol=1e-3, atol=1e-3)


@sabotaged_by("foresight.ops.fused.soft.squash", scaled(0.99))
@sabotaged_by("foresight.nets.outputs._Squashed.backward", lambda f: lambda *a: (0.9 * f(*a)[0], *f(*a)[1:]))
def test_the_gradient_of_a_draw_is_autograds() -> None:
    """Compiled (float32) and not, through the action and through its log-probability."""
    for dtype in (torch.float32, torch.float64):
        mean = (2 * torch.randn(9, 3, dtype=dtype)).requires_grad_()
        std = torch.rand(9, 3, dtype=dtype).add(0.1).requires_grad_()
        weights = torch.randn(9, 3, dtype=dtype), torch.randn(9, dtype=dtype)
        found = TanhNormal(mean, std).sample_logp(torch.Generator().manual_seed(0))
        noise = torch.empty(9, 3, dtype=dtype).normal_(generator=torch.Generator().manual_seed(0))
        u = mean + std * noise
        plain = u.tanh(), torch.distributions.Normal(mean, std).log_prob(u).sum(-1) - outputs._log_slope(u).sum(-1)
        torch.testing.assert_close(list(found), list(plain), rtol=1e-4, atol=1e-5)
        gradients = [
            torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, pair, strict=True)), (mean, std))
            for pair in (found, plain)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@sabotaged_by("foresight.nets.critics.SquashedActor.from_env", flip_sign)
def test_actions_reach_the_bounds_of_the_action_space_and_back() -> None:
    space = gs.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))
    actor = SquashedActor(3, space, "SAC", (8,))
    corners = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.5]])
    out = actor.to_env(corners)
    assert out.tolist() == [[-2.0, 0.0], [2.0, 10.0], [0.0, 7.5]]
    torch.testing.assert_close(actor.from_env(out), corners)


def test_mistakes_are_explained() -> None:
    with pytest.raises(UserError, match=r"takes Box.*Use sac or ppo"):
        q_network.actions_of(gs.Box(-1, 1, (2,), np.float32), "DQN", "sac or ppo")
    with pytest.raises(UserError, match="Unknown image encoder 'natur'"):
        QNetwork(IMAGE, 2, PointHead(), images="natur")
    with pytest.raises(UserError, match="at least one hidden layer"):
        QNetwork(VECTOR, 2, PointHead(), (), sigma=0.5)
    with pytest.raises(UserError, match="2 atoms from a low to a higher value"):
        AtomHead(51, 1.0, 1.0)
    with pytest.raises(UserError, match="at least 1 quantile"):
        QuantileHead(0)
    with pytest.raises(UserError, match="takes Discrete"):
        SquashedActor(3, gs.Discrete(2), "SAC", (8,))
    with pytest.raises(UserError, match="bounds"):
        SquashedActor(3, gs.Box(-np.inf, np.inf, (2,), np.float32), "SAC", (8,))
    with pytest.raises(UserError, match="equal bounds"):
        SquashedActor(3, gs.Box(1, 1, (2,), np.float32), "SAC", (8,))

"""Sampled MuZero: actions drawn from the policy, their prior, and noise at the root."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from foresight.algorithms.search import muzero, sampled_muzero
from foresight.data.trajectory import Trajectory
from foresight.errors import UserError
from foresight.nets.heads import CategoricalHead, TanhNormalHead
from foresight.planning.search import sampled
from foresight.planning.search.mcts import search
from foresight.planning.search.tree import advance
from foresight.training.options import build_config
from tests.algorithms.search.muzero_runs import SMALL, Bandit, small, unmasked
from tests.sabotage import change, sabotaged_by


@sabotaged_by("foresight.ops.latent.scale_gradient", change("factor", lambda _: 1.0))
def test_the_gradient_into_the_dynamics_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads at s¹ see g whole, those at s² through one halving: 1 + ½ (1 + ½), as steps count ½ each (G)."""
    _, _, state = small(sampled_muzero, unroll_steps=2, samples=2)
    state.network = SimpleNamespace(
        represent=lambda x: x, advance=lambda x, _: (x, x), head=lambda x: x, policy=lambda x: 0 * x.expand(-1, -1, 2),
        value=SimpleNamespace(loss=lambda x, _: x.sum(-1)), reward=SimpleNamespace(loss=lambda x, _: 0 * x.sum(-1)),
    )  # fmt: skip
    obs, ones = torch.rand(1, 3, 1, requires_grad=True), torch.ones(1, 3)
    batch = Trajectory(obs, ones, ones, ones, 0 * ones, extras={"taken": torch.zeros(1, 3, 1)})
    weights, drawn = torch.full((1, 3, 2), 0.5), torch.zeros(1, 3, 2, 1)
    monkeypatch.setattr(sampled_muzero, "targets", lambda *_: (ones, ones, ones, weights, drawn))
    sampled_muzero.loss(state, batch)["value_loss"].backward()
    assert obs.grad is not None
    assert obs.grad[0, :, 0].tolist() == [1.75, 0, 0]


@sabotaged_by("foresight.planning.search.sampled.SampledActions.step", change("action", lambda a: (a + 1) % 5))
def test_sampled_actions_reach_the_model_as_they_were_drawn() -> None:
    from foresight.nets.outputs import Normal
    from foresight.planning.search.sampled import SampledActions, root_actions

    class Ruler:
        """Reward is the action itself: the best one drawn is the largest."""

        def root(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return torch.zeros(len(obs), 2), torch.zeros(len(obs)), obs

        def step(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
            zero = torch.zeros(len(state))
            return state, action.sum(-1), zero, torch.zeros(len(state), 2), zero

    g = torch.Generator().manual_seed(0)
    model = SampledActions(Ruler(), lambda y: Normal(y, torch.ones(2)), 5, g)
    found = search(model, torch.zeros(6, 1), 60, muzero.RULE)
    drawn = root_actions(found.tree)
    assert drawn.shape == (6, 5, 2)
    assert torch.equal(found.action, drawn.sum(-1).argmax(1))
    torch.testing.assert_close(found.tree.child_values(), drawn.sum(-1), atol=1e-5, rtol=0)


@sabotaged_by("foresight.planning.search.sampled._logits", lambda f: lambda actions: torch.zeros(actions.shape))
def test_discrete_actions_sampled_twice_are_one_action() -> None:
    drawn = torch.tensor([[2, 0, 2, 2], [1, 1, 1, 1], [3, 2, 1, 0]])
    prior = torch.softmax(sampled._logits(drawn), -1)
    torch.testing.assert_close(prior, torch.tensor([[0.75, 0.25, 0, 0], [1, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]]))


class Still:
    """A model with a constant policy output `[W]`, in which nothing happens."""

    def __init__(self, parameters: torch.Tensor) -> None:
        self.parameters = parameters

    def root(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.parameters.expand(len(obs), -1), torch.zeros(len(obs)), obs

    def step(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zero = torch.zeros(len(state))
        return state, zero, zero, self.parameters.expand(len(state), -1), zero


@pytest.mark.parametrize("tau", [0.5, 3.0])
@sabotaged_by("foresight.nets.outputs.Categorical.tempered", lambda f: lambda self, temperature: self)
def test_choices_are_drawn_at_a_temperature_and_the_prior_makes_up_for_it(tau: float) -> None:
    """β ∝ π^(1/τ), and the prior of a drawn choice is its share of the draws times π/β, at the root and below it."""
    policy = torch.tensor([0.6, 0.3, 0.1])
    beta = policy ** (1 / tau) / (policy ** (1 / tau)).sum()
    generator = torch.Generator().manual_seed(0)
    model = sampled.SampledActions(Still(policy.log()), CategoricalHead(3), 4_000, generator, temperature=tau)
    tree = search(model, torch.zeros(2, 1), 1, muzero.RULE).tree
    for node in (0, 1):
        drawn = tree.state["actions"][node]
        share = torch.stack([(drawn == a).float().mean(1) for a in range(3)], 1)
        torch.testing.assert_close(share, beta.expand(2, 3), atol=0.03, rtol=0)
        prior = torch.stack([(tree.prior[:, node] * (drawn == a)).sum(1) for a in range(3)], 1)
        literal = share * policy / beta
        torch.testing.assert_close(prior, literal / literal.sum(1, keepdim=True), atol=1e-5, rtol=0)


@sabotaged_by("foresight.nets.outputs.TanhNormal.tempered", lambda f: lambda self, temperature: self)
def test_real_actions_are_drawn_wider_and_the_prior_makes_up_for_it() -> None:
    """u of tanh(u) has the variance σ²τ, and the mean of u² under the prior is σ² again."""
    head, generator = TanhNormalHead(1), torch.Generator().manual_seed(0)
    parameters = torch.tensor([0.0, math.log(0.5)])
    model = sampled.SampledActions(Still(parameters), head, 4_000, generator, temperature=2.0)
    tree = search(model, torch.zeros(3, 1), 1, muzero.RULE).tree
    square = sampled.root_actions(tree)[..., 0].atanh().square()
    torch.testing.assert_close(square.mean(1), torch.full((3,), 0.5), atol=0.04, rtol=0)
    torch.testing.assert_close((tree.prior[:, 0] * square).sum(1), torch.full((3,), 0.25), atol=0.02, rtol=0)


@sabotaged_by("foresight.planning.search.selection.dirichlet", lambda f: lambda logits, *rest: logits)
def test_sampled_muzero_explores_with_noise_over_the_draws_of_the_root() -> None:
    """The prior of real actions is 1/N each; exploring, ¾ of that and ¼ of Dirichlet(0.3), whose variance is known."""
    config, env, state = small(sampled_muzero)
    obs, count = env.reset(0)[:1].expand(400, -1), config.samples
    for network in (state.network, state.target):
        plain = sampled_muzero._search(state, network, obs, noisy=False)[0].tree.prior
        torch.testing.assert_close(plain, torch.full_like(plain, 1 / count))
    prior = sampled_muzero._search(state, state.network, obs, noisy=True)[0].tree.prior
    torch.testing.assert_close(prior[:, 1:], torch.full_like(prior[:, 1:], 1 / count))  # not below the root
    noise = 4 * (prior[:, 0] - 0.75 / count)
    assert noise.min() > -1e-5
    torch.testing.assert_close(noise.sum(1), torch.ones(400), atol=1e-4, rtol=0)
    variance = (1 / count) * (1 - 1 / count) / (0.3 * count + 1)
    assert 0.8 < noise.var(0).mean() / variance < 1.2


@sabotaged_by("foresight.training.muzero_targets.observe", unmasked)
def test_sampled_muzero_chooses_what_is_legal_and_learns_it() -> None:
    settings = {**SMALL, "steps": 1600, "train_every": 8, "simulations": 12, "samples": 8, "learning_rate": 2e-2}
    settings |= {"num_envs": 16, "collect_steps": 3, "n_steps": 1, "unroll_steps": 1, "reanalyze": 0.5}
    config = build_config(sampled_muzero.Config, **settings)
    *_, (_, _, state) = sampled_muzero.train(config, Bandit(config.num_envs))
    action, extras, _ = sampled_muzero.act(state, Bandit().reset(0))
    assert action.dtype == torch.int64 and (action % 3 == 1).all()
    assert action.float().mean() >= 30  # 25 by chance; 34 to 44 over seeds
    assert torch.equal(action, extras["taken"]) and extras["actions"].shape == (4, 8)


def test_a_tree_of_sampled_actions_is_not_reused() -> None:
    """Its root has other actions the next time."""
    model = sampled.SampledActions(Still(torch.zeros(2)), TanhNormalHead(1), 4)
    found = search(model, torch.zeros(1, 1), 8, muzero.RULE)
    with pytest.raises(UserError, match=r"SampledActions samples other actions .* Leave out reuse"):
        search(model, torch.zeros(1, 1), 8, muzero.RULE, reuse=advance(found.tree, found.action))

"""Planners on a linear system with quadratic costs: the Riccati equation's actions, in the true and a learned model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foresight.algorithms.world import cem, mppi, planet
from foresight.data.sequences import Arrival
from tests.algorithms.world.integrator import B, Integrator, R, gain, regret
from tests.sabotage import change, sabotaged_by

STATES = torch.tensor([[0.5], [-0.3], [0.1], [0.0]])
LATENT = planet.Config(
    steps=400, num_envs=4, seed_episodes=2, updates=25, batch_size=16, sequence_length=8, replay_size=4_000,
    learning_rate=1e-2, reconstruction_coef=30.0, free_nats=1.0, horizon=3, candidates=100, elites=10, iterations=3,
    deter=32, stoch=4, hidden=32, units=32, layers=1,
)  # fmt: skip


@pytest.mark.parametrize("module,options", [(cem, {}), (mppi, {"temperature": 2.0, "min_std": 0.0})])
@sabotaged_by("foresight.planning.continuous.cem.best", change("returns", torch.neg))
def test_in_the_true_simulator_the_first_action_is_optimal(module, options) -> None:
    config = module.Config(horizon=6, candidates=400, elites=20, iterations=12, **options)
    action, _, _ = module.act(module.build(config, Integrator().spaces), STATES)
    torch.testing.assert_close(action, -gain(6) * STATES, atol=0.03, rtol=0)


@torch.no_grad()
def _rewards(state: planet.State, x: Tensor, u: Tensor) -> Tensor:
    """The rewards `[N]` that the model predicts of action u `[N, 1]` at the first step of an episode, at x `[N, 1]`."""
    model = state.model
    one, nothing = x.unsqueeze(1), torch.zeros(len(x), 1)
    found = model.observe(model.initial(len(x)), one, nothing.unsqueeze(-1), nothing, state.generator)
    belief = {"deter": found["deter"][:, 0], "stoch": found["mean"][:, 0]}
    return model.rewards(belief, u.unsqueeze(1))[:, 0]


def _late(found: Arrival) -> Arrival:
    return Arrival(*(torch.roll(x, 1, 1) for x in found))


@pytest.mark.slow
@sabotaged_by("foresight.data.sequences.arrivals", lambda f: lambda batch: _late(f(batch)))
def test_planet_learns_the_reward_and_controls_the_system() -> None:
    """Training ends when the predicted rewards first have a quarter of their spread as the error."""
    env = Integrator()
    x, u = torch.meshgrid(torch.linspace(-0.5, 0.5, 5), torch.linspace(-0.9, 0.9, 5), indexing="ij")
    x, u = x.reshape(-1, 1), u.reshape(-1, 1)
    exact = (-(x + B * u).square() - R * u.square())[:, 0]
    assert exact.std() > 0.2
    for _, _, state in planet.train(LATENT, env):
        error = (_rewards(state, x, u) - exact).square().mean().sqrt()
        if error < 0.25 * exact.std():
            break
    assert error < 0.25 * exact.std()

    def policy(obs: Tensor, carry):
        action, _, carry = planet.act(state, obs, carry)
        return action, carry

    generator = torch.Generator().manual_seed(0)
    random = regret(env, lambda obs, carry: (2 * torch.rand(obs.shape, generator=generator) - 1, None))
    assert random > 1 and regret(env, policy) < 0.2 * random

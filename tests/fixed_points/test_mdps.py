"""The solutions that whole algorithms are compared with, themselves compared with another way to get them."""

from __future__ import annotations

import torch

from foresight.planning.dynamic import bellman
from tests.fixed_points import mdps
from tests.sabotage import change, flip_sign, sabotaged_by

GAMMA = 0.9


@sabotaged_by("tests.fixed_points.mdps.transition", flip_sign)
def test_the_solves_are_those_of_dynamic_programming() -> None:
    for seed in range(3):
        mdp = mdps.random_mdp(seed, forbidden=seed)
        policy = mdps.random_policy(mdp, seed)
        values = mdps.policy_values(mdp, policy, GAMMA)
        torch.testing.assert_close(values, bellman.policy_value(mdp, policy, GAMMA))
        best = mdps.optimal_values(mdp, GAMMA)
        assert bellman.residual(mdp, GAMMA, best) < 1e-12 and (best >= values - 1e-12).all()


@sabotaged_by("tests.fixed_points.mdps.soft_policy_values", change("alpha", lambda a: 2 * a))
def test_soft_values_satisfy_their_bellman_equation() -> None:
    mdp, alpha = mdps.random_mdp(0, forbidden=1), 0.3
    values = mdps.soft_optimal_values(mdp, GAMMA, alpha)
    q = mdps.action_values(mdp, values, GAMMA)
    torch.testing.assert_close(values, alpha * torch.logsumexp(q / alpha, 1))


@sabotaged_by(
    "foresight.envs.tabular.mdp.TableEnv.step", lambda f: lambda *a: f(*a)._replace(discount=torch.ones(a[0].num_envs))
)
def test_samples_have_the_probabilities_of_the_mdp() -> None:
    mdp, count = mdps.random_mdp(1, forbidden=1), 20_000
    env = mdps.Tabled(mdp, count, time_limit=5)
    obs = env.reset(0)
    state = obs["state"].argmax(1)
    action = obs["action_mask"].argmax(1)
    seen = env.step(action)
    torch.testing.assert_close(seen.reward, mdp.reward[state, action].float())
    share = torch.zeros(mdp.states, mdp.states).index_add(0, state, seen.final_obs["state"] * seen.discount[:, None])
    expected = mdps.transition(mdp)[torch.arange(mdp.states), mdps.allowed(mdp).int().argmax(1)]
    torch.testing.assert_close(share / state.bincount()[:, None], expected.float(), atol=0.03, rtol=0)

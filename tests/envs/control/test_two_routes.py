"""Two routes: demonstrations take both sides and reach the goal, the mean of both hits the obstacle."""

from __future__ import annotations

import torch

from foresight.envs.control import two_routes
from foresight.envs.make import make
from tests.sabotage import change, sabotaged_by

N = 200


def _run(act):
    """The rewards with which N episodes end, and the sides that they pass on."""
    env = make("TwoRoutes-v0", num_envs=N)
    obs, side, reward = env.reset(0), torch.zeros(N), torch.zeros(N)
    over = torch.zeros(N, dtype=torch.bool)
    for _ in range(20):
        feedback = env.step(act(env, obs))
        side = torch.where((feedback.final_obs[:, 1] < 0.1) & ~over, feedback.final_obs[:, 0], side)
        reward = torch.where(over, reward, reward + feedback.reward)
        over |= feedback.cut > 0
        obs = feedback.obs
    assert over.all()
    return reward, side


@sabotaged_by("foresight.envs.control.two_routes.toward", change("side", torch.ones_like))
@sabotaged_by("foresight.envs.control.two_routes.toward", change("side", lambda x: 0.3 * x))
def test_demonstrations_reach_the_goal_on_both_sides() -> None:
    reward, side = _run(lambda env, obs: env.expert())
    assert (reward == 1).all() and 0.4 < (side > 0).float().mean() < 0.6


@sabotaged_by("foresight.envs.control.two_routes.collides", lambda f: lambda place: f(place) & False)
def test_their_mean_hits_the_obstacle() -> None:
    def mean(env, obs):
        sides = torch.ones(2, len(obs))
        return (two_routes.toward(obs, sides[0]) + two_routes.toward(obs, -sides[1])) / 2

    reward, _ = _run(mean)
    assert (reward == -1).all()


def test_the_picture_shows_the_place() -> None:
    env = make("TwoRoutes-v0", num_envs=1)
    env.reset(0)
    frame = env.render()
    assert frame.shape == (128, 128, 3)
    red = torch.tensor(frame[..., 0].astype(int) - frame[..., 1]).clamp(min=0).double()
    y = (red.sum(1) * torch.arange(128)).sum() / red.sum()
    assert abs(y - (1 + 0.9) / 2 * 128) < 2  # at the lower end

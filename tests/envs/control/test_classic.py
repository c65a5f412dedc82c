"""Compiled environments: a compiled rollout is the steps that a policy and the environment make in turn."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from foresight.envs import collect
from foresight.envs.base import Episodes, Feedback
from foresight.envs.control.classic import make
from foresight.nets.actor_critic import ActorCritic, Sampled
from foresight.nets.heads import CategoricalHead, ScalarHead
from foresight.nets.stacked_mlp import StackedMLP
from foresight.runtime.monitoring.profile import TimedEnv
from tests.sabotage import change, sabotaged_by

ENVS, STEPS = 3, 600  # more episodes than an environment has starts drawn ahead


def _network() -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(StackedMLP(4, (16, 16), (2, 1), (0.1, 1.0)), CategoricalHead(2), ScalarHead())


class _Given:
    """Acts by given noise, one step at a time."""

    def __init__(self, network: ActorCritic, noise: torch.Tensor) -> None:
        self.network, self.noise = network, iter(noise)

    def __call__(self, obs: torch.Tensor, carry: None) -> tuple[torch.Tensor, dict[str, torch.Tensor], None]:
        return (self.network.policy(obs).logits - next(self.noise)).argmax(-1), {}, carry


@sabotaged_by("foresight.nets.actor_critic.Sampled.unroll", lambda f: lambda *a: f(*a)._replace(cut=f(*a).discount))
@sabotaged_by("foresight.envs.collect._unrolled", change("found", lambda x: x._replace(obs=x.obs.roll(1, 0))))
@pytest.mark.parametrize("limit", [None, 7])
def test_a_compiled_rollout_is_its_steps(limit: int | None) -> None:
    network, noise = _network(), torch.empty(STEPS, ENVS, 2)
    noise.exponential_(generator=torch.Generator().manual_seed(1)).log_()
    whole, single = (make("CartPole-v1", ENVS, limit) for _ in range(2))
    kept, expected_kept = Episodes(), Episodes()
    choose = Sampled(network, torch.Generator().manual_seed(1))
    device = torch.device("cpu")
    found = collect.segment(whole, whole.reset(5), choose, STEPS, device, kept)
    expected = collect.segment(single, single.reset(5), _Given(network, noise), STEPS, device, expected_kept)
    assert kept == expected_kept and kept.finished == expected_kept.finished > 64 * ENVS / (1 if limit else 9)
    for name in ("obs", "action", "reward", "discount", "cut", "mask"):
        torch.testing.assert_close(getattr(found.trajectory, name), getattr(expected.trajectory, name), msg=name)
    assert torch.equal(found.trajectory.extras["limit"], expected.trajectory.extras["limit"])
    assert bool(found.trajectory.extras["limit"].any()) == (limit is not None)
    torch.testing.assert_close((found.last, found.final), (expected.last, expected.final))


@sabotaged_by(
    "foresight.envs.collect._unrolled_episodes",
    lambda f: lambda *a: dataclasses.replace(r := f(*a), trajectory=r.trajectory.map(lambda x: x.flip(1))),
    lambda f: lambda *a: dataclasses.replace(r := f(*a), last=r.last.flip(0)),
)
@pytest.mark.parametrize(("limit", "longest", "block"), [(None, 500, 64), (None, 20, 8), (30, 500, 7), (None, 16, 8)])
def test_compiled_episodes_are_their_steps(limit: int | None, longest: int, block: int, monkeypatch) -> None:
    """Also those that a time limit cuts, and that are cut after the longest, in blocks or not."""
    monkeypatch.setattr(collect, "UNROLLED", block)
    network, noise = _network(), []
    choose = Sampled(network, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    for _ in range(-(-longest // block)):
        noise += torch.empty(block, ENVS, 2).exponential_(generator=generator).log_()
    whole, single = (make("CartPole-v1", ENVS, limit) for _ in range(2))
    kept, expected_kept, device = Episodes(), Episodes(), torch.device("cpu")
    found = collect.episodes(whole, 5, choose, longest, device, kept)
    expected = collect.episodes(single, 5, _Given(network, torch.stack(noise)), longest, device, expected_kept)
    assert kept == expected_kept and len(kept.returns) == ENVS
    assert found.trajectory.shape == expected.trajectory.shape and found.trajectory.shape[1] <= longest
    real = expected.trajectory.mask > 0
    assert torch.equal(found.trajectory.mask > 0, real)
    for name in ("obs", "action", "reward", "discount", "cut"):
        torch.testing.assert_close(getattr(found.trajectory, name)[real], getattr(expected.trajectory, name)[real])
    values = [
        collect.successors(x, x.trajectory.obs[..., 0], lambda obs, _: obs[..., 0])[real] for x in (found, expected)
    ]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(found.last, expected.last)


class Doubled:
    """A wrapper of one's own: another `step`, and everything else is the environment's."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def step(self, action: torch.Tensor) -> Feedback:
        feedback = self.env.step(action)
        return feedback._replace(reward=2 * feedback.reward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


@sabotaged_by(
    "foresight.nets.actor_critic.Sampled.unroll", lambda f: lambda self, env, *a: f(self, getattr(env, "env", env), *a)
)
def test_the_step_of_a_wrapper_is_not_passed_over() -> None:
    env, choose = Doubled(make("CartPole-v1", ENVS)), Sampled(_network(), torch.Generator().manual_seed(0))
    found = collect.segment(env, env.reset(0), choose, 8, torch.device("cpu"), Episodes())
    assert (found.trajectory.reward == 2).all()
    watched = TimedEnv(make("CartPole-v1", ENVS))
    assert choose.unroll(watched, watched.reset(0), 4) is not None
    assert choose.unroll(TimedEnv(env), env.reset(0), 4) is None


def test_what_cannot_be_compiled_is_stepped() -> None:
    network, env = _network(), make("CartPole-v1", ENVS)
    network.mask_key = "action_mask"
    assert Sampled(network, torch.Generator()).unroll(env, env.reset(0), 4) is None
    assert make("Pendulum-v1", 2).unroll(None, False, torch.zeros(2, 3), torch.zeros(1, 2, 2)) is None
    plain = Sampled(_network(), torch.Generator().manual_seed(0))
    one = plain(env.reset(0), None)[0]
    again = _network().policy(env.reset(0)).sample(torch.Generator().manual_seed(0))
    assert torch.equal(one, again)

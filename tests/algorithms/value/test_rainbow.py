"""Rainbow: what it learns, with and without its parts, and what updates draw is resumed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from foresight.algorithms.value import rainbow
from foresight.errors import UserError
from tests.algorithms.policy.small_envs import choice
from tests.algorithms.small_runs import GAMMA, last, time_limit_ends
from tests.algorithms.states import forgets
from tests.algorithms.value.small_envs import Chain
from tests.algorithms.value.value_runs import RAINBOW, resumes
from tests.sabotage import change, flip_sign, sabotaged_by


@sabotaged_by("tests.algorithms.states.restored", forgets("inner"))
def test_what_updates_draw_is_resumed_too() -> None:
    resumes(rainbow, RAINBOW)


@sabotaged_by("foresight.ops.distributional.project", flip_sign)
@pytest.mark.parametrize(
    "options", [{}, {"sigma": None, "epsilon": 0.1, "double": False, "dueling": False, "n_steps": 1}]
)
def test_rainbow_learns(options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rainbow, "REPORT", 250)
    env = choice()
    for _, metrics, state in rainbow.train(dataclasses.replace(RAINBOW, steps=2_500, **options), env):  # noqa: B007
        assert metrics.get("loss", 1.0) > 0  # as of any probabilities
    obs = env.reset(0)
    action, extras, carry = rainbow.act(state, obs)
    assert (action == env._context).all() and extras == {} and carry is None


@sabotaged_by("foresight.data.priorities.Prioritized.add", time_limit_ends)
@sabotaged_by("foresight.ops.distributional.project", change("reward", lambda r: 0.9 * r))
def test_rainbow_reaches_the_closed_form() -> None:
    """Without its exploration, which is another's policy over three steps: random actions, one step."""
    config = rainbow.Config(
        steps=900, num_envs=4, learning_rate=0.02, batch_size=32, replay_size=2_000, learning_starts=50,
        train_every=2, target_every=20, gamma=GAMMA, n_steps=1, value_range=(0.0, 12.0), sigma=None, epsilon=1.0,
        hidden=(16,), adam_epsilon=1e-8,
    )  # fmt: skip
    env = Chain(4)
    state = last(rainbow, config, env)
    torch.testing.assert_close(state.network(torch.eye(2)).mean().detach(), env.values(GAMMA), atol=0.25, rtol=0)


@sabotaged_by("foresight.data.priorities.Prioritized.update", change("priority", lambda p: p + 0.1))
@pytest.mark.parametrize("priority", ["cross_entropy", "kl"])
def test_the_priority_is_the_loss_and_becomes_the_kl_without_the_entropy_of_the_target(priority: str) -> None:
    config = dataclasses.replace(
        RAINBOW,
        steps=200,
        num_envs=2,
        gamma=GAMMA,
        learning_starts=10**6,
        sigma=None,
        double=False,
        priority=priority,
        priority_exponent=1.0,
    )
    state = last(rainbow, config, Chain(ends=False))
    batch = rainbow.sample(state)
    with torch.no_grad():
        predicted = state.network(batch.obs).pick(batch.action).logits.log_softmax(-1)
        following = state.target(batch.next_obs)
        target = following.pick(following.mean().argmax(-1)).backup(batch.reward, batch.discount)
    entropy = -torch.special.xlogy(target, target).sum(-1)
    assert (entropy > 0.5).any()
    expected = -(target * predicted).sum(-1) - (entropy if priority == "kl" else 0)
    rainbow.update(state, batch)
    torch.testing.assert_close(state.replay.tree[batch.key].float(), expected + 1e-6, atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match="Did you mean 'kl'"):
        rainbow.build(dataclasses.replace(config, priority="k1"), choice().spaces)

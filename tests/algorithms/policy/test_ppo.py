"""PPO as a program: settings, every kind of space, resuming, and mistakes."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from gymnasium.vector.utils import batch_space

from foresight.algorithms.policy import impala, ppo
from foresight.envs.base import Spaces
from foresight.errors import UserError
from tests.algorithms.policy.small_envs import Bandit, Clock, choice, hidden_choice, sides
from tests.algorithms.small_runs import bandit, last
from tests.algorithms.states import forgets, restored, weights
from tests.sabotage import change, sabotaged_by

SMALL = ppo.Config(steps=512, num_envs=8, rollout_steps=8, hidden=(16,))


def _last(config: ppo.Config, env, state: ppo.State | None = None) -> ppo.State:
    *_, (_, _, state) = ppo.train(config, env, state)
    return state


def test_it_counts_steps_and_reports_its_metrics():
    seen = list(ppo.train(SMALL, choice()))
    assert [step for step, _, _ in seen] == list(range(64, 513, 64))
    for step, metrics, state in seen:
        assert state.step in (step, 512)
        assert set(metrics) == {*ppo.LOSS_METRICS, "explained_variance", "learning_rate", "return", "length"}
        assert all(isinstance(value, float) for value in metrics.values())
    assert set(ppo.METRICS) <= set(seen[0][1])
    rates = [metrics["learning_rate"] for _, metrics, _ in seen]
    np.testing.assert_allclose(rates, [3e-4 * (1 - i / 8) for i in range(8)])  # detail 4


def test_equal_seeds_give_equal_runs_and_others_do_not():
    before = torch.random.get_rng_state()
    runs = [weights(_last(dataclasses.replace(SMALL, seed=seed), choice())) for seed in (3, 3, 4)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert torch.equal(before, torch.random.get_rng_state())  # the caller's generator is left alone


@sabotaged_by(
    "tests.algorithms.states.restored",
    *[forgets(name) for name in ("network", "optimizer", "generator", "shuffler")],
)
@pytest.mark.parametrize("options", [{}, {"normalize_obs": True, "normalize_reward": True}])
def test_a_resumed_run_is_the_uninterrupted_one(options):
    config = dataclasses.replace(SMALL, **options)
    copies = []
    for step, _, state in ppo.train(config, choice()):
        if step == 256:
            copies = [copy.deepcopy(state), restored(ppo, state, choice())]
    whole = state
    for halfway in copies:
        resumed = _last(config, choice(), halfway)
        assert resumed.step == 512
        assert torch.equal(weights(resumed), weights(whole))
        assert resumed.episodes == whole.episodes


def test_a_finished_state_has_nothing_left_to_do():
    assert list(ppo.train(SMALL, choice(), _last(SMALL, choice()))) == []


def _contexts(actions: gs.Space, reward) -> Bandit:
    spaces = Spaces(gs.Box(-1, 1, (1,), np.float32), actions)
    return Bandit(spaces, 2, lambda c: (2.0 * c - 1).unsqueeze(-1), reward)


ENVS = {
    # every one: reward 1 at best, a random policy earns far less
    "discrete": (choice, 0.25),
    "multi-discrete": (
        lambda: _contexts(gs.MultiDiscrete([2, 3]), lambda c, a: (a == torch.stack([c, c + 1], -1)).all(-1)),
        1 / 6,
    ),
    "multi-binary": (
        lambda: _contexts(gs.MultiBinary(2), lambda c, a: (a == torch.stack([c, 1 - c], -1)).all(-1)),
        0.25,
    ),
    "continuous": (
        lambda: _contexts(
            gs.Box(-2, 2, (2,), np.float32), lambda c, a: 1 - (a - (2.0 * c - 1)[:, None]).square().mean(-1)
        ),
        -1.0,
    ),
}


@sabotaged_by("foresight.ops.returns.gae", lambda f: lambda *a: tuple(-x for x in f(*a)))
@pytest.mark.parametrize("name", ENVS)
def test_every_kind_of_action_is_learned(name):
    make, random = ENVS[name]
    config = ppo.Config(steps=2_560, num_envs=8, rollout_steps=16, learning_rate=1e-2, hidden=(32,), anneal_clip=True)
    state = ppo.build(config, make().spaces)
    env = make()
    untrained = env.reset(0)
    output = state.network.policy(untrained)
    drawn = torch.stack([env._reward(env._context, output.sample(state.generator)).float() for _ in range(200)]).mean()
    assert drawn.item() == pytest.approx(random, abs=0.35)
    for step, metrics, _ in ppo.train(config, make(), state):
        assert step < 512 or metrics["return"] > random  # a fifth of the run is enough for that
    action, extras, carry = ppo.act(state, env.reset(0))
    assert env._reward(env._context, action).float().mean() > 0.9
    assert extras == {} and carry is None
    again, _, _ = ppo.act(state, env.reset(0))
    assert torch.equal(action, again)  # without `explore` it is the mode


def test_masked_actions_are_never_taken():
    env = hidden_choice()
    for _, metrics, state in ppo.train(SMALL, env):  # noqa: B007
        assert metrics["return"] == 1
        assert metrics["entropy"] == 0
    assert ppo.act(state, env.reset(0))[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_pixels_are_learned(precision):
    config = ppo.Config(steps=1024, num_envs=8, rollout_steps=16, epochs=2, precision=precision, learning_rate=1e-3)
    env, returns = sides(), []
    for _, metrics, state in ppo.train(config, env):  # noqa: B007
        returns.append(metrics["return"])
    assert returns[0] < 0.75
    assert (ppo.act(state, env.reset(0))[0] == env._context).all()


def test_a_kl_target_stops_the_epochs():
    config = dataclasses.replace(SMALL, steps=64, epochs=50, learning_rate=1e-2, target_kl=0.01)
    _, free, _ = next(ppo.train(dataclasses.replace(config, target_kl=None), choice()))
    steps: list[int] = []
    state = ppo.build(config, choice().spaces)
    state.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    _, held, _ = next(ppo.train(config, choice(), state))
    assert 0 < len(steps) < 50
    assert held["approx_kl"] < 0.015 < free["approx_kl"]


def test_normalizers_learn_in_training_only():
    config = dataclasses.replace(SMALL, normalize_obs=True, normalize_reward=True)
    env = Clock((1.0, 5.0), num_envs=8)
    state = _last(config, env)
    normalizer, scaler = state.network.normalizer, state.reward_scaler
    assert normalizer is not None and normalizer.moments.count == 512
    assert scaler is not None and scaler.moments.count == 512
    before = copy.deepcopy(normalizer.state_dict())
    ppo.act(state, env.reset(1), explore=True)
    assert all(torch.equal(before[k], v) for k, v in normalizer.state_dict().items())
    torch.testing.assert_close(normalizer.moments.mean.float(), torch.tensor([0.5, 0.5]), atol=0.01, rtol=0)


MISTAKES = [
    ({"num_envs": 4}, "num_envs is 4, but the environment has num_envs 8"),
    ({"minibatches": 33}, "only 64 steps .*two in each minibatch. Use --minibatches 32"),
    ({"minibatches": 65, "normalize_advantage": False}, "minibatches is 65, .* Use --minibatches 64"),
    ({"epochs": 0}, "epochs must be at least 1"),
    *(({name: -1.0}, f"{name} must be above 0, not -1.0") for name in ("clip_ratio", "clip_value", "target_kl")),
    ({"precision": "half"}, "Unknown precision 'half'"),
    ({"activation": "tahn"}, "Did you mean 'tanh'"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        next(ppo.train(dataclasses.replace(SMALL, **options), choice()))


def test_an_action_space_without_a_policy_is_named():
    with pytest.raises(UserError, match="Unsupported action space Text"):
        ppo.build(SMALL, Spaces(gs.Box(0, 1, (2,), np.float32), gs.Text(3)))


def _forgets(original):
    """The moments change, and the last layer does not."""
    return lambda weight, bias, moments, target, rate: (weight, bias, original(weight, bias, moments, target, rate)[2])


@sabotaged_by("foresight.ops.value.popart", _forgets, change("rate", lambda b: 1.0))
def test_popart_preserves_values_and_follows_the_targets():
    """Every kind of network; the moments are those of the mixture of both batches of targets."""
    vector, pixels = gs.Box(-1, 1, (3,), np.float32), gs.Box(0, 255, (3, 36, 36), np.uint8)
    scored = gs.Dict({"action_features": gs.Box(-1, 1, (4, 2), np.float32), "action_mask": gs.MultiBinary(4)})
    for space, options in ((vector, {}), (vector, {"memory": "gru"}), (pixels, {}), (scored, {})):
        config = ppo.Config(popart_rate=0.25, hidden=(8,), **options)
        state = ppo.build(config, Spaces(space, gs.Discrete(4)))
        head, network = state.network.value_head, state.network
        batched = batch_space(space, 5)
        batched.seed(0)
        drawn = batched.sample()
        obs = {k: torch.as_tensor(x) for k, x in drawn.items()} if isinstance(drawn, dict) else torch.as_tensor(drawn)

        def values(network=network, obs=obs):
            with torch.no_grad():
                return network.value(obs, network.initial(5)).value

        assert torch.equal(values(), torch.zeros(5))
        head.update(*network.value_layer(), torch.tensor([10.0, 30.0]), 0.25)
        torch.testing.assert_close(head.moments, torch.tensor([20.0, 10.0]))
        assert (values() - 20).abs().max() < 10 * 5  # within some deviations of the mean: no value is preserved here
        with torch.no_grad():
            network.value_layer()[0].normal_(generator=torch.Generator().manual_seed(0))
        before = values()
        assert before.std() > 0.1
        head.update(*network.value_layer(), torch.tensor([500.0, 540.0]), 0.25)
        torch.testing.assert_close(values(), before, atol=1e-3, rtol=1e-5)
        mixture = 0.75 * 20 + 0.25 * 520, (0.75 * 100 + 0.25 * 400 + 0.75 * 0.25 * 500**2) ** 0.5
        torch.testing.assert_close(head.moments, torch.tensor(mixture))


def _preserves_what_was_not_learned(original):
    return lambda weight, bias, moments, target, rate: original(
        weight, bias, torch.stack([moments[0], moments[1].clamp(min=1e-6)]), target, rate if moments[1] > 0 else 1.0
    )


@sabotaged_by("foresight.ops.value.popart", _preserves_what_was_not_learned)
@pytest.mark.parametrize(
    ("module", "fields"),
    [(ppo, {"minibatches": 2}), (ppo, {"minibatches": 2, "clip_value": 0.2}), (impala, {"rollouts_per_update": 1})],
)
def test_popart_begins_near_the_mean_of_the_targets(module, fields):
    """Rewards of 1,000 or 1,001: values are near them after few updates, so that advantages are small."""
    config = module.Config(
        steps=512, num_envs=8, rollout_steps=16, hidden=(8,), learning_rate=1e-3, popart_rate=0.1, **fields
    )
    state = last(module, config, bandit(gs.Discrete(4), lambda c, a: 1000 + (a == 2).float()))
    assert state.network.value(torch.ones(1, 1)).value.item() == pytest.approx(1000, abs=3)


def test_popart_trains_values_at_once_that_are_clipped():
    """At the first targets the old value of the clip is one under the new moments."""
    env = bandit(gs.Discrete(4), lambda c, a: 1000 + (a == 2).float())
    config = ppo.Config(
        steps=128, num_envs=8, rollout_steps=16, hidden=(8,), popart_rate=0.1, clip_value=0.2, epochs=1, minibatches=1
    )
    (_, metrics, _), *_ = ppo.train(config, env)
    assert 0 < metrics["value_loss"] < 20  # squared deviations; the mean is two thousand from 0


@sabotaged_by("foresight.nets.heads.value_scale", lambda f: lambda head: 1.0)
@pytest.mark.parametrize("module", [ppo, impala])
def test_popart_makes_the_scale_of_rewards_irrelevant(module):
    """Rewards times 1,024: the same policy, step by step, and values that are 1,024 times as large."""
    fields = {"normalize_advantage": False, "minibatches": 2} if module is ppo else {"rollouts_per_update": 1}
    config = module.Config(
        steps=1_024, num_envs=8, rollout_steps=16, hidden=(8,), learning_rate=1e-2, popart_rate=0.1, entropy_coef=0.0,
        max_grad_norm=0.5, **fields,
    )  # fmt: skip
    policies, values = [], []
    for scale in (1.0, 1024.0):
        env = bandit(gs.Discrete(4), lambda c, a, scale=scale: scale * (a == 2).float())
        state = last(module, config, env)
        obs = torch.ones(1, 1)
        policies.append(state.network.policy(obs).logits.detach())
        values.append(state.network.value(obs).value.detach())
    torch.testing.assert_close(policies[0], policies[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(1024 * values[0], values[1], atol=1e-1, rtol=1e-3)
    assert policies[0].argmax() == 2 and values[0] > 0.1

"""What must hold of the policy-gradient family, whatever the world."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from hypothesis import given
from hypothesis import strategies as st

from foresight.algorithms.policy import a2c, off_policy_ac, ppg, qac, reinforce, trpo
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Spaces
from foresight.ops import natural
from tests.algorithms.policy.small_envs import Clock, Gymnasium, choice
from tests.sabotage import change, flip_sign, returns, sabotaged_by, scaled, shift, swap

TWO = Spaces(gs.Box(0, 1, (2,), np.float32), gs.Discrete(2))
LN2 = math.log(2)

# ---- REINFORCE: a world small enough to list everything that can happen in it


class Maze:
    """Two states, two actions, at most three steps. In state 1, action 1 ends the episode."""

    gamma = 0.5
    reward = torch.tensor([[1.0, 2.0], [3.0, 5.0]])  # [state, action]
    successor = ((0, 1), (0, 0))

    def trajectories(self) -> Trajectory:
        """Every episode that there is, `[N, 3]`, with mask 0 after its end."""
        rows = []
        for actions in itertools.product((0, 1), repeat=3):
            state, alive, row = 0, 1.0, []
            for t, action in enumerate(actions):
                over = state == 1 and action == 1
                cut = 1.0 if over or t == 2 else 0.0
                row.append((state, action, self.reward[state, action].item(), 0.0 if over else 1.0, cut, alive))
                alive *= 1 - cut
                state = self.successor[state][action]
            taken = tuple(action for _, action, *_, real in row if real)
            rows.append((taken, row))
        whole = {taken: row for taken, row in rows}  # actions after the end make no other episode
        columns = [torch.tensor([[step[i] for step in row] for row in whole.values()]) for i in range(6)]
        state, action, reward, discount, cut, mask = columns
        # The end of the third step is no time limit here: nothing follows, so nothing is bootstrapped.
        return Trajectory(torch.eye(2)[state], action, reward, discount, cut, mask)


MAZE = Maze()


def _maze_state(**options) -> reinforce.State:
    state = reinforce.build(reinforce.Config(gamma=MAZE.gamma, weigh_time=True, hidden=(), **options), TWO)
    with torch.no_grad():
        state.network.body.policy.flat.copy_(torch.tensor([0.3, -0.2, -0.4, 0.5, 0.1, 0.0]))
    return state


def _chance(state: reinforce.State, batch: Trajectory) -> torch.Tensor:
    """The probability of every episode `[N]`, differentiable."""
    return (state.network.policy(batch.obs).logp(batch.action) * batch.mask).sum(1).exp()


def _gradient(state, scalar: torch.Tensor) -> torch.Tensor:
    return natural.flatten(torch.autograd.grad(scalar, state.network.policy_parameters()))


def _of_episodes(form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What each episode says the gradient is `[N, P]`, and the probability of each `[N]`."""
    state, batch = _maze_state(form=form), MAZE.trajectories()
    if form == "baseline":  # a baseline near the values, but not them: nothing may depend on its being right
        value = batch.obs @ torch.tensor([3.0, 4.5])
        batch = batch.replace(value=value, next_value=torch.zeros_like(value))
    psi, _ = reinforce.weights(state.config, batch)
    found = []
    for i in range(len(psi)):
        real = batch.mask[i] > 0
        loss, _ = reinforce.loss(state, batch.map(lambda x, i=i, r=real: x[i][r]), psi[i][real], episodes=1)
        found.append(-_gradient(state, loss))
    return torch.stack(found), _chance(state, batch).detach()


def _exact() -> torch.Tensor:
    """∇ Σ_τ p(τ) Σ_t γᵗ r_t, by differentiating the sum itself."""
    state, batch = _maze_state(), MAZE.trajectories()
    worth = (batch.reward * batch.mask * MAZE.gamma ** torch.arange(3)).sum(1)
    return _gradient(state, (_chance(state, batch) * worth).sum())


def test_the_maze_is_whole():
    state, batch = _maze_state(), MAZE.trajectories()
    assert len(batch.reward) == 7  # of 8 sequences, two are the same episode: 1, 1
    assert _chance(state, batch).sum().item() == pytest.approx(1, abs=1e-6)


@sabotaged_by("foresight.ops.policy.reinforce", flip_sign, scaled(1.01))
@sabotaged_by("foresight.ops.returns.discounted_return", shift("reward"), swap("discount", "cut"))
@sabotaged_by("foresight.algorithms.policy.reinforce.weights", lambda f: lambda c, b: (1.1 * f(c, b)[0], None))
@pytest.mark.parametrize("form", reinforce.FORMS)
def test_every_form_of_reinforce_has_the_exact_policy_gradient(form):
    gradients, chance = _of_episodes(form)
    exact = _exact()
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(chance @ gradients, exact, rtol=1e-4, atol=1e-5)


def test_without_the_factor_of_time_it_is_another_gradient():
    gradients, chance = _of_episodes("reward_to_go")
    plain = _maze_state()
    batch = MAZE.trajectories()
    psi, _ = reinforce.weights(reinforce.Config(gamma=MAZE.gamma, form="reward_to_go"), batch)
    loss = (psi * plain.network.policy(batch.obs).logp(batch.action) * batch.mask).sum(1) @ chance
    assert not torch.allclose(_gradient(plain, loss), chance @ gradients, rtol=0.05)


@sabotaged_by(
    "foresight.algorithms.policy.reinforce.weights",
    lambda f: lambda config, batch: f(config, batch.replace(value=None if batch.value is None else 0 * batch.value)),
)
def test_each_form_of_reinforce_has_less_variance_than_the_one_before():
    spread = []
    for form in reinforce.FORMS:
        gradients, chance = _of_episodes(form)
        spread.append((chance @ (gradients - chance @ gradients).square()).sum().item())
    assert spread[0] > 1.2 * spread[1] > 1.2 * 1.2 * spread[2] > 0


def nothing_after(original):
    """A time limit is taken for an end."""
    return lambda config, batch: original(
        config, batch.replace(next_value=None if batch.next_value is None else 0 * batch.next_value)
    )


@sabotaged_by("foresight.algorithms.policy.reinforce.weights", nothing_after)
def test_a_time_limit_is_bootstrapped_by_the_baseline_and_only_by_it():
    batch = MAZE.trajectories().map(lambda x: x[:1])  # three times action 0, each earns 1
    config = reinforce.Config(gamma=0.5, form="reward_to_go")
    assert reinforce.weights(config, batch)[1].tolist() == [[1.75, 1.5, 1.0]]
    valued = batch.replace(value=torch.zeros(1, 3), next_value=torch.tensor([[9.0, 9.0, 8.0]]))
    baseline = reinforce.Config(gamma=0.5, form="baseline")
    assert reinforce.weights(baseline, valued)[1].tolist() == [[2.75, 3.5, 5.0]]


# ---- A2C and QAC: small batches that a person can check


def _digits(**fields) -> Trajectory:
    """Three rows of state 0; γ is 0.1, so returns show their digits."""
    zeros, ones = torch.zeros(1, 3), torch.ones(1, 3)
    rows = Trajectory(
        torch.tensor([1.0, 0.0]).expand(1, 3, 2), torch.tensor([[0, 1, 1]]), torch.tensor([[1.0, 2.0, 3.0]]),
        discount=ones, cut=zeros, mask=ones, value=zeros, next_value=torch.tensor([[0.0, 0.0, 4.0]]),
    )  # fmt: skip
    return rows.replace(**fields)


def _blank(module, spaces=TWO, **options):
    """A state whose networks are all zero: the policy is uniform, every value is 0."""
    config = module.Config(gamma=0.1, hidden=(), num_envs=1, **options)
    state = module.build(config, spaces)
    with torch.no_grad():
        for parameter in state.network.parameters():
            parameter.zero_()
    return state


@sabotaged_by("foresight.ops.policy.reinforce", flip_sign)
@sabotaged_by("foresight.ops.returns.gae", swap("discount", "cut"), shift("next_value"), change("lam", lambda x: 0.0))
@sabotaged_by("foresight.ops.value.squared_loss", scaled(2.0))
def test_a2c_golden():
    metrics = a2c.update(_blank(a2c), _digits())
    gains = [1.234, 2.34, 3.4]
    assert metrics["policy_loss"] == pytest.approx(LN2 * sum(gains) / 3, rel=1e-5)
    assert metrics["value_loss"] == pytest.approx(sum(g * g for g in gains) / 6, rel=1e-5)
    assert metrics["entropy"] == pytest.approx(LN2, rel=1e-5)
    ended = _digits(discount=torch.tensor([[1.0, 0.0, 1.0]]), cut=torch.tensor([[0.0, 1.0, 0.0]]))
    gains = [1.2, 2.0, 3.4]
    assert a2c.update(_blank(a2c), ended)["policy_loss"] == pytest.approx(LN2 * sum(gains) / 3, rel=1e-5)
    lost = _digits(mask=torch.tensor([[1.0, 1.0, 0.0]]), cut=torch.tensor([[0.0, 1.0, 1.0]]))
    lost = lost.replace(discount=torch.tensor([[1.0, 0.0, 0.0]]), reward=torch.tensor([[1.0, 2.0, 1e3]]))
    assert a2c.update(_blank(a2c), lost)["policy_loss"] == pytest.approx(LN2 * (1.2 + 2.0) / 2, rel=1e-5)


@sabotaged_by("foresight.nets.stacked_mlp._back", change("grad", lambda g: 0.9 * g))
@sabotaged_by("foresight.ops.policy.reinforce", scaled(1.1))
def test_a2c_takes_a_step_of_rmsprop_along_the_policy_gradient():
    state = _blank(a2c, value_coef=0.0, max_grad_norm=1e9)
    a2c.update(state, _digits())
    # ∇ of -mean(A log π) at the uniform policy: (π - onehot) A / 3, here for the bias; see the gains above.
    gradient = np.array([-1.234 + 2.34 + 3.4, 1.234 - 2.34 - 3.4]) / 6
    # RMSProp's first step is lr · g / √((1 - decay) g²), whatever the size of g, so the mean square is read instead.
    (slot,) = state.optimizer.state.values()
    bias = state.network.body.layers()[0][0][1]
    assert (bias.sign().numpy() == -np.sign(gradient)).all()
    found = (slot["square_avg"] / 0.01).sqrt()
    assert found[4:6].tolist() == pytest.approx(np.abs(gradient).tolist(), rel=1e-4)
    assert not found[6:].any()  # nothing of the value


def _qac_state(**options) -> qac.State:
    state = _blank(qac, **options)
    with torch.no_grad():
        state.network.body.value.layers()[0][0][1].copy_(torch.tensor([1.0, 2.0]))  # q(s, 0) = 1, q(s, 1) = 2
    return state


@sabotaged_by("foresight.ops.policy.reinforce", flip_sign)
@sabotaged_by("foresight.ops.targets.taken", lambda f: lambda q, action: f(q, 1 - action))
@sabotaged_by("foresight.ops.returns.lambda_return", shift("next_value"), change("lam", lambda x: 1.0))
def test_qac_golden():
    rows = _digits(next_value=torch.tensor([[2.0, 2.0, 1.5]]))  # Sarsa: q of actions 1, 1, then the mean over both
    metrics = qac.update(_qac_state(), rows)
    assert metrics["policy_loss"] == pytest.approx(LN2 * (1 + 2 + 2) / 3, rel=1e-5)
    errors = [1.2 - 1, 2.2 - 2, 3.15 - 2]
    assert metrics["value_loss"] == pytest.approx(sum(e * e for e in errors) / 6, rel=1e-4)
    assert qac.update(_qac_state(all_actions=True), rows)["policy_loss"] == pytest.approx(-1.5, rel=1e-5)


@sabotaged_by("foresight.envs.collect.successors", shift("value"))
@sabotaged_by("foresight.ops.targets.expected", scaled(0.5))
def test_sarsa_follows_the_action_that_was_taken_next():
    env = Clock((1.0, 1.0), num_envs=3)
    state = _qac_state(rollout_steps=20)
    batch, _ = qac.rollout(state, env, env.reset(0))
    assert 0.2 < batch.action.float().mean() < 0.8
    expected = 1.0 + batch.action[:, 1:]  # q of the next action
    expected = torch.where(batch.cut[:, :-1] > 0, 1.5, expected)  # the mean over the policy, at a time limit
    assert torch.equal(batch.value, 1.0 + batch.action)
    assert torch.equal(batch.next_value[:, :-1], expected)
    assert batch.next_value[:, -1].tolist() == [1.5] * 3


@sabotaged_by("foresight.ops.targets.expected", scaled(0.9))
@given(seed=st.integers(0, 2**31))
def test_summing_over_actions_is_the_mean_of_drawing_them(seed):
    """∇ Σ_a π(a|s) q(s, a) = Σ_a π(a|s) q(s, a) ∇log π(a|s)."""
    generator = torch.Generator().manual_seed(seed)
    state, every = _blank(qac), _blank(qac, all_actions=True)
    with torch.no_grad():
        for a, b in zip(state.network.parameters(), every.network.parameters(), strict=True):
            a.copy_(torch.randn(a.shape, generator=generator))
            b.copy_(a)
    rows = _digits().map(lambda x: x[0, :1])
    chances = state.network.policy(rows.obs).mean().detach()[0]
    drawn = sum(
        p * _gradient(state, qac.actor_loss(state, rows.replace(action=torch.tensor([a])))[0])
        for a, p in enumerate(chances)
    )
    torch.testing.assert_close(_gradient(every, qac.actor_loss(every, rows)[0]), drawn, rtol=1e-4, atol=1e-6)


# ---- off-policy actor-critic


def _off_policy(epsilon: float, **options) -> tuple[off_policy_ac.State, Trajectory]:
    env = Gymnasium("CartPole-v1", 4)
    config = off_policy_ac.Config(num_envs=4, rollout_steps=32, epsilon=epsilon, hidden=(8,), **options)
    state = off_policy_ac.build(config, env.spaces)
    with torch.no_grad():  # a policy with opinions
        state.network.body.policy.flat.mul_(30)
    return state, off_policy_ac.rollout(state, env, env.reset(0))[0]


@sabotaged_by("foresight.ops.policy.ratio", scaled(1.1))
@sabotaged_by("foresight.ops.returns.vtrace", shift("next_value"), flip_sign)
def test_on_policy_all_weights_are_one_and_the_gradient_is_that_of_a2c():
    state, batch = _off_policy(epsilon=0.0, trace_lambda=0.9)
    policy_loss, value_loss, watched = off_policy_ac.losses(state, batch)
    assert watched[1].item() == pytest.approx(1, abs=1e-6)

    network = state.network
    values, successors = network.value(batch.obs).value.detach(), network.value(batch.extras["next_obs"]).value.detach()
    advantage, running = torch.zeros_like(values), torch.zeros(4)
    for t in range(31, -1, -1):  # generalized advantages, by their definition
        discount = 0.99 * batch.discount[:, t]
        delta = batch.reward[:, t] + discount * successors[:, t] - values[:, t]
        running = delta + discount * 0.9 * (1 - batch.cut[:, t]) * running
        advantage[:, t] = running
    expected = -(advantage * network.policy(batch.obs).logp(batch.action)).mean()
    torch.testing.assert_close(_gradient(state, policy_loss), _gradient(state, expected), rtol=1e-3, atol=1e-5)
    error = 0.5 * (network.value(batch.obs).value - values - advantage).square().mean()
    found, wanted = (natural.flatten(torch.autograd.grad(x, network.value_parameters())) for x in (value_loss, error))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


@sabotaged_by("foresight.ops.policy.ratio", returns(torch.ones_like, "no_weights"), swap("logprob", "old_logprob"))
@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_weights_make_another_behavior_teach_what_the_policy_itself_would(epsilon):
    """All actions in one state: Σ_a b(a) ρ(a) G(a) ∇log π(a) = Σ_a π(a) G(a) ∇log π(a)."""
    state = _blank(off_policy_ac, epsilon=epsilon, max_ratio=100.0, trace_lambda=0.0)
    with torch.no_grad():
        state.network.body.policy.flat.copy_(torch.tensor([0.7, -0.2, -0.9, 0.5, 0.1, 0.0]))
    obs = torch.tensor([[1.0, 0.0]])
    behavior, target = off_policy_ac.behavior(state, obs), state.network.policy(obs)
    found, worth = 0.0, torch.tensor([1.0, 4.0])
    for action in (0, 1):
        a = torch.tensor([action])
        row = Trajectory(
            obs[None], a[None], worth[a][None], discount=torch.zeros(1, 1), cut=torch.ones(1, 1),
            mask=torch.ones(1, 1), logprob=behavior.logp(a).detach()[None], extras={"next_obs": obs[None]},
        )  # fmt: skip
        found = found + behavior.logp(a).exp().item() * _gradient(state, off_policy_ac.losses(state, row)[0])
    expected = _gradient(state, -(target.mean() * worth).sum())
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@sabotaged_by("foresight.algorithms.policy.off_policy_ac.behavior", change("obs", lambda x: -x))
def test_the_behavior_is_the_mixture_that_it_says():
    state, batch = _off_policy(epsilon=0.25)
    mixed = 0.75 * state.network.policy(batch.obs).mean() + 0.125
    torch.testing.assert_close(batch.logprob, mixed.gather(-1, batch.action[..., None])[..., 0].log())
    drawn = off_policy_ac.behavior(state, batch.obs).mean()
    torch.testing.assert_close(drawn, mixed)
    assert (mixed - state.network.policy(batch.obs).mean()).abs().max() > 0.02


# ---- TRPO


def _trpo(name: str, seed: int, **options):
    env = Gymnasium(name, 4) if name else choice()
    config = trpo.Config(num_envs=env.num_envs, rollout_steps=64, seed=seed, hidden=(16,), **options)
    state = trpo.build(config, env.spaces)
    batch, _ = trpo.rollout(state, env, env.reset(seed))
    generator = torch.Generator().manual_seed(seed)
    return state, batch.map(lambda x: x.flatten(0, 1)), torch.randn(batch.reward.numel(), generator=generator)


def _divergence(before, after) -> float:
    """The mean KL, by torch's own distributions."""
    laws = [
        torch.distributions.Categorical(logits=o.logits)
        if hasattr(o, "logits")
        else torch.distributions.Independent(torch.distributions.Normal(o.location, o.std), 1)
        for o in (before, after)
    ]
    return torch.distributions.kl_divergence(*laws).mean().item()


@sabotaged_by("foresight.nets.outputs.Categorical.kl", scaled(0.1))
@sabotaged_by("foresight.ops.natural.conjugate_gradient", flip_sign)
@sabotaged_by("foresight.algorithms.policy.trpo.surrogate", flip_sign)
@sabotaged_by("foresight.algorithms.policy.trpo.step_direction", scaled(0.01))
def test_trpo_improves_and_never_leaves_its_trust_region():
    fractions = []
    for name, target, seed in [("CartPole-v1", 0.01, 0), ("CartPole-v1", 0.3, 1), ("Pendulum-v1", 0.01, 2),
                               ("Pendulum-v1", 1.0, 3), ("", 0.02, 4), ("", 3.0, 5)]:  # fmt: skip
        state, rows, gain = _trpo(name, seed, target_kl=target, damping=1e-3)
        with torch.no_grad():
            before = state.network.policy(rows.obs)
            old = before.logp(rows.action)
        metrics = trpo.improve(state, rows, gain)
        with torch.no_grad():
            after = state.network.policy(rows.obs)
            gained = ((after.logp(rows.action) - old).exp() * gain).mean() - gain.mean()
        divergence = _divergence(before, after)
        assert 0.2 * target < divergence <= target * (1 + 1e-5)
        assert divergence == pytest.approx(metrics["kl"], rel=1e-3)
        assert gained.item() == pytest.approx(metrics["improvement"], rel=1e-2, abs=1e-5)
        assert gained > 0
        fractions.append(metrics["step_fraction"])
    assert min(fractions) < 1 == max(fractions)  # the search had work to do, somewhere


def _bits(state) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in state.network.parameters()]).view(torch.int32)


@sabotaged_by("foresight.algorithms.policy.trpo._put", change("vector", lambda v: v * (1 + 1e-6)))
@sabotaged_by("foresight.algorithms.policy.trpo.surrogate", returns(lambda x: x + torch.rand(()), "noisy"))
@pytest.mark.parametrize("fault", ["downhill", "nan", "too far"])
def test_trpo_puts_its_parameters_back_when_the_search_fails(fault):
    state, rows, gain = _trpo("Pendulum-v1", 0)
    torch.manual_seed(0)
    before = _bits(state)
    parameters = state.network.policy_parameters()
    uphill = natural.flatten(
        torch.autograd.grad((state.network.policy(rows.obs).logp(rows.action) * gain).mean(), parameters)
    )
    full = {"downhill": -1e-3 * uphill, "nan": uphill * torch.nan, "too far": 1e4 * uphill}[fault]
    metrics = trpo.line_search(state, rows, gain, full)
    assert metrics == {"kl": 0.0, "improvement": 0.0, "step_fraction": 0.0}
    assert torch.equal(_bits(state), before)
    assert trpo.line_search(state, rows, gain, 1e-3 * uphill)["step_fraction"] == 1.0  # and a good step is taken


def test_without_anything_to_gain_trpo_stays_where_it_is():
    state, rows, gain = _trpo("CartPole-v1", 0)
    before = _bits(state)
    assert trpo.improve(state, rows, 0 * gain)["step_fraction"] == 0.0
    assert torch.equal(_bits(state), before)


@sabotaged_by("foresight.algorithms.policy.trpo.step_direction", scaled(1.1))
@sabotaged_by("foresight.ops.natural.conjugate_gradient", change("b", lambda b: b.roll(1)))
def test_the_full_step_is_the_edge_of_the_quadratic_model():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator)
    fisher, gradient = root @ root.t() + torch.eye(6), torch.randn(6, generator=generator)
    step = trpo.step_direction(trpo.Config(target_kl=0.02, cg_iterations=30), gradient, lambda v: fisher @ v)
    assert 0.5 * step @ fisher @ step == pytest.approx(0.02, rel=1e-4)
    natural_gradient = torch.linalg.solve(fisher, gradient)
    assert torch.cosine_similarity(step, natural_gradient, dim=0) == pytest.approx(1, abs=1e-5)


@sabotaged_by("foresight.algorithms.policy.trpo.improve", lambda f: lambda *a: {"kl": 0.0, "entropy": 0.0})
def test_policy_and_value_move_apart():
    state, rows, gain = _trpo("CartPole-v1", 0)
    policy, value = ([p.detach().clone() for p in part] for part in (
        state.network.policy_parameters(), state.network.value_parameters()))  # fmt: skip
    trpo.improve(state, rows, gain)
    assert not torch.equal(policy[0], state.network.policy_parameters()[0])
    assert torch.equal(value[0], state.network.value_parameters()[0])
    policy = [p.detach().clone() for p in state.network.policy_parameters()]
    trpo.fit_value(state, rows, gain)
    assert all(torch.equal(a, b) for a, b in zip(policy, state.network.policy_parameters(), strict=True))
    assert not torch.equal(value[0], state.network.value_parameters()[0])


# ---- PPG


def _ppg(**options) -> tuple[ppg.State, Trajectory]:
    """A state in the middle of learning CartPole, with a phase's worth of rows."""
    env = Gymnasium("CartPole-v1", 4)
    options = {
        "policy_iterations": 99,
        "auxiliary_minibatches": 8,
        "normalize_reward": False,
        "gamma": 0.98,
        "learning_rate": 3e-3,
        **options,
    }
    config = ppg.Config(steps=2048, num_envs=4, rollout_steps=64, hidden=(32,), **options)
    *_, (_, _, state) = ppg.train(config, env)
    assert len(state.remembered) == 8
    batch, _ = ppg.rollout(state, env, env.reset(1))
    return state, batch


@sabotaged_by("foresight.algorithms.policy.ppg.joint_loss", lambda f: lambda *a: (f(*a)[0], 0 * f(*a)[1]))
@sabotaged_by("foresight.algorithms.policy.ppg.joint_loss", lambda f: lambda *a: (0 * f(*a)[0], f(*a)[1]))
def test_the_auxiliary_phase_teaches_the_trunk_and_leaves_the_policy_where_it_was():
    state, _ = _ppg()
    obs, target = (torch.cat([part[key] for part in state.remembered]) for key in ("obs", "target"))

    def auxiliary() -> float:
        guess = state.network.value_head(state.network.body.policy.only(1, obs)).value
        return 0.5 * (guess - target).square().mean().item()

    with torch.no_grad():
        before, error = state.network.policy(obs), auxiliary()
        trunk = [p.clone() for p in state.network.body.policy.trunk.parameters()]
    metrics = ppg.auxiliary_phase(state)
    with torch.no_grad():
        divergence = _divergence(before, state.network.policy(obs))
        assert auxiliary() < 0.5 * error
        assert metrics["auxiliary_loss"] < error
    assert divergence < 0.01
    assert not torch.equal(trunk[0], next(iter(state.network.body.policy.trunk.parameters())))
    assert state.remembered == []


def _misremembered(original):
    def mutant(*arguments):
        batch, obs = original(*arguments)
        return batch.replace(logprob=batch.logprob + 0.01), obs

    return mutant


@sabotaged_by("foresight.algorithms.policy.ppg.rollout", _misremembered)
def test_ppg_begins_at_ratio_one_and_at_no_divergence():
    state, batch = _ppg()
    rows = batch.replace(extras={"advantage": batch.reward}).map(lambda x: x.flatten(0, 1))
    _, watched = ppg.policy_loss(state, rows)
    assert watched[1].item() == pytest.approx(0, abs=1e-9)
    assert ppg.joint_loss(state, state.network, rows.obs, rows.reward)[1].item() == pytest.approx(0, abs=1e-7)


def test_in_the_policy_phase_neither_network_hears_of_the_other():
    state, batch = _ppg()
    rows = batch.replace(extras={"advantage": batch.reward}).map(lambda x: x.flatten(0, 1))
    loss, _ = ppg.policy_loss(state, rows)
    assert all(g is None for g in torch.autograd.grad(loss, state.network.value_parameters(), allow_unused=True))
    error = ppg.value_loss(state, rows.obs, rows.reward)
    trunk = list(state.network.body.policy.parameters())
    assert all(g is None for g in torch.autograd.grad(error, trunk, allow_unused=True))


def test_the_auxiliary_phase_comes_every_so_many_iterations():
    config = ppg.Config(steps=64 * 7, num_envs=8, rollout_steps=8, policy_iterations=3, hidden=(8,))
    seen = ["clone_kl" in metrics for _, metrics, _ in ppg.train(config, choice())]
    assert seen == [False, False, True, False, False, True, False]


# ---- all that bootstrap: a time limit is no termination


def _time_limit_ends(original):
    return lambda reward, discount, cut, *rest, **more: original(reward, discount * (1 - cut), cut, *rest, **more)


@sabotaged_by("foresight.ops.returns.gae", _time_limit_ends)
@sabotaged_by("foresight.ops.returns.lambda_return", _time_limit_ends)
@sabotaged_by("foresight.ops.returns.vtrace", _time_limit_ends)
def test_a_time_limit_is_no_termination():
    """Reward 1 for ever is worth 1 / (1 - 0.9) = 10, though every episode is cut after 8 steps."""
    settings = {
        a2c: {"learning_rate": 0.15, "max_grad_norm": 1e9},
        qac: {"value_learning_rate": 0.3, "max_grad_norm": 1e9},
        off_policy_ac: {"value_learning_rate": 0.1, "max_grad_norm": 1e9},
        trpo: {"value_learning_rate": 0.1, "value_batch": 64, "value_epochs": 2, "cg_iterations": 1},
        ppg: {"learning_rate": 0.15, "max_grad_norm": 1e9, "minibatches": 2, "normalize_reward": False},
    }
    for module, options in settings.items():
        config = module.Config(steps=6_000, num_envs=8, rollout_steps=16, gamma=0.9, hidden=(), **options)
        *_, (_, _, state) = module.train(config, Clock())
        found = state.network.value(torch.ones(1, 1))
        value = found.max().item() if module is qac else found.value.item()
        assert value == pytest.approx(10, abs=0.5), module.__name__

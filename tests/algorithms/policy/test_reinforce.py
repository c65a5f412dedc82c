"""REINFORCE: every form has the exact policy gradient of an MDP whose episodes can all be listed."""

from __future__ import annotations

import itertools

import pytest
import torch

from foresight.algorithms.policy import reinforce
from foresight.data.trajectory import Trajectory
from tests.algorithms.policy.small_batches import TWO, gradient
from tests.sabotage import flip_sign, sabotaged_by, scaled, shift, swap


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


def _of_episodes(form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient estimated from each episode `[N, P]`, and the probability of each `[N]`."""
    state, batch = _maze_state(form=form), MAZE.trajectories()
    if form == "baseline":  # a baseline near the values, but not them: nothing may depend on its being right
        value = batch.obs @ torch.tensor([3.0, 4.5])
        batch = batch.replace(value=value, next_value=torch.zeros_like(value))
    psi, _ = reinforce.weights(state.config, batch)
    found = []
    for i in range(len(psi)):
        real = batch.mask[i] > 0
        loss, _ = reinforce.loss(state, batch.map(lambda x, i=i, r=real: x[i][r]), psi[i][real], episodes=1)
        found.append(-gradient(state, loss))
    return torch.stack(found), _chance(state, batch).detach()


def _exact() -> torch.Tensor:
    """∇ Σ_τ p(τ) Σ_t γᵗ r_t, by differentiating the sum itself."""
    state, batch = _maze_state(), MAZE.trajectories()
    worth = (batch.reward * batch.mask * MAZE.gamma ** torch.arange(3)).sum(1)
    return gradient(state, (_chance(state, batch) * worth).sum())


def test_every_episode_of_the_maze_is_listed():
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
    assert not torch.allclose(gradient(plain, loss), chance @ gradients, rtol=0.05)


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

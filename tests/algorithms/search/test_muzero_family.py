"""MuZero and its variants: targets by hand, reanalysis, and training."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.search import efficientzero, gumbel_muzero, muzero, sampled_muzero, stochastic_muzero
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Feedback, Spaces
from foresight.envs.games import make as games
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.nets.heads import CategoricalHead, TanhNormalHead
from foresight.nets.models.muzero import CategoricalScalar
from foresight.ops import transforms
from foresight.planning.search import sampled
from foresight.planning.search.mcts import search
from foresight.runtime.checkpoints import checkpoint
from tests.algorithms.states import refusal
from tests.sabotage import change, drop, flip_sign, sabotaged_by, scaled

DISCRETE = [muzero, gumbel_muzero, efficientzero, stochastic_muzero]
ALL = [*DISCRETE, sampled_muzero]
SMALL: dict[str, Any] = {
    "steps": 400, "num_envs": 4, "simulations": 4, "unroll_steps": 3, "n_steps": 3, "batch_size": 8, "train_every": 40,
    "collect_steps": 10, "learning_starts": 80, "latent_size": 8, "hidden": (16,), "target_every": 2,
}  # fmt: skip


def small(module: ModuleType, **fields: Any) -> tuple[Any, Any, Any]:
    config = module.Config(**{**SMALL, **fields})
    env = make("Pendulum-v1" if module is sampled_muzero else "CartPole-v1", num_envs=config.num_envs)
    return config, env, module.build(config, env.spaces)


def name(module: ModuleType) -> str:
    return module.__name__.rsplit(".", 1)[-1]


@pytest.mark.parametrize("module", ALL, ids=name)
def test_it_trains_stops_and_resumes(module: ModuleType) -> None:
    config, env, _ = small(module)
    before, last, state = None, 0, None
    for step, metrics, state in module.train(config, env):
        assert step == state.step and step > last
        last = step
        if step == 200:
            before = {key: x.clone() for key, x in state.network.state_dict().items()}
            assert state.updates == 3 and all(torch.isfinite(torch.tensor(v)) for v in metrics.values())
    assert last == config.steps and state.updates == 8 and len(state.replay) == 400
    assert before is not None
    assert any(not torch.equal(x, before[key]) for key, x in state.network.state_dict().items())
    assert list(module.train(config, env, state)) == []
    longer = module.Config(**{**SMALL, "steps": 440})
    *_, (step, _, after) = module.train(longer, env, state)
    assert step == 440 and after is state
    assert state.replay.rows is not None and (state.replay.rows.mask[:, 99] == 0).all()  # the successor is unknown


@pytest.mark.parametrize("module", ALL, ids=name)
def test_acting_without_exploring_repeats(module: ModuleType) -> None:
    _, env, state = small(module)
    obs = env.reset(0)
    if module is sampled_muzero:  # its actions are drawn, so the generator must be set back
        torch.manual_seed(0)
    first = module.act(_seed(state), obs)[0]
    assert torch.equal(first, module.act(_seed(state), obs)[0])
    explored = torch.stack([module.act(state, obs, explore=True)[0].float() for _ in range(12)])
    assert explored.std(0).max() > 0


def _seed(state: Any) -> Any:
    state.generator.manual_seed(0)
    return state


def sequences(module: ModuleType, state: Any, steps: int = 6) -> Trajectory:
    """Two sequences by hand: the first terminates after step 2, the second is truncated after step 1."""
    actions, g = 2, torch.Generator().manual_seed(0)
    zeros = torch.zeros(2, steps)
    reward = torch.tensor([[1.0, 2.0, 3.0, 50.0, 60.0, 70.0], [4.0, 5.0, 80.0, 90.0, 10.0, 20.0]])
    discount, cut = torch.ones(2, steps), zeros.clone()
    discount[0, 2], cut[0, 2], cut[1, 1] = 0.0, 1.0, 1.0
    obs = torch.randn(2, steps, 4, generator=g)
    extras = {
        "weights": torch.softmax(torch.randn(2, steps, actions, generator=g), -1),
        "next_obs": torch.randn(2, steps, 4, generator=g), "born": torch.zeros(2, steps, dtype=torch.int64),
    }  # fmt: skip
    return Trajectory(obs, zeros.long(), reward, discount, cut, torch.ones(2, steps), extras=extras)


@pytest.mark.parametrize("module", DISCRETE, ids=name)
@sabotaged_by("foresight.ops.returns.n_step_return", change("n", lambda n: n + 1), change("cut", torch.zeros_like))
@sabotaged_by("foresight.ops.latent.unroll_masks", change("discount", torch.ones_like))
def test_targets_by_hand(module: ModuleType) -> None:
    """γ = 0.1 and n = 2: digits can be read off the returns."""
    _, _, state = small(module, gamma=0.1, n_steps=2, unroll_steps=4, reanalyze=0.0)
    batch = sequences(module, state)
    with torch.no_grad():  # values that are not 0, so that a wrong bootstrap shows
        state.target.value.layer.bias.copy_(torch.randn(41, generator=torch.Generator().manual_seed(1)))
        after = state.target.root(batch.extras["next_obs"].flatten(0, 1))[1].view(2, 6)
    alive, known, value, weights = module.targets(state, batch)
    assert alive.tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert known.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    expected = torch.tensor(
        [[1.2 + 0.01 * after[0, 1], 2.3, 3.0], [4.5 + 0.01 * after[1, 1], 5 + 0.1 * after[1, 1], 0]]
    )
    torch.testing.assert_close(value[:, :3], expected)
    assert (value[:, 3:] == 0).all()
    assert torch.equal(weights, batch.extras["weights"][:, :5])


@pytest.mark.parametrize("module", [muzero, efficientzero], ids=name)
@sabotaged_by("foresight.planning.search.selection.PUCT.code", lambda f: lambda self: (1, f(self)[1]))
def test_reanalysis_with_the_same_weights_repeats_the_targets(module: ModuleType) -> None:
    config, env, state = small(module, simulations=12, reanalyze=1.0)
    with torch.no_grad():  # a network that prefers something
        for network in (state.network, state.target):
            generator = torch.Generator().manual_seed(1)
            for p in network.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    obs, rows = env.reset(0), []
    for _ in range(6):
        found = search(state.network, obs, config.simulations, muzero.RULE)
        feedback = env.step(found.action.clone())
        rows.append((obs, found.action, feedback, _reference(state, obs, config.simulations)))
        obs = feedback.obs
    batch = Trajectory(
        torch.stack([row[0] for row in rows], 1), torch.stack([row[1] for row in rows], 1),
        *(torch.stack([getattr(row[2], key) for row in rows], 1) for key in ("reward", "discount", "cut", "mask")),
        extras={"weights": torch.stack([row[3] for row in rows], 1)},
    )  # fmt: skip
    again = module.reanalyze(state, batch.obs[:, :4].flatten(0, 1))["weights"].unflatten(0, (4, 4))
    torch.testing.assert_close(again, batch.extras["weights"][:, :4], atol=1e-6, rtol=0)
    assert again.std() > 0.05


def _reference(state: Any, obs: torch.Tensor, simulations: int) -> torch.Tensor:
    """What acting found: by the other backend, so that it is computed apart from what is tested."""
    return search(state.network, obs, simulations, muzero.RULE, backend="tensor").weights


@sabotaged_by("foresight.ops.transforms.signed_hyperbolic", scaled(0.5))
@sabotaged_by("foresight.nets.models.muzero.CategoricalScalar.forward", flip_sign)
def test_a_number_is_learned_through_its_categorical() -> None:
    torch.manual_seed(0)
    number, x = CategoricalScalar(3, 20), torch.eye(3)
    assert number(x).abs().max() < 1e-4
    target = torch.tensor([-3.0, 0.5, 250.0])
    optimizer = torch.optim.Adam(number.parameters(), 0.1)
    for _ in range(1000):
        optimizer.zero_grad()
        number.loss(x, target).sum().backward()
        optimizer.step()
    torch.testing.assert_close(number(x), target, rtol=0.05, atol=0.1)
    assert transforms.signed_hyperbolic(torch.tensor(250.0)) < 20


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


@sabotaged_by("foresight.nets.models.efficientzero.PrefixModel.reset_prefix", lambda f: lambda self, state: state)
def test_a_search_reads_rewards_from_the_value_prefix() -> None:
    """The rewards of five steps sum to the prefix; at the horizon the sum and the LSTM are reset."""
    _, env, state = small(efficientzero, lstm_horizon=3)
    with torch.no_grad():
        state.network.prefix.layer.weight.normal_(generator=torch.Generator().manual_seed(0))
        _, _, now = state.network.root(env.reset(0))
        total = torch.zeros(4)
        for depth in range(1, 7):
            action = torch.zeros(4, dtype=torch.int64)
            prefix = state.network.prefix(state.network.advance(now, action)["h"])
            now, reward, _, _, _ = state.network.step(now, action)
            total = total + reward
            torch.testing.assert_close(total, prefix, atol=1e-4, rtol=1e-4)
            if depth % 3 == 0:
                assert now["h"].abs().max() == 0 and now["prefix"].abs().max() == 0
                total = torch.zeros(4)
            else:
                assert now["h"].abs().max() > 0


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


@sabotaged_by("foresight.algorithms.search.muzero._rule", lambda f: lambda state: muzero.RULE)
def test_in_games_muzero_takes_a_slight_edge_for_slight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Game values have known bounds, so values near 0 change nothing. In control the tree's own bounds apply."""
    envs = {"game": (games.make("tic_tac_toe"), 1.0), "control": (make("CartPole-v1", num_envs=1).spaces, 0.997)}
    forward, visits = CategoricalScalar.forward, {}
    for kind, (env, gamma) in envs.items():
        state = muzero.build(muzero.Config(**{**SMALL, "simulations": 40, "gamma": gamma}), env)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in state.network.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        seen = env.start(1) if kind == "game" else torch.zeros(1, 4)
        for scale in (0.0, 1e-6):
            monkeypatch.setattr(CategoricalScalar, "forward", lambda self, x, scale=scale: scale * forward(self, x))
            visits[kind, scale] = muzero.act(state, seen)[1]["visits"]
    assert torch.equal(visits["game", 0.0], visits["game", 1e-6])
    assert not torch.equal(visits["control", 0.0], visits["control", 1e-6])


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
        plain = sampled_muzero._search(state, network, obs, explore=False)[0].tree.prior
        torch.testing.assert_close(plain, torch.full_like(plain, 1 / count))
    prior = sampled_muzero._search(state, state.network, obs, explore=True)[0].tree.prior
    torch.testing.assert_close(prior[:, 1:], torch.full_like(prior[:, 1:], 1 / count))  # not below the root
    noise = 4 * (prior[:, 0] - 0.75 / count)
    assert noise.min() > -1e-5
    torch.testing.assert_close(noise.sum(1), torch.ones(400), atol=1e-4, rtol=0)
    variance = (1 / count) * (1 - 1 / count) / (0.3 * count + 1)
    assert 0.8 < noise.var(0).mean() / variance < 1.2


class Bandit:
    """Fifty choices, of which every third is legal; the higher, the better."""

    num_envs, name = 4, "bandit"
    spaces = Spaces(gs.Dict({"x": gs.Box(0, 1, (1,)), "action_mask": gs.MultiBinary(50)}), gs.Discrete(50))

    def reset(self, seed: int) -> Any:
        mask = (torch.arange(50) % 3 == 1).to(torch.int8).expand(4, 50)
        return {"x": torch.zeros(4, 1), "action_mask": mask}

    def step(self, action: torch.Tensor) -> Feedback:
        assert (action % 3 == 1).all(), "not legal"
        obs, zero, one = self.reset(0), torch.zeros(4), torch.ones(4)
        return Feedback(obs, action / 49, zero, one, one, obs, {"episode_return": [], "episode_length": []})


def _unmasked(seen: Any) -> Any:
    return lambda state, obs: (seen(state, obs)[0], None)


@sabotaged_by("foresight.training.muzero_targets.observe", _unmasked)
@pytest.mark.parametrize("module", DISCRETE, ids=name)
def test_only_legal_actions_are_chosen_and_trained_on(module: ModuleType) -> None:
    state = module.build(module.Config(**SMALL), Bandit.spaces)
    obs = Bandit().reset(0)
    illegal = obs["action_mask"] == 0
    for explore in (False, True):
        action, extras, _ = module.act(state, obs, explore=explore)
        assert (action % 3 == 1).all() and extras["weights"][illegal].abs().sum() == 0
    weights = module.reanalyze(state, obs)["weights"]
    assert weights.shape == (4, 50) and weights[illegal].abs().sum() == 0


@sabotaged_by("foresight.training.muzero_targets.observe", _unmasked)
def test_sampled_muzero_chooses_what_is_legal_and_learns_it() -> None:
    settings = {**SMALL, "steps": 1600, "train_every": 8, "simulations": 12, "samples": 8, "learning_rate": 2e-2}
    config = sampled_muzero.Config(**{**settings, "n_steps": 1, "unroll_steps": 1, "reanalyze": 0.5})
    *_, (_, _, state) = sampled_muzero.train(config, Bandit())
    action, extras, _ = sampled_muzero.act(state, Bandit().reset(0))
    assert action.dtype == torch.int64 and (action % 3 == 1).all()
    assert action.float().mean() >= 30  # 25 by chance; 34 to 44 over seeds
    assert torch.equal(action, extras["taken"]) and extras["actions"].shape == (4, 8)


@pytest.mark.parametrize("module", DISCRETE, ids=name)
def test_invalid_configs_and_spaces_are_refused(module: ModuleType) -> None:
    env = make("Pendulum-v1", num_envs=2)
    with pytest.raises(UserError, match="discrete actions"):
        module.build(module.Config(), env.spaces)
    with pytest.raises(UserError, match="discrete actions or a bounded 1-D Box"):
        spaces = env.spaces._replace(action=gs.Box(-np.inf, np.inf, (2,)))
        sampled_muzero.build(sampled_muzero.Config(), spaces)
    cart = make("CartPole-v1", num_envs=2)
    for wrong, message in [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"learning_starts": 3}, "learning_starts is 3"),
        ({"reanalyze": 2.0}, "reanalyze must be between 0 and 1, not 2"),
    ]:
        with pytest.raises(UserError, match=message):
            module.build(module.Config(**wrong), cart.spaces)
    with pytest.raises(UserError, match="sample_temperature must be above 0"):
        sampled_muzero.build(sampled_muzero.Config(sample_temperature=0.0), env.spaces)
    for openings, spaces, most in ((1, cart.spaces, 0), (9, games.make("tic_tac_toe"), 8)):
        with pytest.raises(UserError, match=rf"openings is {openings}: .* \(here at most {most}\)"):
            gumbel_muzero.build(gumbel_muzero.Config(openings=openings, gamma=1.0), spaces)
    with pytest.raises(UserError, match="num_envs is 8"):
        next(module.train(module.Config(), cart))


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    config, env, state = small(muzero)
    next(muzero.train(config, env, state))
    with torch.no_grad():
        state.network.policy.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="is not finite for row"):
        for _ in muzero.train(config, env, state):
            pass


@sabotaged_by("foresight.ops.returns.n_step_return", drop("mask"))
def test_an_interrupted_replay_learns_nothing_of_the_gap() -> None:
    _, _, state = small(muzero, gamma=0.1, n_steps=2, unroll_steps=4, reanalyze=0.0)
    batch = sequences(muzero, state)
    mask = torch.ones(2, 6)
    mask[0, 1] = 0  # step 1 was the newest when the run stopped
    alive, known, value, _ = muzero.targets(state, batch.replace(mask=mask))
    assert alive[0].tolist() == [1, 0, 0, 0, 0] and known[0].tolist() == [1, 0, 0, 0, 0]
    assert value[0, 0].item() == pytest.approx(1.0, abs=1e-5)  # the reward, and a value that is still 0


@sabotaged_by("foresight.envs.games.game.Plays.load_state_dict", lambda f: lambda self, state: None)
def test_a_checkpoint_of_another_game_is_refused(tmp_path: Path) -> None:
    config = muzero.Config(**{**SMALL, "gamma": 1.0})
    mine, other = muzero.build(config, games.make("tic_tac_toe")), muzero.build(config, games.make("hex", size=3))
    path = checkpoint.save(tmp_path, mine, 1)
    assert "plays tic_tac_toe(), not hex(board_size=3)" in refusal(path, other)

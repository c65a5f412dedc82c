"""MuZero and its variants: targets by hand, reanalysis, and training."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.search import efficientzero, gumbel_muzero, muzero, sampled_muzero
from foresight.data.trajectory import Trajectory
from foresight.envs.games import make as games
from foresight.envs.games import selfplay
from foresight.envs.make import make
from foresight.errors import UserError
from foresight.planning.search.mcts import UCT, search
from foresight.training.options import build_config
from tests.algorithms.search.muzero_runs import ALL, DISCRETE, SMALL, Bandit, name, sequences, small, unmasked
from tests.sabotage import change, sabotaged_by


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
    stored = state.replay.storage
    assert stored is not None and stored.mask is not None
    terminated = (stored.cut[:, 99] == 1) & (stored.discount[:, 99] == 0)
    assert list(module.train(config, env, state)) == []
    longer = build_config(module.Config, **{**SMALL, "steps": 440})
    *_, (step, _, after) = module.train(longer, env, state)
    assert step == 440 and after is state
    assert torch.equal(stored.mask[:, 99] == 1, terminated)  # the successors of the others are unknown
    assert not terminated.all()


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
@sabotaged_by("foresight.planning.search.selection.PUCT.compiled", lambda f: lambda self: UCT().compiled())
def test_reanalysis_with_the_same_weights_repeats_the_targets(module: ModuleType) -> None:
    config, env, state = small(module, simulations=12, reanalyze=1.0, dirichlet_fraction=0.0)
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


@sabotaged_by("foresight.training.muzero_targets.observe", unmasked)
@pytest.mark.parametrize("module", DISCRETE, ids=name)
def test_only_legal_actions_are_chosen_and_trained_on(module: ModuleType) -> None:
    state = module.build(build_config(module.Config, **SMALL), Bandit.spaces)
    obs = Bandit().reset(0)
    illegal = obs["action_mask"] == 0
    for explore in (False, True):
        action, extras, _ = module.act(state, obs, explore=explore)
        assert (action % 3 == 1).all() and extras["weights"][illegal].abs().sum() == 0
    weights = module.reanalyze(state, obs)["weights"]
    assert weights.shape == (4, 50) and weights[illegal].abs().sum() == 0


class Closing(gymnasium.Env[Any, Any]):
    """Three steps; nothing is allowed after the last. `Closing.taken` has the actions of all environments."""

    observation_space = gs.Dict({"x": gs.Box(0, 9, (1,), np.float32), "action_mask": gs.MultiBinary(3)})
    action_space = gs.Discrete(3)
    taken: ClassVar[list[int]] = []

    def _show(self) -> Any:
        mask = np.array([0, 1, 0], np.int8) if self._at < 3 else np.zeros(3, np.int8)
        return {"x": np.full(1, self._at, np.float32), "action_mask": mask}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._at = 0
        return self._show(), {}

    def step(self, action: Any) -> Any:
        self.taken.append(int(action))
        self._at += 1
        return self._show(), 1.0, self._at == 3, False, {}


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("module", DISCRETE, ids=name)
def test_a_final_observation_may_allow_nothing(module: ModuleType, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gymnasium.envs.registration.EnvSpec("ForesightClosing-v0", entry_point=Closing)
    monkeypatch.setitem(gymnasium.registry, "ForesightClosing-v0", spec)
    monkeypatch.setattr(Closing, "taken", [])
    fields = {**SMALL, "steps": 200, "learning_starts": 80, "train_every": 60, "reanalyze": 1.0}
    env = make("ForesightClosing-v0", num_envs=4, engine="gymnasium", autoreset=mode)
    *_, (step, metrics, state) = module.train(build_config(module.Config, **fields), env)
    assert step >= 200 and state.updates > 0 and set(Closing.taken) == {1}
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("module", DISCRETE, ids=name)
def test_invalid_configs_and_spaces_are_refused(module: ModuleType) -> None:
    env = make("Pendulum-v1", num_envs=2)
    with pytest.raises(UserError, match=r"discrete actions, .*\. Use sampled_muzero\."):
        module.build(module.Config(), env.spaces)
    with pytest.raises(UserError, match=r"discrete actions, .*\. Use ppo\."):
        module.build(module.Config(), env.spaces._replace(action=gs.MultiDiscrete([2, 3])))
    with pytest.raises(UserError, match=r"discrete actions or a bounded 1-D Box, .*\. Use ppo\."):
        spaces = env.spaces._replace(action=gs.Box(-np.inf, np.inf, (2,)))
        sampled_muzero.build(sampled_muzero.Config(), spaces)
    cart = make("CartPole-v1", num_envs=2)
    for wrong, message in [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"learning_starts": 3}, "learning_starts is 3"),
        ({"reanalyze": 2.0}, "reanalyze must be between 0 and 1, not 2"),
    ]:
        with pytest.raises(UserError, match=message):
            module.build(build_config(module.Config, **wrong), cart.spaces)
    if module is not gumbel_muzero:
        with pytest.raises(UserError, match="temperatures has 4 numbers, and training uses up to three"):
            module.build(build_config(module.Config, temperatures=(1.0, 0.75, 0.5, 0.25)), cart.spaces)
    with pytest.raises(UserError, match="sample_temperature must be above 0"):
        sampled_muzero.build(sampled_muzero.Config(sample_temperature=0.0), env.spaces)
    for openings, spaces, most in ((1, cart.spaces, 0), (9, games.make("tic_tac_toe"), 8)):
        with pytest.raises(UserError, match=rf"openings is {openings}: .* \(here at most {most}\)"):
            gumbel_muzero.build(gumbel_muzero.Config(openings=openings, gamma=1.0), spaces)
    for forked, spaces in ((0.5, cart.spaces), (1.5, games.make("tic_tac_toe")), (-0.1, games.make("tic_tac_toe"))):
        with pytest.raises(UserError, match=rf"forked is {forked}: .* between 0 and 1"):
            gumbel_muzero.build(gumbel_muzero.Config(forked=forked, gamma=1.0), spaces)
    for one, option in ((muzero, "symmetries"), (gumbel_muzero, "symmetries"), (muzero, "known_bounds")):
        with pytest.raises(UserError, match=f"{option} is set, but it is an option of two-player games"):
            one.build(one.Config(**{option: True}), cart.spaces)
    with pytest.raises(UserError, match="num_envs is 8"):
        next(module.train(module.Config(), cart))


@pytest.mark.parametrize("module", [muzero, gumbel_muzero])
def test_symmetries_reach_the_gradient_steps(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch that is trained on is under symmetries, or none is."""
    seen: list[int] = []
    symmetric = selfplay.symmetric
    monkeypatch.setattr(selfplay, "symmetric", lambda *given: seen.append(1) or symmetric(*given))
    for wanted in (False, True):
        config = build_config(module.Config, **{**SMALL, "gamma": 1.0, "steps": 200, "symmetries": wanted})
        *_, (_, _, state) = module.train(config, games.make("tic_tac_toe"))
        assert state.updates > 0 and len(seen) == (state.updates if wanted else 0)

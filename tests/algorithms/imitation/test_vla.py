"""The VLA as a program: trained on words and images, resumed, exported, and fine-tuned by PPO."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from foresight.algorithms.imitation import vla
from foresight.algorithms.policy import ppo
from foresight.data import embodiments
from foresight.data.episodes import Episodes
from foresight.envs.base import Env
from foresight.envs.control import multi_task
from foresight.errors import UserError
from foresight.nets.sequence.vla_actor_critic import VLAActorCritic
from foresight.training import offline
from tests.algorithms.imitation.scenes import FIELDS, MISSIONS, SPACES, Pointing, Touching, demonstrations, scene
from tests.algorithms.small_runs import last
from tests.algorithms.states import forgets, restored, stopped_and_whole, weights
from tests.sabotage import change, flip_sign, sabotaged_by

ENVS = {"Pointing": Pointing, "Touching": Touching}
CONFIG = vla.Config(steps=60, data=("d",), batch_size=16, learning_rate=1e-2, lr_warmup=5, **FIELDS)
PPO = ppo.Config(
    steps=64, num_envs=8, rollout_steps=4, epochs=1, minibatches=2, learning_rate=3e-3, anneal_lr=False, gamma=0.9
)


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demonstrations as the data."""
    monkeypatch.setattr(offline, "read", lambda *_: demonstrations())


def accuracy(state) -> float:
    """The share of right actions on new scenes."""
    obs, right = scene(torch.Generator().manual_seed(9), 200)
    return (vla.act(state, obs)[0] == right).float().mean().item()


@sabotaged_by("tests.algorithms.states.restored", *[forgets(name) for name in ("policy", "optimizer", "sampler")])
def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    before = torch.random.get_rng_state()
    stopped, whole = stopped_and_whole(vla, CONFIG, Pointing)
    resumed = last(vla, CONFIG, Pointing(), restored(vla, stopped, Pointing()))
    assert stopped.step == 50 and resumed.step == 60 and torch.equal(weights(resumed), weights(whole))
    assert torch.equal(resumed.policy.words.known, whole.policy.words.known) and whole.policy.words.known.sum() == 4
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("images", "rate"), [("convs", 1e-2), ("vit", 2e-3)])
@sabotaged_by("foresight.nets.sequence.action_tokens.Tokens.loss", flip_sign)
def test_it_learns_what_neither_the_image_nor_the_words_tell_alone(
    images: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vla, "REPORT", 20)
    config = dataclasses.replace(CONFIG, steps=200, sample=False, images=images, learning_rate=rate)
    for _, metrics, state in vla.train(config, Pointing()):
        assert metrics["loss"] > 0  # as of any probabilities
        if accuracy(state) > 0.95:  # on 200 new scenes, where luck does not reach that
            return
    raise AssertionError(f"{accuracy(state)} of the actions are right")


def _sums(seen: dict[str, torch.Tensor], action: torch.Tensor) -> torch.Tensor:
    """Points of the image: the side that is bright and the words each move them by a quarter."""
    away = (seen["mission"] == MISSIONS[1]).all(-1).long()
    return torch.stack([(1 + away + (action ^ away)) / 4, torch.full(action.shape, 0.5)], 1)


@sabotaged_by("foresight.nets.sequence.action_tokens.Flow.loss", flip_sign)
def test_a_flow_learns_points_that_image_and_words_tell_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = demonstrations()
    monkeypatch.setattr(offline, "read", lambda *_: dataclasses.replace(seen, action=_sums(seen.obs, seen.action)))
    monkeypatch.setattr(vla, "REPORT", 10)
    config = dataclasses.replace(CONFIG, steps=80, batch_size=64, head="flow")
    for _, metrics, state in vla.train(config, Touching(8)):  # noqa: B007
        assert metrics["loss"] > 0  # as of any squares
    obs, right = scene(torch.Generator().manual_seed(9), 200)
    drawn, mode = (vla.act(dataclasses.replace(state, config=dataclasses.replace(config, sample=x)), obs)[0]
                   for x in (True, False))  # fmt: skip
    assert set(metrics) == {"loss"} and not torch.equal(drawn, mode)
    for action in (drawn, mode):
        x, y = (action - _sums(obs, right)).abs().unbind(1)
        assert (x < 0.125).float().mean() > 0.9 and y.mean() < 0.15


def _of_both(count: int) -> tuple[Env, Episodes]:
    """Pointing by a choice and by a point of the picture, and demonstrations of both."""
    env = multi_task.make("Pointing,Touching", lambda name, num_envs: ENVS[name](num_envs), count, embodiments=True)
    seen, found = demonstrations(), []
    side = torch.stack([0.25 + 0.5 * seen.action, torch.full((len(seen.action),), 0.5)], 1)
    for i, (part, action) in enumerate(zip(env.spaces.embodiments, (seen.action, side), strict=True)):
        found.append(embodiments.pad(dataclasses.replace(seen, action=action), i, part, *env.spaces[:2]))
    return env, embodiments.join(found, env.spaces.embodiments)


@sabotaged_by("foresight.nets.sequence.action_tokens.SharedTokens.of", change("which", torch.zeros_like))
def test_one_policy_learns_two_embodiments(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a choice of three and by two numbers; `share` keeps as much of each."""
    env, found = _of_both(100)
    monkeypatch.setattr(offline, "read", lambda *_: found)
    config = dataclasses.replace(CONFIG, steps=120, sample=False, share=0.75)
    state = last(vla, config, env)
    which = state.episodes.obs["embodiment"][state.episodes.first]
    assert which.bincount().tolist() == [192, 192]
    reward = env.step(vla.act(state, env.reset(9))[0]).reward
    assert reward[:50].mean() > 0.85 and reward[50:].mean() > 0.85
    torch.testing.assert_close(state.policy.actions.low, torch.tensor([[-1.0, -1], [-0.5, -1]]))


def test_reward_trains_one_of_two_embodiments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env, found = _of_both(8)
    one = multi_task.make("Pointing,Touching", lambda name, num_envs: ENVS[name](num_envs), 4, True, "Touching")
    monkeypatch.setattr(offline, "read", lambda *_: found)
    vla.export(last(vla, dataclasses.replace(CONFIG, steps=2), env), tmp_path / "export")
    config = dataclasses.replace(PPO, policy=str(tmp_path), num_envs=4, steps=16)
    *_, (step, metrics, _) = ppo.train(config, one)
    assert step == 16 and abs(metrics["approx_kl"]) < 1


@pytest.mark.parametrize("blind", ["language", "image"])
def test_a_blind_policy_guesses(blind: str) -> None:
    config = dataclasses.replace(CONFIG, blind=blind, sample=False)
    assert 0.35 < accuracy(last(vla, config, Pointing())) < 0.65  # one of two actions: the third is never shown


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy after a few updates, exported."""
    folder = tmp_path_factory.mktemp("weak")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "read", lambda *_: demonstrations())
        state = last(vla, dataclasses.replace(CONFIG, steps=20), Pointing())
    vla.export(state, folder / "export")
    return str(folder)


@sabotaged_by("foresight.ops.policy.clipped_surrogate", flip_sign)
def test_ppo_begins_with_the_policy_and_improves_it_by_reward(weak: str) -> None:
    fields = {"steps": 4_096, "num_envs": 32, "critic_warmup": 2, "learning_rate": 5e-3, "entropy_coef": 0.2}
    config = dataclasses.replace(PPO, policy=weak, **fields)  # without entropy half of the seeds stay at one answer
    *_, (_, _, state) = ppo.train(config, Pointing(config.num_envs))
    begin = ppo.build(config, SPACES)
    obs, right = scene(torch.Generator().manual_seed(9), 400)
    before, after = ((ppo.act(s, obs)[0] == right).float().mean().item() for s in (begin, state))
    assert before < 0.9 and after > max(0.9, before + 0.05)


def _all_parameters(original):
    return lambda network, backward: backward()


@sabotaged_by("foresight.algorithms.policy.ppo._value_head_only", _all_parameters)
@sabotaged_by("foresight.ops.policy.ratio", lambda f: lambda new, old: f(new, old) * 1.5)
def test_first_updates_change_the_value_head_only(weak: str) -> None:
    for ratio in ppo.RATIOS:
        config = dataclasses.replace(PPO, policy=weak, critic_warmup=1, ratio=ratio)
        begin = {name: x.clone() for name, x in ppo.build(config, SPACES).network.named_parameters()}
        steps = []
        for _, metrics, state in ppo.train(config, Pointing()):
            moved = {name for name, x in state.network.named_parameters() if not torch.equal(x, begin[name])}
            steps.append((metrics, moved))
        (metrics, first), (_, second) = steps
        assert first and all(name.startswith("value_head") for name in first)
        assert any(name.startswith("vla.blocks") for name in second)
        assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6) and metrics["clip_fraction"] == 0


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("read", "log-probabilities of acting differ"),
        ("act", "log-probabilities of the actions of evaluation differ"),
    ],
)
def test_ppo_checks_its_paths_before_step_1(
    weak: str, monkeypatch: pytest.MonkeyPatch, broken: str, message: str
) -> None:
    config = dataclasses.replace(PPO, policy=weak)
    read, act = VLAActorCritic.read, ppo.act
    if broken == "read":  # it is trained on no picture
        dark = lambda obs: {**obs, "image": 0 * obs["image"]}  # noqa: E731
        monkeypatch.setattr(VLAActorCritic, "read", lambda self, obs, *rest: read(self, dark(obs), *rest))
    else:  # it is evaluated by other actions
        monkeypatch.setattr(ppo, "act", lambda state, obs, *rest: (2 - act(state, obs)[0], {}, None))
    with pytest.raises(UserError, match=message):
        next(ppo.train(config, Pointing()))


def test_mistakes_are_named(weak: str, tmp_path: Path) -> None:
    for changed, message in (
        ({"policy": weak, "memory": "gru"}, "A VLA has no memory"),
        ({"policy": weak, "backbone": "separate"}, "A VLA has no backbone"),
        ({"policy": weak, "ratio": "sequence"}, "Unknown ratio 'sequence'"),
        ({"critic_warmup": 3}, "are for a VLA: add --policy RUN"),
        ({"policy": str(tmp_path / "none")}, "There is no trained VLA"),
    ):
        with pytest.raises(UserError, match=message):
            ppo.build(dataclasses.replace(PPO, **changed), SPACES)
    for changed, message in (
        ({"words": 0}, "words must be at least 1"),
        ({"edges": 1}, "edges must be at least 2"),
        ({"share": 0.0}, "share must be more than 0 and at most 1, not 0.0"),
        ({"share": 2.0}, "share must be more than 0 and at most 1, not 2.0"),
        ({"dim": 10, "heads": 4}, "dim must be a multiple of heads, 4, not 10"),
        (
            {"images": "vit", "channels": 6, "heads": 4},
            "channels must be a multiple of heads, 4, not 6, with images vit",
        ),
        ({"label_smoothing": 1.0}, "a share from 0 to below 1, not 1.0"),
        ({"label_smoothing": 0.1, "head": "flow"}, "label_smoothing is for action tokens"),
    ):
        with pytest.raises(UserError, match=message):
            vla.build(dataclasses.replace(CONFIG, **changed), SPACES)

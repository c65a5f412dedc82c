"""The bundled agents: small, complete, and better than random."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random

import pytest
from PIL import Image

import foresight
from foresight.cli.main import main
from foresight.planning.games import opponents
from foresight.runtime import catalog, run
from foresight.runtime.evaluation import match, players, record


def test_the_connect_four_agent_plays() -> None:
    player, game = players.player("connect_four", None, simulations=32)
    result = match.play(game, player, opponents.make("random", game, 3), 40, seed=3)
    assert result.score > 0.9


def test_play_shows_a_bundled_agent_by_its_name(tmp_path, monkeypatch, capsys) -> None:
    """In a folder without runs; three frames are enough here."""
    pytest.importorskip("Box2D")
    monkeypatch.chdir(tmp_path)
    shown, episode = [], record.episode

    def short(module, state, env, seed):
        shown.append((module.__name__.rpartition(".")[2], env.name, state.step))
        return itertools.islice(episode(module, state, env, seed), 3)

    monkeypatch.setattr(record, "episode", short)
    assert main(["play", "ppo/LunarLander-v3", "--gif", "landing.gif"]) == 0
    assert shown == [("ppo", "LunarLander-v3", 1_015_808)]
    assert capsys.readouterr().out == "3 frames in landing.gif\n"
    with Image.open("landing.gif") as image:
        assert image.n_frames == 3


def test_bundled_agents_are_small_and_have_cards(tmp_path, monkeypatch) -> None:
    for name in catalog.bundled():
        folder = run.find(name)
        assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 1_000_000
        card = (folder / "README.md").read_text(encoding="utf-8")
        kind = "text-generation" if name.startswith("pretrain/") else "reinforcement-learning"
        assert f'foresight.load("{name}")' in card and f"\npipeline_tag: {kind}\n" in card
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ppo" / "LunarLander-v3" / "media").mkdir(parents=True)  # no run: the name keeps its meaning
    assert run.find("ppo/LunarLander-v3") == catalog.BUNDLED / "ppo" / "LunarLander-v3"


# Episodes, and the least mean of their scores: each is far above what a random policy has.
LEAST = {
    "ppo/LunarLander-v3": (4, 100),  # random: about -180
    "q_learning/Taxi-v4": (1, 6),  # the value of the best policy is 6.33
    "value_iteration/FrozenLake-v1": (1, 0.54),  # the value of the best policy is 0.542026
    "muzero/CartPole-v1": (1, 300),  # random: about 22
    "rainbow/CartPole-v1": (1, 300),
    "decision_transformer/CartPole-v1": (1, 300),
    "tdmpc2/Pendulum-v1": (1, -500),  # random: about -1,200
    "act/TwoRoutes-v0": (10, 0.5),  # untrained: about -0.1
}


def test_every_bundled_agent_is_tested() -> None:
    assert set(catalog.bundled()) == {*LEAST, "connect_four", "pretrain/chains-sums"}


def test_the_language_model_adds_step_by_step() -> None:
    draw = random.Random(0)
    questions = [[draw.randrange(20) for _ in range(5)] for _ in range(20)]
    with contextlib.closing(foresight.load("pretrain/chains-sums", device="cpu")) as agent:
        right = [agent.act("+".join(map(str, one)) + ":").endswith(f"#{sum(one)}") for one in questions]
    assert sum(right) >= 15


@pytest.mark.parametrize("name", LEAST)
def test_a_bundled_agent_is_good(name: str) -> None:
    if "Lander" in name:
        pytest.importorskip("Box2D")
    episodes, least = LEAST[name]
    agent = foresight.load(name, device="cpu")
    if "muzero" in name:  # a quick test
        agent.state.config = dataclasses.replace(agent.config, simulations=3)
    assert agent.evaluate(episodes=episodes, seed=7).mean > least
    agent.close()

"""`foresight data episodes`: what is recorded is what the environment did, and other readers can open it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import gymnasium
import minari
import numpy as np
import pyarrow.dataset
import pyarrow.parquet
import pytest
import torch

from foresight.cli.main import main
from foresight.data import episodes
from foresight.envs.make import make
from foresight.runtime import episodes as recording
from foresight.runtime import run as runs
from foresight.training import offline
from tests.sabotage import sabotaged_by

TINY = {
    "ppo": {"env": "CartPole-v1", "steps": 32, "num_envs": 2, "rollout_steps": 16},
    "dqn": {"env": "CartPole-v1", "steps": 64, "learning_starts": 32, "hidden": (8,)},
    "sac": {"env": "Pendulum-v1", "steps": 24, "learning_starts": 16, "batch_size": 8, "hidden": (8,)},
}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of PPO, or of another algorithm."""
    name = getattr(request, "param", "ppo")
    path = tmp_path_factory.mktemp("runs") / name
    runs.train(name, out=path, show=False, **{"evaluation_episodes": 1, **TINY[name]})
    return path


def _all_but_one(original):
    """The last episode is not written."""
    return lambda found, *rest: original(found.pick(torch.arange(len(found) - 1)), *rest)


@pytest.mark.parametrize("trained", ["sac"], indirect=True)
@sabotaged_by("foresight.cli.data._write", _all_but_one)
def test_episodes_of_sac_replay_in_gymnasium(trained: Path, tmp_path: Path) -> None:
    out, env = tmp_path / "mixture", gymnasium.make("Pendulum-v1")
    assert main(["data", "episodes", str(trained), "--episodes", "1", "--random", "1", "--out", str(out)]) == 0
    found = episodes.read(out, env.observation_space, env.action_space)
    assert found.length.tolist() == [200, 200] and not found.terminated.any()
    env.reset(seed=0)
    for i in range(2):
        rows = slice(int(found.first[i]), int(found.first[i]) + 201)
        (cosine, sine, speed), reward = found.obs[rows][0].double().numpy(), []
        env.unwrapped.state = np.array([np.arctan2(sine, cosine), speed])
        for action in found.action[rows][:20].numpy():
            obs, one, *_ = env.unwrapped.step(action)
            reward.append(one)
        np.testing.assert_allclose(found.obs[rows][20], obs, atol=1e-3)
        np.testing.assert_allclose(found.reward[rows][:20], reward, atol=1e-3)


@pytest.mark.parametrize(
    ("trained", "option"),
    [
        ("ppo", "--episodes 0 --random 5"),
        ("ppo", "--episodes 3 --random 2 --explore"),
        ("dqn", "--episodes 3 --random 2"),
    ],
    indirect=["trained"],
)
@sabotaged_by("foresight.cli.data._write", _all_but_one)
def test_episodes_replay_in_gymnasium_and_open_as_parquet(trained: Path, tmp_path: Path, option: str) -> None:
    out = tmp_path / "mixture"
    assert main(["data", "episodes", str(trained), *option.split(), "--out", str(out)]) == 0
    env = gymnasium.make("CartPole-v1")
    found = episodes.read(out, env.observation_space, env.action_space)
    assert len(found) == 5 and torch.equal(found.returns, found.length.float()) and found.terminated.all()
    assert len(found.obs) == int(found.length.sum()) + 5
    env.reset(seed=0)
    for i in range(5):
        rows = slice(int(found.first[i]), int(found.first[i] + found.length[i]))
        env.unwrapped.state = found.obs[rows][0].double().numpy()
        env.unwrapped.steps_beyond_terminated = None
        for t, action in enumerate(found.action[rows].tolist()):
            obs, _, over, _, _ = env.step(action)
            np.testing.assert_allclose(found.obs[rows.start + t + 1], obs, atol=1e-4)
        assert over  # only the last action ends it
    # As Minari's storage reads an episode, and as any parquet reader does.
    metadata = json.loads((out / "data" / "metadata.json").read_text())
    assert metadata["data_format"] == "parquet" and metadata["total_steps"] == int(found.length.sum())
    ignored = ["_", ".", "metadata.json"]
    one = pyarrow.dataset.dataset(f"{out}/data/0", format="parquet", ignore_prefixes=ignored).to_table()
    assert np.stack(one["observations"].to_numpy()).shape == (int(found.length[0]) + 1, 4)
    assert np.asarray(one["terminations"])[:-1].tolist() == [False] * (int(found.length[0]) - 1) + [True]
    opened = minari.MinariDataset(out / "data")
    assert opened.total_episodes == 5 and opened.total_steps == metadata["total_steps"]
    assert opened.spec.action_space == env.action_space and opened.spec.env_spec.id == "CartPole-v1"
    for i, episode in enumerate(opened.iterate_episodes()):
        chosen = found.pick(torch.tensor([i]))
        np.testing.assert_allclose(episode.observations, chosen.obs)
        np.testing.assert_array_equal(episode.actions, chosen.action[:-1])
        assert len(episode.rewards) == len(episode.terminations) == int(chosen.length) and episode.terminations[-1]
    plain = pyarrow.parquet.read_table(out / "data" / "1" / "part-0.parquet")
    assert plain["rewards"].to_pylist() == [1.0] * int(found.length[1]) + [0.0]


def test_episodes_are_recorded_on_the_device_of_the_network(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, recorded = runs.load(trained, device="cpu"), Mock()
    # As in imitation: the first generator samples data, on the CPU.
    agent.state = SimpleNamespace(sampler=torch.Generator(), policy=torch.nn.Linear(1, 1, device="meta"))
    monkeypatch.setattr("foresight.runtime.episodes.collect.record", recorded)
    try:
        recording.record(agent, 1)
    finally:
        agent.close()
    assert torch.device("meta") in recorded.call_args.args


def test_mistakes_are_named(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, message in (
        (["episodes", "--out", str(tmp_path / "a")], "No run given"),
        (["episodes", str(trained), "--out", str(tmp_path)], "already exists"),
        (["episodes", str(trained), "--episodes", "0", "--out", str(tmp_path / "a")], "must be at least 1"),
        (["preferences", "--out", str(tmp_path / "a")], "needs a task and no run"),
    ):
        assert main(["data", *given]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


@sabotaged_by("foresight.cli.data._write", _all_but_one)
@pytest.mark.parametrize("form", ["minari", "lerobot"])
def test_experts_of_environments_are_recorded(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, env = tmp_path / form, make("TwoRoutes-v0", num_envs=1)
    given = ["data", "episodes", "--env", "TwoRoutes-v0", "--episodes", "5", "--out", str(out), "--format", form]
    assert main(given) == 0 and "5 episodes" in capsys.readouterr().out
    found = offline.read([str(out)], env.spaces.obs, env.spaces.action)
    assert len(found) == 5 and found.returns.tolist() == [1] * 5 and found.terminated.all()
    for extra, message in (
        (["--env", "CartPole-v1"], "has no expert of its own"),
        (["x", *given[2:4]], "--env is too"),
    ):
        assert main(["data", "episodes", *extra, "--episodes", "5", "--out", str(tmp_path / "a")]) == 2
        assert message in " ".join(capsys.readouterr().err.split())

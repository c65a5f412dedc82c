"""Sharing a run: a folder plays the hub."""

from __future__ import annotations

import dataclasses
import fnmatch
import shutil
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, errors, metadata_load

import foresight
from foresight.algorithms.policy import ppg
from foresight.algorithms.search import alphago
from foresight.algorithms.sequence import decision_transformer
from foresight.algorithms.sequence.upside_down_rl import command
from foresight.algorithms.value import dqn
from foresight.cli import runs
from foresight.cli.main import main
from foresight.errors import UserError
from foresight.runtime import catalog, hub, run
from foresight.runtime.export import share
from tests.sabotage import sabotaged_by

SMALL = dqn.Config(steps=256, num_envs=2, hidden=(8,), learning_starts=32, seed=3)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that plays the hub: a repository is a folder in it."""
    folder = tmp_path / "hub"

    def create(self: object, name: str, exist_ok: bool) -> str:
        (folder / name).mkdir(parents=True, exist_ok=exist_ok)
        return f"https://hub.example/{name}"

    def upload(self: object, repo_id: str, folder_path: Path, commit_message: str, delete_patterns: list[str]) -> None:
        for file in sorted((folder / repo_id).rglob("*"), reverse=True):
            name = file.relative_to(folder / repo_id).as_posix()
            if file.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in delete_patterns):
                file.unlink()
            elif file.is_dir() and not any(file.iterdir()):  # which a repository does not have
                file.rmdir()
        shutil.copytree(folder_path, folder / repo_id, dirs_exist_ok=True)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: str(folder / name))
    return folder


def test_a_run_whose_policy_no_file_can_hold_is_pushed_without_one(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.train("value_iteration", env="FrozenLake-v1", out=tmp_path / "run", show=False).path
    assert runs.export(str(path), push="ada/lake") == 0
    assert "Without a file of the policy" in capsys.readouterr().out
    mine, theirs = foresight.load(path), foresight.load("hub:ada/lake")
    assert [theirs.act(obs) for obs in range(16)] == [mine.act(obs) for obs in range(16)]
    with pytest.raises(UserError, match="cannot be exported"):
        runs.export(str(path))


def test_a_second_push_takes_the_place_of_the_first(store: Path, tmp_path: Path) -> None:
    """Also where the first had more steps and a file of the policy."""
    (tmp_path / "policy.pt").write_bytes(b"exported")
    for steps, file in ((512, tmp_path / "policy.pt"), (256, None)):
        config = dataclasses.replace(SMALL, steps=steps)
        out = tmp_path / str(steps)
        path = run.train("dqn", env="CartPole-v1", out=out, show=False, evaluation_episodes=2, config=config).path
        share(path, "ada/cart", file)
        (store / "ada/cart/LICENSE").write_text("mine")
    theirs = foresight.load("hub:ada/cart")
    torch.testing.assert_close(theirs.state.network.state_dict(), foresight.load(path).state.network.state_dict())
    assert theirs.step == 256 and not (store / "ada/cart/policy.pt").exists()
    assert (store / "ada/cart/LICENSE").read_text() == "mine"


def _untrained(original):
    return lambda path, state, device="cpu", fields=None: {"step": 256}


@sabotaged_by("foresight.runtime.checkpoints.checkpoint.restore", _untrained)
def test_a_pushed_run_acts_alike(store: Path, tmp_path: Path) -> None:
    path = run.train(
        "dqn", env="CartPole-v1", out=tmp_path / "run", show=False, evaluation_episodes=2, config=SMALL
    ).path
    (tmp_path / "policy.pt").write_bytes(b"exported")
    assert share(path, "ada/cart", tmp_path / "policy.pt") == "https://hub.example/ada/cart"
    mine, theirs = foresight.load(path), foresight.load("hub:ada/cart")
    obs = torch.randn(50, 4)
    expected = mine.state.network(obs).mean()
    torch.testing.assert_close(theirs.state.network(obs).mean(), expected)
    assert expected.abs().max() > 0.01
    assert len(mine.state.replay) > 200 and len(theirs.state.replay) == 0  # only what acting needs
    assert not [*(store / "ada/cart").rglob("target.safetensors")]  # the target network is stored as the network
    torch.testing.assert_close(theirs.state.target(obs).mean(), expected)
    assert sum(x.stat().st_size for x in (store / "ada/cart").rglob("*") if x.is_file()) < 100_000
    assert (store / "ada/cart/policy.pt").is_file() and str(tmp_path) not in (
        store / "ada/cart/config.yaml"
    ).read_text()
    card = ModelCard.load(store / "ada/cart/README.md")
    assert 'foresight.load("hub:ada/cart")' in card.text
    facts = metadata_load(store / "ada/cart/README.md")
    (index,) = facts["model-index"]
    assert facts["library_name"] == "foresight"
    assert index["results"][0]["metrics"][0]["value"] == mine.evaluate().mean
    with pytest.raises(UserError, match="not part of foresight"):  # code of others is not run
        (store / "ada/cart/config.yaml").write_text("algorithm: evil.py\n")
        foresight.load("hub:ada/cart")
    (store / "ada/cart/inputs").mkdir()
    (store / "ada/cart/inputs/evil.py").write_text("raise SystemExit('code of others')\n")
    own = yaml.safe_load((path / "config.yaml").read_text())
    for part in ({"kind": "text"}, {"paths": {"evil.py:Env": "/nowhere/evil.py:Env"}}, {"algorithm": "grpo"}):
        (store / "ada/cart/config.yaml").write_text(yaml.safe_dump({**own, "env": "evil.py:Env", **part}))
        with pytest.raises(UserError, match="may hold code"):
            foresight.load("hub:ada/cart")
    (store / "ada/cart/config.yaml").unlink()
    with pytest.raises(UserError, match="--model ada/cart"):
        foresight.load("hub:ada/cart")


@sabotaged_by("foresight.runtime.checkpoints.checkpoint.restore", _untrained)
def test_recorded_episodes_stay_behind(store: Path, tmp_path: Path) -> None:
    data = tmp_path / "episodes"
    assert main(["data", "episodes", "--env", "TwoRoutes-v0", "--episodes", "3", "--out", str(data)]) == 0
    config = decision_transformer.Config(data=(str(data),), steps=2, dim=8, layers=1, context=4)
    path = run.train(
        "decision_transformer",
        env="TwoRoutes-v0",
        out=tmp_path / "run",
        show=False,
        evaluation_episodes=1,
        config=config,
    ).path
    mine = foresight.load(path)
    assert share(path, "ada/routes", None) == "https://hub.example/ada/routes"
    shutil.rmtree(data)
    shutil.rmtree(path)
    theirs = foresight.load("hub:ada/routes")
    assert "paths" not in yaml.safe_load((store / "ada/routes/config.yaml").read_text())
    obs = mine.env.reset(0)[0]
    assert (theirs.act(obs) == mine.act(obs)).all() and theirs.state.net.best == mine.state.net.best == 1
    assert theirs.evaluate().n == 1


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("online_decision_transformer", {"dim": 8, "layers": 1, "context": 4, "steps": 20, "pretrain_steps": 10}),
        ("upside_down_rl", {"hidden": (8,), "steps": 20, "gradient_steps": 1, "best_episodes": 2}),
    ],
)
def test_episodes_of_a_replay_stay_behind(name: str, fields: dict[str, Any], store: Path, tmp_path: Path) -> None:
    data = tmp_path / "episodes"
    assert main(["data", "episodes", "--env", "TwoRoutes-v0", "--episodes", "3", "--out", str(data)]) == 0
    path = run.train(
        name, env="TwoRoutes-v0", out=tmp_path / "run", show=False, evaluation_episodes=1, data=(str(data),),
        num_envs=2, **fields,
    ).path  # fmt: skip
    mine = foresight.load(path)
    share(path, "ada/routes", None)
    theirs, obs = foresight.load("hub:ada/routes"), mine.env.reset(0)[0]
    assert (theirs.act(obs) == mine.act(obs)).all() and mine.state.replay.obs.any()
    if name == "upside_down_rl":  # its commands are made of returns and lengths
        assert len(theirs.state.replay) == 2 < len(mine.state.replay)
        assert not theirs.state.replay.obs.any() and not theirs.state.replay.action.any()
        pairs = zip(command(mine.state, 1, False), command(theirs.state, 1, False), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    else:
        assert theirs.state.replay is None


def test_what_training_alone_needs_is_marked_in_the_state() -> None:
    for module, names in ((alphago, ("expert", "pool", "positions", "outcomes", "owners")), (ppg, ("remembered",))):
        fields = {field.name: field.metadata.get("share", True) for field in dataclasses.fields(module.State)}
        assert {name for name, shared in fields.items() if shared is False} == set(names)


def test_runs_that_others_cannot_load_are_not_pushed(store: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    shutil.copyfile(dqn.__file__, own)
    small = {"env": "CartPole-v1", "show": False, "evaluation_episodes": 1, "config": SMALL}
    path = run.train("dqn", out=tmp_path / "run", **small).path
    small["config"] = catalog.module(str(own)).Config(**dataclasses.asdict(SMALL))
    mine = run.train(str(own), out=tmp_path / "own", **small).path
    with pytest.raises(UserError, match=r"mine\.py, which is not part of foresight"):
        share(mine, "ada/mine", None)
    inside = Path(shutil.copytree(path, tmp_path / "inside"))
    text = (inside / "config.yaml").read_text()
    (inside / "config.yaml").write_text(text.replace("env: CartPole-v1", f"env: imagined:{path}", 1))
    with pytest.raises(UserError, match="inside the world model of another run"):
        share(inside, "ada/inside", None)
    assert not store.exists()
    (store / "ada/inside").mkdir(parents=True)
    shutil.copyfile(inside / "config.yaml", store / "ada/inside/config.yaml")
    with pytest.raises(UserError, match="inside the world model of another run"):
        hub.pull("ada/inside")


@pytest.mark.parametrize("old", [{"world": "text"}, {"places": {"evil.py:Env": "/nowhere/evil.py:Env"}}])
def test_old_names_of_a_run_with_code_are_refused_too(old: dict[str, object], store: Path) -> None:
    (store / "ada/cart").mkdir(parents=True)
    (store / "ada/cart/config.yaml").write_text(yaml.safe_dump({"algorithm": "dqn", "env": "evil.py:Env", **old}))
    with pytest.raises(UserError, match="may hold code"):
        hub.pull("ada/cart")


def _raises(error: Exception):
    def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


def _status(code: int) -> httpx2.Response:
    return httpx2.Response(code, request=httpx2.Request("GET", "https://hub.example"))


FAILURES = [
    (errors.OfflineModeIsEnabled("offline"), "cannot be reached"),
    (httpx2.ConnectError("no route"), "cannot be reached"),
    (errors.LocalEntryNotFoundError("not cached"), "cannot be reached"),
    (errors.LocalTokenNotFoundError("no token"), "hf auth login"),
    (errors.RepositoryNotFoundError("404", response=_status(404)), "no repository ada/cart"),
    (errors.HfHubHTTPError("401", response=_status(401)), "not logged in"),
    (errors.HfHubHTTPError("403", response=_status(403)), "may not write"),
    (errors.HfHubHTTPError("500", response=_status(500)), "refused"),
]


@pytest.mark.parametrize(("error", "message"), FAILURES)
def test_failures_of_the_hub_are_sentences(store: Path, tmp_path: Path, monkeypatch, error, message) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", _raises(error))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _raises(error))
    with pytest.raises(UserError, match=message):
        hub.push(tmp_path, "ada/cart")
    with pytest.raises(UserError, match=message):
        foresight.load("hub:ada/cart")


@pytest.mark.parametrize("name", ["cart", "ada/cart/x", "ada/", "a b/c"])
def test_a_wrong_name_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="OWNER/NAME"):
        hub.push(tmp_path, name)
    with pytest.raises(UserError, match="OWNER/NAME"):
        foresight.load(f"hub:{name}")

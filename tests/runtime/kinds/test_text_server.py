"""A run that samples through a server: it learns what it would have learned by itself, and outlives the server."""

from __future__ import annotations

import json

import pytest
import torch

from foresight.errors import UserError
from foresight.planning.generation import server
from foresight.runtime import run
from tests import tiny_language
from tests.openai_server import Stub, serve

FIELDS = {
    "prompts": 2, "group": 3, "max_new_tokens": 5, "steps": 6, "learning_rate": 1e-2, "precision": "float32",
}  # fmt: skip


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(server.Server.__init__, "__defaults__", (None, 2, 0.01, 60.0, lambda text: None))


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}?"}) for i in range(10)))
    (tmp_path / "rewards.py").write_text(
        "def a(completions, **k):\n    return [float(c.count('a')) for c in completions]\n"
    )
    return {"task": str(path), "env_options": {"reward": f"{tmp_path}/rewards.py:a"}}


def _train(rows, out, url, **options):
    fields = {**FIELDS, **options}
    return run.train("grpo", model=tiny_language.folder(), out=out, completer=url, show=False, **rows, **fields)


def _weights(path):
    return dict(run.load(path).state.policy.named_parameters())


def test_a_lost_server_ends_the_run_after_a_checkpoint_and_the_rest_is_the_same(rows, tmp_path):
    with serve(Stub(tiny_language.model())) as stub:
        whole = _train(rows, tmp_path / "whole", stub.url)
        stub.faults, stub.always = [None] * 7, "dead"  # after the baseline, in the middle of the third rollout
        with pytest.raises(server.ServerError, match=r"does not answer.*checkpoint at 2 updates is saved.*resume"):
            _train(rows, tmp_path / "cut", stub.url)
        assert not (tmp_path / "cut" / "served").exists()
        stub.always = None
        cut = run.resume(tmp_path / "cut", show=False)
    for (name, a), b in zip(_weights(whole.path).items(), _weights(cut.path).values(), strict=True):
        assert torch.equal(a, b), name


def test_the_password_of_a_server_is_in_no_file_and_a_resumed_run_asks_for_it(rows, tmp_path):
    with serve(Stub(tiny_language.model())) as stub:
        named, out = stub.url.replace("://", "://ann:secret@"), tmp_path / "run"
        _train(rows, out, named, steps=1)
        files = [file for file in out.rglob("*") if file.is_file()]
        assert len(files) > 5 and not [file for file in files if b"secret" in file.read_bytes()]
        assert f"completer: {stub.url}\n" in (out / "config.yaml").read_text()
        assert f"--completer {stub.url} " in run.Run(out).summary["command"]
        stub.always = 401
        with pytest.raises(UserError, match=r"a user and password.*give --completer http://USER:PASSWORD@HOST"):
            run.resume(out, 2, show=False)
        stub.always = None
        assert run.resume(out, 2, show=False, completer=named).summary["steps"] == 2
        assert "Authorization" in stub.headers[-1]


def test_a_server_is_only_for_language_runs(tmp_path):
    with pytest.raises(UserError, match="--completer is for text algorithms"):
        run.train("ppo", env="CartPole-v1", out=tmp_path / "run", completer="http://127.0.0.1:9", show=False)


def test_a_missing_server_is_reported_before_the_run_begins(rows, tmp_path):
    with pytest.raises(server.ServerError, match=r"The server at http://127.0.0.1:9 does not answer"):
        _train(rows, tmp_path / "run", "http://127.0.0.1:9")

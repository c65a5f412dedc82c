"""The Attention view: its numbers are those of `runtime.attention`, for a typed text and for a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

import foresight
from foresight.runtime import run
from foresight.runtime.attention import sources
from foresight.studio import app, attention, runs
from foresight.studio.runs import identity
from tests import tiny_language
from tests.sabotage import sabotaged_by

TEXT = "what is 2+3? what is"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "memory"
    options = {"memory": "transformer", "memory_layers": 2, "memory_window": 8, "rollout_steps": 16, "minibatches": 1}
    options |= {"num_envs": 2, "evaluation_episodes": 1, "show": False}
    foresight.train("ppo", env="RepeatFirst-v0", steps=32, out=folder, **options)
    return folder


@pytest.fixture(scope="module")
def client(trained: Path) -> TestClient:
    created = app.create([trained.parent], model=tiny_language.folder())
    return TestClient(created, base_url="http://127.0.0.1:8765")


def post(client: TestClient, path: str, **document: Any) -> Any:
    return client.post(f"/api/attention{path}", json=document).json()


@pytest.mark.parametrize("view", ["mean", "max", "rollout", "received", "2"])
@pytest.mark.parametrize("without_first", [False, True])
def test_weights_of_a_text_are_those_of_the_library(client: TestClient, view: str, without_first: bool) -> None:
    found = post(client, "", text=TEXT, view=view, without_first=without_first)
    maps = sources.of_text(tiny_language.model(), TEXT)
    assert found["tokens"] == list(maps.tokens) and found["heads"] == [4, 4]
    for layer, expected in zip(found["layers"], maps.view(view, without_first), strict=True):
        torch.testing.assert_close(
            torch.tensor(layer) / attention.UNITS, expected.flatten(), rtol=0, atol=0.51 / attention.UNITS
        )
    assert [name for name, _ in found["outputs"][3]] == [name for name, _ in maps.likeliest(maps.output[3])]


def test_effects_are_those_of_the_library(client: TestClient) -> None:
    maps = sources.of_text(tiny_language.model(), TEXT)
    cuts = ["1.2", "0:7,3"]
    found = post(client, "/change", text=TEXT, cuts=cuts, query=7)
    expected = maps.effect([maps.knock_out(cut) for cut in cuts], 7)
    assert found["change"] == pytest.approx(expected["change"]) and found["change"] > 1e-3
    assert found["loss_after"] == pytest.approx(expected["loss_after"])
    assert [name for name, _ in found["after"]] == [name for name, _ in expected["after"]]
    each = maps.each_head(-1)
    assert [post(client, "/heads", text=TEXT, layer=i) for i in range(2)] == [pytest.approx(row) for row in each]


def test_a_run_acts_and_its_memory_is_read(client: TestClient, trained: Path) -> None:
    readers = client.get("/api/readers").json()
    assert [one["text"] for one in readers] == [True, False]
    source = readers[1]["id"]
    assert source == identity(trained.resolve())
    found = post(client, "", source=source, steps=6, seed=1)
    maps = sources.of_run(run.load(trained), 6, 1)
    assert found["tokens"] == list(maps.tokens) and len(found["layers"]) == 2
    assert found["layers"][1] == (maps.view()[1] * attention.UNITS).round().int().flatten().tolist()
    cut = f"1:{found['queries'] - 1},0"
    changed = post(client, "/change", source=source, steps=6, seed=1, cuts=[cut])
    assert changed["change"] == pytest.approx(maps.effect([maps.knock_out(cut)])["change"]) and "before" not in changed


@pytest.mark.parametrize(
    ("path", "document", "words"),
    [
        ("", {"text": ""}, "0 tokens"),
        ("", {"text": "a" * 500}, "more than 160 tokens"),
        ("", {"text": TEXT, "view": "min"}, "Unknown view 'min'"),
        ("", {"source": "/etc/passwd", "text": TEXT}, "source"),
        ("", {"source": 3}, "Give source"),
        ("/change", {"text": TEXT, "cuts": ["9.0"]}, "no layer 9"),
        ("/change", {"text": TEXT, "cuts": "9.0"}, "list of at most"),
        ("/change", {"text": TEXT, "cuts": ["1"], "query": 99}, "no token 99"),
        ("/heads", {"text": TEXT, "layer": 7}, "no layer 7"),
        ("/heads", {"text": TEXT, "layer": "7"}, "whole number"),
    ],
)
def test_bad_requests_get_a_sentence(client: TestClient, path: str, document: dict, words: str) -> None:
    answer = client.post(f"/api/attention{path}", json=document)
    assert answer.status_code == 400 and words in answer.json()["error"]


@sabotaged_by("foresight.runtime.catalog.algorithms", lambda f: lambda: {})
def test_what_attends_is_listed() -> None:
    nothing = dict.fromkeys(runs.NETWORK)
    rows = [
        ("decision_transformer", {}, True),
        ("storm", {"sequence_model": "transformer"}, True),
        ("storm", {"sequence_model": "lstm"}, False),
        ("classifier", {"images": "vit"}, True),
        ("ppo", {"memory": "gru"}, False),
    ]
    table = [
        {"id": str(i), "name": str(i), "algorithm": name, "kind": "control", "env": "", "options": {**nothing, **given}}
        for i, (name, given, _) in enumerate(rows)
    ]
    library: Any = SimpleNamespace(table=lambda: table, saved=lambda run: True)
    found = {one["id"] for one in attention.Readers(library, "model").names()[1:]}
    assert found == {str(i) for i, (*_, attends) in enumerate(rows) if attends}

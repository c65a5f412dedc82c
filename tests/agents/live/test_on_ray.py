"""A trainer that reaches its store through a keeper; with Ray between them: tests/runtime/distributed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from foresight.agents.live import on_ray, train
from foresight.agents.live.settings import Config, Settings
from foresight.agents.live.store import Store
from foresight.errors import UserError
from foresight.runtime.distributed import ray_cluster
from tests.agents.live.test_train import begun, equal, feed, model, weights  # noqa: F401


def remote(store: Store, folder: Path) -> Store:
    folder.mkdir()
    keeper = on_ray.Keeper(str(store.folder))
    return cast(Store, on_ray.Remote(lambda method, *arguments: getattr(keeper, method)(*arguments), folder))


def test_it_equals_a_trainer_with_the_store_and_another_machine_continues_it(
    tmp_path: Path,
    model: str,  # noqa: F811
) -> None:
    found = []
    for near in (True, False):
        store, config = begun(tmp_path / str(near), model, lora=2)
        for machine in "ab":  # each without the files of the other
            trainer = train.Trainer(store if near else remote(store, tmp_path / machine), config)
            feed(store, trainer)
            assert trainer.step() is not None
        versions = store.versions()
        assert [version["parent"] for version in versions] == [-1, 0, 1] and store.counts()["trained"] == 6
        assert all(Path(version["folder"]).is_relative_to(store.folder) for version in versions[1:])
        found.append((weights(trainer), [version["metrics"] for version in versions]))
    assert equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.parametrize(("device", "passed", "gpus"), [("cuda:1", "cuda", 1), ("cuda", "cuda", 1), ("cpu", "cpu", 0)])
def test_a_loop_uses_the_gpu_that_ray_gives_it(
    device: str, passed: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray shows an actor its own GPU alone, so the number of the server's is none of its."""
    pytest.importorskip("ray")
    given: dict[str, Any] = {}

    class Called:
        def __init__(self, name: str) -> None:
            self.name = name

        def remote(self, *arguments: Any) -> Any:
            given[self.name] = arguments
            return "there"

    def remote(**options: Any) -> Any:
        actor = SimpleNamespace(place=Called("place"), run=Called("run"))
        given.setdefault("gpus", []).append(options.get("num_gpus"))
        return lambda kind: SimpleNamespace(remote=lambda *arguments: actor)

    context = SimpleNamespace(get_node_id=lambda: "0" * 56)
    ray = SimpleNamespace(
        remote=remote, get=lambda x: x, wait=lambda x, timeout: (x, []), get_runtime_context=lambda: context,
        exceptions=SimpleNamespace(RayError=ArithmeticError),
    )  # fmt: skip
    monkeypatch.setattr(ray_cluster, "connect", lambda count, address: (ray, False))
    on_ray.run("train", Store(tmp_path), Settings(ray="here", device=device), Config())
    assert given["run"][1] == Settings(ray="here", device=passed) and given["gpus"][-1] == gpus


def test_a_version_is_not_published_for_turns_that_were_trained_on(tmp_path: Path, model: str) -> None:  # noqa: F811
    store, config = begun(tmp_path, model)
    far = remote(store, tmp_path / "far")
    trainer = train.Trainer(far, config)
    feed(store, trainer)
    ids = [turn.id for turn in store.turns("scored")]
    trainer.step()
    with pytest.raises(UserError, match="is not waiting to be trained on"):
        far.publish(2, far.folder_of(1), {}, ids)
    assert store.active() == 1

"""A trainer that reaches its store through a keeper; with Ray between them: tests/runtime/distributed."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from foresight.agents.live import on_ray, train
from foresight.agents.live.store import Store
from foresight.errors import UserError
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

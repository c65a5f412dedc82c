"""Data of several embodiments: each folder is of the one whose spaces it has, and is padded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from foresight.data import embodiments
from foresight.data.embodiments import Embodiment
from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.runtime import episodes as recorder
from foresight.training import offline
from tests.algorithms.imitation.scenes import SPACES, Pointing, Touching, demonstrations
from tests.sabotage import change, sabotaged_by

PARTS = Embodiment("Pointing", *Pointing.spaces[:2]), Embodiment("Touching", *Touching.spaces[:2])
OBS, ACTION = embodiments.shared(PARTS)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    """Two choices, and three points."""
    chosen = demonstrations(2)
    pointed = demonstrations(3)
    pointed = dataclasses.replace(pointed, action=torch.arange(12.0).view(6, 2) / 12)
    for name, found, spaces in (("chosen", chosen, SPACES), ("pointed", pointed, Touching.spaces)):
        recorder.write(found, Spaces(*spaces[:2]), "X-v0", {}, "test", tmp_path / name)
    return str(tmp_path / "chosen"), str(tmp_path / "pointed")


@sabotaged_by("foresight.data.embodiments.pad", change("number", lambda number: 1 - number))
def test_each_folder_is_of_the_embodiment_that_it_fits(folders: tuple[str, str]) -> None:
    for data in (folders, folders[::-1]):
        found = offline.read(data, OBS, ACTION, PARTS)
        assert found.obs["embodiment"][found.first].tolist() == [0, 0, 1, 1, 1]
        acts = found.action[found.rows]
        right = demonstrations(2).action[[0, 2]]
        assert torch.equal(embodiments.own_action(acts[:2], PARTS[0].action), right) and not acts[:2, 1].any()
        torch.testing.assert_close(acts[2:], torch.tensor([[0, 1], [4, 5], [8, 9]]) / 6 - 1)


def test_what_does_not_fit_is_named(folders: tuple[str, str]) -> None:
    third = Embodiment("Third", PARTS[0].obs, PARTS[0].action.__class__(4))
    for data, parts, message in (
        (folders[:1], PARTS, "The data have no episode of 'Touching': add a folder of its episodes to --data"),
        (folders, (PARTS[0], third), "pointed is of none of the embodiments of this run. 'Pointing': The action_space"),
        (folders, (*PARTS, PARTS[0]._replace(name="Again")), "chosen fits several embodiments"),
        ((), PARTS, "No data given: .* foresight data episodes RUN .*, or, .* --env ENV"),
    ):
        with pytest.raises(UserError, match=message):
            offline.read(data, *embodiments.shared(parts), parts)

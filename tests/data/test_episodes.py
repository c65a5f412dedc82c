"""Windows, returns, the best episodes and statistics of episodes that can be counted by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pyarrow.parquet
import pytest
import torch
from minari.data_collector.episode_buffer import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage
from minari.serialization import deserialize_space, serialize_space

from foresight.data import episodes
from foresight.data.episodes import Episodes
from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.runtime import episodes as recorder
from foresight.training import offline
from tests.sabotage import sabotaged_by

# Two episodes, of 3 and 1 actions; an observation is 10 · episode + time.
DATA = Episodes(
    torch.tensor([10.0, 11, 12, 13, 20, 21]).view(-1, 1),
    torch.tensor([1, 0, 1, 0, 1, 0]),
    torch.tensor([1.0, 2, 4, 0, 9, 0]),
    torch.tensor([3, 1]),
    torch.tensor([False, True]),
)
OBS, ACTION = gs.Box(-1, 1, (1,), np.float32), gs.Discrete(2)


def _window_only(original):
    """Returns to go that end with the window."""

    def window(self, start, steps):
        w = original(self, start, steps)
        total = w.reward.sum(1, keepdim=True)
        return w._replace(to_go=(total - w.reward.cumsum(1) + w.reward) * w.mask)

    return window


@sabotaged_by("foresight.data.episodes._padded", lambda f: lambda values, real: values)
@sabotaged_by("foresight.data.episodes.Episodes.window", _window_only)
def test_windows_stay_in_their_episode_and_know_the_whole_return() -> None:
    w = DATA.window(torch.tensor([0, 1, 3]), 2)
    assert w.obs.squeeze(-1).tolist() == [[10, 11], [11, 12], [0, 20]]
    assert w.action.tolist() == [[1, 0], [0, 1], [0, 1]]
    assert w.to_go.tolist() == [[7, 6], [6, 4], [0, 9]]  # not cut at the window's end
    assert w.time.tolist() == [[0, 1], [1, 2], [0, 0]]
    assert w.mask.tolist() == [[1, 1], [1, 1], [0, 1]]
    longer = DATA.window(torch.tensor([0]), 5)  # than the episode
    assert longer.mask.tolist() == [[0, 0, 1, 1, 1]] and longer.time.tolist() == [[0, 0, 0, 1, 2]]


def test_windows_start_at_every_step_equally_often() -> None:
    w = DATA.windows(4_000, 1, torch.Generator().manual_seed(0))
    seen, counts = w.obs.flatten().unique(return_counts=True)
    assert seen.tolist() == [10, 11, 12, 20] and (counts - 1_000).abs().max() < 150


@sabotaged_by("foresight.data.episodes.Episodes.pick", lambda f: lambda self, which: self)
def test_the_best_episodes_have_the_share_of_steps() -> None:
    assert DATA.returns.tolist() == [7, 9]
    best = DATA.best(0.25)
    assert best.obs.flatten().tolist() == [20, 21] and best.returns.tolist() == [9] and bool(best.terminated)
    assert len(DATA.best(0.3)) == len(DATA.best(1)) == 2
    swapped = DATA.pick(torch.tensor([1, 0]))
    assert swapped.obs.flatten().tolist() == [20, 21, 10, 11, 12, 13]
    assert episodes.join([DATA, best]).returns.tolist() == [7, 9, 9]


def _plain(original):
    return lambda values: (values.mean(0), values.std(0, correction=0))


@sabotaged_by("foresight.data.episodes.statistics", _plain)
def test_constant_dimensions_are_not_divided_by_zero() -> None:
    mean, std = episodes.statistics(torch.tensor([[1.0, 0.1, 0], [3, 0.1, 0]]))
    assert mean.tolist() == pytest.approx([2, 0.1, 0]) and std.tolist() == [1, 1, 1]
    assert episodes.statistics(torch.tensor([[0.0], [4]]))[1].item() == 2
    assert episodes.statistics(torch.tensor([[1e-9], [0], [-1e-9]]))[1].item() == 1  # rounding
    assert episodes.statistics(torch.tensor([[1e-4], [-1e-4]]))[1].item() == pytest.approx(1e-4)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There are no episodes in .*: foresight data episodes RUN .* --env ENV"):
        episodes.read(tmp_path, OBS, ACTION)
    document = {"data_format": "hdf5", "total_episodes": 1, "action_space": episodes.describe(gs.Discrete(3))}
    for fields, message in (
        ({}, "in the format 'hdf5'"),
        ({"data_format": "parquet"}, "The action_space of"),
        ({"data_format": "parquet", "minari_version": "~=0.9.1"}, "of Minari '~=0.9.1', whose layout is not known"),
        ({"data_format": "parquet", "minari_version": None}, "name no version of Minari, whose layout is not known"),
        (
            {"data_format": "parquet", "action_space": episodes.describe(ACTION), "total_episodes": 0},
            "holds no episode",
        ),
        ({"data_format": "parquet", "action_space": episodes.describe(ACTION)}, "Cannot read the episode"),
    ):
        (tmp_path / "metadata.json").write_text(json.dumps({**document, **fields}))
        with pytest.raises(UserError, match=message):
            episodes.read(tmp_path, OBS, ACTION)
    for obs, action in ((gs.Dict({"x": gs.Text(3)}), ACTION), (gs.MultiBinary(2), ACTION), (OBS, gs.Text(3))):
        with pytest.raises(UserError, match="Episodes hold"):
            episodes.check_spaces(obs, action)


def _copy(action: gs.Space[Any], values: Any, folder: Path, **written: Any) -> Path:
    """`DATA` with these actions, in a folder whose metadata describe the action space by `written` too."""
    data = dataclasses.replace(DATA, action=torch.as_tensor(values))
    recorder.write(data, Spaces(OBS, action), "x", {}, "x", folder)
    file = folder / "data" / "metadata.json"
    document = json.loads(file.read_text())
    described = {key: x for key, x in (json.loads(document["action_space"]) | written).items() if x is not None}
    file.write_text(json.dumps({**document, "action_space": json.dumps(described)}))
    return folder


@sabotaged_by("foresight.data.episodes._moved", lambda f: lambda written, action: False)
def test_actions_within_other_bounds_are_refused(tmp_path: Path) -> None:
    own = gs.Box(np.float32([0, -3]), np.float32([10, -1]))
    folder = _copy(own, [[0.1, 0.2]] * 6, tmp_path / "a", low=[-1, -1], high=[1, 1])
    try:
        episodes.read(folder, OBS, own)
    except UserError as error:
        assert re.search(r"are from \[-1, -1\] to \[1, 1\], .* such as rescale_action=true", str(error))
    else:
        raise AssertionError("they mean other actions")
    assert len(episodes.read(folder, OBS, gs.Box(-np.inf, np.inf, (2,)))) == 2  # nothing to compare with
    for number, bounds in enumerate(
        ({"low": None}, {"low": [0.0000001, -3]}, {"low": [-np.inf] * 2, "high": [np.inf] * 2})
    ):
        assert len(episodes.read(_copy(own, [[0.1, -2]] * 6, tmp_path / str(number), **bounds), OBS, own)) == 2
    with pytest.raises(UserError, match="is not a complete data set"):
        episodes.read(_copy(own, [[0.1, -2]] * 6, tmp_path / "b", low=[1, 2, 3]), OBS, own)


@sabotaged_by("foresight.data.episodes._shift", lambda f: lambda written, action: 0 * f(written, action))
def test_choices_are_counted_from_the_first_of_the_environment(tmp_path: Path) -> None:
    """Minari writes them as the environment's space has them, and the library counts from 0."""
    one = [1, 3, 2, 0, 3, 0]
    minari = _copy(gs.Discrete(3), one, tmp_path / "a", start=1)
    assert episodes.read(minari, OBS, gs.Discrete(3)).action.tolist() == [0, 2, 1, 0, 2, 0]
    assert episodes.read(minari, OBS, gs.Discrete(3, start=1)).action.tolist() == one
    assert (
        episodes.read(_copy(gs.Discrete(3), one, tmp_path / "b", start=None), OBS, gs.Discrete(3)).action.tolist()
        == one
    )
    several = _copy(
        gs.MultiDiscrete([3, 2]), [[0, 1], [1, 2], [2, 1], [0, 0], [0, 2], [0, 0]], tmp_path / "c", start=[0, 1]
    )
    found = episodes.read(several, OBS, gs.MultiDiscrete([3, 2])).action
    assert found.tolist() == [[0, 0], [1, 1], [2, 0], [0, 0], [0, 1], [0, 0]]
    with pytest.raises(UserError, match="is not a complete data set"):
        episodes.read(_copy(gs.Discrete(3), one, tmp_path / "d", start=[1, 2]), OBS, gs.Discrete(3))


@pytest.mark.parametrize(
    ("field", "row", "value", "message"),
    [
        ("action", 4, 7, r"d, episode 1, row 0: the action is 7, which is not in Discrete\(2\)"),
        ("reward", 2, math.nan, "d, episode 0, row 2: the reward is nan, which is not finite"),
        ("obs", 5, math.inf, r"d, episode 1, row 1: the observation is \[inf\], which is not finite"),
    ],
)
def test_values_that_nothing_can_be_trained_on_are_named(field: str, row: int, value: float, message: str) -> None:
    values = getattr(DATA, field).clone()
    values[row] = value
    with pytest.raises(UserError, match=message):
        episodes.require_values(dataclasses.replace(DATA, **{field: values}), OBS, ACTION, "d")
    episodes.require_values(DATA, OBS, ACTION, "d")
    unused = DATA.action.clone()
    unused[3] = 7  # of the last row of an episode
    episodes.require_values(dataclasses.replace(DATA, action=unused), OBS, ACTION, "d")
    named = dataclasses.replace(DATA, obs={"a": DATA.obs, "b": DATA.action + 3})
    with pytest.raises(UserError, match=r"row 0: the observation 'b' is 4, which is not in Discrete\(2\)"):
        episodes.require_values(named, gs.Dict({"a": OBS, "b": ACTION}), ACTION, "d")


def test_a_damaged_data_set_is_named(tmp_path: Path) -> None:
    folder = recorder.write(DATA, Spaces(OBS, ACTION), "Own-v0", {}, "me", tmp_path / "data")
    where = folder / "data" if (folder / "data").is_dir() else folder
    file, about = next((where / "0").glob("*.parquet")), where / "metadata.json"
    table, text = pyarrow.parquet.read_table(file), about.read_text()
    count = len(table)
    for name, values in (
        ("observations", [[1.0, 2.0]] * count), ("observations", [None] * count), ("actions", ["left"] * count),
        ("actions", [0.5] * count),
    ):  # fmt: skip
        place = table.column_names.index(name)
        pyarrow.parquet.write_table(table.set_column(place, name, pyarrow.array(values)), file)
        with pytest.raises(UserError, match=r"(do not fit|not finite)"):
            offline.read([str(folder)], OBS, ACTION)
    pyarrow.parquet.write_table(table, file)
    for name, value in (("observation_space", {"type": "Box"}), ("observation_space", "a box"),
                        ("total_episodes", "three"), ("total_episodes", -1)):  # fmt: skip
        about.write_text(json.dumps({**json.loads(text), name: value}))
        with pytest.raises(UserError, match="is not a complete data set"):
            episodes.read(folder, OBS, ACTION)


@sabotaged_by("foresight.data.episodes._tensor", lambda f: lambda column, space: f(column, space) + 1)
@pytest.mark.parametrize("empty", [False, True])
def test_minari_data_without_rewards_have_zeros(tmp_path: Path, empty: bool) -> None:
    folder = recorder.write(DATA, Spaces(OBS, ACTION), "x", {}, "x", tmp_path / "data")
    for file in sorted((folder / "data").glob("*/*.parquet")):
        table = pyarrow.parquet.read_table(file).drop_columns(["rewards"])
        table = table.append_column("rewards", pyarrow.nulls(len(table))) if empty else table
        pyarrow.parquet.write_table(table, file)
    found = episodes.read(folder, OBS, ACTION)
    assert torch.equal(found.obs, DATA.obs) and torch.equal(found.reward, torch.zeros(6))
    with pytest.raises(UserError, match=r"have no rewards, .* Train on them with: behavior_cloning --share 1"):
        offline.require_rewards(found)


@sabotaged_by("foresight.data.episodes.describe", lambda f: lambda space: f(space).replace("nvec", "n"))
def test_spaces_are_described_as_minari_does() -> None:
    parts = {"arm": OBS, "kind": gs.Discrete(3, start=1), "keys": gs.MultiDiscrete([2, 5]), "mask": gs.MultiBinary(2)}
    for space in (*parts.values(), gs.Dict(parts)):
        text = episodes.describe(space)
        try:
            assert deserialize_space(text) == space
        except KeyError as error:
            raise AssertionError(error) from error
        assert episodes._shape(json.loads(serialize_space(space))) == episodes._shape(json.loads(text))
    episodes.check_spaces(gs.Dict(parts | {"keys": OBS}), ACTION)


@sabotaged_by("foresight.data.episodes._pictures", lambda f: lambda column: 255 - f(column))
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_what_minari_writes_is_read(form: str, tmp_path: Path) -> None:
    """Images, which it compresses by default, in color and gray, and a number, which it writes as a list of one."""
    space = gs.Dict({
        "eye": gs.Box(0, 255, (40, 48, 3), np.uint8), "gray": gs.Box(0, 255, (32, 32), np.uint8),
        "speed": gs.Box(-1, 1, (), np.float32),
    })  # fmt: skip
    eye = np.zeros((3, 40, 48, 3), np.uint8) + np.array([200, 30, 90], np.uint8)
    eye[1] = eye[1, ..., ::-1]
    gray, speed = np.full((3, 32, 32), 77, np.uint8), np.array([0.0, 0.5, -1.0], np.float32)
    (tmp_path / "data").mkdir()
    storage = MinariStorage.new(tmp_path / "data", space, gs.Box(-1, 1, (), np.float32), data_format=form)
    buffer = EpisodeBuffer(
        observations={"eye": list(eye), "gray": list(gray), "speed": speed},
        actions=[np.float32(0.25), np.float32(-0.5)], rewards=[1.0, 2.0], terminations=[False, True],
        truncations=[False, False],
    )  # fmt: skip
    storage.update_episodes([buffer])
    found = episodes.read(tmp_path, space, gs.Box(-1, 1, (), np.float32))
    assert found.obs["eye"].dtype == torch.uint8 and found.obs["eye"].shape == eye.shape
    assert (found.obs["eye"].int() - torch.tensor(eye).int()).abs().max() <= 3
    assert (found.obs["gray"].int() - 77).abs().max() <= 3 and found.obs["gray"].shape == gray.shape
    assert torch.equal(found.obs["speed"], torch.tensor(speed)) and found.action.tolist() == [0.25, -0.5, 0]


def test_a_mask_of_cameras_is_stored(tmp_path: Path) -> None:
    space = gs.Dict({"arm": OBS, "camera_mask": gs.MultiBinary(2)})
    mask = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0], [1, 1]], dtype=torch.int8)
    data = dataclasses.replace(DATA, obs={"arm": DATA.obs, "camera_mask": mask})
    folder = recorder.write(data, Spaces(space, ACTION), "x", {}, "x", tmp_path / "data")
    found = episodes.read(folder, space, ACTION)
    assert torch.equal(found.obs["camera_mask"], mask.long()) and torch.equal(found.obs["arm"], DATA.obs)


@sabotaged_by(
    "foresight.data.episodes.Episodes.around", lambda f: lambda self, start, offsets: f(self, start + 1, offsets)
)
def test_steps_around_an_action_stay_in_its_episode() -> None:
    rows, real = DATA.around(torch.tensor([0, 2]), (-1, 0, 1, 2))
    assert DATA.obs[rows].squeeze(-1).tolist() == [[10, 10, 11, 12], [11, 12, 12, 12]]
    assert real.tolist() == [[0, 1, 1, 1], [1, 1, 0, 0]]
    rows, real = DATA.around(torch.tensor([3]), range(3))  # an episode of one action
    assert DATA.obs[rows].flatten().tolist() == [20, 20, 20] and real.tolist() == [[1, 0, 0]]

"""LeRobotDatasets: what is written is read back, by plain readers too; times are steps; errors have names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import gymnasium.spaces as gs
import numpy as np
import pandas
import pyarrow.parquet
import pytest
import torch

from foresight.data import lerobot
from foresight.data.episodes import Episodes
from foresight.envs.base import Spaces
from foresight.errors import UserError
from foresight.runtime import episodes as recorder
from foresight.training import offline
from tests.sabotage import change, sabotaged_by

# Two episodes, of 3 and 1 actions.
DATA = Episodes(
    torch.tensor([[10.0, 1], [11, 1], [12, 1], [13, 1], [20, 1], [21, 1]]),
    torch.tensor([[1.0], [2], [3], [0], [4], [0]]),
    torch.tensor([1.0, 2, 4, 0, 9, 0]),
    torch.tensor([3, 1]),
    torch.tensor([False, True]),
)
OBS, ACTION = gs.Box(-99, 99, (2,), np.float32), gs.Box(-9, 9, (1,), np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The data as files."""
    return recorder.write_lerobot(DATA, OBS, ACTION, 10, "Push the block.", tmp_path / "data")


@sabotaged_by("foresight.data.lerobot._values", lambda f: lambda column, space: f(column, space) * 1.5)
def test_what_is_written_is_read_back(folder: Path) -> None:
    found, fps = lerobot.read(folder, OBS, ACTION)
    assert fps == 10 and found.length.tolist() == [3, 1] and found.terminated.tolist() == [False, True]
    assert torch.equal(found.obs[found.rows], DATA.obs[DATA.rows]) and torch.equal(found.action, DATA.action)
    assert torch.equal(found.reward, DATA.reward)
    assert found.obs[3].tolist() == [12, 1] and found.obs[5].tolist() == [20, 1]  # the format has no final one


@sabotaged_by("foresight.data.lerobot._column", change("values", lambda x: x[:, ::-1].copy() if x.ndim > 2 else x))
def test_chunks_of_actions_keep_their_shape(tmp_path: Path) -> None:
    space = gs.Box(-99, 99, (3, 2), np.float32)
    data = dataclasses.replace(DATA, action=torch.arange(36.0).view(6, 3, 2) * (DATA.action != 0).unsqueeze(-1))
    folder = recorder.write_lerobot(data, OBS, space, 10, "Push.", tmp_path / "data")
    assert torch.equal(lerobot.read(folder, OBS, space)[0].action, data.action)
    info, stats = (json.loads((folder / "meta" / f"{name}.json").read_text()) for name in ("info", "stats"))
    assert info["features"]["action"]["shape"] == [3, 2] and stats["action"]["max"] == [[24, 25], [26, 27], [28, 29]]
    table = pyarrow.parquet.read_table(folder / "data" / "chunk-000" / "file-000.parquet")
    assert table["action"][0].as_py() == [[0, 1], [2, 3], [4, 5]]  # as datasets' Array2D


SEEN = gs.Dict({
    "front": gs.Box(0, 255, (21, 15, 3), np.uint8), "wrist": gs.Box(0, 255, (8, 8, 3), np.uint8),
    "arm": gs.Box(-99, 99, (2,), np.float32), "mission": gs.Box(0, 255, (12,), np.uint8), "speed": ACTION,
})  # fmt: skip


def pictures() -> Episodes:
    """The data with two cameras and two instructions; a bar moves by a pixel per step."""
    missions = [list(text.ljust(12, b"\0")) for text in (b"go left", b"go right")]
    front = torch.randint(60, 190, (6, 1, 1, 3), generator=torch.Generator().manual_seed(0)).repeat(1, 21, 15, 1)
    for t in range(6):
        front[t, :, t] = 255
    obs = {
        "front": front.byte(), "wrist": front[:, :8, 2:10].byte(), "arm": DATA.obs,
        "mission": torch.tensor([missions[0]] * 4 + [missions[1]] * 2, dtype=torch.uint8), "speed": DATA.obs[:, :1] / 3,
    }  # fmt: skip
    return Episodes(obs, DATA.action, DATA.reward, DATA.length, DATA.terminated)


@sabotaged_by("foresight.data.lerobot._frames", lambda f: lambda *args: f(*args).roll(1, 0))
@sabotaged_by("foresight.data.lerobot._tasks", change("tasks", lambda tasks: tasks[::-1]))
def test_cameras_are_videos_and_missions_are_tasks(tmp_path: Path) -> None:
    data = pictures()
    folder = recorder.write_lerobot(data, SEEN, ACTION, 10, "?", tmp_path / "data")
    found, _ = lerobot.read(folder, SEEN, ACTION)
    assert list(found.obs) == list(SEEN.spaces) and torch.equal(found.action, DATA.action)
    for name in ("arm", "mission", "speed"):
        assert torch.equal(found.obs[name][found.rows], data.obs[name][data.rows]), name
    for name in ("front", "wrist"):
        gap = (found.obs[name][found.rows].int() - data.obs[name][data.rows].int()).abs()
        assert found.obs[name].dtype == torch.uint8 and gap.max() <= 3, name  # colors are rounded
    assert torch.equal(found.obs["front"][5], found.obs["front"][4])  # the format has no final one
    info = json.loads((folder / "meta" / "info.json").read_text())
    assert info["features"]["observation.images.front"]["dtype"] == "video" and info["total_tasks"] == 2
    assert (folder / "videos" / "observation.images.wrist" / "chunk-000" / "file-000.mp4").is_file()
    tasks = pandas.read_parquet(folder / "meta" / "tasks.parquet")
    assert tasks["task_index"].to_dict() == {"go left": 0, "go right": 1}
    places = pandas.read_parquet(folder / "meta" / "episodes")
    assert [list(x) for x in places["tasks"]] == [["go left"], ["go right"]]
    assert places["videos/observation.images.front/from_timestamp"].tolist() == pytest.approx([0, 0.3])
    assert places["videos/observation.images.front/to_timestamp"].tolist() == pytest.approx([0.3, 0.4])
    top = gs.Dict({**SEEN.spaces, "top": SEEN["wrist"]})
    larger = gs.Dict({**SEEN.spaces, "wrist": SEEN["front"]})
    for space, message in (
        (top, r"images \(top\), .* has the cameras: front, wrist"), (larger, "wrist' of .* has shape"),
        (gs.Dict({**SEEN.spaces, "depth": gs.Box(0, 9, (4, 4), np.float32)}), r"Images \[height"),
        (gs.Dict({**SEEN.spaces, "mission": gs.Box(0, 255, (5,), np.uint8)}), "has 7 bytes, .* room for 5"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            lerobot.read(folder, space, ACTION)
    (folder / "videos" / "observation.images.wrist" / "chunk-000" / "file-000.mp4").unlink()
    with pytest.raises(UserError, match=r"The video .*wrist.*file-000.mp4 is missing"):
        lerobot.read(folder, SEEN, ACTION)


def _without_fps(text: str) -> str:
    return json.dumps({name: value for name, value in json.loads(text).items() if name != "fps"})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("data/metadata.json", lambda text: text[:-9]), ("data/metadata.json", lambda text: "[]"),
        ("meta/info.json", lambda text: text[:-9]), ("meta/info.json", _without_fps),
        ("meta/tasks.parquet", None), ("meta/episodes/chunk-000/file-000.parquet", None),
        ("data/chunk-000/file-000.parquet", lambda text: "PAR1"),
    ],
)  # fmt: skip
def test_damaged_data_sets_are_named(name: str, change: Callable[[str], str] | None, tmp_path: Path) -> None:
    """Also of Minari, and whatever the file lost."""
    words = gs.Dict({name: SEEN[name] for name in ("arm", "mission", "speed", "wrist")})
    data = dataclasses.replace(pictures(), obs={name: pictures().obs[name] for name in words})
    if name.endswith("metadata.json"):
        folder = recorder.write(data, Spaces(words, ACTION), "X-v0", {}, "test", tmp_path / "data")
    else:
        folder = recorder.write_lerobot(data, words, ACTION, 10, "?", tmp_path / "data")
    file = folder / name
    file.unlink() if change is None else file.write_text(change(file.read_text(errors="replace")))
    with pytest.raises(UserError, match=f"^{folder} is not a complete data set: copy or write it again.$"):
        offline.read([str(folder)], words, ACTION)


@pytest.mark.parametrize("rows", [[1, 2, 3], [1, 0, 2, 3], [0, 1, 3]])
def test_a_data_set_without_one_of_its_frames_is_not_read(folder: Path, rows: list[int]) -> None:
    """Pictures are found by the number of the frame."""
    file = folder / "data" / "chunk-000" / "file-000.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).take(rows), file)
    with pytest.raises(UserError, match="is not a complete data set"):
        offline.read([str(folder)], OBS, ACTION)


def _rows(number: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).slice(number), file)

    return change


def _without_start(file: Path) -> None:
    table = pyarrow.parquet.read_table(file)
    names = [name for name in table.column_names if not name.endswith("from_timestamp")]
    pyarrow.parquet.write_table(table.select(names), file)


def _without_path(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "video_path": None}))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tasks.parquet", _rows(1)), ("episodes/chunk-000/file-000.parquet", _without_start),
        ("info.json", _without_path),
    ],
)  # fmt: skip
def test_tables_that_lack_something_are_named(name: str, change: Callable[[Path], None], tmp_path: Path) -> None:
    folder = recorder.write_lerobot(pictures(), SEEN, ACTION, 10, "?", tmp_path / "data")
    change(folder / "meta" / name)
    with pytest.raises(UserError, match=f"^{folder} is not a complete data set: copy or write it again.$"):
        offline.read([str(folder)], SEEN, ACTION)


def test_plain_readers_open_it(folder: Path) -> None:
    table = pyarrow.parquet.read_table(folder / "data" / "chunk-000" / "file-000.parquet")
    assert table["episode_index"].to_pylist() == [0, 0, 0, 1] and table["frame_index"].to_pylist() == [0, 1, 2, 0]
    assert table["timestamp"].to_pylist() == pytest.approx([0, 0.1, 0.2, 0]) and table["index"].to_pylist() == [
        0,
        1,
        2,
        3,
    ]
    assert table["action"].to_pylist() == [1, 2, 3, 4]  # LeRobot reads shape [1] as a number
    info, stats = (json.loads((folder / "meta" / f"{name}.json").read_text()) for name in ("info", "stats"))
    assert info["codebase_version"] == "v3.0" and info["total_frames"] == 4 and info["fps"] == 10
    assert info["features"]["observation.state"] == {"dtype": "float32", "shape": [2], "names": None}
    assert stats["action"]["mean"] == [2.5] and stats["action"]["max"] == [4] and stats["action"]["count"] == [4]
    tasks = pandas.read_parquet(folder / "meta" / "tasks.parquet")
    assert tasks.index.tolist() == ["Push the block."] and tasks["task_index"].tolist() == [0]
    places = pandas.read_parquet(folder / "meta" / "episodes")
    assert places["dataset_from_index"].tolist() == [0, 3] and places["dataset_to_index"].tolist() == [3, 4]


def test_the_package_datasets_opens_it_with_lerobots_features(folder: Path, tmp_path: Path) -> None:
    """As LeRobot's `get_hf_features_from_features` makes them."""
    import datasets

    features = json.loads((folder / "meta" / "info.json").read_text())["features"]
    kinds = {}
    for name, feature in features.items():
        (size,), value = feature["shape"], datasets.Value(feature["dtype"])
        kinds[name] = value if size == 1 else datasets.Sequence(value, length=size)
    file = str(folder / "data" / "chunk-000" / "file-000.parquet")
    found = datasets.Dataset.from_parquet(file, features=datasets.Features(kinds), cache_dir=str(tmp_path / "cache"))
    assert found["action"][:] == [1, 2, 3, 4] and found["observation.state"][1] == [11, 1]


def test_videos_begin_at_exact_times() -> None:
    """Float32 is 5e-5 s off here, half of what LeRobot allows; later in the file it is more."""
    space, length = gs.Dict({"image": gs.Box(0, 255, (2, 2, 3), np.uint8)}), torch.tensor([20_483, 10])
    count = int(length.sum()) + 2
    images = {"image": torch.zeros(count, 2, 2, 3, dtype=torch.uint8)}
    data = Episodes(images, torch.zeros(count, 1), torch.zeros(count), length, torch.tensor([True, True]))
    places = lerobot.files(data, space, ACTION, 10, "?")["meta/episodes/chunk-000/file-000.parquet"]
    assert places["videos/observation.images.image/from_timestamp"].to_pylist() == [0, 2048.3]
    assert places["videos/observation.images.image/to_timestamp"].to_pylist() == [2048.3, 2049.3]


def test_vectors_of_integers_are_refused() -> None:
    """Formerly they were left out."""
    whole = gs.Box(0, 9, (2,), np.int64)
    data = dataclasses.replace(DATA, obs=DATA.obs.long())
    seen = dataclasses.replace(pictures(), obs={**pictures().obs, "arm": DATA.obs.long()})
    for episodes, space in ((data, whole), (seen, gs.Dict({**SEEN.spaces, "arm": whole}))):
        with pytest.raises(UserError, match="one vector of floats, or a dict of such vectors"):
            lerobot.files(episodes, space, ACTION, 10, "?")


@sabotaged_by("foresight.data.lerobot.offsets", change("fps", lambda fps: 2 * fps))
def test_times_are_steps() -> None:
    assert lerobot.offsets([-0.1, 0, 0.1, 1.5], 10) == [-1, 0, 1, 15]
    rows, real = DATA.around(torch.tensor([0]), lerobot.offsets([-0.1, 0, 0.1], 10))
    assert rows.tolist() == [[0, 0, 1]] and real.tolist() == [[0, 1, 1]]
    with pytest.raises(UserError, match=r"0.05 s, which lies between two frames at 10 a second. Give multiples of 0.1"):
        lerobot.offsets([0.05], 10)


def _crosses(original):
    """Frames of whatever episode is there."""

    def around(self, start, offsets):
        rows = self.rows[start][:, None] + torch.tensor(offsets)
        return rows.clamp(0, len(self.reward) - 1), torch.ones(rows.shape)

    return around


@sabotaged_by("foresight.data.episodes.Episodes.around", _crosses)
@sabotaged_by("foresight.data.lerobot.offsets", change("times", lambda times: [-time for time in times]))
def test_samples_by_time_stay_in_their_episode(folder: Path) -> None:
    """Of two episodes, of 3 and 1 frames at 10 a second; LeRobot repeats the nearest frame and marks it."""
    asked = {"observation.state": [-0.1, 0.0], "action": [0.0, 0.1, 0.2], "next.reward": [0.1]}
    for found in (DATA, lerobot.read(folder, OBS, ACTION)[0]):  # as Minari has them, and as LeRobot has
        got = lerobot.sample(found, torch.tensor([0, 1, 2, 3]), asked, 10)
        assert got["observation.state"][..., 0].tolist() == [[10, 10], [10, 11], [11, 12], [20, 20]]
        assert got["observation.state_is_pad"].tolist() == [
            [True, False],
            [False, False],
            [False, False],
            [True, False],
        ]
        assert got["action"].squeeze(-1).tolist() == [[1, 2, 3], [2, 3, 3], [3, 3, 3], [4, 4, 4]]
        assert (~got["action_is_pad"]).long().tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
        assert got["next.reward"].tolist() == [[2], [4], [4], [9]]
        assert got["next.reward_is_pad"].tolist() == [[False], [False], [True], [True]]
    assert got.keys() == {name + pad for name in asked for pad in ("", "_is_pad")}


def test_samples_by_time_have_lerobots_names() -> None:
    frames = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 2, 2, 3)
    obs = {"arm": DATA.obs, "front": frames, "hand": DATA.obs[:, :1] + 5}
    found = dataclasses.replace(DATA, obs=obs)
    names = ("observation.images.front", "observation.front", "observation.state", "observation.hand")
    got = lerobot.sample(found, torch.tensor([3]), {name: [-0.1, 0] for name in names}, 10)
    assert torch.equal(got[names[0]], frames[[4, 4]][None]) and torch.equal(got[names[1]], got[names[0]])
    assert got["observation.state"].tolist() == [[[20, 1, 25]] * 2] and got["observation.hand"].tolist() == [[[25]] * 2]
    for asked, index, fps, message in (
        ({"observation.image": [0]}, 0, 10, "Unknown column of the episodes 'observation.image'. Did you mean"),
        ({"action": [0.1, 0.12]}, 0, 10, r"0.12 s, which lies between two frames at 10 a second"),
        ({"action": [0]}, 4, 10, "index is from 4 to 4, but the frames are from 0 to 3"),
        ({"action": [0]}, -1, 10, "index is from -1 to -1"),
        ({"action": [0]}, 0, 0, "fps is the number of frames a second, above 0, not 0"),
    ):
        with pytest.raises(UserError, match=message):
            lerobot.sample(found, torch.tensor([index]), asked, fps)


def test_policies_train_on_both_formats_and_on_one_speed(folder: Path, tmp_path: Path) -> None:
    assert len(offline.read([str(folder)], OBS, ACTION)) == 2
    faster = recorder.write_lerobot(DATA, OBS, ACTION, 20, "Push.", tmp_path / "faster")
    with pytest.raises(UserError, match=r"different frames per second: .*data 10, .*faster 20"):
        offline.read([str(folder), str(faster)], OBS, ACTION)


def test_a_data_set_without_one_of_its_files_is_not_read(folder: Path) -> None:
    """Wrong: fewer episodes in silence, each with the pictures of another one."""
    file = folder / "data" / "chunk-000" / "file-000.parquet"
    table = pyarrow.parquet.read_table(file)
    pyarrow.parquet.write_table(table.slice(3), file.with_name("file-001.parquet"))
    file.unlink()  # the first episode
    with pytest.raises(UserError, match="is not a complete data set"):
        lerobot.read(folder, OBS, ACTION)
    pyarrow.parquet.write_table(table.take([0, 3, 1, 2]), file)  # rows of the second episode amid those of the first
    file.with_name("file-001.parquet").unlink()
    with pytest.raises(UserError, match="is not a complete data set"):
        lerobot.read(folder, OBS, ACTION)


def test_what_cannot_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    for obs, action, message in (
        (gs.Box(-9, 9, (3,), np.float32), ACTION, "'observation.state' of .* has shape"),
        (OBS, gs.Box(-9, 9, (2,), np.float32), "'action' of .* has shape"),
        (gs.Dict({"top": gs.Box(0, 255, (8, 8, 3), np.uint8)}), ACTION, r"images \(top\), .* has the cameras: none"),
        (gs.Dict({"x": OBS}), ACTION, "flatten=true"),
    ):
        with pytest.raises(UserError, match=message):
            lerobot.read(folder, obs, action)
    with pytest.raises(UserError, match="already exists"):
        recorder.write_lerobot(DATA, OBS, ACTION, 10, "Push.", folder)
    with pytest.raises(UserError, match="takes observations that are one vector"):
        recorder.write_lerobot(DATA, gs.Discrete(2), ACTION, 10, "Push.", tmp_path / "x")
    path = folder / "meta" / "info.json"
    info = json.loads(path.read_text())
    info["features"]["observation.image"] = {"dtype": "image", "shape": [8, 8, 3], "names": None}
    path.write_text(json.dumps(info))
    with pytest.raises(
        UserError, match=r"cameras: none\. Only videos are read, but single images are .* observation.image"
    ):
        lerobot.read(folder, gs.Dict({"top": gs.Box(0, 255, (8, 8, 3), np.uint8)}), ACTION)
    path.write_text(path.read_text().replace("v3.0", "v2.1"))
    with pytest.raises(UserError, match=r"is a LeRobotDataset v2.1; v3.0 is read"):
        lerobot.read(folder, OBS, ACTION)

"""Episodes as a LeRobotDataset v3.0: many episodes in one parquet file, and what they are in `meta`.

A data set is a folder with `meta/info.json` (features, frames per second, paths), `meta/stats.json`,
`meta/tasks.parquet`, `meta/episodes/*/*.parquet` (where each episode is), `data/*/*.parquet` (one row per action) and
`videos/CAMERA/*/*.mp4`. It has no final observations: in `Episodes` that are read from it, the last observation is
repeated.

Observations are one vector of floats, or a dict with `mission`, which is the task, images `[H, W, 3]`, one camera each,
and vectors of floats, which are together `observation.state`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from numpy.typing import NDArray
from torch import Tensor

from foresight.data.episodes import Episodes, document, fitting, incomplete, whole
from foresight.data.text import encoded
from foresight.data.trajectory import Tree, tree_map
from foresight.errors import UserError, unknown

VERSION = "v3.0"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
CAMERA, MISSION = "observation.images.", "mission"  # before a camera's name; the key of the instruction
SAMPLED = 500  # frames of a camera that its statistics are of
STATE, ACTION, REWARD, DONE = "observation.state", "action", "next.reward", "next.done"
TOLERANCE = 1e-4  # seconds between a time that is asked for and the one of a frame, as LeRobot has it


def is_data_set(path: str | Path) -> bool:
    """Whether `path` is a folder of this format."""
    return (Path(path).expanduser() / "meta" / "info.json").is_file()


def offsets(times: Sequence[float], fps: float) -> list[int]:
    """LeRobot's `delta_timestamps`, in seconds, as numbers of steps for `Episodes.around`.

    Raises UserError for a time between two frames.
    """
    steps = [round(time * fps) for time in times]
    for time, step in zip(times, steps, strict=True):
        if abs(time - step / fps) > TOLERANCE:
            raise UserError(
                f"delta_timestamps has {time:g} s, which lies between two frames at {fps:g} a second. "
                f"Give multiples of {1 / fps:g} s."
            )
    return steps


def sample(
    episodes: Episodes, index: Tensor, delta_timestamps: Mapping[str, Sequence[float]], fps: float
) -> dict[str, Tensor]:
    """What LeRobot's `delta_timestamps` ask for at the frames `index` `[B]` (int64) of all T frames of the episodes.

    For each name the K values `[B, K, ...]` that are so many seconds after the frame, and `NAME_is_pad` `[B, K]` bool:
    true outside of the episode, where the value is that of its nearest frame. An episode of T actions has T frames,
    also where Minari has a final observation. Names are `action`, `next.reward`, `observation.state` (vectors of
    floats, one after the other), `observation.images.CAMERA`, and `observation.KEY` of dict observations. Source:
    LeRobot's `LeRobotDataset._get_query_indices`.

    Raises UserError for another name, for a time between two frames, and for a frame that there is not.
    """
    if not fps > 0:
        raise UserError(f"fps is the number of frames a second, above 0, not {fps:g}.")
    count = len(episodes.rows)
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise UserError(f"index is from {index.min()} to {index.max()}, but the frames are from 0 to {count - 1}.")
    columns, found = _columns(episodes), dict[str, Tensor]()
    for name, times in delta_timestamps.items():
        if name not in columns:
            raise unknown("column of the episodes", name, columns)
        rows, real = episodes.around(index, offsets(times, fps))
        found[name], found[f"{name}_is_pad"] = columns[name][rows], real == 0
    return found


def _columns(episodes: Episodes) -> dict[str, Tensor]:
    """Every array of the episodes, by the names that LeRobot has for them, and by its own key."""
    columns = {ACTION: episodes.action, REWARD: episodes.reward}
    if not isinstance(episodes.obs, dict):
        return {**columns, STATE: episodes.obs}
    vectors = [x for x in episodes.obs.values() if x.is_floating_point() and x.dim() == 2]
    columns |= {f"observation.{name}": x for name, x in episodes.obs.items()}
    columns |= {CAMERA + name: x for name, x in episodes.obs.items() if x.dtype == torch.uint8 and x.dim() == 4}
    return {**columns, STATE: torch.cat(vectors, -1)} if vectors else columns


def read(path: str | Path, obs: gs.Space[Any], action: gs.Space[Any]) -> tuple[Episodes, float]:
    """The episodes in the folder `path`, which must have these spaces, and their frames per second.

    Raises UserError for anything else, such as another version or a camera that is missing.
    """
    folder, info = Path(path).expanduser(), check(path, obs, action)
    features = info["features"]
    files = sorted((folder / "data").glob("*/*.parquet"))
    if not files or not info.get("total_episodes"):
        raise UserError(f"{path} holds no episode.")
    wanted = (STATE, ACTION, "episode_index", "frame_index", "task_index", REWARD, DONE)
    columns = [name for name in wanted if name in features]
    table = _table(files, path, columns)
    owner = torch.from_numpy(table["episode_index"].to_numpy().astype(np.int64))
    length = torch.unique_consecutive(owner, return_counts=True)[1]
    if len(length) != info["total_episodes"] or len(owner.unique()) != len(length):
        raise incomplete(path)  # a file is missing, or the rows of an episode are not together
    frame = torch.arange(len(owner)) - (length.cumsum(0) - length).repeat_interleave(length)
    listed = table["frame_index"].to_pylist() if "frame_index" in features else frame.tolist()
    if info.get("total_frames", len(owner)) != len(owner) or listed != frame.tolist():
        raise incomplete(path)  # rows are missing or in another order: the pictures would be those of other rows
    last = torch.zeros(len(owner), dtype=torch.bool)
    last[length.cumsum(0) - 1] = True
    again = torch.arange(len(owner)).repeat_interleave(1 + last.long())  # the last row of an episode comes twice
    padding = torch.zeros(len(again), dtype=torch.bool)
    padding[(length + 1).cumsum(0) - 1] = True
    try:
        found = _seen(folder, info, table, owner[last], length, obs)
    except UserError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError) as error:  # a table or info.json lacks something
        raise incomplete(path) from error
    seen = tree_map(lambda x: x[again], found)
    act = _values(table[ACTION], action)[again]
    reward = torch.zeros(len(owner))
    if REWARD in features:
        reward = _values(table[REWARD], gs.Box(-np.inf, np.inf, ())).float()
    done = torch.zeros(len(owner), dtype=torch.bool)
    if DONE in features:
        done = torch.from_numpy(np.asarray(table[DONE].to_numpy(), dtype=bool))
    act[padding] = 0
    return Episodes(seen, act, reward[again].masked_fill(padding, 0), length, done[last]), float(info["fps"])


def check(path: str | Path, obs: gs.Space[Any], action: gs.Space[Any]) -> dict[str, Any]:
    """The `meta/info.json` of the folder `path`. Raises UserError unless its episodes can be read in these spaces."""
    info = document(Path(path).expanduser() / "meta" / "info.json", path)
    version = str(info.get("codebase_version"))
    if not version.startswith("v3."):
        raise UserError(
            f"{path} is a LeRobotDataset {version}; {VERSION} is read. LeRobot converts it: "
            "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id NAME"
        )
    features = info.get("features")
    if not isinstance(features, dict) or not all(isinstance(one, dict) for one in features.values()):
        raise incomplete(path)
    if not isinstance(info.get("fps"), int | float):
        raise incomplete(path)
    _check(path, features, obs, action)
    return info


def files(episodes: Episodes, obs: gs.Space[Any], action: gs.Space[Any], fps: float, task: str) -> dict[str, Any]:
    """The files of a data set by their paths: tables of pyarrow, dicts for JSON, and frames `[S, H, W, 3]` of videos.

    `task` is a sentence, where observations have no mission. Raises UserError for observations of other spaces.
    """
    if not (_is_vector(obs) or _is_seen(obs)):
        raise UserError(
            "The format lerobot takes observations that are one vector of floats, or a dict of such vectors, images "
            f"[height, width, 3] and '{MISSION}', not {obs}. Use --format minari."
        )
    pyarrow = importlib.import_module("pyarrow")
    rows, count = episodes.rows, len(episodes)
    time = rows - episodes.first[episodes.owner]
    ends = time == episodes.length[episodes.owner] - 1
    act, seen = episodes.action[rows], tree_map(lambda x: x[rows], episodes.obs)
    seen = seen if isinstance(seen, dict) else {STATE: seen}
    tasks, which = [task], torch.zeros(len(rows), dtype=torch.int64)
    if MISSION in seen:
        missions, which = seen[MISSION].unique(dim=0, return_inverse=True)
        tasks = [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in missions]
    cameras = {CAMERA + name: seen[name] for name in _cameras(obs)}
    vectors = [x.float() for x in seen.values() if x.is_floating_point()]
    values: dict[str, Tensor] = {
        **({STATE: torch.cat(vectors, -1)} if vectors else {}),
        ACTION: act.float() if isinstance(action, gs.Box) else act.long(),
        REWARD: episodes.reward[rows],
        DONE: ends & episodes.terminated[episodes.owner],
        "timestamp": time / fps,
        "frame_index": time,
        "episode_index": episodes.owner,
        "index": torch.arange(len(rows)),
        "task_index": which,
    }
    whole = {name: x.numpy() for name, x in values.items()}
    to = episodes.length.cumsum(0)
    zeros = [0] * count
    places = {
        "episode_index": list(range(count)), "length": episodes.length.tolist(),
        "tasks": [[tasks[i] for i in part.unique().tolist()] for part in which.split(episodes.length.tolist())],
        "data/chunk_index": zeros, "data/file_index": zeros, "dataset_from_index": (to - episodes.length).tolist(),
        "dataset_to_index": to.tolist(), "meta/episodes/chunk_index": zeros, "meta/episodes/file_index": zeros,
    }  # fmt: skip
    for name in cameras:
        places |= {f"videos/{name}/chunk_index": zeros, f"videos/{name}/file_index": zeros}
        places[f"videos/{name}/from_timestamp"] = ((to - episodes.length).double() / fps).tolist()
        places[f"videos/{name}/to_timestamp"] = (to.double() / fps).tolist()  # float32 is off by a frame in long files
    features = {name: _feature(x) for name, x in whole.items()}
    info = {
        "codebase_version": VERSION, "robot_type": None, "total_episodes": count, "total_frames": len(rows),
        "total_tasks": len(tasks), "chunks_size": 1000, "data_files_size_in_mb": 100, "video_files_size_in_mb": 200,
        "fps": int(fps) if float(fps).is_integer() else fps, "splits": {"train": f"0:{count}"}, "data_path": DATA,
        "video_path": VIDEO if cameras else None,
        "features": {**features, **{name: _video(x, fps) for name, x in cameras.items()}},
    }  # fmt: skip
    return {
        DATA.format(chunk_index=0, file_index=0): pyarrow.table({k: _column(pyarrow, x) for k, x in whole.items()}),
        "meta/info.json": info,
        "meta/stats.json": {
            **{name: _statistics(x) for name, x in whole.items()},
            **{name: _pixel_statistics(x) for name, x in cameras.items()},
        },
        "meta/tasks.parquet": _tasks(pyarrow, tasks),
        "meta/episodes/chunk-000/file-000.parquet": pyarrow.table(places),
        **{VIDEO.format(video_key=name, chunk_index=0, file_index=0): x for name, x in cameras.items()},
    }


def _check(path: str | Path, features: Mapping[str, Any], obs: gs.Space[Any], action: gs.Space[Any]) -> None:
    cameras = [name.removeprefix(CAMERA) for name, feature in features.items() if feature.get("dtype") == "video"]
    single = [name for name, feature in features.items() if feature.get("dtype") == "image"]
    note = f" Only videos are read, but single images are what it has of: {', '.join(single)}." if single else ""
    missing = [name for name in _cameras(obs) if name not in cameras]
    if missing or (isinstance(obs, gs.Box) and obs.dtype == np.uint8):
        raise UserError(
            f"The environment shows images ({', '.join(missing) or 'its observation'}), which are not in the data; "
            f"{path} has the cameras: {', '.join(cameras) or 'none'}.{note} Use data of its own."
        )
    if isinstance(obs, gs.Dict) and not (MISSION in obs.spaces or _cameras(obs)):
        raise UserError(f"The environment's observations are {obs}. A vector is read: --env-options flatten=true.")
    if isinstance(obs, gs.Dict) and not _is_seen(obs):
        raise UserError(f"Images [height, width, 3], vectors of floats and '{MISSION}' are read, not {obs}.")
    wanted: dict[str, tuple[int, ...]] = {ACTION: tuple(action.shape or ())}
    if not isinstance(obs, gs.Dict):
        wanted[STATE] = tuple(obs.shape or ())
    else:
        wanted |= {CAMERA + name: tuple(obs[name].shape or ()) for name in _cameras(obs)}
        if sizes := [part.shape[0] for part in obs.values() if _is_vector(part)]:  # type: ignore[index]
            wanted[STATE] = (sum(sizes),)
    for name, expected in wanted.items():
        if name not in features:
            raise UserError(f"{path} has no feature '{name}'. It has: {', '.join(features)}.")
        shape = tuple(features[name].get("shape") or ())
        if shape not in (expected, expected or (1,)):
            raise UserError(
                f"'{name}' of {path} has shape {list(shape)}, but the environment's is {list(expected)}. Use its own "
                "data."
            )


def _is_vector(space: gs.Space[Any]) -> bool:
    return isinstance(space, gs.Box) and len(space.shape) == 1 and np.dtype(space.dtype).kind == "f"


def _is_seen(obs: gs.Space[Any]) -> bool:
    """Whether observations are a dict of images or a mission, and of vectors."""
    named = isinstance(obs, gs.Dict) and bool(MISSION in obs.spaces or _cameras(obs))
    return named and all(_fits(name, part) for name, part in obs.spaces.items())  # type: ignore[attr-defined]


def _fits(name: str, space: gs.Space[Any]) -> bool:
    """Whether a part of a dict observation can be stored."""
    shape = space.shape or ()
    image = len(shape) == 1 if name == MISSION else len(shape) == 3 and shape[-1] == 3
    return _is_vector(space) or (isinstance(space, gs.Box) and space.dtype == np.uint8 and image)


def _cameras(obs: gs.Space[Any]) -> list[str]:
    """The names of the images of a dict observation."""
    parts = obs.spaces.items() if isinstance(obs, gs.Dict) else ()
    return [name for name, part in parts if part.dtype == np.uint8 and name != MISSION]


def _seen(folder: Path, info: Mapping[str, Any], table: Any, owner: Tensor, length: Tensor, obs: gs.Space[Any]) -> Tree:
    """The observations of all S rows `[S, ...]`, of which `length` `[N]` belong to each episode, `owner` `[N]`."""
    if not isinstance(obs, gs.Dict):
        return _values(table[STATE], obs)
    found = {}
    vectors = {name: part.shape[0] for name, part in obs.items() if _is_vector(part)}  # type: ignore[index]
    if vectors:
        state = _values(table[STATE], gs.Box(-np.inf, np.inf, (sum(vectors.values()),)))
        found = dict(zip(vectors, state.split(list(vectors.values()), -1), strict=True))
    if MISSION in obs.spaces:
        tasks = _table([folder / "meta" / "tasks.parquet"], folder)
        (column,) = [name for name in tasks.column_names if name != "task_index"]  # pandas' index has several names
        texts = dict(zip(tasks["task_index"].to_pylist(), tasks[column].to_pylist(), strict=True))
        size = obs[MISSION].shape[0]  # type: ignore[index]
        used, which = np.unique(table["task_index"].to_numpy(), return_inverse=True)
        text = torch.from_numpy(np.stack([encoded(texts[i], size) for i in used.tolist()]))
        found[MISSION] = text[torch.from_numpy(which)]
    if cameras := _cameras(obs):
        files = sorted((folder / "meta" / "episodes").glob("*/*.parquet"))
        places = _table(files, folder)
        for name in cameras:
            found[name] = _frames(folder, info, CAMERA + name, places, owner, length)
    return {name: found[name] for name in obs.spaces}


def _frames(folder: Path, info: Mapping[str, Any], key: str, places: Any, owner: Tensor, length: Tensor) -> Tensor:
    """The frames `[S, H, W, 3]` of a camera, of the episodes at `places`. Raises UserError if one is not there."""
    row_of = {number: row for row, number in enumerate(places["episode_index"].to_pylist())}
    first = (length.cumsum(0) - length).tolist()
    wanted: dict[Path, dict[int, int]] = {}  # the row of each frame of each file
    for i, (number, count) in enumerate(zip(owner.tolist(), length.tolist(), strict=True)):
        if (place := row_of.get(number)) is None:
            raise incomplete(folder)
        where = {part: places[f"videos/{key}/{part}"][place].as_py() for part in ("chunk_index", "file_index")}
        begin = round(places[f"videos/{key}/from_timestamp"][place].as_py() * info["fps"])
        rows = wanted.setdefault(folder / info["video_path"].format(video_key=key, **where), {})
        rows |= {begin + t: first[i] + t for t in range(count)}
    shape = tuple(info["features"][key]["shape"])
    found = torch.zeros(int(length.sum()), *shape, dtype=torch.uint8)
    for path, rows in wanted.items():
        if not path.is_file():
            raise UserError(f"The video {path} is missing.")
        frames = importlib.import_module("imageio_ffmpeg").read_frames(str(path))
        width, height = next(frames)["size"]
        if (height, width, 3) != shape:
            raise UserError(f"The video {path} has {height} x {width} pixels, but info.json has {list(shape)}.")
        left = set(rows)
        for i, frame in enumerate(frames):
            if i in left:
                found[rows[i]] = torch.frombuffer(bytearray(frame), dtype=torch.uint8).view(shape)
                left.remove(i)
        if left:
            raise UserError(f"The video {path} ends before frame {max(left)}: copy the data set again.")
    return found


def _table(files: Sequence[Path], path: str | Path, columns: Sequence[str] | None = None) -> Any:
    """The rows of all `files`, which belong to the data set `path`. Raises UserError if one is damaged or missing."""
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        parts = [parquet.read_table(file, columns=columns) for file in files]
        return importlib.import_module("pyarrow").concat_tables(parts)
    except (OSError, ValueError) as error:  # also an empty list of files
        raise incomplete(path) from error


def _values(column: Any, space: gs.Space[Any]) -> Tensor:
    """A column as float32 or int64 `[T, ...]`."""
    flat = column.combine_chunks()
    while "list" in str(flat.type):  # one list in another for each dim
        flat = flat.flatten()
    floats = np.dtype(space.dtype).kind == "f"
    with fitting(space):
        found = flat.to_numpy(zero_copy_only=False)
        values = torch.tensor(found, dtype=torch.float32 if floats else torch.int64)
        if not floats:
            whole(found)
        return values.view(len(column), *(space.shape or ()))


def _column(pyarrow: Any, values: NDArray[Any]) -> Any:
    """Values `[S, ...]` as a column of numbers, or of lists, nested as deep as there are more dims.

    Vectors of one number, whose shape is `[1]`, are numbers, as LeRobot has them (`get_hf_features_from_features`).
    """
    if values.shape[1:] == (1,):
        values = values[:, 0]
    column = pyarrow.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        column = pyarrow.FixedSizeListArray.from_arrays(column, size)
    return column


def _feature(values: NDArray[Any]) -> dict[str, Any]:
    return {"dtype": str(values.dtype), "shape": list(values.shape[1:]) or [1], "names": None}


def _statistics(values: NDArray[Any]) -> dict[str, Any]:
    x = values.reshape(len(values), *(values.shape[1:] or (1,))).astype(np.float64)
    found = {"min": x.min(0), "max": x.max(0), "mean": x.mean(0), "std": x.std(0)}
    return {**{name: value.tolist() for name, value in found.items()}, "count": [len(x)]}


def _video(frames: Tensor, fps: float) -> dict[str, Any]:
    height, width, channels = frames.shape[1:]
    info = {
        "video.height": height, "video.width": width, "video.channels": channels, "video.codec": "h264",
        "video.pix_fmt": "yuv444p", "video.fps": fps, "video.is_depth_map": False, "has_audio": False,
    }  # fmt: skip
    return {
        "dtype": "video", "shape": [height, width, channels], "names": ["height", "width", "channels"], "info": info
    }  # fmt: skip


def _pixel_statistics(frames: Tensor) -> dict[str, Any]:
    """Of each channel `[3, 1, 1]` in [0, 1], over some of the frames."""
    some = frames[:: max(1, len(frames) // SAMPLED)]
    found = _statistics(some.reshape(-1, 3).numpy() / 255)
    return {**{name: [[[x]] for x in values] for name, values in found.items()}, "count": [len(some)]}


def _tasks(pyarrow: Any, tasks: Sequence[str]) -> Any:
    """The table of tasks, whose index in pandas is the sentence."""
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    table = pyarrow.table({"task_index": list(range(len(tasks))), "task": tasks})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})

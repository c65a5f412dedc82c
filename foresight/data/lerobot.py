"""Episodes as a LeRobotDataset v3.0: many episodes in one parquet file, and what they are in `meta`.

A data set is a folder with `meta/info.json` (features, frames per second, paths), `meta/stats.json`,
`meta/tasks.parquet`, `meta/episodes/*/*.parquet` (where each episode is) and `data/*/*.parquet` (one row per action).
It has no final observations: in `Episodes` that are read from it, the last observation is repeated.
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

from foresight.data.episodes import Episodes
from foresight.errors import UserError

VERSION = "v3.0"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
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


def read(path: str | Path, obs: gs.Space[Any], action: gs.Space[Any]) -> tuple[Episodes, float]:
    """The episodes in the folder `path`, which must have these spaces, and their frames per second.

    Raises UserError for anything else, such as another version or a camera that is missing.
    """
    folder = Path(path).expanduser()
    info = json.loads((folder / "meta" / "info.json").read_text(encoding="utf-8"))
    version, features = str(info.get("codebase_version")), info.get("features", {})
    if not version.startswith("v3."):
        raise UserError(
            f"{path} is a LeRobotDataset {version}; {VERSION} is read. LeRobot converts it: "
            "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id NAME"
        )
    _check(path, features, obs, action)
    parquet = importlib.import_module("pyarrow.parquet")
    files = sorted((folder / "data").glob("*/*.parquet"))
    if not files or not info.get("total_episodes"):
        raise UserError(f"{path} holds no episode.")
    columns = [STATE, ACTION, "episode_index", *(name for name in (REWARD, DONE) if name in features)]
    table = importlib.import_module("pyarrow").concat_tables([parquet.read_table(x, columns=columns) for x in files])
    owner = torch.from_numpy(table["episode_index"].to_numpy().astype(np.int64))
    length = torch.unique_consecutive(owner, return_counts=True)[1]
    last = torch.zeros(len(owner), dtype=torch.bool)
    last[length.cumsum(0) - 1] = True
    again = torch.arange(len(owner)).repeat_interleave(1 + last.long())  # the last row of an episode comes twice
    padding = torch.zeros(len(again), dtype=torch.bool)
    padding[(length + 1).cumsum(0) - 1] = True
    found = [_values(table[STATE], obs)[again], _values(table[ACTION], action)[again]]
    reward = torch.zeros(len(owner))
    if REWARD in features:
        reward = _values(table[REWARD], gs.Box(-np.inf, np.inf, ())).float()
    done = torch.zeros(len(owner), dtype=torch.bool)
    if DONE in features:
        done = torch.from_numpy(np.asarray(table[DONE].to_numpy(), dtype=bool))
    found[1][padding] = 0
    return Episodes(found[0], found[1], reward[again].masked_fill(padding, 0), length, done[last]), float(info["fps"])


def files(episodes: Episodes, obs: gs.Space[Any], action: gs.Space[Any], fps: float, task: str) -> dict[str, Any]:
    """The files of a data set by their paths: tables of pyarrow, and dicts for JSON.

    `task` is a sentence. Raises UserError for observations that are no vector of floats.
    """
    if not (isinstance(obs, gs.Box) and len(obs.shape) == 1 and obs.dtype != np.uint8):
        raise UserError(
            f"The format lerobot takes observations that are one vector of floats, not {obs}. Use --format minari."
        )
    pyarrow = importlib.import_module("pyarrow")
    rows, count = episodes.rows, len(episodes)
    time = rows - episodes.first[episodes.owner]
    ends = time == episodes.length[episodes.owner] - 1
    act = episodes.action[rows]
    values: dict[str, Tensor] = {
        STATE: episodes.obs[rows].float(),
        ACTION: act.float() if isinstance(action, gs.Box) else act.long(),
        REWARD: episodes.reward[rows],
        DONE: ends & episodes.terminated[episodes.owner],
        "timestamp": time / fps,
        "frame_index": time,
        "episode_index": episodes.owner,
        "index": torch.arange(len(rows)),
        "task_index": torch.zeros(len(rows), dtype=torch.int64),
    }
    whole = {name: x.numpy() for name, x in values.items()}
    to = episodes.length.cumsum(0)
    zeros = [0] * count
    places = {
        "episode_index": list(range(count)), "tasks": [[task]] * count, "length": episodes.length.tolist(),
        "data/chunk_index": zeros, "data/file_index": zeros, "dataset_from_index": (to - episodes.length).tolist(),
        "dataset_to_index": to.tolist(), "meta/episodes/chunk_index": zeros, "meta/episodes/file_index": zeros,
    }  # fmt: skip
    info = {
        "codebase_version": VERSION, "robot_type": None, "total_episodes": count, "total_frames": len(rows),
        "total_tasks": 1, "chunks_size": 1000, "data_files_size_in_mb": 100, "video_files_size_in_mb": 200,
        "fps": int(fps) if float(fps).is_integer() else fps, "splits": {"train": f"0:{count}"}, "data_path": DATA,
        "video_path": None, "features": {name: _feature(x) for name, x in whole.items()},
    }  # fmt: skip
    return {
        DATA.format(chunk_index=0, file_index=0): pyarrow.table({k: _column(pyarrow, x) for k, x in whole.items()}),
        "meta/info.json": info,
        "meta/stats.json": {name: _statistics(x) for name, x in whole.items()},
        "meta/tasks.parquet": _tasks(pyarrow, task),
        "meta/episodes/chunk-000/file-000.parquet": pyarrow.table(places),
    }


def _check(path: str | Path, features: Mapping[str, Any], obs: gs.Space[Any], action: gs.Space[Any]) -> None:
    cameras = [name for name, feature in features.items() if feature.get("dtype") in ("video", "image")]
    wanted = list(obs.spaces) if isinstance(obs, gs.Dict) else []
    images = [name for name in wanted if obs[name].dtype == np.uint8]  # type: ignore[index]
    if images or (isinstance(obs, gs.Box) and obs.dtype == np.uint8):
        raise UserError(
            f"The environment shows images ({', '.join(images) or 'its observation'}), which are not read from "
            f"LeRobotDatasets; {path} has the cameras: {', '.join(cameras) or 'none'}. Use Minari's format."
        )
    if isinstance(obs, gs.Dict):
        raise UserError(f"The environment's observations are {obs}. A vector is read: --env-options flatten=true.")
    for name, space in ((STATE, obs), (ACTION, action)):
        if name not in features:
            raise UserError(f"{path} has no feature '{name}'. It has: {', '.join(features)}.")
        shape = tuple(features[name].get("shape") or ())
        if shape not in (tuple(space.shape or ()), (1,) if not space.shape else None):
            raise UserError(
                f"'{name}' of {path} has shape {list(shape)}, but the environment's is {space}. Use its own data."
            )


def _values(column: Any, space: gs.Space[Any]) -> Tensor:
    """A column as float32 or int64 `[T, ...]`."""
    joined = column.combine_chunks()
    flat = joined.flatten() if hasattr(joined, "flatten") and "list" in str(joined.type) else joined
    floats = np.dtype(space.dtype).kind == "f"
    values = torch.tensor(flat.to_numpy(zero_copy_only=False), dtype=torch.float32 if floats else torch.int64)
    return values.view(len(column), *(space.shape or ()))


def _column(pyarrow: Any, values: NDArray[Any]) -> Any:
    if values.ndim == 1:
        return pyarrow.array(values)
    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), values.shape[1])


def _feature(values: NDArray[Any]) -> dict[str, Any]:
    return {"dtype": str(values.dtype), "shape": list(values.shape[1:]) or [1], "names": None}


def _statistics(values: NDArray[Any]) -> dict[str, Any]:
    x = values.reshape(len(values), -1).astype(np.float64)
    found = {"min": x.min(0), "max": x.max(0), "mean": x.mean(0), "std": x.std(0)}
    return {**{name: value.tolist() for name, value in found.items()}, "count": [len(x)]}


def _tasks(pyarrow: Any, task: str) -> Any:
    """The table of tasks, whose index in pandas is the sentence."""
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    table = pyarrow.table({"task_index": [0], "task": [task]})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})

"""Episodes as data: read from Minari's files, cut into windows, and their returns and statistics.

A data set is a folder as Minari (0.5) writes it with `data_format` "parquet" or "arrow": `data/metadata.json` with the
spaces, and `data/N/*.parquet` with the T + 1 rows of episode N, whose last one holds the final observation only.
`runtime.episodes` writes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces as gs
from numpy.typing import NDArray
from torch import Tensor

from foresight.data import trees
from foresight.data.trajectory import Tree, tree_map
from foresight.errors import UserError

FORMATS = ("parquet", "arrow")
VERSIONS = ("0.4", "0.5")  # of Minari, whose files have this layout
FLAT = 1e-6  # the deviation or the width up to which a dimension counts as constant
COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations")


class Window(NamedTuple):
    """K consecutive steps of one episode in each row `[B, K]`, padded with zeros on the left.

    `to_go` is the sum of the rewards from the step to the end of the whole episode, `time` the number of steps before
    it in its episode, `mask` 0 on padding.
    """

    obs: Tree
    action: Tensor
    reward: Tensor
    to_go: Tensor
    time: Tensor
    mask: Tensor


@dataclasses.dataclass(frozen=True)
class Episodes:
    """N episodes, one after the other: an episode of T actions has T + 1 rows, R rows in all.

    - `obs` `[R, ...]` (or a dict of such), `action` `[R, ...]`, `reward` `[R]`: action and reward are 0 in the last row
      of an episode;
    - `length` `[N]` int64: the number of actions T;
    - `terminated` `[N]` bool: false at a time limit.
    """

    obs: Tree
    action: Tensor
    reward: Tensor
    length: Tensor
    terminated: Tensor

    def __len__(self) -> int:
        """The number of episodes."""
        return len(self.length)

    @functools.cached_property
    def first(self) -> Tensor:
        """The first row of each episode, `[N]`."""
        return (self.length + 1).cumsum(0) - (self.length + 1)

    @functools.cached_property
    def owner(self) -> Tensor:
        """The episode of each of the S actions, `[S]`."""
        return torch.arange(len(self)).repeat_interleave(self.length)

    @functools.cached_property
    def rows(self) -> Tensor:
        """The row of each of the S actions, `[S]`."""
        return torch.arange(len(self.owner)) + self.owner

    @functools.cached_property
    def returns(self) -> Tensor:
        """The undiscounted return of each episode, `[N]`."""
        return self.to_go[self.first]

    @functools.cached_property
    def to_go(self) -> Tensor:
        """The sum of the rewards from each row to the end of its episode, `[R]`."""
        after = self.reward.double().cumsum(0)
        last = after[self.first + self.length].repeat_interleave(self.length + 1)
        return (last - after + self.reward).float()

    def windows(self, n: int, steps: int, generator: torch.Generator) -> Window:
        """`n` windows of `steps` steps that start at steps drawn uniformly from all S; see `window`."""
        return self.window(torch.randint(0, len(self.rows), (n,), generator=generator), steps)

    def window(self, start: Tensor, steps: int) -> Window:
        """The windows `[B, steps]` from the actions numbered `start` `[B]` on; short where an episode ends."""
        rows, time, real = self.window_rows(start, steps)
        action, reward, to_go = (_padded(x[rows], real) for x in (self.action, self.reward, self.to_go))
        obs = tree_map(lambda x: _padded(x[rows], real), self.obs)
        return Window(obs, action, reward, to_go, time, real.float())

    def window_rows(self, start: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of `window`, their numbers of steps in their episode, and whether they are real, `[B, steps]`.

        Rows of padding are 0.
        """
        owner = self.owner[start]
        begin = self.rows[start] - self.first[owner]
        count = (self.length[owner] - begin).clamp(max=steps)
        time = begin[:, None] + torch.arange(steps) - (steps - count)[:, None]
        real = time >= begin[:, None]
        return torch.where(real, self.first[owner][:, None] + time, 0), torch.where(real, time, 0), real

    def around(self, start: Tensor, offsets: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The rows `[B, K]` of the steps that are `offsets` (K whole numbers) after the actions numbered `start` `[B]`.

        Outside the episode they are those of its first or its last action; the second result `[B, K]` is 0 there and 1
        elsewhere.
        """
        owner = self.owner[start]
        first, last = self.first[owner][:, None], (self.first + self.length)[owner][:, None] - 1
        wanted = self.rows[start][:, None] + torch.tensor(offsets)
        real = (wanted >= first) & (wanted <= last)
        return wanted.clamp(first, last), real.float()

    def best(self, share: float) -> Episodes:
        """The episodes of the highest returns until they have at least this share of all steps.

        Source: %BC, Chen et al. 2021 (arXiv:2106.01345), §5.1.
        """
        order = self.returns.sort(descending=True, stable=True).indices
        before = self.length[order].cumsum(0) - self.length[order]
        return self.pick(order[before < share * int(self.length.sum())].sort().values)

    def highest(self, count: int) -> Episodes:
        """The `count` episodes of the highest returns, or all, in ascending order; of equal ones the later."""
        return self.pick(self.returns.sort(stable=True).indices[-count:])

    def pick(self, which: Tensor) -> Episodes:
        """The episodes numbered `which` (int64), in this order."""
        size = self.length[which] + 1
        inside = torch.arange(int(size.sum())) - (size.cumsum(0) - size).repeat_interleave(size)
        rows = self.first[which].repeat_interleave(size) + inside
        return Episodes(
            trees.pick(self.obs, rows), self.action[rows], self.reward[rows], size - 1, self.terminated[which]
        )


def statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation `[...]` of `values` `[S, ...]`; a constant dimension gets the deviation 1.

    Constant is what varies by less than `FLAT`, or by less than that share of its mean: rounding, not data.
    """
    values = values.double()
    mean, std = values.mean(0), values.std(0, correction=0)
    constant = std <= FLAT * mean.abs().clamp(min=1)
    return mean.float(), torch.where(constant, 1.0, std).float()


def episode(steps: Sequence[tuple[Tree, Tensor, Tensor]], last: Tree, terminated: bool) -> Episodes:
    """One episode, of its `steps` (obs, action, reward) and its `last` observation."""
    seen, action, reward = zip(*steps, strict=True)
    return Episodes(
        trees.stack([*seen, last], 0),
        torch.stack([*action, torch.zeros_like(action[0])]),
        torch.stack([*reward, torch.zeros(())]),
        torch.tensor([len(steps)]),
        torch.tensor([terminated]),
    )


def join(parts: Sequence[Episodes]) -> Episodes:
    """The episodes of all `parts`, as for a mixture of data sets."""
    return trees.join(parts)


def check_spaces(obs: gs.Space[Any], action: gs.Space[Any]) -> None:
    """Raise UserError unless episodes with these spaces can be stored: arrays, integers, and dicts of these."""
    if not _storable(obs):
        raise UserError(
            f"Episodes hold observations that are arrays, integers or dicts of these, not {obs}. "
            "Use an environment with such observations, or --env-options flatten=true when training the run."
        )
    if not isinstance(action, gs.Discrete | gs.Box | gs.MultiDiscrete | gs.MultiBinary):
        raise UserError(f"Episodes hold actions of Discrete, MultiDiscrete, MultiBinary and Box spaces, not {action}.")


def read(path: str | Path, obs: gs.Space[Any], action: gs.Space[Any]) -> Episodes:
    """The episodes in the folder `path`, which must have these spaces. Raises UserError for anything else."""
    folder, kind, count = check(path, obs, action)
    found = join([_episode(folder / str(i), kind, obs, action) for i in range(count)])
    written = document(folder / "metadata.json", path).get("action_space")
    if written is not None and (shift := _shift(json.loads(written), action)).any():
        found.action[found.rows] += torch.from_numpy(shift)
    return found


def require_values(found: Episodes, obs: gs.Space[Any], action: gs.Space[Any], path: str | Path) -> None:
    """Raise UserError, naming the row, for a number that is not finite or a choice that its space does not have."""
    acted = torch.zeros(len(found.reward), dtype=torch.bool)
    acted[found.rows] = True  # action and reward of the last row of an episode stand for nothing
    parts: dict[str, tuple[Tensor, gs.Space[Any] | None]] = {
        "action": (found.action, action),
        "reward": (found.reward, None),
    }
    if isinstance(obs, gs.Dict):
        parts |= {f"observation '{name}'": (found.obs[name], part) for name, part in obs.spaces.items()}
    else:
        parts["observation"] = found.obs, obs
    for name, (values, space) in parts.items():
        wrong = _outside(values, space) & (acted if name in ("action", "reward") else True)
        if wrong.any():
            row = int(wrong.nonzero()[0, 0])
            number = int((found.first <= row).sum()) - 1
            why = "not finite" if values.is_floating_point() else f"not in {space}"
            raise UserError(
                f"{path}, episode {number}, row {row - int(found.first[number])}: the {name} is "
                f"{values[row].tolist()}, which is {why}. Write the data again without it."
            )


def _outside(values: Tensor, space: gs.Space[Any] | None) -> Tensor:
    """Which rows `[R]` hold a number that is not finite, or a choice that `space` does not have."""
    if values.is_floating_point():
        return ~values.flatten(1).isfinite().all(1) if values.dim() > 1 else ~values.isfinite()
    if isinstance(space, gs.Discrete):
        return (values < int(space.start)) | (values >= int(space.start) + int(space.n))
    if isinstance(space, gs.MultiDiscrete):
        low, count = torch.as_tensor(space.start), torch.as_tensor(space.nvec)
        return ((values < low) | (values >= low + count)).flatten(1).any(1)
    return torch.zeros(len(values), dtype=torch.bool)


def check(path: str | Path, obs: gs.Space[Any], action: gs.Space[Any]) -> tuple[Path, str, int]:
    """Where the episodes in `path` are, their format and count. Raises UserError unless they have these spaces."""
    folder = Path(path).expanduser()
    folder = folder / "data" if (folder / "data").is_dir() else folder
    if not (folder / "metadata.json").is_file():
        raise UserError(f"There are no episodes in {path}. {how_to_write(path)}")
    metadata = document(folder / "metadata.json", path)
    kind = metadata.get("data_format", "hdf5")
    if kind not in FORMATS:
        raise UserError(f"The episodes in {path} are in the format '{kind}'. Minari can write them as: parquet, arrow.")
    named = metadata.get("minari_version", VERSIONS[-1])
    version = re.search(r"\d+\.\d+", str(named))
    if version is None or version[0] not in VERSIONS:
        which = "name no version of Minari" if named is None else f"are of Minari '{named}'"
        raise UserError(
            f"The episodes in {path} {which}, whose layout is not known. "
            f"Known are versions {' and '.join(VERSIONS)}: write the data set again with one of them."
        )
    check_spaces(obs, action)
    for name, space in (("observation_space", obs), ("action_space", action)):
        found = metadata.get(name)
        if found is None:
            continue
        start = {"start": None} if space is action else {}  # `read` counts actions from the environment's
        try:
            own = json.loads(found)
            differs = _shape(own | start) != _shape(json.loads(describe(space)) | start)
            moved = not differs and space is action and _moved(own, action)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise incomplete(path) from error
        if differs:
            raise UserError(
                f"The {name} of {path} is {str(found)[:200]}, but the environment's is {space}. Use its own data."
            )
        if moved:
            raise UserError(
                f"The actions of {path} are from {str(own['low'])[:80]} to {str(own['high'])[:80]}, but the "
                f"environment's are those of {space}. Train with the --env-options of the recording, such as "
                "rescale_action=true."
            )
    count = metadata.get("total_episodes", 0)
    if not isinstance(count, int) or count < 0:
        raise incomplete(path)
    if not count:
        raise UserError(f"{path} holds no episode.")
    return folder, kind, count


def document(file: Path, path: str | Path) -> dict[str, Any]:
    """The JSON object in `file`, which belongs to the data set `path`. Raises UserError if it is damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise incomplete(path) from error
    if not isinstance(found, dict):
        raise incomplete(path)
    return found


def how_to_write(path: str | Path) -> str:
    """The advice for data that are missing: the two commands that write them to `path`."""
    return (
        f"Write some with a run: foresight data episodes RUN --episodes 100 --out {path}, or, where an environment has "
        f"an expert, with it: foresight data episodes --env ENV --episodes 100 --out {path}"
    )


def incomplete(path: str | Path) -> UserError:
    """The error for a data set whose files are cut short or missing."""
    return UserError(f"{path} is not a complete data set: copy or write it again.")


def describe(space: gs.Space[Any]) -> str:
    """A space as Minari writes it into `metadata.json`."""
    if isinstance(space, gs.Dict):
        return json.dumps({"type": "Dict", "subspaces": {k: json.loads(describe(v)) for k, v in space.items()}})
    if isinstance(space, gs.Discrete):
        return json.dumps({"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)})
    if isinstance(space, gs.Box):
        low, high = space.low.tolist(), space.high.tolist()
        return json.dumps(
            {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), "low": low, "high": high}
        )
    if isinstance(space, gs.MultiDiscrete):
        counts, start = space.nvec.tolist(), space.start.tolist()
        return json.dumps({"type": "MultiDiscrete", "dtype": str(space.dtype), "nvec": counts, "start": start})
    shape = [int(n) for n in space.shape or ()]
    return json.dumps({"type": type(space).__name__, "n": shape[0] if len(shape) == 1 else shape})


def table(episodes: Episodes, number: int) -> Any:
    """The T + 1 rows of one episode as a `pyarrow.Table` with Minari's columns."""
    pyarrow = importlib.import_module("pyarrow")
    begin, count = int(episodes.first[number]), int(episodes.length[number])
    rows, flags = slice(begin, begin + count + 1), np.zeros((2, count + 1), dtype=bool)
    flags[0 if episodes.terminated[number] else 1, count - 1] = True
    arrays = [_column(pyarrow, tree_map(lambda x: x[rows], values)) for values in (episodes.obs, episodes.action)]
    rest = (episodes.reward[rows].double().numpy(), *flags)
    return pyarrow.table([*arrays, *map(pyarrow.array, rest)], names=list(COLUMNS))


def _storable(space: gs.Space[Any]) -> bool:
    if isinstance(space, gs.Dict):  # a MultiBinary there is a mask
        return all(isinstance(part, gs.Discrete | gs.Box | gs.MultiBinary) for part in space.spaces.values())
    return isinstance(space, gs.Discrete | gs.Box)


def _column(pyarrow: Any, values: Tree) -> Any:
    """Values `[T + 1, ...]` as a column: numbers, lists of numbers, or a struct of columns."""
    if isinstance(values, dict):
        return pyarrow.StructArray.from_arrays([_column(pyarrow, x) for x in values.values()], names=list(values))
    if values.dim() == 1:
        return pyarrow.array(values.numpy())
    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.numpy().reshape(-1)), values[0].numel())


def _episode(folder: Path, kind: str, obs: gs.Space[Any], action: gs.Space[Any]) -> Episodes:
    dataset = importlib.import_module("pyarrow.dataset")
    try:
        found = dataset.dataset(str(folder), format=kind, ignore_prefixes=["_", ".", "metadata.json"]).to_table()
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read the episode in {folder}: {error}") from error
    if missing := [name for name in COLUMNS if name not in found.column_names and name != "rewards"]:
        raise UserError(
            f"The episode in {folder} has no column '{missing[0]}'. It has: {', '.join(found.column_names)}."
        )
    columns = {name: found[name].combine_chunks() for name in COLUMNS if name in found.column_names}
    count = len(found) - 1
    if count < 1 or not bool(columns["terminations"][count - 1].as_py() or columns["truncations"][count - 1].as_py()):
        raise UserError(f"The episode in {folder} has {count} steps and no end: record it again.")
    reward = torch.zeros(count + 1)  # of demonstrations without rewards
    if "rewards" in columns and columns["rewards"].null_count < count:
        reward = torch.tensor(columns["rewards"].to_numpy(zero_copy_only=False), dtype=torch.float32)
    return Episodes(
        _tensor(columns["observations"], obs),
        _tensor(columns["actions"], action),
        torch.cat([reward[:-1], torch.zeros(1)]),
        torch.tensor([count]),
        torch.tensor([bool(columns["terminations"][count - 1].as_py())]),
    )


def _tensor(column: Any, space: gs.Space[Any]) -> Tree:
    """A column as float32, uint8 or int64 `[T + 1, ...]`."""
    if isinstance(space, gs.Dict):
        with fitting(space):
            parts = {name: column.field(name) for name in space.spaces}
        return {name: _tensor(parts[name], part) for name, part in space.items()}
    kind, form = np.dtype(space.dtype), importlib.import_module("pyarrow").types
    with fitting(space):
        if form.is_binary(column.type):
            values = _pictures(column)
        else:  # lists also where the space is one number
            values = (column if form.is_primitive(column.type) else column.flatten()).to_numpy(zero_copy_only=False)
        wanted = torch.float32 if kind.kind == "f" else torch.uint8 if kind == np.uint8 else torch.int64
        if not wanted.is_floating_point:
            whole(values)
        return torch.tensor(values, dtype=wanted).view(len(column), *(space.shape or ()))


@contextlib.contextmanager
def fitting(space: gs.Space[Any]) -> Iterator[None]:
    """Errors of values that are turned into a tensor for `space` as a UserError."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError) as error:
        raise UserError(f"The data do not fit {space}: {error}. Write them again with this environment.") from error


def whole(values: NDArray[Any]) -> None:
    """Raise ValueError for numbers that are not whole, which a cast would round."""
    if values.dtype.kind == "f" and (values != np.floor(values)).any():
        raise ValueError("there are numbers that are not whole")


def _pictures(column: Any) -> np.ndarray:
    """Images in files' bytes, as Minari stores those of at least 32 pixels a side by default, `[T + 1, H, W, ...]`."""
    open_image = importlib.import_module("PIL.Image").open
    return np.stack([np.asarray(open_image(io.BytesIO(row.as_py()))) for row in column])


def _moved(written: dict[str, Any], action: gs.Space[Any]) -> bool:
    """Whether finite bounds of recorded actions are others than the environment's: the numbers mean other actions.

    Raises ValueError for bounds, and for first choices, of another shape.
    """
    _shift(written, action)
    if not isinstance(action, gs.Box) or "low" not in written or "high" not in written:
        return False
    for bound, own in ((action.low, written["low"]), (action.high, written["high"])):
        found = np.broadcast_to(np.asarray(own, np.float64), bound.shape)
        both = np.isfinite(found) & np.isfinite(bound)
        if not np.allclose(found[both], bound[both], rtol=1e-4, atol=1e-6):
            return True
    return False


def _shift(written: dict[str, Any], action: gs.Space[Any]) -> NDArray[np.int64]:
    """What recorded choices are to be raised by: the library counts from 0, and Minari from the space's `start`."""
    wanted = np.asarray(getattr(action, "start", 0), np.int64)
    own = written.get("start")
    return np.asarray(wanted - (wanted if own is None else np.asarray(own, np.int64).reshape(wanted.shape)))


def _shape(space: dict[str, Any]) -> tuple[Any, ...]:
    """What must agree between the data and the environment: bounds of observations may differ."""
    if space["type"] == "Dict":
        return space["type"], {name: _shape(part) for name, part in space["subspaces"].items()}
    if space["type"].startswith("Multi"):
        counts = space.get("nvec", space.get("n"))
        start = space.get("start")
        return space["type"], [counts] if isinstance(counts, int) else counts, start if np.any(start) else None
    return space["type"], space.get("shape"), space.get("n"), space.get("start")


def _padded(values: Tensor, real: Tensor) -> Tensor:
    return values * real.view(*real.shape, *[1] * (values.dim() - 2)).to(values.dtype)

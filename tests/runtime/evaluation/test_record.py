from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from foresight.envs.base import Feedback
from foresight.errors import UserError
from foresight.runtime.evaluation import record


def frames(count: int = 5, height: int = 33, width: int = 21) -> Iterator[record.Frame]:
    for i in range(count):
        frame = np.zeros((height, width, 3), dtype=np.uint8)
        frame[:, : 4 * (i + 1)] = (255, 0, 0)  # a bar that grows
        yield frame


class Countdown:
    """An environment that ends after the action 1 was taken `length` times."""

    name = "Countdown"

    def __init__(self, length: int = 4, drawn: bool = True) -> None:
        self.left = self.length = length
        self.drawn = drawn

    def reset(self, seed: int) -> torch.Tensor:
        self.left = self.length
        return torch.zeros(1, 1)

    def step(self, action: torch.Tensor) -> Feedback:
        self.left -= int(action[0])
        cut = torch.tensor([float(self.left == 0)])
        obs = torch.zeros(1, 1)
        return Feedback(obs, torch.ones(1), 1 - cut, cut, torch.ones(1), obs, {})

    def render(self) -> np.ndarray | None:
        return np.full((8, 8, 3), 50 * self.left % 256, dtype=np.uint8) if self.drawn else None


def always_one(state: object, obs: torch.Tensor, carry: int | None = None, explore: bool = False) -> tuple:
    return torch.ones(1, dtype=torch.int64), {}, (carry or 0) + 1


def test_a_gif_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.gif"
    assert record.write(path, frames(), fps=10) == 5
    with Image.open(path) as image:
        assert image.format == "GIF" and image.size == (21, 33)
        assert image.n_frames == 5 and image.info["duration"] == 100
        reds = []
        for i in range(image.n_frames):
            image.seek(i)
            reds.append(int((np.asarray(image.convert("RGB"))[0, :, 0] > 128).sum()))
    assert reds == [4, 8, 12, 16, 20]


def test_an_mp4_with_odd_sides_can_be_read_back(tmp_path: Path) -> None:
    import imageio.v2 as imageio

    path = tmp_path / "out.mp4"
    assert record.write(path, frames(), fps=10) == 5
    with imageio.get_reader(path) as reader:
        read = [np.asarray(frame) for frame in reader]
    assert len(read) == 5 and read[0].shape[:2] == (34, 22)
    assert int((read[2][0, :, 0] > 128).sum()) == pytest.approx(12, abs=2)


def test_an_episode_is_drawn_from_its_start_to_its_end() -> None:
    module = types.ModuleType("agent")
    module.act = always_one  # type: ignore[attr-defined]
    drawn = list(record.episode(module, None, Countdown()))
    assert [int(frame[0, 0, 0]) for frame in drawn] == [200, 150, 100, 50]
    assert len(list(record.episode(module, None, Countdown(1000), limit=7))) == 7


def test_an_episode_is_played_on_the_device_of_the_network() -> None:
    seen = []

    def act(state: object, obs: torch.Tensor, carry: None = None, explore: bool = False) -> tuple:
        seen.append(obs.device.type)
        elsewhere = types.SimpleNamespace(cpu=lambda: torch.ones(1, dtype=torch.int64))  # unreadable on its device
        return elsewhere, {}, carry

    module, state = types.ModuleType("agent"), types.SimpleNamespace(network=torch.nn.Linear(1, 1, device="meta"))
    module.act = act  # type: ignore[attr-defined]
    assert len(list(record.episode(module, state, Countdown(2)))) == 2
    assert seen == ["meta", "meta"]


def test_what_cannot_be_plotted_is_reported(tmp_path: Path) -> None:
    module = types.ModuleType("agent")
    module.act = always_one  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="'Countdown' cannot be recorded"):
        record.write(tmp_path / "x.gif", record.episode(module, None, Countdown(drawn=False)))
    with pytest.raises(UserError, match="nothing to record"):
        record.write(tmp_path / "x.gif", iter(()))
    with pytest.raises(UserError, match=r"must end in \.mp4 or \.gif"):
        record.write(tmp_path / "x.avi", frames())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write"):
        record.write(tmp_path / "file" / "x.gif", frames())


def test_the_window_shows_every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert record.window(frames(3), fps=1000) == 3

"""Open-loop predictions: of a model whose errors are known, and as videos and pictures."""

from __future__ import annotations

import dataclasses
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces as gs

from foresight.algorithms.world import lewm
from foresight.data.trajectory import Trajectory
from foresight.errors import UserError
from foresight.runtime.evaluation import open_loop
from tests.algorithms.world.line import LEWM, line
from tests.sabotage import change, sabotaged_by
from tests.training.small_model import END, GAMMA, Line, Picture

ACTIONS = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 0, 1]])


def truth(images: bool = False) -> Trajectory:
    """Two sequences on the line; an episode ends at 3, where the next one starts at 0."""
    obs, reward, cut = (torch.zeros(2, 6) for _ in range(3))
    for i in range(2):
        place = 0.0
        for t in range(6):
            obs[i, t] = place
            place += float(ACTIONS[i, t])
            reward[i, t], cut[i, t] = place, float(place == END)
            place = 0.0 if place == END else place
    seen = obs.unsqueeze(-1)
    if images:
        seen = (50 * obs).view(2, 6, 1, 1, 1).expand(-1, -1, 32, 32, 3).to(torch.uint8)
    return Trajectory(seen, ACTIONS, reward, 1 - cut, cut)


def predicted(model: Line, context: int = 2, images: bool = False) -> open_loop.OpenLoop:
    state: Any = types.SimpleNamespace(model=model, config=types.SimpleNamespace(gamma=GAMMA))
    return open_loop.predict(state, gs.Discrete(2), truth(images), context, torch.Generator())


@sabotaged_by("foresight.runtime.evaluation.open_loop.predict", change("context", lambda n: n - 1))
@sabotaged_by("tests.training.small_model.Line.advance", change("action", lambda x: 1 - x))
def test_a_perfect_model_has_no_error() -> None:
    found = predicted(Line())
    assert found.valid.tolist() == [[1, 1, 1, 1, 1, 0], [1] * 6]  # the first one ends with its fifth action
    assert found.reached.tolist() == [[1] * 6, [1] * 6]
    assert found.predicted_reward[0].tolist() == [0, 0, 1, 2, 2, 3] == found.reward[0].tolist()
    assert found.predicted_discount[0].tolist() == [0, 0, 1, 1, 1, 0] == found.discount[0].tolist()
    assert found.errors() == {"observation": [0.0] * 5, "reward": [0.0] * 5, "continuation": [0.0] * 5}


def test_errors_grow_with_the_horizon() -> None:
    """A model that moves by 3 instead of 1 is off by 2 for every move."""
    found = predicted(Line(3.0))
    assert found.prediction[:, :2].tolist() == found.truth[:, :2].tolist()
    # moves so far: 0 1 2 2 (3) in the first, 0 0 0 1 1 in the second
    assert found.errors()["observation"] == pytest.approx([0, 4 / 2, 16 / 2, (16 + 4) / 2, 4])
    assert found.errors()["reward"] == pytest.approx([0, 2 / 2, 4 / 2, (4 + 2) / 2, (6 + 2) / 2])


@sabotaged_by(
    "foresight.runtime.evaluation.open_loop.frames",
    lambda f: lambda found: f(__import__("dataclasses").replace(found, context=found.context - 1)),
)
def test_a_video_shows_truth_prediction_and_error() -> None:
    shown = list(open_loop.frames(predicted(Picture(2.0), images=True)))
    side = 32 * open_loop.SCALE + 2 * open_loop.BORDER
    assert [frame.shape for frame in shown] == [(3 * side, 2 * side, 3)] * 6
    borders = [tuple(frame[0, 0].tolist()) for frame in shown]
    assert borders == [open_loop.SEEN] * 2 + [open_loop.IMAGINED] * 4
    middle = [side * row + side // 2 for row in range(3)]
    # the second sequence is the longer one, so it is on the left: it moves with its fourth action
    assert [[int(frame[y, side // 2, 0]) for y in middle] for frame in shown][3:] == [
        [0, 0, 0],
        [50, 100, 50],
        [50, 100, 50],
    ]


def test_numbers_are_drawn_and_make_no_video(tmp_path: Path) -> None:
    found = predicted(Line(2.0))
    open_loop.draw({"run": found}, tmp_path / "errors.png")
    assert (tmp_path / "errors.png").stat().st_size > 5_000
    for model in (Line(2.0), Blind(2.0)):
        agent: Any = types.SimpleNamespace(state=types.SimpleNamespace(model=model))
        with pytest.raises(UserError, match="Only predicted images make a video"):
            open_loop.require_images(agent)


class Blind(Line):
    """Without a decoder."""

    decode: Any = property(lambda self: self.missing)  # hasattr is False


class Blocks(Blind):
    """A step is a block of two actions; nothing but the place is predicted."""

    block = 2

    def advance(self, state: dict[str, torch.Tensor], action: torch.Tensor, generator: Any) -> Any:
        return {"place": state["place"] + self.by * action[:, 1::2].sum(1, keepdim=True)}, None, None


@sabotaged_by("foresight.runtime.evaluation.open_loop.predict", change("context", lambda n: n - 1))
@sabotaged_by("tests.training.small_model.Line.advance", change("action", lambda x: 1 - x))
def test_a_model_without_a_decoder_has_the_error_of_its_latent_relative_to_that_of_no_change() -> None:
    """Off by `step - 1` for every move, where no change is off by 1."""
    for step, error in ((1.0, 0), (0.0, 1), (3.0, 4)):
        found = predicted(Blind(step)).errors()
        assert set(found) == {"reward", "continuation", "latent"}
        assert found["latent"] == pytest.approx([math.nan, *[error] * 4], nan_ok=True)


@sabotaged_by(
    "foresight.runtime.evaluation.open_loop._blocks", change("rows", lambda x: x.replace(obs=x.obs.roll(1, 1)))
)
def test_a_step_of_a_model_of_blocks_is_a_block_of_actions() -> None:
    for step, error in ((1.0, 0), (3.0, 4)):
        found = predicted(Blocks(step), context=1)
        assert found.errors() == {"latent": pytest.approx([math.nan, error, error], nan_ok=True)}
        assert found.reward.tolist() == [[0, 1, 4], [0, 0, 1]] and found.valid.tolist() == [[1, 1, 1]] * 2


def test_what_lewm_predicts_is_what_it_plans_with(tmp_path: Path) -> None:
    state, seen = lewm.build(LEWM, line().spaces), []
    imagine = state.model.advance
    state.model.advance = lambda s, a, g=None: seen.append((s["latent"], a)) or imagine(s, a, g)
    state.config = dataclasses.replace(LEWM, candidates=8, iterations=1)
    found = open_loop.observe_and_predict(lewm, state, line(), 0, horizon=3)
    (first, *_), blocks = seen[-3], torch.stack([a for _, a in seen[-3:]], 1)
    still = (first - state.model.imagine(first, blocks)).square().sum(-1)
    assert found.latent.shape == (16, 4) and found.context == 1 and blocks.shape == (16, 3, 2)
    assert found.latent[:, 0].tolist() == [0.0] * 16 and still.min() > 0
    assert set(found.errors()) == {"latent"} and found.errors()["latent"][1] > 0
    open_loop.draw({"run": found}, tmp_path / "errors.png")
    assert (tmp_path / "errors.png").stat().st_size > 3_000

"""Errands: walls and locks hold, splits share nothing, failures are injected, and the script knows what it does."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from foresight.envs.control.errands import glide, picture, points, rules, script
from foresight.envs.control.errands.rules import CELLS, HELD_GRAPHS, HELD_PAIRS, MARGIN, SPLITS, Errand, center, room_of
from foresight.envs.make import make
from foresight.errors import UserError
from tests.sabotage import change, sabotaged_by


def locked(split: str = "train") -> Errand:
    """An errand whose locked door is on the way of the disc to a room beside it."""
    return next(one for one in (Errand(seed, split) for seed in range(200)) if one.lock is not None)


def before_door(errand: Errand, door: int) -> tuple[int, float]:
    """Put the disc at rest in the room `door`, before that door; returns the axis through it, and the direction."""
    room = door
    x, y = center((errand.rows[door], errand.rows[door]))
    errand.place = [0.4 if room in (0, 3) else 0.6, y] if door in (0, 2) else [x, 0.4 if room in (0, 1) else 0.6]
    errand.velocity = [0.0, 0.0]
    assert room_of(errand.place) == room
    axis = 0 if door in (0, 2) else 1
    return axis, 1.0 if errand.place[axis] < 0.5 else -1.0


def push(errand: Errand, axis: int, side: float, steps: int = 15) -> set[str]:
    """Full thrust along an axis; returns the colors of locked doors that were touched."""
    touched = set()
    for _ in range(steps):
        errand.step(*((side, 0.0) if axis == 0 else (0.0, side)), script.KEEP)
        touched.add(errand.sense().touched)
    return touched - {""}


@sabotaged_by("foresight.envs.control.errands.rules.Errand._slide", lambda f: lambda self, axis: _ghost(self, axis))
@sabotaged_by("foresight.envs.control.errands.rules.Errand.closed", lambda f: lambda self, door: False)
def test_the_disc_changes_rooms_only_through_open_doors() -> None:
    crossed = 0
    for seed in range(12):
        errand, draw = Errand(seed), random.Random(seed)
        for t in range(300):
            if t % 12 == 0:
                thrust = [draw.uniform(-2, 2) for _ in range(2)]
            before = room_of(errand.place)
            errand.step(*thrust, 0.0)
            x, y = errand.place
            assert MARGIN <= x <= 1 - MARGIN and MARGIN <= y <= 1 - MARGIN
            inside = [axis for axis in (0, 1) if abs(errand.place[axis] - 0.5) < MARGIN]
            for axis in inside:  # in a wall: only where its door is, and that is open
                door = rules.door_in(axis, errand.place[1 - axis])
                assert door != errand.wall and (door != errand.lock or errand.opened)
                assert abs(errand.place[1 - axis] - (errand.rows[door] + 0.5) / CELLS) <= rules.OPENING + 1e-9
            crossed += room_of(errand.place) != before
    assert crossed > 5


def _ghost(errand: Errand, axis: int) -> None:
    errand.place[axis] = min(max(errand.place[axis] + errand.velocity[axis], MARGIN), 1 - MARGIN)


@sabotaged_by("foresight.envs.control.errands.rules.Errand._touch", lambda f: lambda e: setattr(e, "opened", True))
@sabotaged_by("foresight.envs.control.errands.rules.Errand._touch", lambda f: lambda self: None)
def test_a_locked_door_opens_with_its_key_alone() -> None:
    errand = locked()
    door = errand.lock
    assert door is not None
    axis, side = before_door(errand, door)
    assert (picture.draw(errand)[picture._doorway(door, errand.rows[door])] == picture.RGB[errand.color]).all()
    assert push(errand, axis, side) == {errand.color} and not errand.opened and room_of(errand.place) == door
    key = next(thing for thing in errand.things if thing.name == f"{errand.color} key")
    for thing in errand.things:
        before_door(errand, door)
        if errand.hand is not None:
            errand.hand.cell = (1, 1)
        errand.hand, thing.cell = thing, None
        errand.opened = False
        push(errand, axis, side)
        assert errand.opened == (thing is key) == (room_of(errand.place) != door)


def test_splits_share_no_instruction_and_no_layout() -> None:
    seen = {split: [Errand(seed, split) for seed in range(150)] for split in SPLITS}
    for split, found in seen.items():
        new_words, new_rooms = split in ("instructions", "held_out"), split in ("layouts", "held_out")
        for errand in found:
            assert (errand.things[0].name in HELD_PAIRS) == new_words
            assert ((errand.wall, errand.lock) in HELD_GRAPHS) == new_rooms
            if not new_words:
                assert not {thing.name for thing in errand.things} & set(HELD_PAIRS)
    assert not {e.instruction for e in seen["train"]} & {e.instruction for e in seen["held_out"]}
    task = make("errands", "text", size=500)
    assert not any(pair in one.prompt for one in task.train for pair in HELD_PAIRS)
    assert all(any(pair in one.prompt for pair in HELD_PAIRS) for one in task.test)


def test_equal_seeds_are_equal_to_the_pixel_and_others_differ() -> None:
    pictures = [picture.draw(Errand(seed)) for seed in (3, 3, 4)]
    assert pictures[0].shape == (48, 48, 3) and (pictures[0] == pictures[1]).all()
    assert (pictures[0] != pictures[2]).any()
    errand = Errand(3)
    for thing in errand.things:  # each object is seen in its cell, in its color
        assert thing.cell is not None
        column, row = (4 * i for i in thing.cell)
        patch = pictures[0][row : row + 4, column : column + 4]
        assert ((patch == picture.RGB[thing.color]).all(-1) == picture.GLYPHS[thing.kind]).all()


def test_an_object_slips_once_and_lies_where_it_can_be_reached() -> None:
    for seed in range(20):
        errand, sure = Errand(seed), Errand(seed, failures=1.0)
        for one in (errand, sure):
            one.place, one.velocity = list(center(one.things[0].cell)), [0.0, 0.0]
            lost = []
            for _ in range(rules.SLIP[1] + 2):
                one.step(0.0, 0.0, script.CLOSE if one.hand is None and not lost else script.KEEP)
                lost += [one.sense().slipped] * bool(one.sense().slipped)
            assert lost == ([one.things[0].name] if one is sure else [])
        cell = sure.things[0].cell
        assert sure.injected == 1 and cell is not None and room_of(center(cell)) in sure.reachable()
    with pytest.raises(UserError, match="rate of failures"):
        Errand(0, failures=1.5)
    with pytest.raises(UserError, match="Unknown split"):
        Errand(0, "test")


@pytest.mark.parametrize(
    ("hand", "locked", "plan"),
    [
        ("", "", "pick up the red key; bring it to the cyan box"),
        ("red key", "", "bring it to the cyan box"),
        ("red key", "blue", "drop it; pick up the blue key; open the blue door; drop it; pick up the red key; "
         "bring it to the cyan box"),
        ("blue key", "blue", "open the blue door; drop it; pick up the red key; bring it to the cyan box"),
        ("red key", "red", "open the red door; bring it to the cyan box"),
    ],
)  # fmt: skip
def test_plans(hand: str, locked: str, plan: str) -> None:
    assert script.plan("bring the red key to the cyan box", hand, locked) == script.read(plan)
    task = make("errands", "text", size=20)
    assert task.grade(task.train, [str(one.answer) for one in task.train]) == [1.0] * 20
    assert task.grade(task.train[:1], ["pick up the key"]) == [0.0]


@sabotaged_by("foresight.envs.control.errands.points.Points.expert", lambda f: lambda self, g: f(self, g).flip(-1))
def test_points_are_scored_and_a_saved_state_continues() -> None:
    env = make("ErrandPoints-v0", num_envs=8, held_out=1)
    env.reset(0)
    total, saved = torch.zeros(8), None
    for t in range(points.SCENES):
        scenes = [points.scene(seed, "held_out") for seed in env._rules.seeds.tolist()]
        wanted = [script.point(*one) for one in scenes]
        torch.testing.assert_close(env.expert()[:, 2:], torch.tensor(wanted))
        for (errand, text), (x, y, *_) in zip(scenes, env.expert().tolist(), strict=True):
            for thing in errand.things:
                if text in (f"pick up the {thing.name}", f"bring it to the {thing.name}"):
                    assert (x, y) == pytest.approx(center(thing.cell))
        if t == 10:
            saved = copy.deepcopy(env.state_dict())
        feedback = env.step(env.expert())
        total += feedback.reward
    assert len({tuple(one) for one in wanted}) > 1  # scenes differ
    assert feedback.cut.all() and total == pytest.approx([1.0] * 8)
    other = make("ErrandPoints-v0", num_envs=8, held_out=1)
    other.load_state_dict(saved)
    other.step(other.expert())
    env.load_state_dict(saved)
    env.step(env.expert())
    assert (other._rules.seeds == env._rules.seeds).all()
    env.reset(1)
    wrong = env.step(env.expert() + torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0])).reward
    assert not wrong.any()


@sabotaged_by("foresight.envs.control.errands.glide.Glide.move", change("action", lambda x: x / 2))
def test_glide_moves_as_the_disc_of_an_errand() -> None:
    env = make("Glide-v0", num_envs=1)
    env.reset(0)
    errand = Errand(0)
    errand.place, errand.velocity = [0.25, 0.25], [0.0, 0.0]
    env._rules.velocity = torch.zeros(1, 2)
    start = env._rules.offset + torch.tensor([errand.place])
    for thrust in ((1.0, -0.5), (-0.3, 1.0), (-2.0, 0.2)):
        env.step(torch.tensor([thrust]))
        errand.step(*thrust, 0.0)
        torch.testing.assert_close(start - env._rules.offset, torch.tensor([errand.place]))
        torch.testing.assert_close(env._rules.velocity, torch.tensor([errand.velocity]))


def test_the_script_gets_to_the_point_of_glide_and_stops() -> None:
    env = make("Glide-v0", num_envs=64)
    obs = env.reset(0)
    for _ in range(39):
        offset, velocity = obs[:, :2] * glide.FAR, obs[:, 2:] * rules.SPEED
        thrust = [script.steer(tuple(d), tuple(v)) for d, v in zip(offset.tolist(), velocity.tolist(), strict=True)]
        feedback = env.step(torch.tensor(thrust))
        obs = feedback.obs
    assert feedback.reward.min() > 0.7

"""The scripted controller of Push-T: it searches for pushes in a model of the contact, and carries out the best one.

The block of gym-pusht moves only while it is pushed, and without friction at the finger. So a contact at r from its
center of mass with the normal n moves it by -n J / m and turns it by (r × -n) J / I, where J is what ends the overlap.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import torch
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

SIZE = 512.0  # side of the table
GOAL = np.array([256.0, 256.0, math.pi / 4])  # pose (x, y, angle) of the goal
CENTER = np.array([0.0, 45.0])  # the center of mass, from the origin of the block
MASS, INERTIA = 1.0, 3000.0
FINGER = 15.0  # its radius
OUTLINE = np.array(
    [(-60, 0), (60, 0), (60, 30), (15, 30), (15, 120), (-15, 120), (-15, 30), (-60, 30)], dtype=np.float64
)  # of the T, counterclockwise in its own coordinates
EDGES = np.roll(OUTLINE, -1, 0) - OUTLINE
LENGTHS = np.linalg.norm(EDGES, axis=1)
OUTWARD = np.stack([EDGES[:, 1], -EDGES[:, 0]], 1) / LENGTHS[:, None]
SPACING = 12.0  # between the contacts that are tried
SLANTS = (-0.4, 0.0, 0.4)  # radians between a push and the normal
GRAIN, FARTHEST = 3.0, 50  # of a simulated push: its steps' length, and their number
GAP = 6.0  # between finger and block before a push
MARGIN = 10.0  # kept from the block on the way
WALL = 18.0  # kept from the border
TRAVEL, PUSH = 22.0, 10.0  # how far the target moves per action on the way, and in a push
CELL = 16  # of the grid that ways are searched in
NEAR = 30.0  # of the goal, by the distance of the corners: pushes are simulated in smaller steps, and ways count less
EFFORT = 0.05  # the price of a unit of the finger's way, in units of distance of the block


class Pusher:
    """One episode: the way to the next push, and what is left of it."""

    def __init__(self) -> None:
        self._plan: list[Doubles] = []

    def act(self, pose: Doubles, finger: Doubles, generator: torch.Generator) -> Doubles:
        """The next target `[2]` of the finger, at `finger` `[2]`; the block is at `pose` `[3]`."""
        if not self._plan:
            self._plan = plan(pose, finger, generator)
        return self._plan.pop(0)


def plan(pose: Doubles, finger: Doubles, generator: torch.Generator) -> list[Doubles]:
    """The targets that lead to the best push and through it."""
    start, direction = contacts(pose)
    inside = ((start > WALL) & (start < SIZE - WALL)).all(1)
    ways = Ways(pose, finger)
    cost_of_way = ways.costs(start)
    usable = inside & np.isfinite(cost_of_way)
    if not usable.any():
        return [finger + (SIZE / 2 - finger) * 0.2]
    start, direction, cost_of_way = start[usable], direction[usable], cost_of_way[usable]
    grain = GRAIN if distance(pose[None])[0] > NEAR else GRAIN / 3
    poses = push(pose, start, direction, grain)  # [N, H, 3]
    after = distance(poses)
    now, lengths = float(distance(pose[None])[0]), grain * np.arange(1, FARTHEST + 1)
    value = after + EFFORT * min(now / NEAR, 1) * (cost_of_way[:, None] + lengths)
    end = start[:, None] + direction[:, None] * lengths[:, None]
    value = np.where(((end > WALL) & (end < SIZE - WALL)).all(-1), value, np.inf)
    best, steps = value.min(1), value.argmin(1)
    order = best.argsort()
    close = order[best[order] <= best[order[0]] + 0.05 * now]
    chosen = int(close[int(torch.randint(0, len(close), (), generator=generator))])
    way = ways.to(start[chosen])
    length = grain * (int(steps[chosen]) + 1)
    count = max(1, math.ceil(length / PUSH))
    push_targets = [start[chosen] + direction[chosen] * length * (i + 1) / count for i in range(count)]
    return [*follow(finger, way), start[chosen], *push_targets, push_targets[-1], push_targets[-1]]


def contacts(pose: Doubles) -> tuple[Doubles, Doubles]:
    """Places of the finger just off the block, and directions to push in, `[N, 2]` each."""
    places, directions = [], []
    for corner, edge, length, outward in zip(OUTLINE, EDGES, LENGTHS, OUTWARD, strict=True):
        count = max(1, round(length / SPACING))
        for share in (np.arange(count) + 0.5) / count:
            place = corner + share * edge + outward * (FINGER + GAP)
            if distance_to_block(np.array([0.0, 0, 0]), place[None])[0] < FINGER + GAP - 1e-6:
                continue  # in the corner of the T
            for slant in SLANTS:
                places.append(place)
                directions.append(-rotate(outward[None], slant)[0])
    return to_world(pose, np.array(places)), rotate(np.array(directions), pose[2])


def push(pose: Doubles, start: Doubles, direction: Doubles, grain: float) -> Doubles:
    """The poses `[N, H, 3]` of the block along pushes in straight lines from `start` `[N, 2]`."""
    poses, finger, found = np.tile(pose, (len(start), 1)), start.copy(), []
    for _ in range(FARTHEST):
        finger = finger + grain * direction
        for _ in range(2):
            poses = separate(poses, finger)
        found.append(poses)
    return np.stack(found, 1)


def separate(poses: Doubles, finger: Doubles) -> Doubles:
    """The poses `[N, 3]` after the block has made room for the finger `[N, 2]`."""
    local = to_block(poses, finger)
    gap, nearest = nearest_point(local)
    away = local - nearest
    normal = away / np.maximum(np.linalg.norm(away, axis=1, keepdims=True), 1e-9)  # from the block to the finger
    overlap = np.maximum(FINGER - gap, 0)
    arm = nearest - CENTER
    turn = arm[:, 1] * normal[:, 0] - arm[:, 0] * normal[:, 1]  # arm × -normal
    impulse = overlap / (1 / MASS + turn**2 / INERTIA)
    center = (
        to_world(poses, np.broadcast_to(CENTER, local.shape)) - rotate(normal, poses[:, 2]) * (impulse / MASS)[:, None]
    )
    angle = poses[:, 2] + turn * impulse / INERTIA
    return np.concatenate([center - rotate(np.broadcast_to(CENTER, local.shape), angle), angle[:, None]], 1)


def distance(poses: Doubles) -> Doubles:
    """The mean distance `[...]` of the corners of the block at `poses` `[..., 3]` from where they are at the goal."""
    at, goal = corners(poses), corners(GOAL)
    return np.linalg.norm(at - goal, axis=-1).mean(-1)


def corners(poses: Doubles) -> Doubles:
    """`[..., 8, 2]`."""
    cos, sin = np.cos(poses[..., 2:3]), np.sin(poses[..., 2:3])
    x, y = OUTLINE[:, 0], OUTLINE[:, 1]
    return np.stack([poses[..., 0:1] + cos * x - sin * y, poses[..., 1:2] + sin * x + cos * y], -1)


def rotate(vectors: Doubles, angle: Doubles | float) -> Doubles:
    """Vectors `[..., 2]` turned by `angle` `[...]`."""
    cos, sin = np.cos(angle), np.sin(angle)
    x, y = vectors[..., 0], vectors[..., 1]
    return np.stack([cos * x - sin * y, sin * x + cos * y], -1)


def to_world(poses: Doubles, points: Doubles) -> Doubles:
    """Points of the block `[N, 2]` on the table; `poses` `[3]` or `[N, 3]`."""
    return poses[..., :2] + rotate(points, poses[..., 2])


def to_block(poses: Doubles, points: Doubles) -> Doubles:
    """Points of the table `[N, 2]` in the coordinates of the block."""
    return rotate(points - poses[..., :2], -poses[..., 2])


def nearest_point(local: Doubles) -> tuple[Doubles, Doubles]:
    """The distance `[N]` to the outline of the block, and its nearest point `[N, 2]`."""
    share = ((local[:, None] - OUTLINE) * EDGES).sum(-1) / LENGTHS**2
    points = OUTLINE + share.clip(0, 1)[..., None] * EDGES  # [N, 8, 2]
    gaps = np.linalg.norm(local[:, None] - points, axis=-1)
    which = gaps.argmin(1)
    rows = np.arange(len(local))
    return gaps[rows, which], points[rows, which]


def distance_to_block(pose: Doubles, points: Doubles) -> Doubles:
    """The distance `[N]` of points `[N, 2]` to the block, 0 inside."""
    local = to_block(pose, points)
    bar = (np.abs(local[:, 0]) < 60) & (local[:, 1] > 0) & (local[:, 1] < 30)
    stem = (np.abs(local[:, 0]) < 15) & (local[:, 1] >= 30) & (local[:, 1] < 120)
    return np.where(bar | stem, 0.0, nearest_point(local)[0])


class Ways:
    """Shortest ways from `finger` around the block, over a grid; those near the block cost more."""

    def __init__(self, pose: Doubles, finger: Doubles) -> None:
        side = int(SIZE) // CELL
        axis = (np.arange(side) + 0.5) * CELL
        self._points = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
        gap = distance_to_block(pose, self._points.reshape(-1, 2)).reshape(side, side) - FINGER
        border = np.minimum(self._points, SIZE - self._points).min(-1) < WALL / 2
        self._price = np.where(gap < 0, np.inf, np.where(gap < MARGIN, 4.0, 1.0))
        self._price[border] = np.inf
        first = self._cell(finger)
        self._cost, self._from = np.full((side, side), np.inf), {}
        self._cost[first] = 0
        heap = [(0.0, first)]
        while heap:
            cost, (i, j) = heapq.heappop(heap)
            if cost > self._cost[i, j]:
                continue
            for di, dj in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
                a, b = i + di, j + dj
                if not (0 <= a < side and 0 <= b < side) or self._price[a, b] == np.inf:
                    continue
                new = cost + CELL * math.hypot(di, dj) * self._price[a, b]
                if new < self._cost[a, b]:
                    self._cost[a, b], self._from[a, b] = new, (i, j)
                    heapq.heappush(heap, (new, (a, b)))

    def costs(self, places: Doubles) -> Doubles:
        """The cost `[N]` of the way to each of `places` `[N, 2]`; inf where there is none."""
        return np.array([self._cost[self._cell(place)] for place in places])

    def to(self, place: Doubles) -> list[Doubles]:
        """The way to `place`, without the cell of the finger."""
        cell, way = self._cell(place), [place]
        while cell in self._from:
            cell = self._from[cell]
            way.append(self._points[cell])
        return way[::-1][1:] if len(way) > 1 else way

    def _cell(self, place: Doubles) -> tuple[int, int]:
        i, j = (np.clip(place, 0, SIZE - 1) // CELL).astype(int)
        return int(i), int(j)


def follow(finger: Doubles, way: list[Doubles]) -> list[Doubles]:
    """Targets at most `TRAVEL` apart along `way`, from `finger` on."""
    targets, at = [], finger
    for point in way:
        while (left := np.linalg.norm(point - at)) > TRAVEL:
            at = at + (point - at) * (TRAVEL / left)
            targets.append(at)
    return [*targets, way[-1], way[-1]]

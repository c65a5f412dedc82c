"""Exhaustive play: an agent against every opponent there could be, one position at a time but each only once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from foresight.envs.games.game import Chooser, Game

EVALUATION_ENVS = 4096  # positions that the agent is asked about at once


class Proof(NamedTuple):
    """What can happen when the agent moves first, or second.

    `positions` it had to move in, `lost`, `drawn` and `won`: different final positions that an opponent can reach,
    `line`: one of the lost games, as moves, or None. `lost` 0 is a proof that it never loses.
    """

    positions: int
    lost: int
    drawn: int
    won: int
    line: tuple[int, ...] | None


def exhaust(game: Game, chooser: Chooser, first: bool) -> Proof:
    """Let the opponent of `chooser`, which must choose the same way every time, try everything.

    For games whose positions are few, with native rules (equal positions are then equal rows).
    """
    positions, ends, line = 0, {0.0: 0, 0.5: 0, 1.0: 0}, None
    frontier, lines = game.start(1), [()]
    agent = first
    while len(frontier):
        if agent:
            positions += len(frontier)
            action = torch.cat([chooser(part) for part in frontier.split(EVALUATION_ENVS)])
            rows = torch.arange(len(frontier))
        else:
            rows, action = game.legal(frontier).nonzero(as_tuple=True)
        moved = game.step(frontier[rows], action)
        reached, index = torch.unique(moved.position, dim=0, return_inverse=True)
        example = torch.zeros(len(reached), dtype=torch.int64).scatter_(0, index, torch.arange(len(index)))
        paths = [(*lines[int(rows[i])], int(action[i])) for i in example.tolist()]
        over = game.over(reached)
        scores = game.first_score(reached[over])
        for score, end in zip(scores.tolist(), over.nonzero().flatten().tolist(), strict=True):
            mine = score if first else 1 - score
            ends[mine] += 1
            if mine == 0.0 and line is None:
                line = paths[end]
        lines = [paths[i] for i in (~over).nonzero().flatten().tolist()]
        frontier, agent = reached[~over], not agent
    return Proof(positions, ends[0.0], ends[0.5], ends[1.0], line)

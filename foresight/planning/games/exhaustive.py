"""Exhaustive play: an agent against all possible opponents, each position visited once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from foresight.envs.games.game import Chooser, Game

BATCH = 4096  # positions per call of the agent


class Proof(NamedTuple):
    """All possible results when the agent moves first, or second.

    `positions` is the number of positions in which the agent had to move; `lost`, `drawn` and `won` are the numbers of
    distinct final positions that an opponent can reach; `line` is the moves of a lost game, or None. `lost` 0 proves
    that the agent never loses.
    """

    positions: int
    lost: int
    drawn: int
    won: int
    line: tuple[int, ...] | None


def play_all_replies(game: Game, chooser: Chooser, first: bool) -> Proof:
    """Play the deterministic `chooser`, as first or as second player, against every possible reply.

    For small games with native rules, in which equal positions are equal rows.
    """
    positions, ends, line = 0, {0.0: 0, 0.5: 0, 1.0: 0}, None
    frontier, lines = game.start(1), [()]
    agent = first
    while len(frontier):
        if agent:
            positions += len(frontier)
            action = torch.cat([chooser(part) for part in frontier.split(BATCH)])
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

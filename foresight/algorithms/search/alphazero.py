"""AlphaZero: A general reinforcement learning algorithm that masters chess, shogi and Go, Silver et al. 2018.

    (p, v) = f_θ(s),    minimize  (z - v)² - πᵀ log p + c‖θ‖²

where π is the policy found by a tree search guided by f_θ (visit shares, or Gumbel's improved policy) and z is the
result of the game for the player to move at s. The search plays many games against itself in parallel, with one call
of f_θ per simulation for all of them.

Kept: one network with two heads, no human games, no rollouts, Dirichlet noise and moves sampled from the visits early
in the game (PUCT), no gating, self-play and training in alternation at a fixed ratio, the most visited move in play.
Options: the search of Gumbel AlphaZero (Danihelka et al. 2022), which improves the policy with as few as 2 simulations
and needs neither noise nor temperature (the default, as simulations are expensive on a CPU); board symmetries in
training (as AlphaGo Zero; AlphaZero has none); λ-returns over the search's values instead of z (λ = 1 is z); short
searches, without Dirichlet noise, whose moves are played but not trained on (playout cap randomization, KataGo,
arXiv:1902.10565 §3.1); a first phase in which random playouts evaluate the leaves (`playout_steps`; the paper has
none). Different here: blocks without batch normalization (as in later KataGo), AdamW instead of momentum.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.replay import Replay
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs.base import Env
from foresight.envs.games import symmetries
from foresight.envs.games.game import Game, GameId, replay
from foresight.errors import UserError
from foresight.nets import precision
from foresight.nets.models.alphazero import PolicyValueNet
from foresight.ops import diagnostics, returns, schedules
from foresight.planning.search import memory, selection
from foresight.planning.search import playouts as rollouts
from foresight.planning.search.mcts import Dirichlet, SearchResult, search
from foresight.planning.search.rules import Rules, each_once
from foresight.planning.search.selection import PUCT, Gumbel
from foresight.training import optim

KIND = "game"
UNIT = "positions"
METRICS = ("policy_loss", "value_loss", "value_error", "moves", "first_score")
ACTING = ("network",)  # State fields sent to actors
Moves = list[dict[str, Tensor]]  # a game, move by move


@dataclass(frozen=True)
class Config:
    """Defaults for small boards and two cores; the paper's values in parentheses."""

    steps: int = 100_000  # positions of self-play (chess: 44 million games)
    seed: int = 0
    num_games: int = 64  # games played in parallel; one network call serves all of them
    simulations: int = 32  # simulations per move of self-play (800)
    play_simulations: int = 200  # simulations per move in play and evaluation; 0 is the raw policy
    rule: str = "gumbel"  # search: "gumbel" (Danihelka et al. 2022) or "puct" (the paper's)
    considered: int = 16  # root actions that Gumbel compares; appendix of Danihelka et al.
    value_scale: float = 0.25  # Gumbel's weight of values (in [-1, 1]); 0.5 for Go in Danihelka et al.
    c_init: float = 1.25  # PUCT's exploration constant; pseudocode of the paper
    dirichlet_alpha: float = 1.0  # α of PUCT's root noise, about 10 / legal moves (chess 0.3)
    dirichlet_fraction: float = 0.25  # ε: weight of the root noise; methods of the paper
    temperature_moves: int = 30  # first moves that PUCT samples by visits; then it plays the most visited
    full_share: float = 1.0  # share of moves with a full search, the ones that are trained on; 0.25 in KataGo
    cheap_simulations: int = 8  # simulations of the other, short searches
    playout_steps: int = 0  # positions at the start of training that use a search with random playouts; 0 in the paper
    playout_simulations: int = 200  # playouts per move of the search with random playouts
    channels: int = 32  # channels of the trunk (256)
    blocks: int = 2  # residual blocks (19)
    replay_size: int = 100_000  # newest positions kept (the last million games)
    learning_starts: int = 2_000  # positions in the replay before the first gradient step
    batch_size: int = 256  # positions per gradient step (4096)
    reuse: float = 4.0  # how often a position is trained on, on average; 4 in OpenSpiel's tic-tac-toe
    learning_rate: float = 2e-3  # AdamW, cosine to a tenth; AlphaZero.jl's Connect Four
    weight_decay: float = 1e-4  # c: decoupled weight decay; methods of the paper
    max_grad_norm: float = 5.0  # bound of the gradient norm, which is large at first in large games (paper: none)
    value_coef: float = 1.0  # weight of the value loss; the paper's equal weight
    td_lambda: float = 1.0  # λ of the value target: 1 is the result z, 0 the next search's value
    max_lag: int = 1  # rounds of updates by which the actors' weights may lag; 0: synchronous
    symmetries: bool = True  # train on each position under a random symmetry of the board
    precision: str = "float32"  # precision of the network in self-play: "float32", "bfloat16" or "auto" (the faster)
    threads: int = 1  # torch CPU threads


class UnfinishedGames:
    """Unfinished games: their actions and training data, saved with the State."""

    def __init__(self) -> None:
        self.actions: list[list[int]] = []
        self.rows: list[list[dict[str, Tensor]]] = []

    def state_dict(self) -> dict[str, Any]:
        """Actions as lists, training data as one tensor per name."""
        flat = [row for rows in self.rows for row in rows]
        stacked = {name: torch.stack([row[name] for row in flat]) for name in flat[0]} if flat else {}
        return {"actions": self.actions, "rows": stacked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the games."""
        self.actions = [list(actions) for actions in state["actions"]]
        rows = iter(range(sum(len(actions) for actions in self.actions)))
        self.rows = [
            [{name: x[i] for name, x in state["rows"].items()} for _, i in zip(actions, rows, strict=False)]
            for actions in self.actions
        ]


@dataclass(frozen=True)
class FinishedGames:
    """Finished games: their training data `[N, 1]`; the number of moves and the first player's score of each `[G]`."""

    trajectory: Trajectory
    lengths: Tensor
    scores: Tensor

    @classmethod
    def of(cls, state: State, rows: Moves, first_score: float) -> FinishedGames:
        """One game, with its value targets."""
        game = {name: torch.stack([row[name] for row in rows])[None] for name in rows[0]}  # [1, T, ...]
        last = torch.zeros_like(game["value"])
        last[:, -1] = 1.0
        value, mover = game["value"], game["mover"]
        discount = torch.where(mover.roll(-1, 1) != mover, -1.0, 1.0) * (1 - last)
        target = returns.lambda_return(game["reward"], discount, last, value.roll(-1, 1), state.config.td_lambda)
        extras = {"policy": game["policy"], "legal": game["legal"], "target": target}
        kept = (game["learned"][0] > 0).nonzero().flatten()
        whole = Trajectory(game["obs"], game["action"], game["reward"], discount, last, extras=extras)
        learned = whole.map(lambda x: x[:, kept].transpose(0, 1))
        return cls(learned, torch.tensor([len(rows)]), torch.tensor([first_score]))


@dataclass
class State:
    """Everything a checkpoint holds. `game` and `player` are rebuilt, not saved."""

    config: Config
    game_id: GameId
    network: PolicyValueNet
    optimizer: torch.optim.Optimizer
    generator: torch.Generator  # for search, noise, batches and symmetries
    random: np.ndarray  # `playouts.stream`
    replay: Replay
    running: UnfinishedGames
    step: int = 0
    samples_due: float = 0.0  # positions still to be trained on, so that `reuse` holds exactly
    finished: int = 0  # number of finished games
    lengths: list[int] = field(default_factory=list)  # of the last 100 games
    scores: list[float] = field(default_factory=list)  # of the first player in them
    game: Any = field(default=None, metadata={"save": False})
    player: Any = field(default=None, metadata={"save": False})  # a copy of the network in `precision`


def build(config: Config, game: Game, device: str | torch.device = "cpu") -> State:
    """Network, optimizer, empty replay. Raises UserError for an invalid Config."""
    _check(config, game)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = PolicyValueNet(game.shape, game.actions, config.channels, config.blocks).to(device)
    return State(
        config,
        GameId.of(game),
        network,
        torch.optim.AdamW(network.parameters(), config.learning_rate, weight_decay=config.weight_decay),
        generator=torch.Generator().manual_seed(config.seed),
        random=rollouts.stream(config.seed),
        replay=Replay(config.replay_size),
        running=UnfinishedGames(),
        game=game,
        player=copy.deepcopy(network).bfloat16() if precision.dtype(config.precision, device) else None,
    )


@torch.inference_mode()
def act(
    state: State, obs: Tensor, carry: None = None, explore: bool = False, simulations: int | None = None
) -> tuple[Tensor, dict[str, Any], None]:
    """Search from each position of `obs`.

    Extras: `value` `[B]` for the player to move, `visits`, `prior` `[B, A]`, and `tree`. `explore` searches as in
    self-play; otherwise with `play_simulations` (or `simulations`) and without randomness.
    """
    if explore:
        found = run_search(state, obs, state.config.simulations, state.generator)
    else:
        found = run_search(state, obs, state.config.play_simulations if simulations is None else simulations)
    extras = {"value": found.value, "visits": found.visits, "prior": found.tree.prior[:, 0], "tree": found.tree}
    return found.action, extras, carry


@torch.inference_mode()
def run_search(
    state: State, position: Tensor, simulations: int, generator: torch.Generator | None = None, cheap: bool = False
) -> SearchResult:
    """Search with the network at the leaves: with a `generator` as in self-play, without one for the best move.

    A `cheap` search of self-play has no Dirichlet noise: its moves are not trained on, so they are to be good (KataGo).
    """
    config, explore = state.config, generator is not None
    network = state.player if explore and state.player is not None else state.network
    evaluate = each_once(lambda planes: network(planes.to(_device(state))))
    model = Rules(state.game, lambda leaves: evaluate(state.game.planes(leaves)))
    if config.rule == "gumbel":
        rule = Gumbel(config.considered, config.value_scale, normalize="none", scale=1.0 if explore else 0.0)
        found = search(model, position, simulations, rule, generator=generator)
        # without simulations: the raw policy
        return found if simulations else found._replace(action=found.weights.argmax(-1))
    found = search(
        model, position, simulations, PUCT(config.c_init, normalize="none", first_play="zero"), generator=generator,
        noise=Dirichlet(config.dirichlet_alpha, config.dirichlet_fraction) if explore and not cheap else None,
    )  # fmt: skip
    if explore:
        early = state.game.moves(position) < config.temperature_moves
        drawn = torch.multinomial(found.weights, 1, generator=generator).squeeze(-1)
        found = found._replace(action=torch.where(early, drawn, found.action))
    return found


def begin(state: State) -> Tensor:
    """The positions of the unfinished games; at the start of a run, those of new games."""
    config, running = state.config, state.running
    if len(running.actions) != config.num_games:
        running.actions = [[] for _ in range(config.num_games)]
        running.rows = [[] for _ in range(config.num_games)]
    return replay(state.game, running.actions)


@torch.inference_mode()
def self_play(state: State, position: Tensor, ended: Callable[[State, Moves, float], None] | None = None) -> Tensor:
    """One move in every game. Finished games go to `ended` (default `add`) and are replaced by new ones."""
    config, game, running = state.config, state.game, state.running
    if state.player is not None:
        for mine, learned in zip(state.player.parameters(), state.network.parameters(), strict=True):
            mine.copy_(learned)
    share = _full_share(state)
    full = share >= 1 or float(torch.rand((), generator=state.generator)) < share
    if state.step < config.playout_steps:
        action, weights, value = playouts(state, position)
    else:
        count = config.simulations if full else config.cheap_simulations
        action, weights, value, _ = run_search(state, position, count, state.generator, cheap=not full)
    moved = game.step(position, action)
    columns = {
        "obs": game.planes(position), "legal": game.legal(position), "policy": weights, "value": value,
        "learned": torch.full_like(value, float(full)), "mover": game.mover(position),
        "action": action, "reward": moved.reward,
    }  # fmt: skip
    for b, chosen in enumerate(action.tolist()):
        running.actions[b].append(chosen)
        running.rows[b].append({name: column[b] for name, column in columns.items()})
    following = moved.position
    for b in moved.over.nonzero().flatten().tolist():
        (ended or add)(state, running.rows[b], float(game.first_score(following[b : b + 1])))
        running.actions[b], running.rows[b] = [], []
        following[b : b + 1] = game.start(1)
    state.step += len(position)
    game.free_except(following)
    return following


def playouts(state: State, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Actions, policies and values of a UCT search with random playouts; actions are sampled from the policy."""
    visits, values = rollouts.uct(state.game, position, state.config.playout_simulations, state.random)
    share = (visits / visits.sum(-1, keepdim=True)).square()  # sharper: UCT explores widely
    weights = share / share.sum(-1, keepdim=True)
    action = torch.multinomial(weights, 1, generator=state.generator).squeeze(-1)
    return action, weights, (weights * values).sum(-1)


def add(state: State, rows: Moves, first_score: float) -> None:
    """Store a finished game's positions and targets in the replay."""
    add_to_replay(state, FinishedGames.of(state, rows, first_score))


def add_to_replay(state: State, played: FinishedGames) -> int:
    """Store finished games in the replay. Returns the number of positions."""
    count = played.trajectory.shape[0]
    if count:
        state.replay.add(played.trajectory.map(lambda x: x.transpose(0, 1).cpu()))
    state.finished += len(played.lengths)
    state.lengths = [*state.lengths, *played.lengths.tolist()][-100:]
    state.scores = [*state.scores, *played.scores.tolist()][-100:]
    return count


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One gradient step on positions `[N, 1]` from the replay."""
    config, device = state.config, _device(state)
    rows = batch.map(lambda x: x[:, 0])
    planes, policy, legal = rows.obs, rows.extras["policy"], rows.extras["legal"]
    if config.symmetries and len(state.game.symmetries) > 1:
        planes, policy, legal = transformed(state, planes, policy, legal)
    logits, value = state.network(planes.to(device))
    logps = torch.log_softmax(logits.masked_fill(~legal.to(device), -1e9), -1)
    policy_loss = -(policy.to(device) * logps).sum(-1).mean()
    error = value - rows.extras["target"].to(device)
    value_loss = error.square().mean()
    loss = policy_loss + config.value_coef * value_loss
    progress = state.step / max(config.steps, 1)
    for group in state.optimizer.param_groups:
        group["lr"] = schedules.cosine(progress, config.learning_rate, 0.1 * config.learning_rate)
    optim.descend(state.optimizer, loss.backward, config.max_grad_norm)
    return {
        "policy_loss": float(policy_loss.detach()),
        "value_loss": float(value_loss.detach()),
        "value_error": float(error.detach().abs().mean()),
    }


def transformed(state: State, planes: Tensor, policy: Tensor, legal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each position under a random symmetry of the game."""
    cells, actions = symmetries.draw(state.game.symmetries, len(planes), state.generator)
    planes = symmetries.permute(planes.flatten(2), cells).view_as(planes)
    return planes, symmetries.permute(policy, actions), symmetries.permute(legal, actions)


@torch.inference_mode()
def rollout(state: State, env: Env, obs: Tree) -> tuple[FinishedGames, Tree]:
    """A few moves in every game, for an actor. Returns the games that ended; `env` is unused, `obs` unchanged.

    The positions of the games are in `state`.
    """
    over: list[FinishedGames] = []
    position = begin(state)
    for _ in range(_moves_per_log(state.config)):
        position = self_play(state, position, lambda *game: over.append(FinishedGames.of(*game)))
    if over:
        return trees.join(over), obs
    example = FinishedGames.of(state, state.running.rows[0], 0.0)  # an empty batch of the right shape
    return trees.merge(lambda leaves: leaves[0][:0], [example]), obs


def learn(state: State, played: FinishedGames) -> dict[str, float]:
    """Store the actors' games, then take the gradient steps that are due; returns the means of their metrics."""
    return _summary(state, _train_due(state, add_to_replay(state, played)), len(played.lengths) > 0)


def train(
    config: Config, env: Game, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Alternate a move in all games and the gradient steps that are due, until `steps`."""
    if state is None:
        state = build(config, env, device)
    state.game = env
    position = begin(state)
    while state.step < config.steps:
        before = state.finished
        updates: list[dict[str, float]] = []
        for _ in range(_moves_per_log(config)):
            share = _full_share(state)
            position = self_play(state, position)
            updates += _train_due(state, config.num_games * share)
        yield state.step, _summary(state, updates, state.finished > before), state


def _full_share(state: State) -> float:
    """The share of moves with a full search: all where searches are random playouts, of which none is cheap."""
    return 1.0 if state.step < state.config.playout_steps else state.config.full_share


def _moves_per_log(config: Config) -> int:
    """Moves of every game between two log entries, a few hundred positions apart."""
    return max(1, 512 // config.num_games)


def _train_due(state: State, positions: float) -> list[dict[str, float]]:
    """Take the gradient steps that are due after `positions` new ones; returns their metrics."""
    config, updates = state.config, []
    if len(state.replay) >= min(config.learning_starts, config.replay_size):
        state.samples_due += config.reuse * positions
        while state.samples_due >= config.batch_size:
            state.samples_due -= config.batch_size
            updates.append(update(state, state.replay.sample(config.batch_size, generator=state.generator)))
    return updates


def _summary(state: State, updates: list[dict[str, float]], finished: bool) -> dict[str, float]:
    metrics = diagnostics.mean(updates)
    if finished:
        metrics["moves"] = sum(state.lengths) / len(state.lengths)
        metrics["first_score"] = sum(state.scores) / len(state.scores)
    return metrics


def _device(state: State) -> torch.device:
    return next(state.network.parameters()).device


def _check(config: Config, game: Game) -> None:
    if config.rule not in ("gumbel", "puct"):
        raise errors.unknown("search rule", config.rule, ("gumbel", "puct"))
    errors.at_least(
        1, config, "num_games", "simulations", "considered", "channels", "batch_size", "replay_size", "learning_starts",
        "cheap_simulations",
    )  # fmt: skip
    errors.at_least(0, config, "max_lag", "play_simulations", "playout_steps", "blocks", "temperature_moves", "c_init")
    if config.playout_steps > 0:
        errors.at_least(1, config, "playout_simulations")
        rollouts.require_room(game, config.playout_simulations, " (playout_simulations)")
    if not 0 <= config.td_lambda <= 1:
        raise UserError(f"td_lambda must be between 0 and 1, not {config.td_lambda}.")
    if not 0 < config.full_share <= 1 or not config.reuse > 0:
        raise UserError(f"full_share must be in (0, 1] and reuse above 0, not {config.full_share} and {config.reuse}.")
    Gumbel(config.considered, config.value_scale)  # raises if invalid
    selection.check_noise(config.dirichlet_alpha, config.dirichlet_fraction)
    state = game.start(1).nbytes
    memory.require(config.num_games, config.simulations, game.actions, state)
    memory.require(1, config.play_simulations, game.actions, state, more=" in play")

"""AlphaZero: A general reinforcement learning algorithm that masters chess, shogi and Go, Silver et al. 2018.

    (p, v) = f_θ(s),    minimize  (z - v)² - πᵀ log p + c‖θ‖²

where π is what a tree search guided by f_θ found better than p (a share of visits, or Gumbel's improved policy) and z
is how the game ended, for the player to move at s. Games are played by the search against itself, many together, one
call of f_θ per simulation for all of them.

Kept: one network with two heads, no human games, no rollouts, Dirichlet noise and visits in proportion at the first
moves (PUCT), no gating, playing and learning in turn at a fixed ratio, the most visited move in play. Options: the
search of Gumbel AlphaZero (Danihelka et al. 2022), which improves the policy from 2 simulations on and needs neither
noise nor temperature (the default: simulations are dear on a CPU); symmetries of the board in learning (as AlphaGo
Zero; AlphaZero has none); λ-returns over the search's values instead of z (λ = 1 is z); cheap searches that are
played but not learned from (playout cap randomization, KataGo, arXiv:1902.10565 §3.1); a beginning in which random
playouts judge the leaves, as long as the network knows less than they do (`playout_steps`; the paper has none).
Otherwise than there: blocks without batch normalization (as KataGo has since), Adam with decoupled decay instead of
momentum.
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
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Env
from foresight.envs.games.game import Game, Plays, replay
from foresight.errors import UserError
from foresight.nets import precision
from foresight.nets.models.alphazero import PolicyValueNet
from foresight.ops import diagnostics, returns, schedules
from foresight.planning.search import memory, selection
from foresight.planning.search import playouts as rollouts
from foresight.planning.search.mcts import Dirichlet, SearchResult, search
from foresight.planning.search.rules import Rules
from foresight.planning.search.selection import PUCT, Gumbel
from foresight.training import optim

KIND = "game"
UNIT = "positions"
METRICS = ("policy_loss", "value_loss", "value_error", "moves", "first_score")
ACTING = ("network",)  # the fields of State that actors are sent
Rows = list[dict[str, Tensor]]  # a game, move by move


@dataclass(frozen=True)
class Config:
    """Defaults fit small boards and two cores; the paper's numbers stand beside."""

    steps: int = 100_000  # positions played by the search in training (chess: 44 million games)
    seed: int = 0
    num_games: int = 64  # played together; one call of the network serves all of them
    simulations: int = 32  # of the search at every move of self-play (800 in the paper)
    play_simulations: int = 200  # of the search in play and evaluation; 0 is the raw policy
    rule: str = "gumbel"  # "gumbel" (Danihelka et al. 2022) or "puct" (the paper's)
    considered: int = 16  # actions at the root that Gumbel compares; appendix of Danihelka et al.
    value_scale: float = 0.25  # Gumbel's trust in values (of [-1, 1]) against the policy; 0.5 is the paper's Go
    c_init: float = 1.25  # PUCT's; pseudocode of the paper
    dirichlet_alpha: float = 1.0  # PUCT's noise at the root, about 10 / legal moves (chess 0.3)
    dirichlet_fraction: float = 0.25  # ε of that noise; methods of the paper
    temperature_moves: int = 30  # PUCT draws so many moves of a game by visits, then plays the most visited
    full_share: float = 1.0  # of moves that are searched in full and learned from; KataGo 0.25
    cheap_simulations: int = 8  # of the other searches
    playout_steps: int = 0  # positions at the beginning that a search with random playouts plays; 0 is the paper
    playout_simulations: int = 200  # of those searches
    channels: int = 32  # of the tower (256)
    blocks: int = 2  # residual ones (19)
    replay_size: int = 100_000  # newest positions kept (the last million games)
    learning_starts: int = 2_000  # positions in the buffer before learning begins
    batch_size: int = 256  # positions of a gradient step (4096)
    reuse: float = 4.0  # how often a position is learned from on average; open_spiel's tic-tac-toe has 4
    learning_rate: float = 2e-3  # Adam, cosine to a tenth; AlphaZero.jl's Connect Four
    weight_decay: float = 1e-4  # c, decoupled; methods of the paper
    max_grad_norm: float = 5.0  # none in the paper; large games with a new network begin roughly
    value_coef: float = 1.0  # weight of the value loss; the paper's equal weight
    td_lambda: float = 1.0  # λ of the value target: 1 the game's end z, 0 the next search's value
    max_lag: int = 1  # rounds of learning that a network of actors may be old; 0: they wait
    symmetries: bool = True  # each learned position is laid on the board in one of the ways that the game allows
    precision: str = "float32"  # of the network in self-play; or "bfloat16", or "auto": what is faster
    threads: int = 1  # of torch; games beside each other use two cores better than one convolution does


class Running:
    """The games that are being played: the actions so far and what is to be learned from them, saved with the State."""

    def __init__(self) -> None:
        self.actions: list[list[int]] = []
        self.rows: list[list[dict[str, Tensor]]] = []

    def state_dict(self) -> dict[str, Any]:
        """Actions as lists, rows as one tensor per name."""
        flat = [row for rows in self.rows for row in rows]
        stacked = {name: torch.stack([row[name] for row in flat]) for name in flat[0]} if flat else {}
        return {"actions": self.actions, "rows": stacked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the games up where they were."""
        self.actions = [list(actions) for actions in state["actions"]]
        rows = iter(range(sum(len(actions) for actions in self.actions)))
        self.rows = [
            [{name: x[i] for name, x in state["rows"].items()} for _, i in zip(actions, rows, strict=False)]
            for actions in self.actions
        ]


@dataclass(frozen=True)
class Played:
    """Games that are over: what is to be learned from them, `[N, 1]`; of each game `[G]` its moves and first score."""

    rows: Trajectory
    lengths: Tensor
    scores: Tensor

    @classmethod
    def of(cls, state: State, rows: Rows, first_score: float) -> Played:
        """One game, its targets made of how it ended."""
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
    """All that a run is; the rules of the game beside it are made again, not saved."""

    config: Config
    plays: Plays
    network: PolicyValueNet
    optimizer: torch.optim.Optimizer
    generator: torch.Generator  # search, noise, batches, symmetries
    random: np.ndarray  # `rollouts.stream`, of playouts
    replay: Replay
    running: Running
    step: int = 0
    owed: float = 0.0  # positions that are still to be learned from, so that the ratio holds exactly
    finished: int = 0  # games
    lengths: list[int] = field(default_factory=list)  # of the last 100 games
    scores: list[float] = field(default_factory=list)  # the first player's in them
    game: Any = field(default=None, metadata={"save": False})
    player: Any = field(default=None, metadata={"save": False})  # the network's copy in `precision`


def build(config: Config, game: Game, device: str | torch.device = "cpu") -> State:
    """Network, optimizer, empty replay. Raises UserError for settings that make no sense."""
    _check(config, game)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = PolicyValueNet(game.shape, game.actions, config.channels, config.blocks).to(device)
    return State(
        config,
        Plays.of(game),
        network,
        torch.optim.AdamW(network.parameters(), config.learning_rate, weight_decay=config.weight_decay),
        generator=torch.Generator().manual_seed(config.seed),
        random=rollouts.stream(config.seed),
        replay=Replay(config.replay_size),
        running=Running(),
        game=game,
        player=copy.deepcopy(network).bfloat16() if precision.dtype(config.precision, device) else None,
    )


@torch.inference_mode()
def act(
    state: State, obs: Tensor, carry: None = None, explore: bool = False, simulations: int | None = None
) -> tuple[Tensor, dict[str, Any], None]:
    """The search's choice at every position of `obs`; the extras say why.

    Extras: `value` `[B]` of the player to move, `visits`, `prior` `[B, A]`, and `tree`. `explore` searches as
    self-play does; otherwise `play_simulations` (or `simulations`) and nothing random.
    """
    if explore:
        found = think(state, obs, state.config.simulations, state.generator)
    else:
        found = think(state, obs, state.config.play_simulations if simulations is None else simulations)
    extras = {"value": found.value, "visits": found.visits, "prior": found.tree.prior[:, 0], "tree": found.tree}
    return found.action, extras, carry


@torch.inference_mode()
def think(state: State, position: Tensor, simulations: int, generator: torch.Generator | None = None) -> SearchResult:
    """Search with the network at the leaves; with a `generator` as in self-play, without one for the best move."""
    config, explore = state.config, generator is not None
    network = state.player if explore and state.player is not None else state.network
    model = Rules(state.game, lambda leaves: network(state.game.planes(leaves).to(_device(state))))
    if config.rule == "gumbel":
        rule = Gumbel(config.considered, config.value_scale, normalize="none", scale=1.0 if explore else 0.0)
        found = search(model, position, simulations, rule, generator=generator)
        # Without simulations nothing was compared: the policy itself decides.
        return found if simulations else found._replace(action=found.weights.argmax(-1))
    found = search(
        model, position, simulations, PUCT(config.c_init, normalize="none", first_play="zero"), generator=generator,
        noise=Dirichlet(config.dirichlet_alpha, config.dirichlet_fraction) if explore else None,
    )  # fmt: skip
    if explore:
        early = state.game.moves(position) < config.temperature_moves
        drawn = torch.multinomial(found.weights, 1, generator=generator).squeeze(-1)
        found = found._replace(action=torch.where(early, drawn, found.action))
    return found


def begin(state: State) -> Tensor:
    """The positions of the games that are being played; new games where none are yet."""
    config, running = state.config, state.running
    if len(running.actions) != config.num_games:
        running.actions = [[] for _ in range(config.num_games)]
        running.rows = [[] for _ in range(config.num_games)]
    return replay(state.game, running.actions)


@torch.inference_mode()
def self_play(state: State, position: Tensor, ended: Callable[[State, Rows, float], None] | None = None) -> Tensor:
    """One move in every game; new games take the place of finished ones, which go to `ended`: by default, to `add`."""
    config, game, running = state.config, state.game, state.running
    if state.player is not None:
        for mine, learned in zip(state.player.parameters(), state.network.parameters(), strict=True):
            mine.copy_(learned)
    full = config.full_share >= 1 or float(torch.rand((), generator=state.generator)) < config.full_share
    if state.step < config.playout_steps:
        action, weights, value = playouts(state, position)
    else:
        count = config.simulations if full else config.cheap_simulations
        action, weights, value, _ = think(state, position, count, state.generator)
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
    game.forget(following)
    return following


def playouts(state: State, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Actions, policies and values of a search that judges by random games: drawn by visits, as PUCT's first moves."""
    visits, values = rollouts.uct(state.game, position, state.config.playout_simulations, state.random)
    share = (visits / visits.sum(-1, keepdim=True)).square()  # UCT explores more than it means
    weights = share / share.sum(-1, keepdim=True)
    action = torch.multinomial(weights, 1, generator=state.generator).squeeze(-1)
    return action, weights, (weights * values).sum(-1)


def add(state: State, rows: Rows, first_score: float) -> None:
    """A finished game's positions go into the replay with their targets."""
    remember(state, Played.of(state, rows, first_score))


def remember(state: State, played: Played) -> int:
    """Finished games go into the replay; how many positions these are."""
    count = played.rows.shape[0]
    if count:
        state.replay.add(played.rows.map(lambda x: x.transpose(0, 1).cpu()))
    state.finished += len(played.lengths)
    state.lengths = [*state.lengths, *played.lengths.tolist()][-100:]
    state.scores = [*state.scores, *played.scores.tolist()][-100:]
    return count


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One gradient step on rows `[N, 1]` of the replay."""
    config, device = state.config, _device(state)
    rows = batch.map(lambda x: x[:, 0])
    planes, policy, legal = rows.obs, rows.extras["policy"], rows.extras["legal"]
    if config.symmetries and len(state.game.symmetries) > 1:
        planes, policy, legal = turned(state, planes, policy, legal)
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


def turned(state: State, planes: Tensor, policy: Tensor, legal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every row laid on the board in a way of its own, drawn among the game's symmetries."""
    ways = state.game.symmetries
    drawn = torch.randint(len(ways), (len(planes),), generator=state.generator)
    cells = torch.stack([way.cells for way in ways])[drawn]
    actions = torch.stack([way.actions for way in ways])[drawn]
    flat = planes.flatten(2)
    planes = flat.gather(2, cells.unsqueeze(1).expand(-1, flat.shape[1], -1)).view_as(planes)
    return planes, policy.gather(1, actions), legal.gather(1, actions)


@torch.inference_mode()
def rollout(state: State, env: Env, obs: Any) -> tuple[Played, Any]:
    """For a learner elsewhere: a stretch of moves in every game, and those that ended in it.

    Where the games stand is in the State, so that the world is not asked and what it shows stays as it is.
    """
    over: list[Played] = []
    position = begin(state)
    for _ in range(_stretch(state.config)):
        position = self_play(state, position, lambda *game: over.append(Played.of(*game)))
    if over:
        return trees.join(over), obs
    none = Played.of(state, state.running.rows[0], 0.0)  # nothing, in the form of something
    return trees.merge(lambda leaves: leaves[0][:0], [none]), obs


def learn(state: State, played: Played) -> dict[str, float]:
    """Remember what actors played, then take the gradient steps that are due; means of what they said."""
    return _summary(state, _due(state, remember(state, played)), len(played.lengths) > 0)


def train(
    config: Config, env: Game, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Play a move in all games, learn from as many positions as are owed, until `steps`."""
    if state is None:
        state = build(config, env, device)
    state.game = env
    position = begin(state)
    while state.step < config.steps:
        before = state.finished
        watched: list[dict[str, float]] = []
        for _ in range(_stretch(config)):
            position = self_play(state, position)
            watched += _due(state, config.num_games * min(config.full_share, 1.0))
        yield state.step, _summary(state, watched, state.finished > before), state


def _stretch(config: Config) -> int:
    """Moves of every game between two rows of the log, which are a few hundred positions apart."""
    return max(1, 512 // config.num_games)


def _due(state: State, positions: float) -> list[dict[str, float]]:
    """The gradient steps that so many more positions are worth."""
    config, watched = state.config, []
    if len(state.replay) >= min(config.learning_starts, config.replay_size):
        state.owed += config.reuse * positions
        while state.owed >= config.batch_size:
            state.owed -= config.batch_size
            watched.append(update(state, state.replay.sample(config.batch_size, generator=state.generator)))
    return watched


def _summary(state: State, watched: list[dict[str, float]], finished: bool) -> dict[str, float]:
    metrics = diagnostics.mean(watched)
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
    errors.at_least(0, config, "max_lag", "play_simulations", "blocks", "temperature_moves", "c_init")
    if config.playout_steps > 0:
        errors.at_least(1, config, "playout_simulations")
        rollouts.require_room(game, config.playout_simulations, " (playout_simulations)")
    if not 0 <= config.td_lambda <= 1:
        raise UserError(f"td_lambda must be between 0 and 1, not {config.td_lambda}.")
    if not 0 < config.full_share <= 1 or not config.reuse > 0:
        raise UserError("full_share must be in (0, 1], and reuse above 0.")
    Gumbel(config.considered, config.value_scale)  # which says what it cannot be
    selection.check_noise(config.dirichlet_alpha, config.dirichlet_fraction)
    state = game.start(1).nbytes
    memory.require(config.num_games, config.simulations, game.actions, state)
    memory.require(1, config.play_simulations, game.actions, state, more=" in play")

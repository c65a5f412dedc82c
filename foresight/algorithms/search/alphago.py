"""AlphaGo: Mastering the game of Go with deep neural networks and tree search, Silver et al. 2016 (Nature 529).

    p_σ:  maximize  log p_σ(a | s)              over the moves of experts
    p_ρ:  Δρ ∝ Σ_t ∇ log p_ρ(a_t | s_t) (z_t - b)     over games against earlier p_ρ, initialized at p_σ
    v_θ:  minimize  (z - v_θ(s))²               over one position of every game that p_ρ finishes
    V(leaf) = (1 - λ) v_θ(leaf) + λ z_rollout,   prior p_σ,   u = c_puct P √ΣN / (1 + N)

The whole pipeline, one stage after the other; a step is one gradient step of the current stage. Kept: three separate
networks; the pool of earlier policies as opponents; value positions from games started by p_σ, interrupted by one
random move and finished by p_ρ; p_σ (not p_ρ) as the prior, with softmax temperature 0.67; c_puct 5; the most visited
move; symmetries in supervised learning. Different here: expert games come from the user's SGF or PGN files, or from a
search with random playouts against itself; playouts are uniformly random, not a linear policy over patterns; a node is
expanded at its first visit and simulations are sequential, so there is no threshold and no virtual loss; the baseline b
is the mean result of the same color in the same batch of games (the paper: 0, then v_θ on a second pass); AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresight import errors
from foresight.envs.games import records, symmetries
from foresight.envs.games.game import Game, GameId
from foresight.errors import LostError, UserError
from foresight.nets.models.alphazero import PolicyNet, ValueNet
from foresight.planning.search import memory, playouts
from foresight.planning.search.mcts import SearchResult, search
from foresight.planning.search.rules import Rules
from foresight.planning.search.selection import PUCT
from foresight.training import optim

KIND = "game"
UNIT = "updates"
METRICS = ("accuracy", "wins", "value_error", "policy_loss", "value_loss")
CONSTANT = float("inf")  # PUCT's c_base: exploration does not grow with the visits
ENOUGH = 1_000  # games, of which at least one gives a position for the value network


@dataclass(frozen=True)
class Config:
    """Defaults for small boards and minutes on two cores; the paper's values in parentheses."""

    steps: int = 2_400  # gradient steps of the three stages together; fewer stop the run early
    seed: int = 0
    supervised: int = 1_000  # gradient steps of the first stage, supervised learning (340 million)
    reinforce: int = 400  # gradient steps of the second stage, REINFORCE, each on a batch of games (10,000)
    regress: int = 1_000  # gradient steps of the third stage, value regression (50 million)
    games: str = ""  # an SGF or PGN file, or a folder of them; empty: the expert plays against itself
    expert_games: int = 600  # games of the expert against itself (160,000 games of strong players on KGS)
    expert_simulations: int = 400  # random playouts of the expert per move
    random_moves: int = 2  # random moves at the start of each expert game, for variety
    held_out: float = 0.1  # share of expert games and value positions used only for evaluation
    channels: int = 32  # channels of each network (192)
    blocks: int = 2  # residual blocks (13 plain convolutions)
    batch_size: int = 128  # positions per supervised and per value step (16, 32)
    learning_rate: float = 2e-3  # AdamW, supervised and value steps (SGD 0.003)
    rl_games: int = 64  # games per REINFORCE step (128)
    rl_learning_rate: float = 5e-4  # AdamW, REINFORCE steps
    pool_every: int = 20  # REINFORCE steps between additions to the pool (500)
    value_games: int = 6_000  # games for the value network; each gives one position (30 million)
    per_game: int = 1  # positions per game: 1, or 0 for all (which overfits: the paper, figure 1b)
    weight_decay: float = 1e-4  # decoupled weight decay; not reported in the paper
    max_grad_norm: float = 5.0  # bound of the gradient norm; not reported in the paper
    play_simulations: int = 400  # simulations per move in play; 0 is p_σ alone
    mix: float = 0.5  # λ, weight of the playout in the value of a leaf: 0 is the value network alone
    c_puct: float = 5.0  # exploration in the tree
    softmax_temperature: float = 0.67  # temperature of the prior; extended data table 5 (β)
    threads: int = 1  # torch CPU threads


@dataclass
class State:
    """Three networks, their optimizers, the pool, and the data of the stages."""

    config: Config
    game_id: GameId  # the game the weights belong to
    sl: PolicyNet
    rl: PolicyNet
    value: ValueNet
    sl_optimizer: torch.optim.Optimizer
    rl_optimizer: torch.optim.Optimizer
    value_optimizer: torch.optim.Optimizer
    generator: torch.Generator
    random: np.ndarray  # random stream of the playouts
    step: int = 0
    # Actions of expert games, int64 [games, longest], -1 after the end.
    expert: Tensor | None = field(default=None, metadata={"share": False})
    # Weights of earlier p_ρ.
    pool: list[dict[str, Tensor]] = field(default_factory=list, metadata={"share": False})
    # Training data of the value network: planes [N, C, H, W].
    positions: Tensor | None = field(default=None, metadata={"share": False})
    outcomes: Tensor | None = field(default=None, metadata={"share": False})  # [N], for the player to move
    owners: Tensor | None = field(default=None, metadata={"share": False})  # the game of each position, int64 [N]
    game: Any = field(default=None, metadata={"save": False})
    examples: Any = field(default=None, metadata={"save": False})  # the expert games as planes and actions


def build(config: Config, game: Game, device: str | torch.device = "cpu") -> State:
    """Networks and optimizers. Raises UserError for an invalid Config."""
    _check(config, game)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        sl, rl = (PolicyNet(game.shape, game.actions, config.channels, config.blocks).to(device) for _ in range(2))
        value = ValueNet(game.shape, config.channels, config.blocks).to(device)

    def adam(network: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(network.parameters(), rate, weight_decay=config.weight_decay)

    return State(
        config, GameId.of(game), sl, rl, value, adam(sl, config.learning_rate), adam(rl, config.rl_learning_rate),
        adam(value, config.learning_rate), torch.Generator().manual_seed(config.seed), playouts.stream(config.seed),
        game=game,
    )  # fmt: skip


def read_files(state: State) -> None:
    """Read the game files of a new run before it starts. Raises UserError for a game that breaks the rules."""
    if state.config.games and state.config.supervised:
        state.expert = expert_games(state)


@torch.inference_mode()
def act(
    state: State, obs: Tensor, carry: None = None, explore: bool = False, simulations: int | None = None
) -> tuple[Tensor, dict[str, Any], None]:
    """The most visited action of the search; with `explore`, one sampled from the visits.

    Extras: `value` `[B]` for the player to move, `visits`, `prior` `[B, A]`, and `tree`.
    """
    count = state.config.play_simulations if simulations is None else simulations
    found = run_search(state, obs, count)
    action = found.action
    if explore:
        action = torch.multinomial(found.weights, 1, generator=state.generator).squeeze(-1)
    extras = {"value": found.value, "visits": found.visits, "prior": found.tree.prior[:, 0], "tree": found.tree}
    return action, extras, carry


@torch.inference_mode()
def run_search(state: State, position: Tensor, simulations: int) -> SearchResult:
    """The paper's search: leaves are evaluated by the value network and by one random playout each."""
    config, game = state.config, state.game

    def evaluate(leaves: Tensor) -> tuple[Tensor, Tensor]:
        planes = game.planes(leaves).to(_device(state))
        value = (1 - config.mix) * state.value(planes).cpu() if config.mix < 1 else torch.zeros(len(leaves))
        if config.mix > 0:
            value = value + config.mix * playouts.playouts(game, leaves, 1, state.random)
        return state.sl(planes) / config.softmax_temperature, value

    rule = PUCT(config.c_puct, CONSTANT, normalize="none", first_play="zero")
    return search(Rules(game, evaluate), position, simulations, rule)


@torch.inference_mode()
def sampled(state: State, network: PolicyNet, position: Tensor) -> Tensor:
    """Legal actions sampled from a policy network: int64 `[B]`."""
    logits = network(state.game.planes(position).to(_device(state))).cpu()
    prior = torch.softmax(logits.masked_fill(~state.game.legal(position), -torch.inf), -1)
    return torch.multinomial(prior, 1, generator=state.generator).squeeze(-1)


# --- stage 1: supervised learning on expert moves


@torch.inference_mode()
def expert_games(state: State) -> Tensor:
    """Games from the user's files, or self-play of a search with random playouts: actions, -1 after the end."""
    config, game = state.config, state.game
    if config.games:
        games = records.read(game, config.games)
        table = torch.full((len(games), max(len(actions) for actions in games)), -1, dtype=torch.int64)
        for row, actions in zip(table, games, strict=True):
            row[: len(actions)] = torch.tensor(actions)
        return table
    position = game.start(config.expert_games)
    columns: list[Tensor] = []
    while not bool((over := game.over(position)).all()):
        live = (~over).nonzero().flatten()
        if len(columns) < config.random_moves:
            share = game.legal(position[live]).float()
        else:
            share = playouts.uct(game, position[live], config.expert_simulations, state.random)[0].float()
            share = share * (share == share.amax(-1, keepdim=True)) + 1e-9 * (share > 0)
        column = torch.full((len(position),), -1, dtype=torch.int64)
        column[live] = torch.multinomial(share, 1, generator=state.generator).squeeze(-1)
        position[live] = game.step(position[live], column[live]).position
        game.free_except(position)
        columns.append(column)
    return torch.stack(columns, 1)


def expert_examples(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Planes `[N, C, H, W]`, actions `[N]` and games `[N]` of every expert move."""
    assert state.expert is not None
    game = state.game
    position = game.start(len(state.expert))
    planes, actions, owners = [], [], []
    for action in state.expert.T:
        live = (action >= 0).nonzero().flatten()
        planes.append(game.planes(position[live]))
        actions.append(action[live])
        owners.append(live)
        position[live] = game.step(position[live], action[live]).position
        game.free_except(position)
    return torch.cat(planes), torch.cat(actions), torch.cat(owners)


def imitate(state: State) -> dict[str, float]:
    """One step of supervised learning, and the accuracy on held-out games."""
    config, (planes, actions, owners) = state.config, state.examples
    kept = _training(owners, config.held_out)
    train, test = kept.nonzero().flatten(), (~kept).nonzero().flatten()
    rows = train[torch.randint(len(train), (config.batch_size,), generator=state.generator)]
    inputs, expert = planes[rows], actions[rows]
    cells, chosen = symmetries.draw(state.game.symmetries, len(rows), state.generator)
    inputs = symmetries.permute(inputs.flatten(2), cells).view_as(inputs)
    # Action a of the transformed position is `chosen[a]` of the original, so targets map by the inverse.
    expert = chosen.argsort(-1).gather(1, expert.unsqueeze(1)).squeeze(1)
    logits = state.sl(inputs.to(_device(state)))
    loss = torch.nn.functional.cross_entropy(logits, expert.to(logits.device))
    optim.descend(state.sl_optimizer, _finite(loss).backward, config.max_grad_norm)
    metrics = {"policy_loss": float(loss.detach())}
    if state.step % 50 == 0 and len(test):
        with torch.inference_mode():
            rows = test[:: -(-len(test) // 2048)]  # moves are ordered by ply: a stride covers whole games
            guess = state.sl(planes[rows].to(_device(state))).argmax(-1).cpu()
        metrics["accuracy"] = float((guess == actions[rows]).float().mean())
    return metrics


# --- stage 2: self-play


def reinforce(state: State) -> dict[str, float]:
    """One REINFORCE step on a batch of games against a policy sampled from the pool, half of them with each color."""
    config, game = state.config, state.game
    if not state.pool:
        state.rl.load_state_dict(state.sl.state_dict())
        state.pool = [_weights(state.rl)]
    opponent = PolicyNet(game.shape, game.actions, config.channels, config.blocks).to(_device(state))
    opponent.load_state_dict(state.pool[int(torch.randint(len(state.pool), (), generator=state.generator))])
    side = torch.arange(config.rl_games) % 2  # which player ρ is
    position = game.start(config.rl_games)
    planes, legals, actions, owners = [], [], [], []
    while not bool((over := game.over(position)).all()):
        live = (~over).nonzero().flatten()
        ours = game.mover(position[live]) == side[live]
        for mine, network in ((True, state.rl), (False, opponent)):
            turn = live[ours == mine]
            if len(turn):
                action = sampled(state, network, position[turn])
                if mine:
                    planes.append(game.planes(position[turn]))
                    legals.append(game.legal(position[turn]))
                    actions.append(action)
                    owners.append(turn)
                position[turn] = game.step(position[turn], action).position
        game.free_except(position)
    first = 2 * game.first_score(position) - 1
    outcome = torch.where(side == 0, first, -first)
    baseline = torch.stack([outcome[side == s].mean() for s in (0, 1)])[side]
    owner = torch.cat(owners)
    logits = state.rl(torch.cat(planes).to(_device(state)))
    logps = torch.log_softmax(logits.masked_fill(~torch.cat(legals).to(logits.device), -1e9), -1)
    chosen = logps.gather(1, torch.cat(actions).to(logits.device).unsqueeze(1)).squeeze(1)
    loss = -(chosen * (outcome - baseline)[owner].to(logits.device)).sum() / config.rl_games
    optim.descend(state.rl_optimizer, _finite(loss).backward, config.max_grad_norm)
    if (state.step - config.supervised + 1) % config.pool_every == 0:
        state.pool.append(_weights(state.rl))
    return {
        "policy_loss": float(loss.detach()),
        "wins": float((outcome > 0).float().mean() + 0.5 * (outcome == 0).float().mean()),
    }


# --- stage 3: value regression


@torch.inference_mode()
def value_positions(state: State, games: int, per_game: int) -> tuple[Tensor, Tensor, Tensor]:
    """Planes, outcomes and games of self-play positions, one per game (`per_game` 0: all after the random move).

    σ plays up to a random time, then one random legal move is made, then ρ plays. The paper uses the first position
    after the random move. If every game is over before its random move, twice as many are played. Raises LostError if
    `ENOUGH` games give no position.
    """
    game, generator = state.game, state.generator
    half = max(2, _typical(state) - 2)
    breaks = torch.randint(half, (games,), generator=generator)
    position, t = game.start(games), 0
    planes, owners, movers = [], [], []
    while not bool((over := game.over(position)).all()):
        live = (~over).nonzero().flatten()
        wanted = live[(t == breaks[live] + 1) if per_game == 1 else (t > breaks[live])]
        if len(wanted):
            planes.append(game.planes(position[wanted]))
            owners.append(wanted)
            movers.append(game.mover(position[wanted]))
        action = torch.zeros(games, dtype=torch.int64)
        for network, rows in (
            (state.sl, live[t < breaks[live]]), (None, live[t == breaks[live]]), (state.rl, live[t > breaks[live]])
        ):  # fmt: skip
            if len(rows) and network is not None:
                action[rows] = sampled(state, network, position[rows])
            elif len(rows):
                legal = game.legal(position[rows]).float()
                action[rows] = torch.multinomial(legal, 1, generator=generator).squeeze(-1)
        position[live] = game.step(position[live], action[live]).position
        game.free_except(position)
        t += 1
    if not planes and games < ENOUGH:  # σ ended every game before its random move
        return value_positions(state, 2 * games, per_game)
    if not planes:
        raise LostError(f"All {games:,} games ended before their random move: raise supervised or expert_games.")
    owner = torch.cat(owners)
    first = (2 * game.first_score(position) - 1)[owner]
    return torch.cat(planes), torch.where(torch.cat(movers) == 0, first, -first), owner


def regress(state: State) -> dict[str, float]:
    """One step of the value network, and its squared error on held-out games."""
    config = state.config
    assert state.positions is not None and state.outcomes is not None and state.owners is not None
    kept = _training(state.owners, config.held_out)
    train, test = kept.nonzero().flatten(), (~kept).nonzero().flatten()
    rows = train[torch.randint(len(train), (config.batch_size,), generator=state.generator)]
    value = state.value(state.positions[rows].to(_device(state)))
    loss = (value - state.outcomes[rows].to(value.device)).square().mean()
    optim.descend(state.value_optimizer, _finite(loss).backward, config.max_grad_norm)
    metrics = {"value_loss": float(loss.detach())}
    if state.step % 50 == 0 and len(test):
        with torch.inference_mode():
            guess = state.value(state.positions[test].to(_device(state))).cpu()
        metrics["value_error"] = float((guess - state.outcomes[test]).square().mean())
    return metrics


def update(state: State) -> dict[str, float]:
    """One step of the current stage. The data of a stage is generated at its first step."""
    config = state.config
    if state.step < config.supervised:
        if state.expert is None:
            state.expert = expert_games(state)
        if state.examples is None:
            state.examples = expert_examples(state)
        return imitate(state)
    if state.step < config.supervised + config.reinforce:
        return reinforce(state)
    if state.positions is None:
        if not state.pool:  # no second stage: the supervised policy plays instead
            state.rl.load_state_dict(state.sl.state_dict())
        found = value_positions(state, config.value_games, config.per_game)
        state.positions, state.outcomes, state.owners = found
    return regress(state)


def train(
    config: Config, env: Game, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """The three stages, with metrics every ten steps."""
    if state is None:
        state = build(config, env, device)
    GameId.of(env).load_state_dict(state.game_id.state_dict())  # raises for a State of another game
    state.game = env
    last = min(config.steps, config.supervised + config.reinforce + config.regress)
    while state.step < last:
        metrics = update(state)
        state.step += 1
        if state.step % 10 == 0 or "accuracy" in metrics or "value_error" in metrics or state.step == last:
            yield state.step, metrics, state


def _training(owners: Tensor, held_out: float) -> Tensor:
    """Whether each position belongs to a training game: a share `held_out` of the games, evenly spaced, does not."""
    before, after = ((count.double() * held_out - 1e-9).ceil() for count in (owners, owners + 1))  # held out so far
    kept = before == after
    return kept if kept.any() else ~kept  # a single game is used for training


def _finite(loss: Tensor) -> Tensor:
    """The loss. Raises LostError if it is not finite, before it changes a weight; the run then saves its state."""
    if not loss.isfinite():
        raise LostError(f"The loss became {loss.item()}: try a lower learning rate or a smaller max_grad_norm.")
    return loss


def _typical(state: State) -> int:
    """The mean length of an expert game."""
    assert state.expert is not None
    return int((state.expert >= 0).sum(1).float().mean())


def _weights(network: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in network.state_dict().items()}


def _device(state: State) -> torch.device:
    return next(state.sl.parameters()).device


def _check(config: Config, game: Game) -> None:
    if not 0 <= config.mix <= 1:
        raise UserError(f"mix must be between 0 (value network) and 1 (rollout), not {config.mix}.")
    if not 0 <= config.held_out <= 0.5:
        raise UserError(f"held_out must be between 0 and 0.5, not {config.held_out}.")
    errors.at_least(
        1, config, "supervised", "expert_games", "expert_simulations", "value_games", "batch_size", "pool_every",
        "channels",
    )  # fmt: skip
    errors.at_least(4, config, "rl_games")  # two of each color: the only game of a color equals its baseline
    errors.at_least(0, config, "reinforce", "regress", "random_moves", "play_simulations", "c_puct", "blocks")
    if not config.softmax_temperature > 0:
        raise UserError(f"softmax_temperature must be above 0, not {config.softmax_temperature}.")
    playouts.require_room(game, config.expert_simulations, " (expert_simulations)")
    memory.require(1, config.play_simulations, game.actions, game.start(1).nbytes, more=" in play")
    if config.per_game not in (0, 1):
        raise UserError(f"per_game must be 1 (the paper) or 0 (all positions), not {config.per_game}.")
    if config.steps > config.supervised + config.reinforce + config.regress:
        raise UserError(
            f"steps is {config.steps}, but the stages together have {config.supervised} + {config.reinforce} + "
            f"{config.regress}. Lower steps, or raise supervised, reinforce or regress."
        )

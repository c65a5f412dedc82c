"""What MuZero and its heirs share: rows of experience, what an unroll of the model over them is to match, and its loss.

`state` is the State of such an algorithm: the one here, or one with the same fields and more. A piece is K + n rows
that follow each other: the model is unrolled over the first K, and the returns of the first K + 1 need up to n more.

Source: MuZero (arXiv:1911.08265), appendices F and G; reanalysis is of arXiv:2104.06294.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from gymnasium import Space
from gymnasium.spaces import Discrete
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.replay import Replay
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Episodes, Feedback, Spaces, require_end
from foresight.envs.games import selfplay
from foresight.envs.games.game import Game, Plays
from foresight.errors import NotFinite, UserError
from foresight.nets import encoders
from foresight.nets.models.muzero import LatentModel
from foresight.ops import latent, returns
from foresight.planning.search import memory, selection
from foresight.training import optim

Named = dict[str, Tensor]


@dataclass
class State:
    """All that a run is."""

    config: Any
    network: Any  # the model that is searched
    target: Any  # its slow copy: values to bootstrap with, and reanalysis
    optimizer: torch.optim.Adam
    replay: Replay
    generator: torch.Generator  # noise and actions of the searches
    shuffler: torch.Generator  # draws the pieces, on the CPU
    step: int = 0
    updates: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 that finished
    plays: Plays = field(default_factory=Plays)  # the game that the weights are for, if it is one
    game: Any = field(default=None, metadata={"save": False})  # whose positions `act` is given, if it is one


def check(config: Any, *also: str) -> None:
    """Raise UserError for settings with which nothing can be unrolled; the fields `also` must be at least 1 too."""
    names = ("num_envs", "unroll_steps", "n_steps", "batch_size", "train_every", "collect_steps", "target_every")
    errors.at_least(1, config, *names, "simulations", "replay_size", "latent_size", "support", *also)
    errors.at_least(0, config, "max_lag")
    length = config.unroll_steps + config.n_steps
    if config.learning_starts < config.num_envs * length:
        raise UserError(
            f"learning_starts is {config.learning_starts}: before the first update every world needs {length} rows "
            f"(unroll_steps + "
            f"n_steps), so {config.num_envs * length} env steps."
        )
    if config.replay_size < config.num_envs * length:
        raise UserError(
            f"replay_size is {config.replay_size}: every world needs {length} rows in it (unroll_steps + n_steps), "
            f"so at least "
            f"{config.num_envs * length}."
        )
    temperatures = getattr(config, "temperatures", (1.0,))  # Gumbel searches have none
    if not temperatures or not all(temperature >= 0 for temperature in temperatures):
        raise UserError(f"temperatures must be numbers of at least 0, one or more, not {tuple(temperatures)}.")
    if hasattr(config, "dirichlet_alpha"):
        selection.check_noise(config.dirichlet_alpha, config.dirichlet_fraction)
    if hasattr(config, "value_scale"):
        selection.Gumbel(config.considered, config.value_scale)  # which says what it cannot be
    play = getattr(config, "play_simulations", None) or 0
    if play < 0:
        raise UserError(f"play_simulations must be 0 (the raw policy) or more, not {play}.")
    memory.require(config.num_envs, config.simulations, 1, 4 * config.latent_size)  # at the very least
    memory.require(1, play, 1, 4 * config.latent_size, more=" in play")
    if not 0 <= config.reanalyze <= 1:
        raise UserError(f"reanalyze is a share: between 0 and 1, not {config.reanalyze}.")
    if not 0 < config.learning_rate_decay <= 1:
        raise UserError(
            f"learning_rate_decay is the last rate's share of the first: above 0, at most 1 (a constant rate), not "
            f"{config.learning_rate_decay}."
        )


def spaces_of(spaces: Spaces | Game) -> tuple[Spaces, Game | None]:
    """What an agent sees and does, and the game if that is where it acts: both sides of it (`envs.games.selfplay`)."""
    return (spaces, None) if isinstance(spaces, Spaces) else (selfplay.spaces(spaces), spaces)


def seen(state: Any, obs: Any) -> tuple[Any, Tensor | None]:
    """What the network is shown of `obs` (positions of the State's game, too) and which actions are legal there."""
    game = getattr(state, "game", None)
    if game is not None and not isinstance(obs, dict):
        obs = selfplay.observe(game, obs)
    obs = trees.to(obs, state.generator.device)
    return obs, obs[encoders.ACTION_MASK] > 0 if isinstance(obs, dict) and encoders.ACTION_MASK in obs else None


def latent_model(config: Any, obs: Space[Any], actions: int, policy: int, players: int = 1) -> LatentModel:
    """The model for actions of so many features, and a policy of so many numbers. Equal seeds give equal weights.

    With two `players`, who take turns, what follows a step is worth the opposite to whoever made it.
    """
    gamma = config.gamma if players == 1 else -config.gamma
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        encoder = encoders.encoder(obs, config.hidden, "relu", config.images)
        return LatentModel(encoder, actions, policy, config.latent_size, config.hidden, config.support, gamma)


def parts(config: Any, network: torch.nn.Module, device: str | torch.device) -> dict[str, Any]:
    """The fields of a State that stand around its `network`, and that too, on `device`."""
    network = network.to(device)
    rate, decay = config.learning_rate, config.weight_decay
    return {
        "network": network,
        "target": copy.deepcopy(network).requires_grad_(False),
        "optimizer": torch.optim.Adam(network.parameters(), rate, weight_decay=decay, fused=True),
        "replay": Replay(max(config.replay_size // config.num_envs, 1)),
        "generator": torch.Generator(device).manual_seed(config.seed),
        "shuffler": torch.Generator().manual_seed(config.seed),
    }


def choices(space: Space[Any], title: str) -> int:
    """How many actions there are. Raises UserError for a space that is not discrete; `title` is who says so."""
    if not isinstance(space, Discrete):
        raise UserError(f"{title} needs discrete actions, not {space}: use sampled_muzero.")
    return int(space.n)


def begin(config: Any, spaces: Spaces | Game, title: str, device: str | torch.device) -> State:
    """The State of MuZero itself, of control or a game for two. Raises UserError as `choices` and `require_end` do."""
    spaces, game = spaces_of(spaces)
    require_end(spaces, config.gamma)
    actions = choices(spaces.action, title)
    network = latent_model(config, spaces.obs, actions, actions, players=1 if game is None else 2)
    return State(config, **parts(config, network, device), plays=Plays.of(game), game=game)


def effort(config: Any, explore: bool, simulations: int | None) -> int:
    """Simulations of one search: those asked for, or `play_simulations` (if that is set) where nothing is explored."""
    if simulations is not None:
        return simulations
    return config.simulations if explore or config.play_simulations is None else int(config.play_simulations)


def temperature(state: Any) -> float:
    """The temperature of acting: the first of `temperatures`, and from the half on the next each quarter (app. D)."""
    temperatures = state.config.temperatures
    return float(temperatures[min(max(4 * state.step // state.config.steps - 1, 0), len(temperatures) - 1)])


def transition(obs: Any, action: Tensor, feedback: Feedback, extras: Named) -> dict[str, Any]:
    """One step of all envs as fields of a `Trajectory`, `[B, ...]`, on the CPU, with the true successor `next_obs`."""
    extras = {name: x.cpu() for name, x in extras.items()} | {"next_obs": feedback.final_obs}
    return {
        "obs": obs, "action": action, "reward": feedback.reward, "discount": feedback.discount,
        "cut": feedback.cut, "mask": feedback.mask, "extras": extras,
    }  # fmt: skip


def due(state: Any) -> bool:
    """Whether a gradient step is due: one for every `train_every` env steps after `learning_starts`."""
    config = state.config
    return bool(
        state.step >= config.learning_starts
        and state.updates < (state.step - config.learning_starts) // config.train_every
    )


def sample(state: Any) -> Trajectory:
    """`batch_size` sequences of K + n transitions, drawn uniformly from the replay: `[B, K + n]`."""
    config = state.config
    batch = state.replay.sample(config.batch_size, config.unroll_steps + config.n_steps, state.shuffler)
    return batch.map(lambda x: x.to(state.generator.device))


def restart(state: Any) -> None:
    """The worlds begin anew: what would have followed the newest rows is unknown."""
    state.replay.interrupt()


@torch.no_grad()
def targets(state: Any, batch: Trajectory, n: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(alive, known, value)` `[B, K + 1]` of pieces `[B, K + n]`.

    - `alive` is 1 where a row belongs to the first row's episode;
    - `known` also where that episode has terminated: an absorbing state, whose value and rewards are 0;
    - `value`: the return of `n` steps (of each piece, where it is a Tensor int64 `[B]`), with the slow copy's values.
    """
    config, rows = state.config, state.config.unroll_steps + 1
    alive, over = (x[:, :rows] for x in latent.unroll_masks(batch.discount, batch.cut, batch.mask))
    flat = trees.tree_map(lambda x: x.flatten(0, 1), batch.extras["next_obs"])
    next_value = state.target.root(flat)[1].view(batch.shape)

    def ahead(steps: int) -> Tensor:
        discount = config.gamma * batch.discount
        return returns.n_step_return(batch.reward, discount, batch.cut, next_value, steps, batch.mask)[:, :rows]

    if isinstance(n, int):
        value = ahead(n)
    else:
        each = torch.stack([ahead(steps) for steps in range(1, config.n_steps + 1)])
        value = each[n - 1, torch.arange(len(n), device=n.device)]
    return alive, torch.maximum(alive, over), value * alive


@torch.no_grad()
def policies(state: Any, batch: Trajectory, reanalyze: Callable[[Any, Any], Named], keep: tuple[str, ...]) -> Named:
    """What acting found at the first K + 1 rows, `[B, K + 1, ...]`: the extras that `keep` names.

    In a share `config.reanalyze` of the pieces it is what `reanalyze` finds now, which is given the state and
    observations `[N, ...]`, and returns the same names, `[N, ...]`.
    """
    rows, pieces = state.config.unroll_steps + 1, int(state.config.reanalyze * batch.shape[0])
    kept = {name: batch.extras[name][:, :rows] for name in keep}
    if not pieces:
        return kept
    found = reanalyze(state, trees.tree_map(lambda x: x[:pieces, :rows].flatten(0, 1), batch.obs))
    return {name: torch.cat([found[name].unflatten(0, (pieces, rows)), kept[name][pieces:]]) for name in keep}


def row(obs: Any, k: int) -> Any:
    """Row k of every piece `[B, T, ...]`: observations `[B, ...]`."""
    return trees.tree_map(lambda x: x[:, k], obs)


def summed(terms: Named, unroll: int) -> Named:
    """Terms `[B, K + 1]` or `[B, K]` as scalars: those of steps that were unrolled count 1 / K each (appendix G)."""

    def total(term: Tensor) -> Tensor:
        return term[:, :-unroll].sum(1) + term[:, -unroll:].sum(1) / unroll

    return {name: total(term).mean() for name, term in terms.items()}


def descend(state: Any, loss: Tensor) -> None:
    """One gradient step of the network; at every `target_every` of them the slow copy becomes equal to it.

    Raises UserError for a loss that is not finite, and leaves the network alone.
    """
    if not loss.isfinite():
        raise NotFinite(f"The loss is not finite after {state.updates} updates.")
    config = state.config
    for group in state.optimizer.param_groups:
        group["lr"] = config.learning_rate * config.learning_rate_decay ** min(1.0, state.step / config.steps)
    optim.descend(state.optimizer, loss.backward, config.max_grad_norm)
    state.updates += 1
    if state.updates % config.target_every == 0:
        optim.track(state.target, state.network)


@torch.no_grad()
def model_errors(
    model: Any, batch: Trajectory, actions: Tensor, next_obs: Any, depth: int, policy: Callable[[Tensor], Any]
) -> dict[str, Tensor]:
    """How far a model is from what happened after 0 to `depth` steps of its own, `[depth + 1]`: means over all starts.

    - `value`: |v^k - v(o_{t+k})|, from what the model says when it sees the observation there;
    - `policy`: KL(p(o_{t+k}) ‖ p^k) in nats, likewise;
    - `reward`: |r^k - u_{t+k-1}|, of the reward that came; 0 at depth 0.

    Shapes: `batch` `[B, T]` with a mask, T > depth; `actions` `[B, T, ...]` as `model.step` takes them; `next_obs`
    `[B, T, ...]`, the true successors; `policy` makes an Output of the model's numbers. Starts whose episode ended
    before a depth do not count there; NaN where none is left. A model with a `follow` is told what was seen before and
    after each step: which outcome chance had.
    """
    starts = batch.shape[1] - depth
    numbers, value, _ = model.root(trees.tree_map(lambda x: x.flatten(0, 1), batch.obs))
    numbers, value = numbers.unflatten(0, batch.shape), value.unflatten(0, batch.shape)
    follow = getattr(model, "follow", None) or (lambda state, action, *_: model.step(state, action))

    def at(x: Any, k: int) -> Any:
        """Row k of every piece, `[B * starts, ...]`."""
        return trees.tree_map(lambda y: y[:, k : k + starts].flatten(0, 1), x)

    assert batch.mask is not None
    pieces = (x.unfold(1, depth + 1, 1).flatten(0, 1) for x in (batch.discount, batch.cut, batch.mask))
    alive, _ = latent.unroll_masks(*pieces)
    *_, state = model.root(at(batch.obs, 0))
    rows = [(torch.zeros_like(alive[:, 0]),) * 3]
    for k in range(1, depth + 1):
        state, reward, _, said, v = follow(state, at(actions, k - 1), at(batch.obs, k - 1), at(next_obs, k - 1))
        apart = policy(at(numbers, k)).kl(policy(said))
        rows.append(((v - at(value, k)).abs(), apart, (reward - at(batch.reward, k - 1)).abs()))
    before = torch.cat([alive[:, :1], alive[:, :-1]], 1)  # the reward on the way to where an episode ends counts
    named = zip(("value", "policy", "reward"), zip(*rows, strict=True), (alive, alive, before), strict=True)
    return {name: (torch.stack(x, 1) * there).sum(0) / there.sum(0) for name, x, there in named}

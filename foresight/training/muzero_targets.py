"""What MuZero and its variants share: targets, masks, absorbing states, reanalysis, and the gradient step.

`state` is the State of one of these algorithms: the one below, or one with more fields. A sequence has K + n
consecutive transitions: the model is unrolled over the first K, and the returns of the first K + 1 need up to n more.

Source: MuZero (arXiv:1911.08265), appendices F and G; reanalysis is of arXiv:2104.06294.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from gymnasium import Space
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.priorities import Prioritized
from foresight.data.replay import Replay
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs.base import Episodes, Feedback, Spaces, require_end
from foresight.envs.games import selfplay
from foresight.envs.games.game import Game, GameId
from foresight.errors import NotFinite, UserError
from foresight.nets import encoders
from foresight.nets.models.muzero import LatentModel
from foresight.nets.outputs import Output
from foresight.ops import latent, returns
from foresight.planning.search import memory, selection
from foresight.planning.search.mcts import Dirichlet, Model
from foresight.training import optim
from foresight.training.options import ModelTraining

Named = dict[str, Tensor]


class ModelConfig(Protocol):
    """The fields that the Configs of MuZero and its variants share."""

    @property
    def steps(self) -> int:
        """Env steps in all."""

    @property
    def seed(self) -> int:
        """Of everything that is drawn."""

    @property
    def num_envs(self) -> int:
        """Environments, or games, that are stepped together."""

    @property
    def gamma(self) -> float:
        """The discount a step."""

    @property
    def simulations(self) -> int:
        """Of a search in training."""

    @property
    def unroll_steps(self) -> int:
        """K: steps inside the model that are trained."""

    @property
    def n_steps(self) -> int:
        """Rewards of a value target before its bootstrap."""

    @property
    def reanalyze(self) -> float:
        """The share of the sequences whose policy targets are searched again."""

    @property
    def training(self) -> ModelTraining:
        """How the model is trained."""


class PlayConfig(ModelConfig, Protocol):
    """`ModelConfig`, with another number of simulations in play."""

    @property
    def play_simulations(self) -> int | None:
        """Simulations of a search in play and evaluation; None: as in training."""


class ExplorationConfig(ModelConfig, Protocol):
    """`ModelConfig`, where the root has Dirichlet noise and actions are drawn in proportion to visits."""

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Of the visits, one after the other."""

    @property
    def dirichlet_alpha(self) -> float:
        """The concentration of the noise."""

    @property
    def dirichlet_fraction(self) -> float:
        """The weight of the noise in the prior of the root."""


class Learner(Protocol):
    """The State of MuZero or one of its variants, as far as the functions here use it."""

    network: Any  # the model that is searched
    target: Any  # the target network
    optimizer: torch.optim.Adam
    replay: Replay | Prioritized
    generator: torch.Generator
    shuffler: torch.Generator
    step: int
    updates: int

    @property
    def config(self) -> ModelConfig:
        """The algorithm's Config."""


class ExplorationLearner(Learner, Protocol):
    """A `Learner` that draws actions in proportion to visits."""

    @property
    def config(self) -> ExplorationConfig:
        """The algorithm's Config."""


Searcher = TypeVar("Searcher", bound=Learner)


@dataclass
class State:
    """Everything a checkpoint holds."""

    config: Any
    network: Any  # the model that is searched
    target: Any  # the target network: bootstrap values and reanalysis
    optimizer: torch.optim.Adam
    replay: Replay | Prioritized
    generator: torch.Generator  # search noise and actions
    shuffler: torch.Generator  # samples the replay, on the CPU
    step: int = 0
    updates: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones
    game_id: GameId = field(default_factory=GameId)  # the game the weights belong to, if any
    game: Game | None = field(default=None, metadata={"save": False})  # `act` then also takes its positions


def check(config: ModelConfig, *counts: str) -> None:
    """Raise UserError for an invalid Config. `counts` names further fields that must be at least 1."""
    training = config.training
    errors.at_least(1, config, "num_envs", "unroll_steps", "n_steps", "simulations", *counts)
    sizes = ("batch_size", "train_every", "collect_steps", "target_every", "replay_size", "latent_size", "support")
    errors.at_least(1, training, *sizes)
    errors.at_least(0, training, "max_lag", "priority_exponent")
    errors.between(0, 1, training, "priority_correction")
    if not training.bin_width > 0:
        raise UserError(f"bin_width must be above 0, not {training.bin_width}.")
    length = config.unroll_steps + config.n_steps
    if training.learning_starts < config.num_envs * length:
        raise UserError(
            f"learning_starts is {training.learning_starts}, but the first update needs {length} transitions per env "
            f"(unroll_steps + n_steps). Set it to at least {config.num_envs * length}."
        )
    if training.replay_size < config.num_envs * length:
        raise UserError(
            f"replay_size is {training.replay_size}, but the replay needs {length} transitions per env "
            f"(unroll_steps + n_steps). Set it to at least {config.num_envs * length}."
        )
    memory.require(config.num_envs, config.simulations, 1, 4 * training.latent_size)  # a lower bound
    if not 0 <= config.reanalyze <= 1:
        raise UserError(f"reanalyze must be between 0 and 1, not {config.reanalyze}.")
    fresh = int(config.reanalyze * training.batch_size)
    if training.search_values and fresh < 1:
        raise UserError(
            f"search_values is set, but reanalyze is {config.reanalyze}: none of the {training.batch_size} sequences "
            "of a batch is searched again. Raise reanalyze, or leave search_values out."
        )
    if config.reanalyze > 0 and fresh < 1:
        raise UserError(
            f"reanalyze is {config.reanalyze}, which is less than one of the {training.batch_size} sequences of a "
            f"batch. Set it to 0 or to at least {math.ceil(1_000 / training.batch_size) / 1_000}."
        )
    if not 0 < training.learning_rate_decay <= 1:
        raise UserError(
            f"learning_rate_decay must be above 0 and at most 1 (a constant learning rate), not "
            f"{training.learning_rate_decay}."
        )


def check_exploration(config: ExplorationConfig) -> None:
    """Raise UserError for temperatures below 0 or infinite, or none, and for an invalid Dirichlet noise."""
    temperatures = tuple(config.temperatures)
    if not temperatures or not all(0 <= temperature < math.inf for temperature in temperatures):
        raise UserError(f"temperatures must be one or more finite numbers of at least 0, not {temperatures}.")
    if len(temperatures) > 3:
        raise UserError(
            f"temperatures has {len(temperatures)} numbers, and training uses up to three: from the start, from 1/2 "
            "and from 3/4 of it. Leave the others out."
        )
    selection.check_noise(config.dirichlet_alpha, config.dirichlet_fraction)


def root_noise(config: ExplorationConfig) -> Dirichlet:
    """The noise in the prior of the root, of searches that act and of those that reanalyze.

    Without it in the latter, an action whose prior is near 0 would have no visits, and so neither in any later target.
    EfficientZero's authors have it there as well.
    """
    return Dirichlet(config.dirichlet_alpha, config.dirichlet_fraction)


def check_play(config: PlayConfig) -> None:
    """Raise UserError for a number of simulations in play below 0, or for which the memory is too small."""
    simulations = config.play_simulations or 0
    if simulations < 0:
        raise UserError(f"play_simulations must be 0 (the raw policy) or more, not {simulations}.")
    memory.require(1, simulations, 1, 4 * config.training.latent_size, more=" in play")


def check_game(config: ModelConfig, spaces: Spaces | Game, *names: str) -> None:
    """Raise UserError if one of the options `names`, which are for two-player games, is set without a game."""
    for name in names:
        if getattr(config, name) and isinstance(spaces, Spaces):
            raise UserError(f"{name} is set, but it is an option of two-player games. Leave it out.")


def spaces_of(spaces: Spaces | Game) -> tuple[Spaces, Game | None]:
    """The spaces of the agent, and the game if there is one: the agent plays both sides (`envs.games.selfplay`)."""
    return (spaces, None) if isinstance(spaces, Spaces) else (selfplay.spaces(spaces), spaces)


def observe(state: Learner, obs: Tree) -> tuple[Tree, Tensor | None]:
    """The network's input for `obs` (or for positions of the State's game), and the legal actions, if given.

    Without a game, all actions are legal where the mask allows none: an engine with next-step autoreset asks for an
    action on the final observation, and ignores it.
    """
    game = getattr(state, "game", None)
    if game is not None and not isinstance(obs, dict):
        obs = selfplay.observe(game, obs)
    obs = trees.to(obs, state.generator.device)
    if not isinstance(obs, dict) or encoders.ACTION_MASK not in obs:
        return obs, None
    legal = obs[encoders.ACTION_MASK] > 0
    return obs, legal if game is not None else legal | ~legal.any(-1, keepdim=True)


def latent_model(config: ModelConfig, obs: Space[Any], actions: int, policy: int, players: int = 1) -> LatentModel:
    """A model for `actions` action features and a policy output of width `policy`. Equal seeds give equal weights.

    With two `players`, who take turns, the discount is -gamma: values are those of the player to move.
    """
    training, gamma = config.training, config.gamma if players == 1 else -config.gamma
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        encoder = encoders.encoder(obs, training.hidden, "relu", training.images)
        return LatentModel(
            encoder, actions, policy, training.latent_size, training.hidden, training.support, gamma,
            bin_width=training.bin_width,
        )  # fmt: skip


def components(config: ModelConfig, network: torch.nn.Module, device: str | torch.device) -> dict[str, Any]:
    """The State fields of `network` on `device`: target network, optimizer, replay, generators."""
    network, training = network.to(device), config.training
    rate, decay = training.learning_rate, training.weight_decay
    uniform, alpha = Replay(max(training.replay_size // config.num_envs, 1)), training.priority_exponent
    return {
        "network": network,
        "target": copy.deepcopy(network).requires_grad_(False),
        "optimizer": torch.optim.Adam(network.parameters(), rate, weight_decay=decay, fused=True),
        "replay": Prioritized(uniform, alpha, config.unroll_steps + config.n_steps - 1) if alpha else uniform,
        "generator": torch.Generator(device).manual_seed(config.seed),
        "shuffler": torch.Generator().manual_seed(config.seed),
    }


def num_actions(space: Space[Any], title: str) -> int:
    """The number of actions. Raises UserError, with the algorithm's `title`, if the space is not discrete."""
    if not isinstance(space, Discrete):
        fits = isinstance(space, Box) and len(space.shape) == 1 and space.is_bounded()
        raise UserError(f"{title} needs discrete actions, not {space}. Use {'sampled_muzero' if fits else 'ppo'}.")
    return int(space.n)


def build(config: ModelConfig, spaces: Spaces | Game, title: str, device: str | torch.device) -> State:
    """The State of MuZero for control or a two-player game. Raises UserError as `num_actions` and `require_end` do."""
    spaces, game = spaces_of(spaces)
    require_end(spaces, config.gamma)
    actions = num_actions(spaces.action, title)
    network = latent_model(config, spaces.obs, actions, actions, players=1 if game is None else 2)
    return State(config, **components(config, network, device), game_id=GameId.of(game), game=game)


def num_simulations(config: PlayConfig, explore: bool, simulations: int | None) -> int:
    """Simulations per search: `simulations` if given, else `play_simulations` (if set) when not exploring."""
    if simulations is not None:
        return simulations
    return config.simulations if explore or config.play_simulations is None else int(config.play_simulations)


def temperature(state: ExplorationLearner) -> float:
    """The temperature of acting: the first of `temperatures`, then the next at 1/2 and at 3/4 of training (app. D)."""
    temperatures = state.config.temperatures
    return float(temperatures[min(max(4 * state.step // state.config.steps - 1, 0), len(temperatures) - 1)])


def transition(obs: Tree, action: Tensor, feedback: Feedback, extras: Named) -> dict[str, Any]:
    """One step of all envs as fields of a `Trajectory`, `[B, ...]`, on the CPU, with the true successor `next_obs`."""
    extras = {name: x.cpu() for name, x in extras.items()} | {"next_obs": feedback.final_obs}
    return {
        "obs": obs, "action": action, "reward": feedback.reward, "discount": feedback.discount,
        "cut": feedback.cut, "mask": feedback.mask, "extras": extras,
    }  # fmt: skip


def kept(config: ModelConfig, extras: Named, names: tuple[str, ...] = ("weights",)) -> Named:
    """The extras of `act` that training needs: `names`, and for priorities the `value` of the root."""
    return {name: extras[name] for name in (*names, *(("value",) if config.training.priority_exponent else ()))}


def due(state: Learner) -> bool:
    """Whether a gradient step is due: one for every `train_every` env steps after `learning_starts`."""
    training = state.config.training
    return bool(
        state.step >= training.learning_starts
        and state.updates < (state.step - training.learning_starts) // training.train_every
    )


def sample(state: Learner, symmetric: Game | None = None) -> Trajectory:
    """`batch_size` sequences of K + n transitions, drawn from the replay uniformly or by priority: `[B, K + n]`.

    With `symmetric`, the game that they are of, each is under a random symmetry of its board.
    """
    config, size = state.config, state.config.training.batch_size
    if isinstance(state.replay, Prioritized):
        batch = state.replay.sequences(size, config.training.priority_correction, state.shuffler)
    else:
        batch = state.replay.sample(size, config.unroll_steps + config.n_steps, state.shuffler)
    if symmetric is not None:
        batch = selfplay.symmetric(symmetric, batch, state.shuffler, ("weights",))
    return batch.map(lambda x: x.to(state.generator.device))


def restart(state: Learner) -> None:
    """The envs reset: the newest transitions in the replay have no successors."""
    state.replay.interrupt()


@torch.no_grad()
def targets(
    state: Learner, batch: Trajectory, n: int | Tensor, searched: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`(alive, known, value)` `[B, K + 1]` of sequences `[B, K + n]`.

    - `alive`: 1 where a step belongs to the episode of the first one;
    - `known`: 1 there and after that episode terminated: absorbing states, whose value and rewards are 0;
    - `value`: the `n`-step return (int64 `[B]`: one n per sequence), bootstrapped with the target network; of the first
      sequences `searched` `[F, K + 1]` instead, if given.
    """
    config, steps = state.config, state.config.unroll_steps + 1
    alive, over = (x[:, :steps] for x in latent.unroll_masks(batch.discount, batch.cut, batch.mask))
    flat = trees.tree_map(lambda x: x.flatten(0, 1), batch.extras["next_obs"])
    next_value = state.target.root(flat)[1].view(batch.shape)

    def n_step(n: int) -> Tensor:
        discount = config.gamma * batch.discount
        return returns.n_step_return(batch.reward, discount, batch.cut, next_value, n, batch.mask)[:, :steps]

    if isinstance(n, int):
        value = n_step(n)
    else:
        each = torch.stack([n_step(m) for m in range(1, config.n_steps + 1)])
        value = each[n - 1, torch.arange(len(n), device=n.device)]
    if searched is not None:
        value = torch.cat([searched, value[len(searched) :]])
    return alive, torch.maximum(alive, over), value * alive


@torch.no_grad()
def policy_targets(
    state: Searcher, batch: Trajectory, reanalyze: Callable[[Searcher, Tree], Named], keep: tuple[str, ...]
) -> Named:
    """Policy targets of the first K + 1 steps, `[B, K + 1, ...]`: the extras named by `keep`.

    A share `config.reanalyze` of the sequences gets fresh targets from `reanalyze(state, obs)`, which takes
    observations `[N, ...]` and returns the same names, `[N, ...]`. The others keep those found when acting.
    With `search_values` there is also the `value` `[F, K + 1]` that `reanalyze` found, of the F reanalyzed sequences.
    """
    steps, fresh = state.config.unroll_steps + 1, int(state.config.reanalyze * batch.shape[0])
    old = {name: batch.extras[name][:, :steps] for name in keep}
    if not fresh:
        return old
    found = reanalyze(state, trees.tree_map(lambda x: x[:fresh, :steps].flatten(0, 1), batch.obs))
    found = {name: x.unflatten(0, (fresh, steps)) for name, x in found.items()}
    policies = {name: torch.cat([found[name], old[name][fresh:]]) for name in keep}
    return {**policies, "value": found["value"]} if state.config.training.search_values else policies


def prioritize(state: Learner, batch: Trajectory, value: Tensor) -> None:
    """With priorities, that of each sequence `[B, K + n]` becomes |ν - z|: the search value and the value target
    `value[:, 0]` of its first step (MuZero, appendix G). A sequence has the greatest priority until it is drawn.
    """
    if isinstance(state.replay, Prioritized):
        state.replay.update(batch.extras["key"][:, 0], batch.extras["value"][:, 0] - value[:, 0])


def at_step(obs: Tree, k: int) -> Tree:
    """Step k of sequences `[B, T, ...]`: observations `[B, ...]`."""
    return trees.tree_map(lambda x: x[:, k], obs)


def summed(terms: Named, unroll: int, weight: Tensor | None = None) -> Named:
    """Terms `[B, K + 1]` or `[B, K]` as scalars: each of the K unrolled steps has weight 1 / K (appendix G).

    `weight` `[B, T]` has the importance weight of each sequence in its first column.
    """

    def total(term: Tensor) -> Tensor:
        whole = term[:, :-unroll].sum(1) + term[:, -unroll:].sum(1) / unroll
        return whole if weight is None else whole * weight[:, 0]

    return {name: total(term).mean() for name, term in terms.items()}


def descend(state: Learner, loss: Tensor) -> None:
    """One gradient step; every `target_every` of them the target network is copied from the network.

    Raises UserError, before any step, if the loss is not finite.
    """
    if not loss.isfinite():
        raise NotFinite(f"The loss is not finite after {state.updates} updates.")
    training, progress = state.config.training, min(1.0, state.step / state.config.steps)
    for group in state.optimizer.param_groups:
        group["lr"] = training.learning_rate * training.learning_rate_decay**progress
    optim.descend(state.optimizer, loss.backward, training.max_grad_norm)
    state.updates += 1
    if state.updates % training.target_every == 0:
        optim.track(state.target, state.network)


@torch.no_grad()
def model_errors(
    model: Model[Tree, Any],
    batch: Trajectory,
    actions: Tensor,
    next_obs: Tree,
    depth: int,
    policy: Callable[[Tensor], Output],
) -> dict[str, Tensor]:
    """Errors of a model after 0 to `depth` of its own steps, `[depth + 1]`: means over all start steps.

    - `value`: |v^k - v(o_{t+k})|, compared with the model's value of the real observation;
    - `policy`: KL(p(o_{t+k}) ‖ p^k) in nats, likewise;
    - `reward`: |r^k - u_{t+k-1}|, compared with the real reward; 0 at depth 0.

    Shapes: `batch` `[B, T]` with a mask, T > depth; `actions` `[B, T, ...]` as `model.step` takes them; `next_obs`
    `[B, T, ...]`, the true successors; `policy` turns the model's policy output into an Output. Starts whose episode
    ended before a depth are left out there; NaN where none is left. A model with `follow` also gets the observations
    before and after each step, which show the chance outcome.
    """
    starts = batch.shape[1] - depth
    logits, value, _ = model.root(trees.tree_map(lambda x: x.flatten(0, 1), batch.obs))
    logits, value = logits.unflatten(0, batch.shape), value.unflatten(0, batch.shape)
    follow = getattr(model, "follow", None) or (lambda state, action, *_: model.step(state, action))

    def at(x: Tree, k: int) -> Tree:
        """Step k after every start, `[B * starts, ...]`."""
        return trees.tree_map(lambda y: y[:, k : k + starts].flatten(0, 1), x)

    assert batch.mask is not None
    windows = (x.unfold(1, depth + 1, 1).flatten(0, 1) for x in (batch.discount, batch.cut, batch.mask))
    alive, _ = latent.unroll_masks(*windows)
    *_, state = model.root(at(batch.obs, 0))
    errors_at = [(torch.zeros_like(alive[:, 0]),) * 3]
    for k in range(1, depth + 1):
        state, reward, _, predicted, v = follow(state, at(actions, k - 1), at(batch.obs, k - 1), at(next_obs, k - 1))
        kl = policy(at(logits, k)).kl(policy(predicted))
        errors_at.append(((v - at(value, k)).abs(), kl, (reward - at(batch.reward, k - 1)).abs()))
    before = torch.cat([alive[:, :1], alive[:, :-1]], 1)  # the last reward of an episode counts
    named = zip(("value", "policy", "reward"), zip(*errors_at, strict=True), (alive, alive, before), strict=True)
    return {name: (torch.stack(x, 1) * there).sum(0) / there.sum(0) for name, x, there in named}

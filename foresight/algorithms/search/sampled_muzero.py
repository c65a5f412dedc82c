"""Sampled MuZero: Learning and planning in complex action spaces, Hubert et al. 2021 (arXiv:2104.06303).

    minimise  Σ_{k=0..K} [ l(v^k, z_{t+k}) · c_v - Σ_i π̂(a_i) ln p^k(a_i) - c_e H(p^k) ] + Σ_{k=1..K} l(r^k, u_{t+k})

where a_1 … a_N are drawn from the policy at every node of the search, and π̂ are the visits of those at the root. The
rest is MuZero (arXiv:1911.08265), for continuous actions.

What is kept: actions drawn anew at every node (β = π, so that the search's prior is uniform over them), the policy as a
distribution that is fitted to the visits of the drawn actions, MuZero's model, returns and unroll; reanalysis of a
share of the targets, with actions drawn anew, by a slow copy of the network.

Otherwise than there: the policy is a normal squashed by tanh into the bounds of the actions; a time limit is no
termination; replay is uniform; Adam; an entropy bonus (LightZero).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.data import trees
from foresight.data.replay import Replay
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Env, Spaces
from foresight.errors import UserError
from foresight.nets import encoders, optim
from foresight.nets.heads import TanhNormalHead
from foresight.nets.latent import LatentModel
from foresight.ops import latent, returns
from foresight.planning.sampled import SampledActions, root_actions
from foresight.planning.search import PUCT, SearchResult, search

WORLD = "control"
UNIT = "env steps"
METRICS = ("return", "length", "value_loss", "policy_loss", "reward_loss", "entropy")
RULE = PUCT(normalize="tree", first_play="parent")  # an action never tried counts as its node: LightZero


@dataclass(frozen=True)
class Config:
    """Defaults: LightZero's Pendulum where nothing else is said, with the paper's search."""

    steps: int = 50_000  # env steps in all worlds together
    seed: int = 0
    num_envs: int = 8  # worlds that act together, one search for all of them
    simulations: int = 50  # of each search; appendix A of the paper
    samples: int = 20  # N, actions drawn at every node; appendix A
    gamma: float = 0.997  # a step; the paper, appendix G
    unroll_steps: int = 5  # K; appendix G
    n_steps: int = 5  # of the returns; 10 on Atari in the paper, 5 in reanalysis and LightZero
    batch: int = 128  # pieces a gradient step
    update_every: int = 4  # env steps for each gradient step
    collect_steps: int = 32  # steps of each world between two rounds of updates
    warmup: int = 1_000  # env steps before the first gradient step
    replay: int = 100_000  # rows kept, of all worlds together
    reanalyze: float = 0.5  # share of policy targets searched again; 0.8 of the updates in arXiv:2104.06294
    target_every: int = 200  # gradient steps between copies of the network; 100 in LightZero
    learning_rate: float = 3e-3  # Adam; LightZero
    weight_decay: float = 1e-4  # appendix G
    max_grad_norm: float = 10.0  # LightZero
    value_coef: float = 0.25  # c_v; arXiv:2104.06294
    entropy_coef: float = 5e-3  # c_e, nats; LightZero
    temperatures: tuple[float, ...] = (1.0, 0.5, 0.25)  # from the start, half and three quarters on
    latent_size: int = 64  # numbers of a state
    hidden: tuple[int, ...] = (128,)  # layers of each function
    support: int = 40  # bins on each side of 0, for h(x): 40 reaches ±1,560
    images: str = "nature"  # the encoder of pixels: "nature" or "impala"
    threads: int = 1  # of torch, on a CPU


@dataclass
class State:
    """All that a run is."""

    config: Config
    network: LatentModel
    head: TanhNormalHead  # makes a distribution of the network's numbers
    low: Tensor  # bounds of the actions, [D]
    high: Tensor
    target: LatentModel  # the slow copy: values to bootstrap with, and reanalysis
    optimizer: torch.optim.Adam
    replay: Replay
    generator: torch.Generator  # noise and actions of the searches
    shuffler: torch.Generator  # draws the pieces, on the CPU
    step: int = 0
    updates: int = 0
    episode_returns: list[float] = field(default_factory=list)  # of the last 100 finished episodes
    episode_lengths: list[int] = field(default_factory=list)


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimiser, replay. Raises UserError for actions that are not a bounded Box."""
    _check(config)
    space = spaces.action
    if not isinstance(space, gs.Box) or len(space.shape) != 1 or not space.is_bounded():
        raise UserError(f"Sampled MuZero needs a bounded Box of one dim for actions, not {space}: use muzero.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        encoder = encoders.encoder(spaces.obs, config.hidden, "relu", config.images)
        head = TanhNormalHead(space.shape[0], bounds=(-3.0, 1.0))
        network = LatentModel(
            encoder, space.shape[0], head.width, config.latent_size, config.hidden, config.support, config.gamma
        ).to(device)
    return State(
        config,
        network,
        head,
        torch.as_tensor(space.low, device=device),
        torch.as_tensor(space.high, device=device),
        copy.deepcopy(network).requires_grad_(False),
        torch.optim.Adam(network.parameters(), config.learning_rate, weight_decay=config.weight_decay, fused=True),
        Replay(max(config.replay // config.num_envs, 1)),
        generator=torch.Generator(device).manual_seed(config.seed),
        shuffler=torch.Generator().manual_seed(config.seed),
    )


def act(state: State, obs: Any, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """Search from every row of `obs`; with `explore` in proportion to visits, else the most visited drawn action.

    Extras: the drawn `actions` `[B, N, D]` in (-1, 1), their `weights` `[B, N]`, the `value` `[B]` of the root, and
    `taken` `[B, D]`, the action before it was stretched to its bounds.
    """
    config = state.config
    heat = config.temperatures[min(max(4 * state.step // config.steps - 1, 0), len(config.temperatures) - 1)]
    found, drawn = _search(state, state.network, trees.to(obs, state.generator.device), heat if explore else 0.0)
    taken = drawn[torch.arange(len(drawn), device=drawn.device), found.action]
    action = state.low + (taken + 1) / 2 * (state.high - state.low)
    return action, {"actions": drawn, "weights": found.weights, "value": found.value, "taken": taken}, carry


def _search(state: State, network: LatentModel, obs: Any, temperature: float) -> tuple[SearchResult, Tensor]:
    model = SampledActions(network, state.head, state.config.samples, state.generator)
    found = search(
        model, obs, state.config.simulations, RULE, temperature=temperature,
        generator=state.generator,
    )  # fmt: skip
    return found, root_actions(found.tree)


@torch.no_grad()
def targets(state: State, batch: Trajectory) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`(alive, known, value, weights, actions)` of the first K + 1 rows of pieces `[B, K + n]`.

    Shapes `[B, K + 1]`, weights `[B, K + 1, N]`, actions `[B, K + 1, N, D]`. `alive` rows belong to the first row's
    episode; `known` also are those after its termination, whose value is 0.
    """
    config, rows = state.config, state.config.unroll_steps + 1
    alive, over = (x[:, :rows] for x in latent.unroll_masks(batch.discount, batch.cut, batch.mask))
    flat = trees.tree_map(lambda x: x.flatten(0, 1), batch.extras["next_obs"])
    next_value = state.target.root(flat)[1].view(batch.shape)
    value = returns.n_step_return(
        batch.reward, config.gamma * batch.discount, batch.cut, next_value, config.n_steps, batch.mask
    )[:, :rows]
    weights, actions = batch.extras["weights"][:, :rows].clone(), batch.extras["actions"][:, :rows].clone()
    again = int(config.reanalyze * len(weights))
    if again:
        weights[:again], actions[:again] = reanalyze(state, batch, again)
    return alive, torch.maximum(alive, over), value * alive, weights, actions


def reanalyze(state: State, batch: Trajectory, pieces: int) -> tuple[Tensor, Tensor]:
    """Policy targets `[pieces, K + 1, N]` and their actions `[..., N, D]`, with the slow copy of the network."""
    rows = state.config.unroll_steps + 1
    obs = trees.tree_map(lambda x: x[:pieces, :rows].flatten(0, 1), batch.obs)
    found, drawn = _search(state, state.target, obs, 0.0)
    return found.weights.unflatten(0, (pieces, rows)), drawn.unflatten(0, (pieces, rows))


def loss(state: State, batch: Trajectory) -> dict[str, Tensor]:
    """The terms of the loss over pieces `[B, K + n]`, each a scalar; `entropy` is to be raised."""
    network, unroll = state.network, state.config.unroll_steps
    alive, known, value, weights, actions = targets(state, batch)
    hidden = network.represent(trees.tree_map(lambda x: x[:, 0], batch.obs))
    terms: dict[str, list[Tensor]] = {"policy_loss": [], "value_loss": [], "reward_loss": [], "entropy": []}
    for k in range(unroll + 1):
        scale = 1.0 if k == 0 else 1.0 / unroll
        if k > 0:
            hidden, on_the_way = network.advance(hidden, batch.extras["taken"][:, k - 1])
            hidden = latent.scale_gradient(hidden, 0.5)
            reward = batch.reward[:, k - 1] * alive[:, k - 1]
            terms["reward_loss"].append(scale * known[:, k - 1] * network.reward.loss(on_the_way, reward))
        ahead = network.head(hidden)
        numbers = network.policy(ahead)
        wide = numbers.unsqueeze(1).expand(-1, state.config.samples, -1)
        policy = -(weights[:, k] * state.head(wide).logp(actions[:, k])).sum(-1)
        terms["policy_loss"].append(scale * alive[:, k] * policy)
        terms["value_loss"].append(scale * known[:, k] * network.value.loss(ahead, value[:, k]))
        terms["entropy"].append(scale * alive[:, k] * state.head(numbers).entropy())
    return {name: torch.stack(parts, 1).sum(1).mean() for name, parts in terms.items()}


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One gradient step on pieces `[B, K + n]` of the replay."""
    config = state.config
    terms = loss(state, batch)
    total = terms["policy_loss"] + config.value_coef * terms["value_loss"] + terms["reward_loss"]
    total = total - config.entropy_coef * terms["entropy"]
    if not total.isfinite():
        raise UserError(
            f"The loss is not finite after {state.updates} updates. Go on from the last checkpoint with a lower "
            "learning_rate."
        )
    optim.descend(state.optimizer, total.backward, config.max_grad_norm)
    state.updates += 1
    if state.updates % config.target_every == 0:
        state.target.load_state_dict(state.network.state_dict())
    return {name: term.item() for name, term in terms.items()}


def collect(state: State, env: Env, obs: Any) -> Any:
    """`collect_steps` of every world into the replay; returns the observation to go on from."""
    for _ in range(state.config.collect_steps):
        action, extras, _ = act(state, obs, explore=True)
        action = action.cpu()
        feedback = env.step(action.clone())
        extras = {name: extras[name].cpu() for name in ("weights", "actions", "taken")}
        extras["next_obs"] = feedback.final_obs
        state.replay.add(
            {
                "obs": obs, "action": action, "reward": feedback.reward, "discount": feedback.discount,
                "cut": feedback.cut, "mask": feedback.mask, "extras": extras,
            }
        )  # fmt: skip
        state.step += env.num_envs
        if "episode_return" in feedback.info:
            state.episode_returns = (state.episode_returns + feedback.info["episode_return"])[-100:]
            state.episode_lengths = (state.episode_lengths + feedback.info["episode_length"])[-100:]
        obs = feedback.obs
    return obs


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Collect, then learn, until `steps`. A given state goes on with new episodes and all that its replay holds."""
    if env.num_envs != config.num_envs:
        raise UserError(
            f"num_envs is {config.num_envs}, but the environment has {env.num_envs} worlds. Make them equal."
        )
    if state is None:
        state = build(config, env.spaces, device)
    elif state.replay.rows is not None and state.replay.rows.mask is not None:
        newest = (state.step // config.num_envs - 1) % state.replay.capacity  # what followed them is not known
        state.replay.rows.mask[:, newest] = 0
    length, home = config.unroll_steps + config.n_steps, state.generator.device
    obs = env.reset(config.seed + state.step)
    while state.step < config.steps:
        obs = collect(state, env, obs)
        watched: list[dict[str, float]] = []
        while state.step >= config.warmup and state.updates < (state.step - config.warmup) // config.update_every:
            batch = state.replay.sample(config.batch, length, state.shuffler)
            watched.append(update(state, batch.map(lambda x: x.to(home))))
        metrics = {name: sum(w[name] for w in watched) / len(watched) for name in (watched[0] if watched else ())}
        if state.episode_returns:
            metrics["return"] = sum(state.episode_returns) / len(state.episode_returns)
            metrics["length"] = sum(state.episode_lengths) / len(state.episode_lengths)
        yield state.step, metrics, state


def _check(config: Config) -> None:
    for name in (
        "num_envs",
        "unroll_steps",
        "n_steps",
        "samples",
        "batch",
        "update_every",
        "collect_steps",
        "target_every",
    ):
        if getattr(config, name) < 1:
            raise UserError(f"{name} must be at least 1, not {getattr(config, name)}.")
    length = config.unroll_steps + config.n_steps
    if config.warmup < config.num_envs * length:
        raise UserError(
            f"warmup is {config.warmup}: before the first update every world needs {length} rows (unroll_steps + "
            f"n_steps), so {config.num_envs * length} env steps."
        )
    if not 0 <= config.reanalyze <= 1:
        raise UserError(f"reanalyze is a share: between 0 and 1, not {config.reanalyze}.")

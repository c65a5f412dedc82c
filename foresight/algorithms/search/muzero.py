"""MuZero: Mastering Atari, Go, chess and shogi by planning with a learned model, Schrittwieser et al. 2020
(arXiv:1911.08265), with the reanalysis of Schrittwieser et al. 2021 (arXiv:2104.06294).

    minimise  Σ_{k=0..K} [ l(v^k, z_{t+k}) · c_v + CE(p^k, π_{t+k}) ] + Σ_{k=1..K} l(r^k, u_{t+k})

where s^0 = h(o_t), (r^k, s^k) = g(s^{k-1}, a_{t+k-1}), (p^k, v^k) = f(s^k); π are the visits of a search, and z is the
n-step return, z_t = u_t + γ u_{t+1} + … + γⁿ v_{t+n}.

What is kept: the latent model and its search with PUCT, values normalised over the tree, no legal moves inside it;
Dirichlet noise and a falling temperature; numbers as two-hot categoricals of the signed hyperbolic transform
(appendix F); latents scaled to [0, 1], every unrolled step's loss over K, the gradient into the dynamics halved
(appendix G); absorbing states after a termination, of value and reward 0; reanalysis: a share of the policy targets is
searched again with a slow copy of the network, which also gives the values that the returns bootstrap with.

Otherwise than there: a time limit is no termination (what would follow it is left out, and its return bootstraps with
the final observation); replay is uniform (LightZero's default); Adam.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from gymnasium import spaces as gs
from torch import Tensor
from torch.nn import functional

from foresight.data import trees
from foresight.data.replay import Replay
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Env, Spaces
from foresight.errors import UserError
from foresight.nets import encoders, optim
from foresight.nets.latent import LatentModel
from foresight.ops import latent, returns
from foresight.planning.search import PUCT, Dirichlet, search

WORLD = "control"
UNIT = "env steps"
METRICS = ("return", "length", "value_loss", "policy_loss", "reward_loss")
RULE = PUCT(normalize="tree", first_play="parent")  # an action never tried counts as its node: LightZero


@dataclass(frozen=True)
class Config:
    """Defaults: LightZero's CartPole where nothing else is said, with the paper's search."""

    steps: int = 50_000  # env steps in all worlds together
    seed: int = 0
    num_envs: int = 8  # worlds that act together, one search for all of them
    simulations: int = 25  # of each search; LightZero
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
    dirichlet_alpha: float = 0.25  # appendix C; muzero-general's CartPole
    dirichlet_fraction: float = 0.25  # appendix C
    temperatures: tuple[float, ...] = (1.0, 0.5, 0.25)  # from the start, half and three quarters on; appendix D
    latent_size: int = 64  # numbers of a state
    hidden: tuple[int, ...] = (128,)  # layers of each function
    support: int = 20  # bins on each side of 0, for h(x): 20 reaches ±416; 300 in the paper
    images: str = "nature"  # the encoder of pixels: "nature" or "impala"
    threads: int = 1  # of torch, on a CPU


@dataclass
class State:
    """All that a run is."""

    config: Config
    network: LatentModel
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
    """Networks, optimiser, replay. Raises UserError for actions that are not discrete."""
    _check(config)
    if not isinstance(spaces.action, gs.Discrete):
        raise UserError(f"MuZero needs discrete actions, not {spaces.action}: use sampled_muzero.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        encoder = encoders.encoder(spaces.obs, config.hidden, "relu", config.images)
        actions = int(spaces.action.n)
        network = LatentModel(
            encoder, actions, actions, config.latent_size, config.hidden, config.support, config.gamma
        ).to(device)
    return State(
        config,
        network,
        copy.deepcopy(network).requires_grad_(False),
        torch.optim.Adam(network.parameters(), config.learning_rate, weight_decay=config.weight_decay, fused=True),
        Replay(max(config.replay // config.num_envs, 1)),
        generator=torch.Generator(device).manual_seed(config.seed),
        shuffler=torch.Generator().manual_seed(config.seed),
    )


def act(state: State, obs: Any, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """Search from every row of `obs`; with `explore` noise and temperature, else the most visited action.

    Extras: `weights` `[B, A]`, the policy target, and `value` `[B]`, the root's.
    """
    config = state.config
    heat = config.temperatures[min(max(4 * state.step // config.steps - 1, 0), len(config.temperatures) - 1)]
    noise = Dirichlet(config.dirichlet_alpha, config.dirichlet_fraction)
    found = search(
        state.network, trees.to(obs, state.generator.device), config.simulations, RULE,
        noise=noise if explore else None, temperature=heat if explore else 0.0,
        generator=state.generator if explore else None,
    )  # fmt: skip
    return found.action, {"weights": found.weights, "value": found.value}, carry


@torch.no_grad()
def targets(state: State, batch: Trajectory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(alive, known, value, weights)` of the first K + 1 rows of pieces `[B, K + n]`.

    Shapes `[B, K + 1]`, weights `[B, K + 1, A]`. `alive` rows belong to the first row's episode; `known` also are
    those after its termination, whose value is 0.
    """
    config, rows = state.config, state.config.unroll_steps + 1
    alive, over = (x[:, :rows] for x in latent.unroll_masks(batch.discount, batch.cut, batch.mask))
    flat = trees.tree_map(lambda x: x.flatten(0, 1), batch.extras["next_obs"])
    next_value = state.target.root(flat)[1].view(batch.shape)
    value = returns.n_step_return(
        batch.reward, config.gamma * batch.discount, batch.cut, next_value, config.n_steps, batch.mask
    )[:, :rows]
    weights = batch.extras["weights"][:, :rows].clone()
    again = int(config.reanalyze * len(weights))
    if again:
        weights[:again] = reanalyze(state, batch, again)
    return alive, torch.maximum(alive, over), value * alive, weights


def reanalyze(state: State, batch: Trajectory, pieces: int) -> Tensor:
    """Policy targets `[pieces, K + 1, A]` searched anew, with the slow copy of the network."""
    rows = state.config.unroll_steps + 1
    obs = trees.tree_map(lambda x: x[:pieces, :rows].flatten(0, 1), batch.obs)
    found = search(state.target, obs, state.config.simulations, RULE)
    return found.weights.view(pieces, rows, -1)


def loss(state: State, batch: Trajectory) -> dict[str, Tensor]:
    """The terms of the loss over pieces `[B, K + n]`, each a scalar."""
    network, unroll = state.network, state.config.unroll_steps
    alive, known, value, weights = targets(state, batch)
    hidden = network.represent(trees.tree_map(lambda x: x[:, 0], batch.obs))
    terms: dict[str, list[Tensor]] = {"policy_loss": [], "value_loss": [], "reward_loss": []}
    for k in range(unroll + 1):
        scale = 1.0 if k == 0 else 1.0 / unroll
        if k > 0:
            hidden, on_the_way = network.advance(hidden, network.eye[batch.action[:, k - 1]])
            hidden = latent.scale_gradient(hidden, 0.5)
            reward = batch.reward[:, k - 1] * alive[:, k - 1]
            terms["reward_loss"].append(scale * known[:, k - 1] * network.reward.loss(on_the_way, reward))
        ahead = network.head(hidden)
        policy = functional.cross_entropy(network.policy(ahead), weights[:, k], reduction="none")
        terms["policy_loss"].append(scale * alive[:, k] * policy)
        terms["value_loss"].append(scale * known[:, k] * network.value.loss(ahead, value[:, k]))
    return {name: torch.stack(parts, 1).sum(1).mean() for name, parts in terms.items()}


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One gradient step on pieces `[B, K + n]` of the replay."""
    config = state.config
    terms = loss(state, batch)
    total = terms["policy_loss"] + config.value_coef * terms["value_loss"] + terms["reward_loss"]
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
        extras = {"weights": extras["weights"].cpu(), "next_obs": feedback.final_obs}
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
    for name in ("num_envs", "unroll_steps", "n_steps", "batch", "update_every", "collect_steps", "target_every"):
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

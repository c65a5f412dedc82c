"""EfficientZero: Mastering Atari games with limited data, Ye et al. 2021 (arXiv:2111.00210).

    minimise  Σ_{k=0..K} [ CE(p^k, π_{t+k}) + c_v · l(v^k, z_{t+k}) ] + Σ_{k=1..K} [ l(x^k, Σ u_{t+j}) - c_s · cos_k ]

where x^k is the value prefix, the sum of rewards since the last reset, which an LSTM predicts; cos is between the
predictor of the unrolled latent and the latent of what was really seen (no gradient into the latter). The rest is
MuZero (arXiv:1911.08265).

What is kept: the value prefix with its resets every `horizon` steps, in the unroll and in the search; self-supervised
consistency through a projection and a predictor (SimSiam); off-policy correction, by which old rows bootstrap after
fewer steps; policy targets searched again with a slow copy of the network, which also gives the values.

Otherwise than there: a time limit is no termination; replay is uniform, without priorities; Adam; images are not
augmented.
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
from foresight.nets.prefix import PrefixModel
from foresight.ops import latent, returns
from foresight.planning.search import PUCT, Dirichlet, search

WORLD = "control"
UNIT = "env steps"
METRICS = ("return", "length", "value_loss", "policy_loss", "prefix_loss", "consistency")
RULE = PUCT(normalize="tree", first_play="parent")  # an action never tried counts as its node: LightZero


@dataclass(frozen=True)
class Config:
    """Defaults: LightZero's CartPole where nothing else is said, with the paper's coefficients."""

    steps: int = 50_000  # env steps in all worlds together
    seed: int = 0
    num_envs: int = 8  # worlds that act together, one search for all of them
    simulations: int = 25  # of each search; LightZero
    gamma: float = 0.997  # a step; the paper, appendix G
    unroll_steps: int = 5  # K; appendix G
    n_steps: int = 5  # of the returns of fresh rows; the paper, appendix A
    shrink: float = 0.3  # share of training by which a row's returns lose a step; the paper's code
    batch: int = 128  # pieces a gradient step
    update_every: int = 4  # env steps for each gradient step
    collect_steps: int = 32  # steps of each world between two rounds of updates
    warmup: int = 1_000  # env steps before the first gradient step
    replay: int = 100_000  # rows kept, of all worlds together
    reanalyze: float = 0.99  # share of policy targets searched again; the paper's code
    target_every: int = 200  # gradient steps between copies of the network; 100 in LightZero
    learning_rate: float = 3e-3  # Adam; LightZero
    weight_decay: float = 1e-4  # appendix G
    max_grad_norm: float = 10.0  # LightZero
    value_coef: float = 0.25  # c_v; the paper, appendix A
    consistency_coef: float = 2.0  # c_s; the paper, appendix A
    horizon: int = 5  # steps between resets of the value prefix; the paper's code
    lstm: int = 64  # its width; 512 on Atari
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
    network: PrefixModel
    target: PrefixModel  # the slow copy: values to bootstrap with, and reanalysis
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
        raise UserError(f"EfficientZero needs discrete actions, not {spaces.action}: use sampled_muzero.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        encoder = encoders.encoder(spaces.obs, config.hidden, "relu", config.images)
        actions = int(spaces.action.n)
        network = PrefixModel(
            encoder,
            actions,
            config.latent_size,
            config.hidden,
            config.lstm,
            config.horizon,
            config.support,
            config.gamma,
        ).to(device)  # fmt: skip
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
    total = max((config.steps - config.warmup) / config.update_every, 1.0)
    steps = latent.shrunk_horizon(state.updates - batch.extras["born"][:, 0], total, config.n_steps, config.shrink)
    each = [  # [B, K + 1] for every number of steps
        returns.n_step_return(batch.reward, config.gamma * batch.discount, batch.cut, next_value, n, batch.mask)[
            :, :rows
        ]
        for n in range(1, config.n_steps + 1)
    ]
    value = torch.stack(each)[steps - 1, torch.arange(len(steps), device=steps.device)]
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
    prefix = latent.value_prefix(batch.reward[:, :unroll], alive[:, :unroll], state.config.horizon)
    hidden = network.represent(_row(batch.obs, 0))
    terms: dict[str, list[Tensor]] = {"policy_loss": [], "value_loss": [], "prefix_loss": [], "consistency": []}
    for k in range(unroll + 1):
        scale = 1.0 if k == 0 else 1.0 / unroll
        if k > 0:
            hidden = network.advance(hidden, batch.action[:, k - 1])
            hidden["latent"] = latent.scale_gradient(hidden["latent"], 0.5)
            told = network.prefix.loss(hidden["h"], prefix[:, k - 1])
            terms["prefix_loss"].append(scale * known[:, k - 1] * told)
            with torch.no_grad():
                seen = network.projection(network.represent(_row(batch.obs, k))["latent"])
            agreed = latent.negative_cosine(network.predictor(network.projection(hidden["latent"])), seen)
            terms["consistency"].append(scale * alive[:, k] * agreed)
            hidden = network.renew(hidden)
        ahead = network.head(hidden["latent"])
        policy = functional.cross_entropy(network.policy(ahead), weights[:, k], reduction="none")
        terms["policy_loss"].append(scale * alive[:, k] * policy)
        terms["value_loss"].append(scale * known[:, k] * network.value.loss(ahead, value[:, k]))
    return {name: torch.stack(parts, 1).sum(1).mean() for name, parts in terms.items()}


def _row(obs: Any, k: int) -> Any:
    """Row k of every piece."""
    return trees.tree_map(lambda x: x[:, k], obs)


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One gradient step on pieces `[B, K + n]` of the replay."""
    config = state.config
    terms = loss(state, batch)
    total = (
        terms["policy_loss"]
        + terms["prefix_loss"]
        + config.value_coef * terms["value_loss"]
        + config.consistency_coef * terms["consistency"]
    )
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
        born = torch.full((env.num_envs,), state.updates)
        extras = {"weights": extras["weights"].cpu(), "next_obs": feedback.final_obs, "born": born}
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
        "horizon",
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

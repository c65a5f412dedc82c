"""EfficientZero: Mastering Atari games with limited data, Ye et al. 2021 (arXiv:2111.00210).

    minimize  Σ_{k=0..K} [ CE(p^k, π_{t+k}) + c_v · l(v^k, z_{t+k}) ] + Σ_{k=1..K} [ l(x^k, Σ u_{t+j}) - c_s · cos_k ]

where x^k is the value prefix, the sum of rewards since the last reset, which an LSTM predicts; cos is between the
predictor of the unrolled latent's projection and the projection of the latent of what was really seen (no gradient into
the latter). The rest is MuZero (arXiv:1911.08265).

What is kept: the value prefix with its resets every `lstm_horizon` steps, in the unroll and in the search;
self-supervised consistency through a normalized projection and a predictor (SimSiam); off-policy correction, by which
old rows bootstrap after fewer steps; policy targets searched again with a slow copy of the network, which also gives
the values.

Otherwise than there: a time limit is no termination; replay is uniform, without priorities; Adam; images are not
augmented.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresight.data import trees
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Env, Spaces, require_end, require_num_envs
from foresight.errors import UserError
from foresight.nets import encoders
from foresight.nets.models.efficientzero import PrefixModel
from foresight.ops import diagnostics, latent
from foresight.planning.search.mcts import PUCT, Dirichlet, search
from foresight.training import muzero_targets

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "value_loss", "policy_loss", "prefix_loss", "consistency")
ACTING = ("network",)  # the fields of State that actors are sent
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
    batch_size: int = 128  # pieces a gradient step
    train_every: int = 4  # env steps for each gradient step
    collect_steps: int = 32  # steps of each world between two rounds of updates, and in a message of an actor
    max_lag: int = 1  # rounds of updates that a policy of actors may be old; 0: they wait, as without actors
    learning_starts: int = 1_000  # env steps before the first gradient step
    replay_size: int = 100_000  # rows kept, of all worlds together
    reanalyze: float = 0.99  # share of policy targets searched again; the paper's code
    target_every: int = 200  # gradient steps between copies of the network; 100 in LightZero
    learning_rate: float = 3e-3  # Adam; LightZero
    learning_rate_decay: float = 1.0  # its factor at the end, reached evenly; 0.1 ** (1000 / 350) in appendix G
    weight_decay: float = 1e-4  # appendix G
    max_grad_norm: float = 10.0  # LightZero
    value_coef: float = 0.25  # c_v; the paper, appendix A
    consistency_coef: float = 2.0  # c_s; the paper, appendix A
    lstm_horizon: int = 5  # steps between resets of the value prefix; the paper's code
    lstm_size: int = 64  # its width; 512 on Atari
    dirichlet_alpha: float = 0.25  # appendix C; muzero-general's CartPole
    dirichlet_fraction: float = 0.25  # appendix C
    temperatures: tuple[float, ...] = (1.0, 0.5, 0.25)  # from the start, half and three quarters on; appendix D
    latent_size: int = 64  # numbers of a state
    hidden: tuple[int, ...] = (128,)  # layers of each function
    support: int = 20  # bins on each side of 0, for h(x): 20 reaches ±422; 300 in the paper
    images: str = "nature"  # the encoder of pixels: "nature", "nips" or "impala"
    threads: int = 1  # of torch, on a CPU


State = muzero_targets.State  # the network and its slow copy, optimizer, replay, generators, counts


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizer, replay. Raises UserError for actions that are not discrete."""
    muzero_targets.check(config, "lstm_horizon", "lstm_size")
    if config.batch_size * config.unroll_steps < 2:
        raise UserError("Consistency is measured over a batch: batch times unroll_steps must be at least 2.")
    require_end(spaces, config.gamma)
    actions = muzero_targets.choices(spaces.action, "EfficientZero")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        encoder = encoders.encoder(spaces.obs, config.hidden, "relu", config.images)
        network = PrefixModel(
            encoder,
            actions,
            config.latent_size,
            config.hidden,
            config.lstm_size,
            config.lstm_horizon,
            config.support,
            config.gamma,
        )  # fmt: skip
    return State(config, **muzero_targets.parts(config, network, device))


def act(state: State, obs: Any, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """Search from every row of `obs`; with `explore` noise and temperature, else the most visited action.

    Extras: `weights` `[B, A]`, the policy target, and `value` `[B]`, the root's.
    """
    config = state.config
    noise = Dirichlet(config.dirichlet_alpha, config.dirichlet_fraction)
    obs, legal = muzero_targets.seen(state, obs)
    found = search(
        state.network, obs, config.simulations, RULE, legal=legal,
        noise=noise if explore else None, temperature=muzero_targets.temperature(state) if explore else 0.0,
        generator=state.generator if explore else None,
    )  # fmt: skip
    return found.action, {"weights": found.weights, "value": found.value}, carry


@torch.no_grad()
def targets(state: State, batch: Trajectory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(alive, known, value, weights)` of the first K + 1 rows of pieces `[B, K + n]`; weights `[B, K + 1, A]`.

    See `unroll.targets`: old rows bootstrap after fewer steps.
    """
    config, age = state.config, state.updates - batch.extras["born"][:, 0]
    total = max((config.steps - config.learning_starts) / config.train_every, 1.0)
    steps = latent.shrunk_horizon(age, total, config.n_steps, config.shrink)
    alive, known, value = muzero_targets.targets(state, batch, steps)
    return alive, known, value, muzero_targets.policies(state, batch, reanalyze, ("weights",))["weights"]


def reanalyze(state: State, obs: Any) -> dict[str, Tensor]:
    """The policy targets of observations `[N, ...]`, searched anew with the slow copy of the network."""
    obs, legal = muzero_targets.seen(state, obs)
    return {"weights": search(state.target, obs, state.config.simulations, RULE, legal=legal).weights}


def loss(state: State, batch: Trajectory) -> dict[str, Tensor]:
    """The terms of the loss over pieces `[B, K + n]`, each a scalar."""
    network, steps = state.network, state.config.unroll_steps
    alive, known, value, weights = targets(state, batch)
    prefix = latent.value_prefix(batch.reward[:, :steps], alive[:, :steps], state.config.lstm_horizon)
    hidden = network.represent(muzero_targets.row(batch.obs, 0))
    latents, sums = [hidden["latent"]], []
    for k in range(steps):
        hidden = network.advance(hidden, batch.action[:, k])
        hidden["latent"] = latent.scale_gradient(hidden["latent"], 0.5)
        latents.append(hidden["latent"])
        sums.append(hidden["h"])
        hidden = network.renew(hidden)
    states = torch.stack(latents, 1)  # of all steps: many small layers cost more than a large one
    ahead, reached = network.head(states), states[:, 1:]
    with torch.no_grad():  # the successor itself: also where an episode ended with it
        real = trees.tree_map(lambda x: x[:, :steps].flatten(0, 1), batch.extras["next_obs"])
        seen = network.project(network.represent(real)["latent"])
    agreed = latent.negative_cosine(network.predictor(network.project(reached.flatten(0, 1))), seen)
    terms = {
        "policy_loss": alive * latent.cross_entropy(network.policy(ahead), weights),
        "value_loss": known * network.value.loss(ahead, value),
        "prefix_loss": known[:, :steps] * network.prefix.loss(torch.stack(sums, 1), prefix),
        "consistency": alive[:, :steps] * agreed.view(-1, steps),
    }
    return muzero_targets.summed(terms, steps)


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One gradient step on pieces `[B, K + n]` of the replay."""
    terms = loss(state, batch)
    muzero_targets.descend(
        state,
        terms["policy_loss"]
        + terms["prefix_loss"]
        + state.config.value_coef * terms["value_loss"]
        + state.config.consistency_coef * terms["consistency"],
    )
    return {name: term.item() for name, term in terms.items()}


restart = muzero_targets.restart


@torch.no_grad()
def rollout(state: State, env: Env, obs: Any) -> tuple[Trajectory, Any]:
    """Search and act for `collect_steps` steps of every env from `obs`: transitions `[B, T]`, and the next `obs`."""
    rows = []
    for _ in range(state.config.collect_steps):
        action, extras, _ = act(state, obs, explore=True)
        action = action.cpu()
        feedback = env.step(action.clone())
        rows.append(muzero_targets.transition(obs, action, feedback, {"weights": extras["weights"]}))
        state.step += env.num_envs
        state.episodes.note(feedback.info)
        obs = feedback.obs
    return Trajectory(**trees.stack(rows)), obs


def learn(state: State, rows: Trajectory) -> dict[str, float]:
    """Store transitions `[B, T]`, then take the gradient steps that are due: the means of their metrics."""
    born = torch.full(rows.shape, state.updates, device=rows.reward.device)  # how old they are, in updates
    rows = rows.replace(extras={**rows.extras, "born": born})
    state.replay.add(rows.map(lambda x: x.cpu()))
    metrics = []
    while muzero_targets.due(state):
        metrics.append(update(state, muzero_targets.sample(state)))
    return {**diagnostics.mean(metrics), **state.episodes.metrics()}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Collect, then learn, until `steps`. A given state goes on with new episodes and all that its replay holds."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    restart(state)
    obs = env.reset(config.seed + state.step)
    while state.step < config.steps:
        rows, obs = rollout(state, env, obs)
        yield state.step, learn(state, rows), state

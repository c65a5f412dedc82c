"""Sampled MuZero: Learning and planning in complex action spaces, Hubert et al. 2021 (arXiv:2104.06303).

    minimize  Σ_{k=0..K} [ l(v^k, z_{t+k}) · c_v - Σ_i π̂(a_i) ln p^k(a_i) - c_e H(p^k) ] + Σ_{k=1..K} l(r^k, u_{t+k})

where a_1 … a_N are drawn from the policy at every node of the search, and π̂ are the visits of those at the root. The
rest is MuZero (arXiv:1911.08265), for real actions, and for choices of which there are too many to search them all.

What is kept: actions drawn anew at every node from β = π^(1/τ), the search's prior (β̂/β) π over them, Dirichlet noise
over those of the root while exploring, the policy as a distribution that is fitted to the visits of the drawn actions,
MuZero's model, returns and unroll; reanalysis of a share of the targets, with actions drawn anew, by a slow copy of the
network.

Otherwise than there: the policy over real actions is a normal squashed by tanh into their bounds; a time limit is no
termination; replay is uniform; Adam; an entropy bonus (LightZero).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.data import trees
from foresight.data.replay import Replay
from foresight.data.trajectory import Trajectory
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.errors import UserError
from foresight.nets.heads import CategoricalHead, TanhNormalHead
from foresight.nets.models.muzero import LatentModel
from foresight.ops import diagnostics, latent
from foresight.planning.search.mcts import PUCT, Dirichlet, SearchResult, search
from foresight.planning.search.sampled import SampledActions, root_actions
from foresight.training import muzero_targets

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "value_loss", "policy_loss", "reward_loss", "entropy")
ACTING = ("network",)  # the fields of State that actors are sent
KEPT = ("weights", "actions", "taken")  # of what `act` says, to learn from
RULE = PUCT(normalize="tree", first_play="parent")  # an action never tried counts as its node: LightZero


@dataclass(frozen=True)
class Config:
    """Defaults: LightZero's Pendulum where nothing else is said, with the paper's search."""

    steps: int = 50_000  # env steps in all worlds together
    seed: int = 0
    num_envs: int = 8  # worlds that act together, one search for all of them
    simulations: int = 50  # of each search; appendix A of the paper
    samples: int = 20  # N, actions drawn at every node; appendix A
    sample_temperature: float = 1.0  # τ: they are drawn from π^(1/τ); 1, the policy itself, in LightZero
    gamma: float = 0.997  # a step; the paper, appendix G
    unroll_steps: int = 5  # K; appendix G
    n_steps: int = 5  # of the returns; 10 on Atari in the paper, 5 in reanalysis and LightZero
    batch_size: int = 128  # pieces a gradient step
    train_every: int = 4  # env steps for each gradient step
    collect_steps: int = 32  # steps of each world between two rounds of updates, and in a message of an actor
    max_lag: int = 1  # rounds of updates that a policy of actors may be old; 0: they wait, as without actors
    learning_starts: int = 1_000  # env steps before the first gradient step
    replay_size: int = 100_000  # rows kept, of all worlds together
    reanalyze: float = 0.5  # share of policy targets searched again; 0.8 of the updates in arXiv:2104.06294
    target_every: int = 200  # gradient steps between copies of the network; 100 in LightZero
    learning_rate: float = 3e-3  # Adam; LightZero
    learning_rate_decay: float = 1.0  # its factor at the end, reached evenly; 0.1 ** (1000 / 350) in appendix G
    weight_decay: float = 1e-4  # appendix G
    max_grad_norm: float = 10.0  # LightZero
    value_coef: float = 0.25  # c_v; arXiv:2104.06294
    entropy_coef: float = 5e-3  # c_e, nats; LightZero
    dirichlet_alpha: float = 0.3  # of the noise over the draws at the root; LightZero
    dirichlet_fraction: float = 0.25  # its weight there; LightZero
    temperatures: tuple[float, ...] = (1.0, 0.5, 0.25)  # from the start, half and three quarters on
    latent_size: int = 64  # numbers of a state
    hidden: tuple[int, ...] = (128,)  # layers of each function
    support: int = 40  # bins on each side of 0, for h(x): 40 reaches ±1,555
    images: str = "nature"  # the encoder of pixels: "nature", "nips" or "impala"
    threads: int = 1  # of torch, on a CPU


@dataclass
class State:
    """All that a run is."""

    config: Config
    network: LatentModel
    head: TanhNormalHead | CategoricalHead  # makes a distribution of the network's numbers
    low: Tensor  # bounds of real actions, [D]
    high: Tensor
    target: LatentModel  # the slow copy: values to bootstrap with, and reanalysis
    optimizer: torch.optim.Adam
    replay: Replay
    generator: torch.Generator  # noise and actions of the searches
    shuffler: torch.Generator  # draws the pieces, on the CPU
    step: int = 0
    updates: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 that finished


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizer, replay. Raises UserError for actions that are neither choices nor a bounded Box."""
    muzero_targets.check(config, "samples")
    if not 0 < config.sample_temperature < float("inf"):
        raise UserError(
            f"sample_temperature must be above 0 (1 draws from the policy itself), not {config.sample_temperature}."
        )
    require_end(spaces, config.gamma)
    space, head = spaces.action, _head(spaces.action)
    features = head.width if isinstance(head, CategoricalHead) else head.width // 2
    network = muzero_targets.latent_model(config, spaces.obs, features, head.width)
    bounds = (space.low, space.high) if isinstance(space, gs.Box) else ((), ())
    low, high = (torch.as_tensor(bound, device=device) for bound in bounds)
    return State(config, head=head, low=low, high=high, **muzero_targets.parts(config, network, device))


def _head(space: gs.Space[Any]) -> TanhNormalHead | CategoricalHead:
    if isinstance(space, gs.Discrete):
        return CategoricalHead(int(space.n))
    if not isinstance(space, gs.Box) or len(space.shape) != 1 or not space.is_bounded():
        raise UserError(f"Sampled MuZero needs choices or a bounded Box of one dim for actions, not {space}.")
    return TanhNormalHead(space.shape[0], bounds=(-3.0, 1.0))


def act(state: State, obs: Any, carry: None = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], None]:
    """Search from every row of `obs`; with `explore` noise and temperature, else the most visited drawn action.

    Extras: the drawn `actions` `[B, N, D]` in (-1, 1), their `weights` `[B, N]`, the `value` `[B]` of the root, and
    `taken` `[B, D]`, the action before it was stretched to its bounds. Of choices `actions` are int64 `[B, N]`, and
    `taken` `[B]` is the action.
    """
    found, drawn = _search(state, state.network, obs, explore)
    taken = drawn[torch.arange(len(drawn), device=drawn.device), found.action]
    action = taken if _is_discrete(state) else state.low + (taken + 1) / 2 * (state.high - state.low)
    return action, {"actions": drawn, "weights": found.weights, "value": found.value, "taken": taken}, carry


def _search(state: State, network: LatentModel, obs: Any, explore: bool) -> tuple[SearchResult, Tensor]:
    config, (obs, legal) = state.config, muzero_targets.seen(state, obs)
    model = SampledActions(network, state.head, config.samples, state.generator, legal, config.sample_temperature)
    noise = Dirichlet(config.dirichlet_alpha, config.dirichlet_fraction)
    found = search(
        model, obs, config.simulations, RULE, noise=noise if explore else None,
        temperature=muzero_targets.temperature(state) if explore else 0.0, generator=state.generator,
    )  # fmt: skip
    return found, root_actions(found.tree)


@torch.no_grad()
def targets(state: State, batch: Trajectory) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`(alive, known, value, weights, actions)` of the first K + 1 rows of pieces `[B, K + n]`; see `unroll.targets`.

    Weights `[B, K + 1, N]` are of the drawn actions `[B, K + 1, N, D]` or, of choices, `[B, K + 1, N]`.
    """
    alive, known, value = muzero_targets.targets(state, batch, state.config.n_steps)
    policy = muzero_targets.policies(state, batch, reanalyze, ("weights", "actions"))
    return alive, known, value, policy["weights"], policy["actions"]


def reanalyze(state: State, obs: Any) -> dict[str, Tensor]:
    """The policy targets of observations `[N, ...]`, with actions drawn anew by the slow copy of the network."""
    found, drawn = _search(state, state.target, obs, False)
    return {"weights": found.weights, "actions": drawn}


def loss(state: State, batch: Trajectory) -> dict[str, Tensor]:
    """The terms of the loss over sequences `[B, K + n]`, each a scalar; `entropy` is maximized."""
    network, steps = state.network, state.config.unroll_steps
    alive, known, value, weights, drawn = targets(state, batch)
    taken = batch.extras["taken"]
    actions = network.eye[taken] if _is_discrete(state) else taken
    states, features = [network.represent(muzero_targets.row(batch.obs, 0))], []
    before = states[0]
    for k in range(steps):
        after, on_the_way = network.advance(before, actions[:, k])  # the reward is read from `on_the_way`
        states.append(after)
        features.append(on_the_way)
        before = latent.scale_gradient(after, 0.5)  # MuZero, appendix G
    head = network.head(torch.stack(states, 1))  # all K + 1 at once: faster than K + 1 small calls
    parameters = network.policy(head)  # [B, K + 1, W]
    policy = state.head(parameters)
    of_each_draw = state.head(parameters.unsqueeze(2).expand(-1, -1, state.config.samples, -1))
    reward = batch.reward[:, :steps] * alive[:, :steps]
    terms = {
        "policy_loss": alive * -(weights * of_each_draw.logp(drawn)).sum(-1),
        "entropy": alive * policy.entropy(),
        "value_loss": known * network.value.loss(head, value),
        "reward_loss": known[:, :steps] * network.reward.loss(torch.stack(features, 1), reward),
    }
    return muzero_targets.summed(terms, steps)


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One gradient step on pieces `[B, K + n]` of the replay."""
    terms = loss(state, batch)
    total = terms["policy_loss"] + state.config.value_coef * terms["value_loss"] + terms["reward_loss"]
    muzero_targets.descend(state, total - state.config.entropy_coef * terms["entropy"])
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
        rows.append(muzero_targets.transition(obs, action, feedback, {name: extras[name] for name in KEPT}))
        state.step += env.num_envs
        state.episodes.note(feedback.info)
        obs = feedback.obs
    return Trajectory(**trees.stack(rows)), obs


def learn(state: State, rows: Trajectory) -> dict[str, float]:
    """Store transitions `[B, T]`, then take the gradient steps that are due: the means of their metrics."""
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


def _is_discrete(state: State) -> bool:
    return isinstance(state.head, CategoricalHead)

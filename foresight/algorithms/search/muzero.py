"""MuZero: Mastering Atari, Go, chess and shogi by planning with a learned model, Schrittwieser et al. 2020
(arXiv:1911.08265), with the reanalysis of Schrittwieser et al. 2021 (arXiv:2104.06294).

    minimize  Σ_{k=0..K} [ l(v^k, z_{t+k}) · c_v + CE(p^k, π_{t+k}) ] + Σ_{k=1..K} l(r^k, u_{t+k})

where s^0 = h(o_t), (r^k, s^k) = g(s^{k-1}, a_{t+k-1}), (p^k, v^k) = f(s^k); π are the visits of a search, and z is the
n-step return, z_t = u_t + γ u_{t+1} + … + γⁿ v_{t+n}.

Kept: the latent model and its PUCT search, with values normalized over the tree and legal moves only at the root;
two-player games with discount -γ, so that values are those of the player to move; Dirichlet noise and a falling
temperature; scalars as two-hot categoricals of the signed hyperbolic transform (appendix F); latents scaled to [0, 1],
unrolled losses weighted 1/K, the gradient into the dynamics halved (appendix G); absorbing states of value and reward 0
after a termination; reanalysis: a share of the policy targets comes from a new search with a target network, which also
gives the bootstrap values. The papers leave open whether that search has root noise; here it has.

Different here: a time limit is not a termination (later steps are masked, and the return bootstraps with the final
observation); sequences of games may be trained on under symmetries of the board; Adam. Replay is uniform (LightZero's
default) unless `priority_exponent` is set: then P ∝ |ν - z|^α, where ν is the search's value when acting (appendix G).
With `search_values` reanalyzed sequences have the values of their new searches as z (arXiv:2403.00564).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresight.data import trees
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs.base import Env, Spaces, require_num_envs
from foresight.envs.games import selfplay
from foresight.envs.games.game import Game
from foresight.ops import diagnostics, latent
from foresight.planning.search.mcts import PUCT, search
from foresight.training import muzero_targets
from foresight.training.options import ModelTraining

KIND = "control"
GAMES = True  # also two-player games
UNIT = "env steps"
METRICS = ("return", "length", "value_loss", "policy_loss", "reward_loss")
ACTING = ("network",)  # State fields sent to actors
RULE = PUCT(normalize="tree", first_play="parent")  # untried actions have their parent's value: LightZero
# With `known_bounds`: normalized by the tree's own bounds, a slight edge would look like a sure win. The range of
# [-1, 1] is twice that of [0, 1], so c_init is doubled.
BOARD = PUCT(c_init=2.5, normalize="none", first_play="parent")


@dataclass(frozen=True)
class Config:
    """Defaults: LightZero's CartPole unless noted, with the paper's search."""

    steps: int = 50_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 8  # parallel environments; one batched search serves all of them
    simulations: int = 25  # simulations per search; LightZero
    play_simulations: int | None = None  # simulations per search in play and evaluation; None: as in training
    known_bounds: bool = False  # in games, do not normalize values, which lie in [-1, 1]; the pseudocode's known bounds
    symmetries: bool = False  # in games, train each sequence under a random symmetry of the board
    gamma: float = 0.997  # discount per step; MuZero, appendix G
    unroll_steps: int = 5  # K: steps of the unrolled model; MuZero, appendix G
    n_steps: int = 5  # n: rewards before the bootstrap; 10 on Atari in MuZero, 5 in reanalysis and LightZero
    reanalyze: float = 0.5  # share of policy targets that are recomputed; 0.8 of the updates in arXiv:2104.06294
    value_coef: float = 0.25  # c_v: weight of the value loss; arXiv:2104.06294
    dirichlet_alpha: float = 0.25  # α of the root noise; muzero-general's CartPole
    dirichlet_fraction: float = 0.25  # weight of the root noise; MuZero, appendix C
    temperatures: tuple[float, ...] = (1.0, 0.5, 0.25)  # at the start, from 1/2, from 3/4 of training; MuZero, app. D
    training: ModelTraining = ModelTraining()  # model, replay, optimizer (`training.options`)


State = muzero_targets.State  # network, target network, optimizer, replay, generators, counters


def build(config: Config, spaces: Spaces | Game, device: str | torch.device = "cpu") -> State:
    """Networks, optimizer, replay. Raises UserError if the actions are not discrete."""
    muzero_targets.check(config)
    muzero_targets.check_exploration(config)
    muzero_targets.check_play(config)
    muzero_targets.check_game(config, spaces, "known_bounds", "symmetries")
    return muzero_targets.build(config, spaces, "MuZero", device)


def act(
    state: State, obs: Tree, carry: None = None, explore: bool = False, simulations: int | None = None
) -> tuple[Tensor, dict[str, Any], None]:
    """Search from each row of `obs`. `explore` adds noise and temperature; otherwise the most visited action is played.

    Extras: `weights` `[B, A]`, the policy target; `value` `[B]` of the root; `visits`, `prior` `[B, A]`; `tree`.
    `simulations` defaults to the Config's (`muzero_targets.num_simulations`). In a game `obs` may be positions.
    """
    config = state.config
    obs, legal = muzero_targets.observe(state, obs)
    found = search(
        state.network, obs, muzero_targets.num_simulations(config, explore, simulations), _rule(state), legal=legal,
        noise=muzero_targets.root_noise(config) if explore else None,
        temperature=muzero_targets.temperature(state) if explore else 0.0,
        generator=state.generator if explore else None,
    )  # fmt: skip
    extras = {"weights": found.weights, "value": found.value, "visits": found.visits}
    return found.action, {**extras, "prior": found.tree.prior[:, 0], "tree": found.tree}, carry


@torch.no_grad()
def targets(state: State, batch: Trajectory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(alive, known, value, weights)` of the first K + 1 steps of sequences `[B, K + n]`; weights `[B, K + 1, A]`.

    See `muzero_targets.targets`.
    """
    policy = muzero_targets.policy_targets(state, batch, reanalyze, ("weights",))
    alive, known, value = muzero_targets.targets(state, batch, state.config.n_steps, policy.get("value"))
    return alive, known, value, policy["weights"]


def reanalyze(state: State, obs: Tree) -> dict[str, Tensor]:
    """Policy targets and root values of observations `[N, ...]`, by a search of the target network with root noise."""
    obs, legal = muzero_targets.observe(state, obs)
    found = search(
        state.target, obs, state.config.simulations, _rule(state), legal=legal,
        noise=muzero_targets.root_noise(state.config), generator=state.generator,
    )  # fmt: skip
    return {"weights": found.weights, "value": found.value}


def loss(state: State, batch: Trajectory) -> dict[str, Tensor]:
    """The terms of the loss over sequences `[B, K + n]`, each a scalar.

    The model is unrolled along the K actions taken. The gradient back through g is halved from the second step on
    (appendix G and the pseudocode).
    """
    network, steps = state.network, state.config.unroll_steps
    alive, known, value, weights = targets(state, batch)
    muzero_targets.prioritize(state, batch, value)
    actions = network.eye[batch.action]
    states, features = [network.represent(muzero_targets.at_step(batch.obs, 0))], []
    before = states[0]
    for k in range(steps):
        after, intermediate = network.advance(before, actions[:, k])  # the reward is read from `intermediate`
        states.append(after)
        features.append(intermediate)
        before = latent.scale_gradient(after, 0.5)
    head = network.head(torch.stack(states, 1))  # all K + 1 at once: faster than K + 1 small calls
    reward = batch.reward[:, :steps] * alive[:, :steps]
    terms = {
        "policy_loss": alive * latent.cross_entropy(network.policy(head), weights),
        "value_loss": known * network.value.loss(head, value),
        "reward_loss": known[:, :steps] * network.reward.loss(torch.stack(features, 1), reward),
    }
    return muzero_targets.summed(terms, steps, batch.extras.get("weight"))


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One gradient step on sequences `[B, K + n]` from the replay."""
    terms = loss(state, batch)
    muzero_targets.descend(
        state, terms["policy_loss"] + state.config.value_coef * terms["value_loss"] + terms["reward_loss"]
    )
    return {name: term.item() for name, term in terms.items()}


restart = muzero_targets.restart


@torch.no_grad()
def rollout(state: State, env: Env, obs: Tree) -> tuple[Trajectory, Tree]:
    """Search and act for `collect_steps` steps of every env from `obs`: transitions `[B, T]`, and the next `obs`."""
    transitions = []
    for _ in range(state.config.training.collect_steps):
        action, extras, _ = act(state, obs, explore=True)
        action = action.cpu()
        feedback = env.step(action.clone())
        transitions.append(muzero_targets.transition(obs, action, feedback, muzero_targets.kept(state.config, extras)))
        state.step += env.num_envs
        state.episodes.note(feedback.info)
        obs = feedback.obs
    return Trajectory(**trees.stack(transitions)), obs


def learn(state: State, transitions: Trajectory) -> dict[str, float]:
    """Store transitions `[B, T]`, then take the gradient steps that are due; returns the means of their metrics."""
    state.replay.add(transitions.map(lambda x: x.cpu()))
    metrics, symmetric = [], state.game if state.config.symmetries else None
    while muzero_targets.due(state):
        metrics.append(update(state, muzero_targets.sample(state, symmetric)))
    return {**diagnostics.mean(metrics), **state.episodes.metrics()}


def train(
    config: Config, env: Env | Game, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Alternate rollouts and gradient steps until `steps`. A given `state` resumes with its replay and new episodes."""
    env = selfplay.env(env, config.num_envs)
    if state is None:
        state = build(config, env.game if isinstance(env, selfplay.SelfPlay) else env.spaces, device)
    require_num_envs(env, config.num_envs)
    restart(state)
    obs = env.reset(config.seed + state.step)
    while state.step < config.steps:
        transitions, obs = rollout(state, env, obs)
        yield state.step, learn(state, transitions), state


def _rule(state: State) -> PUCT:
    return BOARD if state.config.known_bounds else RULE

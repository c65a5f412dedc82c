"""Gumbel MuZero: Policy improvement by planning with Gumbel, Danihelka et al. 2022 (ICLR; openreview bERaNdoegnO).

    play      argmax_a  g(a) + logits(a) + σ(q̂(a))           among the m actions with the highest g + logits, g ~ Gumbel
    minimize  Σ_{k=0..K} [ l(v^k, z_{t+k}) · c_v + KL(π'_{t+k} ‖ p^k) ] + Σ_{k=1..K} l(r^k, u_{t+k})

where π' = softmax(logits + σ(completedQ)) improves the policy with any number of simulations, and Sequential Halving
divides them among the m sampled actions. Model, returns and unroll are MuZero's (arXiv:1911.08265).

Kept: sampling without replacement by Gumbel noise, Sequential Halving at the root, the deterministic rule below it,
completed values with v_mix, π' as the target, no Dirichlet noise and no temperature; two-player games with discount
-γ, as in `muzero`; reanalysis of a share of the targets with a target network.

Different here: two-player games may start with random moves (arXiv:2306.03408), or one random move off a recent game
(arXiv:1902.10565), where the paper plays the first 30 moves of Go in proportion to visits (appendix F); sequences may
be trained on under symmetries of the board; a time limit is not a termination; uniform replay unless
`priority_exponent` is set; Adam. The loss is the cross-entropy, which differs from the KL by a constant. Without
exploration there is no noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresight import errors
from foresight.data import trees
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs.base import Env, Spaces, require_num_envs
from foresight.envs.games import selfplay
from foresight.envs.games.game import Game
from foresight.errors import UserError
from foresight.ops import diagnostics, latent
from foresight.planning.search.mcts import Gumbel, search
from foresight.training import muzero_targets
from foresight.training.options import ModelTraining

KIND = "control"
GAMES = True  # also two-player games
UNIT = "env steps"
METRICS = ("return", "length", "value_loss", "policy_loss", "reward_loss")
ACTING = ("network",)  # State fields sent to actors


@dataclass(frozen=True)
class Config:
    """Defaults: LightZero's CartPole unless noted, with the paper's search."""

    steps: int = 50_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 8  # parallel environments; one batched search serves all of them
    simulations: int = 8  # simulations per search; 2 to 16 in the paper's figure 2
    play_simulations: int | None = None  # simulations per search in play and evaluation; None: as in training
    considered: int = 16  # m: actions sampled at the root; §3 of the paper
    value_scale: float = 0.1  # c_scale: weight of the values; mctx, the paper's Atari
    max_visit_init: float = 50.0  # c_visit: added to the most visits; §3.4
    value_normalization: str = "siblings"  # scale of values: "siblings" (mctx), "tree" (MuZero), or "none"
    openings: int = 0  # maximum random moves at the start of a self-play game, not trained on; arXiv:2306.03408
    forked: float = 0.0  # share of self-play games that start one random move off a recent game; arXiv:1902.10565
    symmetries: bool = False  # in games, train each sequence under a random symmetry of the board
    gamma: float = 0.997  # discount per step; MuZero, appendix G
    unroll_steps: int = 5  # K: steps of the unrolled model; MuZero, appendix G
    n_steps: int = 5  # n: rewards before the bootstrap; 10 on Atari in MuZero, 5 in reanalysis and LightZero
    reanalyze: float = 0.5  # share of policy targets that are recomputed; 0.8 of the updates in arXiv:2104.06294
    value_coef: float = 0.25  # c_v: weight of the value loss; arXiv:2104.06294
    training: ModelTraining = ModelTraining()  # model, replay, optimizer (`training.options`)


State = muzero_targets.State  # network, target network, optimizer, replay, generators, counters


def build(config: Config, spaces: Spaces | Game, device: str | torch.device = "cpu") -> State:
    """Networks, optimizer, replay. Raises UserError for actions that are not discrete, or invalid hyperparameters."""
    muzero_targets.check(config, "considered")
    muzero_targets.check_play(config)
    muzero_targets.check_game(config, spaces, "symmetries")
    _rule(config)  # raises if invalid
    errors.at_least(0, config, "openings")
    longest = 1 if isinstance(spaces, Spaces) else spaces.longest
    if config.openings >= longest:
        raise UserError(
            f"openings is {config.openings}: random moves that start a two-player game must leave at least one move to "
            f"play (here at most {longest - 1})."
        )
    if not 0 <= config.forked <= (0 if isinstance(spaces, Spaces) else 1):
        raise UserError(
            f"forked is {config.forked}: this share of the self-play games must be between 0 and 1, and 0 where no "
            "two-player game is played."
        )
    return muzero_targets.build(config, spaces, "Gumbel MuZero", device)


def act(
    state: State, obs: Tree, carry: None = None, explore: bool = False, simulations: int | None = None
) -> tuple[Tensor, dict[str, Any], None]:
    """Search from each row of `obs`, with Gumbel noise if `explore`.

    Extras: `weights` `[B, A]`, the policy target; `value` `[B]` of the root; `visits`, `prior` `[B, A]`; `tree`.
    `simulations` defaults to the Config's (`muzero_targets.num_simulations`). In a game `obs` may be positions.
    """
    obs, legal = muzero_targets.observe(state, obs)
    count = muzero_targets.num_simulations(state.config, explore, simulations)
    generator = state.generator if explore else None
    found = search(state.network, obs, count, _rule(state.config), legal=legal, generator=generator)
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
    """Policy targets and root values of observations `[N, ...]`, from a new search with the target network."""
    obs, legal = muzero_targets.observe(state, obs)
    found = search(
        state.target, obs, state.config.simulations, _rule(state.config), legal=legal, generator=state.generator
    )
    return {"weights": found.weights, "value": found.value}


def loss(state: State, batch: Trajectory) -> dict[str, Tensor]:
    """The terms of the loss over sequences `[B, K + n]`, each a scalar.

    The model is unrolled along the K actions taken. The gradient back through g is halved from the second step on
    (MuZero, appendix G).
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
    env = selfplay.env(env, config.num_envs, config.openings, config.forked)
    if state is None:
        state = build(config, env.game if isinstance(env, selfplay.SelfPlay) else env.spaces, device)
    require_num_envs(env, config.num_envs)
    restart(state)
    obs = env.reset(config.seed + state.step)
    while state.step < config.steps:
        transitions, obs = rollout(state, env, obs)
        yield state.step, learn(state, transitions), state


def _rule(config: Config) -> Gumbel:
    return Gumbel(config.considered, config.value_scale, config.max_visit_init, config.value_normalization)

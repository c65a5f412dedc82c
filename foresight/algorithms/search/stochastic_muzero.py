"""Stochastic MuZero: Planning in stochastic environments with a learned model, Antonoglou et al. 2022 (ICLR; openreview
X6D9bAHhBQ1).

    minimize  MuZero's loss + Σ_{k<K} [ l(Q^k, z_{t+k}) · c_v + CE(σ^k, c_{t+k+1}) + β ‖c_{t+k+1} - e_{t+k+1}‖² ]

where an action leads from a state to an afterstate, as^k = φ(s^k, a_{t+k}); (σ^k, Q^k) = ψ(as^k) are the distribution
of chance outcomes and the value of the afterstate; and the code c of an outcome leads to the next state, (s^{k+1},
r^{k+1}) = g(as^k, c_{t+k+1}). Codes are learned: c_t is the one-hot argmax of e_t = e(o_{t-1}, o_t), and its gradient
is passed to e_t. The rest is MuZero (arXiv:1911.08265).

Kept: chance nodes in the tree, where codes are tried in proportion to σ; a fixed set of one-hot codes, the
straight-through gradient into their encoder, and the commitment term; afterstate values; MuZero's search, returns and
unroll, and reanalysis of a share of the targets with a target network.

Different here: e gets the two newest observations (as in LightZero; in the paper, all of them), and is standardized
over the batch, because otherwise most outcomes may share one code; no Gumbel noise on e; a time limit is not a
termination; uniform replay unless `priority_exponent` is set; Adam. A simulation adds one node of either kind, so one
env step of lookahead takes two simulations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foresight.data import trees
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs.base import Env, Spaces, require_end, require_num_envs
from foresight.errors import UserError
from foresight.nets import encoders
from foresight.nets.models.stochastic_muzero import ChanceModel
from foresight.ops import diagnostics, latent
from foresight.planning.search.mcts import PUCT, search
from foresight.training import muzero_targets
from foresight.training.options import ModelTraining

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "value_loss", "policy_loss", "reward_loss", "chance_loss")
ACTING = ("network",)  # State fields sent to actors


@dataclass(frozen=True)
class Config:
    """Defaults: those of `muzero`, with the paper's codes."""

    steps: int = 50_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 8  # parallel environments; one batched search serves all of them
    simulations: int = 50  # simulations per search, two per env step of lookahead; 100 for 2048 in the paper
    codes: int = 32  # codes of chance outcomes; the paper
    gamma: float = 0.997  # discount per step; MuZero, appendix G
    unroll_steps: int = 5  # K: steps of the unrolled model; MuZero, appendix G
    n_steps: int = 5  # n: rewards before the bootstrap; 10 in the paper's 2048
    reanalyze: float = 0.5  # share of policy targets that are recomputed; 0.8 of the updates in arXiv:2104.06294
    value_coef: float = 0.25  # c_v: weight of the value loss; arXiv:2104.06294
    commitment_coef: float = 1.0  # β: weight of the commitment term; LightZero
    dirichlet_alpha: float = 0.25  # α of the root noise; muzero-general's CartPole
    dirichlet_fraction: float = 0.25  # weight of the root noise; MuZero, appendix C; 0.1 in the paper's 2048
    temperatures: tuple[float, ...] = (1.0, 0.5, 0.25)  # at the start, from 1/2, from 3/4 of training; MuZero, app. D
    training: ModelTraining = ModelTraining()  # model, replay, optimizer (`training.options`)


State = muzero_targets.State  # network, target network, optimizer, replay, generators, counters


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizer, replay. Raises UserError if the actions are not discrete."""
    training = config.training
    muzero_targets.check(config, "codes")
    muzero_targets.check_exploration(config)
    if training.batch_size * config.unroll_steps < 2:
        raise UserError(
            "batch_size and unroll_steps are 1, but codes are standardized over the batch: raise batch_size."
        )
    require_end(spaces, config.gamma)
    actions = muzero_targets.num_actions(spaces.action, "Stochastic MuZero")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        encoder = encoders.encoder(spaces.obs, training.hidden, "relu", training.images)
        outcome_encoder = encoders.encoder(spaces.obs, (), "relu", training.images)  # vectors pass through
        network = ChanceModel(
            encoder, outcome_encoder, actions, config.codes, training.latent_size, training.hidden, training.support,
            config.gamma, bin_width=training.bin_width,
        )  # fmt: skip
    return State(config, **muzero_targets.components(config, network, device))


def rule(config: Config) -> PUCT:
    """MuZero's selection rule, with chance nodes. Untried actions have their parent's value (LightZero)."""
    return PUCT(normalize="tree", first_play="parent", chance=config.codes)


def act(
    state: State, obs: Tree, carry: None = None, explore: bool = False, simulations: int | None = None
) -> tuple[Tensor, dict[str, Any], None]:
    """Search from each row of `obs`. `explore` adds noise and temperature; otherwise the most visited action is played.

    Extras: `weights` `[B, A]`, the policy target; `value` `[B]` of the root; `visits`, `prior` `[B, A]`; `tree`, in
    which the chance outcomes have the numbers after the actions'. `simulations` defaults to the Config's.
    """
    config = state.config
    obs, legal = _observe(state, obs)
    found = search(
        state.network, obs, config.simulations if simulations is None else simulations, rule(config), legal=legal,
        noise=muzero_targets.root_noise(config) if explore else None,
        temperature=muzero_targets.temperature(state) if explore else 0.0,
        generator=state.generator if explore else None,
    )  # fmt: skip
    tree, own = found.tree, slice(state.network.actions)
    extras = {"weights": found.weights[:, own], "value": found.value, "visits": found.visits[:, own]}
    return found.action, {**extras, "prior": tree.prior[:, 0, own], "tree": tree}, carry


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
    obs, legal = _observe(state, obs)
    found = search(
        state.target, obs, state.config.simulations, rule(state.config), legal=legal,
        noise=muzero_targets.root_noise(state.config), generator=state.generator,
    )  # fmt: skip
    return {"weights": found.weights[:, : state.network.actions], "value": found.value}


def loss(state: State, batch: Trajectory) -> dict[str, Tensor]:
    """The terms of the loss over sequences `[B, K + n]`, each a scalar."""
    network, steps = state.network, state.config.unroll_steps
    alive, known, value, weights = targets(state, batch)
    muzero_targets.prioritize(state, batch, value)
    pair = (trees.tree_map(lambda x: x[:, :steps].flatten(0, 1), obs) for obs in (batch.obs, batch.extras["next_obs"]))
    encoded = network.encode_outcome(*pair, learning=True).view(len(alive), steps, -1)
    code = latent.straight_through(encoded)
    states, afterstates, features = [network.represent(muzero_targets.at_step(batch.obs, 0))], [], []
    before = states[0]
    for k in range(steps):
        afterstates.append(network.act(before, batch.action[:, k]))
        after, intermediate = network.chance(afterstates[-1], code[:, k])  # the reward is read from `intermediate`
        states.append(after)
        features.append(intermediate)
        before = latent.scale_gradient(after, 0.5)  # MuZero, appendix G
    head = network.head(torch.stack(states, 1))  # all K + 1 at once: faster than K + 1 small calls
    after_head = network.after(torch.stack(afterstates, 1))
    step_alive, step_known = alive[:, :steps], known[:, :steps]
    reward = batch.reward[:, :steps] * step_alive
    terms = {
        "policy_loss": alive * latent.cross_entropy(network.policy(head), weights),
        "value_loss": known * network.value.loss(head, value),
        "reward_loss": step_known * network.reward.loss(torch.stack(features, 1), reward),
        "after_loss": step_known * network.after_value.loss(after_head, value[:, :steps]),
        "chance_loss": step_alive * latent.cross_entropy(network.outcome(after_head), code.detach()),
        "commitment": step_alive * (code.detach() - encoded).square().sum(-1),
    }
    return muzero_targets.summed(terms, steps, batch.extras.get("weight"))


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One gradient step on sequences `[B, K + n]` from the replay."""
    terms = loss(state, batch)
    muzero_targets.descend(
        state,
        terms["policy_loss"]
        + terms["reward_loss"]
        + terms["chance_loss"]
        + state.config.value_coef * (terms["value_loss"] + terms["after_loss"])
        + state.config.commitment_coef * terms["commitment"],
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
    metrics = []
    while muzero_targets.due(state):
        metrics.append(update(state, muzero_targets.sample(state)))
    return {**diagnostics.mean(metrics), **state.episodes.metrics()}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Alternate rollouts and gradient steps until `steps`. A given `state` resumes with its replay and new episodes."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    restart(state)
    obs = env.reset(config.seed + state.step)
    while state.step < config.steps:
        transitions, obs = rollout(state, env, obs)
        yield state.step, learn(state, transitions), state


def _observe(state: State, obs: Tree) -> tuple[Tree, Tensor | None]:
    """See `muzero_targets.observe`. After the actions come the chance outcomes, all of them legal."""
    obs, legal = muzero_targets.observe(state, obs)
    return obs, None if legal is None else functional.pad(legal, (0, state.config.codes), value=True)

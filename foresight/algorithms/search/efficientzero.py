"""EfficientZero: Mastering Atari games with limited data, Ye et al. 2021 (arXiv:2111.00210).

    minimize  Σ_{k=0..K} [ CE(p^k, π_{t+k}) + c_v · l(v^k, z_{t+k}) ] + Σ_{k=1..K} [ l(x^k, Σ u_{t+j}) - c_s · cos_k ]

where x^k is the value prefix, the sum of rewards since the last reset, predicted by an LSTM; cos is between the
predicted projection of the unrolled latent and the projection of the latent of the real observation (no gradient into
the latter). The rest is MuZero (arXiv:1911.08265).

Kept: the value prefix with its resets every `lstm_horizon` steps, in the unroll and in the search; self-supervised
consistency through a normalized projection and a predictor (SimSiam); off-policy correction: old transitions bootstrap
after fewer steps; reanalyzed policy targets from searches of a target network with root noise, as in the authors' code;
it also gives the bootstrap values.

Different here: a time limit is not a termination; uniform replay unless `priority_exponent` is set; Adam; no image
augmentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foresight.data import trees
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs.base import Env, Spaces, require_end, require_num_envs
from foresight.errors import UserError
from foresight.nets import encoders
from foresight.nets.models.efficientzero import PrefixModel
from foresight.ops import diagnostics, latent
from foresight.planning.search.mcts import PUCT, search
from foresight.training import muzero_targets
from foresight.training.options import ModelTraining

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "value_loss", "policy_loss", "prefix_loss", "consistency")
ACTING = ("network",)  # State fields sent to actors
RULE = PUCT(normalize="tree", first_play="parent")  # untried actions have their parent's value: LightZero


@dataclass(frozen=True)
class Config:
    """Defaults: LightZero's CartPole unless noted, with the paper's coefficients."""

    steps: int = 50_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 8  # parallel environments; one batched search serves all of them
    simulations: int = 25  # simulations per search; LightZero
    gamma: float = 0.997  # discount per step; MuZero, appendix G
    unroll_steps: int = 5  # K: steps of the unrolled model; MuZero, appendix G
    n_steps: int = 5  # n: rewards before the bootstrap, for new transitions; the paper, appendix A
    shrink: float = 0.3  # share of training after which n is 1 less for a transition; the paper's code
    reanalyze: float = 0.99  # share of policy targets that are recomputed; the paper's code
    value_coef: float = 0.25  # c_v: weight of the value loss; the paper, appendix A
    consistency_coef: float = 2.0  # c_s: weight of the consistency loss; the paper, appendix A
    lstm_horizon: int = 5  # steps between resets of the value prefix; the paper's code
    lstm_size: int = 64  # width of the value prefix's LSTM; 512 on Atari
    dirichlet_alpha: float = 0.25  # α of the root noise; muzero-general's CartPole
    dirichlet_fraction: float = 0.25  # weight of the root noise; MuZero, appendix C
    temperatures: tuple[float, ...] = (1.0, 0.5, 0.25)  # at the start, from 1/2, from 3/4 of training; MuZero, app. D
    training: ModelTraining = ModelTraining()  # model, replay, optimizer (`training.options`)


State = muzero_targets.State  # network, target network, optimizer, replay, generators, counters


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizer, replay. Raises UserError if the actions are not discrete."""
    training = config.training
    muzero_targets.check(config, "lstm_horizon", "lstm_size")
    muzero_targets.check_exploration(config)
    if not config.shrink > 0:
        raise UserError(f"shrink must be above 0, not {config.shrink}: it is a share of training.")
    if training.batch_size * config.unroll_steps < 2:
        raise UserError("batch_size times unroll_steps must be at least 2: consistency is computed over a batch.")
    require_end(spaces, config.gamma)
    actions = muzero_targets.num_actions(spaces.action, "EfficientZero")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        encoder = encoders.encoder(spaces.obs, training.hidden, "relu", training.images)
        network = PrefixModel(
            encoder, actions, training.latent_size, training.hidden, config.lstm_size, config.lstm_horizon,
            training.support, config.gamma, bin_width=training.bin_width,
        )  # fmt: skip
    return State(config, **muzero_targets.components(config, network, device))


def act(
    state: State, obs: Tree, carry: None = None, explore: bool = False, simulations: int | None = None
) -> tuple[Tensor, dict[str, Any], None]:
    """Search from each row of `obs`. `explore` adds noise and temperature; otherwise the most visited action is played.

    Extras: `weights` `[B, A]`, the policy target; `value` `[B]` of the root; `visits`, `prior` `[B, A]`; `tree`.
    `simulations` defaults to the Config's.
    """
    config = state.config
    obs, legal = muzero_targets.observe(state, obs)
    found = search(
        state.network, obs, config.simulations if simulations is None else simulations, RULE, legal=legal,
        noise=muzero_targets.root_noise(config) if explore else None,
        temperature=muzero_targets.temperature(state) if explore else 0.0,
        generator=state.generator if explore else None,
    )  # fmt: skip
    extras = {"weights": found.weights, "value": found.value, "visits": found.visits}
    return found.action, {**extras, "prior": found.tree.prior[:, 0], "tree": found.tree}, carry


@torch.no_grad()
def targets(state: State, batch: Trajectory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(alive, known, value, weights)` of the first K + 1 steps of sequences `[B, K + n]`; weights `[B, K + 1, A]`.

    See `muzero_targets.targets`. Old transitions bootstrap after fewer steps.
    """
    config, training, age = state.config, state.config.training, state.updates - batch.extras["born"][:, 0]
    total = max((config.steps - training.learning_starts) / training.train_every, 1.0)
    steps = latent.shrunk_horizon(age, total, config.n_steps, config.shrink)
    policy = muzero_targets.policy_targets(state, batch, reanalyze, ("weights",))
    alive, known, value = muzero_targets.targets(state, batch, steps, policy.get("value"))
    return alive, known, value, policy["weights"]


def reanalyze(state: State, obs: Tree) -> dict[str, Tensor]:
    """Policy targets and root values of observations `[N, ...]`, by a search of the target network with root noise."""
    obs, legal = muzero_targets.observe(state, obs)
    found = search(
        state.target, obs, state.config.simulations, RULE, legal=legal,
        noise=muzero_targets.root_noise(state.config), generator=state.generator,
    )  # fmt: skip
    return {"weights": found.weights, "value": found.value}


def loss(state: State, batch: Trajectory) -> dict[str, Tensor]:
    """The terms of the loss over sequences `[B, K + n]`, each a scalar."""
    network, steps = state.network, state.config.unroll_steps
    alive, known, value, weights = targets(state, batch)
    muzero_targets.prioritize(state, batch, value)
    prefix = latent.value_prefix(batch.reward[:, :steps], alive[:, :steps], state.config.lstm_horizon)
    hidden = network.represent(muzero_targets.at_step(batch.obs, 0))
    latents, features = [hidden["latent"]], []
    for k in range(steps):
        hidden = network.advance(hidden, batch.action[:, k])
        hidden["latent"] = latent.scale_gradient(hidden["latent"], 0.5)
        latents.append(hidden["latent"])
        features.append(hidden["h"])
        hidden = network.reset_prefix(hidden)
    states = torch.stack(latents, 1)
    head, reached = network.head(states), states[:, 1:]  # all K + 1 at once: faster than K + 1 small calls
    with torch.no_grad():  # the true successor, also at the end of an episode
        real = trees.tree_map(lambda x: x[:, :steps].flatten(0, 1), batch.extras["next_obs"])
        target = network.project(network.represent(real)["latent"])
    consistency = latent.negative_cosine(network.predictor(network.project(reached.flatten(0, 1))), target)
    terms = {
        "policy_loss": alive * latent.cross_entropy(network.policy(head), weights),
        "value_loss": known * network.value.loss(head, value),
        "prefix_loss": known[:, :steps] * network.prefix.loss(torch.stack(features, 1), prefix),
        "consistency": alive[:, :steps] * consistency.view(-1, steps),
    }
    return muzero_targets.summed(terms, steps, batch.extras.get("weight"))


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One gradient step on sequences `[B, K + n]` from the replay."""
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
    born = torch.full(transitions.shape, state.updates, device=transitions.reward.device)  # for their age
    transitions = transitions.replace(extras={**transitions.extras, "born": born})
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

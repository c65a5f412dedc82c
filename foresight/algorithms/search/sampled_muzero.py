"""Sampled MuZero: Learning and planning in complex action spaces, Hubert et al. 2021 (arXiv:2104.06303).

    minimize  Σ_{k=0..K} [ l(v^k, z_{t+k}) · c_v - Σ_i π̂(a_i) ln p^k(a_i) - c_e H(p^k) ] + Σ_{k=1..K} l(r^k, u_{t+k})

where a_1 … a_N are sampled from the policy at every node of the search, and π̂ are the visits of those at the root. The
rest is MuZero (arXiv:1911.08265), for continuous actions and for discrete actions that are too many to search.

Kept: actions sampled at every node from β = π^(1/τ), the search prior (β̂/β) π over them, Dirichlet noise over those of
the root while exploring, a policy fitted to the visits of the sampled actions, MuZero's model, returns and unroll;
reanalysis of a share of the targets by a target network, with newly sampled actions.

Different here: the policy over continuous actions is a tanh-squashed normal; a time limit is not a termination;
uniform replay unless `priority_exponent` is set; Adam; an entropy bonus (LightZero).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from gymnasium import spaces as gs
from torch import Tensor

from foresight.data import trees
from foresight.data.priorities import Prioritized
from foresight.data.replay import Replay
from foresight.data.trajectory import Trajectory, Tree
from foresight.envs.base import Env, Episodes, Spaces, require_end, require_num_envs
from foresight.errors import UserError
from foresight.nets.heads import CategoricalHead, TanhNormalHead
from foresight.nets.models.muzero import LatentModel
from foresight.ops import diagnostics, latent
from foresight.planning.search.mcts import PUCT, SearchResult, search
from foresight.planning.search.sampled import SampledActions, root_actions
from foresight.training import muzero_targets
from foresight.training.options import ModelTraining

KIND = "control"
UNIT = "env steps"
METRICS = ("return", "length", "value_loss", "policy_loss", "reward_loss", "entropy")
ACTING = ("network",)  # State fields sent to actors
KEPT = ("weights", "actions", "taken")  # the extras of `act` that training needs
RULE = PUCT(normalize="tree", first_play="parent")  # untried actions have their parent's value: LightZero


@dataclass(frozen=True)
class Config:
    """Defaults: LightZero's Pendulum unless noted, with the paper's search."""

    steps: int = 50_000  # env steps, summed over all environments
    seed: int = 0
    num_envs: int = 8  # parallel environments; one batched search serves all of them
    simulations: int = 50  # simulations per search; appendix A of the paper
    samples: int = 20  # N: actions sampled at every node; appendix A
    sample_temperature: float = 1.0  # τ: actions are sampled from π^(1/τ); 1, the policy itself, in LightZero
    gamma: float = 0.997  # discount per step; MuZero, appendix G
    unroll_steps: int = 5  # K: steps of the unrolled model; MuZero, appendix G
    n_steps: int = 5  # n: rewards before the bootstrap; 10 on Atari in MuZero, 5 in reanalysis and LightZero
    reanalyze: float = 0.5  # share of policy targets that are recomputed; 0.8 of the updates in arXiv:2104.06294
    value_coef: float = 0.25  # c_v: weight of the value loss; arXiv:2104.06294
    entropy_coef: float = 5e-3  # c_e: weight of the entropy bonus, per nat; LightZero
    dirichlet_alpha: float = 0.3  # α of the noise over the root's sampled actions; LightZero
    dirichlet_fraction: float = 0.25  # weight of the root noise; LightZero
    temperatures: tuple[float, ...] = (1.0, 0.5, 0.25)  # at the start, from 1/2, from 3/4 of training; MuZero, app. D
    training: ModelTraining = ModelTraining(support=40)  # model, replay, optimizer (`training.options`)


@dataclass
class State:
    """Everything a checkpoint holds."""

    config: Config
    network: LatentModel
    head: TanhNormalHead | CategoricalHead  # turns the policy output into a distribution
    low: Tensor  # bounds of continuous actions, [D]
    high: Tensor
    target: LatentModel  # the target network: bootstrap values and reanalysis
    optimizer: torch.optim.Adam
    replay: Replay | Prioritized
    generator: torch.Generator  # search noise and actions
    shuffler: torch.Generator  # samples the replay, on the CPU
    step: int = 0
    updates: int = 0
    episodes: Episodes = field(default_factory=Episodes)  # the last 100 finished ones


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks, optimizer, replay. Raises UserError if actions are neither discrete nor a bounded 1-D Box."""
    muzero_targets.check(config, "samples")
    muzero_targets.check_exploration(config)
    if not 0 < config.sample_temperature < float("inf"):
        raise UserError(
            f"sample_temperature must be above 0 (1 samples from the policy itself), not {config.sample_temperature}."
        )
    require_end(spaces, config.gamma)
    space, head = spaces.action, _head(spaces.action)
    features = head.width if isinstance(head, CategoricalHead) else head.width // 2
    network = muzero_targets.latent_model(config, spaces.obs, features, head.width)
    bounds = (space.low, space.high) if isinstance(space, gs.Box) else ((), ())
    low, high = (torch.as_tensor(bound, device=device) for bound in bounds)
    return State(config, head=head, low=low, high=high, **muzero_targets.components(config, network, device))


def _head(space: gs.Space[Any]) -> TanhNormalHead | CategoricalHead:
    if isinstance(space, gs.Discrete):
        return CategoricalHead(int(space.n))
    if not isinstance(space, gs.Box) or len(space.shape) != 1 or not space.is_bounded():
        raise UserError(f"Sampled MuZero needs discrete actions or a bounded 1-D Box, not {space}. Use ppo.")
    return TanhNormalHead(space.shape[0], bounds=(-3.0, 1.0))


def act(
    state: State, obs: Tree, carry: None = None, explore: bool = False, simulations: int | None = None
) -> tuple[Tensor, dict[str, Any], None]:
    """Search from each row of `obs`. `explore` adds noise and temperature; otherwise the most visited sample is played.

    Extras: the sampled `actions` `[B, N, D]` in (-1, 1), their `weights` `[B, N]`, the `value` `[B]` of the root, and
    `taken` `[B, D]`, the action before it is scaled to its bounds. Discrete `actions` are int64 `[B, N]`, and `taken`
    `[B]` is the action. `visits`, `prior` `[B, N]` and `tree` are of the samples. `simulations` defaults to the
    Config's.
    """
    temperature = muzero_targets.temperature(state) if explore else 0.0
    found, drawn = _search(state, state.network, obs, explore, temperature, simulations)
    taken = drawn[torch.arange(len(drawn), device=drawn.device), found.action]
    action = taken if _is_discrete(state) else state.low + (taken + 1) / 2 * (state.high - state.low)
    extras = {"actions": drawn, "weights": found.weights, "value": found.value, "taken": taken, "visits": found.visits}
    return action, {**extras, "prior": found.tree.prior[:, 0], "tree": found.tree}, carry


def _search(
    state: State, network: LatentModel, obs: Tree, noisy: bool, temperature: float = 0.0, simulations: int | None = None
) -> tuple[SearchResult, Tensor]:
    config, (obs, legal) = state.config, muzero_targets.observe(state, obs)
    model = SampledActions(network, state.head, config.samples, state.generator, legal, config.sample_temperature)
    found = search(
        model, obs, config.simulations if simulations is None else simulations, RULE,
        noise=muzero_targets.root_noise(config) if noisy else None, temperature=temperature, generator=state.generator,
    )  # fmt: skip
    return found, root_actions(found.tree)


@torch.no_grad()
def targets(state: State, batch: Trajectory) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`(alive, known, value, weights, actions)` of the first K + 1 steps of `[B, K + n]`; see `muzero_targets`.

    Weights `[B, K + 1, N]` belong to the sampled actions: `[B, K + 1, N, D]`, or `[B, K + 1, N]` if discrete.
    """
    policy = muzero_targets.policy_targets(state, batch, reanalyze, ("weights", "actions"))
    alive, known, value = muzero_targets.targets(state, batch, state.config.n_steps, policy.get("value"))
    return alive, known, value, policy["weights"], policy["actions"]


def reanalyze(state: State, obs: Tree) -> dict[str, Tensor]:
    """Policy targets and root values of observations `[N, ...]`, from a search with root noise among new actions
    that the target network samples.
    """
    found, drawn = _search(state, state.target, obs, noisy=True)
    return {"weights": found.weights, "actions": drawn, "value": found.value}


def loss(state: State, batch: Trajectory) -> dict[str, Tensor]:
    """The terms of the loss over sequences `[B, K + n]`, each a scalar; `entropy` is maximized."""
    network, steps = state.network, state.config.unroll_steps
    alive, known, value, weights, drawn = targets(state, batch)
    muzero_targets.prioritize(state, batch, value)
    taken = batch.extras["taken"]
    actions = network.eye[taken] if _is_discrete(state) else taken
    states, features = [network.represent(muzero_targets.at_step(batch.obs, 0))], []
    before = states[0]
    for k in range(steps):
        after, intermediate = network.advance(before, actions[:, k])  # the reward is read from `intermediate`
        states.append(after)
        features.append(intermediate)
        before = latent.scale_gradient(after, 0.5)  # MuZero, appendix G
    head = network.head(torch.stack(states, 1))  # all K + 1 at once: faster than K + 1 small calls
    parameters = network.policy(head)  # [B, K + 1, W]
    policy = state.head(parameters)
    of_samples = state.head(parameters.unsqueeze(2).expand(-1, -1, state.config.samples, -1))
    reward = batch.reward[:, :steps] * alive[:, :steps]
    terms = {
        "policy_loss": alive * -(weights * of_samples.logp(drawn)).sum(-1),
        "entropy": alive * policy.entropy(),
        "value_loss": known * network.value.loss(head, value),
        "reward_loss": known[:, :steps] * network.reward.loss(torch.stack(features, 1), reward),
    }
    return muzero_targets.summed(terms, steps, batch.extras.get("weight"))


def update(state: State, batch: Trajectory) -> dict[str, float]:
    """One gradient step on sequences `[B, K + n]` from the replay."""
    terms = loss(state, batch)
    total = terms["policy_loss"] + state.config.value_coef * terms["value_loss"] + terms["reward_loss"]
    muzero_targets.descend(state, total - state.config.entropy_coef * terms["entropy"])
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
        transitions.append(
            muzero_targets.transition(obs, action, feedback, muzero_targets.kept(state.config, extras, KEPT))
        )
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


def _is_discrete(state: State) -> bool:
    return isinstance(state.head, CategoricalHead)

"""How good an algorithm's State is, on worlds and seeds that it was not trained on."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foresight.data.trajectory import tree_map
from foresight.errors import UserError
from foresight.planning.dynamic import bellman
from foresight.runtime import machine
from foresight.runtime.checkpoints.tree import generators

EVALUATION_SEED = 10_000_019  # evaluation seeds start here, far from the seeds of training
LONGEST = 108_000  # steps of an episode that does not end by itself (30 minutes of Atari frames)
FALLS = ("error", "per character", "per token")  # what the metrics end with of which less is better


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`n` results of one kind: their mean and standard deviation (of the results, not of the mean)."""

    metric: str
    mean: float
    std: float
    n: int
    values: tuple[float, ...] = dataclasses.field(default=(), repr=False)
    also: dict[str, float] = dataclasses.field(default_factory=dict)  # other figures of the same policy

    @classmethod
    def of(cls, metric: str, values: list[float]) -> Evaluation:
        """The evaluation of a list of results. Raises UserError if there are none."""
        if not values:
            raise UserError("There was nothing to evaluate on: no episode or example gave a result.")
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
        return cls(metric, mean, std, len(values), tuple(values))

    @property
    def worth(self) -> float:
        """The mean as a score of which more is better: of an error, its negative; of nothing, minus infinity."""
        if not self.n:
            return -math.inf
        return -self.mean if falls(self.metric) else self.mean

    def document(self) -> dict[str, Any]:
        """`{"metric", "mean", "std", "n"}` for JSON, and `"also"` where there are other figures; of nothing None."""
        mean, std = (self.mean, self.std) if self.n else (None, None)
        document = {"metric": self.metric, "mean": mean, "std": std, "n": self.n}
        return {**document, "also": self.also} if self.also else document

    @classmethod
    def read(cls, document: dict[str, Any]) -> Evaluation:
        """What `document` wrote."""
        unknown = {} if document["n"] else {"mean": math.nan, "std": math.nan}
        return cls(**{**document, **unknown})

    def __str__(self) -> str:
        if not self.n:
            return f"{self.metric} unknown: the grader could tell of none of the answers"
        spread = f" ± {self.std:.4g} ({self.n} of them)" if self.n > 1 else ""
        return f"{self.metric} {self.mean:.4g}{spread}"


def falls(metric: str) -> bool:
    """Whether less of a metric is better, as of errors and of bits a character."""
    return metric.endswith(FALLS)


Act = Callable[[Any, Any], tuple[Any, Any]]  # (obs, carry) -> (action, carry)


def evaluate(module: Any, state: Any, env: Any, episodes: int | None = None, seed: int = 0) -> Evaluation:
    """Run the State greedily (`explore=False`) in `world`; the State and all random generators stay as they were.

    - control: the return of exactly `episodes` episodes, from seeds that training does not use;
    - mdp: the exact expected discounted return of its policy from the start distribution (`also`: the
      undiscounted one within the time limit, where there is a limit);
    - text: the mean reward of greedy completions of the first `episodes` held-out examples (all if None); where the
      task grades nothing (its rows are demonstrations or preferences), what `module.assess(state, examples)` says;
    - game: the points a game (1, ½, 0) against the game's `opponent`, half of the games with the first move.

    An algorithm that is judged by something else has a `measure(state, world)` that returns its name, the figure and,
    if there are others, a dict of these.

    `world` must be its own: episodes that are under way in it are lost.
    """
    with undisturbed(state):
        kind = _kind(module, env)
        if kind == "control":
            device = machine.device_of(state)

            def act(obs: Any, carry: Any) -> tuple[Any, Any]:
                action, _, carry = module.act(state, tree_map(lambda x: x.to(device), obs), carry, explore=False)
                return action.cpu(), carry

            return _control(env, act, episodes or 1, seed, getattr(module, "reset_carry", None))
        if hasattr(module, "measure"):
            metric, value, *also = module.measure(state, env)
            return Evaluation(metric, value, 0.0, 1, (value,), *also)
        if kind == "tabular":
            env = env.to(machine.device_of(state))
            policy, _, _ = module.act(state, torch.arange(env.states, device=env.reward.device), explore=False)
            return _mdp(env, policy, state.config.gamma)
        if kind == "game":
            return _game(module, state, env, episodes, seed)
        return _text(module, state, env, episodes)


def baseline(module: Any, state: Any, env: Any, episodes: int | None = None, seed: int = 0) -> Evaluation:
    """What training must beat: uniformly random actions, or the State as it was built (text, predictions)."""
    kind = _kind(module, env)
    if kind == "control":
        return _control(env, random_policy(env, seed), episodes or 1, seed, None)
    if kind == "tabular" and not hasattr(module, "measure"):
        return _mdp(env, env.uniform(), state.config.gamma)
    if kind == "game":
        return _game(module, state, env, episodes, seed, random=True)
    return evaluate(module, state, env, episodes, seed)


def _kind(module: Any, env: Any) -> str:
    """What kind of world it is: the algorithm's, or a game for two where it can act in that too."""
    return "game" if hasattr(env, "first_score") else str(module.KIND)


def random_policy(env: Any, seed: int) -> Act:
    """Uniformly random actions (normally distributed where the space has no bounds), of those that are allowed."""
    from gymnasium.vector.utils import batch_space

    from foresight.nets import encoders

    if key := encoders.mask_key(env.spaces.obs):
        head, generator = encoders.policy_head(env.spaces.action), torch.Generator().manual_seed(seed)

        def allowed(obs: Any, carry: Any) -> tuple[Tensor, Any]:
            mask = torch.as_tensor(obs[key]).cpu() > 0
            return head(torch.zeros(mask.shape), mask).sample(generator), carry

        return allowed
    space = batch_space(env.spaces.action, env.num_envs)
    space.seed(seed)
    return lambda obs, carry: (torch.as_tensor(np.asarray(space.sample())), carry)


def remember(state: Any) -> Callable[[], None]:
    """What puts every random generator of `state` back to where it is now."""
    before = [(generator, _peek(generator)) for generator in generators(state)]

    def back() -> None:
        for generator, bits in before:
            _put(generator, bits)

    return back


@contextmanager
def undisturbed(state: Any) -> Iterator[None]:
    """Put every random generator of `state`, and the global ones, back to where they were."""
    back = remember(state)
    everywhere = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        with torch.no_grad():
            yield
    finally:
        back()
        torch.set_rng_state(everywhere[0])
        random.setstate(everywhere[1])
        np.random.set_state(everywhere[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _peek(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.getstate()


def _put(generator: Any, bits: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(bits)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = bits
    else:
        generator.setstate(bits)


def _control(
    env: Any, act: Act, episodes: int, seed: int, reset_carry: Callable[[Any, Tensor], Any] | None
) -> Evaluation:
    """Every world has a fixed quota of episodes. Taking the first to end instead would prefer short ones."""
    quota = [episodes // env.num_envs + (i < episodes % env.num_envs) for i in range(env.num_envs)]
    values: list[list[float]] = [[] for _ in quota]
    running, length = [0.0] * env.num_envs, [0] * env.num_envs
    obs, carry = env.reset(seed + EVALUATION_SEED), None
    while any(len(done) < wanted for done, wanted in zip(values, quota, strict=True)):
        action, carry = act(obs, carry)
        feedback = env.step(action)
        obs = feedback.obs
        rewards, real = feedback.reward.tolist(), feedback.mask.tolist()
        for i in range(env.num_envs):
            running[i] += rewards[i] * real[i]
            length[i] += int(real[i])
        ended = _ended(feedback)
        reported = feedback.info.get("episode_return")
        for k, i in enumerate(ended):
            # What the world reports is whole where the reward that is shown is clipped.
            values[i].append(float(reported[k]) if reported is not None else running[i])
            running[i], length[i] = 0.0, 0
        for i in range(env.num_envs):
            if length[i] >= LONGEST:
                values[i] += [running[i]] * (quota[i] - len(values[i]))
        if carry is not None and bool(feedback.cut.any()):
            if reset_carry is None:
                raise TypeError("An algorithm that has a carry must define reset_carry(carry, cut).")
            carry = reset_carry(carry, feedback.cut)
    kept = [value for done, wanted in zip(values, quota, strict=True) for value in done[:wanted]]
    return Evaluation.of("return", kept)


def _ended(feedback: Any) -> list[int]:
    """The worlds whose episode (not only one life of it) ended, in the order in which returns are reported."""
    engine = feedback.info.get("engine")
    over = engine.get("game_over") if isinstance(engine, dict) else None
    if over is None:
        over = (feedback.cut * feedback.mask).numpy()
    return [int(i) for i in np.flatnonzero(np.asarray(over))]


def _mdp(env: Any, policy: Tensor, gamma: float) -> Evaluation:
    """Exact, by the Bellman equation of the policy (`[S]` or `[S, A]`): nothing is sampled, so n is 1."""
    try:
        figures = bellman.evaluate(env, policy, gamma)
    except UserError:  # gamma is 1 and the policy (a random one, or an early one) may never end an episode
        horizon = env.time_limit or 10 * env.states
        figures = {"value": bellman.expected_return(env, policy, gamma, horizon)}
    value = figures.pop("value")
    return Evaluation("value", value, 0.0, 1, (value,), figures)


def _game(module: Any, state: Any, game: Any, episodes: int | None, seed: int, random: bool = False) -> Evaluation:
    """The score of the State's play (or, with `random`, of random play) against the game's opponent."""
    from foresight.planning.games import opponents  # late: they need the compiled rules, which other worlds do not
    from foresight.runtime.evaluation import match

    other = opponents.make(game.opponent, game, seed + EVALUATION_SEED)
    one = opponents.make("random", game, seed) if random else match.chooser(module, state)
    mine = getattr(state, "game", None)
    try:
        if hasattr(state, "game"):
            state.game = game  # whose positions it is shown
        result = match.play(game, one, other, max(2, episodes or 2), seed=seed)
    finally:
        if hasattr(state, "game"):
            state.game = mine
    won, drawn, lost = result.counts
    also = {"won": float(won), "drawn": float(drawn), "lost": float(lost)}
    return dataclasses.replace(Evaluation.of(f"score against {game.opponent}", list(result.scores)), also=also)


def _text(module: Any, state: Any, task: Any, episodes: int | None) -> Evaluation:
    """Greedy completions of held-out examples. An unscorable one (NaN) counts for nothing, not for zero."""
    examples = list(task.test)[: episodes or None]
    if not examples:
        raise UserError("The task has no held-out examples to evaluate on.")
    if getattr(task, "grader", True) is None and hasattr(module, "assess"):
        metric, values = module.assess(state, examples)
        return Evaluation.of(metric, values)
    completions, _, _ = module.act(state, examples, explore=False)
    rewards = [float(reward) for reward in task.grade(examples, completions)]
    metric, told = getattr(task, "metric", "reward"), [reward for reward in rewards if not math.isnan(reward)]
    return Evaluation.of(metric, told) if told else Evaluation(metric, math.nan, math.nan, 0)
